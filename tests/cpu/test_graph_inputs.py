"""Captures that fail: the step serves in place of its graph, once and for all, and says so."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from test_decoder import MIXTRAL, make_decoder
from test_graphs import MAX_MODEL_LEN, CountingModel, counted, last_tokens, make_pool, take
from test_prefill_graphs import chunks, make_sequence

from subten.cache.pool import PagePool
from subten.codecs import kv_format
from subten.config import EngineConfig
from subten.device import on_device
from subten.engine import llm, prefill_graphs
from subten.engine.graph_inputs import CaptureError, Step, capture_cuda_graph
from subten.engine.graphs import DecodeGraphs
from subten.engine.prefill_graphs import PrefillGraphs
from subten.engine.resolve import max_step_bytes
from subten.kernels.advance import advance_torch
from subten.kernels.sample import sample_torch
from subten.models import read_config
from subten.models.decoder import Decoder

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
REFUSED = torch.AcceleratorError("CUDA error: operation not permitted\nSearch for it.")
LAUNCH = RuntimeError("Triton Error [CUDA]: out of memory")

WARM_UP, RECORDED = 1, 3
"""Calls of a step that is captured."""

WHERE = [
    (WARM_UP, OUT_OF_MEMORY),
    (RECORDED, OUT_OF_MEMORY),
    (RECORDED, REFUSED),
    (RECORDED, LAUNCH),
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class Failing:
    """A model whose call of a number raises."""

    def __init__(self, model: Any, number: int, error: BaseException) -> None:
        self.num_calls = 0
        self._model, self._number, self._error = model, number, error

    def __call__(self, *args: Any) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == self._number:
            raise self._error
        return self._model(*args)  # type: ignore[no-any-return]


def decode_graphs(model: Any, pool: PagePool, **settings: Any) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        pool,
        sample=sample_torch,
        advance=advance_torch,
        max_batch=4,
        max_model_len=512,
        device=torch.device("cpu"),
        **settings,
    )


def prompt_graphs(decoder: Decoder, pool: PagePool, capture: Callable[..., Step]) -> PrefillGraphs:
    return PrefillGraphs(
        decoder,
        pool,
        sample=decoder.ops.sample,
        max_model_len=MAX_MODEL_LEN,
        device=decoder.device,
        capture=capture,
    )


def run_uncut(step: Step, **_: Any) -> Step:
    return step


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@pytest.fixture
def pool() -> PagePool:
    return PagePool(1, 8, 1, kv_format("bf16", 16), torch.device("cpu"))


@pytest.mark.parametrize(("number", "error"), WHERE)
def test_decode_steps_go_on_without_the_graph(
    cuda: FakeCuda,
    pool: PagePool,
    caplog: pytest.LogCaptureFixture,
    number: int,
    error: RuntimeError,
) -> None:
    counting = CountingModel(torch.device("cpu"))
    graphs = decode_graphs(Failing(counting, number, error), pool)
    sequences = [counted([1, 2], [0]), counted([3, 4, 5, 6], [1])]
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            take(graphs, sequences)
    # Each step once, the next one ahead, and one capture in all.
    assert counting.positions == [[1 + i, 3 + i] for i in range(21)]
    assert len(cuda.streams) == 1
    assert cuda.capturing is None
    # What the step that failed had queued comes before all that follows.
    assert cuda.streams[0] in cuda.main.waited_for
    (record,) = caplog.records
    assert record.getMessage() == (
        "decode steps of 2 sequences, up to 512 tokens each: launched one by one, without a CUDA "
        f"graph: {type(error).__name__}: {first_line(error)}"
    )


def test_other_sizes_are_still_captured(cuda: FakeCuda, pool: PagePool) -> None:
    counting = CountingModel(torch.device("cpu"))
    graphs = decode_graphs(Failing(counting, RECORDED, OUT_OF_MEMORY), pool)
    sequences = [counted([1, 2], [0]), counted([3, 4, 5, 6], [1])]
    take(graphs, sequences)
    assert [graph.num_replays for graph in cuda.graphs] == [0]
    # One of the two goes on, and what is started ahead is a step of its alone.
    graphs.run(last_tokens(sequences[:1]))
    assert [graph.num_replays for graph in cuda.graphs] == [0, 1]


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (WARM_UP, LAUNCH),
        (WARM_UP, REFUSED),
        (RECORDED, AssertionError("wrong")),
        (RECORDED, KeyboardInterrupt()),
    ],
)
def test_other_errors_are_not_taken_for_a_failed_capture(
    cuda: FakeCuda, pool: PagePool, number: int, error: BaseException
) -> None:
    model = Failing(CountingModel(torch.device("cpu")), number, error)
    graphs = decode_graphs(model, pool)
    sequence = counted([1, 2], [0])
    with pytest.raises(type(error)):
        graphs.run(last_tokens([sequence]))
    assert cuda.capturing is None
    assert cuda.streams[0] in cuda.main.waited_for
    # Nothing is kept: the next step captures.
    before = len(cuda.streams)
    graphs.run(last_tokens([sequence]))
    assert len(cuda.streams) == before + 1
    assert cuda.graphs[-1].num_replays > 0


@pytest.mark.parametrize(("number", "error"), WHERE)
@torch.inference_mode()
def test_prompts_go_on_without_the_graph(
    cuda: FakeCuda,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    error: RuntimeError,
) -> None:
    """A graph in two parts: the error comes in the second, and no chunk is cut after it."""
    decoder = make_decoder("fp32", "torch", torch.device("cpu"), generator)
    monkeypatch.setattr(prefill_graphs, "CUT_LAYERS", (1,))
    tokens = torch.randint(decoder.config.vocab_size, (100,), generator=generator).tolist()
    (item,) = chunks(make_sequence(tokens, [3, 1]), 100)
    expected_pool, pool = make_pool(decoder, 5), make_pool(decoder, 5)
    expected_SV, expected = prompt_graphs(decoder, expected_pool, run_uncut).run(item)
    last: Any = decoder.layers[1]
    monkeypatch.setattr(last.ffn, "forward", Failing(last.ffn.forward, number, error))
    graphs = prompt_graphs(decoder, pool, capture_cuda_graph)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            logits_SV, sampled = graphs.run(item)
            assert torch.equal(logits_SV, expected_SV)
            assert sampled == expected
    assert torch.equal(pool.pages_LPGB, expected_pool.pages_LPGB)
    assert len(cuda.streams) == 1
    assert len(cuda.graphs) == (0 if number == WARM_UP else 2)
    assert cuda.capturing is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "prompt chunks of 128 tokens, up to 128 with those before: launched one by one, without a "
        f"CUDA graph: {type(error).__name__}: {first_line(error)}"
    )


MIB = 2**20


@pytest.mark.parametrize(
    ("free_mib", "reserve_mib", "num_graphs", "is_kept"),
    [
        ([400, 300], 0, 1, True),
        ([400, 300], 300, 1, True),
        ([400, 299], 300, 1, False),
        ([299], 300, 0, False),
    ],
)
def test_a_graph_leaves_the_memory_that_is_kept(
    cuda: FakeCuda,
    pool: PagePool,
    caplog: pytest.LogCaptureFixture,
    free_mib: list[int],
    reserve_mib: int,
    num_graphs: int,
    is_kept: bool,
) -> None:
    """Before it is recorded and after: what it takes is not known before."""
    cuda.free_bytes = [mib * MIB for mib in free_mib]
    capture = functools.partial(capture_cuda_graph, reserve_bytes=reserve_mib * MIB)
    graphs = decode_graphs(CountingModel(torch.device("cpu")), pool, capture=capture)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            graphs.run(last_tokens([counted([1, 2], [0])]), has_more=True)
    assert len(cuda.graphs) == num_graphs
    assert [graph.num_replays for graph in cuda.graphs] == [3 * is_kept] * num_graphs
    if is_kept:
        assert not caplog.records
        return
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "CUDA graph: 299 MiB of memory are free, and 300 are kept for steps without a graph"
    )


def test_an_engine_keeps_what_a_step_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    for name in ("DecodeGraphs", "PrefillGraphs"):
        monkeypatch.setattr(llm, name, lambda *_, **settings: made.append(settings))
    config, model_config = EngineConfig(), read_config(MIXTRAL, source="test")[1]
    ops = SimpleNamespace(backend={"experts": "cuda"}, sample=None, advance=None)
    engine = SimpleNamespace(
        loaded=SimpleNamespace(model=SimpleNamespace(ops=ops)),
        device=SimpleNamespace(kind="cuda", torch_device=torch.device("cuda", 1)),
        config=config,
        model_config=model_config,
        max_num_seqs=3,
        max_model_len=512,
        pool=None,
        expert_load=None,
    )
    llm.LLM._graphs(engine)  # type: ignore[arg-type]
    assert len(made) == 2
    for settings in made:
        capture = settings["capture"]
        assert capture.func is capture_cuda_graph
        assert capture.keywords == {"reserve_bytes": max_step_bytes(config, model_config)}


@pytest.mark.gpu
def test_a_capture_without_memory_leaves_the_allocator_as_it_was(device: torch.device) -> None:
    x = torch.ones(2**20, device=device)
    lacking = True

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 3
        if lacking and torch.cuda.is_current_stream_capturing():
            torch.empty(2**46, dtype=torch.uint8, device=device)
        return y + 1, y

    with on_device(device):
        step()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with pytest.raises(CaptureError, match="out of memory"):
            capture_cuda_graph(step)
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == before
        lacking = False
        four, three = capture_cuda_graph(step)()
        assert four.eq(4).all() and three.eq(3).all()
