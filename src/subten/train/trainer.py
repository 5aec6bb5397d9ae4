"""The training run: what it reads, its loop, its checkpoints and its report."""

# Letters: B rows, S positions, T = B * S tokens, D model width, L layers, E experts

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
import os
import platform
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from subten.core import CheckpointError, ConfigError
from subten.device import detect
from subten.tokenizer import Tokenizer
from subten.train import evaluate
from subten.train.balance import load_balancing_loss, max_violation
from subten.train.config import TrainConfig
from subten.train.data import Rows, RowTable, TokenText, pack_conversations, tokenize
from subten.train.export import export_error, load_deltas, write_deltas
from subten.train.log import RunLog
from subten.train.loss import chunk_loss, distil_loss
from subten.train.model import (
    Deltas,
    DenseModel,
    LayerFn,
    dense_forward,
    init_deltas,
    make_dense_layer,
    make_student_layer,
    student_forward,
)
from subten.train.plots import plot_load
from subten.train.selfgen import self_written
from subten.weights.gguf import read_gguf
from subten.weights.upcycled import sha256_of

logger = logging.getLogger(__name__)

# What a resumed run may change without becoming another run.
_FREE_TO_CHANGE = {
    "out", "text", "heldout", "test_text", "data_dir", "gguf", "checkpoint", "workers", "steps",
    "max_seconds", "deadline_seconds", "reserve_seconds", "micro_batch_rows", "device", "compile",
    "checkpoint_every", "keep_checkpoints", "resume", "log_seconds", "json", "export_format",
    "eval", "eval_tokens", "eval_rows", "base_name", "loss_chunk_tokens", "self_batch",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among those of a torchrun: its rank, how many, and its GPU."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is; all of it is in the checkpoint."""

    step: int = 0
    tokens: int = 0
    trained_s: float = 0.0


class Trainer:
    """Deltas, optimiser and data of one run; `step` does one optimiser step."""

    def __init__(
        self, config: TrainConfig, model: DenseModel, deltas: Deltas, corpus: Rows,
        conversations: RowTable | None, world: World,
    ) -> None:  # fmt: skip
        self.config, self.model, self.world = config, model, world
        self.deltas = Deltas(*(t.requires_grad_() for t in deltas))
        self.corpus, self.conversations = corpus, conversations
        self.progress = Progress()
        dense_layer = make_dense_layer(model.shape)
        student_layer = make_student_layer(model.shape, config.top_k)
        self._chunk_fn = chunk_loss
        use_compile = model.device.type == "cuda" if config.compile is None else config.compile
        if use_compile:
            # One layer is compiled and serves all: their weights are arguments of one shape.
            dense_layer = _compiled(dense_layer)
            student_layer = _compiled(student_layer)
            self._chunk_fn = _compiled(chunk_loss)
        self._dense_layer: LayerFn = dense_layer
        self._student_layer: LayerFn = student_layer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": list(self.deltas[1:]), "lr": config.delta_lr},
                {"params": [self.deltas.router], "lr": config.router_lr},
            ],
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=model.device.type == "cuda",
        )
        self._peak_lr = [config.delta_lr, config.router_lr]

    def step(self, share: float) -> dict[str, float]:
        """One optimiser step at `share` (0 to 1) of the schedule; returns the step's numbers.

        Raises ConfigError when the loss is no longer finite.
        """
        config, progress = self.config, self.progress
        id_BS, is_corpus_B = self._batch(progress.step)
        num_tokens = config.batch_rows * config.seq_len
        count_LE = torch.zeros(self.deltas.router.shape[:2], device=self.model.device)
        totals: Tensor | None = None
        for first in range(0, config.batch_rows, config.rows_per_pass):
            rows = slice(first, first + config.rows_per_pass)
            loss, part = self._forward(id_BS[rows], is_corpus_B[rows], num_tokens, count_LE)
            loss.backward()  # type: ignore[no-untyped-call]
            totals = part if totals is None else totals + part
        assert totals is not None
        totals = self._reduce(totals)
        norm = torch.nn.utils.clip_grad_norm_(list(self.deltas), config.grad_clip)
        factor = _schedule(progress.step, share, config)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lr, strict=True):
            group["lr"] = peak * factor
        values = torch.cat([totals, norm.reshape(1)]).tolist()
        record = self._record(values, count_LE)
        if not all(math.isfinite(v) for v in values):
            raise ConfigError(
                f"delta_lr, router_lr: the loss is not finite at step {progress.step} "
                f"({record}); allowed: smaller rates"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += num_tokens * self.world.size
        return record

    def _forward(
        self, id_BS: Tensor, is_corpus_B: Tensor, num_tokens: int, count_LE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of a micro-batch, and sums over it; adds its load to the step's `count_LE`."""
        config = self.config
        target_T = id_BS[:, 1:].flatten()
        is_corpus_T = is_corpus_B.repeat_interleave(config.seq_len)
        with torch.no_grad():
            dense_BSD = dense_forward(self.model, id_BS[:, :-1], self._dense_layer)
        student_BSD, load = student_forward(
            self.model, self.deltas, id_BS[:, :-1], self._student_layer
        )
        ce_weight_T = torch.where(is_corpus_T, config.ce_weight, 0.0) / num_tokens
        kd_weight_T = torch.where(is_corpus_T, config.kd_weight, config.kd_self_weight) / num_tokens
        parts = distil_loss(
            student_BSD.flatten(0, 1), dense_BSD.flatten(0, 1), self.model.head_VD, target_T,
            ce_weight_T=ce_weight_T, kd_weight_T=kd_weight_T, chunk=config.loss_chunk_tokens,
            chunk_fn=self._chunk_fn,
        )  # fmt: skip
        counts = load.count_E.detach()
        if self.world.size > 1:
            dist.all_reduce(counts)
        count_LE += counts
        part_of_step = len(id_BS) / config.batch_rows
        aux_L = load_balancing_loss(count_LE, load.prob_E) * part_of_step
        z_L = load.z * part_of_step
        loss = parts.loss + config.aux_weight * aux_L.sum() + config.z_weight * z_L.sum()
        is_self_T = ~is_corpus_T
        sums = torch.stack(
            [
                loss.detach(),
                (parts.ce_T * is_corpus_T).sum(),
                (parts.kd_T * is_corpus_T).sum(),
                (parts.kd_T * is_self_T).sum(),
                aux_L.detach().mean(),
                z_L.detach().mean(),
            ]
        )
        return loss, sums

    def _record(self, values: list[float], count_LE: Tensor) -> dict[str, float]:
        loss, ce, kd, kd_self, aux, z, norm = values
        config = self.config
        num_self = config.num_self_rows * config.seq_len
        num_corpus = config.batch_rows * config.seq_len - num_self
        violation = max_violation(count_LE)
        return {
            "loss": loss,
            "ce": ce / max(1, num_corpus),
            "kd": kd / max(1, num_corpus),
            "kd_self": kd_self / max(1, num_self),
            "aux": aux,
            "z": z,
            "grad_norm": norm,
            "max_vio": float(violation.max()),
            "max_vio_mean": float(violation.mean()),
        }

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows of this process (B, S + 1) and which of them are corpus text."""
        num_self = self.config.num_self_rows
        num_corpus = self.config.batch_rows - num_self
        place = step * self.world.size + self.world.rank
        parts = []
        if num_corpus:
            parts.append(self.corpus(place * num_corpus, num_corpus))
        if num_self:
            assert self.conversations is not None
            parts.append(self.conversations(place * num_self, num_self))
        is_corpus = np.arange(self.config.batch_rows) < num_corpus
        # Interleaved, so that every micro-batch has its part of both.
        order = np.random.default_rng((self.config.seed, step)).permutation(self.config.batch_rows)
        ids = torch.from_numpy(np.concatenate(parts)[order])
        mask = torch.from_numpy(is_corpus[order])
        if self.model.device.type == "cuda":
            ids, mask = ids.pin_memory(), mask.pin_memory()
        return (
            ids.to(self.model.device, non_blocking=True),
            mask.to(self.model.device, non_blocking=True),
        )

    def _reduce(self, totals: Tensor) -> Tensor:
        """Mean over processes of the gradients (in place) and of the step's sums."""
        if self.world.size == 1:
            return totals
        grads = [p.grad for p in self.deltas if p.grad is not None]
        flat = torch.cat([*(g.flatten() for g in grads), totals.to(grads[0].dtype)])
        dist.all_reduce(flat)
        flat /= self.world.size
        sizes = [g.numel() for g in grads]
        *pieces, totals = flat.split([*sizes, len(totals)])
        for grad, piece in zip(grads, pieces, strict=True):
            grad.copy_(piece.view_as(grad))
        return totals

    def save(self, folder: Path) -> Path:
        """Write a checkpoint (deltas, optimiser, progress), whole or not at all."""
        target = folder / f"checkpoint-{self.progress.step:07d}"
        partial = folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors: dict[str, Tensor] = {}
        for name, value in self.deltas._asdict().items():
            tensors[f"deltas.{name}"] = value.detach()
            for key, state in self.optimizer.state[value].items():
                tensors[f"optimizer.{name}.{key}"] = state
        save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, partial / "state.safetensors")
        state_json = {
            "progress": dataclasses.asdict(self.progress),
            "config": self.config.to_dict(),
            "world_size": self.world.size,
        }
        (partial / "state.json").write_text(json.dumps(state_json, indent=2), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        for old in checkpoints(folder)[: -self.config.keep_checkpoints]:
            shutil.rmtree(old)
        return target

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint; one of another run raises ConfigError, naming what differs."""
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "state.safetensors", device="cpu")
        except Exception as error:  # safetensors has its own error type beside OSError
            raise CheckpointError(f"resume: {folder} is damaged: {error}") from error
        saved, now = state["config"], self.config.to_dict()
        differs = [k for k in now if k not in _FREE_TO_CHANGE and saved.get(k) != now[k]]
        if state["world_size"] != self.world.size:
            differs.append("world_size")
        if differs:
            raise ConfigError(f"resume: {folder.name} is of another run; differs: {', '.join(differs)}")
        with torch.no_grad():
            for name, value in self.deltas._asdict().items():
                value.copy_(tensors[f"deltas.{name}"])
                entry = {}
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    stored = tensors[f"optimizer.{name}.{key}"]
                    is_host = key == "step" and self.model.device.type == "cpu"
                    entry[key] = stored if is_host else stored.to(self.model.device)
                self.optimizer.state[value] = entry
        self.progress = Progress(**state["progress"])


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a run's folder, oldest first."""
    return sorted(p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name))


def main(config: TrainConfig) -> dict[str, Any]:
    """Train, save the deltas to `out/deltas.safetensors`, evaluate; returns the report.

    Everything is written under `config.out`: log.jsonl, checkpoints, deltas.safetensors, load.png
    and report.json, which is what is returned. Under torchrun every process calls this.
    """
    start_s = time.perf_counter()
    world = _join_world(config)
    log = RunLog(
        config.log_file,
        log_seconds=config.log_seconds,
        is_silent=not world.is_first,
        append=config.resume,
    )
    try:
        return _run(config, world, log, start_s)
    finally:
        log.close()
        if world.size > 1:
            dist.destroy_process_group()


def _run(config: TrainConfig, world: World, log: RunLog, start_s: float) -> dict[str, Any]:
    config.out.mkdir(parents=True, exist_ok=True)
    started = datetime.datetime.now(datetime.timezone.utc)
    timings: dict[str, float] = {}

    def mark(name: str) -> None:
        timings[name] = round(time.perf_counter() - start_s, 2)

    source, tokenizer, base_sha256 = _open_base(config)
    train_text, heldout, test_ids = _texts(config, tokenizer, world, log)
    mark("text_ready_s")
    log.stage("loading the dense model", 0.0)
    dtype = _compute_dtype(config, world.device)
    model = DenseModel(source, device=world.device, dtype=dtype)
    mark("model_loaded_s")
    conversations = _conversations(config, model, tokenizer, world, log, base_sha256)
    mark("self_text_ready_s")
    corpus = Rows(train_text.ids, config.seq_len + 1, config.seed)
    sample = torch.from_numpy(corpus(0, min(config.batch_rows, 16))[:, :-1]).to(world.device)
    deltas = init_deltas(
        model, sample, num_experts=config.num_experts, rank=config.rank,
        router_std=config.router_init_std, seed=config.seed,
    )  # fmt: skip
    trainer = Trainer(config, model, deltas, corpus, conversations, world)
    if config.resume:
        found = checkpoints(config.out)
        if not found:
            raise ConfigError(f"resume: no checkpoint in {config.out}")
        trainer.load(found[-1])
    report: dict[str, Any] = {
        "what": "subten train",
        "started": started.isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "versions": _versions(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "world_size": world.size,
        "config": config.to_dict(),
        "base_sha256": base_sha256,
        "text": {
            "train_tokens": len(train_text.ids),
            "train_documents": train_text.num_documents,
            "heldout_tokens": len(heldout.ids),
            "heldout_documents": heldout.num_documents,
        },
        "timings": timings,
    }
    report["training"] = _loop(config, trainer, log, start_s)
    mark("trained_s")
    if world.is_first:
        trainer.save(config.out)
        deltas_file = config.out / "deltas.safetensors"
        write_deltas(deltas_file, trainer.deltas, config, base_sha256)
        mark("saved_s")
        report["deltas_bytes"] = deltas_file.stat().st_size
        _write_report(config, report)
        if config.eval:
            _evaluate(config, trainer, tokenizer, heldout, test_ids, report, log)
            mark("evaluated_s")
        _write_report(config, report)
    if world.size > 1:
        dist.barrier()
    return report


def _loop(config: TrainConfig, trainer: Trainer, log: RunLog, start_s: float) -> dict[str, Any]:
    progress, world = trainer.progress, trainer.world
    loop_s = time.perf_counter()
    before_s = progress.trained_s
    limit_s = config.max_seconds or math.inf
    if config.deadline_seconds is not None:
        room_s = config.deadline_seconds - config.reserve_seconds - (loop_s - start_s)
        if room_s <= 0:
            raise ConfigError(
                f"deadline_seconds: {config.deadline_seconds} s less reserve_seconds leave no time "
                f"to train; {loop_s - start_s:.0f} s went by before the first step"
            )
        limit_s = min(limit_s, before_s + room_s)
    first_tokens, record, first_step_s = progress.tokens, {}, 0.0
    last_s, speed_from_s = 0.0, loop_s
    while config.steps is None or progress.step < config.steps:
        step_s = time.perf_counter()
        elapsed_s = before_s + step_s - loop_s
        share, is_over = _agree(
            world,
            max(elapsed_s / limit_s, progress.step / config.steps if config.steps else 0.0),
            elapsed_s + last_s > limit_s,
        )
        if is_over:
            break
        record = trainer.step(min(1.0, share))
        now_s = time.perf_counter()
        last_s = now_s - step_s
        progress.trained_s = before_s + now_s - loop_s
        if not first_step_s:
            # The first step compiles; speed is told without it.
            first_step_s, first_tokens, last_s = last_s, progress.tokens, 0.0
            speed_from_s = now_s
        spent_s = max(now_s - speed_from_s, 1e-9)
        speed = (progress.tokens - first_tokens) / spent_s
        record |= {
            "step": progress.step,
            "tokens": progress.tokens,
            "seconds": round(progress.trained_s, 3),
            "tokens_per_s": round(speed, 1),
            "lr": trainer.optimizer.param_groups[0]["lr"],
        }
        log.step(record, min(1.0, share))
        if config.checkpoint_every and progress.step % config.checkpoint_every == 0:
            if world.is_first:
                trainer.save(config.out)
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.trained_s, 2),
        "first_step_s": round(first_step_s, 2),
        "last": record,
    }


