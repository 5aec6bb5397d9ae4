"""One layer of an adaptive cache in memory: planes of pages, where each page lies, exact rows.

Letters: L layers, G KV heads, P page ids; X base, Y fine and Z cold planes of values, each with ids
of its own, X sink planes too; N exact rows (of `page_N`: pages, of a result: keys), E 2D, the last
letter of a pool is bytes. T tokens, S sequences of a step, D head_dim, O outlier channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subten.codecs import nested, shaped
from subten.codecs.mixed import COLD_BIAS, MixedFormat
from subten.codecs.nested import nested_levels
from subten.codecs.norm_byte import decode_norm
from subten.codecs.shaped import shaped_levels
from subten.codecs.vq import decode_vectors
from subten.core import PAGE_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPages:
    """One layer's planes, uint8, laid out as codecs/mixed.py says; all on one device.

    Keys of a page lie in `k_PGB` at its id, at `k_bits` a channel. Its values lie where `place_P3`
    int32 says, (base, fine, cold): ids of planes or -1; cold, or base alone, or base and fine.
    Bytes of a plane are adjacent; other strides are free.

    `recent_NGE` bf16 has exact rows, | K D | V D |, in the basis in which planes hold them; whose
    they are is told by a `Window`. `sink_XGB` has the first S rows of a sequence likewise, | K S x
    2D bytes | V S x 2D bytes |; `sink_P` int32 names the plane of a page, or -1. Both or none.

    `outlier_GO` int32: channels of keys, distinct in a head, that `k_out_PGB` keeps in BF16, 64
    rows of O numbers a page, in place of their codes. Both or none.
    """

    k_PGB: torch.Tensor
    k_bits: int
    vbase_XGB: torch.Tensor
    vfine_YGB: torch.Tensor
    vcold_ZGB: torch.Tensor
    place_P3: torch.Tensor
    recent_NGE: torch.Tensor
    sink_XGB: torch.Tensor | None = None
    sink_P: torch.Tensor | None = None
    k_out_PGB: torch.Tensor | None = None
    outlier_GO: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        """G."""
        return self.k_PGB.shape[1]

    @property
    def num_outliers(self) -> int:
        """O, 0 without outlier planes."""
        return 0 if self.outlier_GO is None else self.outlier_GO.shape[1]

    def num_sinks(self, fmt: MixedFormat) -> int:
        """S, rows of a sink plane; 0 without sink planes."""
        return 0 if self.sink_XGB is None else self.sink_XGB.shape[2] // fmt.exact_bytes(1)

    def check(self, fmt: MixedFormat) -> None:
        """Assert widths, dtypes, strides and one device."""
        num_sinks, num_outliers = self.num_sinks(fmt), self.num_outliers
        num_pages, num_kv_heads, head_dim = len(self.k_PGB), self.num_kv_heads, fmt.head_dim
        assert (self.sink_XGB is None) == (self.sink_P is None), "sink_XGB and sink_P: one alone"
        assert (self.k_out_PGB is None) == (self.outlier_GO is None), "outliers: one alone"
        assert num_sinks <= PAGE_SIZE, num_sinks
        assert num_outliers < head_dim, (num_outliers, head_dim)
        for name, pool, num_bytes in (
            ("k_PGB", self.k_PGB, fmt.k_bytes(self.k_bits)),
            ("vbase_XGB", self.vbase_XGB, fmt.base_bytes),
            ("vfine_YGB", self.vfine_YGB, fmt.fine_bytes),
            ("vcold_ZGB", self.vcold_ZGB, fmt.cold_bytes),
            ("sink_XGB", self.sink_XGB, fmt.exact_bytes(num_sinks)),
            ("k_out_PGB", self.k_out_PGB, fmt.outlier_bytes(num_outliers)),
        ):
            if pool is not None:
                each = (num_kv_heads, num_bytes)
                assert pool.shape[1:] == each, (name, tuple(pool.shape), each)
                assert pool.dtype == torch.uint8, (name, pool.dtype)
                assert pool.stride(2) == 1, (name, pool.stride())
        for name, index, shape in (
            ("place_P3", self.place_P3, (num_pages, 3)),
            ("sink_P", self.sink_P, (num_pages,)),
            ("outlier_GO", self.outlier_GO, (num_kv_heads, num_outliers)),
        ):
            if index is not None:
                assert index.shape == shape, (name, tuple(index.shape), shape)
                assert index.dtype == torch.int32, (name, index.dtype)
                assert index.is_contiguous(), (name, index.stride())
        assert self.recent_NGE.shape[1:] == (num_kv_heads, 2 * head_dim), self.recent_NGE.shape
        assert self.recent_NGE.dtype == torch.bfloat16, self.recent_NGE.dtype
        assert self.recent_NGE.stride(2) == 1, self.recent_NGE.stride()
        tensors = (self.k_PGB, self.vbase_XGB, self.vfine_YGB, self.vcold_ZGB, self.place_P3)
        optional = (self.recent_NGE, self.sink_XGB, self.sink_P, self.k_out_PGB, self.outlier_GO)
        devices = {t.device for t in (*tensors, *optional) if t is not None}
        assert len(devices) == 1, devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Whose exact rows `recent_NGE` holds in one step, the same for all layers; int32 tensors.

    A query at position p of sequence s reads key n from row base_S[s] + n % cap_S[s] if p - n <
    `size` and n >= from_S[s]. `row_T` is where each token of the step puts its own rows, distinct,
    or -1. Rows of all keys that the step's queries read so must be there: cap_S is at least `size`
    and the sequence's tokens in the step, less one.
    """

    size: int
    row_T: torch.Tensor
    base_S: torch.Tensor
    cap_S: torch.Tensor
    from_S: torch.Tensor

    def check(self, num_tokens: int, num_seqs: int, device: torch.device) -> None:
        """Assert shapes, dtypes and device."""
        assert self.size >= 0, self.size
        for name, length in (
            ("row_T", num_tokens),
            ("base_S", num_seqs),
            ("cap_S", num_seqs),
            ("from_S", num_seqs),
        ):
            index = getattr(self, name)
            assert index.shape == (length,), (name, tuple(index.shape), length)
            assert index.dtype == torch.int32, (name, index.dtype)
            assert index.is_contiguous(), (name, index.stride())
            assert index.device == device, (name, index.device, device)


