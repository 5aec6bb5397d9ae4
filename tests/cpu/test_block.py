"""FusedMoEQuantizedAttention against a plain dense float32 block, and what its cache holds."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from subten.core import ConfigError, RequestError
from subten.layers.block import BlockCache, FusedMoEQuantizedAttention

SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"d_model": 40, "num_heads": 5, "num_kv_heads": 5, "head_dim": 16}
    | {"num_experts": 5, "top_k": 2, "d_ffn": 24},
    "gqa": {"d_model": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    | {"num_experts": 8, "top_k": 3, "d_ffn": 17, "norm_topk_prob": False},
    "mqa": {"d_model": 33, "num_heads": 3, "num_kv_heads": 1, "head_dim": 64}
    | {"num_experts": 1, "top_k": 1, "d_ffn": 8},
}
MAX_LEN = 130


def make_block(
    shape: str, codec: str, device: torch.device, generator: torch.Generator, **changes: Any
) -> FusedMoEQuantizedAttention:
    settings = {**SHAPES[shape], "kv_cache_dtype": codec, "max_len": MAX_LEN, "backend": "torch"}
    block = FusedMoEQuantizedAttention(
        **(settings | {"device": device, "dtype": torch.float32} | changes)
    )
    for parameter in block.parameters():
        fresh = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.3 * fresh)
        else:
            parameter.copy_(fresh * parameter.shape[-1] ** -0.5)
    return block


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rope(x_BTHD: torch.Tensor) -> torch.Tensor:
    half = x_BTHD.shape[-1] // 2
    turns = 10000.0 ** (-torch.arange(half).double() / half)
    angle = (torch.arange(x_BTHD.shape[1]).double()[:, None] * turns)[:, None]
    left, right = x_BTHD[..., :half], x_BTHD[..., half:]
    return torch.cat(
        (left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1
    )


def reference(
    block: FusedMoEQuantizedAttention,
    x_BTD: torch.Tensor,
    round_trip: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> torch.Tensor:
    """The block by the book, in float64, without pages; `round_trip` stands for the codec."""
    weight = {
        name.removesuffix(".codes"): value.double().cpu()
        for name, value in block.state_dict().items()
    }
    config = block.config
    x = x_BTD.double().cpu()
    num_sequences, num_tokens, _ = x.shape
    h = norm(x, weight["layer.attention_norm_D"])
    qkv = (h @ weight["layer.attention.qkv.weight"].T).view(
        num_sequences, num_tokens, -1, config.head_dim
    )
    q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=2)
    group = config.num_heads // config.num_kv_heads
    k = round_trip(rope(k)).repeat_interleave(group, dim=2)
    v = round_trip(v).repeat_interleave(group, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", rope(q), k) * config.head_dim**-0.5
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("bhts,bshd->bthd", p, v).reshape(num_sequences, num_tokens, -1)
    x = x + out @ weight["layer.attention.output.weight"].T
    h = norm(x, weight["layer.ffn_norm_D"])
    score, chosen = (h @ weight["layer.ffn.gate_ED"].T).softmax(-1).topk(config.top_k)
    if config.norm_topk_prob:
        score = score / score.sum(-1, keepdim=True)
    dense = torch.zeros(*h.shape[:2], config.num_experts, dtype=x.dtype)
    dense.scatter_(-1, chosen, score)
    for expert in range(config.num_experts):
        gate, up = (h @ weight["layer.ffn.gate_up_EFD"][expert].T).chunk(2, -1)
        down = (F.silu(gate) * up) @ weight["layer.ffn.down_EDF"][expert].T
        x = x + dense[..., expert : expert + 1] * down
    return x


def codec_round_trip(block: FusedMoEQuantizedAttention) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rotate, encode, decode, rotate back: what the cache's format does to a row."""

    def round_trip(rows: torch.Tensor) -> torch.Tensor:
        codec, head_dim = block.fmt.codec, block.config.head_dim
        flat = rows.float().reshape(-1, head_dim)
        rotation = None if block.rotation_DD is None else block.rotation_DD.cpu()
        turned = flat if rotation is None else flat @ rotation
        back = codec.decode(*codec.encode(turned.contiguous()), head_dim)
        back = back if rotation is None else back @ rotation
        return back.reshape(rows.shape).double()

    return round_trip


def run(
    block: FusedMoEQuantizedAttention, x_BTD: torch.Tensor, sizes: list[int]
) -> tuple[torch.Tensor, BlockCache]:
    """Output when x arrives in parts of `sizes` tokens; the pages start as NaN bytes."""
    cache = block.new_cache(x_BTD.shape[0])
    cache.pages_PGB.fill_(0xFF)
    parts = [block(part, cache) for part in x_BTD.split(sizes, dim=1)]
    return torch.cat(parts, dim=1), cache


def make_input(
    block: FusedMoEQuantizedAttention, generator: torch.Generator, batch_size: int, num_tokens: int
) -> torch.Tensor:
    x_BTD = torch.randn(batch_size, num_tokens, block.config.d_model, generator=generator)
    return x_BTD.to(block.device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 64, 67])
