"""Kernels compiled for sm_90 without a GPU, and what their intermediate code must be like."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from subten.kernels.triton_shim import triton

_PRODUCT = re.compile(
    r"tt\.dot .*?tensor<\d+x(\d+)x\w+, "
    r"#ttg\.dot_op<\{opIdx = 0, parent = (#mma\d*), kWidth = (\d+)\}>"
)


def compile_sm90(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> Any:
    """The kernel for that GPU, `*fp32` where no type is given; the interpreter must be off."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        arg: "constexpr"
        if arg in constants
        else pointers.get(arg, "*fp32" if arg.endswith("_ptr") else "i32")
        for arg in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    check_products(compiled.asm["ttgir"])
    return compiled


@contextmanager
def launches_on(capability: tuple[int, int]) -> Iterator[list[Any]]:
    """Kernels launched within it, compiled for a GPU of `capability` and not run.

    The ops take tensors of the device `meta`; the interpreter must be off.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found = []
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    says = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: target,
    )
    compile_only = JITFunction.run

    def run(self: Any, *args: Any, **constants: Any) -> None:
        found.append(compile_only(self, *args, **(constants | {"warmup": True})))

    driver.set_active(says)
    with patch.object(JITFunction, "run", run):
        yield found


def check_products(ttgir: str) -> None:
    """Products on mma.sync are as deep as the layout of their operands, in four lanes.

    Triton takes 32 bits over the size at which operands were loaded as the values of a lane, half
    the size where a `join` lies between, and does not look at the depth: sums are then wrong.
    """
    for depth, mma, width in _PRODUCT.findall(ttgir):
        if f"{mma} = #ttg.nvidia_mma<{{versionMajor = 2" in ttgir:
            assert 4 * int(width) <= int(depth), (width, depth)


def run_compiler(call: str, folder: Path, tmp_path: Path) -> None:
    """Run `import test_x as t; ...` of the tests in `folder` with Triton's interpreter off."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, "-c", call],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
