"""Sampling: which tokens may be chosen, how often, and that nothing else decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from subten.kernels.sample import SamplingTensors, sample, sample_torch

OPS = [sample_torch, pytest.param(sample, marks=pytest.mark.triton)]
INF = math.inf

# NaN and infinite logits are what some of these inputs are for.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

NEUTRAL: dict[str, tuple[Any, torch.dtype]] = {
    "temperature": (1.0, torch.float32),
    "top_k": (0, torch.int32),
    "top_p": (1.0, torch.float32),
    "min_p": (0.0, torch.float32),
    "seed": (0, torch.int64),
    "index": (0, torch.int64),
}
NO_PENALTY = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """bool [S, V] -> int32 words, lowest bit first, one token after another."""
    num_rows, vocab = allowed.shape
    words = torch.zeros(num_rows, -(-vocab // 32), dtype=torch.int32)
    for row, token in allowed.nonzero().tolist():
        bit = 1 << token % 32
        words[row, token // 32] |= bit - 2**32 if bit == 2**31 else bit
    return words


def settings(num_rows: int, device: torch.device, **given: Any) -> SamplingTensors:
    """Each setting a number for all rows or a list of one for each."""
    values: dict[str, Any] = {}
    for name, (neutral, dtype) in NEUTRAL.items():
        value = torch.tensor(given.pop(name, neutral), dtype=dtype)
        values[f"{name}_S"] = value.expand(num_rows).contiguous().to(device)
    if "prompt_mask" in given:
        values["prompt_mask_SV"] = given.pop("prompt_mask").to(device)
        values["output_count_SV"] = given.pop("output_count").int().to(device)
        for name, neutral in NO_PENALTY.items():
            value = torch.tensor(given.pop(name, neutral), dtype=torch.float32)
            values[f"{name}_S"] = value.expand(num_rows).contiguous().to(device)
    if "bias" in given:
        values["bias_SV"] = given.pop("bias").float().contiguous().to(device)
    if "allowed" in given:
        values["mask_SW"] = packed(given.pop("allowed")).to(device)
    assert not given, given
    return SamplingTensors(**values)


def draws(op: Any, logits: list[float], count: int, device: torch.device, **given: Any):
    """Tokens for `count` seeds, one row each."""
    logit = torch.tensor(logits, device=device).expand(count, len(logits))
    token, is_ok = op(logit, settings(count, device, seed=list(range(count)), **given))
    assert bool(is_ok.all())
    return token.tolist()


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1e6, "top_k": 4, "top_p": 0.999},
    {"temperature": 1e-12, "top_p": 0.5},
    {"temperature": 1e-4, "top_k": 2},
    {"temperature": 1e-45, "top_k": 3},
    {"top_p": 1e-12},
    {"top_k": 10**6, "min_p": 1.0},
]


def hard_logits(vocab: int, randn: Callable[..., torch.Tensor]) -> torch.Tensor:
    logits = randn(6, vocab, scale=3.0)
    logits[1] = logits[1].round()  # many ties
    logits[2, ::2] = -INF  # a grammar's mask
    if vocab > 1:
        logits[3, : vocab - 1] = -INF
    logits[4] = 0.0  # all equal
    logits[5] *= 1e37
    if vocab == 1:
        logits[2] = 1.0
    return logits


@pytest.mark.triton
@pytest.mark.parametrize("vocab", [1, 2, 7, 128, 129, 1025])
@pytest.mark.usefixtures("poisoned")
def test_backends_choose_the_same_token(
    vocab: int,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
    device: torch.device,
) -> None:
    logits = hard_logits(vocab, randn)
    # Settings differ from row to row; the pairing of logits and settings is shuffled.
    pairs = [(row, given) for row in range(6) for given in SETTINGS]
    order = torch.randperm(len(pairs), generator=generator).tolist()
    # The interpreter is slow: there a random part of the pairs in each run.
    pairs = [pairs[i] for i in order[: 20 if device.type == "cpu" else len(pairs)]]
    columns = {
        name: [given.get(name, neutral) for _, given in pairs]
        for name, (neutral, _) in NEUTRAL.items()
    }
    columns["seed"] = torch.randint(2**62, (len(pairs),), generator=generator).tolist()
    params = settings(len(pairs), device, **columns)
    picked = logits[torch.tensor([row for row, _ in pairs], device=device)]
    token, is_ok = sample(picked, params)
    twin_token, twin_is_ok = sample_torch(picked, params)
    assert bool(is_ok.all())
    assert torch.equal(is_ok, twin_is_ok)
    wrong = (token != twin_token).nonzero().flatten().tolist()
    assert not wrong, [(pairs[i], token[i].item(), twin_token[i].item()) for i in wrong]


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("vocab", [1000, 32000, 49152, 151936])
def test_backends_choose_the_same_token_of_many(
    vocab: int,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
    device: torch.device,
) -> None:
    for given in SETTINGS:
        seeds = torch.randint(2**62, (48,), generator=generator).tolist()
        logits = hard_logits(vocab, randn).repeat(8, 1)
        params = settings(48, device, seed=seeds, **given)
        token, is_ok = sample(logits, params)
        twin_token, _ = sample_torch(logits, params)
        assert bool(is_ok.all())
        assert torch.equal(token, twin_token), given


def exact_probabilities(logits: list[float], **given: float) -> list[float]:
    """The definition, on Python floats: temperature, min-p, top-k, top-p; ties all stay."""
    top = max(logits)
    weight = [math.exp((x - top) / given.get("temperature", 1.0)) for x in logits]
    kept = [w >= given.get("min_p", 0.0) for w in weight]
    top_k = int(given.get("top_k", 0))
    if 0 < top_k < len(logits):
        floor = sorted(logits)[-top_k]
        kept = [k and x >= floor for k, x in zip(kept, logits, strict=True)]
    total = sum(w for w, k in zip(weight, kept, strict=True) if k)
    if given.get("top_p", 1.0) < 1.0:
        above = [
            sum(w for w, y, k in zip(weight, logits, kept, strict=True) if k and y > x)
            for x in logits
        ]
        wanted = given["top_p"] * total
        kept = [k and a < wanted for k, a in zip(kept, above, strict=True)]
        total = sum(w for w, k in zip(weight, kept, strict=True) if k)
    return [w / total if k else 0.0 for w, k in zip(weight, kept, strict=True)]


def check_frequencies(tokens: list[int], probabilities: list[float]) -> None:
    """Chi-square at six standard deviations (Wilson and Hilferty 1931)."""
    count = len(tokens)
    seen = [tokens.count(i) for i in range(len(probabilities))]
    possible = [i for i, p in enumerate(probabilities) if p > 0]
    assert sum(seen[i] for i in possible) == count, (seen, probabilities)
    statistic = sum(
        (seen[i] - count * probabilities[i]) ** 2 / (count * probabilities[i]) for i in possible
    )
    freedom = len(possible) - 1
    if freedom:
        spread = 2 / (9 * freedom)
        limit = freedom * (1 - spread + 6 * spread**0.5) ** 3
        assert statistic < limit, (statistic, limit, seen, probabilities)


FREQUENCY_CASES: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0, "top_k": 5},
    {"top_p": 0.8},
    {"top_k": 6, "top_p": 0.75},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.9, "min_p": 0.2},
]
FREQUENCY_LOGITS = [1.0, 0.0, 2.0, 2.0, -1.0, 0.5, 1.5, -INF, 1.0, -2.0]


@pytest.mark.parametrize("given", FREQUENCY_CASES)
def test_frequencies_are_the_probabilities(given: dict[str, float], device: torch.device) -> None:
    tokens = draws(sample_torch, FREQUENCY_LOGITS, 600, device, **given)
    check_frequencies(tokens, exact_probabilities(FREQUENCY_LOGITS, **given))


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("given", FREQUENCY_CASES)
def test_frequencies_of_many_draws(given: dict[str, float], device: torch.device) -> None:
    tokens = draws(sample, FREQUENCY_LOGITS, 200_000, device, **given)
    check_frequencies(tokens, exact_probabilities(FREQUENCY_LOGITS, **given))


def test_frequencies_along_one_output(device: torch.device) -> None:
    """One seed, index after index: what one request sees."""
    count = 1000
    logit = torch.tensor(FREQUENCY_LOGITS, device=device).expand(count, -1)
    token, _ = sample_torch(logit, settings(count, device, seed=7, index=list(range(count))))
    tokens = token.tolist()
    probabilities = exact_probabilities(FREQUENCY_LOGITS)
    check_frequencies(tokens, probabilities)
    # A token says nothing about the next one.
    pairs = [10 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    check_frequencies(pairs, [p * q for p in probabilities for q in probabilities])


@pytest.mark.parametrize("op", OPS)
def test_greedy_takes_the_lowest_of_equals(op: Any, device: torch.device) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -INF, 3.0]], device=device).repeat(6, 1)
    params = settings(
        6,
        device,
        temperature=[0.0, -0.0, 1e-31, 1.0, 1.0, 1.0],
        top_p=[1.0, 1.0, 1.0, 0.0, -0.0, 1.0],
        top_k=[0, 0, 0, 0, 0, 1],
        seed=list(range(6)),
    )
    token, is_ok = op(logits, params)
    assert token.tolist() == [1] * 6
    assert token.dtype == torch.int64
    assert is_ok.dtype == torch.bool
    assert bool(is_ok.all())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("given", [{"top_k": 5}, {"top_p": 0.45}, {"min_p": 0.9955}])
def test_thresholds_cut_where_they_say(
    op: Any, given: dict[str, Any], device: torch.device
) -> None:
    # Ten tokens of a tenth each, barely in order: five stay, and 20 draws see all of them.
    logits = [-1e-3 * i for i in range(10)]
    assert sum(p > 0 for p in exact_probabilities(logits, **given)) == 5
    assert set(draws(op, logits, 20, device, **given)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("op", OPS)
def test_ties_at_a_threshold_all_stay(op: Any, device: torch.device) -> None:
    logits = [0.0, 1.0, 1.0, 1.0, -1.0]
    for given in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}, {"top_k": 2, "top_p": 0.5}):
        assert set(draws(op, logits, 9, device, **given)) == {1, 2, 3}, given
    # -0.0 and 0.0 are one value.
    assert set(draws(op, [0.0, -0.0, -3.0], 6, device, top_k=2)) == {0, 1}
    assert set(draws(op, [-0.0, 0.0, -3.0], 6, device, top_p=1e-6)) == {0, 1}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("top_k", [-1, 5, 2**31 - 1])
def test_top_k_off_keeps_all(op: Any, top_k: int, device: torch.device) -> None:
    assert set(draws(op, [0.0] * 5, 25, device, top_k=top_k)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poisoned")
def test_bad_rows_are_told_and_good_ones_unharmed(op: Any, device: torch.device) -> None:
    rows = [
        [1.0, math.nan, 2.0],
        [-INF, -INF, -INF],
        [INF, 0.0, 0.0],
        [math.nan] * 3,
        [-INF, -5.0, -INF],
        [0.0, 1.0, 2.0],
    ]
    for given in ({"temperature": 0.0}, {}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}):
        token, is_ok = op(torch.tensor(rows, device=device), settings(6, device, **given))
        assert is_ok.tolist() == [False] * 4 + [True] * 2
        assert token[:5].tolist() == [0, 0, 0, 0, 1]
        assert 0 <= int(token[5]) < 3


@pytest.mark.parametrize("op", OPS)
def test_extremes_of_temperature(op: Any, device: torch.device) -> None:
    logits = [-3e38, 5.0, 4.999, 3e38, -INF]
    for temperature in (1e-38, 1e-12, 1e-4, 1e6):
        tokens = draws(op, logits, 3, device, temperature=temperature)
        assert set(tokens) == {3}, temperature
    hot = draws(op, [0.0, 1.0, -1.0, -INF], 20, device, temperature=1e6)
    assert set(hot) == {0, 1, 2}
    cold = draws(op, [5.0, 4.999, 4.998], 3, device, temperature=1e-12, top_p=0.9)
    assert set(cold) == {0}


@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_its_batch(
    op: Any, randn: Callable[..., torch.Tensor], device: torch.device
) -> None:
    logits = randn(5, 70)
    rows: dict[str, list[Any]] = {
        "temperature": [1.0, 0.7, 0.0, 2.0, 1.0],
        "top_k": [0, 5, 0, 50, 0],
        "top_p": [1.0, 0.9, 1.0, 1.0, 0.5],
        "seed": [42, 42, 42, 7, 2**63 - 1],
        "index": [0, 9, 0, 3, 1],
    }
    together = op(logits, settings(5, device, **rows))[0].tolist()
    again = op(logits, settings(5, device, **rows))[0].tolist()
    assert again == together
    for row in range(5):
        one = {name: [values[row]] for name, values in rows.items()}
        assert op(logits[row : row + 1], settings(1, device, **one))[0].item() == together[row]
    backwards = {name: values[::-1] for name, values in rows.items()}
    assert op(logits.flip(0), settings(5, device, **backwards))[0].tolist() == together[::-1]


def test_seed_and_index_both_matter(device: torch.device) -> None:
    logits = [0.0] * 50
    by_seed = draws(sample_torch, logits, 40, device)
    same = torch.zeros(40, 50, device=device)
    by_index = sample_torch(same, settings(40, device, index=list(range(40))))[0].tolist()
    constant = sample_torch(same, settings(40, device, seed=3, index=5))[0].tolist()
    assert len(set(by_seed)) > 10
    assert len(set(by_index)) > 10
    assert len(set(constant)) == 1
    assert by_seed != by_index


def penalised(
    logits: list[float], prompt: set[int], output: list[int], given: dict[str, float]
) -> list[float]:
    """vLLM's definitions on Python floats."""
    result = []
    for token, x in enumerate(logits):
        repetition = given.get("repetition", 1.0)
        if token in prompt or token in output:
            x = x / repetition if x > 0 else x * repetition
        x -= given.get("frequency", 0.0) * output.count(token)
        x -= given.get("presence", 0.0) * (token in output)
        result.append(x)
    return result


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"repetition": 1.7},
        {"repetition": 0.6},
        {"presence": 1.5},
        {"frequency": -0.8},
        {"repetition": 1.2, "presence": -0.4, "frequency": 0.9},
        {"repetition": 1e6, "presence": 2.0, "frequency": 2.0},
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_penalties(op: Any, given: dict[str, float], device: torch.device) -> None:
    """Token 3 is penalised; token 7, which nothing touches, lies a little below or above."""
    # Times in the output, whether in the prompt, logit.
    cases = [(0, False, 1.0), (0, True, 2.0), (0, True, -2.0)]
    cases += [(1, False, 2.0), (3, False, 1.0), (2, True, -1.5)]
    rows, expected = [], []
    for count, is_in_prompt, x in cases:
        prompt = {3} if is_in_prompt else set()
        exact = penalised([0.0] * 3 + [x], prompt, [3] * count, given)[3]
        for step in (-1, 1):
            row = [-INF] * 13
            row[3], row[7] = x, exact + step * max(0.01, 1e-5 * abs(exact))
            rows.append(row)
            expected.append(3 if step < 0 else 7)
    mask = torch.zeros(len(rows), 13, dtype=torch.bool)
    count = torch.zeros(len(rows), 13)
    mask[:, 3] = torch.tensor([c[1] for c in cases]).repeat_interleave(2)
    count[:, 3] = torch.tensor([float(c[0]) for c in cases]).repeat_interleave(2)
    common = {"prompt_mask": mask, "output_count": count, **given}
    for others in ({"temperature": 0.0}, {"temperature": 1e-6, "top_k": 2, "top_p": 0.9}):
        params = settings(len(rows), device, **others, **common)
        token, is_ok = op(torch.tensor(rows, device=device), params)
        assert bool(is_ok.all())
        assert token.tolist() == expected


