"""Calibration when a model is loaded: once for its weights and a text, and never from damage."""

from __future__ import annotations

import pytest
import torch
from full_disk import full_disk
from test_adaptive import VALUES, VOCAB, make_model

from subten.bench.kv_ours import KeyBasis, shaped
from subten.calibration import keys_at_load
from subten.calibration.keys_at_load import calibrate_keys, read_text, shipped_text
from subten.calibration.rows import read_layers
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


def test_a_disk_that_takes_nothing_stops_no_model(generator, tmp_path, caplog):
    """Full, or with a file where the folder should be."""
    model, ids = make_model(generator).model, tokens(generator)
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path / "full", "File too large"), (tmp_path / "file", "exists")):
        caplog.clear()
        with full_disk():
            found = calibrate_keys(model, ids, folder=folder)
        assert (found.noise_L > 0).all()
        (warning,) = caplog.messages
        assert "not kept" in warning and reason in warning
    assert list((tmp_path / "full").iterdir()) == []


def test_others_who_share_the_folder_may_read_what_was_found(generator, tmp_path):
    calibrate_keys(make_model(generator).model, tokens(generator), folder=tmp_path)
    (file,) = tmp_path.iterdir()
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


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


# Case K02: key biases that ruin keys of few bits.
def test_a_large_key_bias_is_taken_out_of_scores(generator, monkeypatch):
    monkeypatch.setitem(VALUES, "attention_bias", True)
    model = make_model(generator).model
    config = model.config
    first = config.num_heads * config.head_dim
    for layer in model.layers:
        layer.attention.qkv.bias.data.zero_()
        keys = layer.attention.qkv.bias.data[first : first + config.num_kv_heads * config.head_dim]
        for head_D in keys.view(config.num_kv_heads, -1):
            place_2 = torch.randperm(config.head_dim, generator=generator)[:2]
            head_D[place_2] = torch.tensor([360.0, 480.0])
    calibration = calibrate_keys(model, tokens(generator), folder=None)
    ids = torch.tensor(tokens(generator))
    is_seen_TT = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()

    def likeness(basis: KeyBasis, bits: int) -> list[float]:
        """Cosine of all scores of a layer with those of its exact keys."""
        found = []
        for ((rows, q_HTD),) in read_layers(model, [ids]):
            stored_GTD, shift_GTD, inverse_DD = basis.turned(rows)
            coded_GTD = shaped(stored_GTD, bits, basis.feedback(rows.layer))
            scores = [
                (q_HTD @ key_GTD.repeat_interleave(2, dim=0).mT)[:, is_seen_TT].double().flatten()
                for key_GTD in (rows.key_GTD, coded_GTD @ inverse_DD + shift_GTD)
            ]
            found.append(float(torch.cosine_similarity(*scores, dim=0)))
        return found

    # The case's own gates, which every layer passes stripped and none passes as it is.
    for bits, gate in ((4, 0.999), (2, 0.99)):
        assert min(likeness(KeyBasis(calibration=calibration), bits)) > gate
        assert max(likeness(KeyBasis(), bits)) < gate
