"""Training text as token rows: documents, tokenising in processes, rows by number; no torch."""

from __future__ import annotations

import hashlib
import lzma
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from subten.core import ConfigError, reason, refuse
from subten.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>"
_TASK_CHARS = 1 << 20
_PIECE_CHARS = 1 << 13
_SMALL_BYTES = 1 << 20

Array = np.ndarray[Any, Any]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """Token ids of a text (flat) and where each document ends in them; a separator ends each."""

    ids: Array
    ends: Array

    @property
    def num_documents(self) -> int:
        """Documents in the text."""
        return len(self.ends)

    def documents(self, start: int, stop: int) -> TokenText:
        """Documents [start, stop) alone."""
        first = int(self.ends[start - 1]) if start else 0
        last = int(self.ends[stop - 1]) if stop else 0
        return TokenText(ids=self.ids[first:last], ends=self.ends[start:stop] - first)


def read_documents(path: Path) -> Iterator[str]:
    """Documents of a .txt or .txt.xz file, divided by lines `<|endoftext|>`; empty ones dropped."""
    opener = lzma.open if path.suffix == ".xz" else open
    lines: list[str] = []
    try:
        with opener(path, "rt", encoding="utf-8") as stream:
            for line in stream:
                if line.rstrip("\n") == SEPARATOR:
                    document = "".join(lines).strip("\n")
                    lines = []
                    if document:
                        yield document
                else:
                    lines.append(line)
    except (OSError, lzma.LZMAError, UnicodeDecodeError, EOFError) as error:
        allowed = f"UTF-8 text in a .txt or .txt.xz file ({reason(error)})"
        raise refuse(ConfigError, "text", str(path), allowed) from error
    document = "".join(lines).strip("\n")
    if document:
        yield document


def split_document(document: str, max_chars: int = _PIECE_CHARS) -> list[str]:
    """Pieces of a document that encode to the same ids as the whole, for speed.

    Cuts lie between the two line feeds of a blank line that text follows: byte-level
    pre-tokenizers divide there anyway (`\\s+(?!\\S)` leaves the last white space to what follows).
    """
    pieces: list[str] = []
    start, at = 0, 0
    while True:
        at = document.find("\n\n", max(at, start + max_chars))
        if at < 0:
            break
        before = document[at - 1] if at else "\n"
        after = document[at + 2] if at + 2 < len(document) else "\n"
        if not before.isspace() and not after.isspace():
            pieces.append(document[start : at + 1])
            start = at + 1
        at += 1
    pieces.append(document[start:])
    return pieces


def separator_id(tokenizer: Tokenizer) -> int:
    """The token between documents: `<|endoftext|>` where there is one, else the end token."""
    found = tokenizer.token_id(SEPARATOR)
    if found is not None:
        return found
    if not tokenizer.eos_token_ids:
        raise ConfigError("text: the tokenizer has neither `<|endoftext|>` nor an end token")
    return tokenizer.eos_token_ids[0]


def tokenize(
    path: Path,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    workers: int = 0,
    progress: Progress | None = None,
) -> TokenText:
    """Tokens of a text file, kept in `folder` and found again there by content and tokenizer.

    `progress` gets (what, share done).
    """
    if not path.is_file():
        raise refuse(ConfigError, "text", str(path), "a .txt or .txt.xz file (no such file)")
    backend = tokenizer.backend.to_str()
    separator = separator_id(tokenizer)
    key = hashlib.sha256(path.read_bytes() + backend.encode() + str(separator).encode()).hexdigest()
    name = f"{path.name.split('.')[0]}-{key[:16]}"
    ids_file, ends_file = folder / f"{name}.ids.npy", folder / f"{name}.ends.npy"
    if not (ids_file.is_file() and ends_file.is_file()):
        dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        folder.mkdir(parents=True, exist_ok=True)
        ids, ends = _tokenize_all(path, (backend, separator, dtype), workers, progress)
        save_array(ends_file, ends)
        save_array(ids_file, ids)
    return TokenText(ids=np.load(ids_file, mmap_mode="r"), ends=np.load(ends_file))


