"""The lab's tiers against decoding token by token, and its bits against counting them."""

from __future__ import annotations

import math
from dataclasses import replace

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
from subten.bench.kv_ours import (
    BASE,
    COLD,
    FINE,
    KeyBasis,
    Protection,
    adaptive,
    protection_for,
    shaped,
    value_versions,
)
from subten.bench.kv_schemes import (
    affine_channels,
    affine_rows,
    codec_scheme,
    comparison_schemes,
    flushed_blocks,
    hqq_rows,
    kivi,
    ladder,
    lloyd_max_levels,
)
from subten.calibration.keys import (
    balanced_matrix,
    balanced_transform,
    hadamard_transform,
    key_statistics,
    shaped_transform,
    turn,
)
from subten.calibration.keys_at_load import KeyCalibration, calibrate_keys
from subten.calibration.rows import LayerRows
from subten.codecs.mixed import decode_cold, encode_cold, mixed_format
from subten.codecs.nested import decode_nested, encode_nested
from subten.codecs.rotation import hadamard
from subten.codecs.shaped import decode_shaped, encode_shaped
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
            [rows.key_GTD, coarse(4)(rows.key_GTD), coarse(1)(rows.key_GTD)],
            [rows.value_GTD, coarse(4)(rows.value_GTD), coarse(1)(rows.value_GTD)],
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
    rows = list(
        evaluate_schemes(
            tiny_decoder("bf16", 3),
            random_tokens(generator, 90),
            schemes,
            window=40,
            progress=seen.append,
        )
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


def test_values_are_read_unbiased(generator):
    x_TD = torch.randn(400, 64, generator=generator)
    for decoded in value_versions(x_TD, (FINE, BASE, COLD)):
        slope = float((decoded * x_TD).sum() / x_TD.pow(2).sum())
        # 25600 products of spread below 1: 3 deviations are 0.02; a row's own norm takes up to
        # 1 / 64 of the error away.
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
        decoded = shaped(stored, 3, None if feedback is None else feedback[1].contiguous())
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
    # Sums in another order move a few of the queries, which are of size 1, by a step of BF16.
    assert torch.allclose(found.query_LGDD[1, 0], query.mT @ query / len(query), atol=1e-3)
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


def calibration_of(model, generator) -> KeyCalibration:
    texts = [random_tokens(generator, 150) for _ in range(3)]
    return calibrate_keys(model, [token for text in texts for token in text], folder=None)


def test_windows_together_are_windows_alone(generator):
    model = tiny_decoder("bf16", 7)
    tokens = random_tokens(generator, 200)
    calibration = calibration_of(model, generator)
    protection = Protection(key_bits_L=(4, 3), value_bytes=64.0 * 20, window=20, sinks=2)
    scheme = adaptive("a", protection, KeyBasis(calibration=calibration), head_dim=HEAD_DIM)
    for each in (scheme, kivi(4)):
        together = hidden_states(model, torch.tensor(tokens).view(2, 100), each)
        alone = [hidden_states(model, torch.tensor(tokens[i : i + 100]), each) for i in (0, 100)]
        # Sums of other shapes move few values across an edge of a code; a window that saw another
        # would move all.
        is_near = (together - torch.stack(alone)).abs() < 1e-3
        assert is_near.double().mean() > 0.9


def test_both_windows_of_a_text_are_scored(generator):
    model = tiny_decoder("bf16", 9)
    tokens = random_tokens(generator, 150)
    (row,) = evaluate_schemes(model, tokens, [codec_scheme("int4", HEAD_DIM)], window=60)
    assert row.num_tokens == 147
    parts = [tokens[:60], tokens[60:120], tokens[120:]]
    rows = [
        next(evaluate_schemes(model, p, [codec_scheme("int4", HEAD_DIM)], window=60)) for p in parts
    ]
    mean = sum(r.kld_mean * r.num_tokens for r in rows) / 147
    assert row.kld_mean == pytest.approx(mean, rel=0.2)


@torch.inference_mode()
def stepwise_adaptive(model, tokens, protection: Protection, calibration) -> torch.Tensor:
    """Logits of every token, decoded one by one: rows encoded as they come, pages lowered."""
    config, fmt = model.config, mixed_format(HEAD_DIM)
    rotation = hadamard(HEAD_DIM, torch.device("cpu"))
    stored = [([], []) for _ in model.layers]
    out = []
    for now, token in enumerate(tokens):
        x_TD = model.embedding_VD[token][None].float()
        kinds = protection.value_kinds(now // PAGE_SIZE, fmt).tolist()
        for index, layer in enumerate(model.layers):
            attention = layer.attention
            qkv = attention.qkv(x_TD, norm_weight_K=layer.attention_norm_D, eps=config.norm_eps)
            q, k, v = qkv.view(1, -1, HEAD_DIM).split((4, 2, 2), dim=1)
            q, k = (norm_rope_torch(x, model.cos_sin_PD, torch.tensor([now])) for x in (q, k))
            q, k, v = (x.bfloat16().float() for x in (q, k, v))
            shift = turn(calibration.mean_LGD[index], model.cos_sin_PD[now : now + 1])[:, 0]
            y = torch.einsum("gd,gde->ge", k[0] - shift, calibration.matrix_LGDD[index])[None]
            width = protection.key_bits_L[index]
            low, high, norm, _ = encode_shaped(
                y, bits=width, feedback_GDD=calibration.feedback_LGDD[index].contiguous()
            )
            code = decode_shaped(low[0], high[0], norm[0], bits=width)
            turned = v[0] @ rotation
            base, fine, norm, _ = encode_nested(turned)
            versions = {
                FINE: decode_nested(base, fine, norm),
                BASE: decode_nested(base, None, norm),
            }
            versions[COLD] = decode_cold(*encode_cold(versions[BASE]))
            keys, values = stored[index]
            keys.append((y[0].bfloat16().float(), code, shift))
            values.append((turned.bfloat16().float(), versions))
            seen_keys, seen_values = [], []
            for then, ((exact_k, code, shift), (exact_v, coded_v)) in enumerate(
                zip(keys, values, strict=True)
            ):
                is_exact = then < protection.sinks or now - then < protection.window
                row = exact_k if is_exact else code
                back = torch.einsum("ge,ged->gd", row, calibration.inverse_LGDD[index])
                seen_keys.append(back + shift)
                value = exact_v if is_exact else coded_v[kinds[then // PAGE_SIZE]]
                seen_values.append(value @ rotation.mT)
            key_TGD, value_TGD = torch.stack(seen_keys), torch.stack(seen_values)
            rows = []
            for head in range(4):
                score = key_TGD[:, head // 2] @ q[0, head] * attention.scale
                rows.append(score.softmax(0) @ value_TGD[:, head // 2])
            x_TD = attention.output(torch.cat(rows)[None], residual_TN=x_TD)
            x_TD = layer.ffn(x_TD, layer.ffn_norm_D)
        out.append(logits(model, x_TD)[0])
    return torch.stack(out)


def test_the_adaptive_cache_in_one_pass_equals_decoding_token_by_token(generator):
    model = tiny_decoder("bf16", int(torch.randint(2**31, (), generator=generator)))
    tokens = random_tokens(generator, 140)
    calibration = calibration_of(model, generator)
    fmt = mixed_format(HEAD_DIM)
    # Of three pages the newest is fine, the one before it at 2 bits, the oldest cold.
    protection = Protection(
        key_bits_L=(4, 3),
        value_bytes=fmt.fine_bytes + 2 * fmt.base_bytes + fmt.cold_bytes,
        newest_pages=1,
        has_cold=True,
        window=20,
        sinks=3,
    )
    assert protection.value_kinds(2, fmt).tolist() == [COLD, BASE, FINE]
    expected = stepwise_adaptive(model, tokens, protection, calibration).log_softmax(-1)

    def distance(**options) -> float:
        changed = replace(protection, **options)
        basis = KeyBasis(calibration=calibration)
        scheme = adaptive("a", changed, basis, head_dim=HEAD_DIM)
        x_TD = hidden_states(model, torch.tensor(tokens), scheme)
        return float((logits(model, x_TD).log_softmax(-1) - expected).abs().mean())

    # As above: a few values across an edge, against thousands that a wrong rule would move.
    assert distance() < 0.3 * min(distance(window=0), distance(value_bytes=None))


def test_outlier_channels_are_read_as_bf16_and_counted(generator):
    model = tiny_decoder("bf16", int(torch.randint(2**31, (), generator=generator)))
    calibration = calibration_of(model, generator)
    basis = KeyBasis(calibration=calibration)
    rows = LayerRows(
        layer=1,
        raw_key_GTD=torch.empty(0),
        key_GTD=torch.randn(2, 70, HEAD_DIM, generator=generator),
        value_GTD=torch.randn(2, 70, HEAD_DIM, generator=generator),
        cos_sin_TD=model.cos_sin_PD[:70],
    )
    stored_GTD, shift_GTD, _ = basis.turned(rows)
    plain, kept = (
        adaptive("a", Protection(key_bits_L=(2, 2), num_outliers=count), basis, head_dim=HEAD_DIM)
        for count in (0, 3)
    )
    # Back in the basis that keys are stored in; three turns in float32 cost a few ulps.
    back_GTD, plain_GTD = (
        (scheme.encode(rows)[0][1] - shift_GTD) @ calibration.matrix_LGDD[1]
        for scheme in (kept, plain)
    )
    for head in range(2):
        place_O = calibration.outlier_LGD[1, head, :3].long()
        exact_TO = stored_GTD[head][:, place_O].bfloat16().float()
        assert torch.allclose(back_GTD[head][:, place_O], exact_TO, atol=1e-3)
        assert not torch.allclose(plain_GTD[head][:, place_O], exact_TO, atol=1e-1)
    assert kept.key_bits[1] - plain.key_bits[1] == 3 * 16 / HEAD_DIM


def test_pages_go_down_oldest_first_and_the_newest_last():
    fmt = mixed_format(64)
    base, fine, cold = fmt.base_bytes, fmt.fine_bytes, fmt.cold_bytes

    def kinds(value_bytes: float, **options) -> list[int]:
        plan = Protection(key_bits_L=(4,), value_bytes=value_bytes, newest_pages=2, **options)
        return plan.value_kinds(4, fmt).tolist()

    assert kinds(5 * (base + fine)) == [FINE] * 5
    assert kinds(5 * (base + fine) - 1) == [BASE] + [FINE] * 4
    assert kinds(5 * base + fine) == [BASE] * 4 + [FINE]
    saved = base - cold
    assert kinds(5 * base + 2 * fine - 3 * saved, has_cold=True) == [COLD] * 3 + [FINE] * 2
    assert kinds(5 * base + fine - saved, has_cold=True) == [COLD] + [BASE] * 3 + [FINE]
    assert kinds(5 * base + 2 * fine, has_cold=True) == [BASE] * 3 + [FINE] * 2
    assert kinds(5 * cold, has_cold=True) == [COLD] * 5
    assert Protection(key_bits_L=(4,)).value_kinds(4, fmt).tolist() == [FINE] * 5


@pytest.mark.parametrize("budget", [4.5, 3.3, 2.7])
def test_a_budget_is_met_at_the_end_of_a_window_and_used(budget):
    config = replace(CONFIG, head_dim=64, num_layers=30)
    protection = protection_for(budget, config, num_tokens=8192, noise_L=list(range(30)))
    scheme = adaptive("a", protection, KeyBasis(), head_dim=64)
    # All that is left is less than a layer's bit of keys or a page's plane of values.
    finest = scheme.true_bits(8192) > 4.1
    assert budget - 0.03 < scheme.true_bits(8192) <= budget or finest
    coarse = [layer for layer, bits in enumerate(protection.key_bits_L) if bits == 2]
    assert coarse == list(range(len(coarse)))


def test_a_budget_below_all_is_refused():
    config = replace(CONFIG, head_dim=64)
    with pytest.raises(ConfigError, match="kv_bits_budget: got 2"):
        protection_for(2.0, config, num_tokens=8192, noise_L=[0.0] * 2)
