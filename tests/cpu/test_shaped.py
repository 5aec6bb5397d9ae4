"""Shaped keys: the chain of errors in FP64, levels, planes, outliers; and norms of one byte.

Letters: T tokens, G KV heads, D head_dim, N rows, K levels.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable

import pytest
import torch

from subten.codecs import shaped
from subten.codecs.norm_byte import decode_norm, encode_norm
from subten.codecs.shaped import (
    BIAS,
    LEVELS,
    THRESHOLDS,
    UNITS,
    WIDTHS,
    decode_shaped,
    encode_shaped,
    levels,
    outliers_of,
    pack_bits,
)

Randn = Callable[..., torch.Tensor]


def test_a_norm_is_the_nearest_byte(generator: torch.Generator) -> None:
    """By logarithms in FP64, but within 2^-20 of a threshold, where float32 may decide else."""
    norm_N = torch.exp2(torch.rand(20000, generator=generator) * 20 - 10)
    byte_N, is_over_N = encode_norm(norm_N, 128)
    step_N = norm_N.double().log2() * 16 + 129
    is_sure_N = ((step_N % 1) - 0.5).abs() > 2**-16
    nearest_N = step_N.round()
    inside_N = is_sure_N & (nearest_N >= 1) & (nearest_N <= 255)
    assert bool((byte_N[inside_N] == nearest_N[inside_N]).all())
    assert bool((is_over_N == (nearest_N > 255))[is_sure_N].all())
    assert bool((byte_N[is_sure_N & (nearest_N < 1) & (nearest_N > -15)] == 1).all())
    assert bool((byte_N[nearest_N < -16] == 0).all())
    assert bool((decode_norm(byte_N, 128)[inside_N] / norm_N[inside_N] - 1).abs().max() < 0.0222)


def test_every_byte_of_a_norm_comes_back() -> None:
    byte_N = torch.arange(256, dtype=torch.uint8)
    for bias in (128, 208, 240):
        again_N, is_over_N = encode_norm(decode_norm(byte_N, bias), bias)
        assert torch.equal(again_N, byte_N)
        assert not bool(is_over_N.any())
    assert decode_norm(byte_N, 128)[[0, 1, 129, 145]].tolist() == [0.0, 2**-8, 1.0, 2.0]


@pytest.mark.parametrize("bits", WIDTHS)
def test_levels_read_gaussians_without_bias(bits: int) -> None:
    """Integrals over cells in FP64: <x, level> is 1, and the error that of the file's head."""
    level_K = levels(bits, torch.device("cpu")).double()
    edge_K = torch.tensor(THRESHOLDS[bits], dtype=torch.float64)
    edge_K = torch.cat([-edge_K.flip(0), torch.zeros(1), edge_K])
    normal = torch.distributions.Normal(*torch.tensor([0.0, 1.0], dtype=torch.float64))
    edge_K = torch.cat([edge_K.new_tensor([-40.0]), edge_K, edge_K.new_tensor([40.0])])
    mass_K, first_K = normal.cdf(edge_K).diff(), -normal.log_prob(edge_K).exp().diff()
    # Thresholds have four digits.
    assert abs((level_K * first_K).sum().item() - 1) < 1e-4
    gain = (level_K * first_K).sum() / (level_K.square() * mass_K).sum()
    best = {2: 0.11748, 3: 0.03455, 4: 0.0095}[bits]
    error = 1 - (level_K * first_K).sum().item() * gain.item()
    assert best * 0.999 <= error <= best * 1.017
    # Half-way between levels of least squares.
    middle_K = (level_K[1:] + level_K[:-1])[2 ** (bits - 1) :] / 2 * (1 - error)
    assert bool(((middle_K - torch.tensor(THRESHOLDS[bits])).abs() < 1e-4).all())


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_cubic_rounds_to_the_levels(bits: int) -> None:
    """Far from ties, so that it does on every device: in FP64, by the numbers in the kernel."""
    source = inspect.getsource(shaped)
    found = re.findall(r"level = t \* \(([\d.]+) \+ ([\d.]+) \* \(t \* t\)\)", source)
    a, b = (float(number) for number in found[bits - 2])
    t_K = torch.arange(2 ** (bits - 1), dtype=torch.float64) + 0.5
    whole_K = torch.tensor(LEVELS[bits], dtype=torch.float64)
    assert bool((t_K * (a + b * t_K**2) - whole_K).abs().max() < 0.34)
    assert torch.equal(whole_K.float() * UNITS[bits], levels(bits, whole_K.device)[-len(t_K) :])


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("head_dim", "num_outliers"), [(16, 0), (48, 1), (64, 3)])
def test_codes_follow_the_chain(
    randn: Randn, generator: torch.Generator, bits: int, head_dim: int, num_outliers: int
) -> None:
    """Channel by channel in FP64, from the planes' own levels: every code is the nearest.

    But where the FP64 target is within 1e-4 of a threshold: the twin's float32 sums of up to 64
    terms of size 1 are off by 64 * 2^-24 * 2.
    """
    y_TGD = randn(7, 2, head_dim) * torch.tensor([1.0, 30.0, 0.01, 1.0, 2.0, 5.0, 0.3])[
        :, None, None
    ].to(randn(1))
    device = y_TGD.device
    feedback_GDD = (randn(2, head_dim, head_dim) * 0.3).triu(1)
    outlier_GO = None
    if num_outliers:
        ids = [torch.randperm(head_dim, generator=generator) for _ in range(2)]
        outlier_GO = torch.stack(ids)[:, :num_outliers].int().to(device)
        y_TGD.scatter_(2, outlier_GO.long().expand(7, -1, -1), 500.0)
    low, high, norm_TG, is_bad_TG = encode_shaped(
        y_TGD, bits=bits, feedback_GDD=feedback_GDD, outlier_GO=outlier_GO
    )
    assert not bool(is_bad_TG.any())
    assert low.shape[-1] + high.shape[-1] == head_dim * bits // 8
    x_TGD = decode_shaped(low, high, norm_TG, bits=bits).double()
    size_TG1 = decode_norm(norm_TG, BIAS).double()[..., None]
    coded_TGD, level_TGD = y_TGD.double(), x_TGD / size_TG1
    is_out_GD = torch.zeros(2, head_dim, dtype=torch.bool, device=device)
    if outlier_GO is not None:
        is_out_GD.scatter_(1, outlier_GO.long(), True)
        exact = outliers_of(y_TGD, outlier_GO).bfloat16().double()
        x_TGD = x_TGD.scatter(2, outlier_GO.long().expand(7, -1, -1), exact)
    coded_TGD = coded_TGD.masked_fill(is_out_GD, 0.0)
    count_G = (~is_out_GD).sum(1)
    rms_TG = (coded_TGD.square().sum(-1) / count_G).sqrt()
    assert ((size_TG1[..., 0] / rms_TG).log2().abs() * 16).max().item() <= 0.5 + 1e-3
    edge_K = torch.tensor(THRESHOLDS[bits], dtype=torch.float64, device=device)
    edge_K = torch.cat([-edge_K.flip(0), edge_K.new_zeros(1), edge_K])
    level_K = levels(bits, device).double()
    error_TGD = torch.zeros_like(x_TGD)
    for i in range(head_dim):
        fed_TG = (error_TGD * feedback_GDD[:, :, i].double()).sum(-1)
        want_TG = y_TGD[..., i].double() / size_TG1[..., 0] + fed_TG
        nearest_TG = level_K[torch.bucketize(want_TG, edge_K)]
        is_sure_TG = (want_TG[..., None] - edge_K).abs().amin(-1) > 1e-4 * (1 + want_TG.abs())
        is_right_TG = (level_TGD[..., i] - nearest_TG).abs() < 1e-6
        assert bool((is_right_TG | ~is_sure_TG).all()), i
        error_TGD[..., i] = (y_TGD[..., i].double() - x_TGD[..., i]) / size_TG1[..., 0]


