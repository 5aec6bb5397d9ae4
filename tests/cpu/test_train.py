"""Training by upcycling: the untrained student is the dense model, and a run does what it says."""

from __future__ import annotations

import json
import lzma
import multiprocessing
import os
import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_llama import (
    TinyShape,
    dense_model,
    hf_model,
    hf_tensors,
    sample_text,
    vocabulary,
    write_gguf,
)
from typer.testing import CliRunner

from subten.core import ConfigError
from subten.tokenizer import Tokenizer
from subten.train import data, evaluate, selfgen
from subten.train.__main__ import make_command
from subten.train.config import TrainConfig
from subten.train.dense import DenseModel
from subten.train.export import load_deltas
from subten.train.loss import distil_loss
from subten.train.model import Deltas, init_deltas
from subten.train.student import Student, checkpoints
from subten.train.trainer import main
from subten.weights.gguf import read_gguf

CPU = torch.device("cpu")
SHAPE = TinyShape()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model and some text."""
    path = tmp_path_factory.mktemp("train")
    write_gguf(path / "base.gguf", SHAPE, hf_tensors(SHAPE, seed=3))
    (path / "text.txt").write_text(sample_text(40))
    return path


def config_of(folder: Path, out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "out": out,
        "gguf": folder / "base.gguf",
        "text": (folder / "text.txt",),
        "data_dir": folder / "data",
        "heldout_documents": 4,
        "workers": 1,
        "num_experts": 4,
        "rank": 2,
        "steps": 6,
        "batch_rows": 4,
        "seq_len": 16,
        "self_tokens": 200,
        "self_length": 64,
        "self_batch": 64,
        "self_share": 0.25,
        "warmup_steps": 2,
        "delta_lr": 0.01,
        "eval": False,
    }
    return TrainConfig(**{**values, **changes})


def dense_of(folder: Path) -> DenseModel:
    return dense_model(folder / "base.gguf")


def untrained(model: DenseModel, num_experts: int = 4, rank: int = 2) -> Deltas:
    sample = torch.randint(0, model.config.vocab_size, (4, 32))
    return init_deltas(model, sample, num_experts=num_experts, rank=rank, router_std=1.0, seed=0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The model


@pytest.mark.parametrize(
    ("num_experts", "top_k", "rank"), [(4, 2, 2), (8, 1, 1), (5, 3, 7), (1, 1, 1)]
)
def test_untrained_experts_compute_the_dense_model(
    folder: Path, num_experts: int, top_k: int, rank: int
) -> None:
    model = dense_of(folder)
    deltas = untrained(model, num_experts, rank)
    id_BS = torch.randint(0, model.config.vocab_size, (2, 23))
    dense = evaluate.dense_state(model)(id_BS)
    student = evaluate.student_state(model, deltas, top_k)(id_BS)
    # The weights of a token's experts sum to 1 within 2^-24 a term, through 2 layers.
    assert (dense - student).abs().max() < 1e-5 * dense.abs().max()


def test_experts_start_apart_in_their_factors_and_evenly_loaded(folder: Path) -> None:
    model = dense_of(folder)
    deltas = untrained(model)
    assert (deltas.gate_a[:, 0] - deltas.gate_a[:, 1]).abs().min() > 0
    assert all(float(b.abs().max()) == 0 for b in (deltas.gate_b, deltas.up_b, deltas.down_b))
    ids = torch.randint(0, model.config.vocab_size, (2000,)).numpy()
    load = evaluate.expert_load(model, deltas, ids, top_k=2, seq_len=16, rows=8)
    assert load.sum().item() == 2 * SHAPE.layers * 1999
    assert evaluate.balance_report(load)["max_vio_max"] < 0.6


def test_the_student_equals_experts_computed_one_by_one(folder: Path) -> None:
    model = dense_of(folder)
    start = untrained(model, num_experts=5, rank=3)
    deltas = Deltas(*(torch.randn_like(t) * 0.2 for t in start))
    id_BS = torch.randint(0, model.config.vocab_size, (2, 11))
    got = evaluate.student_state(model, deltas, 2)(id_BS)
    one_by_one = _plain_student(model, deltas, id_BS)
    # Float32 sums in another order; a wrong mask or weight differs by more than 0.1.
    assert (got - one_by_one).abs().max() < 2e-5 * one_by_one.abs().max()


def _plain_student(model: DenseModel, deltas: Deltas, id_BS: torch.Tensor) -> torch.Tensor:
    """The MoE with each expert's weights merged and each token's experts run in turn."""
    from subten.train.dense import make_attention

    shape, width = model.shape, (model.shape.width,)
    x_BSD = F.embedding(id_BS, model.embed_VD)
    cos, sin = model.rope(id_BS.shape[1])
    attention = make_attention(shape)
    for layer, delta in zip(model.layers, deltas.by_layer(), strict=True):
        x_BSD = attention(x_BSD, layer, cos, sin)
        h_TD = F.rms_norm(x_BSD, width, layer.ffn_norm_D, shape.norm_eps).flatten(0, 1)
        gate, up = layer.gate_up_weight.chunk(2)
        out = torch.zeros_like(h_TD)
        for t, h_D in enumerate(h_TD):
            prob_E = (delta.router @ h_D).softmax(-1)
            top, chosen = prob_E.topk(2)
            for weight, e in zip(top / top.sum(), chosen.tolist(), strict=True):
                g = (gate + delta.gate_b[e].T @ delta.gate_a[e]) @ h_D
                u = (up + delta.up_b[e].T @ delta.up_a[e]) @ h_D
                down = layer.down_weight + delta.down_b[e].T @ delta.down_a[e]
                out[t] += weight * (down @ (F.silu(g) * u))
        x_BSD = x_BSD + out.view_as(x_BSD)
    return F.rms_norm(x_BSD, width, model.norm_D, shape.norm_eps)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_loss_and_its_gradient_equal_autograd(generator: torch.Generator, chunk: int) -> None:
    num_tokens, width, vocab = 13, 8, 31
    student = torch.randn(num_tokens, width, generator=generator, requires_grad=True)
    dense = torch.randn(num_tokens, width, generator=generator)
    head = torch.randn(vocab, width, generator=generator)
    target = torch.randint(0, vocab, (num_tokens,), generator=generator)
    ce_weight, kd_weight = torch.rand(2, num_tokens, generator=generator)
    parts = distil_loss(
        student, dense, head, target, ce_weight_T=ce_weight, kd_weight_T=kd_weight, chunk=chunk
    )
    (3 * parts.loss).backward()
    got, student.grad = student.grad, None
    log_student = (student @ head.T).log_softmax(-1)
    log_dense = (dense @ head.T).log_softmax(-1)
    ce = F.nll_loss(log_student, target, reduction="none")
    kd = F.kl_div(log_student, log_dense, log_target=True, reduction="none").sum(-1)
    (3 * (ce_weight * ce + kd_weight * kd).sum()).backward()
    torch.testing.assert_close(parts.ce_T, ce.detach())
    torch.testing.assert_close(parts.kd_T, kd.detach())
    torch.testing.assert_close(got, student.grad, rtol=1e-4, atol=1e-5)


def test_expert_difference_is_zero_before_training_and_not_after(folder: Path) -> None:
    model = dense_of(folder)
    start = untrained(model)
    ids = torch.randint(0, model.config.vocab_size, (100,)).numpy()
    sizes = {"top_k": 2, "seq_len": 16, "rows": 4}
    same = evaluate.expert_difference(model, start, ids, **sizes)
    apart = Deltas(*(t + 0.3 * torch.randn_like(t) for t in start))
    other = evaluate.expert_difference(model, apart, ids, **sizes)
    assert same["tokens"] == other["tokens"] == 99
    for name in ("permute", "others"):
        assert same[name]["mean_kl"] < 1e-6
        assert other[name]["share_argmax_changed"] > 0.1


# Data


def test_pieces_encode_as_the_whole_document(folder: Path) -> None:
    tokenizer = read_gguf(folder / "base.gguf").tokenizer()
    text = "the cat\n\nsat\n \n\n in\n\n\na hat \n\n12\n\n then\n\nthe end\n\n"
    for size in (0, 1, 5, 10**6):
        pieces = data.split_document(text, size)
        assert "".join(pieces) == text
        joined = [i for piece in pieces for i in tokenizer.encode_part(piece)]
        assert joined == tokenizer.encode_part(text)
    assert len(data.split_document(text, 0)) > 2


@pytest.mark.parametrize("workers", [1, 2])
def test_text_is_tokenised_once_and_the_same_in_processes(
    folder: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = sample_text(700)
    packed = tmp_path / "t.txt.xz"
    packed.write_bytes(lzma.compress(text.encode(), preset=0))
    monkeypatch.setattr(data, "_SMALL_BYTES", 0)
    tokenizer = read_gguf(folder / "base.gguf").tokenizer()
    shown: list[float] = []
    tokens = data.tokenize(
        packed, tokenizer, tmp_path, workers=workers, progress=lambda _, share: shown.append(share)
    )
    assert tokens.num_documents == 700
    assert shown
    assert tokens.ids.dtype == np.uint16
    documents = [d.strip("\n") for d in text.split("<|endoftext|>\n")]
    for number in (0, 1, 699):
        one = tokens.documents(number, number + 1)
        assert one.ids.tolist() == [*tokenizer.encode_part(documents[number]), 0]
    monkeypatch.setattr(data, "_tokenize_all", None)
    again = data.tokenize(packed, tokenizer, tmp_path)
    assert np.array_equal(again.ids, tokens.ids)


def test_rows_cover_an_epoch_and_do_not_depend_on_how_they_are_asked() -> None:
    ids = np.arange(1003, dtype=np.uint16)
    rows = data.Rows(ids, 10, seed=4)
    epoch = rows(0, 99)
    assert (np.diff(epoch, axis=1) == 1).all()
    assert len(np.unique(epoch)) == 990
    assert np.array_equal(data.Rows(ids, 10, seed=4)(150, 30), rows(150, 30))
    assert not np.array_equal(rows(0, 20), rows(99, 20))
    with pytest.raises(ConfigError, match="fewer"):
        data.Rows(ids[:9], 10, seed=4)


def test_windows_make_every_token_but_the_first_a_target_once() -> None:
    for length in (1, 2, 31, 33, 64, 65):
        ids = np.arange(length)
        targets = [t for w in data.windows(ids, 16, 3) for row in w for t in row[1:].tolist()]
        assert targets == list(range(1, length))


def test_conversations_are_packed_whole() -> None:
    lengths = np.array([4, 3, 5, 2, 9, 1])
    ids = np.concatenate([[100 * i + j for j in range(n)] for i, n in enumerate(lengths)])
    rows = data.pack_conversations(ids, lengths, 8)
    assert rows.tolist() == [
        [0, 1, 2, 3, 100, 101, 102, 200],
        [300, 301, 400, 401, 402, 403, 404, 405],
    ]


def test_conversations_go_from_prompt_to_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scripted model: what it says, and what is put between the turns, lands in order."""
    script = {5: 6, 6: 2, 12: 7, 7: 8, 8: 2}  # 6 then end of turn; after the bridge 7, 8, end

    def step(_self: Any, token_B: torch.Tensor, _position: int) -> torch.Tensor:
        logits = torch.full((len(token_B), 20), -50.0)
        for row, token in enumerate(token_B.tolist()):
            logits[row, script.get(token, 9)] = 50.0
        return logits

    monkeypatch.setattr(selfgen._Cache, "step", step)
    written = selfgen.write_conversations(
        dense_of(folder),
        [[1, 5], [1, 3, 5], [9]],
        bridge=[2, 11, 12],
        end_ids=[2],
        length=32,
        temperature=1.0,
        top_p=0.9,
        generator=torch.Generator().manual_seed(0),
    )
    assert [ids.tolist() for ids in written] == [
        [1, 5, 6, 2, 11, 12, 7, 8, 2],
        [1, 3, 5, 6, 2, 11, 12, 7, 8, 2],
    ]