def test_equals_a_dense_float32_block(
    shape: str, num_tokens: int, generator: torch.Generator, device: torch.device
) -> None:
    block = make_block(shape, "fp32", device, generator)
    x_BTD = make_input(block, generator, 2, num_tokens)
    expected = reference(block, x_BTD)
    # Values of size 1 to 3, sums of at most 130 float32 products: about 2e-6.
    for sizes in ([num_tokens], [1] * num_tokens):
        actual, cache = run(block, x_BTD, sizes)
        assert cache.lengths == [num_tokens] * 2
        assert (actual.double().cpu() - expected).abs().max() <= 2e-5, sizes


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_quantised_cache_is_the_codec_and_nothing_else(
    codec: str, generator: torch.Generator, device: torch.device
) -> None:
    """Equal to the reference whose K and V rows go once through the codec.

    A code may still round the other way where float32 and float64 rows straddle a boundary: each
    is off by one step, 1/15 of a row's range for int4, on one value of 67 rows x 32. So the bound
    is on the root mean square, a tenth of what the codec itself does.
    """
    block = make_block("gqa", codec, device, generator)
    x_BTD = make_input(block, generator, 2, 67)
    exact = reference(block, x_BTD)
    expected = reference(block, x_BTD, codec_round_trip(block))
    codec_error = (expected - exact).square().mean().sqrt()
    for sizes in ([67], [1] * 67, [3, 61, 2, 1]):
        actual, _ = run(block, x_BTD, sizes)
        error = (actual.double().cpu() - expected).square().mean().sqrt()
        assert error <= 0.1 * codec_error, (sizes, float(error), float(codec_error))


@pytest.mark.parametrize(("codec", "bound"), [("bf16", 0.003), ("int8", 0.008), ("int4", 0.14)])
def test_output_stays_close_to_the_exact_cache(
    codec: str, bound: float, generator: torch.Generator, device: torch.device
) -> None:
    """Of each token's error over what the block adds to it, the median.

    An int4 row of 32 normal values spans about 4 sigma over 15 steps: an error of 4 / 15 /
    sqrt(12) = 0.08 sigma a value, on K and V, which the experts pass on; int8 has 17 times less,
    bf16 2^-9 of each value. Measured over 15 seeds: at most 0.095, 0.0053 and 0.0019; the bounds
    are 1.5 times that, below what one bit less would give. The median, because a token whose
    experts change at a near tie is far off whatever the codec.
    """
    block = make_block("gqa", codec, device, generator)
    x_BTD = make_input(block, generator, 2, 67)
    added = reference(block, x_BTD) - x_BTD.double().cpu()
    actual, _ = run(block, x_BTD, [40] + [1] * 27)
    error = actual.double().cpu() - x_BTD.double().cpu() - added
    ratio = float((error.norm(dim=-1) / added.norm(dim=-1)).median())
    assert ratio <= bound, ratio


