"""Perplexity by the engine against that in one pass, on a tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import config_values, tensors_of, write_folder

from subten.bench.kv_engine import evaluate_engine
from subten.bench.kv_lab import evaluate_schemes
from subten.bench.kv_menu import Menu
from subten.calibration import rows as rows_module
from subten.calibration.keys_at_load import KeyCalibration
from subten.core import ConfigError, RequestError
from subten.weights import LoadedModel, load_model

VOCAB = 53


@pytest.fixture
def loaded(tmp_path: Path, generator: torch.Generator) -> LoadedModel:
    values = config_values(
        "LlamaForCausalLM",
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
    )
    tensors = tensors_of(values, generator)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[name] = 1 + 0.3 * tensor
        else:
            tensors[name] = tensor * tensor.shape[-1] ** -0.5
    folder = write_folder(tmp_path / "m", values, tensors)
    options = {"device": torch.device("cpu"), "dtype": "float32", "backend": "torch"}
    return load_model(str(folder), kv_cache_dtype="bf16", **options)


def test_the_engine_reads_what_one_pass_reads(loaded, generator, monkeypatch):
    # One pass rounds rows to BF16, as they are in models of that type; the engine encodes what this
    # model gives. One row of 2-bit codes in ten would be another.
    monkeypatch.setattr(rows_module, "_rounded", torch.Tensor.float)
    ids = torch.randint(VOCAB, (620,), generator=generator).tolist()
    names = ("bf16", "int4", "int2", "adaptive-9")
    rows = list(evaluate_engine(loaded, names, ids, window=300))
    assert [row.scheme for row in rows] == list(names)
    # Two whole windows; of each the first and the last token are not scored.
    assert {row.num_tokens for row in rows} == {2 * 298}
    # Nothing is learned from a text where there is no tokenizer: keys are turned alone.
    nothing = KeyCalibration(
        **dict.fromkeys(
            ("mean_LGD", "matrix_LGDD", "inverse_LGDD", "feedback_LGDD", "outlier_LGD"),
            torch.zeros(2, 2, 32),
        ),
        noise_L=torch.ones(2),
    )
    menu = Menu(loaded.config, window=300, calibration=nothing)
    schemes = [menu.scheme(name) for name in (*names[:-1], "adaptive-9-plain")]
    read = ids[:299] + ids[300:599]
    expected = list(evaluate_schemes(loaded.model, read, schemes, window=299))
    for row, one_pass in zip(rows, expected, strict=True):
        assert row.num_tokens == one_pass.num_tokens
        assert row.ppl_reference == pytest.approx(one_pass.ppl_reference, rel=1e-5), row.scheme
        # Codes are the same but for one across an edge now and then, 1e-4 and a place of 596 in 26
        # runs; of the BF16 cache, whose rows one pass here has as they are, 6e-4 and 4 places.
        assert row.ppl_ratio == pytest.approx(one_pass.ppl_ratio, rel=2e-3), row.scheme
        assert abs(row.top1_agreement - one_pass.top1_agreement) < 0.02, row.scheme
    assert rows[0].ppl_ratio == pytest.approx(1, abs=2e-3)
    assert rows[0].top1_agreement > 0.98 > rows[2].top1_agreement
    assert rows[3].true_bits == 9
    assert math.isclose(rows[1].true_bits, 5.0)


@pytest.mark.parametrize(
    ("names", "num_tokens", "window", "error"),
    [
        (["adaptive"], 100, 64, ConfigError),
        (["kivi-4"], 100, 64, ConfigError),
        (["bf16"], 63, 64, RequestError),
        (["bf16"], 100, 2, ConfigError),
        (["bf16"], 2000, 1025, ConfigError),
    ],
)
def test_what_cannot_be_served_is_refused(loaded, names, num_tokens, window, error):
    with pytest.raises(error, match="allowed"):
        list(evaluate_engine(loaded, names, [1] * num_tokens, window=window))