def test_the_cached_step_equals_the_whole_forward(folder: Path) -> None:
    model = dense_of(folder)
    id_BS = torch.randint(0, model.config.vocab_size, (3, 70))
    state = evaluate.dense_state(model)(id_BS)
    expected = evaluate.logits(model, state.flatten(0, 1)).view(3, 70, -1)
    cache = selfgen._Cache(model, 3, 70)
    for position in range(70):
        got = cache.step(id_BS[:, position], position)
        assert (got - expected[:, position]).abs().max() < 1e-4 * expected.abs().max()


def test_the_nucleus_holds_what_it_should(generator: torch.Generator) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)
    drawn = selfgen._sample(logits, 1.0, 0.75, generator)
    share = torch.bincount(drawn, minlength=4) / 4000
    # 0.5 and 0.3 (the one that passes 0.75) stay: 5/8 and 3/8, within 4 deviations of 0.0077.
    assert abs(share[0] - 0.625) < 0.031
    assert share[2:].sum() == 0
    assert (selfgen._sample(logits, 1.0, 0.0, generator) == 0).all()


# The run


def test_loss_falls_and_the_report_is_whole(folder: Path, tmp_path: Path) -> None:
    config = config_of(
        folder, tmp_path, steps=40, delta_lr=0.02, eval=True, test_text=folder / "text.txt"
    )
    report = main(config)
    log = lines(tmp_path / "log.jsonl")
    assert [entry["step"] for entry in log] == list(range(1, 41))
    # The untrained student is the dense model: no divergence; a random model learns a lot.
    assert abs(log[0]["kd"]) < 1e-5
    assert log[-1]["ce"] < log[0]["ce"] - 2
    assert log[-1]["tokens"] == 40 * 4 * 16
    assert json.loads((tmp_path / "report.json").read_text()) == report
    result = report["eval"]
    for text in ("heldout", "test_text"):
        assert result[text]["moe_to_dense"] < 0.5
        assert result[text]["moe_exported"]["perplexity"] == pytest.approx(
            result[text]["moe"]["perplexity"], rel=0.02
        )
    assert len(result["balance"]["max_vio_per_layer"]) == SHAPE.layers
    assert set(result["answers"]) == {"dense", "moe_exported"}
    assert (tmp_path / "load.png").stat().st_size > 0
    assert report["deltas_bytes"] == (tmp_path / "deltas.safetensors").stat().st_size
    assert str(folder) not in json.dumps(report)


