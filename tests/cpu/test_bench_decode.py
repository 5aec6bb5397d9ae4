"""Decode steps and kernels at a shape: what is run, what is counted, what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from routed_ahead import ahead_ops
from typer.testing import CliRunner

from subten.bench import kernels
from subten.bench.decode import MAX_ROUND, DecodeWorkload, measure_decode
from subten.bench.plan import weight_bytes_read
from subten.bench.random_model import check_memory, fill_pool, in_format, random_decoder
from subten.bench.recording import experts_read, record_step, recorded
from subten.bench.shapes import SHAPES, get_shape
from subten.cache.pool import PagePool
from subten.cli import app
from subten.codecs import kv_format
from subten.core import PAGE_SIZE, ConfigError
from subten.device import detect
from subten.engine.roof import Roof
from subten.engine.runner import Runner
from subten.engine.traffic import step_traffic
from subten.kernels.attend import read_pages
from subten.kernels.step import make_step
from subten.kernels.weight_formats import Weight, packed_bytes

ROOF = Roof(bytes_per_s=1e9, num_bytes=2**20, how="made up")
TINY = ("tiny-mixtral", "tiny-qwen3")


def tiny(device: torch.device, name: str = "tiny-qwen3", **options: Any) -> Any:
    return random_decoder(get_shape(name), device=device, **options)


def pool_of(model: Any, num_pages: int) -> PagePool:
    return PagePool(
        num_layers=model.config.num_layers,
        num_pages=num_pages,
        num_kv_heads=model.config.num_kv_heads,
        fmt=model.fmt,
        device=model.device,
    )


@pytest.mark.parametrize("context_len", [2, 3, 64, 257, 1024, 32768])
@pytest.mark.parametrize("num_steps", [1, 2, 255, 512])
def test_positions_move_around_the_context(context_len, num_steps):
    workload = DecodeWorkload(context_len=context_len, num_steps=num_steps, prompt_len=1)
    assert 1 <= workload.steps_per_round <= min(num_steps, MAX_ROUND)
    assert workload.start_len >= 1
    lengths = [workload.start_len + 1 + i for i in range(workload.steps_per_round)]
    assert sum(lengths) / len(lengths) == workload.mean_kv_len
    # An even number of steps has no middle one.
    assert context_len <= workload.mean_kv_len <= context_len + 0.5
    assert lengths[-1] < workload.max_len


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
@pytest.mark.parametrize("name", TINY)
@pytest.mark.usefixtures("poisoned")
def test_random_weights_have_the_variance_of_their_inputs(name, quantization, device):
    model = tiny(device, name, quantization=quantization)
    weights = [m for m in model.modules() if isinstance(m, Weight)]
    # Four a layer, and the head.
    assert len(weights) == 4 * model.config.num_layers + 1
    for weight in weights:
        assert weight.format == quantization
        values = weight.dequantize()
        assert values.isfinite().all()
        # At least 16384 draws: their deviation is off by under 1 % of itself (1 / sqrt(2 n) is
        # 0.6 %), and int4 without a search keeps it within 2 %.
        scaled = float(values.std()) * weight.in_features**0.5
        assert abs(scaled - 1) < 0.04, (scaled, tuple(weight.shape))
    for parameter in model.parameters():
        assert not parameter.is_floating_point() or parameter.isfinite().all()


@pytest.mark.parametrize("codec", ["bf16", "int4"])
@pytest.mark.usefixtures("poisoned")
def test_every_row_of_the_pool_is_filled(codec, device):
    model = in_format(tiny(device), kv_format(codec, 64))
    pool = pool_of(model, num_pages=3)
    fill_pool(model, pool)
    for layer in range(model.config.num_layers):
        for page in range(3):
            both = read_pages(
                pool.pages_LPGB[layer], model.fmt, torch.tensor([page], device=device), PAGE_SIZE
            )
            for values in both:
                assert values.isfinite().all()
                # Each row of 64 normal numbers, keys after a norm of about 1: deviation about 1.
                assert (values.float().std(dim=-1) > 0.5).all()
                assert (values.float().std(dim=-1) < 2.0).all()


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_bytes_of_a_step_by_hand(quantization, device):
    model = tiny(device, quantization=quantization)
    pool = pool_of(model, num_pages=1)
    found = step_traffic(model, pool, batch_size=2, mean_kv_len=10.5, experts_per_layer=5.0)

    def matrix(num_rows: float, num_in: int) -> float:
        return packed_bytes(quantization, num_rows, num_in)

    # tiny-qwen3: 3 layers, width 128, heads 4 and 2 of 64, 8 experts of 64, vocabulary 333.
    attention = matrix((4 + 2 * 2) * 64, 128) + matrix(128, 4 * 64)
    router = 8 * 128 * 4
    norms = (2 * 128 + 2 * 64) * 2
    experts = 5 * (matrix(2 * 64, 128) + matrix(128, 64))
    rest = 128 * 2 + matrix(333, 128) + 2 * 128 * 2  # norm, head, two rows of the embedding
    assert found.weight_bytes == 3 * (attention + router + norms + experts) + rest
    assert found.kv_bytes == 2 * 10.5 * 3 * 2 * (2 * 64 * 2)
    assert found.floor_ms(1e9) == pytest.approx(found.total_bytes / 1e6)


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
@pytest.mark.parametrize("name", TINY)
def test_counted_bytes_are_those_that_a_plan_reckons(name, quantization, device):
    model = tiny(device, name, quantization=quantization)
    top_k = float(model.config.top_k)
    found = step_traffic(
        model, pool_of(model, 1), batch_size=1, mean_kv_len=64, experts_per_layer=top_k
    )
    assert found.weight_bytes == pytest.approx(weight_bytes_read(model.config, 1, quantization))


def test_recording_sees_every_op_and_leaves_the_model_as_it_was(device):
    model = tiny(device)
    ops, pool = model.ops, pool_of(model, num_pages=3)
    fill_pool(model, pool)
    step = make_step(
        token_ids=[[3], [4], [5]], starts=[9] * 3, page_ids=[[0], [1], [2]], device=device
    )
    with torch.inference_mode():
        calls = record_step(model, step, pool.pages_LPGB)
    counts = {name: sum(call.op == name for call in calls) for name in ("route", "append_attend")}
    assert counts == {"route": 3, "append_attend": 3}
    labels = {call.label for call in calls}
    assert {"linear qkv", "linear output", "experts"} <= labels
    chosen = [
        set(call.result.topk_id_TK.flatten().tolist()) for call in calls if call.op == "route"
    ]
    assert experts_read(calls) == sum(map(len, chosen)) / 3
    assert 3 <= experts_read(calls) <= 8
    again = next(call for call in calls if call.label == "linear qkv")
    assert torch.equal(again.again(), again.result)
    with pytest.raises(RuntimeError, match="stop"), recorded(model):
        raise RuntimeError("stop")
    assert all(getattr(module, "ops", ops) is ops for module in model.modules())


@pytest.mark.parametrize(("name", "batch_size"), [("tiny-mixtral", 1), ("tiny-qwen3", 3)])
def test_decode_is_measured_at_its_context_through_the_engine(
    name, batch_size, device, monkeypatch
):
    lengths: list[int] = []
    real = Runner.run

    def spied(self: Runner, batch: Any) -> Any:
        if all(item.num_tokens == 1 for item in batch.items):
            lengths.extend(item.start + 1 for item in batch.items)
        return real(self, batch)

    monkeypatch.setattr(Runner, "run", spied)
    model = in_format(tiny(device, name), kv_format("int4", get_shape(name).head_dim))
    workload = DecodeWorkload(
        context_len=70, batch_size=batch_size, prompt_len=5, num_steps=12, num_prompts=2
    )
    found = measure_decode(model, workload, roof=ROOF)
    # A round of 12 steps that does not count and one that does, over the page boundary at 64.
    assert sorted(lengths) == sorted(2 * batch_size * list(range(65, 77)))
    assert (found["tpot_num_samples"], found["ttft_num_samples"]) == (12, 2)
    assert 0 < found["tpot_ms_p50"] <= found["tpot_ms_p99"]
    assert found["ttft_ms_p50"] > 0
    assert found["bytes_per_step"] == pytest.approx(
        found["weight_bytes_per_step"] + found["kv_bytes_per_step"], abs=1
    )
    kv_bytes = pool_of(model, num_pages=0).bytes_per_token * batch_size * 70.5
    assert found["kv_bytes_per_step"] == round(kv_bytes)
    assert found["floor_ms"] == pytest.approx(found["bytes_per_step"] / 1e6)
    assert found["roof_fraction"] == found["floor_ms"] / found["tpot_ms_p50"]
    top_k = model.config.top_k
    if batch_size == 1:
        assert found["experts_per_layer"] == top_k
    else:
        assert top_k <= found["experts_per_layer"] <= model.config.num_experts


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_kernels_are_all_there_and_their_bytes_are_right(quantization, device):
    model = tiny(device, "tiny-mixtral", quantization=quantization)
    rows = kernels.measure_kernels(model, context_len=100, batch_size=2, roof=ROOF, num_replays=2)
    found = {row["kernel"]: row for row in rows}
    assert len(found) == len(rows)
    named = ("linear qkv", "append_attend", "linear output", "route", "experts")
    assert {*named, "linear head", "sample"} <= found.keys()
    assert "embed" not in found  # its table would count as read
    assert all(found[name]["calls_per_step"] == 2 for name in named)
    assert found["linear head"]["calls_per_step"] == found["sample"]["calls_per_step"] == 1
    for row in rows:
        assert row["us_p50"] > 0
        assert row["tb_s"] == pytest.approx(row["bytes"] / row["us_p50"] / 1e6, rel=1e-2)
        assert row["roof_fraction"] == pytest.approx(row["tb_s"] * 1e12 / 1e9)
    # Weights, and at most 2 tokens of 4 bytes for each of 3 inputs, outputs and norms beside them.
    qkv = packed_bytes(quantization, (4 + 2 * 2) * 32, 128)
    assert qkv < found["linear qkv"]["bytes"] <= qkv + 3 * 2 * 4 * 256
    kv_bytes = 2 * 100 * 2 * 2 * 32 * 2
    assert kv_bytes < found["append_attend"]["bytes"] <= kv_bytes + 4096
    one = packed_bytes(quantization, 2 * 192, 128) + packed_bytes(quantization, 128, 192)
    touched = found["experts"]["experts_per_layer"]
    assert 2 <= touched <= 4
    assert touched * one < found["experts"]["bytes"] <= touched * one + 8192


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_router_beside_the_output_product_is_one_row(batch_size, monkeypatch):
    device = torch.device("cpu")  # torch's experts wait for a GPU, which a graph cannot
    ahead = ahead_ops(monkeypatch, device)
    monkeypatch.setattr("subten.bench.random_model.select_ops", lambda *_: ahead.ops)
    model = tiny(device, "tiny-mixtral", quantization="int4")
    rows = kernels.measure_kernels(
        model, context_len=10, batch_size=batch_size, roof=ROOF, num_replays=2
    )
    found = {row["kernel"]: row for row in rows}
    if batch_size > 1:
        assert {"linear output", "route"} <= found.keys()
        assert "linear_route" not in found
        return
    assert not {"linear output", "route"} & found.keys()
    assert found["linear_route"]["calls_per_step"] == 2
    assert found["linear_route"]["backend"] == "cuda"
    # Of 4 experts and 4 heads of 32, width 128: the folded router, not the router; and beside the
    # weights the heads, residual, x, h, scores, and two ids and weights, 4 bytes each at most.
    weights = packed_bytes("int4", 128, 4 * 32) + 4 * (4 * 32 + 128) * 4
    assert weights < found["linear_route"]["bytes"] <= weights + 4 * (4 * 128 + 4 + 2 * 2)
    assert found["experts"]["experts_per_layer"] == 2
    # Other layers' weights are read between two reads of one, its folded router too.
    call = next(c for c in _calls_of_a_step(model) if c.op == "linear_route")
    monkeypatch.setattr(kernels, "STATIC_BYTES", 4096)  # 4 KB is folded, 2 KB are not
    own = kernels._with_own_memory(call, set())
    for name in ("folded_EM", "gate_ED"):
        theirs, ours = (getattr(c.args[2], name) for c in (call, own))
        assert torch.equal(theirs, ours)
        is_large = theirs.numel() * 4 >= kernels.STATIC_BYTES
        assert (theirs.data_ptr() != ours.data_ptr()) == is_large


def _calls_of_a_step(model: Any) -> Any:
    pool = pool_of(model, num_pages=1)
    fill_pool(model, pool)
    step = make_step(token_ids=[[3]], starts=[9], page_ids=[[0]], device=model.device)
    return record_step(model, step, pool.pages_LPGB)


def test_weights_beyond_the_memory_are_refused_before_they_are_made():
    device = detect("cpu")
    large = SHAPES["mixtral-8x7b"]
    check_memory(SHAPES["tiny-qwen3"], "none", torch.bfloat16, device)
    if device.memory_bytes < 93e9:
        with pytest.raises(ConfigError, match=r"got '93.4 GB of weights'; allowed: at most the"):
            check_memory(large, "none", torch.bfloat16, device)


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A command of the group `bench`, on the device under test and with a small roof buffer."""
    monkeypatch.setattr("subten.engine.roof.CPU_BYTES", 2**20)
    device = str(request.config.getoption("--device"))

    def command(*args: str) -> Any:
        line = ["bench", *args, "--device", device]
        result = CliRunner().invoke(app, line, prog_name="subten")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return command


