"""Triton where it is installed, inert stand-ins where it is not, so that every file imports."""

from __future__ import annotations

import importlib.util
from typing import Any

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl

    triton_jit: Any = triton.jit
else:

    class _Absent:
        """Answers every attribute with itself: enough for annotations at definition time."""

        def __getattr__(self, name: str) -> _Absent:
            return self

    def triton_jit(function: Any) -> Any:
        """Leave the function as it is; without Triton nothing launches it."""
        return function

    triton: Any = _Absent()  # type: ignore[no-redef]
    tl: Any = _Absent()  # type: ignore[no-redef]

__all__ = ["HAS_TRITON", "tl", "triton", "triton_jit"]
