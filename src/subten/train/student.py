"""The student in training: deltas, optimiser, one step, and checkpoints that resume exactly."""

# Letters: B rows, S positions, T = B * S tokens, D model width, L layers, E experts

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from subten.core import CheckpointError, ConfigError
from subten.train.balance import load_balancing_loss, max_violation
from subten.train.config import TrainConfig
from subten.train.data import Array
from subten.train.dense import DenseModel, dense_forward, make_dense_layer
from subten.train.loss import chunk_loss, distil_loss
from subten.train.model import Deltas, make_student_layer, student_forward
from subten.train.world import World

RowsFn = Callable[[int, int], Array]

# What a resumed run may change without becoming another run: places, limits, what is told.
_FREE_TO_CHANGE = {
    "out", "text", "heldout", "test_text", "data_dir", "gguf", "checkpoint", "workers", "steps",
    "max_seconds", "deadline_seconds", "reserve_seconds", "micro_batch_rows", "device", "compile",
    "checkpoint_every", "keep_checkpoints", "resume", "log_seconds", "json", "export_format",
    "eval", "eval_tokens", "eval_rows", "base_name", "loss_chunk_tokens", "self_batch",
}  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is; all of it is in the checkpoint."""

    step: int = 0
    tokens: int = 0
    trained_s: float = 0.0


class Student:
    """Deltas over a frozen dense model, with what trains them.

    `corpus` and `conversations` give rows of `seq_len` + 1 token ids by number: (start, count) to
    an array (count x length). A step's rows depend on the step, the seed and the number of
    processes alone.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: DenseModel,
        deltas: Deltas,
        *,
        corpus: RowsFn,
        conversations: RowsFn | None,
        world: World,
    ) -> None:
        self.config, self.model, self.world = config, model, world
        if world.size > 1:
            # Devices may round the calibration of the routers apart.
            for tensor in deltas:
                dist.broadcast(tensor, src=0)
        self.deltas = Deltas(*(t.requires_grad_() for t in deltas))
        self.corpus, self.conversations = corpus, conversations
        self.progress = Progress()
        self._dense_layer = make_dense_layer(model.shape)
        self._student_layer = make_student_layer(model.shape, config.top_k)
        self._chunk_fn = chunk_loss
        if model.device.type == "cuda" if config.compile is None else config.compile:
            # One layer is compiled and serves all: weights are arguments, of the same shapes.
            self._dense_layer = _compiled(self._dense_layer)
            self._student_layer = _compiled(self._student_layer)
            self._chunk_fn = _compiled(chunk_loss)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": list(self.deltas[1:]), "lr": config.delta_lr},
                {"params": [self.deltas.router], "lr": config.router_lr},
            ],
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=model.device.type == "cuda",
        )

    def step(self, share: float) -> dict[str, float]:
        """One optimiser step at `share` (0 to 1) of the schedule; returns the step's numbers.

        Raises ConfigError when the loss is no longer finite; nothing has been updated then.
        """
        config, progress = self.config, self.progress
        id_BS, is_corpus_B = self._batch(progress.step)
        count_LE = torch.zeros(self.deltas.router.shape[:2], device=self.model.device)
        totals = torch.zeros(6, device=self.model.device)
        for first in range(0, config.batch_rows, config.rows_per_pass):
            rows = slice(first, first + config.rows_per_pass)
            loss, sums = self._forward(id_BS[rows], is_corpus_B[rows], count_LE)
            loss.backward()
            totals = totals + sums
        totals = self._reduce(totals)
        norm = torch.nn.utils.clip_grad_norm_(list(self.deltas), config.grad_clip)
        record = self._record(torch.cat([totals, norm.reshape(1)]).tolist(), count_LE)
        if not all(math.isfinite(value) for value in record.values()):
            raise ConfigError(
                f"delta_lr, router_lr: got {config.delta_lr:g}, {config.router_lr:g}; the loss is "
                f"not finite at step {progress.step} ({record}); allowed: smaller rates"
            )
        factor = schedule(progress.step, share, config)
        peaks = (config.delta_lr, config.router_lr)
        for group, peak in zip(self.optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += config.batch_rows * config.seq_len * self.world.size
        return record | {"lr": config.delta_lr * factor}

    def _forward(
        self, id_BS: Tensor, is_corpus_B: Tensor, count_LE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of a micro-batch, and sums over it; adds its load to the step's `count_LE`."""
        config, model = self.config, self.model
        input_BS, target_T = id_BS[:, :-1], id_BS[:, 1:].flatten()
        with torch.no_grad():
            dense_BSD = dense_forward(model, input_BS, self._dense_layer)
        student_BSD, load = student_forward(model, self.deltas, input_BS, self._student_layer)
        is_corpus_T = is_corpus_B.repeat_interleave(config.seq_len)
        num_tokens = config.batch_rows * config.seq_len
        kd_weight_T = torch.where(is_corpus_T, config.kd_weight, config.kd_self_weight)
        parts = distil_loss(
            student_BSD.flatten(0, 1),
            dense_BSD.flatten(0, 1),
            model.head_VD,
            target_T,
            ce_weight_T=torch.where(is_corpus_T, config.ce_weight, 0.0) / num_tokens,
            kd_weight_T=kd_weight_T / num_tokens,
            chunk=config.loss_chunk_tokens,
            chunk_fn=self._chunk_fn,
        )
        counts = load.count_E.detach()
        if self.world.size > 1:
            dist.all_reduce(counts)
        count_LE += counts
        part_of_step = len(id_BS) / config.batch_rows
        aux_L = load_balancing_loss(count_LE, load.prob_E) * part_of_step
        z_L = load.z * part_of_step
        loss = parts.loss + config.aux_weight * aux_L.sum() + config.z_weight * z_L.sum()
        sums = [
            loss,
            (parts.ce_T * is_corpus_T).sum(),
            (parts.kd_T * is_corpus_T).sum(),
            (parts.kd_T * ~is_corpus_T).sum(),
            aux_L.mean(),
            z_L.mean(),
        ]
        return loss, torch.stack([value.detach() for value in sums])

    def _record(self, values: list[float], count_LE: Tensor) -> dict[str, float]:
        """The step's numbers: losses are means over tokens, `aux` and `z` means over layers."""
        loss, ce, kd, kd_self, aux, z, norm = values
        num_self = self.config.num_self_rows * self.config.seq_len
        num_corpus = self.config.batch_rows * self.config.seq_len - num_self
        violation_L = max_violation(count_LE)
        return {
            "loss": loss,
            "ce": ce / max(1, num_corpus),
            "kd": kd / max(1, num_corpus),
            "kd_self": kd_self / max(1, num_self),
            "aux": aux,
            "z": z,
            "grad_norm": norm,
            "max_vio": float(violation_L.max()),
            "max_vio_mean": float(violation_L.mean()),
        }

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows of this process (B, S + 1) and which of them are corpus text."""
        num_self = self.config.num_self_rows
        num_corpus = self.config.batch_rows - num_self
        place = step * self.world.size + self.world.rank
        parts: list[Array] = []
        if num_corpus:
            parts.append(self.corpus(place * num_corpus, num_corpus))
        if num_self:
            assert self.conversations is not None, num_self
            parts.append(self.conversations(place * num_self, num_self))
        is_corpus = np.arange(self.config.batch_rows) < num_corpus
        # Mixed, so that every micro-batch has its part of both.
        order = np.random.default_rng((self.config.seed, step)).permutation(self.config.batch_rows)
        ids = torch.from_numpy(np.concatenate(parts)[order])
        mask = torch.from_numpy(is_corpus[order])
        if self.model.device.type == "cuda":
            ids, mask = ids.pin_memory(), mask.pin_memory()
        device = self.model.device
        return ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)

    def _reduce(self, totals: Tensor) -> Tensor:
        """Mean over processes of the gradients (in place) and of the step's sums."""
        if self.world.size == 1:
            return totals
        grads = [p.grad for p in self.deltas if p.grad is not None]
        flat = torch.cat([*(g.flatten() for g in grads), totals])
        dist.all_reduce(flat)
        flat /= self.world.size
        *pieces, totals = flat.split([*(g.numel() for g in grads), len(totals)])
        for grad, piece in zip(grads, pieces, strict=True):
            grad.copy_(piece.view_as(grad))
        return totals

    def save(self, folder: Path) -> Path:
        """Write a checkpoint (deltas, optimiser, progress), whole or not at all; drop old ones."""
        target = folder / f"checkpoint-{self.progress.step:07d}"
        partial = folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors: dict[str, Tensor] = {}
        for name, value in self.deltas._asdict().items():
            tensors[f"deltas.{name}"] = value.detach().cpu().contiguous()
            for key, state in self.optimizer.state[value].items():
                tensors[f"optimizer.{name}.{key}"] = state.cpu().contiguous()
        save_file(tensors, partial / "state.safetensors")
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
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"resume: {folder} is damaged: {error}") from error
        saved, now = state["config"], self.config.to_dict()
        differs = [k for k in now if k not in _FREE_TO_CHANGE and saved.get(k) != now[k]]
        if state["world_size"] != self.world.size:
            differs.append("world_size")
        if differs:
            names = ", ".join(differs)
            raise ConfigError(f"resume: {folder.name} is of another run; differs: {names}")
        is_fused = self.model.device.type == "cuda"
        with torch.no_grad():
            for name, value in self.deltas._asdict().items():
                value.copy_(tensors[f"deltas.{name}"])
                entry = {}
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    stored = tensors[f"optimizer.{name}.{key}"]
                    # Only the fused AdamW counts its steps on the device.
                    stays = key == "step" and not is_fused
                    entry[key] = stored if stays else stored.to(self.model.device)
                self.optimizer.state[value] = entry
        self.progress = Progress(**state["progress"])


def schedule(step: int, share: float, config: TrainConfig) -> float:
    """Factor of the learning rates: linear warm-up by steps, times cosine decay to `final_lr`."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return warm * (config.final_lr + (1 - config.final_lr) * cosine)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a run's folder, oldest first."""
    return sorted(p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name))


def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False, fullgraph=True)