def _agree(world: World, share: float, is_over: bool) -> tuple[float, bool]:
    """Clocks differ between processes: the first one's counts for all."""
    if world.size == 1:
        return share, is_over
    told = torch.tensor([share, float(is_over)], dtype=torch.float64, device=world.device)
    dist.broadcast(told, src=0)
    return float(told[0]), bool(told[1] > 0)


def _schedule(step: int, share: float, config: TrainConfig) -> float:
    """Linear warm-up times cosine decay to `final_lr`."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return warm * (config.final_lr + (1 - config.final_lr) * cosine)


def _evaluate(
    config: TrainConfig, trainer: Trainer, tokenizer: Tokenizer, heldout: TokenText,
    test_ids: np.ndarray[Any, Any] | None, report: dict[str, Any], log: RunLog,
) -> None:  # fmt: skip
    """Fill in `report["eval"]`; it is written after each part, lest time runs out."""
    model, top_k = trainer.model, config.top_k
    trained = Deltas(*(t.detach() for t in trainer.deltas))
    exported = load_deltas(config.out / "deltas.safetensors", model.device)
    result: dict[str, Any] = {"seq_len": config.seq_len, "dtype": str(model.dtype)}
    report["eval"] = result
    base = model.layers[0].gate_up_weight[: model.shape.ffn_width].cpu()
    on_cpu = [Deltas(*(t.cpu() for t in d)) for d in (trained, exported)]
    result["export_error_layer_0"] = export_error(on_cpu[0], on_cpu[1], base, 0)
    states = {
        "dense": evaluate.dense_state(model),
        "moe": evaluate.student_state(model, trained, top_k),
        "moe_exported": evaluate.student_state(model, exported, top_k),
    }
    sizes = {"seq_len": config.seq_len, "rows": config.eval_rows}
    texts = {"heldout": heldout.ids[: config.eval_tokens]}
    if test_ids is not None:
        texts["test_text"] = test_ids
    count_LE = evaluate.expert_load(model, exported, texts["heldout"], top_k=top_k, **sizes)
    result["load"] = count_LE.long().tolist()
    result["balance"] = evaluate.balance_report(count_LE)
    has_plot = plot_load(
        count_LE, config.out / "load.png", f"held-out load, aux_weight {config.aux_weight:g}"
    )
    if not has_plot:
        logger.info("matplotlib is not installed: no load.png")
    done, total = 0, len(texts) * len(states)
    for text_name, ids in texts.items():
        row: dict[str, Any] = {}
        for name, state_fn in states.items():
            log.stage("evaluating", done / total, f"{text_name} {name}")
            row[name] = evaluate.perplexity(model, state_fn, ids, **sizes)
            done += 1
        for name in ("moe", "moe_exported"):
            row[f"{name}_to_dense"] = row[name]["perplexity"] / row["dense"]["perplexity"]
        result[text_name] = row
        _write_report(config, report)
    log.stage("evaluating", 1.0, "expert difference, answers")
    few = heldout.ids[: min(config.eval_tokens, 16 * config.seq_len + 1)]
    result["expert_difference"] = evaluate.expert_difference(
        model, exported, few, top_k=top_k, **sizes
    )
    result["answers"] = {
        name: evaluate.greedy_answers(model, states[name], tokenizer)
        for name in ("dense", "moe_exported")
    }


def _write_report(config: TrainConfig, report: dict[str, Any]) -> None:
    partial = config.out / ".report.partial"
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.replace(config.out / "report.json")


def _texts(
    config: TrainConfig, tokenizer: Tokenizer, world: World, log: RunLog
) -> tuple[TokenText, TokenText, np.ndarray[Any, Any] | None]:
    """Training text (all files), held-out text, and the test text's tokens."""

    def read(path: Path) -> TokenText:
        return tokenize(
            path, tokenizer, config.data_folder, workers=config.workers, progress=log.stage
        )

    if world.is_first:
        for path in (*config.text, *([config.heldout] if config.heldout else [])):
            read(path)
    _barrier(world)
    parts = [read(path) for path in config.text]
    if config.heldout is not None:
        heldout = read(config.heldout)
    else:
        last = parts[-1]
        cut = last.num_documents - config.heldout_documents
        if cut < 1:
            raise ConfigError(
                f"heldout_documents: got {config.heldout_documents}; allowed: fewer than the "
                f"{last.num_documents} documents of {config.text[-1].name}"
            )
        heldout = last.documents(cut, last.num_documents)
        parts[-1] = last.documents(0, cut)
    if len(parts) == 1:
        train_text = parts[0]
    else:
        shift = np.cumsum([0, *(len(p.ids) for p in parts[:-1])])
        train_text = TokenText(
            ids=np.concatenate([p.ids for p in parts]),
            ends=np.concatenate([p.ends + s for p, s in zip(parts, shift, strict=True)]),
        )
    test_ids = None
    if config.test_text is not None:
        try:
            text = config.test_text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"test_text: cannot read {config.test_text}: {error}") from error
        test_ids = np.array(tokenizer.encode(text), dtype=np.int64)
    return train_text, heldout, test_ids