def read_levels(
    pages: MixedPages, fmt: MixedFormat, page_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whole pages, given their ids, 64 rows each: `(k_GND, k_norm_GN, v_GND, v_norm_GN)` float32.

    Rows are to be multiplied by their norms, and their channels are `by_bytes`.
    """
    quarter, index_N = fmt.head_dim // 4, page_N.long()
    low_bytes, codes_bytes = PAGE_SIZE * quarter, fmt.k_bytes(pages.k_bits) - PAGE_SIZE
    k_GPB = pages.k_PGB[index_N].transpose(0, 1)
    low_GNQ = rows_of(k_GPB[..., :low_bytes])
    high_GNB = rows_of(k_GPB[..., low_bytes:codes_bytes])
    k_GND = shaped_levels(low_GNQ, high_GNB, bits=pages.k_bits).flatten(-2)
    norm_GN = decode_norm(k_GPB[..., codes_bytes:].flatten(1), shaped.BIAS)
    if pages.k_out_PGB is not None and pages.outlier_GO is not None and len(index_N):
        out_GPB = pages.k_out_PGB[index_N].transpose(0, 1).contiguous()
        out_GNO = out_GPB.view(torch.bfloat16).float().reshape(*k_GND.shape[:2], -1)
        part_GO, column_GO = pages.outlier_GO.long() // quarter, pages.outlier_GO.long() % quarter
        place_GNO = (4 * column_GO + part_GO)[:, None].expand(out_GNO.shape)
        k_GND = (k_GND * norm_GN[..., None]).scatter_(2, place_GNO, out_GNO)
        norm_GN = torch.ones_like(norm_GN)
    return k_GND, norm_GN, *read_values(pages, fmt, pages.place_P3[index_N])


def read_values(
    pages: MixedPages, fmt: MixedFormat, place_N3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of whole pages, given where they lie: `(v_GND, norm_GN)` as `read_levels` has them."""
    places = place_N3.tolist()
    is_cold = [cold >= 0 for _, _, cold in places]
    is_fine = [fine >= 0 and cold < 0 for _, fine, cold in places]
    is_base = [not (cold or fine) for cold, fine in zip(is_cold, is_fine, strict=True)]
    assert all(base >= 0 or cold >= 0 for base, _, cold in places), places
    shape = (pages.num_kv_heads, len(places), PAGE_SIZE)
    found = None
    for is_kind, read in ((is_base, _read_base), (is_fine, _read_fine), (is_cold, _read_cold)):
        if not any(is_kind):
            continue
        if all(is_kind):
            found = read(pages, place_N3.long())
            break
        if found is None:
            norm_GPN = torch.empty(shape, device=place_N3.device)
            found = norm_GPN.new_empty(*shape, fmt.head_dim), norm_GPN
        is_kind_N = torch.tensor(is_kind, device=place_N3.device)
        for whole, part in zip(found, read(pages, place_N3[is_kind_N].long()), strict=True):
            whole[:, is_kind_N] = part
    assert found is not None, "no pages"
    v_GPND, norm_GPN = found
    return v_GPND.flatten(1, 2), norm_GPN.flatten(1, 2)


def _read_base(
    pages: MixedPages, place_N3: torch.Tensor, fine_GPNB: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    plane_GPB = pages.vbase_XGB[place_N3[:, 0]].transpose(0, 1)
    codes_GPNB = rows_of(plane_GPB[..., :-PAGE_SIZE], each_page=True)
    level_GPND = nested_levels(codes_GPNB, fine_GPNB).flatten(-2)
    return level_GPND, decode_norm(plane_GPB[..., -PAGE_SIZE:], nested.BIAS)


def _read_fine(pages: MixedPages, place_N3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fine_GPB = pages.vfine_YGB[place_N3[:, 1]].transpose(0, 1)
    return _read_base(pages, place_N3, rows_of(fine_GPB, each_page=True))


def _read_cold(pages: MixedPages, place_N3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    plane_GPB = pages.vcold_ZGB[place_N3[:, 2]].transpose(0, 1)
    codes_GPNB = rows_of(plane_GPB[..., :-PAGE_SIZE], each_page=True)
    norm_GPN = decode_norm(plane_GPB[..., -PAGE_SIZE:], COLD_BIAS)
    return by_bytes(decode_vectors(codes_GPNB)), norm_GPN


def by_bytes(x_ND: torch.Tensor) -> torch.Tensor:
    """Channels in the order in which bytes of codes hold them: p D/4 + j comes to 4 j + p."""
    parts_N4J: torch.Tensor = x_ND.unflatten(-1, (4, -1))
    return parts_N4J.mT.flatten(-2)


def by_channels(x_ND: torch.Tensor) -> torch.Tensor:
    """Inverse of `by_bytes`."""
    parts_NJ4: torch.Tensor = x_ND.unflatten(-1, (-1, 4))
    return parts_NJ4.mT.flatten(-2)


def read_exact(
    pages: MixedPages, window: Window, s: int, key_K: torch.Tensor, sink_GSE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact rows of keys of sequence s, its sinks first: `(k_GKD, v_GKD)` float32."""
    num_sinks = sink_GSE.shape[1]
    row_K = window.base_S[s] + key_K[num_sinks:] % window.cap_S[s]
    rows_GKE = torch.cat([sink_GSE, pages.recent_NGE[row_K].transpose(0, 1)], dim=1)
    k_GKD, v_GKD = rows_GKE.float().chunk(2, dim=-1)
    return k_GKD, v_GKD


def read_sinks(pages: MixedPages, fmt: MixedFormat, page: int, num_keys: int) -> torch.Tensor:
    """BF16 [G, S, E]: sink rows of a sequence of `num_keys`, whose first page is `page`."""
    sink = -1 if pages.sink_P is None else int(pages.sink_P[page])
    if sink < 0 or pages.sink_XGB is None:
        return pages.recent_NGE.new_empty(pages.num_kv_heads, 0, 2 * fmt.head_dim)
    plane_GB = pages.sink_XGB[sink].contiguous()
    rows_G2SD: torch.Tensor = plane_GB.view(torch.bfloat16).unflatten(1, (2, -1, fmt.head_dim))
    return rows_G2SD.transpose(1, 2).flatten(2)[:, :num_keys]


def rows_of(plane_GPB: torch.Tensor, *, each_page: bool = False) -> torch.Tensor:
    """[G, P, bytes] of 64 rows a page -> [G, rows, bytes of a row], or [G, P, 64, bytes]."""
    rows_GPNB: torch.Tensor = plane_GPB.unflatten(-1, (PAGE_SIZE, -1))
    return rows_GPNB if each_page else rows_GPNB.flatten(1, 2)
