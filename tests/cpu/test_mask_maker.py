"""Grammars made ready beside the engine: each comes back as a mask or as what was wrong with it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llguidance")

from rust_panic import rust_panic
from scripted import byte_tokenizer, fake_config

from subten.core import SamplingParams
from subten.serve import ipc, masks
from subten.serve.mask_maker import MaskMaker


def make(grammar: str) -> Any:
    """What a maker has for a request with this grammar."""
    llm: Any = SimpleNamespace(tokenizer=byte_tokenizer(), model_config=fake_config())
    woken = threading.Event()
    maker = MaskMaker(llm, woken.set)
    sampling = SamplingParams()
    message = ipc.Submit(request_id="a", token_ids=[1], sampling=sampling, seed=0, grammar=grammar)
    maker.submit(message)
    assert woken.wait(20), "the request would wait for ever"
    [(found, mask)] = maker.take()
    assert found is message
    assert maker.num_waiting == 0
    return mask


def test_a_grammar_becomes_a_mask():
    words = make('{"regex": "ab"}').next_mask(None)
    assert [i for i in range(256) if words[i // 32] >> i % 32 & 1] == [ord("a")]


def test_a_grammar_that_is_none_is_told():
    assert "wizard" in make('{"json_schema": {"type": "wizard"}}')


def test_a_panic_is_the_matter_of_its_request(monkeypatch):
    monkeypatch.setattr(masks, "new_matcher", rust_panic)
    assert make('{"regex": "a"}').startswith("panic: ")
