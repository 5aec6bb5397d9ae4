"""What a measurement calls of llama.cpp's shared libraries, through ctypes.

Parameter records are taken whole from the library's own defaults; the fields that a measurement
sets are at the places that `llama.h` gives them in version 0.5.0 (checked against the defaults
that are known there, so that another layout is refused).
"""

from __future__ import annotations

import ctypes
import random
import struct
import time
from pathlib import Path
from typing import Any

MODEL_BYTES, CONTEXT_BYTES = 80, 160
"""Sizes of llama_model_params and llama_context_params."""

GPU_LAYERS_AT = 16
CONTEXT_AT, BATCH_AT, MICRO_BATCH_AT, THREADS_AT, BATCH_THREADS_AT = 0, 4, 8, 28, 32
FLASH_ATTENTION_AT, KEY_TYPE_AT, VALUE_TYPE_AT = 52, 104, 108
ENABLED, F16 = 1, 1

MICRO_BATCH = 2048
"""Tokens of one prefill pass."""


class _ModelParams(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_char * MODEL_BYTES)]


class _ContextParams(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_char * CONTEXT_BYTES)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


class Library:
    """The libraries in a folder, loaded with every backend beside them."""

    def __init__(self, folder: Path) -> None:
        names = [next(iter(sorted(folder.glob(f"{stem}*.so"))), None) for stem in STEMS]
        if None in names:
            raise SystemExit(f"{folder}: {', '.join(STEMS)} must be there")
        loaded = [ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL) for name in names]
        loaded[1].ggml_backend_load_all_from_path(str(folder).encode())
        self.calls: Any = loaded[2]
        self.calls.llama_backend_init()
        for name, result, takes in SIGNATURES:
            getattr(self.calls, name).restype = result
            getattr(self.calls, name).argtypes = takes
        context = bytes(self.calls.llama_context_default_params())
        found = struct.unpack_from("<3I", context), struct.unpack_from("<2i", context, KEY_TYPE_AT)
        layers = struct.unpack_from("<i", self.calls.llama_model_default_params(), GPU_LAYERS_AT)
        if found != ((512, 2048, 512), (F16, F16)) or layers != (-1,):
            raise SystemExit(f"{names[2]}: not the layout of version 0.5.0: {found}, {layers}")

    def load(self, path: Path) -> Model:
        """A GGUF file with all of its layers on the GPU, where there is one."""
        params = self.calls.llama_model_default_params()
        struct.pack_into("<i", params, GPU_LAYERS_AT, 999)
        handle = self.calls.llama_model_load_from_file(str(path).encode(), params)
        if not handle:
            raise SystemExit(f"{path}: llama.cpp did not load it")
        return Model(self.calls, handle)


class Model:
    """A loaded model."""

    def __init__(self, calls: Any, handle: int) -> None:
        self.calls = calls
        self.handle = handle

    def decode_times_ms(
        self, *, context_len: int, num_steps: int, kv_type: int, vocab_size: int, threads: int
    ) -> list[float]:
        """Milliseconds of each step after a prefill up to `context_len`."""
        params = self.calls.llama_context_default_params()
        size = -(-(context_len + num_steps + 1) // 256) * 256
        for at, value in (
            (CONTEXT_AT, size),
            (BATCH_AT, MICRO_BATCH),
            (MICRO_BATCH_AT, MICRO_BATCH),
            (THREADS_AT, threads),
            (BATCH_THREADS_AT, threads),
            (FLASH_ATTENTION_AT, ENABLED),
            (KEY_TYPE_AT, kv_type),
            (VALUE_TYPE_AT, kv_type),
        ):
            struct.pack_into("<i", params, at, value)
        context = self.calls.llama_init_from_model(self.handle, params)
        if not context:
            raise SystemExit("llama.cpp made no context")
        for start in range(0, context_len, MICRO_BATCH):
            count = min(MICRO_BATCH, context_len - start)
            self._decode(context, [random.randrange(vocab_size) for _ in range(count)])
        times_ms = []
        for _ in range(1 + num_steps):
            token = [random.randrange(vocab_size)]
            start_s = time.perf_counter()
            self._decode(context, token)
            times_ms.append((time.perf_counter() - start_s) * 1e3)
        self.calls.llama_free(context)
        return times_ms[1:]

    def close(self) -> None:
        """Free the weights."""
        self.calls.llama_model_free(self.handle)

    def _decode(self, context: int, tokens: list[int]) -> None:
        """One pass; it has ended on the device, and the last token's logits are on the host."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self.calls.llama_batch_get_one(array, len(tokens))
        code = self.calls.llama_decode(context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode: {code}")
        self.calls.llama_synchronize(context)


STEMS = ("libggml-base", "libggml.", "libllama.")

_POINTER = ctypes.c_void_p
SIGNATURES: tuple[tuple[str, Any, list[Any]], ...] = (
    ("llama_model_default_params", _ModelParams, []),
    ("llama_context_default_params", _ContextParams, []),
    ("llama_model_load_from_file", _POINTER, [ctypes.c_char_p, _ModelParams]),
    ("llama_init_from_model", _POINTER, [_POINTER, _ContextParams]),
    ("llama_batch_get_one", _Batch, [_POINTER, ctypes.c_int32]),
    ("llama_decode", ctypes.c_int32, [_POINTER, _Batch]),
    ("llama_synchronize", None, [_POINTER]),
    ("llama_free", None, [_POINTER]),
    ("llama_model_free", None, [_POINTER]),
)
