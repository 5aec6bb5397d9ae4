"""Everything that one training run depends on: a frozen record, from a TOML file and flags."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from subten.core import ConfigError, reason, refuse


def _opt(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of `subten train`; a flag of the same name (dashes for underscores) sets each.

    Exactly one of `gguf` and `checkpoint` names the dense model; at least one of `steps`,
    `max_seconds` and `deadline_seconds` ends the run (the first one reached does).
    """

    out: Path = field(metadata={"help": "Folder for everything that the run writes."})
    gguf: Path | None = _opt(None, "Dense model: a Llama-type GGUF file.")
    checkpoint: Path | None = _opt(None, "Dense model: a Hugging Face Llama folder (safetensors).")
    base_name: str = _opt("", "Name of the dense model, kept in the deltas file.")
    text: tuple[Path, ...] = _opt(
        (), "Training text, .txt or .txt.xz, documents between lines `<|endoftext|>`; repeatable."
    )
    heldout: Path | None = _opt(None, "Held-out text; without it the last documents of `text`.")
    heldout_documents: int = _opt(200, "Documents taken from the end of the last text file.")
    test_text: Path | None = _opt(None, "Test text for a second perplexity (WikiText-2 raw test).")
    data_dir: Path | None = _opt(
        None, "Folder of tokenised text, shared by runs; default OUT/data."
    )
    workers: int = _opt(0, "Processes that tokenise; 0 is one a CPU.")

    num_experts: int = _opt(8, "Experts a layer.")
    top_k: int = _opt(2, "Experts a token.")
    rank: int = _opt(8, "Rank of each expert's deltas to gate, up and down.")
    router_init_std: float = _opt(1.0, "Standard deviation over tokens of untrained router scores.")

    steps: int | None = _opt(None, "Optimiser steps.")
    max_seconds: float | None = _opt(None, "Seconds in the training loop, compilation included.")
    deadline_seconds: float | None = _opt(
        None, "Seconds from start to finish; the loop stops `reserve_seconds` before."
    )
    reserve_seconds: float = _opt(60.0, "Seconds kept for evaluation before the deadline.")
    batch_rows: int = _opt(32, "Rows a step, on each GPU.")
    micro_batch_rows: int | None = _opt(None, "Rows a forward pass; default all of `batch_rows`.")
    seq_len: int = _opt(1024, "Tokens a row.")

    self_tokens: int = _opt(2_000_000, "Tokens that the dense model writes itself in chat format.")
    self_share: float = _opt(0.2, "Share of a batch's rows with self-written text.")
    self_length: int = _opt(512, "Most tokens of one self-written conversation.")
    self_batch: int = _opt(1024, "Conversations written at once.")
    self_temperature: float = _opt(1.0, "Sampling temperature of self-written text.")
    self_top_p: float = _opt(0.95, "Nucleus of self-written text, within the 256 likeliest tokens.")
    self_starters: float = _opt(0.5, "Share of conversations that begin as a plain question.")

    ce_weight: float = _opt(1.0, "Weight of cross-entropy, on corpus text.")
    kd_weight: float = _opt(0.3, "Weight of KL(dense || student) on corpus text.")
    kd_self_weight: float = _opt(1.0, "Weight of KL(dense || student) on self-written text.")
    aux_weight: float = _opt(0.01, "Weight of the load-balancing loss, summed over layers.")
    z_weight: float = _opt(0.001, "Weight of the router z-loss, summed over layers.")

    delta_lr: float = _opt(1e-3, "Peak learning rate of the deltas.")
    router_lr: float = _opt(1e-3, "Peak learning rate of the routers.")
    warmup_steps: int = _opt(40, "Steps of linear warm-up.")
    final_lr: float = _opt(0.03, "Last learning rate, as a share of the peak (cosine decay).")
    beta1: float = _opt(0.9, "AdamW's first decay rate.")
    beta2: float = _opt(0.98, "AdamW's second decay rate.")
    weight_decay: float = _opt(0.0, "AdamW's decoupled weight decay.")
    grad_clip: float = _opt(1.0, "Largest norm of the gradient.")
    seed: int = _opt(0, "Seed of everything random.")

    device: str = _opt("auto", "auto, cpu, cuda or cuda:N.")
    compute_dtype: str = _opt("auto", "auto, bfloat16 or float32; auto is bfloat16 on a GPU.")
    compile: bool | None = _opt(None, "torch.compile the layers; default on a GPU.")
    loss_chunk_tokens: int = _opt(4096, "Tokens whose logits are in memory at once.")

    checkpoint_every: int = _opt(0, "Steps between checkpoints; 0 is at the end of the loop only.")
    keep_checkpoints: int = _opt(1, "Newest checkpoints kept.")
    resume: bool = _opt(False, "Go on from the newest checkpoint in OUT.")
    log_seconds: float = _opt(10.0, "Seconds between log lines where there is no terminal.")
    json: Path | None = _opt(None, "JSON-lines log; default OUT/log.jsonl.")
    export_format: str = _opt("int8", "Format of the deltas file: int8 or bfloat16.")
    eval: bool = _opt(True, "Evaluate at the end.")
    eval_tokens: int = _opt(300_000, "Most held-out tokens evaluated.")
    eval_rows: int = _opt(16, "Rows a forward pass of the evaluation.")

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot work, naming the field."""
        if (self.gguf is None) == (self.checkpoint is None):
            given = "neither" if self.gguf is None else "both"
            raise ConfigError(f"gguf, checkpoint: got {given}; allowed: one, the dense model")
        if self.steps is None and self.max_seconds is None and self.deadline_seconds is None:
            raise ConfigError(
                "steps, max_seconds, deadline_seconds: got none; allowed: at least one of them, "
                "to end the run"
            )
        if not self.text:
            raise ConfigError("text: got no file; allowed: one or more .txt or .txt.xz files")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise refuse(ConfigError, name, value, "a number above 0")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise refuse(ConfigError, name, getattr(self, name), "a number of at least 0")
        for name in ("self_share", "self_starters", "final_lr", "self_top_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise refuse(ConfigError, name, getattr(self, name), "a number from 0 to 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise refuse(ConfigError, name, getattr(self, name), "a number from 0 to below 1")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise refuse(ConfigError, name, getattr(self, name), ", ".join(allowed))
        if not 1 <= self.top_k <= self.num_experts:
            raise refuse(ConfigError, "top_k", self.top_k, f"1 to num_experts={self.num_experts}")
        if self.batch_rows % self.rows_per_pass:
            raise refuse(
                ConfigError,
                "micro_batch_rows",
                self.micro_batch_rows,
                f"a divisor of batch_rows={self.batch_rows}",
            )
        if self.num_self_rows and self.self_tokens < 2 * self.seq_len:
            raise refuse(
                ConfigError,
                "self_tokens",
                self.self_tokens,
                f"at least {2 * self.seq_len} (two rows), or self_share = 0",
            )

    @property
    def rows_per_pass(self) -> int:
        """Rows of one forward pass."""
        return self.micro_batch_rows or self.batch_rows

    @property
    def num_self_rows(self) -> int:
        """Rows of a step that hold self-written text."""
        return round(self.batch_rows * self.self_share)

    @property
    def data_folder(self) -> Path:
        """Folder of tokenised and self-written text."""
        return self.data_dir or self.out / "data"

    @property
    def log_file(self) -> Path:
        """The JSON-lines log."""
        return self.json or self.out / "log.jsonl"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and TOML hold them."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_shareable(self) -> dict[str, Any]:
        """Plain values, with files and folders by their last name: what a report or file says."""
        values: dict[str, Any] = {}
        for field_ in dataclasses.fields(self):
            value = getattr(self, field_.name)
            if isinstance(value, tuple):
                value = tuple(Path(path.name) for path in value)
            values[field_.name] = _plain(Path(value.name) if isinstance(value, Path) else value)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build from plain values; unknown keys and wrong types raise ConfigError."""
        kinds = get_type_hints(cls)
        unknown = sorted(values.keys() - kinds.keys())
        if unknown:
            raise ConfigError(f"unknown keys: {', '.join(unknown)}; allowed: {', '.join(kinds)}")
        if "out" not in values:
            raise ConfigError(
                "out: got none; allowed: the folder for everything that the run writes"
            )
        return cls(**{name: _typed(name, value, kinds[name]) for name, value in values.items()})

    @classmethod
    def load(cls, path: Path | None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
        """Read a TOML file, if given; `overrides` (flags) win over it."""
        values: dict[str, Any] = {}
        if path is not None:
            try:
                values = tomllib.loads(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                allowed = f"a TOML file ({reason(error)})"
                raise refuse(ConfigError, "config", str(path), allowed) from error
        return cls.from_dict({**values, **(overrides or {})})


_POSITIVE = (
    "num_experts", "rank", "router_init_std", "steps", "max_seconds", "deadline_seconds",
    "batch_rows", "micro_batch_rows", "seq_len", "self_length", "self_batch", "self_temperature",
    "self_top_p", "grad_clip", "loss_chunk_tokens", "keep_checkpoints", "log_seconds",
    "eval_tokens", "eval_rows", "heldout_documents",
)  # fmt: skip
_NOT_NEGATIVE = (
    "workers", "self_tokens", "ce_weight", "kd_weight", "kd_self_weight", "aux_weight", "z_weight",
    "delta_lr", "router_lr", "warmup_steps", "weight_decay", "seed", "checkpoint_every",
    "reserve_seconds",
)  # fmt: skip
_CHOICES = {
    "compute_dtype": ("auto", "bfloat16", "float32"),
    "export_format": ("int8", "bfloat16"),
}


_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
"""Types of fields in the words of TOML."""


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _typed(name: str, value: Any, kind: Any) -> Any:
    """`value` as the field's type; a wrong type raises rather than converts."""
    if kind == tuple[Path, ...]:
        if isinstance(value, str) or not all(isinstance(v, str | Path) for v in value):
            raise refuse(ConfigError, name, value, "a list of paths")
        return tuple(Path(v) for v in value)
    allowed = get_args(kind) or (kind,)
    if value is None and type(None) in allowed:
        return None
    if Path in allowed and isinstance(value, str | Path):
        return Path(value)
    if float in allowed and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    is_bool = isinstance(value, bool)
    if any(isinstance(value, t) for t in allowed) and (not is_bool or bool in allowed):
        return value
    raise refuse(ConfigError, name, value, " or ".join(_KINDS[t] for t in allowed if t in _KINDS))
