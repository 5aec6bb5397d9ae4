"""Keys stored without the bias of their projection: attention, loading, the engine (case K02).

Letters as in test_attend.py.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attend import DECODE, LENGTHS, MIXED, Scene, dense, make_scene, tolerances
from test_kv_append import make_rope
from tiny_checkpoint import config_values, load, refusal, tensors_of, write_folder

from conftest import assert_close
from subten.bench import quality
from subten.cache.pool import PagePool
from subten.codecs import CODECS, kv_format
from subten.codecs.rotation import hadamard
from subten.config import EngineConfig, RopeConfig
from subten.core import PAGE_SIZE, ConfigError, SamplingParams
from subten.engine.llm import LLM
from subten.kernels import attend_plan
from subten.kernels import unpack_pages as unpack_pages_module
from subten.kernels.append_attend import append_attend, append_attend_torch
from subten.kernels.attend import attend, attend_torch
from subten.kernels.cuda import append_attend as cuda_append_attend
from subten.kernels.kv_append import kv_append_torch
from subten.kernels.norm_rope import norm_rope_torch
from subten.kernels.step import make_step
from subten.layers.adaptive_attention import AdaptiveAttention
from subten.layers.rope import cos_sin_table
from subten.weights.load import LoadedModel

Randn = Callable[..., torch.Tensor]
SMALL = [name for name in CODECS if name not in ("fp32", "bf16")]
BIAS_NORM = 600.0
"""Of the key bias of the first layer of Qwen2.5 models."""


def make_table(num_positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    rope = RopeConfig(theta=1e6)
    return cos_sin_table(rope, head_dim=head_dim, max_len=num_positions, device=device)


def make_bias(randn: Randn, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """A norm of 600 in slow pairs, where scores are large and differ little from key to key, so
    that softmax feels their absolute error; some in fast pairs, where it feels a wrong angle."""
    slow_GD = randn(num_kv_heads, head_dim)
    slow_GD.view(num_kv_heads, 2, -1)[:, :, : head_dim * 3 // 8] = 0
    slow_GD = slow_GD * (BIAS_NORM / slow_GD.norm(dim=-1, keepdim=True))
    return randn(num_kv_heads, head_dim) + slow_GD


def biased_keys(bias_GD: torch.Tensor, cos_sin_ND: torch.Tensor) -> torch.Tensor:
    """R_n b of row n of the table, FP64 [N, G, D]."""
    first_1GC, second_1GC = bias_GD.double()[None].chunk(2, dim=-1)
    cos_N1C, sin_N1C = cos_sin_ND.double()[:, None].chunk(2, dim=-1)
    turned = (
        first_1GC * cos_N1C - second_1GC * sin_N1C,
        second_1GC * cos_N1C + first_1GC * sin_N1C,
    )
    return torch.cat(turned, dim=-1)


def check(scene: Scene, q_THD: torch.Tensor, num_new: list[int], randn: Randn, ops: Any) -> None:
    """Ops agree with the oracle, whose keys have what is stored and the bias at their position."""
    head_dim, device = scene.fmt.head_dim, q_THD.device
    bias_GD = make_bias(randn, scene.pages_PGB.shape[1], head_dim)
    cos_sin_PD = make_table(max(scene.lengths), head_dim, device)
    added = [biased_keys(bias_GD, cos_sin_PD[:length]) for length in scene.lengths]
    expected_THD = dense(scene, q_THD, num_new, added)
    largest, rms = tolerances(scene, q_THD)
    # FP32 sums of the bias as `tolerances` has those of keys, 2**-24 sqrt(D) of the norms' product.
    # Under BF16 queries three products of BF16 parts lose 2**-17 of a term, with random signs.
    norms = [float(x.float().norm(dim=-1).max()) for x in (q_THD, bias_GD)]
    product = scene.scale * norms[0] * norms[1]
    unit = 3 * 2**-24 * math.sqrt(head_dim)
    if q_THD.dtype == torch.bfloat16:
        unit += 4 * 2**-17 / math.sqrt(head_dim)
    v_range = 2 * max(float(v.abs().max()) for v in scene.values)
    more = 2 * unit * product * v_range
    # Whole pages, as a graph has them: rows past the table's end are not read.
    step = scene.step(num_new)
    step = dataclasses.replace(step, max_kv_len=-(-step.max_kv_len // PAGE_SIZE) * PAGE_SIZE)
    for op in ops:
        actual_THD = op(
            q_THD,
            scene.pages_PGB,
            scene.fmt,
            step,
            scale=scene.scale,
            rotation_DD=scene.rotation_DD,
            key_bias_GD=bias_GD,
            cos_sin_PD=cos_sin_PD,
        )
        assert actual_THD.dtype == q_THD.dtype
        assert_close(actual_THD, expected_THD, largest + more, rms + more / 8, op.__name__)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("head_dim", [48, 64])
@pytest.mark.parametrize("num_new", [DECODE, MIXED], ids=["decode", "mixed"])
def test_twin_adds_the_bias(randn: Randn, codec: str, head_dim: int, num_new: list[int]) -> None:
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=LENGTHS)
    check(scene, randn(sum(num_new), 6, head_dim), num_new, randn, [attend_torch])


@pytest.mark.triton
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("head_dim", "group", "lengths", "num_new"),
    [
        (64, 3, [1, 64, 65, 130], [1, 1, 1, 1]),
        (48, 2, [65, 3], [18, 1]),
        (80, 1, [66], [3]),
    ],
    ids=["64", "48", "80"],
)
def test_op_adds_the_bias(
    randn: Randn,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    head_dim: int,
    group: int,
    lengths: list[int],
    num_new: list[int],
) -> None:
    if device.type == "cuda" and codec not in ("fp32", "int4"):
        pytest.skip("FP32 dots compile slowly on a GPU, and do not depend on the codec")
    monkeypatch.setattr(attend_plan, "MAX_SPLITS", 1)
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=lengths)
    q_THD = randn(sum(num_new), 2 * group, head_dim)
    check(scene, q_THD, num_new, randn, [attend])


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 7), (128, 8), (256, 2)])
@pytest.mark.parametrize("num_new", [DECODE, MIXED], ids=["decode", "mixed"])
def test_op_adds_the_bias_in_bf16(
    randn: Randn, codec: str, head_dim: int, group: int, num_new: list[int]
) -> None:
    if head_dim != 128 and codec not in ("int8", "int4"):
        pytest.skip("two codecs show the launch choices of other heads; each compiles for seconds")
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=LENGTHS)
    q_THD = randn(sum(num_new), 2 * group, head_dim, dtype=torch.bfloat16)
    check(scene, q_THD, num_new, randn, [attend])


@pytest.mark.triton
@pytest.mark.parametrize("codec", ["fp8", "int4"])
def test_pages_decoded_first(
    randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(unpack_pages_module, "MIN_QUERIES", 2)
    is_gpu = device.type == "cuda"
    dtype, head_dim = (torch.bfloat16, 128) if is_gpu else (torch.float32, 48)
    scene = make_scene(randn, codec, head_dim, num_kv_heads=2, lengths=[65, 3, 130])
    num_new = [18, 1, 64 if is_gpu else 2]
    check(scene, randn(sum(num_new), 4, head_dim, dtype=dtype), num_new, randn, [attend])


@pytest.mark.triton
def test_large_scores_are_exact_in_their_differences(randn: Randn, device: torch.device) -> None:
    """Keys of nothing but the bias, and values one-hot, so that an output is the weights.

    Of a model of the products in torch the largest error was 0.4 * 2**-17 of the terms' sum, and at
    least 4.8 * 2**-17 had they been one of TF32. In BF16 weights are rounded twice besides.
    """
    is_gpu, num_keys = device.type == "cuda", 64
    fmt = kv_format("bf16" if is_gpu else "fp32", 64)
    pages_PGB = torch.zeros(1, 1, fmt.page_bytes, dtype=torch.uint8, device=device)
    # Angles of which neighbouring keys have other digits.
    cos_sin_PD = make_rope(num_keys, 64, device)
    bias_GD = make_bias(randn, 1, 64)
    page = {"page_ids": [[0]], "device": device}
    step = make_step(token_ids=[[0] * num_keys], starts=[0], **page)
    value_NGD = torch.eye(num_keys, device=device)[:, None]
    nothing_NGD = torch.zeros_like(value_NGD)
    at = (step.position_T, step.slot_T)
    kv_append_torch(nothing_NGD, value_NGD, pages_PGB, fmt, cos_sin_PD, *at)
    q_THD = randn(1, 16, 64, dtype=torch.bfloat16 if is_gpu else torch.float32)
    key_ND = biased_keys(bias_GD, cos_sin_PD)[:, 0]
    most_H = (q_THD[0].double() @ key_ND.T / 8).abs().amax(-1)
    q_THD *= (400 / most_H)[:, None].to(q_THD.dtype)
    step = make_step(token_ids=[[0]], starts=[num_keys - 1], **page)
    out_THD = attend(
        q_THD, pages_PGB, fmt, step, scale=1 / 8, key_bias_GD=bias_GD, cos_sin_PD=cos_sin_PD
    )
    expected_HN = (q_THD[0].double() @ key_ND.T / 8).softmax(-1)
    is_large_HN = expected_HN > 0.001
    error_HN = (out_THD[0].double() / expected_HN).log().abs()
    # Sums of the magnitudes of terms, of cosines and sines up to 1.
    q_2HC, b_2C = q_THD[0].double().unflatten(1, (2, -1)).unbind(1), bias_GD[0].view(2, -1).double()
    terms = (q_2HC[0] * b_2C[0] + q_2HC[1] * b_2C[1]).abs()
    terms += (q_2HC[1] * b_2C[0] - q_2HC[0] * b_2C[1]).abs()
    unit, rest = (2**-17, 2 * 2**-8) if is_gpu else (2**-21, 2**-20)
    bound_H1 = unit * terms.sum(-1, keepdim=True) / 8 + rest
    assert (error_HN <= bound_H1)[is_large_HN].all()
    assert is_large_HN.sum(-1).max() > 1


@pytest.mark.triton
@pytest.mark.parametrize("num_new", [[1, 1], [18, 2]], ids=["decode", "mixed"])
def test_splits_merge_to_the_whole(
    randn: Randn, monkeypatch: pytest.MonkeyPatch, num_new: list[int]
) -> None:
    monkeypatch.setattr("subten.kernels.attend._num_sms", lambda _device: 132)
    monkeypatch.setattr(attend_plan, "PREFILL_SPLIT_PAGES", 1)
    scene = make_scene(randn, "int4", 32, num_kv_heads=1, lengths=[200, 65])
    check(scene, randn(sum(num_new), 2, 32), num_new, randn, [attend])


@pytest.mark.parametrize("codec", SMALL)
def test_a_stripped_key_costs_what_one_without_bias_does(
    randn: Randn, device: torch.device, codec: str
) -> None:
    """A prompt in chunks and steps of one token, against attention over keys never encoded."""
    fmt, length = kv_format(codec, 64), 100
    pages_PGB = torch.zeros(2, 1, fmt.page_bytes, dtype=torch.uint8, device=device)
    rotation_DD = hadamard(64, device) if fmt.codec.is_rotated else None
    cos_sin_PD = make_table(128, 64, device)
    bias_GD = make_bias(randn, 1, 64)
    # Small, so that softmax is not one key alone.
    q_THD = randn(length, 2, 64, scale=0.25)
    k_NGD, v_NGD = randn(length, 1, 64), randn(length, 1, 64)

    def attended(stored_NGD: torch.Tensor, key_bias_GD: torch.Tensor | None) -> torch.Tensor:
        parts, start = [], 0
        for new in (63, 7, *[1] * 30):
            step = make_step(
                token_ids=[[0] * new], starts=[start], page_ids=[[1, 0]], device=device
            )
            rows = slice(start, start + new)
            part = append_attend_torch(
                q_THD[rows],
                stored_NGD[rows],
                v_NGD[rows],
                pages_PGB,
                fmt,
                cos_sin_PD,
                step,
                scale=64**-0.5,
                rotation_DD=rotation_DD,
                key_bias_GD=key_bias_GD,
            )
            parts.append(part)
            start += new
        assert start == length
        return torch.cat(parts).double()

    def exact(k_NGD: torch.Tensor) -> torch.Tensor:
        position_N = torch.arange(length, device=device)
        q, k = (norm_rope_torch(x, cos_sin_PD, position_N).double() for x in (q_THD, k_NGD))
        score_HNN = torch.einsum("nhd,md->hnm", q, k[:, 0]) * 64**-0.5
        score_HNN = score_HNN.masked_fill(torch.ones_like(score_HNN).triu(1).bool(), -math.inf)
        return torch.einsum("hnm,md->nhd", score_HNN.softmax(-1), v_NGD[:, 0].double())

    def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
        return float((actual - expected).square().mean().sqrt())

    plain = error(attended(k_NGD, None), exact(k_NGD))
    stripped = error(attended(k_NGD, bias_GD), exact(k_NGD + bias_GD))
    kept = error(attended(k_NGD + bias_GD, None), exact(k_NGD + bias_GD))
    # The same codes; but scores of the bias weigh values, and their errors, a little otherwise.
    assert stripped < 1.1 * plain
    # At 2 bits and fewer either way little is right; a value of fp8 and fp4 has its own exponent.
    if codec.startswith("int") and codec != "int2":
        assert kept > 1.5 * stripped


@pytest.mark.triton
@pytest.mark.parametrize("is_decode", [True, False])
def test_cuda_hands_it_to_triton(
    randn: Randn, device: torch.device, monkeypatch: pytest.MonkeyPatch, is_decode: bool
) -> None:
    """With CUDA's own append on a GPU, but not its attention, which has no such term."""
    is_gpu = device.type == "cuda"
    if not is_gpu:
        monkeypatch.setattr("subten.kernels.cuda.kv_append.suits", lambda *_: False)
        monkeypatch.setattr("subten.kernels.cuda.append_attend.suits", lambda *_: True)
        monkeypatch.setattr("subten.kernels.cuda.attend.suits", lambda *_: True)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    scene = make_scene(randn, "int4", 64, num_kv_heads=2, lengths=[65, 3])
    num_new = [1, 1] if is_decode else [5, 1]
    step = scene.step(num_new)
    rows = randn(sum(num_new), 8, 64, dtype=dtype).split((4, 2, 2), dim=1)
    keywords: dict[str, Any] = {
        "scale": scene.scale,
        "rotation_DD": scene.rotation_DD,
        "key_bias_GD": make_bias(randn, 2, 64),
    }
    cos_sin_PD = make_table(128, 64, device)
    outputs = []
    for op in (append_attend, cuda_append_attend.append_attend):
        pages_PGB = scene.pages_PGB.clone()
        out_THD = op(*rows, pages_PGB, scene.fmt, cos_sin_PD, step, **keywords)
        outputs.append((out_THD, pages_PGB))
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert torch.equal(outputs[0][0], outputs[1][0])