def planes(pages_PGB: torch.Tensor, block: FusedMoEQuantizedAttention) -> list[torch.Tensor]:
    """The six planes of all pages, uint8 [pages, heads, 64 rows, bytes of a row]."""
    fmt, row = block.fmt, block.fmt.row
    spans = [(fmt.k_codes, row.codes), (fmt.k_scale, row.scale), (fmt.k_zero, row.zero)]
    spans += [(fmt.v_codes, row.codes), (fmt.v_scale, row.scale), (fmt.v_zero, row.zero)]
    return [
        pages_PGB[..., start : start + 64 * width].unflatten(-1, (64, width))
        for start, width in spans
        if width
    ]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_a_step_writes_its_own_rows_alone(
    codec: str, generator: torch.Generator, device: torch.device
) -> None:
    block = make_block("gqa", codec, device, generator)
    x_BTD = make_input(block, generator, 2, 70)
    _, cache = run(block, x_BTD[:, :62], [62])
    for t in range(62, 70):
        before = cache.pages_PGB.clone()
        block(x_BTD[:, t : t + 1], cache)
        changed = torch.zeros(cache.pages_PGB.shape[0], 64, dtype=torch.bool)
        for old, new in zip(planes(before, block), planes(cache.pages_PGB, block), strict=True):
            changed |= (old != new).any(-1).any(1).cpu()
        rows = {(page, row) for page, row in changed.nonzero().tolist()}
        assert rows == {(pages[t // 64], t % 64) for pages in cache.page_ids}, t


def test_bytes_and_true_bits(generator: torch.Generator, device: torch.device) -> None:
    block = make_block("mqa", "int4", device, generator)
    cache = block.new_cache(2)
    assert (cache.bytes_used, cache.true_bits) == (0, None)
    block(make_input(block, generator, 2, 64), cache)
    # A full page of 64 tokens: K and V of 64 values at 4 bits and 4 bytes of BF16 metadata a row.
    assert cache.bytes_used == 2 * 64 * 2 * (32 + 4)
    assert cache.true_bits == block.fmt.true_bits == 4.5
    block(make_input(block, generator, 2, 1), cache)
    assert cache.bytes_used == 2 * 2 * 64 * 2 * (32 + 4)
    assert cache.true_bits == pytest.approx(4.5 * 128 / 65)


def test_reset_begins_again(generator: torch.Generator, device: torch.device) -> None:
    block = make_block("mha", "bf16", device, generator)
    x_BTD = make_input(block, generator, 2, 9)
    first, cache = run(block, x_BTD, [9])
    cache.reset()
    assert cache.lengths == [0, 0]
    assert torch.equal(block(x_BTD, cache), first)
    cache.reset(1)
    assert cache.lengths == [9, 0]
    # Sequence 0 is longer now, which may change the order of float32 sums, not more.
    assert (block(x_BTD, cache)[1] - first[1]).abs().max() <= 2e-5
    assert cache.lengths == [18, 9]
    for sequence in (-1, 2):
        with pytest.raises(RequestError, match=f"sequence: got {sequence}; allowed: 0 to 1"):
            cache.reset(sequence)


def test_overflow_names_the_lengths_and_writes_nothing(
    generator: torch.Generator, device: torch.device
) -> None:
    block = make_block("mha", "bf16", device, generator)
    cache = block.new_cache(1, max_len=10)
    block(make_input(block, generator, 1, 8), cache)
    before = cache.pages_PGB.clone()
    with pytest.raises(RequestError, match=r"8 cached and 3 new tokens make 11; .* max_len = 10"):
        block(make_input(block, generator, 1, 3), cache)
    assert torch.equal(before, cache.pages_PGB) and cache.lengths == [8]
    block(make_input(block, generator, 1, 2), cache)
    assert cache.lengths == [10]


def test_input_that_does_not_fit_is_refused(
    generator: torch.Generator, device: torch.device
) -> None:
    block = make_block("mha", "bf16", device, generator)
    cache = block.new_cache(2)
    good = make_input(block, generator, 2, 3)
    for bad in (good[:1], good[..., :-1], good[:, :0], good[0], good.bfloat16()):
        with pytest.raises(RequestError, match="x_BTD: got "):
            block(bad, cache)
    other = make_block("mha", "fp8", device, generator).new_cache(2)
    with pytest.raises(RequestError, match="cache: got pages of fp8"):
        block(good, other)
    assert cache.lengths == [0, 0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_k": 6}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"num_experts": 1025}, "num_experts"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"d_ffn": -1}, "d_ffn"),
        ({"head_dim": None, "d_model": 41}, "num_heads"),
        ({"head_dim": 17}, "head_dim"),
        ({"head_dim": 20, "kv_cache_dtype": "int4"}, "head_dim"),
        ({"kv_cache_dtype": "int5"}, "kv_cache_dtype"),
        ({"backend": "cpu"}, "backend"),
        ({"dtype": torch.float16}, "dtype"),
        ({"max_len": 0}, "max_len"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    changes: dict[str, Any], named: str, generator: torch.Generator, device: torch.device
) -> None:
    with pytest.raises(ConfigError, match=named):
        make_block("mha", "bf16", device, generator, **changes)


def test_cache_longer_than_the_block_is_refused(
    generator: torch.Generator, device: torch.device
) -> None:
    block = make_block("mha", "bf16", device, generator)
    with pytest.raises(ConfigError, match="max_len: got 131; allowed: 1 to 130"):
        block.new_cache(1, max_len=131)
    with pytest.raises(ConfigError, match="batch_size: got 0"):
        block.new_cache(0)


@pytest.mark.triton
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_triton_equals_torch(codec: str, generator: torch.Generator, device: torch.device) -> None:
    twin = make_block("gqa", codec, device, generator)
    block = make_block("gqa", codec, device, generator, backend="triton")
    block.load_state_dict(twin.state_dict())
    x_BTD = make_input(block, generator, 2, 19)
    expected_BTD, twin_cache = run(twin, x_BTD, [17, 1, 1])
    actual_BTD, cache = run(block, x_BTD, [17, 1, 1])
    pairs = zip(actual_BTD, expected_BTD, cache.page_ids, strict=True)
    for actual_TD, expected_TD, page_ids in pairs:
        error_T = (actual_TD - expected_TD).abs().amax(-1)
        moved = (cache.pages_PGB[page_ids] != twin_cache.pages_PGB[page_ids]).sum()
        if codec == "fp32" or moved == 0:
            # Other sum orders in float32.
            assert error_T.max() <= 2e-5, error_T
        else:
            # A value on the edge of two codes, or a scale on that of two BF16 numbers and with it
            # the codes of its row: one row in some tens of runs. All tokens after it see that, the
            # first few most, and some may take another expert.
            assert moved <= cache.fmt.row.total, moved
            assert error_T.max() <= 1, error_T


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "fused_block.py"
    start = time.perf_counter()
    runpy.run_path(str(path), run_name="__main__")
    assert time.perf_counter() - start < 30
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["bf16", "int8", "int4"]
    assert all("bits a value" in line for line in lines)
