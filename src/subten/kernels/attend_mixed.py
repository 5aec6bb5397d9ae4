"""`attend_mixed`: attention over the planes of an adaptive cache, and how much each page drew.

Letters: T tokens of the step, H query heads, G KV heads, D head_dim, P pages (of one sequence in
`page_table_SP` and `mass_SP`, positions in `table_PC`), S sequences, Q query tiles, N key
positions, M rows of a tile (tokens x heads of one KV head), Z splits, C columns of the table.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from subten.codecs.mixed import MixedFormat
from subten.core import PAGE_SIZE
from subten.kernels.attend import check_queries
from subten.kernels.attend_tiles import check_table
from subten.kernels.mixed_pages import MixedPages, Window, read_exact, read_planes
from subten.kernels.step import StepTensors


def attend_mixed_torch(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    *,
    scale: float,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None = None,
    coef_THC: torch.Tensor | None = None,
    table_PC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `attend_mixed`, and the CPU backend; any orthogonal `rotation_DD`."""
    check_mixed(q_THD, pages, fmt, step, window, rotation_DD, mass_SP)
    check_table(q_THD, step, coef_THC, table_PC)
    num_tokens, num_heads, head_dim = q_THD.shape
    query_start, kv_lens = step.query_start_S1.tolist(), step.kv_len_S.tolist()
    rows = []
    for s, kv_len in enumerate(kv_lens):
        first, end = query_start[s], query_start[s + 1]
        if first == end or kv_len == 0:
            rows.append(q_THD.new_zeros(end - first, num_heads, head_dim))
            continue
        page_N = step.page_table_SP[s, : -(-kv_len // PAGE_SIZE)]
        planes = tuple(x_GND[:, :kv_len] for x_GND in read_planes(pages, fmt, page_N))
        *exact, is_sink_N = read_exact(pages, fmt, window, s, int(page_N[0]), kv_len)
        for start in range(first, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            position_T = step.position_T[start:stop]
            added_THN = None
            if coef_THC is not None and table_PC is not None:
                added_THN = coef_THC[start:stop] * scale @ table_PC[:kv_len].T
            is_exact_TN = _exact_pairs(window, s, position_T, kv_len) | is_sink_N
            out_THD, mass_N = _dense(
                q_THD[start:stop].float() * scale,
                planes,
                tuple(exact),
                is_exact_TN,
                position_T,
                added_THN,
            )
            rows.append((out_THD @ rotation_DD.T).to(q_THD.dtype))
            if mass_SP is not None:
                padded_N = F.pad(mass_N.detach(), (0, -len(mass_N) % PAGE_SIZE))
                mass_P = padded_N.view(-1, PAGE_SIZE).sum(1)
                mass_SP[s, : len(mass_P)] += mass_P
    rows.append(q_THD.new_zeros(num_tokens - query_start[-1], num_heads, head_dim))
    return torch.cat(rows)


_CHUNK = 128
"""Query tokens scored at once: bounds memory to chunk x H x kv_len."""


def _exact_pairs(window: Window, s: int, position_T: torch.Tensor, num_keys: int) -> torch.Tensor:
    """[T, N]: which keys a query reads from recent rows."""
    key_N = torch.arange(num_keys, device=position_T.device)
    is_near_TN = position_T[:, None] - key_N < window.size
    return is_near_TN & (key_N >= window.from_S[s])


def _dense(
    q_THD: torch.Tensor,
    planes: tuple[torch.Tensor, ...],
    exact: tuple[torch.Tensor, ...],
    is_exact_TN: torch.Tensor,
    position_T: torch.Tensor,
    added_THN: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of scaled queries; and the sum of weights of each key, [N].

    `planes` and `exact` are K and V [G, N, D]; a pair of query and key reads one or the other.
    """
    num_tokens = len(q_THD)
    k_GND, v_GND = planes
    num_kv_heads, num_keys = len(k_GND), min(int(position_T[-1]) + 1, k_GND.shape[1])
    is_seen_TN = torch.arange(num_keys, device=q_THD.device) <= position_T[:, None]
    is_exact_TN = is_exact_TN[:, :num_keys] & is_seen_TN
    # The rows from the first that any query reads exactly: before it they may be anything.
    is_read_N = is_exact_TN.any(dim=0)
    q_GMD = q_THD.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    score_GMN = q_GMD @ k_GND[:, :num_keys].transpose(1, 2)
    score_GTMN = score_GMN.unflatten(1, (num_tokens, -1))
    (read_K,) = is_read_N.nonzero(as_tuple=True)
    exact_k_GKD, exact_v_GKD = (x_GND[:, read_K] for x_GND in exact)
    is_exact_TK = is_exact_TN[:, read_K]
    exact_GTMK = (q_GMD @ exact_k_GKD.transpose(1, 2)).unflatten(1, (num_tokens, -1))
    near_GTMK = torch.where(is_exact_TK[:, None], exact_GTMK, score_GTMN[..., read_K])
    score_GTMN = score_GTMN.index_copy(3, read_K, near_GTMK)
    if added_THN is not None:
        added_TGMN = added_THN[..., :num_keys].unflatten(1, (num_kv_heads, -1))
        score_GTMN = score_GTMN + added_TGMN.transpose(0, 1)
    weight_GTMN = score_GTMN.masked_fill(~is_seen_TN[:, None], -math.inf).softmax(-1)
    plane_GTMN = weight_GTMN.masked_fill(is_exact_TN[:, None], 0.0)
    near_GTMK = weight_GTMN[..., read_K].masked_fill(~is_exact_TK[:, None], 0.0)
    out_GMD = plane_GTMN.flatten(1, 2) @ v_GND[:, :num_keys]
    out_GMD = out_GMD + near_GTMK.flatten(1, 2) @ exact_v_GKD
    out_THD = out_GMD.unflatten(1, (num_tokens, -1)).transpose(0, 1).flatten(1, 2)
    return out_THD, weight_GTMN.sum(dim=(0, 1, 2))


def check_mixed(
    q_THD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    rotation_DD: torch.Tensor,
    mass_SP: torch.Tensor | None,
) -> None:
    """Assert what every backend of `attend_mixed` takes."""
    pages.check(fmt)
    assert q_THD.device == pages.place_P3.device, (q_THD.device, pages.place_P3.device)
    check_queries(q_THD, pages.num_kv_heads, fmt.head_dim, step)
    window.check(len(window.row_T), len(step.kv_len_S), q_THD.device)
    assert rotation_DD.shape == (fmt.head_dim, fmt.head_dim), rotation_DD.shape
    assert rotation_DD.dtype == torch.float32, rotation_DD.dtype
    if mass_SP is not None:
        assert mass_SP.dtype == torch.float32, mass_SP.dtype
        assert mass_SP.shape == step.page_table_SP.shape, (
            tuple(mass_SP.shape),
            tuple(step.page_table_SP.shape),
        )
        assert mass_SP.device == q_THD.device, (mass_SP.device, q_THD.device)
        assert mass_SP.stride(1) == 1, mass_SP.stride()
