"""`kv_append` on CUDA: bytes against the encoders', rows against FP64, queries, padding, graphs.

Letters as in test_kv_append.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from codec_rows import special_rows
from cuda_launcher import refuse_launch, use_kernels
from test_kv_append import (
    append,
    check_rows,
    exact_rows,
    make_pages,
    make_rope,
    stored_rows,
)

from subten.codecs import KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE
from subten.kernels import kv_append as triton_append
from subten.kernels.cuda import runtime
from subten.kernels.cuda.kv_append import ENCODERS, HEAD_DIMS, VALUE_TYPES, kv_append
from subten.kernels.kv_append import page_planes

Randn = Callable[..., torch.Tensor]
triton_kv_append = triton_append.kv_append
LAYOUTS = [
    (64, 2, [63], False, torch.bfloat16),
    (128, 1, [64, 0, 1], True, torch.bfloat16),
    (128, 2, [130, 127, 128, 2, 67], True, torch.float32),
    (256, 1, [5, 70], False, torch.bfloat16),
    pytest.param(128, 4, list(range(190, 126, -1)), True, torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(64, 8, list(range(0, 190, 3)), False, torch.float32, marks=pytest.mark.gpu),
    pytest.param(256, 3, [7, 189, 64], True, torch.bfloat16, marks=pytest.mark.gpu),
]


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on the GPU, or emulated; Triton must not step in."""
    use_kernels(device, monkeypatch)
    monkeypatch.setattr(triton_append, "kv_append", None)


def rotate(x_ND: torch.Tensor) -> torch.Tensor:
    """`x @ hadamard(D)` in FP32 by sums and differences of neighbours, from the lowest bit on."""
    num_rows, head_dim = x_ND.shape
    span = 1
    while span < head_dim:
        left, right = x_ND.view(num_rows, -1, 2, span).unbind(2)
        x_ND = torch.stack([left + right, left - right], dim=2).view(num_rows, head_dim)
        span *= 2
    return x_ND * torch.tensor(head_dim**-0.5, dtype=torch.float32, device=x_ND.device)


def encoded(x_ND: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, ...]:
    """What the torch twin of the encoder makes of rows before their rotation."""
    parts = fmt.codec.encode(rotate(x_ND) if fmt.codec.is_rotated else x_ND)
    if fmt.codec.name == "bf16":
        # Which NaN, torch leaves to the processor; here it is the quiet one, without a sign.
        parts[0].view(torch.int16)[x_ND.isnan()] = 0x7FC0
    return parts


