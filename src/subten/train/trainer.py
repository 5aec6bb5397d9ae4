"""The training run: set up, loop, save, evaluate, report."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import math
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from subten.core import ConfigError, reason, refuse
from subten.device import gpu_name
from subten.train import evaluate
from subten.train.config import TrainConfig
from subten.train.data import Rows
from subten.train.export import export_error, load_deltas, write_deltas
from subten.train.log import RunLog
from subten.train.model import Deltas, init_deltas
from subten.train.plots import plot_load
from subten.train.sources import Base, Texts, load_base, load_conversations, load_texts
from subten.train.student import Student, checkpoints
from subten.train.world import World, join_world

logger = logging.getLogger(__name__)

_CALIBRATION_ROWS = 4
_DIFFERENCE_ROWS = 16


def main(config: TrainConfig) -> dict[str, Any]:
    """Train, save the deltas to `out/deltas.safetensors`, evaluate; returns the report.

    Everything is written under `config.out`: log.jsonl, checkpoints, deltas.safetensors, load.png
    and report.json, which is what is returned. Under torchrun every process calls this. Raises
    ConfigError or CheckpointError for what the user can correct.
    """
    start_s = time.perf_counter()
    world = join_world(config.device)
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"a folder that can be made ({reason(error)})"
        raise refuse(ConfigError, "out", str(config.out), allowed) from error
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
        world.leave()


def _run(config: TrainConfig, world: World, log: RunLog, start_s: float) -> dict[str, Any]:
    report = _new_report(config, world)
    timings: dict[str, float] = report["timings"]

    def mark(name: str) -> None:
        timings[name] = round(time.perf_counter() - start_s, 2)

    log.stage("loading the dense model", 0.0)
    base = load_base(config, world.device, _compute_dtype(config, world.device))
    mark("model_loaded_s")
    if config.seq_len > base.model.config.max_model_len:
        raise ConfigError(
            f"seq_len: got {config.seq_len}; allowed: 1 to {base.model.config.max_model_len}, the "
            "dense model's context"
        )
    texts = load_texts(config, base.tokenizer, world, log.stage)
    report["base_sha256"] = base.sha256
    report["text"] = {
        "train_tokens": len(texts.train.ids),
        "train_documents": texts.train.num_documents,
        "heldout_tokens": len(texts.heldout.ids),
        "heldout_documents": texts.heldout.num_documents,
        "test_tokens": 0 if texts.test_ids is None else len(texts.test_ids),
    }
    mark("text_ready_s")
    student = _make_student(config, base, texts, world, log, mark)
    report["training"] = _loop(config, student, log, start_s)
    mark("trained_s")
    if world.is_first:
        # What was trained is on disk before anything else can fail.
        student.save(config.out)
        deltas_file = config.out / "deltas.safetensors"
        write_deltas(deltas_file, student.deltas, config, base.sha256)
        mark("saved_s")
        report["deltas_bytes"] = deltas_file.stat().st_size
        _write_report(config, report)
        if config.eval:
            _evaluate(config, student, base, texts, report, log)
            mark("evaluated_s")
            _write_report(config, report)
    world.barrier()
    return report


def _make_student(
    config: TrainConfig,
    base: Base,
    texts: Texts,
    world: World,
    log: RunLog,
    mark: Callable[[str], None],
) -> Student:
    conversations = load_conversations(config, base, world, log.stage)
    mark("self_text_ready_s")
    corpus = Rows(texts.train.ids, config.seq_len + 1, config.seed)
    sample = corpus(0, _CALIBRATION_ROWS)[:, :-1]
    deltas = init_deltas(
        base.model,
        torch.from_numpy(sample).to(world.device),
        num_experts=config.num_experts,
        rank=config.rank,
        router_std=config.router_init_std,
        seed=config.seed,
    )
    student = Student(
        config, base.model, deltas, corpus=corpus, conversations=conversations, world=world
    )
    if config.resume:
        found = checkpoints(config.out)
        if not found:
            raise ConfigError(f"resume: no checkpoint in {config.out}")
        student.load(found[-1])
    return student


def _loop(config: TrainConfig, student: Student, log: RunLog, start_s: float) -> dict[str, Any]:
    """Step until the steps are done or the next one would pass the time limit."""
    progress, world = student.progress, student.world
    loop_s = time.perf_counter()
    before_s = progress.trained_s
    limit_s = _limit(config, before_s, loop_s - start_s)
    record: dict[str, Any] = {}
    first_step_s = last_s = 0.0
    counted_s, counted_tokens = loop_s, progress.tokens
    with _Signals() as signals:
        while config.steps is None or progress.step < config.steps:
            step_s = time.perf_counter()
            elapsed_s = before_s + step_s - loop_s
            done = progress.step / config.steps if config.steps else 0.0
            share, is_over = world.agree(
                min(1.0, max(done, elapsed_s / limit_s)),
                elapsed_s + last_s > limit_s or signals.is_set,
            )
            if is_over:
                break
            record = student.step(share)
            now_s = time.perf_counter()
            progress.trained_s = before_s + now_s - loop_s
            last_s = now_s - step_s
            if not first_step_s:
                # The first step compiles: it says nothing of the time of the next, nor of speed.
                first_step_s, last_s = last_s, 0.0
                counted_s, counted_tokens = now_s, progress.tokens
            spent_s = now_s - counted_s
            record |= {
                "step": progress.step,
                "tokens": progress.tokens,
                "seconds": round(progress.trained_s, 3),
                "tokens_per_s": (progress.tokens - counted_tokens) / spent_s if spent_s else 0.0,
            }
            log.step(record, share)
            is_due = config.checkpoint_every and progress.step % config.checkpoint_every == 0
            if is_due and world.is_first:
                student.save(config.out)
    if signals.is_set:
        if world.is_first:
            logger.info("interrupted: checkpoint in %s", student.save(config.out))
        raise KeyboardInterrupt
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.trained_s, 2),
        "first_step_s": round(first_step_s, 2),
        "last": record,
    }


class _Signals:
    """Turns an interrupt into a wish, so that a step is whole before the run stops."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: object) -> None:
        self.is_set = True


