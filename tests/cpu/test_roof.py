"""The roof reads every word of its buffer, and says what it measured."""

from __future__ import annotations

import pytest
import torch

from subten.engine import roof


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("launch", roof.READ_LAUNCHES, ids=str)
def test_every_word_is_read_once(launch, device, generator):
    num_words = launch.num_words * 3
    words_N = torch.randint(-(2**31), 2**31, (num_words,), generator=generator).int().to(device)
    total = int(words_N.sum(dtype=torch.int64))
    got = int(roof.read_sum(words_N, launch).sum(dtype=torch.int64))
    assert got % 2**32 == total % 2**32
    # One bit of one word, anywhere, changes the sum.
    words_N[int(torch.randint(num_words, (1,), generator=generator))] ^= 1
    assert int(roof.read_sum(words_N, launch).sum(dtype=torch.int64)) % 2**32 != total % 2**32


def test_a_launch_that_does_not_divide_the_buffer_is_our_bug():
    launch = roof.READ_LAUNCHES[0]
    with pytest.raises(AssertionError):
        roof.read_sum(torch.zeros(launch.num_words + 4, dtype=torch.int32), launch)


def test_the_best_of_several_ways_is_kept(device, monkeypatch):
    num_bytes = 2**22
    seconds = iter([4.0, 4.0, 4.0, 1.0, 2.0, 900.0, 3.0, 3.0, 3.0] + [9.0] * 99)
    monkeypatch.setattr(roof, "_time", lambda _read, _device: next(seconds))
    found = roof.measure_roof(device, num_bytes=num_bytes, num_reads=3)
    # Medians of three: 4, then 2 in spite of one slow read, then 3.
    assert found.bytes_per_s == num_bytes / 2.0
    assert found.num_bytes == num_bytes
    assert found.how.startswith("triton" if device.type == "cuda" else "torch")


def test_a_measured_roof_is_plausible(device):
    found = roof.measure_roof(device, num_bytes=2**24, num_reads=3)
    # From a slow core under load to well above any memory of today, caches included.
    assert 1e8 < found.bytes_per_s < 1e14
    assert found.tb_s == found.bytes_per_s / 1e12
