"""A fake model whose logits a test decides, and a byte tokenizer; engine tests are exact with them.

The fake keeps tokens and positions in the KV pages where a model keeps keys and values, and reads
each sequence back through its page table. So a page that is wrong, shared too early or recycled too
soon changes its tokens.

Letters: S sequences, P pages, R rows of a page (64), V vocabulary.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from subten.codecs import KVCodec, KVFormat, RowBytes
from subten.config import ModelConfig, RopeConfig
from subten.core import PAGE_SIZE
from subten.kernels.sample import sample_torch
from subten.kernels.step import StepTensors
from subten.tokenizer import Tokenizer
from subten.weights.load import LoadedModel

EOS = 256
WORDS = {"\u2581the": 257, "own": 258, "ox": 259, "br": 260}
VOCAB_SIZE = 320
NAN_MARK = -1
"""In place of a token in a page: the fake's NaN."""

Script = Callable[[tuple[int, ...]], int | torch.Tensor]
"""From all tokens so far to the next token, or to a row of logits."""


def byte_tokenizer(*, chat_template: str | None = None, special: tuple[str, ...] = ()) -> Tokenizer:
    """Ids 0..255 are bytes, 256 ends, 257.. are a few merged tokens, one with a leading space.

    Special tokens come behind those.
    """
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"</s>": EOS} | WORDS
    vocabulary |= {f"<unused{i}>": i for i in range(max(WORDS.values()) + 1, VOCAB_SIZE)}
    for number, name in enumerate(special):
        del vocabulary[f"<unused{max(WORDS.values()) + 1 + number}>"]
        vocabulary[name] = max(WORDS.values()) + 1 + number
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="</s>"))
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("</s>", *special)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(backend, eos_token_ids=(EOS,), chat_template=chat_template)


def hash_script(history: tuple[int, ...]) -> int:
    """A printable byte that depends on every token and its place."""
    return 97 + zlib.crc32(array("q", history).tobytes()) % 26


def noise_script(history: tuple[int, ...]) -> torch.Tensor:
    """Random logits that depend on every token and its place."""
    seed = zlib.crc32(array("q", history).tobytes())
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def list_script(scripts: dict[str, list[int]], tokenizer: Tokenizer | None = None) -> Script:
    """Forces a list of tokens after each prompt text, then the end token."""
    encode = (tokenizer or byte_tokenizer()).encode
    by_prompt = {tuple(encode(prompt)): tokens for prompt, tokens in scripts.items()}

    def script(history: tuple[int, ...]) -> int:
        for prompt, tokens in by_prompt.items():
            output = history[len(prompt) :]
            if history[: len(prompt)] == prompt and list(output) == tokens[: len(output)]:
                return tokens[len(output)] if len(output) < len(tokens) else EOS
        # A prefill that is not at its end, whose logits nobody uses.
        return EOS

    return script


FAKE_FORMAT = KVFormat(
    codec=KVCodec(
        name="bf16",
        summary="token and position of each row, as int32",
        is_rotated=False,
        row_bytes=lambda _: RowBytes(codes=4, scale=0, zero=0),
        encode=lambda _: NotImplemented,
        decode=lambda *_: NotImplemented,
        device_encode=None,
        device_decode=None,
    ),
    head_dim=2,
    row=RowBytes(codes=4, scale=0, zero=0),
    k_codes=0,
    k_scale=256,
    k_zero=256,
    v_codes=256,
    v_scale=512,
    v_zero=512,
    page_bytes=512,
)


class ScriptedModel:
    """The fake; `script` may be replaced at any time, `poison(history)` writes NaN_MARK once."""

    fmt = FAKE_FORMAT
    device = torch.device("cpu")
    ops = SimpleNamespace(sample=sample_torch, backend={"sample": "torch"})

    def __init__(self, script: Script = hash_script) -> None:
        self.script = script
        self.num_calls = 0
        self.error: Exception | None = None
        self.poisoned_token: int | None = None

    def __call__(self, step: StepTensors, pages_LPGB: torch.Tensor) -> torch.Tensor:
        """One step -> logits_SV; writes and reads layer 0, KV head 0."""
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        rows_PR = pages_LPGB[0, :, 0].view(torch.int32)
        page_T, row_T = step.slot_T // PAGE_SIZE, step.slot_T % PAGE_SIZE
        token_T = step.token_id_T.int()
        if self.poisoned_token is not None:
            token_T = token_T.masked_fill(token_T == self.poisoned_token, NAN_MARK)
        is_kept_T = step.slot_T >= 0
        page_T, row_T = page_T[is_kept_T], row_T[is_kept_T]
        rows_PR[page_T, row_T] = token_T[is_kept_T]
        rows_PR[page_T, row_T + PAGE_SIZE] = step.position_T.int()[is_kept_T]
        # A row for each sequence, or one for each token of a single one.
        has_all_rows = len(step.logit_row_S) > len(step.kv_len_S)
        logits_SV = torch.full((len(step.logit_row_S), VOCAB_SIZE), torch.nan)
        for s, kv_len in enumerate(step.kv_len_S.tolist()):
            num_pages = -(-kv_len // PAGE_SIZE)
            both_PR = rows_PR[step.page_table_SP[s, :num_pages].long()]
            positions = both_PR[:, PAGE_SIZE:].flatten()[:kv_len].tolist()
            assert positions == list(range(kv_len)), positions
            history = tuple(both_PR[:, :PAGE_SIZE].flatten()[:kv_len].tolist())
            if has_all_rows:
                for row, position in enumerate(step.position_T.tolist()):
                    if NAN_MARK not in history[: position + 1]:
                        logits_SV[row] = self._row(history[: position + 1])
            elif NAN_MARK not in history:
                logits_SV[s] = self._row(history)
        return logits_SV

    def _row(self, history: tuple[int, ...]) -> torch.Tensor:
        wanted = self.script(history)
        if isinstance(wanted, torch.Tensor):
            return wanted
        return torch.nn.functional.one_hot(torch.tensor(wanted), VOCAB_SIZE).float() * 50


def fake_config(*, max_model_len: int = 4096, **fields: Any) -> ModelConfig:
    """A config whose cache shape is that of FAKE_FORMAT with one layer and one KV head."""
    values: dict[str, Any] = {
        "architecture": "Scripted",
        "num_layers": 1,
        "d_model": 2,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "d_ffn": 2,
        "vocab_size": VOCAB_SIZE,
        "norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e4),
        "max_model_len": max_model_len,
        "tie_word_embeddings": True,
        "eos_token_ids": (EOS,),
    }
    return ModelConfig(**(values | fields))


def fake_loaded(
    model: ScriptedModel | None = None, *, tokenizer: Tokenizer | None = None, **fields: Any
) -> LoadedModel:
    """What `load_model` returns, with the fake in it."""
    return LoadedModel(
        model=model or ScriptedModel(),  # type: ignore[arg-type]
        config=fake_config(**fields),
        tokenizer=tokenizer or byte_tokenizer(),
        name="scripted",
        weight_bytes=0,
        dtype=torch.float32,
    )
