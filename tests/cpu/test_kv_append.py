"""`kv_append` against its twin, byte for byte where it can be, and against FP64 rows.

Letters: T tokens, G KV heads, D head_dim, P pages or positions, B bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import assert_close
from subten.codecs import CODECS, KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.kernels.kv_append import (
    kv_append,
    kv_append_torch,
    page_planes,
    rotate_rows,
    rotation_stages,
)
from subten.kernels.triton_shim import tl, triton_jit

Randn = Callable[..., torch.Tensor]
OPS = [pytest.param(kv_append, marks=pytest.mark.triton), kv_append_torch]


def make_rope(num_positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """The usual table: D/2 frequencies, cosines then sines."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).float().to(device)


def append(
    op: Callable[..., None],
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    pages_PGB: torch.Tensor,
    fmt: KVFormat,
    slots: list[int],
    positions: list[int] | None = None,
    **norm: Any,
) -> torch.Tensor | None:
    """Call `op` with tensors made from plain integers; positions 0, 1, ... unless given."""
    device = pages_PGB.device
    return op(  # type: ignore[no-any-return]
        k_TGD,
        v_TGD,
        pages_PGB,
        fmt,
        make_rope(300, fmt.head_dim, device),
        torch.tensor(positions or range(len(slots)), dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        rotation_DD=hadamard(fmt.head_dim, device) if fmt.codec.is_rotated else None,
        **norm,
    )


def make_pages(
    fmt: KVFormat, num_pages: int, num_kv_heads: int, device: torch.device
) -> torch.Tensor:
    """Pages of 0xFF: NaN to every codec until written."""
    shape = (num_pages, num_kv_heads, fmt.page_bytes)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=device)


