"""What a cache of mixed fidelity costs in quality, on the CPU or a GPU, without its kernels.

A window of text is read in one pass. Each layer's keys and values exist in several versions: as
they are, and as each codec would give them back. A scheme says which version of each page the
queries of each page see, so that every position meets the cache as it would stand in stepwise
decoding: windows move, pages are encoded and demoted on the way. Reference: the same weights, BF16
rows. Schemes are in kv_schemes.py.

Letters: T tokens of a window, H query heads, G KV heads, D head dimension (model width in x_TD),
P pages of 64 tokens, N versions, Q queries of one page (64) of the R heads of a group, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from subten.calibration.rows import LayerRows, embed, run_layer
from subten.core import PAGE_SIZE, ConfigError, RequestError, refuse
from subten.kernels.cpu_linear import head_logits
from subten.models.decoder import Decoder

LOGIT_ROWS = 512
"""Rows of float32 logits at once; about five such tensors live together."""

EXACT_BITS = 16.0


Tiers = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Page of the queries -> version of every page up to it, of K and of V: int64 [page + 1] each."""


def all_encoded(page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiers of a codec without windows: version 1 everywhere."""
    tier_P = torch.ones(page + 1, dtype=torch.int64)
    return tier_P, tier_P


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A way to cache, by what its rows decode to.

    `encode(rows)` gives versions 1, 2, ... of the keys and of the values; version 0 is exact.
    `key_bits` and `value_bits` are true bits an element of each version, metadata included,
    version 0 included. The first `sinks` tokens, the last `key_window` keys and `value_window`
    values are exact whatever their page: stored instead of their codes, or with `is_beside` as
    well as them.
    """

    name: str
    ours: bool
    encode: Callable[[LayerRows], tuple[list[torch.Tensor], list[torch.Tensor]]]
    key_bits: tuple[float, ...]
    value_bits: tuple[float, ...]
    tiers: Tiers = all_encoded
    sinks: int = 0
    key_window: int = 0
    value_window: int = 0
    is_beside: bool = False

    def true_bits(self, num_tokens: int) -> float:
        """All bits over elements cached once `num_tokens` are; pages count whole."""
        last = -(-num_tokens // PAGE_SIZE) - 1
        total = 0.0
        sides = ((self.key_bits, self.key_window), (self.value_bits, self.value_window))
        for (bits, window), tier_P in zip(sides, self.tiers(last), strict=True):
            bits_T = torch.tensor(bits)[tier_P].repeat_interleave(PAGE_SIZE).double()
            is_exact_T = torch.zeros(len(bits_T), dtype=torch.bool)
            is_exact_T[: self.sinks] = True
            is_exact_T[max(0, num_tokens - window) : num_tokens] = True
            extra_T = EXACT_BITS - (0.0 if self.is_beside else bits_T)
            total += float((bits_T + is_exact_T * extra_T).sum())
        return total / (2 * num_tokens)

    def mean_true_bits(self, num_tokens: int) -> float:
        """The mean of `true_bits` over the ends of all pages of a window."""
        ends = [*range(PAGE_SIZE, num_tokens, PAGE_SIZE), num_tokens]
        return sum(self.true_bits(end) for end in ends) / len(ends)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemeQuality:
    """One scheme's figures; KLD in nats over next-token distributions, from the reference.

    `true_bits` is that of a full window, `true_bits_mean` the mean over its pages.
    """

    scheme: str
    ours: bool
    window: int
    true_bits: float
    true_bits_mean: float
    ppl: float
    ppl_reference: float
    ppl_ratio: float
    kld_mean: float
    kld_p50: float
    kld_p999: float
    top1_agreement: float
    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def quality_records(
    rows: Sequence[SchemeQuality], *, model: str, text: str, origin: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Flat records of one model and text; `origin` as `bench.records.origin` gives it."""
    named = {"kind": "kv_scheme_quality", "model": model, "text": text}
    return [{**named, **row.as_dict(), **origin} for row in rows]


def evaluate_schemes(
    model: Decoder,
    token_ids: Sequence[int],
    schemes: Sequence[Scheme],
    *,
    window: int,
    progress: Callable[[float], None] = lambda _share: None,
) -> list[SchemeQuality]:
    """Measure `schemes` on a text cut into windows that do not overlap; one entry each.

    `window` tokens at most the model's context; a shorter last window is scored as well. The first
    token of a window is not scored. Raises ConfigError for a window that the model cannot take,
    RequestError for too little text.
    """
    limit = model.config.max_model_len
    if not 2 <= window <= limit:
        raise refuse(ConfigError, "window", window, f"2 to the model's context of {limit}")
    if len(token_ids) < 2:
        raise refuse(RequestError, "text", f"{len(token_ids)} tokens", "at least 2 tokens")
    tallies = [_Tally() for _ in schemes]
    parts = [token_ids[i : i + window] for i in range(0, len(token_ids), window)]
    parts = [part for part in parts if len(part) > 1]
    done, num_passes = 0, len(parts) * (len(schemes) + 1)
    for part in parts:
        id_T = torch.tensor(part, device=model.device)
        reference_TD = hidden_states(model, id_T, EXACT)
        done += 1
        progress(done / num_passes)
        for scheme, tally in zip(schemes, tallies, strict=True):
            _score(model, id_T, reference_TD, hidden_states(model, id_T, scheme), tally)
            done += 1
            progress(done / num_passes)
    return [tally.result(scheme, window) for scheme, tally in zip(schemes, tallies, strict=True)]


@torch.inference_mode()
def hidden_states(
    model: Decoder,
    id_T: torch.Tensor,
    scheme: Scheme,
    *,
    see: Callable[[LayerRows, torch.Tensor], None] = lambda _rows, _q_HTD: None,
) -> torch.Tensor:
    """One window through all layers under a scheme -> the residual stream [T, d_model], float32.

    `see` is shown each layer's exact rows and rotated queries q_HTD, for calibration.
    """

    def attend(rows: LayerRows, q_HTD: torch.Tensor) -> torch.Tensor:
        see(rows, q_HTD)
        keys, values = scheme.encode(rows)
        versions = [rows.key_GTD, *keys], [rows.value_GTD, *values]
        return attend_tiers(q_HTD, *versions, scheme, scale=model.config.head_dim**-0.5)

    x_TD = embed(model, id_T)
    for index in range(len(model.layers)):
        x_TD = run_layer(model, index, x_TD, attend)
    return x_TD


def attend_tiers(
    q_HTD: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scheme: Scheme,
    *,
    scale: float,
) -> torch.Tensor:
    """Causal attention where each page is seen in the version that the scheme's tiers give.

    Versions [G, T, D]; q and the result [H, T, D]; the queries of one page at a time.
    """
    num_heads, num_tokens, head_dim = q_HTD.shape
    num_groups = keys[0].shape[0]
    num_pages = -(-num_tokens // PAGE_SIZE)
    pad = (0, 0, 0, num_pages * PAGE_SIZE - num_tokens)
    shape = (num_groups, num_pages, PAGE_SIZE, head_dim)
    key_NGPCD = torch.stack([F.pad(_with_sinks(k, keys[0], scheme), pad) for k in keys])
    value_NGPCD = torch.stack([F.pad(_with_sinks(v, values[0], scheme), pad) for v in values])
    key_NGPCD = key_NGPCD.view(-1, *shape)
    value_NGPCD = value_NGPCD.view(-1, *shape)
    q_GRPCD = F.pad(q_HTD * scale, pad).view(num_groups, -1, *shape[1:])
    out_GRPCD = torch.empty_like(q_GRPCD)
    row_C = torch.arange(PAGE_SIZE, device=q_HTD.device)
    for page in range(num_pages):
        q_GQD = q_GRPCD[:, :, page].reshape(num_groups, -1, head_dim)
        key_tier_P, value_tier_P = (t.to(q_HTD.device) for t in scheme.tiers(page))
        page_P = torch.arange(page + 1, device=q_HTD.device)
        key_PGCD = key_NGPCD[key_tier_P, :, page_P]
        value_PGCD = value_NGPCD[value_tier_P, :, page_P]
        s_GQT = q_GQD @ key_PGCD.transpose(0, 1).flatten(1, 2).transpose(1, 2)
        s_GRCPK = s_GQT.view(num_groups, -1, PAGE_SIZE, page + 1, PAGE_SIZE)
        for j, is_near_CK in _near_pages(page, scheme.key_window, row_C):
            exact_GQK = q_GQD @ key_NGPCD[0, :, j].transpose(1, 2)
            exact_GRCK = exact_GQK.view(num_groups, -1, PAGE_SIZE, PAGE_SIZE)
            s_GRCPK[:, :, :, j] = torch.where(is_near_CK, exact_GRCK, s_GRCPK[:, :, :, j])
        s_GRCPK[:, :, :, page].masked_fill_(row_C[:, None] < row_C[None, :], -math.inf)
        p_GQT = s_GQT.softmax(dim=-1)
        out_GQD = p_GQT @ value_PGCD.transpose(0, 1).flatten(1, 2)
        p_GRCPK = p_GQT.view_as(s_GRCPK)
        for j, is_near_CK in _near_pages(page, scheme.value_window, row_C):
            near_GQK = (p_GRCPK[:, :, :, j] * is_near_CK).flatten(1, 2)
            out_GQD += near_GQK @ (value_NGPCD[0, :, j] - value_PGCD[j])
        out_GRPCD[:, :, page] = out_GQD.view(num_groups, -1, PAGE_SIZE, head_dim)
    return out_GRPCD.view(num_heads, -1, head_dim)[:, :num_tokens]


EXACT = Scheme(
    name="bf16",
    ours=True,
    encode=lambda _rows: ([], []),
    key_bits=(EXACT_BITS,),
    value_bits=(EXACT_BITS,),
    tiers=lambda page: (torch.zeros(page + 1, dtype=torch.int64),) * 2,
)
"""The reference: every row as it is."""


def _near_pages(page: int, window: int, row_C: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Pages with tokens among the last `window` of some query of `page`: which pairs are near."""
    first = max(0, page - (window + PAGE_SIZE - 2) // PAGE_SIZE) if window else page + 1
    near = []
    for j in range(first, page + 1):
        distance_CK = (page - j) * PAGE_SIZE + row_C[:, None] - row_C[None, :]
        near.append((j, distance_CK < window))
    return near


def _with_sinks(x_GTD: torch.Tensor, exact_GTD: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return torch.cat([exact_GTD[:, : scheme.sinks], x_GTD[:, scheme.sinks :]], dim=1)


@dataclass(slots=True)
class _Tally:
    """What was measured of one scheme so far."""

    nll: float = 0.0
    reference_nll: float = 0.0
    num_agreeing: int = 0
    klds: list[torch.Tensor] = field(default_factory=list)

    def result(self, scheme: Scheme, window: int) -> SchemeQuality:
        kld = torch.cat(self.klds).double()
        count = kld.numel()
        return SchemeQuality(
            scheme=scheme.name,
            ours=scheme.ours,
            window=window,
            true_bits=scheme.true_bits(window),
            true_bits_mean=scheme.mean_true_bits(window),
            ppl=math.exp(self.nll / count),
            ppl_reference=math.exp(self.reference_nll / count),
            ppl_ratio=math.exp((self.nll - self.reference_nll) / count),
            kld_mean=float(kld.mean()),
            kld_p50=float(kld.quantile(0.5)),
            kld_p999=float(kld.quantile(0.999)),
            top1_agreement=self.num_agreeing / count,
            num_tokens=count,
        )


@torch.inference_mode()
def _score(
    model: Decoder,
    id_T: torch.Tensor,
    reference_TD: torch.Tensor,
    tested_TD: torch.Tensor,
    tally: _Tally,
) -> None:
    """Score the successors of all tokens but the last."""
    for start in range(0, len(id_T) - 1, LOGIT_ROWS):
        stop = min(start + LOGIT_ROWS, len(id_T) - 1)
        target_R1 = id_T[start + 1 : stop + 1, None]
        reference_RV = logits(model, reference_TD[start:stop]).log_softmax(dim=-1)
        tested_RV = logits(model, tested_TD[start:stop]).log_softmax(dim=-1)
        tally.reference_nll -= float(reference_RV.gather(1, target_R1).double().sum())
        tally.nll -= float(tested_RV.gather(1, target_R1).double().sum())
        agreeing_R = reference_RV.argmax(dim=-1) == tested_RV.argmax(dim=-1)
        tally.num_agreeing += int(agreeing_R.sum())
        kld_R = (reference_RV.exp() * (reference_RV - tested_RV)).sum(dim=-1)
        tally.klds.append(kld_R.cpu())


def logits(model: Decoder, x_TD: torch.Tensor) -> torch.Tensor:
    """The residual stream -> logits_TV float32, as the model's own forward ends."""
    eps = model.config.norm_eps
    if model.head_VD is not None and model.head_VD.format != "none":
        return model.ops.linear(  # type: ignore[no-any-return]
            x_TD, model.head_VD, norm_weight_K=model.norm_D, eps=eps, out_dtype=torch.float32
        )
    h_TD = model.ops.rms_norm(x_TD, model.norm_D, eps=eps)
    return head_logits(h_TD, model.embedding_VD if model.head_VD is None else model.head_VD.codes)