VOCAB = 61


@pytest.fixture
def folder(generator: torch.Generator, tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", generator, (600.0, 1.0, 2.0, 900.0))


def write_model(folder: Path, generator: torch.Generator, norms: tuple[float, ...]) -> Path:
    """A Llama whose layers have key biases of these norms on two channels of each head."""
    values = config_values(
        "LlamaForCausalLM",
        attention_bias=True,
        num_hidden_layers=len(norms),
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        rope_theta=1e6,
    )
    tensors = tensors_of(values, generator)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[name] = 0.1 * tensor + (0.0 if name.endswith("bias") else 1.0)
        elif "q_proj" in name:
            # Scores of the bias within some tens, as those of a trained model are.
            tensors[name] = 0.1 * tensor * tensor.shape[-1] ** -0.5
        else:
            tensors[name] = tensor * tensor.shape[-1] ** -0.5
    for layer, norm in enumerate(norms):
        bias_GD = torch.zeros(2, 64)
        for g in range(2):
            place_2 = torch.randperm(64, generator=generator)[:2]
            bias_GD[g, place_2] = torch.randn(2, generator=generator)
        bias_GD *= norm / bias_GD.norm()
        tensors[f"model.layers.{layer}.self_attn.k_proj.bias"] = bias_GD.flatten()
    return write_folder(folder, values, tensors)


def stripped_layers(loaded: Any) -> list[int]:
    attentions = [layer.attention for layer in loaded.model.layers]
    for attention in attentions:
        is_zero = not attention.qkv.bias[attention.key_rows].any()
        assert is_zero == (attention.key_bias_GD is not None)
    return [i for i, attention in enumerate(attentions) if attention.key_bias_GD is not None]


@pytest.mark.parametrize(
    ("norms", "asked", "stripped"),
    [
        ((1.0, 1.0, 9.0, 1.0), "auto", []),
        ((1.0, 1.0, 11.0, 1.0), "auto", [2]),
        ((600.0, 1.0, 1.0, 600.0), "auto", [0, 3]),
        ((49.0, 49.0, 49.0, 49.0), "auto", []),
        ((51.0, 51.0, 49.0, 51.0), "auto", [0, 1, 3]),
        ((600.0, 1.0, 1.0, 600.0), "keep", []),
        ((1.0, 1.0, 9.0, 1.0), "strip", [0, 1, 2, 3]),
    ],
)
def test_which_layers_are_stripped(
    norms: tuple[float, ...],
    asked: str,
    stripped: list[int],
    generator: torch.Generator,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write_model(tmp_path / "m", generator, norms)
    with caplog.at_level(logging.INFO):
        loaded = load(folder, kv_cache_dtype="int4", kv_key_bias=asked)
    assert stripped_layers(loaded) == stripped
    assert loaded.kv_key_bias == asked
    said = [r for r in caplog.records if "k_proj.bias" in r.getMessage()]
    if stripped:
        (record,) = said
        assert record.levelno == logging.INFO
        named = "layer 2:" if stripped == [2] else f"layers {', '.join(map(str, stripped))}:"
        assert f"kv_key_bias: {asked} -> strip in {named}" in record.getMessage()
    elif asked == "keep":
        (record,) = said
        assert record.levelno == logging.WARNING
        assert "layers 0, 3 " in record.getMessage() and "--kv-key-bias auto" in record.getMessage()
    else:
        assert not said


@pytest.mark.parametrize("codec", ["bf16", "fp32", "adaptive"])
def test_other_caches_keep_the_weights(codec: str, folder: Path) -> None:
    assert stripped_layers(load(folder, kv_cache_dtype=codec)) == []
    stripped = stripped_layers(load(folder, kv_cache_dtype=codec, kv_key_bias="strip"))
    assert stripped == ([] if codec == "adaptive" else [0, 1, 2, 3])


def test_a_norm_after_the_bias_is_warned_of(
    generator: torch.Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = config_values("Qwen3MoeForCausalLM", attention_bias=True, head_dim=16)
    tensors = tensors_of(values, generator)
    tensors["model.layers.1.self_attn.k_proj.bias"] *= 600
    folder = write_folder(tmp_path / "m", values, tensors)
    with caplog.at_level(logging.WARNING):
        loaded = load(folder, kv_cache_dtype="int4")
    assert stripped_layers(loaded) == []
    (said,) = (r.getMessage() for r in caplog.records if "k_proj.bias" in r.getMessage())
    assert "layer 1 " in said and "--kv-cache-dtype adaptive takes it out" in said


@pytest.mark.parametrize("asked", ["auto", "strip", "keep"])
def test_adaptive_strips_the_mean_unless_it_is_to_be_kept(
    asked: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load(folder, kv_cache_dtype="adaptive", kv_key_bias=asked)
    warned = [r.getMessage() for r in caplog.records if "k_proj.bias" in r.getMessage()]
    assert len(warned) == (asked == "keep") and all("--kv-key-bias auto" in w for w in warned)
    llm = LLM(loaded, kv_cache_dtype="adaptive", num_pages=8, max_num_seqs=2)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    for layer in loaded.model.layers:
        assert isinstance(layer.attention, AdaptiveAttention)
        assert (layer.attention.k_mean_GD is None) == (asked == "keep")


@pytest.mark.parametrize(
    ("changes", "codec", "asked", "said"),
    [
        ({"attention_bias": False}, "int4", "strip", "auto or keep, as the model's keys have no"),
        ({"attention_bias": False}, "adaptive", "strip", "auto or keep, as the model's keys have"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "int4", "strip", "have a norm after their bi"),
        ({}, "int4", "yes", "auto, strip, keep"),
    ],
)
def test_what_cannot_be_had_is_refused(
    changes: dict[str, Any],
    codec: str,
    asked: str,
    said: str,
    generator: torch.Generator,
    tmp_path: Path,
) -> None:
    values = config_values(
        "LlamaForCausalLM", **{"attention_bias": True, "head_dim": 16, **changes}
    )
    folder = write_folder(tmp_path / "m", values, tensors_of(values, generator))
    message = refusal(folder, ConfigError, kv_cache_dtype=codec, kv_key_bias=asked)
    assert message.startswith(f"kv_key_bias: got {asked!r}; allowed: ") and said in message


def test_settings_that_contradict_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_key_bias: got 'no'; allowed: auto, strip, keep"):
        EngineConfig(kv_key_bias="no")
    loaded = load(folder, kv_cache_dtype="int4", kv_key_bias="strip")
    with pytest.raises(ConfigError, match="kv_key_bias: got 'keep'; allowed: strip, for which"):
        LLM(loaded, kv_cache_dtype="int4", kv_key_bias="keep")


def logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Of every token: a prompt in two chunks, then steps of one token."""
    model = loaded.model
    pool = PagePool(
        num_layers=len(model.layers),
        num_pages=3,
        num_kv_heads=2,
        fmt=model.fmt,
        device=model.device,
    )
    rows, start = [], 0
    with torch.inference_mode():
        for new in (60, 70, *[1] * 20):
            step = make_step(
                token_ids=[ids[start : start + new]],
                starts=[start],
                page_ids=[[2, 0, 1]],
                device=model.device,
            )
            rows.append(model(step, pool.pages_LPGB, all_rows=True).double().cpu())
            start += new
    assert start == len(ids)
    return torch.cat(rows).log_softmax(-1)


def on(device: torch.device) -> dict[str, Any]:
    """How a model is loaded for it."""
    is_gpu = device.type == "cuda"
    return {"device": device, "backend": "auto", "dtype": "bfloat16"} if is_gpu else {}


@pytest.mark.parametrize("codec", ["int8", "int4", "int4_g32"])
def test_a_stripped_model_stays_near_its_reference(
    codec: str, folder: Path, device: torch.device, generator: torch.Generator
) -> None:
    """KL divergence from the model over float32 rows; what is lost is the codec's part of it."""
    ids = torch.randint(VOCAB, (150,), generator=generator).tolist()
    expected = logits(load(folder), ids)

    def kld(codec: str, asked: str) -> float:
        found = logits(load(folder, kv_cache_dtype=codec, kv_key_bias=asked, **on(device)), ids)
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    # Weights and activations in BF16, on a GPU.
    rounding = kld("fp32", "strip")
    stripped, kept = kld(codec, "auto"), kld(codec, "keep")
    print(f"{codec}: rounding {rounding:.2e}, stripped {stripped:.2e}, kept {kept:.2e}")
    assert stripped < rounding + 0.15
    # Groups of 32 channels confine what a bias spoils, at times to channels that matter little: of
    # 13 models two lost but 1.2 and 1.5 times as much, of 12 with int4 each twice at least.
    if codec != "int4_g32":
        assert kept - rounding > 1.25 * (stripped - rounding)


@pytest.mark.parametrize("is_float32", [True, False])
def test_greedy_tokens_through_the_engine(
    is_float32: bool, folder: Path, device: torch.device, generator: torch.Generator
) -> None:
    """Graphs, batches, chunks of prompts and shared pages change no token."""
    options = on(device) | {"dtype": "float32" if is_float32 else "bfloat16"}
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (90, 3, 64, 91)]
    prompts[3][:80] = prompts[0][:80]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    settings: list[dict[str, Any]] = [{}, {"enforce_eager": True}]
    if is_float32:
        # In BF16 tiles of other shapes round to other tokens.
        settings += [{"max_num_batched_tokens": 50}]
        settings += [{"max_num_seqs": 1, "enable_prefix_caching": False}]
    tokens = []
    for changes in settings:
        # Of no whole number of pages, unlike what graphs are captured for.
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 190, **changes}
        options["max_model_len"] = limits["max_model_len"]
        loaded = load(folder, kv_cache_dtype="int8", kv_key_bias="strip", **options)
        llm = LLM(loaded, kv_cache_dtype="int8", **limits)
        tokens.append([c.token_ids for c in llm.generate(prompts, params)])
        llm.close()
    assert all(found == tokens[0] for found in tokens)
    assert len(set(tokens[0])) > 1


def test_eval_measures_what_an_engine_would_store(folder: Path) -> None:
    loaded = load(folder, kv_cache_dtype="bf16")
    probes = {name: quality._Probe(loaded.model, kv_format(name, 64)) for name in ("bf16", "int4")}
    found = {name: stripped_layers(probe) for name, probe in probes.items()}
    assert found == {"bf16": [], "int4": [0, 3]}
    assert stripped_layers(loaded) == []
    # And what is stripped already stays so.
    stripped = load(folder, kv_cache_dtype="int4", kv_key_bias="strip")
    assert stripped_layers(quality._Probe(stripped.model, kv_format("bf16", 64))) == [0, 1, 2, 3]


def test_adaptive_steps_of_whole_pages(folder: Path, device: torch.device) -> None:
    """Its table of positions ends within the page that a graph is captured for."""
    loaded = load(folder, kv_cache_dtype="adaptive", max_model_len=100, **on(device))
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 100}
    llm = LLM(loaded, kv_cache_dtype="adaptive", **limits)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (completion,) = llm.generate([list(range(60))], params)
    assert len(completion.token_ids) == 40
    attention = loaded.model.layers[0].attention
    assert isinstance(attention, AdaptiveAttention) and attention.k_mean_GD is not None
