"""Names of schemes, needles, and the figures of long answers, on a tiny model."""

from __future__ import annotations

import pytest
import torch
from test_quality import CONFIG, tiny_decoder

from subten.bench.kv_generation import distinct
from subten.bench.kv_lab import EXACT, Scheme, evaluate_schemes, hidden_states, logits
from subten.bench.kv_menu import BUDGETS, MAIN, Menu
from subten.bench.kv_needles import DEPTHS, Needles, evaluate_needles, make_needles
from subten.calibration.keys_at_load import calibrate_keys
from subten.core import ConfigError, RequestError


@pytest.fixture
def menu(generator) -> Menu:
    model = tiny_decoder("bf16", 3)
    ids = torch.randint(CONFIG.vocab_size, (300,), generator=generator).tolist()
    # A context of 8,192 tokens, so that windows are a small share.
    return Menu(CONFIG, window=8192, calibration=calibrate_keys(model, ids, folder=None))


def test_every_name_is_a_scheme_of_that_name(menu):
    schemes = menu.pick("all")
    assert [scheme.name for scheme in schemes] == menu.names
    assert {*MAIN, *(f"adaptive-{b}" for b in BUDGETS)} <= set(menu.names)
    assert [scheme.name for scheme in menu.pick("main, int8,kivi-4")] == [*MAIN, "int8"]
    assert menu.scheme("bf16") is EXACT


def test_a_protection_left_out_is_left_out(menu):
    whole = menu.scheme("adaptive-3.6")
    assert (whole.sinks, whole.key_window, whole.value_window) == (4, 32, 32)
    assert menu.scheme("adaptive-3.6-nosinks").sinks == 0
    assert menu.scheme("adaptive-3.6-nowindow").key_window == 0
    assert whole.true_bits(8192) <= 3.6
    more = menu.scheme("adaptive-3.6-outliers")
    # A channel of 32 in BF16: half a bit of keys, which the budget pays with other planes.
    assert whole.key_bits[1] + 0.5 >= more.key_bits[1] > whole.key_bits[1] - 1
    assert more.true_bits(8192) <= 3.6
    assert menu.scheme("adaptive-2.6-cold").true_bits(8192) <= 2.6


@pytest.mark.parametrize("name", ["adaptive", "adaptive-3.6-windows", "kivi-3", ""])
def test_an_unknown_name_is_refused_with_all_names(menu, name):
    with pytest.raises(ConfigError, match=r"scheme: got .*allowed: all, main, .*kivi-4"):
        menu.scheme(name)


@pytest.mark.gpu
def test_a_gpu_measures_every_scheme_as_a_cpu_does(device, generator):
    ids = torch.randint(CONFIG.vocab_size, (390,), generator=generator).tolist()
    found = []
    for place in (torch.device("cpu"), device):
        model = tiny_decoder("bf16", 3, place)
        learned = calibrate_keys(model, ids[:300], folder=None)
        schemes = Menu(CONFIG, window=8192, calibration=learned).pick("all")
        found.append(list(evaluate_schemes(model, ids, schemes, window=160)))
    for on_cpu, on_gpu in zip(*found, strict=True):
        # A few codes across an edge: another one for a row in a hundred, say.
        assert on_gpu.kld_mean == pytest.approx(on_cpu.kld_mean, rel=0.1, abs=1e-4), on_gpu.scheme
        assert on_gpu.ppl == pytest.approx(on_cpu.ppl, rel=0.02), on_gpu.scheme


def letters(text: str) -> list[int]:
    """A token for each character."""
    return [ord(c) % CONFIG.vocab_size for c in text]


def test_needles_lie_at_their_depths_and_the_answer_ends_the_window():
    other = letters("z") * 500
    needles = make_needles(letters, other, window=320, each=3)
    assert needles.id_WT.shape == (3 * len(DEPTHS), 320)
    assert needles.num_answer == len(" 12345")
    start, key_is = letters("\n\nThe pass"), letters("is ")
    for index, ids in enumerate(needles.id_WT.tolist()):
        where = next(i for i in range(320) if ids[i : i + len(start)] == start)
        rest = ids[where:]
        key = next(i for i in range(320) if rest[i : i + len(key_is)] == key_is) + len(key_is)
        assert rest[key : key + 5] == ids[-5:]
        room = sum(token == other[0] for token in ids)
        assert where == round(DEPTHS[index // 3] * room)
    assert make_needles(letters, other, window=320, each=3).id_WT.equal(needles.id_WT)
    with pytest.raises(RequestError, match="window: got 900"):
        make_needles(letters, other, window=900, each=1)


def test_needles_count_answers_that_are_right_as_a_whole(generator):
    model = tiny_decoder("bf16", 5)
    id_WT = torch.randint(CONFIG.vocab_size, (2 * len(DEPTHS), 90), generator=generator)
    # The model's own greedy answers are found by the reference, and by no scheme without a past.
    for place in range(88, 90):
        id_WT[:, place] = _likeliest(model, id_WT[:, :place])
    id_WT[0, 88] = (id_WT[0, 88] + 1) % CONFIG.vocab_size
    blind = Scheme(
        name="blind",
        ours=False,
        encode=lambda rows: ([rows.key_GTD * 0] * 2, [rows.value_GTD * 0] * 2),
        key_bits=(16.0, 1.0),
        value_bits=(16.0, 1.0),
    )
    needles = Needles(id_WT=id_WT, num_answer=2)
    exact, nothing = evaluate_needles(model, needles, [EXACT, blind])
    assert exact.found == exact.found_reference == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert exact.digits == pytest.approx((20 - 1) / 20, abs=0.051)
    assert sum(nothing.found) < sum(exact.found)


@torch.inference_mode()
def _likeliest(model, id_WT: torch.Tensor) -> torch.Tensor:
    return logits(model, hidden_states(model, id_WT, EXACT)[:, -1]).argmax(dim=-1)


def test_distinct_n_grams():
    assert distinct([1, 2, 1, 2, 1], 1) == 2 / 5
    assert distinct([1, 2, 1, 2, 1], 2) == 2 / 4
    assert distinct([1, 2, 3, 1, 2, 4], 3) == 1.0
    assert distinct([1], 4) == 1.0