def changed(
    logits: list[float], bias: list[float], allowed: list[bool], *penalty: Any
) -> list[float]:
    """Bias, penalties, mask on Python floats."""
    biased = [x + b for x, b in zip(logits, bias, strict=True)]
    return [
        x if is_allowed else -INF
        for x, is_allowed in zip(penalised(biased, *penalty), allowed, strict=True)
    ]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97])
@pytest.mark.usefixtures("poisoned")
def test_bias_and_mask(
    op: Any, vocab: int, generator: torch.Generator, device: torch.device
) -> None:
    """Numbers of few bits, so that no sum rounds and equal ones are equal."""
    num_rows = 6

    def rounded(scale: int, num: int = vocab) -> torch.Tensor:
        return torch.randint(-scale, scale + 1, (num_rows, num), generator=generator) / 2

    logits, bias = rounded(20), rounded(200)
    allowed = torch.rand(num_rows, vocab, generator=generator) < 0.5
    allowed[:, torch.randint(vocab, (), generator=generator)] = True
    count = torch.randint(3, (num_rows, vocab), generator=generator)
    prompt = torch.rand(num_rows, vocab, generator=generator) < 0.3
    penalty = {"repetition": 2.0, "presence": 0.5, "frequency": -1.0}
    expected = []
    for row in range(num_rows):
        output = [v for v in range(vocab) for _ in range(int(count[row, v]))]
        inside = {v for v in range(vocab) if prompt[row, v]}
        exact = changed(
            logits[row].tolist(), bias[row].tolist(), allowed[row].tolist(), inside, output, penalty
        )
        expected.append(exact.index(max(exact)))
    common = {"bias": bias, "allowed": allowed, "prompt_mask": prompt, "output_count": count}
    for others in ({"temperature": 0.0}, {"temperature": 1e-6, "top_k": 1}):
        params = settings(num_rows, device, **others, **common, **penalty)
        token, is_ok = op(logits.to(device), params)
        assert bool(is_ok.all())
        assert token.tolist() == expected


