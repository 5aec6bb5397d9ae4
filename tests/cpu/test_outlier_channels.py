"""`kv_outlier_channels`: chosen channels of stored keys in BF16, counted as what they take."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_adaptive import GREEDY, VOCAB, make_llm, make_model, pool_of, prompt_of, run

from subten.calibration.keys import _outliers_first
from subten.calibration.keys_at_load import KeyCalibration, calibrate_keys
from subten.core import ConfigError
from subten.engine.llm import LLM
from subten.engine.resolve_adaptive import outlier_count
from subten.weights.load import LoadedModel


@pytest.fixture
def loaded(generator: torch.Generator) -> LoadedModel:
    return make_model(generator)


@pytest.fixture
def rng(generator: torch.Generator) -> random.Random:
    return random.Random(generator.initial_seed())


@pytest.fixture
def calibration(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> KeyCalibration:
    """What LLMs of this test learn, as their model has no tokenizer."""
    tokens = torch.randint(VOCAB, (300,), generator=generator).tolist()
    found = calibrate_keys(loaded.model, tokens, folder=None)
    found.apply(loaded.model)
    monkeypatch.setattr(LLM, "_calibrate", lambda *_: found)
    return found


def test_a_percentage_is_one_channel_at_least() -> None:
    assert [outlier_count(p, 64) for p in (None, 0.0, 0.1, 1.0, 3.0, 10.0)] == [0, 0, 1, 1, 2, 6]
    assert outlier_count(1.0, 256) == 3


def test_channels_that_cost_most_come_first() -> None:
    felt_LGD = torch.tensor([[[1.0, 1.0, 6.0, 1.0]]])
    size_LGD = torch.tensor([[[2.0, 1.0, 1.0, 1.5]]])
    assert _outliers_first(felt_LGD, size_LGD).tolist() == [[[2, 0, 3, 1]]]


def test_without_calibration_they_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"kv_outlier_channels: got 1\.0; allowed: 0 without"):
        make_llm(loaded, kv_outlier_channels=1.0)
    assert pool_of(make_llm(loaded, kv_outlier_channels=0.0)).pages.keys[0].k_out_PGB is None


@pytest.mark.parametrize("percent", [1.0, 10.0])
def test_they_are_read_and_counted(
    loaded: LoadedModel, calibration: KeyCalibration, rng: random.Random, percent: float
) -> None:
    count, head_dim = outlier_count(percent, 32), 32
    settings: dict[str, Any] = {"kv_window_tokens": 33}
    plain = make_llm(loaded, **settings)
    llm = make_llm(loaded, **settings, kv_outlier_channels=percent)
    pool = pool_of(llm)
    # 16 bits of one channel in K's D, and so in 2D of keys and values.
    more = pool_of(plain).full_page_bits + 16 * count / (2 * head_dim)
    assert pool.full_page_bits == pytest.approx(more)
    for layer, keys in enumerate(pool.pages.keys):
        assert keys.outlier_GO is not None
        assert keys.k_out_PGB is not None
        assert torch.equal(keys.outlier_GO, calibration.outlier_LGD[layer, :, :count])
        keys.k_out_PGB.fill_(0xFF)  # NaN
    prompts = [prompt_of(n, rng) for n in (5, 130)]
    done = run(llm, prompts)
    pool.check_integrity()
    again = run(make_llm(loaded, **settings, kv_outlier_channels=percent), prompts)
    assert [c.token_ids for c in done] == [c.token_ids for c in again]
    assert all(len(c.token_ids) == GREEDY.max_tokens for c in done)
    written = [bool((keys.k_out_PGB != 0xFF).any()) for keys in pool.pages.keys]
    assert all(written)


@pytest.mark.usefixtures("calibration")
def test_a_budget_pays_for_them(loaded: LoadedModel) -> None:
    """Values get what is left: less than without."""
    settings: dict[str, Any] = {"kv_bits_budget": 5.0}
    without = make_llm(loaded, **settings)
    llm = make_llm(loaded, **settings, kv_outlier_channels=10.0)
    policies = [pool_of(each).fidelity.policy for each in (without, llm)]
    assert policies[1].value_bytes is not None
    assert policies[0].value_bytes is None or policies[1].value_bytes < policies[0].value_bytes
    least = r"kv_bits_budget: got 3.6; allowed: at least \d"
    with pytest.raises(ConfigError, match=least):
        make_llm(loaded, kv_bits_budget=3.6, kv_outlier_channels=10.0)
