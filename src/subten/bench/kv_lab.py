"""What a cache of mixed fidelity costs in quality, on the CPU or a GPU, without its kernels.

A window of text is read in one pass, many windows of one length together. Each layer's keys and
values exist in several versions: as they are, and as each codec would give them back. A scheme says
which version of each page the queries of each page see, so that every position meets the cache as
it would stand in stepwise decoding: windows move, pages are encoded and demoted on the way.
Reference: the same weights, BF16 rows. Schemes are in kv_schemes.py and kv_ours.py.

Letters: W windows, T tokens of a window, H query heads, G KV heads, D head dimension (model width
in x_WTD), P pages of 64 tokens, C tokens of a page, K tokens of the pages up to one, N versions, Q
queries of one page of the R heads of a group, M scored tokens, V vocabulary. Rows [G, T, D] have W
before them where they are of several windows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from subten.calibration.rows import LayerRows, embed, run_layer
from subten.core import PAGE_SIZE, ConfigError, RequestError, refuse
from subten.device import on_device
from subten.kernels.cpu_linear import head_logits
from subten.models.decoder import Decoder

LOGIT_ROWS = {"cpu": 512, "cuda": 8192}
"""Rows of float32 logits at once, by device; about seven such tensors live together."""

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 2**17}
"""Tokens of windows that are read together: on a GPU enough to make launches cheap."""

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

    `encode(rows)` gives all versions of the keys and of the values; version 0 is what exact rows
    are read as. `key_bits` and `value_bits` are true bits an element of each version, metadata
    included. The first `sinks` tokens, the last `key_window` keys and `value_window` values are
    exact whatever their page: stored instead of their codes, or with `is_beside` as well as them.
    `codebook_bytes` are those of one model, however many tokens it caches.
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
    codebook_bytes: int = 0

    def true_bits(self, num_tokens: int, elements: int | None = None) -> float:
        """All bits over elements cached once `num_tokens` are; pages count whole.

        With `elements` of a token, of all layers, codebooks count.
        """
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
        codebooks = 0.0 if elements is None else 8 * self.codebook_bytes / elements
        return (total / 2 + codebooks) / num_tokens

    def mean_true_bits(self, num_tokens: int, elements: int | None = None) -> float:
        """The mean of `true_bits` over the ends of all pages of a window."""
        ends = [*range(PAGE_SIZE, num_tokens, PAGE_SIZE), num_tokens]
        return sum(self.true_bits(end, elements) for end in ends) / len(ends)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemeQuality:
    """One scheme's figures; KLD in nats over next-token distributions, from the reference.

    `true_bits` is that at the end of a full window, `true_bits_mean` the mean over its pages.
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
) -> Iterator[SchemeQuality]:
    """Measure `schemes` on a text cut into windows that do not overlap; each as it is done.

    `window` tokens at most the model's context; a shorter last window is scored as well. The first
    token of a window is not scored. The reference is read once, before all schemes, and its
    residual stream kept. Raises ConfigError for a window that the model cannot take, RequestError
    for too little text.
    """
    limit = model.config.max_model_len
    if not 2 <= window <= limit:
        raise refuse(ConfigError, "window", window, f"2 to the model's context of {limit}")
    if len(token_ids) < 2:
        raise refuse(RequestError, "text", f"{len(token_ids)} tokens", "at least 2 tokens")
    return _evaluate(model, token_ids, schemes, window, progress)


def _evaluate(
    model: Decoder,
    token_ids: Sequence[int],
    schemes: Sequence[Scheme],
    window: int,
    progress: Callable[[float], None],
) -> Iterator[SchemeQuality]:
    batches = window_batches(model, token_ids, window)
    done, num_passes = 0, len(batches) * (len(schemes) + 1)
    references = []
    for id_WT in batches:
        references.append(hidden_states(model, id_WT, EXACT))
        done += 1
        progress(done / num_passes)
    elements = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim
    for scheme in schemes:
        tally = _Tally()
        for id_WT, reference_WTD in zip(batches, references, strict=True):
            _score(model, id_WT, reference_WTD, hidden_states(model, id_WT, scheme), tally)
            done += 1
            progress(done / num_passes)
        yield tally.result(scheme, window, elements)