def test_the_exported_file_says_what_made_it(folder: Path, tmp_path: Path) -> None:
    from subten.weights.upcycled import read_deltas, sha256_of

    main(config_of(folder, tmp_path, steps=1, base_name="Tiny"))
    file = read_deltas(tmp_path / "deltas.safetensors")
    told = file.metadata
    assert (told["base_model"], told["licence"]) == ("Tiny", "Apache-2.0")
    assert file.base_sha256 == sha256_of(folder / "base.gguf")
    assert (told["num_experts"], told["top_k"], told["rank"]) == ("4", "2", "2")
    assert json.loads(told["train_config"])["batch_rows"] == 4
    assert load_deltas(tmp_path / "deltas.safetensors", CPU).router.shape == (2, 4, SHAPE.width)


def test_a_resumed_run_is_the_same_run(folder: Path, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    main(config_of(folder, whole, checkpoint_every=3, keep_checkpoints=2))
    half.mkdir()
    shutil.copytree(whole / "checkpoint-0000003", half / "checkpoint-0000003")
    main(config_of(folder, half, resume=True))
    for name in ("checkpoint-0000006/state.safetensors", "deltas.safetensors"):
        first, second = load_file(whole / name), load_file(half / name)
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]), (name, key)
    assert [entry["step"] for entry in lines(half / "log.jsonl")] == [4, 5, 6]
    assert not (half / "checkpoint-0000003").exists()