def records_in(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, list)
    return found


def test_latency_of_a_shape_adds_its_records_to_a_file(run, tmp_path):
    out = tmp_path / "latency.json"
    options = ("--shape", "tiny-mixtral", "--num-steps", "3", "--prompt-len", "4")
    lists = (
        "--context-len",
        "20,40",
        "--kv-cache-dtype",
        "bf16,int4",
        "--quantization",
        "none,int4",
    )
    result = run("latency", *options, *lists, "--json", str(out))
    assert result.exit_code == 0, result.stderr
    assert "TPOT p50" in result.stdout
    found = records_in(out)
    keys = {(r["weights_dtype"], r["kv_cache_dtype"], r["context_len"]) for r in found}
    assert len(found) == len(keys) == 8
    fields = """shape weights_dtype kv_cache_dtype batch_size context_len tpot_ms_p50 tpot_ms_p99
        ttft_ms_p50 prompt_len bytes_per_step roof_tb_s floor_ms roof_fraction peak_memory_bytes gpu
        torch triton date commit command"""
    assert all(set(fields.split()) <= row.keys() for row in found)
    again = run(
        "latency", *options, "--kv-cache-dtype", "int4", "--context-len", "20", "--json", "-"
    )
    assert len(json.loads(again.stdout)["records"]) == 1
    run("latency", *options, "--kv-cache-dtype", "int4", "--context-len", "20", "--json", str(out))
    replaced = records_in(out)
    assert len(replaced) == 8
    assert replaced != found


