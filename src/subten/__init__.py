"""Subten decodes sparse Mixture-of-Experts language models straight from a packed KV cache.

The public names below load on first use, so that `import subten` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subten.config import EngineConfig as EngineConfig
    from subten.core import SamplingParams as SamplingParams
    from subten.core import UserError as UserError
    from subten.engine.completion import Completion as Completion
    from subten.engine.llm import LLM as LLM
    from subten.layers.block import FusedMoEQuantizedAttention as FusedMoEQuantizedAttention

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "subten.engine.llm",
    "Completion": "subten.engine.completion",
    "SamplingParams": "subten.core",
    "EngineConfig": "subten.config",
    "FusedMoEQuantizedAttention": "subten.layers.block",
    "UserError": "subten.core",
}

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "FusedMoEQuantizedAttention",
    "SamplingParams",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'subten' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