def test_resuming_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        main(config_of(folder, tmp_path, resume=True))
    main(config_of(folder, tmp_path, steps=1))
    with pytest.raises(ConfigError, match="differs: seq_len, seed"):
        main(config_of(folder, tmp_path, seed=1, seq_len=8, resume=True))


def test_micro_batches_and_processes_do_not_change_a_step(folder: Path, tmp_path: Path) -> None:
    """Four rows at once, two by two in one process, and two processes of two rows."""
    # Two processes of one machine may have a single GPU.
    base = config_of(folder, tmp_path / "one", steps=2, self_share=0.5, device="cpu")
    main(base)
    main(replace(base, out=tmp_path / "micro", micro_batch_rows=2, aux_weight=0.0))
    main(replace(base, out=tmp_path / "no_aux", aux_weight=0.0))
    _run_processes(replace(base, out=tmp_path / "two", batch_rows=2))
    # Balance over micro-batches is that of the tokens so far in the step: compared without it.
    for out, whole in (("micro", "no_aux"), ("two", "one")):
        expected = load_file(tmp_path / whole / "checkpoint-0000002" / "state.safetensors")
        got = load_file(tmp_path / out / "checkpoint-0000002" / "state.safetensors")
        for name in ("router", "gate_a", "gate_b", "down_b"):
            # Float32 sums in another order; Adam's first steps divide by them, so what is far
            # below its epsilon may turn: a missing or doubled row moves everything by the rate.
            error = (got[f"deltas.{name}"] - expected[f"deltas.{name}"]).abs()
            assert error.mean() < 0.01 * base.delta_lr, (out, name)
    one, two = (lines(tmp_path / out / "log.jsonl") for out in ("one", "two"))
    assert len(one) == len(two) == 2
    for key in ("aux", "z", "max_vio", "max_vio_mean", "loss", "ce", "kd_self", "grad_norm"):
        assert two[0][key] == pytest.approx(one[0][key], rel=1e-4, abs=1e-6), key


