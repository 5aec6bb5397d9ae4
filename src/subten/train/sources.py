"""What a run reads: the dense model, text, and text that the model wrote itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from subten.core import CheckpointError, ConfigError, reason, refuse
from subten.tokenizer import Tokenizer
from subten.train.config import TrainConfig
from subten.train.data import (
    Array,
    Progress,
    RowTable,
    TokenText,
    pack_conversations,
    split_document,
    tokenize,
)
from subten.train.dense import DenseModel
from subten.train.selfgen import self_written
from subten.train.world import World
from subten.weights.load import load_model
from subten.weights.upcycled import sha256_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The dense model that becomes a MoE, its tokenizer, and the hash of its weights' files."""

    model: DenseModel
    tokenizer: Tokenizer
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Token ids to train on, to judge by, and of the test text (None without one)."""

    train: TokenText
    heldout: TokenText
    test_ids: Array | None


def load_base(config: TrainConfig, device: torch.device, dtype: str) -> Base:
    """Load the dense model that `config` names; CheckpointError for one that cannot serve."""
    path = config.gguf or config.checkpoint
    assert path is not None
    loaded = load_model(
        str(path), device=device, dtype=dtype, backend="torch", kv_cache_dtype="bf16"
    )
    if loaded.tokenizer is None:
        raise CheckpointError(f"{path}: no tokenizer.json; training needs one")
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    hashes = [sha256_of(file) for file in files]
    joined = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return Base(
        model=DenseModel(loaded),
        tokenizer=loaded.tokenizer,
        sha256=hashes[0] if len(hashes) == 1 else joined,
    )


def load_texts(
    config: TrainConfig, tokenizer: Tokenizer, world: World, progress: Progress
) -> Texts:
    """Tokenise the text (the first process) or find it tokenised, and set documents aside."""

    def read(path: Path) -> TokenText:
        folder, workers = config.data_folder, config.workers
        return tokenize(path, tokenizer, folder, workers=workers, progress=progress)

    if world.is_first:
        for path in (*config.text, *([config.heldout] if config.heldout else [])):
            read(path)
    world.barrier()
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
        parts[-1], heldout = last.documents(0, cut), last.documents(cut, last.num_documents)
    test_ids = None if config.test_text is None else _whole_text(config.test_text, tokenizer)
    return Texts(train=_joined(parts), heldout=heldout, test_ids=test_ids)


def load_conversations(
    config: TrainConfig, base: Base, world: World, progress: Progress
) -> RowTable | None:
    """Rows of text that the dense model wrote itself; None where the batch has no place for it."""
    if config.num_self_rows == 0:
        return None
    if base.tokenizer.chat_template is None:
        raise ConfigError("self_share: the model has no chat template; allowed: 0")
    if world.is_first:
        self_written(base.model, base.tokenizer, config, base.sha256, progress)
    world.barrier()
    ids, lengths = self_written(base.model, base.tokenizer, config, base.sha256, progress)
    return RowTable(pack_conversations(ids, lengths, config.seq_len + 1), config.seed)


def _joined(parts: list[TokenText]) -> TokenText:
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part.ids) for part in parts[:-1])])
    return TokenText(
        ids=np.concatenate([part.ids for part in parts]),
        ends=np.concatenate([p.ends + s for p, s in zip(parts, shifts, strict=True)]),
    )


def _whole_text(path: Path, tokenizer: Tokenizer) -> Array:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = f"a UTF-8 text file ({reason(error)})"
        raise refuse(ConfigError, "test_text", str(path), allowed) from error
    ids = [token_id for piece in split_document(text) for token_id in tokenizer.encode_part(piece)]
    if len(ids) < 2:
        raise ConfigError(f"test_text: {path} has {len(ids)} tokens; allowed: at least 2")
    return np.array(ids, dtype=np.int64)
