"""A whole decoder over every KV format and backend, against one without pages, by the book.

Letters: T tokens, V vocabulary, H query heads, G KV heads, D head dimension (model width in names
of weights), S keys, L layers, B bytes of a page, N rows of K and V, 2 for K and V.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from codec_rows import error_bound
from tiny_checkpoint import config_values

from conftest import assert_close
from subten.cache.pool import PagePool
from subten.codecs import CODECS, KVFormat, kv_format
from subten.codecs.rotation import hadamard
from subten.kernels import select_ops
from subten.kernels.step import make_step
from subten.models import read_config
from subten.models.decoder import Decoder

NUM_TOKENS = 40
ROW_SLACK = 1e-5
"""Error of a row of K or V in float32, as a share of its largest element: 1e-6 from a sum of 256
terms, seven of them one after another, whose errors add as squares, and the worst of 40,000
elements four deviations off."""

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


def logits_and_pages(
    decoder: Decoder, token_ids: list[int], sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits_TV of a prompt that comes in parts of `sizes`, and its page in each layer, page_LGB.

    The pages start as NaN bytes.
    """
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
    return torch.cat(parts).double().cpu(), pool.pages_LPGB[:, 2].cpu()


def stored(page_GB: torch.Tensor, fmt: KVFormat, num_tokens: int) -> torch.Tensor:
    """What lies in a page: K and V as x_2TGD in float64, no longer rotated."""
    row, parts = fmt.row, []
    for starts in (
        (fmt.k_codes, fmt.k_scale, fmt.k_zero),
        (fmt.v_codes, fmt.v_scale, fmt.v_zero),
    ):
        planes = [
            page_GB[:, start : start + 64 * width].reshape(len(page_GB), 64, width)[:, :num_tokens]
            for start, width in zip(starts, (row.codes, row.scale, row.zero), strict=True)
        ]
        flat = [plane.flatten(0, 1).contiguous() for plane in planes]
        rows = fmt.codec.decode(*flat, fmt.head_dim) @ rotation_of(fmt).T
        parts.append(rows.view(-1, num_tokens, fmt.head_dim).transpose(0, 1))
    return torch.stack(parts).double()


def rotation_of(fmt: KVFormat) -> torch.Tensor:
    if fmt.codec.is_rotated:
        return hadamard(fmt.head_dim, torch.device("cpu"))
    return torch.eye(fmt.head_dim)


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
    rotation = rotation_of(fmt)
    flat = rows_TGD.float().reshape(-1, fmt.head_dim)
    codes = fmt.codec.encode((flat @ rotation).contiguous())
    back = fmt.codec.decode(*codes, fmt.head_dim) @ rotation.T
    return back.reshape(rows_TGD.shape).double()