def _limit(config: TrainConfig, trained_s: float, spent_s: float) -> float:
    """Seconds of training (earlier runs included) after which the loop stops."""
    limit_s = config.max_seconds or math.inf
    if config.deadline_seconds is None:
        return limit_s
    room_s = config.deadline_seconds - config.reserve_seconds - spent_s
    if room_s <= 0:
        raise ConfigError(
            f"deadline_seconds: got {config.deadline_seconds:g}; allowed: more than "
            f"{config.reserve_seconds + spent_s:.0f} (reserve_seconds, and the time before the "
            "first step)"
        )
    return min(limit_s, trained_s + room_s)


def _evaluate(
    config: TrainConfig,
    student: Student,
    base: Base,
    texts: Texts,
    report: dict[str, Any],
    log: RunLog,
) -> None:
    """Fill in `report["eval"]`; it is written after each part, lest time runs out."""
    model, top_k = student.model, config.top_k
    trained = Deltas(*(t.detach() for t in student.deltas))
    exported = load_deltas(config.out / "deltas.safetensors", model.device)
    result: dict[str, Any] = {"seq_len": config.seq_len, "dtype": str(model.dtype)}
    report["eval"] = result
    result["export_error_layer_0"] = export_error(model, trained, exported, layer=0)
    states = {
        "dense": evaluate.dense_state(model),
        "moe": evaluate.student_state(model, trained, top_k),
        "moe_exported": evaluate.student_state(model, exported, top_k),
    }
    sizes = {"seq_len": config.seq_len, "rows": config.eval_rows}
    heldout_ids = texts.heldout.ids[: config.eval_tokens]
    log.stage("evaluating", 0.0, "load")
    count_LE = evaluate.expert_load(model, exported, heldout_ids, top_k=top_k, **sizes)
    result["load"] = count_LE.long().tolist()
    result["balance"] = evaluate.balance_report(count_LE)
    title = f"load on held-out text, aux_weight {config.aux_weight:g}"
    if not plot_load(count_LE, config.out / "load.png", title):
        logger.info("matplotlib is not installed: no load.png")
    judged = {"heldout": heldout_ids}
    if texts.test_ids is not None:
        judged["test_text"] = texts.test_ids
    for text_name, ids in judged.items():
        row: dict[str, Any] = {}
        for name, state_fn in states.items():
            log.stage("evaluating", 0.1 + 0.4 * bool(result.get("heldout")), f"{text_name} {name}")
            row[name] = evaluate.perplexity(model, state_fn, ids, **sizes)
        for name in ("moe", "moe_exported"):
            row[f"{name}_to_dense"] = row[name]["perplexity"] / row["dense"]["perplexity"]
        result[text_name] = row
        _write_report(config, report)
    log.stage("evaluating", 0.9, "expert difference, answers")
    few_ids = heldout_ids[: _DIFFERENCE_ROWS * config.seq_len + 1]
    result["expert_difference"] = evaluate.expert_difference(
        model, exported, few_ids, top_k=top_k, **sizes
    )
    _write_report(config, report)
    result["answers"] = {
        name: evaluate.greedy_answers(model, states[name], base.tokenizer)
        for name in ("dense", "moe_exported")
    }


def _new_report(config: TrainConfig, world: World) -> dict[str, Any]:
    is_gpu = world.device.type == "cuda"
    return {
        "what": "subten train",
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "versions": _versions(),
        "device": gpu_name(world.device) if is_gpu else "cpu",
        "world_size": world.size,
        "config": config.to_shareable(),
        "timings": {},
    }


def _write_report(config: TrainConfig, report: dict[str, Any]) -> None:
    partial = config.out / ".report.partial"
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.replace(config.out / "report.json")


def _compute_dtype(config: TrainConfig, device: torch.device) -> str:
    if config.compute_dtype == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return config.compute_dtype


def _command() -> str:
    """How the run was started, with files by their last name."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["subten train", *(word for word in words if word != "train")])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("subten", "torch", "tokenizers", "safetensors", "gguf", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
