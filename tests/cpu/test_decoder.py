"""A whole decoder over every KV format and backend, against one without pages, by the book.

Letters: T tokens, V vocabulary, H query heads, G KV heads, D head dimension (model width in names
of weights), S keys.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_checkpoint import config_values

from subten.cache.pool import PagePool
from subten.codecs import CODECS, KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.kernels import select_ops
from subten.kernels.step import make_step
from subten.models import read_config
from subten.models.decoder import Decoder

NUM_TOKENS = 40
TRITON_CODECS = ("fp8", "int4")
"""Under the interpreter: one per-row and one rotated format; test_codec_kernels has all of them."""
PAIRS = [
    *((codec, "torch") for codec in CODECS),
    *(pytest.param(codec, "triton", marks=pytest.mark.triton) for codec in TRITON_CODECS),
]
MIXTRAL = config_values(
    "MixtralForCausalLM",
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=20,
    num_local_experts=5,
    vocab_size=37,
)


def make_decoder(
    codec: str, backend: str, device: torch.device, generator: torch.Generator
) -> Decoder:
    config = read_config(MIXTRAL, source="test")[1]
    fmt = kv_format(codec, config.head_dim)
    ops = select_ops(backend, device)
    decoder = Decoder(config, ops, fmt, device=device, dtype=torch.float32)
    for parameter in decoder.parameters():
        fresh = torch.randn(parameter.shape, generator=generator)
        scale = parameter.shape[-1] ** -0.5
        parameter.copy_(1 + 0.3 * fresh if parameter.dim() == 1 else fresh * scale)
    return decoder


def logits_of(decoder: Decoder, token_ids: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits_TV of a prompt that comes in parts of `sizes`; the pages start as NaN bytes."""
    config = decoder.config
    pool = PagePool(config.num_layers, 3, config.num_kv_heads, decoder.fmt, decoder.device)
    pool.pages_LPGB.fill_(0xFF)
    parts, start = [], 0
    for size in sizes:
        step = make_step(
            token_ids=[token_ids[start : start + size]],
            starts=[start],
            page_ids=[[2]],
            device=decoder.device,
        )
        parts.append(decoder(step, pool.pages_LPGB, all_rows=True))
        start += size
    return torch.cat(parts).double().cpu()


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + MIXTRAL["rms_norm_eps"]).rsqrt() * weight


def rope(x_THD: torch.Tensor) -> torch.Tensor:
    half = x_THD.shape[-1] // 2
    turns = MIXTRAL["rope_theta"] ** (-torch.arange(half).double() / half)
    angle = (torch.arange(len(x_THD)).double()[:, None] * turns)[:, None]
    left, right = x_THD.split(half, -1)
    return torch.cat(
        (left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1
    )


def round_trip(rows_TGD: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Rotate, encode, decode, rotate back, by the codec's torch functions."""
    flat = rows_TGD.float().reshape(-1, fmt.head_dim)
    rotation = torch.eye(fmt.head_dim)
    if fmt.codec.is_rotated:
        rotation = hadamard(fmt.head_dim, torch.device("cpu"))
    codes = fmt.codec.encode((flat @ rotation).contiguous())
    back = fmt.codec.decode(*codes, fmt.head_dim) @ rotation.T
    return back.reshape(rows_TGD.shape).double()


def plain_logits(decoder: Decoder, token_ids: list[int], fmt: KVFormat | None) -> torch.Tensor:
    """Logits_TV in float64 without pages; K and V go through `fmt` if there is one."""
    weight = {name: value.double().cpu() for name, value in decoder.state_dict().items()}
    config = decoder.config
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    group = config.num_heads // config.num_kv_heads
    x = weight["embedding_VD"][token_ids]
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    for i in range(config.num_layers):
        w = {n.removeprefix(f"layers.{i}."): v for n, v in weight.items()}
        h = norm(x, w["attention_norm_D"])
        qkv = (h @ w["attention.qkv.weight"].T).view(len(x), -1, config.head_dim)
        q, k, v = qkv.split(heads, dim=1)
        k = rope(k)
        if fmt is not None:
            k, v = round_trip(k, fmt), round_trip(v, fmt)
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        scores = torch.einsum("thd,shd->hts", rope(q), k) * config.head_dim**-0.5
        p = scores.masked_fill(future, float("-inf")).softmax(-1)
        out = torch.einsum("hts,shd->thd", p, v).reshape(len(x), -1)
        x = x + out @ w["attention.output.weight"].T
        h = norm(x, w["ffn_norm_D"])
        score, chosen = (h @ w["ffn.gate_ED"].T).softmax(-1).topk(config.top_k)
        share = torch.zeros(len(x), config.num_experts, dtype=x.dtype)
        share.scatter_(1, chosen, score / score.sum(-1, keepdim=True))
        gate, up = torch.einsum("td,efd->etf", h, w["ffn.gate_up_EFD"]).chunk(2, -1)
        x = x + torch.einsum("tk,ktf,kdf->td", share, F.silu(gate) * up, w["ffn.down_EDF"])
    head_VD = weight.get("head_VD", weight["embedding_VD"])
    return norm(x, weight["norm_D"]) @ head_VD.T


@pytest.mark.parametrize(("codec", "backend"), PAIRS)
def test_every_format_and_backend_reads_what_the_codec_wrote(
    codec: str, backend: str, generator: torch.Generator, device: torch.device
) -> None:
    """No backend reads another's format: logits are those of the codec's own round trip.

    Of each token's error over all logits, the median. Float32 leaves 2e-4 of it (37 logits of size
    1, sums of at most 256 products). Beyond that, a code or a BF16 scale may round the other way
    where float32 and float64 rows straddle a boundary, and later tokens see it. Measured over 60
    seeds each, that is at most 0.22 of what the codec itself does (bf16), so half of it is allowed;
    without the codec, or with another, it is 1 and more.
    """
    decoder = make_decoder(codec, backend, device, generator)
    token_ids = torch.randint(37, (NUM_TOKENS,), generator=generator).tolist()
    exact = plain_logits(decoder, token_ids, None)
    expected = plain_logits(decoder, token_ids, decoder.fmt)
    codec_error = (expected - exact).norm(dim=-1).median()
    if codec != "fp32":
        assert codec_error > 2e-3, float(codec_error)
    for sizes in ([NUM_TOKENS], [33, *[1] * 7]):
        actual = logits_of(decoder, token_ids, sizes)
        error = (actual - expected).norm(dim=-1).median()
        assert error <= 2e-4 + 0.5 * codec_error, (sizes, float(error), float(codec_error))