def by_the_book(
    decoder: Decoder, token_ids: list[int], pages_LGB: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float64 without kernels; attention reads the K and V that lie in `pages_LGB`.

    Returns logits_TV, the K and V that it would store itself, x_L2TGD before any codec, and how far
    each token's last chosen expert is ahead of the next, margin_T (least of the layers). Tokens
    meet in the pages alone, so that each one's error is its own.
    """
    state = decoder.state_dict()
    weight = {name.removesuffix(".codes"): value.double().cpu() for name, value in state.items()}
    config = decoder.config
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    group = config.num_heads // config.num_kv_heads
    x = weight["embedding_VD"][token_ids]
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    own, margins = [], []
    for i in range(config.num_layers):
        w = {n.removeprefix(f"layers.{i}."): v for n, v in weight.items()}
        h = norm(x, w["attention_norm_D"])
        qkv = (h @ w["attention.qkv.weight"].T).view(len(x), -1, config.head_dim)
        q, k, v = qkv.split(heads, dim=1)
        own.append(torch.stack((rope(k), v)))
        k, v = stored(pages_LGB[i], decoder.fmt, len(x)).repeat_interleave(group, dim=2)
        scores = torch.einsum("thd,shd->hts", rope(q), k) * config.head_dim**-0.5
        p = scores.masked_fill(future, float("-inf")).softmax(-1)
        out = torch.einsum("hts,shd->thd", p, v).reshape(len(x), -1)
        x = x + out @ w["attention.output.weight"].T
        h = norm(x, w["ffn_norm_D"])
        ranked = (h @ w["ffn.gate_ED"].T).softmax(-1).topk(config.top_k + 1)
        margins.append(ranked.values[:, -2] - ranked.values[:, -1])
        score, chosen = ranked.values[:, :-1], ranked.indices[:, :-1]
        share = torch.zeros(len(x), config.num_experts, dtype=x.dtype)
        share.scatter_(1, chosen, score / score.sum(-1, keepdim=True))
        gate, up = torch.einsum("td,efd->etf", h, w["ffn.gate_up_EFD"]).chunk(2, -1)
        x = x + torch.einsum("tk,ktf,kdf->td", share, F.silu(gate) * up, w["ffn.down_EDF"])
    head_VD = weight.get("head_VD", weight["embedding_VD"])
    logits_TV = norm(x, weight["norm_D"]) @ head_VD.T
    return logits_TV, torch.stack(own), torch.stack(margins).amin(0)


@pytest.mark.parametrize(("codec", "backend"), PAIRS)
@pytest.mark.parametrize("sizes", [[NUM_TOKENS], [37, *[1] * 3]], ids=["whole", "in parts"])
def test_every_format_and_backend_writes_and_reads_by_the_book(
    codec: str,
    backend: str,
    sizes: list[int],
    generator: torch.Generator,
    device: torch.device,
) -> None:
    """The pages hold what the codec makes of K and V; the logits follow from what the pages hold.

    Tokens whose choice of experts hangs on less than 1e-4 are left out: float32 may choose another.
    """
    decoder = make_decoder(codec, backend, device, generator)
    fmt = decoder.fmt
    token_ids = torch.randint(37, (NUM_TOKENS,), generator=generator).tolist()
    logits_TV, pages_LGB = logits_and_pages(decoder, token_ids, sizes)
    expected_TV, own_L2TGD, margin_T = by_the_book(decoder, token_ids, pages_LGB)
    is_sure_T = margin_T > 1e-4
    # 80 choices, each this close in some 3 of 10,000: one token left out is rare, six are a fault.
    assert is_sure_T.sum() >= NUM_TOKENS - 5

    held_L2TGD = torch.stack([stored(page, fmt, NUM_TOKENS) for page in pages_LGB])
    held_ND = held_L2TGD[:, :, is_sure_T].flatten(0, 3)
    own_ND = own_L2TGD[:, :, is_sure_T].flatten(0, 3)
    slack_N1 = ROW_SLACK * own_ND.abs().amax(-1, keepdim=True)
    turn_DD = rotation_of(fmt).double()
    error_ND = ((held_ND - own_ND) @ turn_DD).abs()
    excess_ND = error_ND - error_bound(own_ND @ turn_DD, codec) - slack_N1
    assert float(excess_ND.max()) <= 0, codec
    # Where float32 lies across the boundary of a code or scale, the row differs from what the codec
    # makes of the float64 one. That is likeliest in BF16, whose numbers are 2^-8 apart: errors of
    # 2^-21 cross one in 2^12, and a row has 64. So 1 row in 64 is expected, and 1 in 16 allowed.
    differs_N = ((held_ND - round_trip(own_ND, fmt)).abs() > slack_N1).any(-1)
    assert float(differs_N.double().mean()) <= 1 / 16, int(differs_N.sum())

    # A float32 sum of 256 terms is off by some sqrt(256) * 2^-24 = 1e-6 of its size; 13 products
    # follow one another (six in each of two layers, and the head), whose errors add as squares:
    # 3.5e-6 of logits of size 1. The largest of 1,480 may be ten times as far.
    assert_close(logits_TV[is_sure_T], expected_TV[is_sure_T], 4e-5, 4e-6, "logits")