def test_kernels_of_a_shape_add_their_records_to_a_file(run, tmp_path):
    out = tmp_path / "kernels.json"
    options = ("--shape", "tiny-qwen3", "--num-replays", "2", "--context-len", "20")
    for _ in range(2):
        result = run("kernels", *options, "--kv-cache-dtype", "int4", "--json", str(out))
        assert result.exit_code == 0, result.stderr
    assert "linear qkv" in result.stdout
    assert "a step" in result.stdout
    found = records_in(out)
    names = {row["kernel"] for row in found}
    assert len(names) == len(found)
    assert {"linear qkv", "append_attend", "experts", "sample"} <= names
    # CUDA kernels choose a single token's experts within the output product's launch.
    assert ("linear_route" in names) != ({"linear output", "route"} <= names)
    fields = """kernel us_p50 bytes tb_s roof_fraction shape weights_dtype kv_cache_dtype batch_size
        context_len roof_tb_s gpu torch triton date commit command"""
    assert all(set(fields.split()) <= row.keys() for row in found)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "gpt-9"], "shape: got 'gpt-9'; allowed: mixtral-8x7b"),
        (["--shape", "tiny-qwen3", "--context-len", "1"], "context_len: got 1; allowed"),
        (["--shape", "tiny-qwen3", "--context-len", "8,x"], "context_len: got 'x'; allowed"),
        (["--shape", "tiny-qwen3", "--context-len", "8,8"], "context_len: got '8,8'; allowed"),
        (["--shape", "tiny-qwen3", "--batch-size", "0"], "batch_size: got '0'; allowed"),
        (["--shape", "tiny-qwen3", "--quantization", "int3"], "quantization: got 'int3'; allowed"),
        (["--shape", "tiny-qwen3", "--dtype", "fp64"], "dtype: got 'fp64'; allowed"),
        (["--shape", "tiny-qwen3", "--num-steps", "0"], "num_steps: got 0; allowed"),
        (["--shape", "tiny-qwen3", "--num-iters", "3"], "num_iters: got 3; allowed: no value"),
        (["--shape", "tiny-qwen3", "--model", "m"], "model, shape: got both; allowed"),
        (["--context-len", "8"], "context_len: got '8'; allowed: a value with --shape"),
        (["--batch-size", "1,2"], "batch_size: got '1,2'; allowed: one integer"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(run, args, message):
    result = run("latency", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"subten: error: {message}")
    assert len(result.stderr.splitlines()) == 1
