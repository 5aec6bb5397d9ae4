"""A panic as Rust extensions raise it, which is no Exception."""

from __future__ import annotations

from typing import Any

import pytest


def rust_panic(*_: Any) -> None:
    """Raises a PanicException: that of a vocabulary which fails within the extension."""

    class Failing:
        eos_token_id, bos_token_id, tokens = 0, None, (b"a",)

        def __call__(self, _: str) -> list[int]:
            raise ValueError("no text")

    llguidance = pytest.importorskip("llguidance")
    wrapper = llguidance.TokenizerWrapper(Failing())
    llguidance.LLTokenizer(wrapper, n_vocab=1, eos_token=[0], slices=[]).tokenize_str("a")
