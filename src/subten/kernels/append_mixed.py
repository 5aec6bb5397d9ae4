"""`append_mixed`: encode and store keys and values of a step, in planes and as exact rows.

Letters: T tokens of the step, G KV heads, D head_dim, E 2D, S sequences, B bytes of a row, O
outlier channels, N rows of a tile.
"""

from __future__ import annotations

import torch

from subten.codecs.mixed import MixedFormat
from subten.codecs.nested import encode_nested
from subten.codecs.shaped import encode_shaped, outliers_of
from subten.core import PAGE_SIZE
from subten.kernels.mixed_pages import MixedPages, Window
from subten.kernels.step import StepTensors


def append_mixed_torch(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    *,
    rotation_DD: torch.Tensor,
    feedback_GDD: torch.Tensor | None = None,
    bad_T: torch.Tensor | None = None,
) -> None:
    """Twin of `append_mixed`, and the CPU backend; any orthogonal `rotation_DD`."""
    check_append_mixed(k_TGD, v_TGD, pages, fmt, step, window, rotation_DD, feedback_GDD, bad_T)
    x_TGE = torch.cat([k_TGD, v_TGD.float() @ rotation_DD], dim=-1)
    (kept_T,) = (window.row_T >= 0).nonzero(as_tuple=True)
    pages.recent_NGE[window.row_T[kept_T].long()] = x_TGE[kept_T].bfloat16()
    (kept_T,) = (step.slot_T >= 0).nonzero(as_tuple=True)
    k_TGD, v_TGD = x_TGE[kept_T].chunk(2, dim=-1)
    page_T, row_T = step.slot_T[kept_T] // PAGE_SIZE, step.slot_T[kept_T] % PAGE_SIZE
    base_T, fine_T, _ = pages.place_P3[page_T].long().unbind(1)

    low, high, norm, is_bad_TG = encode_shaped(
        k_TGD.contiguous(),
        bits=pages.k_bits,
        feedback_GDD=feedback_GDD,
        outlier_GO=pages.outlier_GO,
    )
    start = 0
    for part_TGB in (low, high, norm[..., None]):
        start = _put(pages.k_PGB, start, page_T, row_T, part_TGB)
    if pages.k_out_PGB is not None and pages.outlier_GO is not None:
        out_TGO = outliers_of(k_TGD, pages.outlier_GO).bfloat16()
        _put(pages.k_out_PGB, 0, page_T, row_T, out_TGO.view(torch.uint8))
    codes, fine, norm, is_bad_v_TG = encode_nested(v_TGD.contiguous())
    start = _put(pages.vbase_XGB, 0, base_T, row_T, codes)
    _put(pages.vbase_XGB, start, base_T, row_T, norm[..., None])
    _put(pages.vfine_YGB, 0, fine_T, row_T, fine)
    if bad_T is not None:
        bad_T[kept_T] |= (is_bad_TG | is_bad_v_TG).any(1).to(bad_T.dtype)
    if pages.sink_XGB is not None and pages.sink_P is not None:
        position_T, num_sinks = step.position_T[kept_T], pages.num_sinks(fmt)
        plane_T = torch.where(position_T < num_sinks, pages.sink_P[page_T].long(), -1)
        bytes_TGB = x_TGE[kept_T].bfloat16().unflatten(-1, (2, -1)).view(torch.uint8)
        half = fmt.exact_bytes(num_sinks) // 2
        for which in (0, 1):
            sink_XGB = pages.sink_XGB[..., which * half :]
            _put(sink_XGB, 0, plane_T, position_T, bytes_TGB[:, :, which], num_rows=num_sinks)


def _put(
    pool_PGB: torch.Tensor,
    start: int,
    plane_T: torch.Tensor,
    row_T: torch.Tensor,
    part_TGB: torch.Tensor,
    num_rows: int = PAGE_SIZE,
) -> int:
    """Put rows into planes from byte `start` on, none into -1; the byte after the last of them."""
    end = start + num_rows * part_TGB.shape[-1]
    (kept_T,) = (plane_T >= 0).nonzero(as_tuple=True)
    if part_TGB.shape[-1] and len(kept_T):
        part_PGNB = pool_PGB[..., start:end].unflatten(-1, (num_rows, -1))
        part_PGNB[plane_T[kept_T], :, row_T[kept_T]] = part_TGB[kept_T]
    return end


def check_append_mixed(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages: MixedPages,
    fmt: MixedFormat,
    step: StepTensors,
    window: Window,
    rotation_DD: torch.Tensor,
    feedback_GDD: torch.Tensor | None,
    bad_T: torch.Tensor | None,
) -> None:
    """Assert what every backend of `append_mixed` takes."""
    num_tokens, num_kv_heads, head_dim = k_TGD.shape
    pages.check(fmt)
    window.check(num_tokens, len(step.kv_len_S), k_TGD.device)
    assert (num_kv_heads, head_dim) == (pages.num_kv_heads, fmt.head_dim), k_TGD.shape
    assert v_TGD.shape == k_TGD.shape, (v_TGD.shape, k_TGD.shape)
    assert k_TGD.dtype == torch.float32, k_TGD.dtype
    assert v_TGD.dtype in (torch.bfloat16, torch.float32), v_TGD.dtype
    assert rotation_DD.shape == (head_dim, head_dim), rotation_DD.shape
    assert rotation_DD.dtype == torch.float32, rotation_DD.dtype
    for name, index_T in (("position_T", step.position_T), ("slot_T", step.slot_T)):
        assert index_T.dtype == torch.int64, (name, index_T.dtype)
        assert index_T.shape == (num_tokens,), (name, index_T.shape, num_tokens)
        assert index_T.is_contiguous(), (name, index_T.stride())
    if feedback_GDD is not None:
        shape = (num_kv_heads, head_dim, head_dim)
        assert feedback_GDD.shape == shape, (feedback_GDD.shape, shape)
        assert feedback_GDD.dtype == torch.float32, feedback_GDD.dtype
        assert feedback_GDD.is_contiguous(), feedback_GDD.stride()
    if bad_T is not None:
        assert bad_T.shape == (num_tokens,), (bad_T.shape, num_tokens)
        assert bad_T.dtype == torch.int32, bad_T.dtype
        assert bad_T.is_contiguous(), bad_T.stride()
    optional = (feedback_GDD, bad_T)
    tensors = (k_TGD, v_TGD, pages.k_PGB, rotation_DD, step.slot_T, *optional)
    devices = {tensor.device for tensor in tensors if tensor is not None}
    assert len(devices) == 1, devices