def exact_rows(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    fmt: KVFormat,
    positions: list[int],
    norm_weight_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows before encoding, FP64, complex rotation: channel i + D/2 is the imaginary part of i."""
    k, v, half = k_TGD.double(), v_TGD.double(), fmt.head_dim // 2
    if norm_weight_D is not None:
        k = k / (k.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight_D.double()
    table = make_rope(300, fmt.head_dim, k.device)[positions].double()
    turn = torch.complex(table[:, :half], table[:, half:])[:, None]
    turned = torch.complex(k[..., :half], k[..., half:]) * turn
    k = torch.cat([turned.real, turned.imag], dim=-1)
    if fmt.codec.is_rotated:
        rotation = hadamard(fmt.head_dim, k.device).double()
        k, v = k @ rotation, v @ rotation
    return k, v


def stored_rows(
    pages_PGB: torch.Tensor, fmt: KVFormat, slots: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the codec reads back at `slots`, row by row straight from the bytes."""
    both = []
    for offsets in (
        (fmt.k_codes, fmt.k_scale, fmt.k_zero),
        (fmt.v_codes, fmt.v_scale, fmt.v_zero),
    ):
        rows = []
        for slot in slots:
            for page_B in pages_PGB[slot // PAGE_SIZE]:
                parts = []
                for offset, size in zip(
                    offsets, (fmt.row.codes, fmt.row.scale, fmt.row.zero), strict=True
                ):
                    start = offset + slot % PAGE_SIZE * size
                    parts.append(page_B[start : start + size].clone()[None])
                rows.append(fmt.codec.decode(*parts, fmt.head_dim)[0])
        both.append(torch.stack(rows).view(len(slots), pages_PGB.shape[1], fmt.head_dim))
    return both[0], both[1]


def check_rows(actual_TGD: torch.Tensor, exact_TGD: torch.Tensor, fmt: KVFormat, name: str) -> None:
    """The stored rows err no more than encoding the exact rows does.

    FP32 rounding before the encoder (norm, angles and butterfly: below 2**-20 of the row's largest
    value) may move a value over a code's edge, where both codes err alike, or a BF16 scale by one
    step: so each row's largest error may exceed by 2 % and 2**-20 the largest of the ideal
    encoder's, for the row and for it 2**-20 larger and smaller.
    """
    rows = exact_TGD.float().reshape(-1, fmt.head_dim)
    near = [
        fmt.codec.decode(*fmt.codec.encode(rows * factor), fmt.head_dim).view_as(exact_TGD)
        for factor in (1.0, 1 + 2**-20, 1 - 2**-20)
    ]
    ideal = near[0]
    ideal_TG = torch.stack([(n - exact_TGD).abs().amax(-1) for n in near]).amax(0)
    error_TG = (actual_TGD - exact_TGD).abs().amax(-1)
    allowed_TG = 1.02 * ideal_TG + 2**-20 * exact_TGD.abs().amax(-1)
    assert (error_TG <= allowed_TG).all(), (name, error_TG, allowed_TG)
    rms = (actual_TGD - exact_TGD).square().mean().sqrt()
    ideal_rms = (ideal - exact_TGD).square().mean().sqrt()
    assert rms <= 1.02 * ideal_rms + 2**-20 * exact_TGD.abs().amax(), (name, rms, ideal_rms)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "slots", "has_norm", "dtype"),
    [
        (80, 1, [130, 127, 128, 2, 67], True, torch.float32),
        (64, 2, [63], False, torch.bfloat16),
        (128, 1, [64, 0, 1], True, torch.bfloat16),
        pytest.param(48, 8, list(range(190, 3, -1)), True, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(256, 3, list(range(0, 190, 3)), False, torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_rows_are_encoded_as_exactly_as_the_codec_can(
    randn: Randn,
    op: Callable[..., None],
    codec: str,
    head_dim: int,
    num_kv_heads: int,
    slots: list[int],
    has_norm: bool,
    dtype: torch.dtype,
) -> None:
    fmt = kv_format(codec, head_dim)
    shape = (len(slots), num_kv_heads, head_dim)
    k_TGD, v_TGD = randn(*shape, dtype=dtype, scale=3.0), randn(*shape, dtype=dtype)
    weight_D, eps = (1 + 0.1 * randn(head_dim), 1e-5) if has_norm else (None, 0.0)
    positions = [(7 * slot) % 300 for slot in slots]
    pages_PGB = make_pages(fmt, 3, num_kv_heads, k_TGD.device)
    append(op, k_TGD, v_TGD, pages_PGB, fmt, slots, positions, norm_weight_D=weight_D, eps=eps)
    exact = exact_rows(k_TGD, v_TGD, fmt, positions, weight_D, eps)
    for name, actual_TGD, exact_TGD in zip(
        "kv", stored_rows(pages_PGB, fmt, slots), exact, strict=True
    ):
        check_rows(actual_TGD, exact_TGD, fmt, name)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("codec", ["fp32", "int4", "int4_g32", "fp4"])
def test_only_the_named_rows_are_written(
    randn: Randn, generator: torch.Generator, op: Callable[..., None], codec: str
) -> None:
    # Slot -1 is padding (case G04): its token leaves no trace, wherever it stands.
    fmt = kv_format(codec, 32)
    k_TGD, v_TGD = randn(5, 2, 32), randn(5, 2, 32)
    before_PGB = torch.randint(
        0, 256, (2, 2, fmt.page_bytes), dtype=torch.uint8, generator=generator
    ).to(k_TGD.device)
    pages_PGB = before_PGB.clone()
    slots = [-1, 70, -1, 3, -1]
    append(op, k_TGD, v_TGD, pages_PGB, fmt, slots)
    is_written_PGB = torch.zeros_like(before_PGB)
    for plane_P2GNB in page_planes(is_written_PGB, fmt):
        plane_P2GNB[1, :, :, 6] = 1
        plane_P2GNB[0, :, :, 3] = 1
    assert is_written_PGB.sum() == 2 * 2 * 2 * fmt.row.total
    is_kept_PGB = is_written_PGB == 0
    assert torch.equal(pages_PGB[is_kept_PGB], before_PGB[is_kept_PGB])
    k_stored, v_stored = stored_rows(pages_PGB, fmt, [70, 3])
    for token, row in ((1, 0), (3, 1)):
        alone_PGB = before_PGB.clone()
        append(
            kv_append_torch,
            k_TGD[token : token + 1],
            v_TGD[token : token + 1],
            alone_PGB,
            fmt,
            [0],
            [token],
        )
        k_alone, v_alone = stored_rows(alone_PGB, fmt, [0])
        assert_close(k_stored[row], k_alone[0], *one_code(fmt, k_alone))
        assert_close(v_stored[row], v_alone[0], *one_code(fmt, v_alone))


def one_code(fmt: KVFormat, x: torch.Tensor) -> tuple[float, float]:
    """A value at a code's edge may fall to either side: one level of 15 of the range, FP32 else."""
    step = 2 * x.abs().max().item() / 15
    return (step, step / 4) if fmt.codec.name != "fp32" else (1e-6, 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_its_neighbours(randn: Randn, op: Callable[..., None]) -> None:
    # Cases K18 and K20: a thousand times larger, and NaN, in the same launch and in the same page.
    fmt = kv_format("int4", 32)
    k_TGD, v_TGD, weight_D = randn(3, 1, 32), randn(3, 1, 32), randn(32)
    alone_PGB = make_pages(fmt, 1, 1, k_TGD.device)
    norm = {"norm_weight_D": weight_D, "eps": 1e-6}
    append(op, k_TGD[:1], v_TGD[:1], alone_PGB, fmt, [5], [9], **norm)
    beside_PGB = make_pages(fmt, 1, 1, k_TGD.device)
    k_TGD[1], v_TGD[1] = 1000 * k_TGD[1], 1000 * v_TGD[1]
    k_TGD[2, 0, 3] = v_TGD[2, 0, 4] = math.nan
    append(op, k_TGD, v_TGD, beside_PGB, fmt, [5, 4, 6], [9, 2, 3], **norm)
    for alone, beside in zip(
        page_planes(alone_PGB, fmt), page_planes(beside_PGB, fmt), strict=True
    ):
        assert torch.equal(alone[..., 5, :], beside[..., 5, :])
    for rows_TGD in stored_rows(beside_PGB, fmt, [4, 5, 6]):
        assert rows_TGD[:2].isfinite().all()
        assert rows_TGD[2].isnan().all()


@pytest.mark.parametrize("op", OPS)
def test_strided_inputs(randn: Randn, op: Callable[..., None]) -> None:
    # Case M14: k and v slices of a fused QKV output, channels apart, pages a layer of a pool.
    fmt = kv_format("int4", 16)
    qkv, apart = randn(3, 128), (randn(3, 2, 32)[..., ::2], randn(2, 3, 16).transpose(0, 1))
    fused = (qkv[:, 64:96].view(3, 2, 16), qkv[:, 96:].view(3, 2, 16))
    for k_TGD, v_TGD in (fused, apart):
        expected_PGB = make_pages(fmt, 2, 2, qkv.device)
        append(op, k_TGD.contiguous(), v_TGD.contiguous(), expected_PGB, fmt, [64, 3, 1])
        pool_PLGB = torch.full((2, 3, 2, fmt.page_bytes), 0xFF, dtype=torch.uint8).to(qkv.device)
        append(op, k_TGD, v_TGD, pool_PLGB[:, 1], fmt, [64, 3, 1])
        assert torch.equal(pool_PLGB[:, 1], expected_PGB)
        assert (pool_PLGB[:, [0, 2]] == 0xFF).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("num_heads", "has_norm"), [(4, False), (6, True), (1, True)])
def test_queries_turn_in_the_same_launch(
    randn: Randn, op: Callable[..., None], num_heads: int, has_norm: bool
) -> None:
    fmt, num_tokens = kv_format("int8", 48), 6
    qkv_THD = randn(num_tokens, num_heads + 4, 48)
    q_THD, k_TGD, v_TGD = qkv_THD.split((num_heads, 2, 2), dim=1)
    norm, q_norm = {}, {}
    if has_norm:
        norm = {"norm_weight_D": 1 + randn(48, scale=0.3), "eps": 1e-6}
        q_norm = {"q_norm_weight_D": 1 + randn(48, scale=0.3)}
    # Padding (-1) stores nothing, but its queries are computed like the others.
    slots, positions = [5, -1, 7, 70, -1, 100], [9, 0, 2, 299, 30, 1]
    pages_PGB = make_pages(fmt, 2, 2, k_TGD.device)
    expected_PGB = pages_PGB.clone()
    turned = append(
        op, k_TGD, v_TGD, pages_PGB, fmt, slots, positions, q_THD=q_THD, **q_norm, **norm
    )
    assert append(op, k_TGD, v_TGD, expected_PGB, fmt, slots, positions, **norm) is None
    assert torch.equal(pages_PGB, expected_PGB)
    # int8 is not rotated: `exact_rows` of keys are turned queries.
    exact_THD, _ = exact_rows(
        q_THD, q_THD, fmt, positions, q_norm.get("q_norm_weight_D"), norm.get("eps", 0.0)
    )
    assert turned.is_contiguous() and turned.dtype == q_THD.dtype
    # Below 2**-20 of the row's largest value, as in `check_rows`.
    error_TH = (turned - exact_THD).abs().amax(-1)
    assert (error_TH <= 2**-20 * exact_THD.abs().amax(-1)).all(), error_TH


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(randn: Randn, op: Callable[..., None]) -> None:
    fmt = kv_format("fp4", 16)
    pages_PGB = make_pages(fmt, 1, 2, randn(1).device)
    append(op, randn(0, 2, 16), randn(0, 2, 16), pages_PGB, fmt, [])
    append(op, randn(2, 2, 16), randn(2, 2, 16), pages_PGB, fmt, [-1, -1])
    assert (pages_PGB == 0xFF).all()


@pytest.mark.triton
def test_offsets_pass_four_gigabytes(randn: Randn, device: torch.device) -> None:
    # Case M13. The pool is never filled: on the CPU its pages cost no memory until written.
    fmt = kv_format("fp32", 16)
    num_pages = 2**32 // fmt.page_bytes + 2
    pages_PGB = torch.empty(num_pages, 1, fmt.page_bytes, dtype=torch.uint8, device=device)
    far = [2**31 // fmt.page_bytes + 1, num_pages - 1]
    k_TGD, v_TGD = randn(2, 1, 16), randn(2, 1, 16)
    append(kv_append, k_TGD, v_TGD, pages_PGB, fmt, [64 * page + 5 for page in far])
    near_PGB = make_pages(fmt, 2, 1, device)
    append(kv_append, k_TGD, v_TGD, near_PGB, fmt, [5, 69])
    for far_TGD, near_TGD in zip(
        stored_rows(pages_PGB, fmt, [64 * page + 5 for page in far]),
        stored_rows(near_PGB, fmt, [5, 69]),
        strict=True,
    ):
        assert torch.equal(far_TGD, near_TGD)


@pytest.mark.parametrize("op", [kv_append, kv_append_torch])
def test_wrong_inputs_fail_loudly(randn: Randn, op: Callable[..., None]) -> None:
    fmt = kv_format("int4", 16)
    x_TGD = randn(1, 2, 16)
    pages_PGB = make_pages(fmt, 1, 2, x_TGD.device)
    bytes_apart = torch.stack([pages_PGB, pages_PGB], dim=-1)[..., 0]
    for k_TGD, v_TGD, pages in (
        (x_TGD.half(), x_TGD.half(), pages_PGB),
        (x_TGD, x_TGD.bfloat16(), pages_PGB),
        (x_TGD, x_TGD[:, :1], pages_PGB),
        (x_TGD[..., :8], x_TGD[..., :8], pages_PGB),
        (x_TGD, x_TGD, pages_PGB[:, :1]),
        (x_TGD, x_TGD, pages_PGB[..., 1:]),
        (x_TGD, x_TGD, bytes_apart),
    ):
        with pytest.raises(AssertionError):
            append(op, k_TGD, v_TGD, pages, fmt, [0])
    with pytest.raises(AssertionError):
        append(op, x_TGD, x_TGD, pages_PGB, fmt, [0, 1])


@pytest.mark.triton
@pytest.mark.parametrize("head_dim", [16, 48, 80, 128])
def test_butterfly_is_the_hadamard_matrix(randn: Randn, head_dim: int) -> None:
    rotation_DD = hadamard(head_dim, randn(1).device)
    width = 1 << (head_dim - 1).bit_length()
    x_ND = randn(4, head_dim)
    out_ND = torch.full((4, width), math.nan, device=x_ND.device)
    _rotate_kernel[(1,)](
        x_ND, out_ND, HEAD_DIM=head_dim, WIDTH=width, STAGES=rotation_stages(rotation_DD)
    )
    expected_ND = x_ND.double() @ rotation_DD.double()
    # Each of log2(D) stages rounds once more; a row's norm stays.
    largest = (math.log2(head_dim) + 2) * 2**-24 * x_ND.norm(dim=-1).max().item()
    assert_close(out_ND[:, :head_dim], expected_ND, largest, largest / 4)
    assert (out_ND[:, head_dim:] == 0).all()


@triton_jit
def _rotate_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    n, d = tl.arange(0, 4)[:, None], tl.arange(0, WIDTH)[None, :]
    x_ND = tl.load(x_ptr + n * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
    tl.store(out_ptr + n * WIDTH + d, rotate_rows(x_ND, STAGES))