def check_bytes(
    pages_PGB: torch.Tensor, fmt: KVFormat, slots: list[int], x_T2GD: torch.Tensor
) -> None:
    """Each plane of the pages holds, at `slots`, the bytes of the float32 rows; all others 0xFF."""
    slot_T = torch.tensor(slots, device=pages_PGB.device)
    expected_PGB = torch.full_like(pages_PGB, 0xFF)
    for part_NB, plane in zip(
        encoded(x_T2GD.flatten(0, 2), fmt), page_planes(expected_PGB, fmt), strict=True
    ):
        rows = part_NB.view(*x_T2GD.shape[:3], part_NB.shape[-1])
        plane[slot_T // PAGE_SIZE, :, :, slot_T % PAGE_SIZE] = rows
    for name, actual, expected in zip(
        ("codes", "scale", "zero"),
        page_planes(pages_PGB, fmt),
        page_planes(expected_PGB, fmt),
        strict=True,
    ):
        wrong = (actual != expected).nonzero().tolist()
        assert not wrong, (fmt.codec.name, name, len(wrong), wrong[:5])
    assert torch.equal(pages_PGB, expected_PGB)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize(("head_dim", "num_kv_heads", "slots", "has_norm", "dtype"), LAYOUTS)
def test_rows_and_queries(
    randn: Randn,
    codec: str,
    head_dim: int,
    num_kv_heads: int,
    slots: list[int],
    has_norm: bool,
    dtype: torch.dtype,
) -> None:
    """Rows err no more than the codec must; queries lie within FP32's, or bf16's, rounding."""
    fmt = kv_format(codec, head_dim)
    shape = (len(slots), num_kv_heads, head_dim)
    k_TGD, v_TGD = randn(*shape, dtype=dtype, scale=3.0), randn(*shape, dtype=dtype)
    q_THD = randn(len(slots), 3 * num_kv_heads, head_dim, dtype=dtype)
    weight_D, q_weight_D, eps = None, None, 0.0
    if has_norm:
        weights_2D = 1 + randn(2, head_dim, scale=0.1)
        weight_D, q_weight_D = weights_2D.to(torch.bfloat16 if num_kv_heads % 2 else dtype)
        eps = 1e-5
    positions = [(7 * slot) % 300 for slot in slots]
    pages_PGB = make_pages(fmt, 3, num_kv_heads, k_TGD.device)
    norms = {"norm_weight_D": weight_D, "q_norm_weight_D": q_weight_D, "eps": eps}
    turned_THD = append(
        kv_append, k_TGD, v_TGD, pages_PGB, fmt, slots, positions, q_THD=q_THD, **norms
    )
    exact = exact_rows(k_TGD, v_TGD, fmt, positions, weight_D, eps)
    for name, actual_TGD, exact_TGD in zip(
        "kv", stored_rows(pages_PGB, fmt, slots), exact, strict=True
    ):
        check_rows(actual_TGD, exact_TGD, fmt, name)
    plain = kv_format("bf16", head_dim)
    exact_THD, _ = exact_rows(q_THD, q_THD, plain, positions, q_weight_D, eps)
    assert turned_THD is not None and turned_THD.is_contiguous() and turned_THD.dtype == dtype
    # FP32 errs below 2^-20 of the row's largest value, as in `check_rows`; bf16 by 2^-9 more.
    error_THD = (turned_THD - exact_THD).abs()
    allowed_THD = 2**-20 * exact_THD.abs().amax(-1, keepdim=True)
    if dtype == torch.bfloat16:
        allowed_THD = allowed_THD + 2**-8 * exact_THD.abs()
    assert (error_THD <= allowed_THD).all(), error_THD.amax()


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_of_special_rows(generator: torch.Generator, device, codec, head_dim) -> None:
    """Bit for bit the encoders' bytes of ties, extremes, zeros of either sign, NaN, infinities."""
    fmt = kv_format(codec, head_dim)
    x_ND = special_rows(head_dim, generator)
    bad_ND = torch.randn(4, head_dim, generator=generator)
    bad_ND[0, 3], bad_ND[1, 40], bad_ND[2, 17] = math.nan, math.inf, -math.inf
    bad_ND[3, 0], bad_ND[3, 63] = math.inf, -math.inf
    # Of fp4's largest row with an exponent of 0, quotients that round to 0 have no sign: 448 is its
    # scale, and 224 * 2^-149 the largest such value.
    tiny_ND = -(torch.arange(216, 216 + head_dim)[None] % 256) * 2.0**-149
    tiny_ND[:, ::16] = 2688.0
    x_ND = torch.cat([x_ND, tiny_ND, bad_ND]).to(device)[:, None]
    num_rows = len(x_ND)
    pages_PGB = make_pages(fmt, 1, 1, device)
    # Positions 0 turn a key by nothing: cosines 1 and sines 0, but infinity times 0 is NaN.
    k_ND = x_ND.clone()
    k_ND[-4:] = x_ND[:4]
    slots = list(range(num_rows))
    append(kv_append, k_ND, x_ND, pages_PGB, fmt, slots, [0] * num_rows)
    # x * 1 - y * 0 makes -0.0 a 0.0 where y is not negative.
    k_ND = turned_by_nothing(k_ND)
    check_bytes(pages_PGB, fmt, slots, torch.stack([k_ND, x_ND], dim=1))


def turned_by_nothing(x_NGD: torch.Tensor) -> torch.Tensor:
    first, second = x_NGD.chunk(2, dim=-1)
    return torch.cat([first * 1.0 - second * 0.0, second * 1.0 + first * 0.0], dim=-1)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("is_wide", [False, True])
def test_bytes_of_random_rows(
    randn: Randn, generator: torch.Generator, codec: str, is_wide: bool
) -> None:
    """Quotients round as divisions do, whatever the exponents of row and elements."""
    fmt, slots = kv_format(codec, 128), list(range(PAGE_SIZE))
    shape = (PAGE_SIZE, 4, 128 if is_wide else 1)
    exponent = torch.randint(-150, 120, shape, generator=generator)
    if is_wide:
        # Some 20 powers of two within a row.
        exponent = exponent[..., :1] + torch.randint(-20, 8, shape, generator=generator)
    x_TGD = torch.ldexp(randn(PAGE_SIZE, 4, 128).double().cpu(), exponent).float()
    x_TGD = x_TGD.to(randn(1).device)
    pages_PGB = make_pages(fmt, 1, 4, x_TGD.device)
    append(kv_append, x_TGD, x_TGD, pages_PGB, fmt, slots, [0] * PAGE_SIZE)
    check_bytes(pages_PGB, fmt, slots, torch.stack([turned_by_nothing(x_TGD), x_TGD], dim=1))


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_of_turned_keys(randn: Randn, codec: str, head_dim: int) -> None:
    """Keys given as queries too come back as what was encoded."""
    fmt, slots = kv_format(codec, head_dim), [0, 7, 70, 129, 3]
    x_TGD = randn(5, 3, head_dim, scale=5.0)
    weight_D = 1 + randn(head_dim, scale=0.2)
    norms = {"norm_weight_D": weight_D, "q_norm_weight_D": weight_D, "eps": 1e-6}
    pages_PGB = make_pages(fmt, 3, 3, x_TGD.device)
    turned_TGD = append(
        kv_append, x_TGD, x_TGD, pages_PGB, fmt, slots, [5, 299, 1, 17, 64], q_THD=x_TGD, **norms
    )
    assert turned_TGD is not None
    check_bytes(pages_PGB, fmt, slots, torch.stack([turned_TGD, x_TGD], dim=1))


@pytest.mark.triton
@pytest.mark.parametrize("codec", ENCODERS)
def test_bytes_of_values_are_tritons(
    randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """The butterfly adds in Triton's order, so that a step's backend leaves no trace in V."""
    use_kernels(device, monkeypatch)
    fmt, slots = kv_format(codec, 128), [0, 7, 70, 129, 3]
    x_TGD = randn(5, 2, 128, dtype=torch.bfloat16, scale=2.0)
    both = []
    for op in (kv_append, triton_kv_append):
        both.append(make_pages(fmt, 3, 2, device))
        append(op, x_TGD, x_TGD, both[-1], fmt, slots)
    for actual, expected in zip(page_planes(both[0], fmt), page_planes(both[1], fmt), strict=True):
        assert torch.equal(actual[:, 1], expected[:, 1])


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", ENCODERS)
def test_padding_writes_nothing_but_queries(randn: Randn, codec: str) -> None:
    fmt, slots = kv_format(codec, 64), [-1, 70, -1, 3, -1]
    x_TGD, q_THD = randn(5, 2, 64), randn(5, 7, 64)
    pages_PGB = make_pages(fmt, 2, 2, x_TGD.device)
    turned_THD = append(kv_append, x_TGD, x_TGD, pages_PGB, fmt, slots, q_THD=q_THD)
    kept_PGB = make_pages(fmt, 2, 2, x_TGD.device)
    kept = append(
        kv_append, x_TGD[1::2], x_TGD[1::2], kept_PGB, fmt, [70, 3], [1, 3], q_THD=q_THD[1::2]
    )
    assert turned_THD is not None and kept is not None
    assert torch.equal(pages_PGB, kept_PGB)
    assert torch.equal(turned_THD[1::2], kept)
    assert turned_THD.isfinite().all()
    table_TC = make_rope(300, 64, x_TGD.device)[4]
    first, second = q_THD[4].chunk(2, dim=-1)
    expected = first * table_TC[:32] - second * table_TC[32:]
    assert (turned_THD[4, :, :32] - expected).abs().amax() <= 2**-20 * q_THD[4].abs().amax()
    none_PGB = make_pages(fmt, 2, 2, x_TGD.device)
    assert append(kv_append, x_TGD, x_TGD, none_PGB, fmt, [-1] * 5) is None
    assert (none_PGB == 0xFF).all()


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("codec", ENCODERS)
def test_a_row_does_not_depend_on_its_neighbours(randn: Randn, codec: str) -> None:
    """Alone, or beside a row a thousand times as large and one with NaN: the same bytes."""
    fmt = kv_format(codec, 64)
    k_TGD, v_TGD, weight_D = randn(3, 1, 64), randn(3, 1, 64), randn(64)
    norm = {"norm_weight_D": weight_D, "eps": 1e-6}
    alone_PGB = make_pages(fmt, 1, 1, k_TGD.device)
    append(kv_append, k_TGD[:1], v_TGD[:1], alone_PGB, fmt, [5], [9], **norm)
    k_TGD[1], v_TGD[1] = 1000 * k_TGD[1], 1000 * v_TGD[1]
    k_TGD[2, 0, 3] = v_TGD[2, 0, 4] = math.nan
    beside_PGB = make_pages(fmt, 1, 1, k_TGD.device)
    append(kv_append, k_TGD, v_TGD, beside_PGB, fmt, [5, 4, 6], [9, 2, 3], **norm)
    for alone, beside in zip(
        page_planes(alone_PGB, fmt), page_planes(beside_PGB, fmt), strict=True
    ):
        assert torch.equal(alone[..., 5, :], beside[..., 5, :])
    for rows_TGD in stored_rows(beside_PGB, fmt, [4, 5, 6]):
        assert rows_TGD[:2].isfinite().all()
        assert rows_TGD[2].isnan().any()


@pytest.mark.usefixtures("kernels", "poisoned")
def test_strided_inputs(randn: Randn) -> None:
    """q, k and v are slices of one matrix or lie tokens last, pages a layer of a pool."""
    fmt, slots = kv_format("int4", 64), [64, 3, 1]
    qkv_THD = randn(3, 9, 64, dtype=torch.bfloat16)
    fused = qkv_THD.split((5, 2, 2), dim=1)
    turned = tuple(randn(n, 3, 64, dtype=torch.bfloat16).transpose(0, 1) for n in (5, 2, 2))
    for q_THD, k_TGD, v_TGD in (fused, turned):
        expected_PGB = make_pages(fmt, 2, 2, qkv_THD.device)
        expected = append(
            kv_append,
            k_TGD.contiguous(),
            v_TGD.contiguous(),
            expected_PGB,
            fmt,
            slots,
            q_THD=q_THD.contiguous(),
        )
        pool_PLGB = torch.full((2, 3, 2, fmt.page_bytes), 0xFF, dtype=torch.uint8).to(
            qkv_THD.device
        )
        actual = append(kv_append, k_TGD, v_TGD, pool_PLGB[:, 1], fmt, slots, q_THD=q_THD)
        assert torch.equal(pool_PLGB[:, 1], expected_PGB)
        assert (pool_PLGB[:, [0, 2]] == 0xFF).all()
        assert actual is not None and expected is not None and torch.equal(actual, expected)


@pytest.mark.usefixtures("kernels")
def test_offsets_pass_four_gigabytes(randn: Randn, device: torch.device) -> None:
    # The pool is never filled: on the CPU its pages cost no memory until written.
    fmt = kv_format("int8", 64)
    num_pages = 2**32 // fmt.page_bytes + 2
    pages_PGB = torch.empty(num_pages, 1, fmt.page_bytes, dtype=torch.uint8, device=device)
    far = [PAGE_SIZE * page + 5 for page in (2**31 // fmt.page_bytes + 1, num_pages - 1)]
    x_TGD = randn(2, 1, 64)
    append(kv_append, x_TGD, x_TGD, pages_PGB, fmt, far)
    near_PGB = make_pages(fmt, 2, 1, device)
    append(kv_append, x_TGD, x_TGD, near_PGB, fmt, [5, 69])
    for far_TGD, near_TGD in zip(
        stored_rows(pages_PGB, fmt, far), stored_rows(near_PGB, fmt, [5, 69]), strict=True
    ):
        assert torch.equal(far_TGD, near_TGD)


@pytest.mark.parametrize(
    "what", ["codec", "head_dim", "tokens", "none", "dtype", "channels", "odd", "norms", "pages"]
)
def test_the_rest_goes_to_triton(randn: Randn, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    calls: list[tuple[Any, Any]] = []
    monkeypatch.setattr(triton_append, "kv_append", lambda *a, **k: calls.append((a, k)) or a[0])
    monkeypatch.setattr(runtime, "launch", refuse_launch)
    head_dim = 96 if what == "head_dim" else 64
    fmt = kv_format("vq1.5" if what == "codec" else "int8", head_dim)
    num_tokens = {"tokens": 65, "none": 0}.get(what, 2)
    x_TGD = randn(num_tokens, 2, head_dim, dtype=torch.bfloat16)
    pages_PGB = make_pages(fmt, 2, 2, x_TGD.device)
    options: dict[str, Any] = {}
    if what == "dtype":
        x_TGD = x_TGD.half()
    elif what == "channels":
        x_TGD = randn(2, 2, 128, dtype=torch.bfloat16)[..., ::2]
    elif what == "odd":
        x_TGD = randn(2, 2, 65, dtype=torch.bfloat16)[..., 1:]
    elif what == "norms":
        weight_D = randn(head_dim)
        options = {"norm_weight_D": weight_D, "q_norm_weight_D": weight_D.bfloat16(), "eps": 1e-6}
        options["q_THD"] = x_TGD
    elif what == "pages":
        pages_PGB = make_pages(fmt, 2, 3, x_TGD.device).flatten()[2 : 2 + 4 * fmt.page_bytes]
        pages_PGB = pages_PGB.view(2, 2, fmt.page_bytes)
    assert append(kv_append, x_TGD, x_TGD, pages_PGB, fmt, list(range(num_tokens)), **options) is (
        x_TGD
    )
    ((args, kwargs),) = calls
    assert args[:4] == (x_TGD, x_TGD, pages_PGB, fmt) and len(args) == 7
    assert kwargs.keys() == {
        "rotation_DD",
        "norm_weight_D",
        "eps",
        "q_THD",
        "q_norm_weight_D",
    }
    assert all(kwargs[name] is value for name, value in options.items())


def test_wrong_inputs_fail_loudly(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "launch", refuse_launch)
    fmt, x_TGD = kv_format("int8", 64), randn(1, 2, 64)
    pages_PGB = make_pages(fmt, 1, 2, x_TGD.device)
    for k_TGD, v_TGD, pages, slots in (
        (x_TGD, x_TGD.bfloat16(), pages_PGB, [0]),
        (x_TGD, x_TGD[:, :1], pages_PGB, [0]),
        (x_TGD[..., :32], x_TGD[..., :32], pages_PGB, [0]),
        (x_TGD, x_TGD, pages_PGB[:, :1], [0]),
        (x_TGD, x_TGD, pages_PGB[..., 4:], [0]),
        (x_TGD, x_TGD, pages_PGB, [0, 1]),
    ):
        with pytest.raises(AssertionError):
            append(kv_append, k_TGD, v_TGD, pages, fmt, slots)
    with pytest.raises(AssertionError):
        append(kv_append, x_TGD, x_TGD, pages_PGB, fmt, [0], norm_weight_D=randn(63))
    rotated = kv_format("int4", 64)
    cos_sin, index_T = make_rope(3, 64, x_TGD.device), torch.zeros(1, dtype=torch.int64)
    index_T = index_T.to(x_TGD.device)
    pages_PGB = make_pages(rotated, 1, 2, x_TGD.device)
    wrong_DD = -hadamard(64, x_TGD.device)
    for rotation_DD in (None, wrong_DD):
        with pytest.raises(AssertionError):
            kv_append(
                x_TGD,
                x_TGD,
                pages_PGB,
                rotated,
                cos_sin,
                index_T,
                index_T,
                rotation_DD=rotation_DD,
            )


KERNELS = [
    f"kv_append_kernel<{encoder}, {head_dim}, {value}>"
    for encoder in ENCODERS.values()
    for head_dim in HEAD_DIMS
    for value in VALUE_TYPES.values()
]
needs_compiler = pytest.mark.skipif(
    not runtime.has_compiler(), reason="needs cuda-bindings and NVRTC"
)


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_nvrtc_compiles(arch: str) -> None:
    cubin, symbol = runtime.compile_cubin("kv_append.cu", KERNELS[-1], arch)
    assert cubin[:4] == b"\x7fELF" and symbol.encode() in cubin


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_and_loads(name: str, device: torch.device) -> None:
    runtime.kernel("kv_append.cu", name, torch.zeros(1, device=device).device)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_graph_replays_follow_positions_and_slots(
    randn: Randn,
    generator: torch.Generator,
    device: torch.device,
    codec: str,
    num_tokens: int,
) -> None:
    """Three launches in a row that write the same rows and one another's inputs, with PDL and
    without it: the same bytes at every replay."""
    fmt = kv_format(codec, 128)
    qkv_THD = randn(num_tokens, 40, 128, dtype=torch.bfloat16)
    q_THD, k_TGD, v_TGD = qkv_THD.split((32, 4, 4), dim=1)
    weight_D = (1 + randn(128, scale=0.2)).bfloat16()
    cos_sin_PD = make_rope(300, 128, device)
    index_2T = torch.zeros(2, num_tokens, dtype=torch.int64, device=device)
    rotation_DD = hadamard(128, device) if fmt.codec.is_rotated else None

    def chain(pages_PGB: torch.Tensor, pdl: bool) -> torch.Tensor:
        turned_THD, k_rows_TGD, v_rows_TGD = q_THD, k_TGD, v_TGD
        for i in range(3):
            out_THD = kv_append(
                k_rows_TGD,
                v_rows_TGD,
                pages_PGB,
                fmt,
                cos_sin_PD,
                index_2T[0],
                index_2T[1],
                rotation_DD=rotation_DD,
                norm_weight_D=weight_D,
                eps=1e-6,
                q_THD=turned_THD,
                q_norm_weight_D=weight_D,
                # The first is ordinary, as a step's first kernel is: it waits for the indices.
                pdl=pdl and i > 0,
            )
            assert out_THD is not None
            turned_THD, k_rows_TGD, v_rows_TGD = out_THD, out_THD[:, :4], out_THD[:, 4:8]
        return turned_THD

    pages = {pdl: make_pages(fmt, 8, 4, device) for pdl in (False, True)}
    chain(pages[False], False)
    torch.cuda.synchronize()
    graphs, outs = {}, {}
    for pdl in (False, True):
        graphs[pdl] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[pdl]):
            outs[pdl] = chain(pages[pdl], pdl)
    slots = torch.randperm(8 * PAGE_SIZE, generator=generator)
    for i in range(200):
        index_2T.copy_(
            torch.stack(
                [
                    torch.randint(300, (num_tokens,), generator=generator),
                    slots.roll(i * 37)[:num_tokens] if i % 5 else torch.full((num_tokens,), -1),
                ]
            )
        )
        for pdl in (False, True):
            pages[pdl].fill_(0xFF)
            outs[pdl].fill_(float("nan"))
            graphs[pdl].replay()
        torch.cuda.synchronize()
        assert torch.equal(pages[True], pages[False]), i
        assert torch.equal(outs[True], outs[False]), i
        assert ((pages[True] == 0xFF).all()) == (i % 5 == 0)
        assert outs[True].isfinite().all()