def _conversations(
    config: TrainConfig, model: DenseModel, tokenizer: Tokenizer, world: World, log: RunLog,
    base_sha256: str,
) -> RowTable | None:  # fmt: skip
    if config.num_self_rows == 0:
        return None
    if tokenizer.chat_template is None:
        raise ConfigError("self_share: the model has no chat template; allowed: 0")
    if world.is_first:
        self_written(model, tokenizer, config, base_sha256, log.stage)
    _barrier(world)
    ids, lengths = self_written(model, tokenizer, config, base_sha256, log.stage)
    return RowTable(pack_conversations(ids, lengths, config.seq_len + 1), config.seed)


def _open_base(config: TrainConfig) -> tuple[Any, Tokenizer, str]:
    """The dense checkpoint, its tokenizer and its hash."""
    if config.gguf is not None:
        checkpoint = read_gguf(config.gguf)
        return checkpoint, checkpoint.tokenizer(), sha256_of(config.gguf)
    assert config.checkpoint is not None
    folder = FolderCheckpoint(config.checkpoint)
    return folder, folder.tokenizer(), folder.sha256()


class FolderCheckpoint:
    """A dense Hugging Face folder, for training alone: config and tensors by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = self._json("config.json")
        index = folder / "model.safetensors.index.json"
        self._files: dict[str, str] = {}
        if index.is_file():
            self._files = self._json(index.name)["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")

    def tensor(self, name: str) -> Tensor:
        """One tensor in float32; a missing one raises CheckpointError."""
        if name not in self._files:
            raise CheckpointError(f"{self.folder.name}: tensor {name!r} is missing")
        with safe_open(self.folder / self._files[name], framework="pt") as file:
            value: Tensor = file.get_tensor(name)
        return value.float()

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer; end tokens are the model's."""
        eos = self.config.get("eos_token_id")
        ids = None if eos is None else eos if isinstance(eos, list) else [eos]
        config_file = self.folder / "tokenizer_config.json"
        return Tokenizer.from_file(
            self.folder / "tokenizer.json",
            config_file if config_file.is_file() else None,
            eos_token_ids=ids,
        )

    def sha256(self) -> str:
        """Hash over the hashes of the weight files."""
        import hashlib

        files = sorted(set(self._files.values()))
        return hashlib.sha256("".join(sha256_of(self.folder / f) for f in files).encode()).hexdigest()

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder}: cannot read {name}: {error}") from error
        return value


def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False, fullgraph=True)


def _compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    if config.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32


def _join_world(config: TrainConfig) -> World:
    """Join the processes of a torchrun, if this is one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(rank=0, size=1, device=detect(config.device).torch_device)
    local = int(os.environ["LOCAL_RANK"])
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", local) if name.startswith("cuda") else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(minutes=60)
    )
    return World(rank=dist.get_rank(), size=size, device=device)


def _barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()


def _versions() -> dict[str, str]:
    import importlib.metadata

    names = ("subten", "torch", "tokenizers", "safetensors", "gguf", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
