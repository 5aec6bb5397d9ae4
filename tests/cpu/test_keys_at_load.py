"""Calibration when a model is loaded: once for its weights and a text, and never from damage."""

from __future__ import annotations

import pytest
import torch
from test_adaptive import VOCAB, make_model

from subten.calibration import keys_at_load
from subten.calibration.keys_at_load import calibrate_keys, read_text, shipped_text
from subten.core import ConfigError, RequestError


def tokens(generator: torch.Generator, count: int = 300) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


def test_a_text_is_read_once_for_weights_and_tokens(generator, tmp_path, monkeypatch):
    model, ids = make_model(generator).model, tokens(generator)
    first = calibrate_keys(model, ids, folder=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    reads = []
    statistics = keys_at_load.key_statistics
    monkeypatch.setattr(
        keys_at_load, "key_statistics", lambda *a, **k: reads.append(1) or statistics(*a, **k)
    )
    again = calibrate_keys(model, ids, folder=tmp_path / "cache")
    assert not reads
    assert torch.equal(first.matrix_LGDD, again.matrix_LGDD)
    assert torch.equal(first.feedback_LGDD, again.feedback_LGDD)
    calibrate_keys(model, ids[1:], folder=tmp_path / "cache")
    model.layers[1].attention.qkv.weight.codes.data[3, 3] += 0.5
    calibrate_keys(model, ids, folder=tmp_path / "cache")
    assert len(reads) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 3
    file.write_bytes(file.read_bytes()[:100])
    model.layers[1].attention.qkv.weight.codes.data[3, 3] -= 0.5
    calibrate_keys(model, ids, folder=tmp_path / "cache")
    assert len(reads) == 3


def test_stored_rows_have_an_rms_near_one(generator):
    model = make_model(generator).model
    found = calibrate_keys(model, tokens(generator), folder=None)
    found.apply(model)
    attention = model.layers[0].attention
    assert torch.equal(attention.feedback_GDD, found.feedback_LGDD[0])
    eye = torch.eye(attention.head_dim).expand_as(attention.k_turn_GDD)
    product = attention.k_turn_GDD @ attention.q_turn_GDD.mT
    assert torch.allclose(product, eye, atol=1e-3)
    assert (found.noise_L > 0).all()


def test_what_cannot_be_read_is_refused(generator, tmp_path):
    model = make_model(generator).model
    with pytest.raises(RequestError, match="kv_calibration: got '255 tokens'; allowed: at least"):
        calibrate_keys(model, tokens(generator, 255), folder=None)
    with pytest.raises(ConfigError, match=r"kv_calibration: got .*none\.txt"):
        read_text(str(tmp_path / "none.txt"))
    assert 5000 < len(shipped_text()) < 20000