@pytest.mark.parametrize("op", OPS)
def test_masked_tokens_are_never_drawn_and_the_others_are(op: Any, device: torch.device) -> None:
    logits = [5.0, 1.0, 4.0, 1.0, 1.0, 9.0]
    allowed = torch.tensor([[False, True, False, True, True, False]])
    for given in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.9}, {"temperature": 1e6}):
        count = 25
        tokens = draws(op, logits, count, device, allowed=allowed.expand(count, -1), **given)
        assert set(tokens) == {1, 3, 4}, given
        bias = torch.tensor([[-100.0, 0.0, -100.0, 0.0, 0.0, -100.0]]).expand(count, -1)
        assert set(draws(op, logits, count, device, bias=bias, **given)) <= {1, 3, 4} | (
            {0, 2, 5} if given.get("temperature") else set()
        )


# Case A10: greedy and sampled rows beside each other, masks with nothing in them, NaN under a mask.
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poisoned")
def test_rows_whose_mask_leaves_nothing_are_told(op: Any, device: torch.device) -> None:
    rows = [[1.0, 2.0, -INF], [1.0, 2.0, -INF], [1.0, 2.0, -INF], [1.0, math.nan, 3.0], [3e38] * 3]
    allowed = [[1, 0, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1]]
    for given in (
        {"temperature": [0.0, 1.0, 0.0, 1.0, -0.0]},
        {"temperature": [1.0, 0.0, 1e-12, 0.0, 1.0], "top_p": [0.0, 1.0, 0.5, 1.0, 1e-12]},
        {"top_k": [-1, 0, 1, 3, 4], "min_p": [0.0, 1.0, 1e-12, 0.5, 1.0]},
    ):
        mask = torch.tensor(allowed, dtype=torch.bool)
        params = settings(5, device, allowed=mask, bias=torch.full((5, 3), 100.0), **given)
        token, is_ok = op(torch.tensor(rows, device=device), params)
        assert is_ok.tolist() == [True, False, False, False, True], given
        assert token.tolist() == [0, 0, 0, 0, 2], given


