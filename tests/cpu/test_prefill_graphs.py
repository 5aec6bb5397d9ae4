"""Prompt chunks with fixed, padded inputs and as CUDA graphs, against the same model as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_decoder import MIXTRAL, make_decoder
from test_graphs import MAX_MODEL_LEN, last_tokens, make_pool, run_step

from subten.bench.random_model import random_decoder
from subten.cache.pool import PagePool
from subten.core import PAGE_SIZE, BatchItem, Request, SamplingParams, Sequence
from subten.engine import prefill_graphs
from subten.engine.graph_inputs import capture_cuda_graph
from subten.engine.prefill_graphs import CHUNK_SIZES, PrefillGraphs
from subten.kernels.beside import Beside
from subten.kernels.step import QUERY_TILE, make_step
from subten.layers.attention import Attention
from subten.models import read_config
from subten.models.decoder import Decoder


def make_graphs(decoder: Decoder, pool: PagePool, capture: object = run_step) -> PrefillGraphs:
    return PrefillGraphs(
        decoder,
        pool,
        sample=decoder.ops.sample,
        max_model_len=MAX_MODEL_LEN,
        device=decoder.device,
        capture=capture,  # type: ignore[arg-type]
    )


def make_sequence(tokens: list[int], pages: list[int]) -> Sequence:
    request = Request(
        request_id="a",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(temperature=0.8),
        seed=7,
    )
    sequence = Sequence.from_request(request)
    sequence.page_ids = pages
    return sequence


def chunks(sequence: Sequence, *ends: int) -> list[BatchItem]:
    starts = (0, *ends)
    return [
        BatchItem(sequence=sequence, start=start, num_tokens=end - start)
        for start, end in zip(starts, ends, strict=False)
    ]


@pytest.mark.parametrize("length", [2, 15, 16, 17, 63, 65, 97, 128])
@torch.inference_mode()
def test_a_chunk_is_the_model_on_its_tokens(
    length: int, device: torch.device, generator: torch.Generator
) -> None:
    decoder = make_decoder("fp32", "torch", device, generator)
    tokens = torch.randint(decoder.config.vocab_size, (length,), generator=generator).tolist()
    pool, expected_pool = make_pool(decoder, 5), make_pool(decoder, 5)
    sequence = make_sequence(tokens, [3, 1])
    graphs = make_graphs(decoder, pool)
    # Two chunks: the second has a past, and the first may leave a page half full.
    for item in chunks(sequence, length // 2 + 1, length)[: 1 if length == 2 else 2]:
        if item.num_tokens == 1:
            continue
        end = item.start + item.num_tokens
        step = make_step(
            token_ids=[tokens[item.start : end]],
            starts=[item.start],
            page_ids=[sequence.page_ids],
            device=device,
        )
        expected_SV = decoder(step, expected_pool.pages_LPGB)
        logits_SV, (sampled,) = graphs.run(item)
        # Rows that share a matrix product round in another way: some units of the last of 24 bits.
        torch.testing.assert_close(logits_SV, expected_SV, atol=1e-5, rtol=0)
        assert 0 <= sampled < decoder.config.vocab_size
    written, expected = (p.pages_LPGB.view(torch.float32) for p in (pool, expected_pool))
    torch.testing.assert_close(written, expected, atol=1e-5, rtol=0, equal_nan=True)


@torch.inference_mode()
def test_what_is_done_meanwhile_comes_after_the_launch(
    device: torch.device, generator: torch.Generator
) -> None:
    decoder = make_decoder("fp32", "torch", device, generator)
    order: list[str] = []

    def capture(step: Any, **_: Any) -> Any:
        return lambda: (order.append("launch"), step())[1]

    graphs = make_graphs(decoder, make_pool(decoder, 5), capture)
    (item,) = chunks(make_sequence([1] * 40, [3]), 40)
    _, (sampled,) = graphs.run(item, meanwhile=lambda: order.append("meanwhile"))
    assert order == ["launch", "meanwhile"]
    assert 0 <= sampled < decoder.config.vocab_size


def test_sizes_and_buckets(device: torch.device, generator: torch.Generator) -> None:
    assert all(size % QUERY_TILE == 0 for size in CHUNK_SIZES)
    decoder = make_decoder("fp32", "torch", device, generator)
    graphs = make_graphs(decoder, make_pool(decoder, 2))
    long = make_sequence([1] * 3000, list(range(47)))
    assert not graphs.takes(last_tokens([long])[0])
    for _ in range(2):
        assert not graphs.takes(chunks(long, CHUNK_SIZES[-1] + 1)[0])
    # A size is taken from its second time on, chunks that pad to the same size counting as one.
    assert [graphs.takes(chunks(long, n)[0]) for n in (33, 64, 65, 96, 64, 97)] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("cut_layers", [(), (1,), (0, 1)])
@torch.inference_mode()
def test_replays_equal_the_step_itself(
    device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    cut_layers: tuple[int, ...],
) -> None:
    decoder = make_decoder("int4", "triton", device, generator)
    assert len(decoder.layers) > 1, decoder.layers
    pool, expected_pool = make_pool(decoder, 3), make_pool(decoder, 3)
    monkeypatch.setattr(prefill_graphs, "CUT_LAYERS", cut_layers)
    replayed = make_graphs(decoder, pool, capture_cuda_graph)
    monkeypatch.setattr(prefill_graphs, "CUT_LAYERS", ())
    stepped = make_graphs(decoder, expected_pool)
    sizes = torch.randint(2, MAX_MODEL_LEN, (200,), generator=generator).tolist()
    for size in sizes:
        tokens = torch.randint(decoder.config.vocab_size, (size,), generator=generator).tolist()
        pages = torch.randperm(3, generator=generator).tolist()
        sequence = make_sequence(tokens, pages[: -(-size // PAGE_SIZE)])
        (item,) = chunks(sequence, size)
        expected_SV, expected = stepped.run(item)
        logits_SV, sampled = replayed.run(item)
        assert torch.equal(logits_SV, expected_SV)
        assert sampled == expected
    assert torch.equal(pool.pages_LPGB, expected_pool.pages_LPGB)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["fp8", "int4"])
@pytest.mark.parametrize("cut_layers", [(), (1,)])
@torch.inference_mode()
def test_weights_unpacked_beside_the_router_change_no_bit(
    device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    cut_layers: tuple[int, ...],
    weight_format: str,
) -> None:
    """Those of all layers but the first; chunks of few tokens take their weights as they are."""
    values = {**MIXTRAL, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3}
    config = read_config(values, source="test")[1]
    decoder = random_decoder(config, device=device, quantization=weight_format)
    monkeypatch.setattr(prefill_graphs, "CUT_LAYERS", cut_layers)
    started: list[Beside] = []
    unpacking = Beside.unpacking
    monkeypatch.setattr(Beside, "unpacking", lambda b: (started.append(b), unpacking(b))[1])
    for size, num_started in ((MAX_MODEL_LEN, 2), (MAX_MODEL_LEN // 2 + 3, 2), (30, 0)):
        found = []
        for is_beside in (True, False):
            pool = make_pool(decoder, 2)
            with monkeypatch.context() as patch:
                if not is_beside:
                    patch.setattr(Attention, "unpack_beside", lambda *_: None)
                started.clear()
                graphs = make_graphs(decoder, pool, capture_cuda_graph)
                tokens = torch.randint(config.vocab_size, (size,), generator=generator).tolist()
                if found:
                    tokens = found[0][0]
                pages = list(range(-(-size // PAGE_SIZE)))
                (item,) = chunks(make_sequence(tokens, pages), size)
                for _ in range(2):
                    logits_SV, sampled = graphs.run(item)
                    found.append((tokens, logits_SV.clone(), sampled, pool.pages_LPGB.clone()))
                assert len(started) == (num_started if is_beside else 0), started
        _, expected_SV, expected, expected_pages = found[-1]
        assert bool(expected_SV.isfinite().all())
        for _, logits_SV, sampled, pages_LPGB in found:
            assert torch.equal(logits_SV, expected_SV)
            assert sampled == expected
            assert torch.equal(pages_LPGB, expected_pages)
