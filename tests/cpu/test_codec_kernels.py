"""Device functions of every codec against their torch twins, through a small kernel each way.

Letters: N rows, P pages, B bytes of a page, D head_dim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from codec_rows import SMALLEST, format_id, formats, special_rows
from compiled import compile_sm90, run_compiler

from subten.codecs import CODECS, KVFormat, kv_format
from subten.core import PAGE_SIZE
from subten.kernels.kv_append import codec_tables
from subten.kernels.triton_shim import tl, triton, triton_jit

# Below, at and above a power of two, with whole and ragged groups; the twins take the other sizes.
HEAD_DIMS = (48, 64, 100, 192)
every_format = pytest.mark.parametrize(
    "fmt", [fmt for fmt in formats() if fmt.head_dim in HEAD_DIMS], ids=format_id
)
POISON = 0xA5


@triton_jit
def encode_kernel(
    x_ptr,
    pages_ptr,
    slot_ptr,
    tables_ptr,
    num_rows,
    page_stride,
    ENCODE: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot_N = tl.load(slot_ptr + n, mask=n < num_rows, other=-1)
    d = tl.arange(0, BLOCK_D)
    mask_ND = (slot_N >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    # NaN where a codec must not look.
    x_ND = tl.load(x_ptr + n[:, None] * HEAD_DIM + d[None, :], mask=mask_ND, other=float("nan"))
    page_N = pages_ptr + (slot_N // 64) * page_stride
    row_N = (slot_N % 64).to(tl.int32)
    mask_N = slot_N >= 0
    ENCODE(x_ND, page_N, row_N, mask_N, tables_ptr, CODES, SCALE, ZERO, HEAD_DIM, BLOCK_D)


@triton_jit
def decode_kernel(
    pages_ptr,
    page_stride,
    tables_ptr,
    num_rows,
    code_ptr,
    scale_ptr,
    zero_ptr,
    DECODE: tl.constexpr,
    CODES: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    page = tl.program_id(0)
    row_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = page * 64 + row_N
    code_ND, scale_N, zero_N = DECODE(
        pages_ptr + page.to(tl.int64) * page_stride,
        row_N,
        n < num_rows,
        tables_ptr,
        CODES,
        SCALE,
        ZERO,
        HEAD_DIM,
        BLOCK_D,
    )
    tl.store(code_ptr + n[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], code_ND)
    tl.store(scale_ptr + n, scale_N)
    tl.store(zero_ptr + n, zero_N)


def block_d(head_dim: int) -> int:
    """The next power of two."""
    return 1 << (head_dim - 1).bit_length()


def launch_encode(
    x_ND: torch.Tensor, pages_PB: torch.Tensor, slot_N: torch.Tensor, fmt: KVFormat, block_n: int
) -> None:
    encode_kernel[(triton.cdiv(x_ND.shape[0], block_n),)](
        x_ND,
        pages_PB,
        slot_N,
        codec_tables(fmt.codec, pages_PB),
        x_ND.shape[0],
        pages_PB.stride(0),
        fmt.codec.device_encode,
        fmt.v_codes,
        fmt.v_scale,
        fmt.v_zero,
        fmt.head_dim,
        block_d(fmt.head_dim),
        block_n,
    )


def launch_decode(
    pages_PB: torch.Tensor, num_rows: int, fmt: KVFormat, block_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_slots = pages_PB.shape[0] * PAGE_SIZE
    code_ND = torch.full((num_slots, block_d(fmt.head_dim)), float("nan"), device=pages_PB.device)
    scale_N, zero_N = (torch.full_like(code_ND[:, 0], float("nan")) for _ in range(2))
    decode_kernel[(pages_PB.shape[0], PAGE_SIZE // block_n)](
        pages_PB,
        pages_PB.stride(0),
        codec_tables(fmt.codec, pages_PB),
        num_rows,
        code_ND,
        scale_N,
        zero_N,
        fmt.codec.device_decode,
        fmt.v_codes,
        fmt.v_scale,
        fmt.v_zero,
        fmt.head_dim,
        block_d(fmt.head_dim),
        block_n,
    )
    return code_ND, scale_N, zero_N


def write_rows(
    pages_PB: torch.Tensor, slot_N: torch.Tensor, x_ND: torch.Tensor, fmt: KVFormat
) -> None:
    """What `launch_encode` does, by the torch twin and one row at a time."""
    starts = (fmt.v_codes, fmt.v_scale, fmt.v_zero)
    for plane_NB, start in zip(fmt.codec.encode(x_ND), starts, strict=True):
        width = plane_NB.shape[1]
        for n, slot in enumerate(slot_N.tolist()):
            if slot >= 0:
                first = start + slot % PAGE_SIZE * width
                pages_PB[slot // PAGE_SIZE, first : first + width] = plane_NB[n]


def read_rows(pages_PB: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Every slot of the pages, decoded by the torch twin; [P * 64, D]."""
    widths = (fmt.row.codes, fmt.row.scale, fmt.row.zero)
    num_slots = pages_PB.shape[0] * PAGE_SIZE
    planes = [
        pages_PB[:, start : start + PAGE_SIZE * width].reshape(num_slots, width)
        for start, width in zip((fmt.v_codes, fmt.v_scale, fmt.v_zero), widths, strict=True)
    ]
    return fmt.codec.decode(planes[0], planes[1], planes[2], fmt.head_dim)


