"""The lab's tiers against decoding token by token, and its bits against counting them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from test_quality import CONFIG, tiny_decoder

from subten.bench.kv_lab import (
    EXACT,
    Scheme,
    all_encoded,
    attend_tiers,
    evaluate_schemes,
    hidden_states,
    logits,
)
from subten.bench.kv_schemes import (
    affine_channels,
    affine_rows,
    alone,
    byte_norm,
    codec_scheme,
    comparison_schemes,
    flushed_blocks,
    hqq_rows,
    kivi,
    ladder,
    lloyd_max_error,
    lloyd_max_levels,
    lloyd_max_rows,
    plane_rows,
    protected,
    shaped_rows,
)
from subten.calibration.keys import (
    balanced_matrix,
    balanced_transform,
    hadamard_transform,
    key_statistics,
    shaped_transform,
    turn,
)
from subten.codecs.rotation import hadamard
from subten.core import PAGE_SIZE, ConfigError, RequestError
from subten.kernels.norm_rope import norm_rope_torch

HEAD_DIM = CONFIG.head_dim


def random_tokens(generator, count: int) -> list[int]:
    return torch.randint(CONFIG.vocab_size, (count,), generator=generator).tolist()


def coarse(steps: float):
    """A coder of single numbers: what a row decodes to does not depend on its neighbours."""
    return lambda x: (x * steps).round() / steps


def two_versions(**options) -> Scheme:
    """Versions 1 and 2 round keys and values to ever coarser steps."""
    return Scheme(
        name="rounded",
        ours=True,
        encode=lambda rows: (
            [coarse(4)(rows.key_GTD), coarse(1)(rows.key_GTD)],
            [coarse(4)(rows.value_GTD), coarse(1)(rows.value_GTD)],
        ),
        key_bits=(16.0, 4.0, 2.0),
        value_bits=(16.0, 4.0, 2.0),
        **options,
    )


@torch.inference_mode()
def stepwise(model, tokens: list[int], scheme: Scheme) -> torch.Tensor:
    """Logits of every token, decoded one by one; each step picks what it sees row by row."""
    config = model.config
    cached = [([], []) for _ in model.layers]
    rows_VT = []
    for now, token in enumerate(tokens):
        x_TD = model.embedding_VD[token][None].float()
        position = torch.tensor([now])
        for layer, (keys, values) in zip(model.layers, cached, strict=True):
            attention = layer.attention
            qkv = attention.qkv(x_TD, norm_weight_K=layer.attention_norm_D, eps=config.norm_eps)
            q, k, v = qkv.view(1, -1, HEAD_DIM).split((4, 2, 2), dim=1)
            q, k = (norm_rope_torch(x, model.cos_sin_PD, position) for x in (q, k))
            q, *exact = (x[0].bfloat16().float() for x in (q, k, v))
            for store, row in zip((keys, values), exact, strict=True):
                store.append((row, coarse(4)(row), coarse(1)(row)))
            seen = []
            windows = (scheme.key_window, scheme.value_window)
            for store, tier, window in zip(
                (keys, values), scheme.tiers(now // PAGE_SIZE), windows, strict=True
            ):
                picks = []
                for then, versions in enumerate(store):
                    is_exact = then < scheme.sinks or now - then < window
                    picks.append(versions[0 if is_exact else int(tier[then // PAGE_SIZE])])
                seen.append(torch.stack(picks))
            out = []
            for head in range(4):
                score = seen[0][:, head // 2] @ q[head] * attention.scale
                out.append(score.softmax(0) @ seen[1][:, head // 2])
            x_TD = attention.output(torch.cat(out)[None], residual_TN=x_TD)
            x_TD = layer.ffn(x_TD, layer.ffn_norm_D)
        rows_VT.append(logits(model, x_TD)[0])
    return torch.stack(rows_VT)


OPTIONS = [
    {},
    {"sinks": 3, "tiers": ladder([(1, 0, 0), (1, 1, 2), (None, 2, 1)])},
    {"key_window": 1, "value_window": 64, "sinks": 1},
    {"key_window": 65, "value_window": 100, "tiers": ladder([(None, 2, 1)], first_exact=True)},
    {"tiers": flushed_blocks, "value_window": 128},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 151])
def test_every_query_sees_the_versions_of_its_time(generator, options, num_tokens):
    scheme = two_versions(**options)
    versions = torch.randn(2, 3, 2, num_tokens, 8, generator=generator)
    q_HTD = torch.randn(4, num_tokens, 8, generator=generator)
    out_HTD = attend_tiers(q_HTD, list(versions[0]), list(versions[1]), scheme, scale=0.5)
    windows = (scheme.key_window, scheme.value_window)
    for now in range(num_tokens):
        seen = []
        for side, tier, window in zip(
            versions, scheme.tiers(now // PAGE_SIZE), windows, strict=True
        ):
            picks = [
                side[0 if then < scheme.sinks or now - then < window else tier[then // PAGE_SIZE]]
                for then in range(now + 1)
            ]
            seen.append(torch.stack([row[:, then] for then, row in enumerate(picks)], dim=1))
        for head in range(4):
            score = seen[0][head // 2] @ q_HTD[head, now] * 0.5
            expected = score.softmax(0) @ seen[1][head // 2]
            # Float32 sums of at most 151 terms of size 1, in another order.
            assert torch.allclose(out_HTD[head, now], expected, atol=1e-4)


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[3]])
def test_a_window_in_one_pass_equals_decoding_token_by_token(generator, options):
    model = tiny_decoder("bf16", int(torch.randint(2**31, (), generator=generator)))
    tokens = random_tokens(generator, 151)

    def log_probs(scheme: Scheme) -> torch.Tensor:
        x_TD = hidden_states(model, torch.tensor(tokens), scheme)
        return logits(model, x_TD).log_softmax(-1)

    scheme = two_versions(**options)
    expected = stepwise(model, tokens, scheme).log_softmax(-1)

    def distance(other: torch.Tensor) -> float:
        return float((other - expected).abs().mean())

    # Float32 sums in another order move a few values across an edge of BF16 or of the coarse
    # steps; each such key or value is one of thousands that wrong tiers would move.
    wrong = two_versions(**{**options, "tiers": all_encoded})
    assert distance(log_probs(scheme)) < 0.2 * distance(log_probs(wrong))


def test_the_reference_is_the_model(generator):
    model = tiny_decoder("bf16", 2)
    tokens = random_tokens(generator, 100)
    (row,) = evaluate_schemes(model, tokens, [EXACT], window=50)
    assert (row.kld_mean, row.kld_p999, row.ppl_ratio, row.top1_agreement) == (0, 0, 1, 1)
    assert row.num_tokens == 98
    x_TD = hidden_states(model, torch.tensor(tokens[:50]), EXACT)
    nll = F.cross_entropy(logits(model, x_TD[:-1]), torch.tensor(tokens[1:50]))
    (first,) = evaluate_schemes(model, tokens[:50], [EXACT], window=50)
    assert math.isclose(first.ppl, math.exp(float(nll)), rel_tol=1e-5)


def test_progress_ends_at_one(generator):
    seen: list[float] = []
    schemes = [codec_scheme("int4", HEAD_DIM), kivi(2)]
    rows = evaluate_schemes(
        tiny_decoder("bf16", 3),
        random_tokens(generator, 90),
        schemes,
        window=40,
        progress=seen.append,
    )
    assert [row.scheme for row in rows] == ["int4", "kivi-2"]
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("tokens", "window", "error"),
    [([1, 2, 3], 1, ConfigError), ([1, 2, 3], 161, ConfigError), ([1], 8, RequestError)],
)
def test_what_cannot_be_measured_is_refused(tokens, window, error):
    with pytest.raises(error):
        evaluate_schemes(tiny_decoder("bf16", 4), tokens, [EXACT], window=window)


def test_bits_count_pages_windows_and_sinks():
    encoded = two_versions()
    assert encoded.true_bits(128) == 4.0
    assert encoded.true_bits(65) == pytest.approx(4 * 128 / 65)  # a page that holds one token
    mixed = two_versions(tiers=ladder([(1, 0, 0), (None, 1, 2)]))
    assert mixed.true_bits(256) == pytest.approx((16 + 3 * (4 + 2) / 2) / 4)
    instead = two_versions(key_window=32, value_window=32, sinks=4)
    assert instead.true_bits(128) == pytest.approx((36 * 16 + 92 * 4) / 128)
    beside = two_versions(key_window=32, value_window=32, sinks=4, is_beside=True)
    assert beside.true_bits(128) == pytest.approx(36 * 16 / 128 + 4)
    assert kivi(2).true_bits(8192) == pytest.approx(3 + 13 * 128 / 8192)
    assert mixed.mean_true_bits(128) == pytest.approx((16 + (16 + 3) / 2) / 2)


def test_others_store_what_they_say():
    bits = {scheme.name: scheme.key_bits[1] for scheme in comparison_schemes(64)}
    assert bits["quanto-4"] == bits["hqq-4"] == 4.5
    assert bits["kivi-2"] == 3.0
    assert bits["turboquant-4"] == 4.25
    assert bits["int4-g32"] == 5.0
    assert not any(scheme.ours for scheme in comparison_schemes(64))


def test_more_bits_err_less(generator):
    x_TD = torch.randn(2, 96, 64, generator=generator)

    def error(coder, bits: int) -> float:
        return float((coder(x_TD, bits=bits) - x_TD).pow(2).mean())

    def rows(x, *, bits):
        return affine_rows(x, bits=bits, group=64)

    def hqq(x, *, bits):
        return hqq_rows(x, bits=bits, group=64)

    def channels(x, *, bits):
        return affine_channels(x, bits=bits, group=32)

    for coder in (rows, hqq, channels):
        assert error(coder, 4) < error(coder, 2) / 8
    # Its zero-point moves to lower an error that counts outliers less.
    assert error(hqq, 2) < 1.2 * error(rows, 2)


def test_channels_keep_a_short_last_group(generator):
    x_TD = torch.randn(1, 70, 8, generator=generator)
    coded = affine_channels(x_TD, bits=4, group=32)
    assert torch.equal(coded[:, :64], affine_channels(x_TD[:, :64], bits=4, group=32))
    # The range of 6 Gaussians is below 8 deviations: an error is at most half a step of 8 / 15,
    # and FP16 metadata adds 2^-11 of values below 8.
    assert (coded - x_TD).abs().max() < 4 / 15 + 0.01


def test_levels_are_those_of_max():
    # Max (1960), table I.
    assert torch.allclose(
        lloyd_max_levels(4), torch.tensor([-1.510, -0.4528, 0.4528, 1.510]), atol=1e-3
    )
    assert torch.allclose(
        lloyd_max_levels(8)[4:], torch.tensor([0.2451, 0.7560, 1.344, 2.152]), atol=1e-3
    )


@pytest.mark.parametrize("kind", ["int2", "nested4", "vq1.5"])
def test_planes_are_read_unbiased(generator, kind):
    x_TD = torch.randn(400, 64, generator=generator)
    slope = float((plane_rows(kind)(x_TD) * x_TD).sum() / x_TD.pow(2).sum())
    # 25600 products of spread below 1: 3 deviations are 0.02; a row's own norm takes up to 1 / 64
    # of the error away.
    assert abs(slope - 1) < 0.03


def test_the_balanced_matrix_lowers_the_error_of_scores(generator):
    mix = torch.randn(2, 64, 64, generator=generator, dtype=torch.float64)
    spread = torch.linspace(-2, 2, 64, dtype=torch.float64).exp()
    key, query = (m * spread @ m.mT for m in mix)
    matrix = balanced_matrix(key, query)

    def cost(a: torch.Tensor) -> float:
        inverse = torch.linalg.inv(a)
        return float((query @ inverse.mT @ inverse).trace() * (a.mT @ key @ a).trace())

    assert cost(matrix) < cost(hadamard(64, torch.device("cpu")).double())
    for _ in range(5):
        shift = torch.randn(64, 64, generator=generator, dtype=torch.float64) * 0.1
        moved = (torch.eye(64, dtype=torch.float64) + shift) @ matrix
        # The ridge moves the minimum itself by a share of at most itself, 1e-2.
        assert cost(matrix) < cost(moved) * 1.01


def felt_error(rows: torch.Tensor, decoded: torch.Tensor, query: torch.Tensor) -> float:
    """Mean square error of scores of queries with second moment `query`."""
    error = (decoded - rows).double()
    return float(torch.einsum("gtd,gde,gte->gt", error, query, error).mean())


def test_feedback_moves_errors_where_queries_do_not_look(generator):
    model = tiny_decoder("bf16", 8)
    found = key_statistics(model, [random_tokens(generator, 150) for _ in range(3)])
    rows = []
    ids = torch.tensor(random_tokens(generator, 150))
    hidden_states(model, ids, EXACT, see=lambda r, _q: rows.append(r))
    shift = turn(found.mean_key_LGD[1], rows[1].cos_sin_TD)
    x_GTD = (rows[1].key_GTD - shift)[:, 4:]
    errors = {}
    for name, transform in (
        ("hadamard", hadamard_transform(found)),
        ("balanced", balanced_transform(found)),
        ("shaped", shaped_transform(found)),
    ):
        stored = x_GTD @ transform.matrix_LGDD[1]
        feedback = transform.feedback_LGDD
        if feedback is None:
            decoded = lloyd_max_rows(stored, bits=3)
        else:
            decoded = shaped_rows(stored, feedback[1], bits=3)
        decoded = decoded @ transform.inverse_LGDD[1]
        errors[name] = felt_error(x_GTD, decoded, found.query_LGDD[1])
    assert errors["balanced"] < errors["hadamard"]
    assert errors["shaped"] < errors["hadamard"]


def test_statistics_are_the_plain_moments(generator):
    model = tiny_decoder("bf16", 5)
    texts = [random_tokens(generator, 70) for _ in range(2)]
    found = key_statistics(model, texts)
    rows, queries = [], []
    for ids in texts:

        def see(r, q):
            if r.layer == 1:
                rows.append(r)
                queries.append(q[:2, 4:].reshape(-1, HEAD_DIM))

        hidden_states(model, torch.tensor(ids), EXACT, see=see)
    keys = torch.cat([r.raw_key_GTD[:, 4:] for r in rows], dim=1)
    assert torch.allclose(found.mean_key_LGD[1], keys.mean(dim=1), atol=1e-5)
    query = torch.cat(queries).double()
    assert torch.allclose(found.query_LGDD[1, 0], query.mT @ query / len(query), rtol=1e-4)
    for transform in (balanced_transform(found), shaped_transform(found)):
        eye = torch.eye(HEAD_DIM).expand(2, 2, HEAD_DIM, HEAD_DIM)
        assert torch.allclose(transform.matrix_LGDD @ transform.inverse_LGDD, eye, atol=1e-3)


def test_a_turned_mean_is_what_rotary_embedding_makes_of_it(generator):
    model = tiny_decoder("bf16", 6)
    mean_GD = torch.randn(2, HEAD_DIM, generator=generator)
    position = torch.arange(9)
    expected = norm_rope_torch(mean_GD.expand(9, 2, HEAD_DIM), model.cos_sin_PD, position)
    turned = turn(mean_GD, model.cos_sin_PD[:9])
    assert torch.allclose(turned, expected.transpose(0, 1), atol=1e-5)


def test_protection_with_exact_coders_changes_nothing(generator):
    model = tiny_decoder("bf16", 7)
    tokens = random_tokens(generator, 100)
    found = key_statistics(model, [random_tokens(generator, 150)])
    schemes = [
        protected(
            "exact",
            keys=[(alone(lambda x: x), 16.0)],
            values=[(lambda x: x, 16.0)],
            tiers=all_encoded,
            statistics=statistics,
            transform=transform,
        )
        for statistics, transform in ((None, None), (found, balanced_transform(found)))
    ]
    for row in evaluate_schemes(model, tokens, schemes, window=100):
        # There and back through matrices of condition below 1e3 leaves 1e-4 of a key at most.
        assert row.kld_mean < 1e-4


def test_a_norm_of_one_byte_costs_little(generator):
    size = torch.linspace(-5.5, 5.5, 500).exp()
    assert (byte_norm(size) / size - 1).abs().max() < 2 ** (1 / 32) - 1 + 1e-5
    assert byte_norm(size).unique().numel() <= 256
    x_TD = torch.randn(400, 64, generator=generator)
    plain, coarse_norm = (
        float((lloyd_max_rows(x_TD, bits=4, norm=norm) - x_TD).square().mean())
        for norm in (None, byte_norm)
    )
    # A norm that is off by at most 2.2 % adds a third of its square, 1.6e-4, to about 9.6e-3.
    assert abs(coarse_norm - plain - 1.6e-4) < 2e-4


def test_lloyd_max_errors_are_those_of_max():
    # Max (1960), table I.
    assert lloyd_max_error(4) == pytest.approx(0.1175, abs=1e-4)
    assert lloyd_max_error(8) == pytest.approx(0.03454, abs=1e-5)
