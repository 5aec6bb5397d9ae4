"""Plans of Triton kernels fit the shared memory of a block, and are refused in words where not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compiled import launches_on, run_compiler

from subten.codecs import CODECS, kv_format
from subten.codecs.mixed import mixed_format
from subten.codecs.rotation import hadamard
from subten.core import ConfigError
from subten.device import BLOCK_SHARED_KIB, block_shared_bytes
from subten.kernels import attend as attend_module
from subten.kernels import attend_mixed as mixed_module
from subten.kernels import attend_tiles
from subten.kernels import linear as linear_module
from subten.kernels.attend import attend
from subten.kernels.attend_mixed import attend_mixed
from subten.kernels.attend_plan import BlockRoom, plan_attend
from subten.kernels.linear import linear
from subten.kernels.mixed_pages import MixedPages, Window
from subten.kernels.step import StepTensors
from subten.kernels.triton_shim import OutOfResourcesError, launcher
from subten.kernels.weight_formats import WEIGHT_FORMATS, Weight

META = torch.device("meta")
ADA = (8, 9)
ADA_BYTES = 99 * 1024
H200_BYTES = 227 * 1024
HEAD_DIMS = (16, 48, 64, 80, 96, 128, 192, 256)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def make_step(num_queries: int, kv_len: int) -> StepTensors:
    def ints(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    num_tiles = -(-num_queries // 16)
    tokens_T = empty(num_queries, dtype=torch.int64)
    return StepTensors(
        token_id_T=tokens_T,
        position_T=tokens_T,
        slot_T=tokens_T,
        page_table_SP=ints(1, -(-kv_len // 64)),
        kv_len_S=ints(1),
        query_start_S1=ints(2),
        tile_seq_Q=ints(num_tiles),
        tile_start_Q=ints(num_tiles),
        logit_row_S=tokens_T[:1],
        max_kv_len=kv_len,
        max_query_len=num_queries,
    )


def launch_linear() -> None:
    """A head behind a norm, as of a residual in FP32: 108,032 bytes in four stages."""
    weight = Weight((16_384, 4096), device=META, dtype=torch.bfloat16)
    norm_weight_K = empty(4096, dtype=torch.bfloat16)
    linear(empty(16, 4096), weight, norm_weight_K=norm_weight_K, out_dtype=torch.float32)


def launch_attend(
    name: str, head_dim: int, num_queries: int, *, group: int = 4, has_bias: bool = False
) -> None:
    fmt = kv_format(name, head_dim)
    q_THD = empty(num_queries, 32, head_dim, dtype=torch.bfloat16)
    pages_PGB = empty(8, 32 // group, fmt.page_bytes, dtype=torch.uint8)
    attend(
        q_THD,
        pages_PGB,
        fmt,
        # Above the size to which pages are decoded first.
        make_step(num_queries, 65_536),
        scale=1.0,
        rotation_DD=hadamard(head_dim, META) if fmt.codec.is_rotated else None,
        key_bias_GD=empty(32 // group, head_dim) if has_bias else None,
        cos_sin_PD=empty(65_536, head_dim) if has_bias else None,
    )


def launch_mixed(head_dim: int, num_queries: int) -> None:
    """A prompt over an adaptive cache whose keys lack a bias."""
    fmt, step, num_heads = mixed_format(head_dim), make_step(num_queries, 4096), 8
    row_T = empty(num_queries, dtype=torch.int32)
    row_S = row_T[:1]

    def plane(num_bytes: int) -> torch.Tensor:
        return empty(8, num_heads, num_bytes, dtype=torch.uint8)

    attend_mixed(
        empty(num_queries, 4 * num_heads, head_dim, dtype=torch.bfloat16),
        MixedPages(
            k_PGB=plane(fmt.k_bytes(4)),
            k_bits=4,
            vbase_XGB=plane(fmt.base_bytes),
            vfine_YGB=plane(fmt.fine_bytes),
            vcold_ZGB=plane(fmt.cold_bytes)[:0],
            place_P3=empty(8, 3, dtype=torch.int32),
            recent_NGE=empty(64, num_heads, 2 * head_dim, dtype=torch.bfloat16),
        ),
        fmt,
        step,
        Window(size=64, row_T=row_T, base_S=row_S, cap_S=row_S, from_S=row_S),
        scale=1.0,
        rotation_DD=hadamard(head_dim, META),
        coef_THC=empty(num_queries, 4 * num_heads, head_dim),
        table_PC=empty(4096, head_dim),
    )


def compile_for_ada() -> None:
    """What an H200's plans take too much for, 106 to 164 KB; run with the interpreter off."""
    modules = (linear_module, attend_module, mixed_module)
    patches = [patch.object(m, "block_shared_bytes", lambda _: ADA_BYTES) for m in modules]
    patches.append(patch.object(attend_tiles, "detect", lambda _: SimpleNamespace(num_sms=128)))
    for each in patches:
        each.start()
    calls: dict[str, Callable[[], None]] = {
        "linear": launch_linear,
        "vq1.5, 128 channels": lambda: launch_attend("vq1.5", 128, 64),
        "int4, 128 rows, bias": lambda: launch_attend("int4", 128, 2048, group=8, has_bias=True),
        "int4, 256 channels": lambda: launch_attend("int4", 256, 1),
        "adaptive": lambda: launch_mixed(128, 64),
    }
    for name, call in calls.items():
        with launches_on(ADA) as kernels:
            call()
        assert kernels, name
        for kernel in kernels:
            assert kernel.metadata.shared <= ADA_BYTES, (name, kernel.name, kernel.metadata.shared)


