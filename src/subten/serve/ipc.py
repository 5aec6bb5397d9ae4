"""What the server and its engine process tell each other: msgpack structs behind a length.

A frame is its length (4 bytes, little endian) and that many bytes of msgpack. Fixed types and
length caps: whatever arrives, reading it gives a message or an IpcError, and never runs code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from subten.config import EngineConfig
from subten.core import ErrorCause, FinishReason, SamplingParams, TokenLogprobs

TO_ENGINE_BYTES = 64 * 2**20
FROM_ENGINE_BYTES = 256 * 2**20
"""Largest frame in each direction; from the engine comes a tokenizer."""

_LENGTH_BYTES = 4


class IpcError(ValueError):
    """A frame that is too long or holds no message."""


class Message(msgspec.Struct, array_like=True, kw_only=True):
    """Base of all messages."""


class Start(Message, tag="start"):
    """First message to the engine: which model to load and how."""

    model: str
    config: EngineConfig


class Submit(Message, tag="submit"):
    """Continue a prompt. Pages are shared within a `tenant`; `grammar` "" allows every text.

    Other grammars are the text of one JSON object: json_schema, regex or lark, and its value.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    seed: int
    tenant: str = ""
    grammar: str = ""


class Cancel(Message, tag="cancel"):
    """End requests; unknown ones are left alone."""

    request_ids: list[str]


class TokenizerFile(Message, tag="tokenizer"):
    """All of a tokenizer; `config` is tokenizer_config.json."""

    tokenizer_json: str
    config: dict[str, Any]
    eos_token_ids: list[int]
    bos_token_id: int | None
    chat_template: str | None


class EngineInfo(Message, tag="info"):
    """What the server has to know of a loaded model and its engine."""

    name: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: list[int]
    kv_cache_dtype: str
    kv_full_page_bits: float
    num_pages: int
    device: str


class Ready(Message, tag="ready"):
    """The engine takes requests."""

    info: EngineInfo
    tokenizer: TokenizerFile | None


class Failed(Message, tag="failed"):
    """The engine could not start; `is_user_error` if the caller can correct it."""

    message: str
    is_user_error: bool


class TokenOut(Message):
    """One token of a request, or its end; `token_id` is None for an end without one.

    `queue_s` is the time from its arrival at the engine to its first step.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    detail: str = ""
    error_cause: ErrorCause | None = None
    num_cached: int = 0
    queue_s: float = 0.0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class Tokens(Message, tag="tokens"):
    """What one step of `num_computed` tokens brought."""

    num_computed: int
    items: list[TokenOut]


class Refused(Message, tag="refused"):
    """The engine does not take a request, or `is_overload`, not now.

    `is_grammar` says that `message` tells why its grammar cannot be followed.
    """

    request_id: str
    message: str
    is_overload: bool = False
    is_grammar: bool = False


class ExpertLoadOut(Message):
    """How evenly experts are used, as `engine.expert_load.LoadSummary` has it."""

    by_rank: list[float]
    max_violation: float
    worst_violation: float
    experts_a_step: float


class Status(Message, tag="status"):
    """Counts of the engine since its start, and what it holds now.

    What running sequences hold of the KV cache (`kv_*`) is up to a second old. So are the time of
    a decode step, the share of the memory's roof that it comes to, and the load of experts: None
    where they are not known, and the first two while nothing runs.
    """

    num_running: int
    num_waiting: int
    num_pages_free: int
    num_pages_cached: int
    num_pages_used: int
    kv_bytes: int
    kv_true_bits: float | None
    kv_pages_by_kind: dict[str, int]
    num_preemptions: int
    num_steps: int
    num_computed_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    step_s: float | None = None
    roof_fraction: float | None = None
    expert_load: ExpertLoadOut | None = None


class Beat(Message, tag="beat"):
    """The engine process runs; its step has been running for `busy_s` (0: idle)."""

    busy_s: float


ToEngine = Start | Submit | Cancel
FromEngine = Ready | Failed | Tokens | Refused | Status | Beat

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def pack(message: ToEngine | FromEngine) -> bytes:
    """A message as a frame."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def read_to_engine(payload: bytes) -> ToEngine:
    """The message in a frame, or IpcError."""
    return _read(_to_engine, payload)  # type: ignore[no-any-return]


def read_from_engine(payload: bytes) -> FromEngine:
    """The message in a frame, or IpcError."""
    return _read(_from_engine, payload)  # type: ignore[no-any-return]


def _read(decoder: Any, payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise IpcError(f"frame of {len(payload)} bytes: {error}") from error


class FrameReader:
    """Cuts a stream of bytes into frames; one that is too long is skipped and reported."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._num_skipped = 0

    def feed(self, data: bytes) -> list[bytes | IpcError]:
        """Payloads of the frames that `data` completes, in order."""
        self._buffer += data
        found: list[bytes | IpcError] = []
        start = 0
        while True:
            if self._num_skipped:
                gone = min(self._num_skipped, len(self._buffer) - start)
                self._num_skipped -= gone
                start += gone
            stop = start + _LENGTH_BYTES
            if self._num_skipped or len(self._buffer) < stop:
                break
            length = int.from_bytes(self._buffer[start:stop], "little")
            if length > self._max_bytes:
                found.append(IpcError(f"frame of {length} bytes; allowed: {self._max_bytes}"))
                self._num_skipped, start = length, stop
                continue
            if len(self._buffer) < stop + length:
                break
            found.append(bytes(self._buffer[stop : stop + length]))
            start = stop + length
        del self._buffer[:start]
        return found