def _run_processes(config: TrainConfig) -> None:
    """Run `main` in two processes as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_one_of_two, args=(config, rank, port)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=240)
        assert worker.exitcode == 0


def _one_of_two(config: TrainConfig, rank: int, port: int) -> None:
    os.environ.update(
        WORLD_SIZE="2",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    main(config)


def test_a_time_limit_ends_the_loop_before_it(folder: Path, tmp_path: Path) -> None:
    report = main(config_of(folder, tmp_path, steps=None, max_seconds=1.5))
    assert report["training"]["steps"] > 1
    # A step that does not fit is not begun; 0.5 s for a machine that stalls in the last one.
    assert report["training"]["seconds"] < 2.0
    with pytest.raises(ConfigError, match="deadline_seconds"):
        main(config_of(folder, tmp_path, steps=None, deadline_seconds=5.0))


def test_an_interrupt_ends_after_a_whole_step_with_a_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Student.step

    def interrupted(self: Student, share: float) -> dict[str, float]:
        if self.progress.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, share)

    monkeypatch.setattr(Student, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(config_of(folder, tmp_path, steps=50))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-0000002"]
    assert len(lines(tmp_path / "log.jsonl")) == 2


def test_a_loss_that_is_not_finite_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not finite at step \d"):
        main(config_of(folder, tmp_path, delta_lr=1e30, warmup_steps=0, steps=20))


def test_a_hugging_face_folder_trains_too(folder: Path, tmp_path: Path) -> None:
    tensors = hf_tensors(SHAPE, seed=3)
    source = tmp_path / "hf"
    hf_model(SHAPE, tensors).save_pretrained(source)
    read_gguf(folder / "base.gguf").tokenizer().save(source)
    main(config_of(folder, tmp_path / "a", steps=2))
    main(config_of(folder, tmp_path / "b", steps=2, gguf=None, checkpoint=source))
    first, second = (lines(tmp_path / out / "log.jsonl") for out in "ab")
    assert len(first) == len(second) == 2
    assert first[-1]["loss"] == pytest.approx(second[-1]["loss"], rel=1e-4)


# Settings


def test_settings_come_from_a_file_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('out = "o"\ngguf = "g"\ntext = ["a", "b"]\nsteps = 3\nkd_weight = 2\n')
    config = TrainConfig.load(file, {"steps": 4})
    assert (config.steps, config.kd_weight, config.text) == (4, 2.0, (Path("a"), Path("b")))
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rnak": 3}, "rnak"),
        ({"rank": 0}, "rank"),
        ({"rank": 1.5}, "rank"),
        ({"rank": True}, "rank"),
        ({"top_k": 9}, "top_k"),
        ({"gguf": None}, "gguf"),
        ({"checkpoint": "c"}, "checkpoint"),
        ({"steps": None}, "steps"),
        ({"text": []}, "text"),
        ({"text": "a.txt"}, "text"),
        ({"micro_batch_rows": 3}, "micro_batch_rows"),
        ({"export_format": "int3"}, "int8, bfloat16"),
        ({"self_share": 1.5}, "self_share"),
        ({"delta_lr": -1.0}, "delta_lr"),
        ({"delta_lr": float("nan")}, "delta_lr"),
        ({"self_tokens": 10}, "self_tokens"),
        ({"beta2": 1.0}, "beta2"),
        ({"out": None}, "out"),
    ],
)
def test_a_bad_setting_is_named(changes: dict[str, Any], named: str) -> None:
    values = {"out": "o", "gguf": "g", "text": ["a"], "steps": 1, **changes}
    with pytest.raises(ConfigError, match=named):
        TrainConfig.from_dict(values)


def test_the_shipped_settings_are_valid() -> None:
    shipped = Path(__file__).parents[2] / "configs" / "smollm2-moe.toml"
    given = {"out": "o", "gguf": "g", "text": ["a"], "max_seconds": 1}
    assert TrainConfig.load(shipped, given).num_experts == 8


def test_the_command_has_a_flag_for_each_setting(folder: Path, tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(make_command())
    runner = CliRunner()
    flags = ["--out", str(tmp_path), "--gguf", str(folder / "base.gguf"), "--steps", "1"]
    flags += ["--text", str(folder / "text.txt"), "--no-eval", "--self-share", "0"]
    flags += ["--seq-len", "16", "--batch-rows", "2", "--heldout-documents", "2", "--rank", "1"]
    done = runner.invoke(app, flags)
    assert done.exit_code == 0, done.output
    assert lines(tmp_path / "log.jsonl")[0]["step"] == 1
    refused = runner.invoke(app, [*flags, "--rank", "0"])
    assert refused.exit_code == 2
    assert "rank: got 0" in refused.output


def test_a_model_without_a_chat_template_needs_no_self_written_text(
    folder: Path, tmp_path: Path
) -> None:
    plain = write_gguf(tmp_path / "p.gguf", SHAPE, hf_tensors(SHAPE), chat_template=None)
    with pytest.raises(ConfigError, match="chat template"):
        main(config_of(folder, tmp_path, gguf=plain))
    main(config_of(folder, tmp_path, gguf=plain, self_share=0.0, steps=1))
    assert isinstance(read_gguf(plain).tokenizer(), Tokenizer)
    assert len(vocabulary()) == read_gguf(plain).config["vocab_size"]