def save_array(path: Path, array: Array) -> None:
    """Write an .npy file that is either whole or not there."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)
    partial.replace(path)


class Rows:
    """Rows of `length` tokens by number, without end: each epoch is shuffled and cut anew.

    A row depends on (text, length, seed, number) alone, so a run resumes exactly.
    """

    def __init__(self, ids: Array, length: int, seed: int) -> None:
        self._ids, self._length, self._seed = ids, length, seed
        self._per_epoch = (len(ids) - length + 1) // length
        if self._per_epoch < 1:
            raise ConfigError(f"text: {len(ids)} tokens are fewer than two rows of {length - 1}")
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)
        self._shift = 0

    def __call__(self, start: int, count: int) -> Array:
        """Rows [start, start + count) as int64 (count x length)."""
        return np.stack([self._row(n) for n in range(start, start + count)])

    def _row(self, number: int) -> Array:
        epoch, place = divmod(number, self._per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._order = rng.permutation(self._per_epoch)
            self._shift = int(rng.integers(self._length))
            self._epoch = epoch
        begin = int(self._order[place]) * self._length + self._shift
        return self._ids[begin : begin + self._length].astype(np.int64)


def pack_conversations(ids: Array, lengths: Array, length: int) -> Array:
    """Whole conversations packed into a flat run of rows of `length` tokens.

    Each row begins with a conversation; the last of a row is cut at its end.
    """
    ends = np.cumsum(lengths)
    rows: list[Array] = []
    at = 0
    while at < len(lengths):
        begin = int(ends[at - 1]) if at else 0
        if len(ids) - begin < length:
            break
        rows.append(ids[begin : begin + length])
        at = int(np.searchsorted(ends, begin + length, side="left")) + 1
    if not rows:
        raise ConfigError(f"self_tokens: {len(ids)} tokens are fewer than one row of {length}")
    return np.stack(rows)


class RowTable:
    """Rows of a table by number, without end, each epoch in a new order."""

    def __init__(self, rows: Array, seed: int) -> None:
        self._rows, self._seed = rows, seed

    def __call__(self, start: int, count: int) -> Array:
        """Rows [start, start + count) as int64."""
        return np.stack([self._row(n) for n in range(start, start + count)])

    def _row(self, number: int) -> Array:
        epoch, place = divmod(number, len(self._rows))
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))
        row: Array = self._rows[order[place]].astype(np.int64)
        return row


def windows(ids: Array, length: int, rows: int) -> Iterator[Array]:
    """Non-overlapping windows of `length` inputs and their next tokens, `rows` at a time (int64).

    A window has one more token than inputs, which the next window begins with. Each token but the
    first is a target once; the last window is as long as the text allows.
    """
    num_whole = max(0, (len(ids) - 1) // length)
    for first in range(0, num_whole, rows):
        begins = [i * length for i in range(first, min(first + rows, num_whole))]
        yield np.stack([ids[b : b + length + 1] for b in begins]).astype(np.int64)
    rest = np.asarray(ids[num_whole * length :], dtype=np.int64)
    if len(rest) > 1:
        yield rest[None]


_worker: dict[str, Any] = {}


def _start_worker(backend: str, separator: int, dtype: Any) -> None:
    # One process a CPU is the parallelism; the library's own threads would fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker.update(backend=tokenizers.Tokenizer.from_str(backend), separator=separator, dtype=dtype)


def _encode_documents(documents: Sequence[str]) -> tuple[bytes, list[int], int]:
    pieces = [split_document(document) for document in documents]
    flat = [piece for parts in pieces for piece in parts]
    encoded = iter(_worker["backend"].encode_batch_fast(flat, add_special_tokens=False))
    arrays: list[Array] = []
    lengths: list[int] = []
    for parts in pieces:
        whole = [np.array(next(encoded).ids, dtype=_worker["dtype"]) for _ in parts]
        whole.append(np.array([_worker["separator"]], dtype=_worker["dtype"]))
        arrays.extend(whole)
        lengths.append(sum(len(part) for part in whole))
    return np.concatenate(arrays).tobytes(), lengths, sum(len(d) for d in documents)


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _tasks(path: Path) -> Iterator[list[str]]:
    task: list[str] = []
    num_chars = 0
    for document in read_documents(path):
        task.append(document)
        num_chars += len(document)
        if num_chars >= _TASK_CHARS:
            yield task
            task, num_chars = [], 0
    if task:
        yield task


def _tokenize_all(
    path: Path, setup: tuple[str, int, Any], workers: int, progress: Progress | None
) -> tuple[Array, Array]:
    workers = workers or _num_cpus()
    # xz text of this kind packs to about 27 %; the bar only needs a guess of the whole.
    total = path.stat().st_size * (3.7 if path.suffix == ".xz" else 1.0)
    chunks: list[Array] = []
    lengths: list[int] = []
    num_chars = 0

    def take(results: Iterator[tuple[bytes, list[int], int]]) -> None:
        nonlocal num_chars
        for raw, part, size in results:
            chunks.append(np.frombuffer(raw, dtype=setup[2]))
            lengths.extend(part)
            num_chars += size
            if progress:
                progress(f"tokenising {path.name}", min(1.0, num_chars / total))

    if workers == 1 or path.stat().st_size < _SMALL_BYTES:
        _start_worker(*setup)
        take(map(_encode_documents, _tasks(path)))
    else:
        # Not fork: the parent may hold threads and a GPU.
        context = multiprocessing.get_context("spawn")
        with context.Pool(workers, _start_worker, setup) as pool:
            take(pool.imap(_encode_documents, _tasks(path)))
    if not chunks:
        raise ConfigError(f"text: {path} holds no document")
    return np.concatenate(chunks), np.cumsum(np.array(lengths, dtype=np.int64))
