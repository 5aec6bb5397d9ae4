"""Triton where it is installed, inert stand-ins where it is not, so that every file imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from subten.core import ConfigError

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton import OutOfResources as OutOfResourcesError

    triton_jit: Any = triton.jit
else:

    class _Absent:
        """Answers every attribute with itself: enough for annotations at definition time."""

        def __getattr__(self, name: str) -> _Absent:
            return self

    def triton_jit(function: Any) -> Any:
        """Leave the function as it is; without Triton nothing launches it."""
        return function

    class OutOfResourcesError(Exception):  # type: ignore[no-redef]
        """Never raised without Triton."""

    triton: Any = _Absent()  # type: ignore[no-redef]
    tl: Any = _Absent()  # type: ignore[no-redef]

__all__ = ["HAS_TRITON", "launcher", "tl", "triton", "triton_jit"]


def launcher(kernel: Any, grid: tuple[int, ...], op: str, format_name: str) -> Callable[..., None]:
    """`kernel[grid]`; ConfigError where the GPU lacks what the op needs for this format."""

    def launch(*args: Any, **constants: Any) -> None:
        try:
            kernel[grid](*args, **constants)
        except OutOfResourcesError as error:
            raise ConfigError(
                f"backend: got 'triton', whose {op} of {format_name} takes more {error.name} in a "
                f"block than this GPU has, {error.required:,} > {error.limit:,}; allowed: torch"
            ) from error

    return launch