def test_feedback_takes_errors_where_nobody_looks(randn: Randn) -> None:
    """Scores of queries of one direction lose less: the reason for all this.

    F = 1 + 20 v v^T; M from its Cholesky factor, channels in reverse (bench/kv_calibration.py).
    """
    y_TGD, v_D = randn(400, 1, 32), randn(32)
    felt_DD = torch.eye(32, device=v_D.device) + 20 * torch.outer(v_D, v_D) / v_D.square().sum()
    factor_DD = torch.linalg.cholesky(felt_DD.flip(0, 1)).flip(0, 1)
    feedback_DD = (factor_DD / factor_DD.diagonal()).triu(1)
    lost = []
    for feedback_GDD in (None, feedback_DD[None].contiguous()):
        low, high, norm, _ = encode_shaped(y_TGD, bits=3, feedback_GDD=feedback_GDD)
        error_TD = (decode_shaped(low, high, norm, bits=3) - y_TGD)[:, 0]
        lost.append(((error_TD @ felt_DD) * error_TD).sum().item())
    # 1.6 : 1 expected: mean eigenvalue against geometric mean; 400 rows of 32 leave 5 %.
    assert lost[1] < 0.9 * lost[0]


def test_bad_rows_are_flagged(randn: Randn) -> None:
    y_TGD = randn(6, 2, 16)
    y_TGD[1, 0, 3], y_TGD[2, 1, 0], y_TGD[3, 0] = math.nan, math.inf, 0.0
    y_TGD[4] *= 1e4
    y_TGD[5] *= 1e-6
    for bits in WIDTHS:
        low, high, norm_TG, is_bad_TG = encode_shaped(y_TGD, bits=bits)
        assert is_bad_TG.tolist() == [
            [False, False],
            [True, False],
            [False, True],
            [False, False],
            [True, True],
            [False, False],
        ]
        x_TGD = decode_shaped(low, high, norm_TG, bits=bits)
        assert bool(x_TGD.isfinite().all())
        assert not bool(x_TGD[3, 0].any() | x_TGD[5].any())


def test_bits_are_a_bijection() -> None:
    """Bit b of byte i is channel i + b D/8."""
    code_ND = torch.tensor([[0, 1] + [1, 0] + [0, 0] * 5 + [1, 1]], dtype=torch.uint8)
    assert pack_bits(code_ND).tolist() == [[2 + 128, 1 + 128]]
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    bits_N8E = every[:, None] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    assert torch.equal(pack_bits(bits_N8E.flatten(1)), every)