@pytest.mark.triton
@every_format
def test_device_equals_torch(
    fmt: KVFormat, generator: torch.Generator, device: torch.device
) -> None:
    """Encoded bytes are the same bit for bit, and nothing else is written; decoded values agree."""
    x_ND = special_rows(fmt.head_dim, generator)
    bad_ND = torch.randn(4, fmt.head_dim, generator=generator)
    bad_ND[0, 1], bad_ND[1, -1], bad_ND[2, 7] = float("nan"), float("inf"), float("-inf")
    x_ND = torch.cat([x_ND, bad_ND])
    num_rows = x_ND.shape[0]
    slot_N = torch.randperm(2 * PAGE_SIZE, generator=generator)[:num_rows]
    slot_N[num_rows // 2] = -1
    pages_PB = torch.full((3, fmt.page_bytes), POISON, dtype=torch.uint8)
    expected_PB = pages_PB.clone()
    pages_PB = pages_PB.to(device)

    launch_encode(x_ND.to(device), pages_PB, slot_N.to(device), fmt, block_n=16)
    write_rows(expected_PB, slot_N, x_ND, fmt)
    if fmt.codec.name == "bf16":
        # Which of BF16's NaN a conversion yields is not defined.
        first = fmt.v_codes + int(slot_N[num_rows - 4]) % PAGE_SIZE * fmt.row.codes + 2
        page = int(slot_N[num_rows - 4]) // PAGE_SIZE
        expected_PB[page, first : first + 2] = pages_PB[page, first : first + 2].cpu()
    assert torch.equal(pages_PB.cpu(), expected_PB)

    # Slots that hold a row, up to a ragged end; the rest is poison that may decode to anything.
    is_row = torch.zeros(3 * PAGE_SIZE, dtype=torch.bool)
    is_row[slot_N[slot_N >= 0]] = True
    is_row[101:] = False
    code_ND, scale_N, zero_N = (t.cpu() for t in launch_decode(pages_PB, 101, fmt, block_n=64))
    value_ND = code_ND.double() * scale_N.double()[:, None] + zero_N.double()[:, None]
    expected_ND = read_rows(pages_PB.cpu(), fmt)[is_row].double()
    value_ND = value_ND[is_row, : fmt.head_dim]
    assert torch.equal(value_ND.isfinite(), expected_ND.isfinite())
    # A product and a sum in float32, rounded once or twice, against float64.
    size_N1 = expected_ND.abs().amax(-1, keepdim=True).nan_to_num(0.0)
    difference_ND = (value_ND - expected_ND).abs().nan_to_num(0.0)
    assert bool((difference_ND <= size_N1 * 2**-23 + SMALLEST).all()), difference_ND.max()
    assert bool((code_ND[is_row, fmt.head_dim :] == 0.0).all())
    for masked in (code_ND[101:], scale_N[101:], zero_N[101:]):
        assert bool((masked == 0.0).all())


@pytest.mark.triton
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("block_n", [1, 32])
def test_tile_height_changes_nothing(
    name: str, block_n: int, generator: torch.Generator, device: torch.device
) -> None:
    fmt = kv_format(name, 48)
    x_ND = torch.randn(5, 48, generator=generator)
    slot_N = torch.arange(5) + 29
    pages_PB = torch.full((1, fmt.page_bytes), POISON, dtype=torch.uint8, device=device)
    expected_PB = pages_PB.cpu()
    launch_encode(x_ND.to(device), pages_PB, slot_N.to(device), fmt, block_n)
    write_rows(expected_PB, slot_N, x_ND, fmt)
    assert torch.equal(pages_PB.cpu(), expected_PB)
    tall, short = (launch_decode(pages_PB, 34, fmt, n) for n in (64, max(block_n, 8)))
    for left, right in zip(tall, short, strict=True):
        assert torch.equal(left[29:], right[29:])


def codes_fit_in_half(fmt: KVFormat) -> bool:
    """Whether codes are bounded whatever the rows are: scales along the head dimension are not."""
    return fmt.codec.name in ("fp8", "int8", "int4", "fp4", "int2", "vq1.5")


@pytest.mark.triton
@pytest.mark.parametrize("fmt", [f for f in formats() if f.head_dim == 80 and codes_fit_in_half(f)])
def test_codes_are_exact_in_half_precision(
    fmt: KVFormat, generator: torch.Generator, device: torch.device
) -> None:
    """Kernels may cast codes to FP16 or BF16 for a dot product without losing a bit."""
    x_ND = special_rows(fmt.head_dim, generator)
    pages_PB = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8, device=device)
    slot_N = torch.arange(x_ND.shape[0], device=device)
    launch_encode(x_ND.to(device), pages_PB, slot_N, fmt, block_n=16)
    code_ND, _, _ = launch_decode(pages_PB, x_ND.shape[0], fmt, block_n=64)
    assert torch.equal(code_ND.to(torch.float16).float(), code_ND)
    assert torch.equal(code_ND.to(torch.bfloat16).float(), code_ND)