@pytest.mark.triton
def test_plans_fit_a_block_of_99_kib(tmp_path: Path) -> None:
    """A GPU of compute capability 8.6, 8.9 or 12.x has no more; the compiler needs none."""
    run_compiler(
        "import test_shared_memory as t; t.compile_for_ada()", Path(__file__).parent, tmp_path
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_h200_attends_by_the_plans_measured_there(
    head_dim: int, name: str, has_bias: bool
) -> None:
    room = BlockRoom(fmt=kv_format(name, head_dim), has_bias=has_bias, shared_bytes=H200_BYTES)
    shape: dict[str, Any] = {"num_sms": 132, "num_kv_heads": 4, "head_dim": head_dim}
    shape |= {"out_bytes": 4 * 512 * 32 * head_dim, "max_kv_len": 4096}
    for group in (1, 7, 8, 32):
        for num_queries, num_tiles in ((1, 1), (1, 200), (64, 4), (512, 33)):
            for is_float32 in (False, True):
                shape |= {"group": group, "max_query_len": num_queries, "num_tiles": num_tiles}
                plan = plan_attend(**shape, is_float32=is_float32)
                assert plan_attend(**shape, is_float32=is_float32, max_rows=room.max_rows) == plan
                assert room.num_stages(plan) == plan.num_stages
                assert room.has_signs(plan)


@pytest.mark.triton
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_h200_reads_adaptive_caches_by_the_plans_measured_there(head_dim: int) -> None:
    """Two stages, but one where they would take more than 128 KiB for tables and coefficients."""
    block_d = max(64, 1 << (head_dim - 1).bit_length())
    for width in (0, head_dim):
        table_PC = empty(64, width) if width else None
        assert mixed_module._max_rows(table_PC, H200_BYTES) == 32
        for rows in (16, 32):
            table_bytes = 4 * max(16, 1 << (width - 1).bit_length()) * (rows + 64) if width else 0
            for num_stages in (1, 2):
                plan: Any = SimpleNamespace(num_stages=num_stages, block_rows=rows)
                expected = num_stages if num_stages * table_bytes <= 2**17 else 1
                got = mixed_module._num_stages(plan, block_d, table_bytes, H200_BYTES)
                assert got == expected, (width, rows, num_stages)


@pytest.mark.triton
@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_h200_has_four_stages_of_every_weight(quantization: str, dtype: torch.dtype) -> None:
    for shape in ((64, 64), (8192, 4096), (8193, 4096), (128_256, 16_384)):
        weight = Weight(shape, quantization, device=META, dtype=dtype)
        for itemsize in (2, 4):
            assert linear_module._choose_linear(weight, itemsize, H200_BYTES).num_stages == 4


def test_the_table_of_blocks_is_of_known_sizes() -> None:
    assert set(BLOCK_SHARED_KIB.values()) == {163, 227}
    assert block_shared_bytes(torch.device("cpu")) == H200_BYTES


@pytest.mark.triton
def test_a_launch_that_does_not_fit_says_what_and_where() -> None:
    class Kernel:
        def __getitem__(self, _grid: tuple[int, ...]) -> Any:
            def launch(*_args: Any) -> None:
                raise OutOfResourcesError(114_688, 101_376, "shared memory")

            return launch

    expected = (
        "backend: got 'triton', whose attend of int4 takes more shared memory in a block than this "
        "GPU has, 114,688 > 101,376; allowed: torch"
    )
    with pytest.raises(ConfigError) as caught:
        launcher(Kernel(), (1,), "attend", "int4")(1)
    assert str(caught.value) == expected