@pytest.mark.triton
@pytest.mark.parametrize("vocab", [33, 1025])
@pytest.mark.usefixtures("poisoned")
def test_backends_choose_the_same_of_changed_logits(
    vocab: int,
    randn: Callable[..., torch.Tensor],
    generator: torch.Generator,
    device: torch.device,
) -> None:
    logits = hard_logits(vocab, randn)[[0, 1, 2, 4]]
    chosen = torch.randint(len(SETTINGS), (4,), generator=generator).tolist()
    columns = {
        name: [SETTINGS[i].get(name, neutral) for i in chosen]
        for name, (neutral, _) in NEUTRAL.items()
    }
    columns["seed"] = torch.randint(2**62, (4,), generator=generator).tolist()
    columns |= {
        "bias": torch.randn(4, vocab, generator=generator) * 3,
        "allowed": torch.rand(4, vocab, generator=generator) < 0.6,
        "prompt_mask": torch.rand(4, vocab, generator=generator) < 0.3,
        "output_count": torch.randint(3, (4, vocab), generator=generator),
        "repetition": [1.1, 0.7, 1.0, 3.0],
        "frequency": [0.3, 0.0, -1.0, 2.0],
    }
    params = settings(4, device, **columns)
    token, is_ok = sample(logits, params)
    twin_token, twin_is_ok = sample_torch(logits, params)
    assert is_ok.tolist() == twin_is_ok.tolist()
    assert token.tolist() == twin_token.tolist(), chosen


@pytest.mark.parametrize("op", OPS)
def test_strided_logits(op: Any, randn: Callable[..., torch.Tensor], device: torch.device) -> None:
    big = randn(66, 66)
    for logits in (big[:4, ::2], big[:33, :4].t(), big[5:9, 7:40]):
        assert logits.shape == (4, 33)
        params = settings(
            4, device, top_k=[0, 5, 0, 9], top_p=[1.0, 1.0, 0.8, 0.7], seed=[1, 2, 3, 4]
        )
        expected = op(logits.contiguous(), params)[0]
        assert torch.equal(op(logits, params)[0], expected)


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: Any, device: torch.device) -> None:
    token, is_ok = op(torch.zeros(0, 9, device=device), settings(0, device))
    assert token.shape == is_ok.shape == (0,)