def window_batches(model: Decoder, token_ids: Sequence[int], window: int) -> list[torch.Tensor]:
    """Windows of a text on the model's device, int64 [W, T]; what is left, if scored, by itself."""
    id_M = torch.tensor(token_ids, device=model.device)
    whole = len(id_M) // window * window
    at_once = max(1, TOKENS_AT_ONCE[model.device.type] // window)
    batches = list(id_M[:whole].view(-1, window).split(at_once)) if whole else []
    if len(id_M) - whole > 1:
        batches.append(id_M[None, whole:])
    return batches


@torch.inference_mode()
def hidden_states(
    model: Decoder,
    id_WT: torch.Tensor,
    scheme: Scheme,
    *,
    see: Callable[[LayerRows, torch.Tensor], None] = lambda _rows, _q_HTD: None,
) -> torch.Tensor:
    """Windows through all layers under a scheme -> the residual stream [W, T, d_model], float32.

    One window [T] gives [T, d_model]. `see` is shown each layer's exact rows and rotated queries
    q_HTD, for calibration.
    """
    views = _page_views(scheme, -(-id_WT.shape[-1] // PAGE_SIZE), model.device)

    def attend(rows: LayerRows, q_HTD: torch.Tensor) -> torch.Tensor:
        see(rows, q_HTD)
        keys, values = scheme.encode(rows)
        # To attention, heads of other windows are other heads.
        out_HTD = attend_tiers(
            _flat(q_HTD),
            [_flat(key_GTD) for key_GTD in keys],
            [_flat(value_GTD) for value_GTD in values],
            scheme,
            scale=model.config.head_dim**-0.5,
            views=views,
        )
        return out_HTD.view_as(q_HTD)

    with on_device(model.device):
        x_WTD = embed(model, id_WT)
        for index in range(len(model.layers)):
            x_WTD = run_layer(model, index, x_WTD, attend)
    return x_WTD


def attend_tiers(
    q_HTD: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scheme: Scheme,
    *,
    scale: float,
    views: Sequence[_PageView] | None = None,
) -> torch.Tensor:
    """Causal attention where each page is seen in the version that the scheme's tiers give.

    Versions [G, T, D]; q and the result [H, T, D]; the queries of one page at a time.
    """
    num_heads, num_tokens, head_dim = q_HTD.shape
    num_groups = keys[0].shape[0]
    num_pages = -(-num_tokens // PAGE_SIZE)
    if views is None:
        views = _page_views(scheme, num_pages, q_HTD.device)
    pad = (0, 0, 0, num_pages * PAGE_SIZE - num_tokens)
    sides = []
    for versions in (keys, values):
        padded = [F.pad(_with_sinks(x_GTD, versions[0], scheme), pad) for x_GTD in versions]
        sides.append(torch.stack(padded, dim=1).view(num_groups, -1, PAGE_SIZE, head_dim))
    key_GNCD, value_GNCD = sides  # All pages of version 0, then of version 1, ...
    q_GRPCD = F.pad(q_HTD * scale, pad).view(num_groups, -1, num_pages, PAGE_SIZE, head_dim)
    out_GRPCD = torch.empty_like(q_GRPCD)
    for page, view in enumerate(views):
        q_GQD = q_GRPCD[:, :, page].reshape(num_groups, -1, head_dim)
        key_GKD = key_GNCD.index_select(1, view.key_place_P).flatten(1, 2)
        value_GPCD = value_GNCD.index_select(1, view.value_place_P)
        s_GQK = q_GQD @ key_GKD.mT
        s_GRCPK = s_GQK.view(num_groups, -1, PAGE_SIZE, page + 1, PAGE_SIZE)
        for j, is_near_CK in view.near_keys:
            exact_GQK = q_GQD @ key_GNCD[:, j].mT
            exact_GRCK = exact_GQK.view(num_groups, -1, PAGE_SIZE, PAGE_SIZE)
            s_GRCPK[:, :, :, j] = torch.where(is_near_CK, exact_GRCK, s_GRCPK[:, :, :, j])
        s_GRCPK[:, :, :, page].masked_fill_(view.is_later_CK, -math.inf)
        p_GQK = s_GQK.softmax(dim=-1)
        out_GQD = p_GQK @ value_GPCD.flatten(1, 2)
        p_GRCPK = p_GQK.view_as(s_GRCPK)
        for j, is_near_CK in view.near_values:
            near_GQK = (p_GRCPK[:, :, :, j] * is_near_CK).flatten(1, 2)
            out_GQD += near_GQK @ (value_GNCD[:, j] - value_GPCD[:, j])
        out_GRPCD[:, :, page] = out_GQD.view(num_groups, -1, PAGE_SIZE, head_dim)
    return out_GRPCD.view(num_heads, -1, head_dim)[:, :num_tokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class _PageView:
    """What the queries of one page see: where its versions lie, and which pairs are near.

    Near pages: those with tokens among the last of a window, and which pairs are.
    """

    key_place_P: torch.Tensor
    value_place_P: torch.Tensor
    near_keys: list[tuple[int, torch.Tensor]]
    near_values: list[tuple[int, torch.Tensor]]
    is_later_CK: torch.Tensor


def _page_views(scheme: Scheme, num_pages: int, device: torch.device) -> list[_PageView]:
    """One for each page, on the device once for all layers."""
    row_C = torch.arange(PAGE_SIZE, device=device)
    distance_CK = row_C[:, None] - row_C[None, :]

    @functools.cache
    def near_by(window: int, apart: int) -> torch.Tensor:
        return apart * PAGE_SIZE + distance_CK < window

    views = []
    for page in range(num_pages):
        places = [tier_P * num_pages + torch.arange(page + 1) for tier_P in scheme.tiers(page)]
        near = []
        for window in (scheme.key_window, scheme.value_window):
            reach = (window + PAGE_SIZE - 2) // PAGE_SIZE if window else -1
            first = max(0, page - reach)
            near.append([(j, near_by(window, page - j)) for j in range(first, page + 1)])
        view = _PageView(
            key_place_P=places[0].to(device),
            value_place_P=places[1].to(device),
            near_keys=near[0],
            near_values=near[1],
            is_later_CK=distance_CK < 0,
        )
        views.append(view)
    return views


EXACT = Scheme(
    name="bf16",
    ours=True,
    encode=lambda rows: ([rows.key_GTD], [rows.value_GTD]),
    key_bits=(EXACT_BITS,),
    value_bits=(EXACT_BITS,),
    tiers=lambda page: (torch.zeros(page + 1, dtype=torch.int64),) * 2,
)
"""The reference: every row as it is."""


def _flat(x_GTD: torch.Tensor) -> torch.Tensor:
    return x_GTD.reshape(-1, *x_GTD.shape[-2:])


def _with_sinks(x_GTD: torch.Tensor, exact_GTD: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return torch.cat([exact_GTD[:, : scheme.sinks], x_GTD[:, scheme.sinks :]], dim=1)


@dataclass(slots=True)
class _Tally:
    """What was measured of one scheme so far, on the device: nothing waits for a sum."""

    nlls: list[torch.Tensor] = field(default_factory=list)
    reference_nlls: list[torch.Tensor] = field(default_factory=list)
    is_agreeing: list[torch.Tensor] = field(default_factory=list)
    klds: list[torch.Tensor] = field(default_factory=list)

    def result(self, scheme: Scheme, window: int, elements: int) -> SchemeQuality:
        kld, nll, reference_nll = (
            torch.cat(parts).double().cpu() for parts in (self.klds, self.nlls, self.reference_nlls)
        )
        mean, reference_mean = float(nll.mean()), float(reference_nll.mean())
        return SchemeQuality(
            scheme=scheme.name,
            ours=scheme.ours,
            window=window,
            true_bits=scheme.true_bits(window, elements),
            true_bits_mean=scheme.mean_true_bits(window, elements),
            ppl=math.exp(mean),
            ppl_reference=math.exp(reference_mean),
            ppl_ratio=math.exp(mean - reference_mean),
            kld_mean=float(kld.mean()),
            kld_p50=float(kld.quantile(0.5)),
            kld_p999=float(kld.quantile(0.999)),
            top1_agreement=float(torch.cat(self.is_agreeing).double().mean()),
            num_tokens=kld.numel(),
        )


@torch.inference_mode()
def _score(
    model: Decoder,
    id_WT: torch.Tensor,
    reference_WTD: torch.Tensor,
    tested_WTD: torch.Tensor,
    tally: _Tally,
) -> None:
    """Score the successors of all tokens but the last of each window."""
    rows = LOGIT_ROWS[model.device.type]
    parts = (
        id_WT[:, 1:].reshape(-1, 1).split(rows),
        reference_WTD[:, :-1].flatten(0, 1).split(rows),
        tested_WTD[:, :-1].flatten(0, 1).split(rows),
    )
    for target_M1, reference_MD, tested_MD in zip(*parts, strict=True):
        reference_MV = logits(model, reference_MD).log_softmax(dim=-1)
        tested_MV = logits(model, tested_MD).log_softmax(dim=-1)
        tally.reference_nlls.append(-reference_MV.gather(1, target_M1)[:, 0])
        tally.nlls.append(-tested_MV.gather(1, target_M1)[:, 0])
        tally.is_agreeing.append(reference_MV.argmax(dim=-1) == tested_MV.argmax(dim=-1))
        tally.klds.append((reference_MV.exp() * (reference_MV - tested_MV)).sum(dim=-1))


def logits(model: Decoder, x_TD: torch.Tensor) -> torch.Tensor:
    """The residual stream -> logits_TV float32, as the model's own forward ends."""
    eps = model.config.norm_eps
    with on_device(model.device):
        if model.head_VD is not None and model.head_VD.format != "none":
            return model.ops.linear(  # type: ignore[no-any-return]
                x_TD, model.head_VD, norm_weight_K=model.norm_D, eps=eps, out_dtype=torch.float32
            )
        h_TD = model.ops.rms_norm(x_TD, model.norm_D, eps=eps)
    return head_logits(h_TD, model.embedding_VD if model.head_VD is None else model.head_VD.codes)