def compile_for_sm90() -> None:
    """Compile both kernels for every codec, without a GPU; run with the interpreter off."""
    pointers = {"slot_ptr": "*i64", "pages_ptr": "*u8", "page_stride": "i64", "tables_ptr": "*fp16"}
    for name in CODECS:
        # A head_dim that is no power of two packs and unpacks nibbles in another way.
        for head_dim in (64, 96) if name in ("int4", "int2", "fp4_mx") else (64,):
            fmt = kv_format(name, head_dim)
            for kernel, function in (
                (encode_kernel, {"ENCODE": fmt.codec.device_encode, "BLOCK_N": 2}),
                (decode_kernel, {"DECODE": fmt.codec.device_decode, "BLOCK_N": 16}),
            ):
                constants: dict[str, Any] = {
                    **function,
                    "CODES": fmt.k_codes,
                    "SCALE": fmt.k_scale,
                    "ZERO": fmt.k_zero,
                    "HEAD_DIM": head_dim,
                    "BLOCK_D": block_d(head_dim),
                }
                compiled = compile_sm90(kernel, pointers, constants)
                # Subnormals must stay, and quotients must be those of IEEE 754.
                assert ".ftz" not in compiled.asm["ptx"], (name, head_dim)
                assert "div.full" not in compiled.asm["ptx"], (name, head_dim)


@pytest.mark.triton
def test_device_functions_compile_for_sm90(tmp_path: Path) -> None:
    """The interpreter accepts more than the compiler does; the compiler needs no GPU."""
    run_compiler(
        "import test_codec_kernels as t; t.compile_for_sm90()", Path(__file__).parent, tmp_path
    )
