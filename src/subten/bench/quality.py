"""What a KV format costs in quality: perplexity and KL divergence to a BF16 cache.

The text is cut into windows that do not overlap; each is read from its first token in chunks, as
the engine prefills, through the model's own attention over encoded pages, so that every key and
value that a token sees has been through the codec. The first token of a window is not scored.
All formats see the same weights and the same chunks, side by side; the reference may have the
weights as they were before they were quantised.

Letters: W windows of a batch, C tokens of a chunk, R scored rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from subten.cache.pool import PagePool
from subten.codecs import KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE, ConfigError, RequestError, refuse
from subten.device import free_memory_bytes, on_device
from subten.kernels.step import make_step
from subten.models.decoder import Decoder
from subten.weights.key_bias import settle_key_bias

REFERENCE = "bf16"
"""KL divergences are from the reference model with this cache."""

LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""Most bytes that the float32 logits of one chunk may take, by device; about five such tensors
live at once, so on a GPU a twelfth of the free memory is a limit too."""

MAX_CHUNK = 512
"""Most tokens of one window that one step reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecQuality:
    """One format's figures; KLD in nats over next-token distributions, from the reference.

    `kv_true_bits` counts all bytes of the pages that one full window fills.
    """

    kv_cache_dtype: str
    kv_true_bits: float
    kv_bytes_per_token: float
    perplexity: float
    perplexity_ratio: float
    kld_mean: float
    kld_p50: float
    kld_p999: float
    top1_agreement: float
    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def evaluate_kv(
    model: Decoder,
    token_ids: Sequence[int],
    *,
    codecs: Sequence[str],
    window: int,
    reference: Decoder | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> list[CodecQuality]:
    """Measure `codecs` on a text; one entry each, in their order.

    `window` tokens at most the model's context; a shorter last window is scored as well.
    `reference` is the model with whose BF16 cache all are compared: `model` itself by default, the
    unquantised weights where it is to show what quantising them costs. Raises ConfigError for a
    format that the head dimension cannot take, RequestError for too little text.
    """
    _check(model, token_ids, codecs=codecs, window=window)
    head_dim = model.config.head_dim
    compared = _Probe(model if reference is None else reference, kv_format(REFERENCE, head_dim))
    rows = {name: _Probe(model, kv_format(name, head_dim)) for name in codecs}
    if compared.weights is model and REFERENCE in rows:
        rows[REFERENCE] = compared
    probes = list(dict.fromkeys([compared, *rows.values()]))
    windows = [token_ids[i : i + window] for i in range(0, len(token_ids), window)]
    windows = [part for part in windows if len(part) > 1]
    rows_at_once = _rows_at_once(model)
    num_scored = sum(len(part) - 1 for part in windows)
    done = 0
    for batch in _batches(windows, rows_at_once):
        for probe in probes:
            probe.begin(batch)
        for start, stop in _chunks(len(batch[0]), max(1, rows_at_once // len(batch))):
            _score_chunk(probes, batch, start, stop)
            done += len(batch) * (stop - start)
            progress(min(1.0, done / (num_scored + len(windows))))
    return [
        rows[name].result(
            name, num_scored=num_scored, window=window, reference_nll=compared.nll_sum
        )
        for name in codecs
    ]


class _Probe:
    """One format at work: the model bound to it, its pages, and what was measured so far."""

    def __init__(self, model: Decoder, fmt: KVFormat) -> None:
        self.weights = model
        self.model = with_format(model, fmt)
        # As an engine would load it for this format.
        settle_key_bias(self.model, "auto", "model")
        self.fmt = fmt
        self.nll_sum = 0.0
        self.num_agreeing = 0
        self.klds: list[torch.Tensor] = []
        self._pool: PagePool | None = None
        self._page_ids: list[list[int]] = []

    def begin(self, batch: Sequence[Sequence[int]]) -> None:
        """Take pages for a batch of equally long windows; pages of the batch before are reused."""
        each = math.ceil(len(batch[0]) / PAGE_SIZE)
        num_pages = each * len(batch)
        if self._pool is None or self._pool.num_pages < num_pages:
            self._pool = self._make_pool(num_pages)
        self._page_ids = [list(range(i * each, (i + 1) * each)) for i in range(len(batch))]

    def logits(self, batch: Sequence[Sequence[int]], start: int, stop: int) -> torch.Tensor:
        """Read tokens [start, stop) of each window -> logits_RV float32, R = W * (stop - start)."""
        assert self._pool is not None
        step = make_step(
            token_ids=[list(part[start:stop]) for part in batch],
            starts=[start] * len(batch),
            page_ids=self._page_ids,
            device=self.model.device,
        )
        with on_device(self.model.device):
            return self.model(step, self._pool.pages_LPGB, all_rows=True)  # type: ignore[no-any-return]

    def result(
        self, name: str, *, num_scored: int, window: int, reference_nll: float
    ) -> CodecQuality:
        """The figures over everything that was scored."""
        kld = torch.cat(self.klds).double()
        assert kld.numel() == num_scored, (kld.numel(), num_scored)
        pool = self._make_pool(0)
        pages = math.ceil(window / PAGE_SIZE)
        true_bits = pool.true_bits(num_pages=pages, num_tokens=window)
        assert true_bits is not None
        return CodecQuality(
            kv_cache_dtype=name,
            kv_true_bits=true_bits,
            kv_bytes_per_token=pool.bytes_per_token,
            perplexity=math.exp(self.nll_sum / num_scored),
            perplexity_ratio=math.exp((self.nll_sum - reference_nll) / num_scored),
            kld_mean=float(kld.mean()),
            kld_p50=_quantile(kld, 0.5),
            kld_p999=_quantile(kld, 0.999),
            top1_agreement=self.num_agreeing / num_scored,
            num_tokens=num_scored,
        )

    def _make_pool(self, num_pages: int) -> PagePool:
        return PagePool(
            num_layers=self.model.config.num_layers,
            num_pages=num_pages,
            num_kv_heads=self.model.config.num_kv_heads,
            fmt=self.fmt,
            device=self.model.device,
        )


def with_format(model: Decoder, fmt: KVFormat) -> Decoder:
    """The same model, its weights shared and not copied, over pages of another format."""
    twin = Decoder(
        model.config,
        model.ops,
        fmt,
        device=torch.device("meta"),
        dtype=model.dtype,
        quantization=model.quantization,
        quantize_head=model.quantize_head,
    )
    twin.load_state_dict(model.state_dict(), assign=True)
    layers: list[tuple[Any, Any]] = list(zip(twin.layers, model.layers, strict=True))
    for ours, theirs in layers:
        # Its own would be another copy of equal numbers.
        ours.router = theirs.router
        ours.attention.key_bias_GD = theirs.attention.key_bias_GD
    twin.device = model.device
    twin.cos_sin_PD = model.cos_sin_PD
    twin.rotation_DD = None
    if fmt.codec.is_rotated:
        twin.rotation_DD = hadamard(model.config.head_dim, model.device)
    return twin


@torch.inference_mode()
def _score_chunk(
    probes: Sequence[_Probe], batch: Sequence[Sequence[int]], start: int, stop: int
) -> None:
    """Score the tokens after [start, stop) of each window, the reference first."""
    device = probes[0].model.device
    last = min(stop, len(batch[0]) - 1)
    target_R = torch.tensor([t for part in batch for t in part[start + 1 : last + 1]])
    target_R = target_R.to(device)
    reference_RV: torch.Tensor | None = None
    for probe in probes:
        logits_RV = probe.logits(batch, start, stop)
        if last < stop:
            # The last token of a window has no successor in it.
            rows = logits_RV.view(len(batch), stop - start, -1)[:, : last - start]
            logits_RV = rows.reshape(-1, rows.shape[-1])
        if target_R.numel() == 0:
            continue
        log_prob_RV = logits_RV.log_softmax(dim=-1)
        if reference_RV is None:
            reference_RV = log_prob_RV
        nll_R = -log_prob_RV.gather(1, target_R[:, None])[:, 0]
        probe.nll_sum += float(nll_R.double().sum())
        agreeing_R = log_prob_RV.argmax(dim=-1) == reference_RV.argmax(dim=-1)
        probe.num_agreeing += int(agreeing_R.sum())
        kld_R = (reference_RV.exp() * (reference_RV - log_prob_RV)).sum(dim=-1)
        probe.klds.append(kld_R.cpu())


def _batches(windows: Sequence[Sequence[int]], rows_at_once: int) -> list[list[Sequence[int]]]:
    """Neighbouring windows of one length, as many as let chunks stay whole within the rows."""
    batches: list[list[Sequence[int]]] = []
    for part in windows:
        size = rows_at_once // min(len(part), MAX_CHUNK)
        if batches and len(batches[-1]) < size and len(batches[-1][0]) == len(part):
            batches[-1].append(part)
        else:
            batches.append([part])
    return batches


def _chunks(num_tokens: int, chunk: int) -> list[tuple[int, int]]:
    chunk = min(chunk, MAX_CHUNK)
    return [(i, min(i + chunk, num_tokens)) for i in range(0, num_tokens, chunk)]


def _rows_at_once(model: Decoder) -> int:
    """Rows of float32 logits that LOGIT_BYTES allows."""
    num_bytes = LOGIT_BYTES[model.device.type]
    if model.device.type == "cuda":
        num_bytes = min(num_bytes, free_memory_bytes(model.device) // 12)
    return max(1, num_bytes // (4 * model.config.vocab_size))


def _quantile(values: torch.Tensor, share: float) -> float:
    """Linear between neighbours; torch.quantile refuses more than 2**24 values."""
    place = share * (values.numel() - 1)
    low = math.floor(place)
    ordered = values.sort().values[low : low + 2]
    return float(ordered[0] + (ordered[-1] - ordered[0]) * (place - low))


def _check(model: Decoder, token_ids: Sequence[int], *, codecs: Sequence[str], window: int) -> None:
    limit = model.config.max_model_len
    if not 2 <= window <= limit:
        raise refuse(ConfigError, "window", window, f"2 to the model's context of {limit}")
    if len(token_ids) < 2:
        raise refuse(RequestError, "text", f"{len(token_ids)} tokens", "at least 2 tokens")
    if not codecs:
        raise refuse(ConfigError, "kv_cache_dtype", "", "at least one codec")
