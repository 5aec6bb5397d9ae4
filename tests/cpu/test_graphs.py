"""Decode steps with fixed inputs and as CUDA graphs, against the same model run step by step."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as PySequence

import pytest
import torch
from test_decoder import make_decoder

from subten.cache.allocator import PageAllocator
from subten.cache.fidelity import Span
from subten.cache.pool import PagePool
from subten.codecs import kv_format
from subten.core import (
    PAGE_SIZE,
    Batch,
    BatchItem,
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
)
from subten.engine.engine import Engine
from subten.engine.expert_load import ExpertLoad
from subten.engine.graph_inputs import MIN_KV_BUCKET, Inputs, Step, capture_cuda_graph
from subten.engine.graphs import DecodeGraphs
from subten.engine.runner import Model, Runner
from subten.engine.scheduler import BAD_LOGITS, Scheduler
from subten.kernels.advance import advance_torch
from subten.kernels.sample import sample_torch
from subten.kernels.step import StepTensors, make_step
from subten.models.decoder import Decoder

MAX_MODEL_LEN = 2 * PAGE_SIZE
GREEDY = SamplingParams(temperature=0.0)


def run_step(step: Step) -> Step:
    """In place of a capture: replaying runs the step."""
    return step


def make_graphs(
    decoder: Decoder,
    pool: PagePool,
    capture: Callable[[Step], Step],
    max_batch: int = 9,
    expert_load: ExpertLoad | None = None,
) -> DecodeGraphs:
    return DecodeGraphs(
        decoder,
        pool,
        sample=decoder.ops.sample,
        advance=decoder.ops.advance,
        max_batch=max_batch,
        max_model_len=MAX_MODEL_LEN,
        device=decoder.device,
        capture=capture,
        expert_load=expert_load,
    )


def make_pool(decoder: Decoder, num_pages: int) -> PagePool:
    config = decoder.config
    pool = PagePool(config.num_layers, num_pages, config.num_kv_heads, decoder.fmt, decoder.device)
    pool.pages_LPGB.fill_(0xFF)
    return pool


def make_sequences(
    rng: random.Random, count: int, vocab: int, params: SamplingParams = GREEDY
) -> list[Sequence]:
    """Sequences of random tokens and lengths, each with pages of its own in random order."""
    pages = list(range(count * MAX_MODEL_LEN // PAGE_SIZE))
    rng.shuffle(pages)
    sequences = []
    for i in range(count):
        tokens = [rng.randrange(vocab) for _ in range(rng.randrange(2, MAX_MODEL_LEN))]
        request = Request(
            request_id=str(i),
            prompt_token_ids=tuple(tokens),
            sampling=params,
            seed=rng.getrandbits(60),
        )
        sequence = Sequence.from_request(request)
        sequence.page_ids = [pages.pop() for _ in range(-(-len(tokens) // PAGE_SIZE))]
        sequences.append(sequence)
    return sequences


def prefill(decoder: Decoder, pool: PagePool, sequences: list[Sequence]) -> None:
    """Compute all tokens but the last of each sequence."""
    for sequence in sequences:
        step = make_step(
            token_ids=[sequence.token_ids[:-1]],
            starts=[0],
            page_ids=[sequence.page_ids],
            device=decoder.device,
        )
        decoder(step, pool.pages_LPGB)


def last_tokens(sequences: list[Sequence]) -> list[BatchItem]:
    return [BatchItem(sequence=s, start=len(s.token_ids) - 1, num_tokens=1) for s in sequences]


@pytest.mark.parametrize(("codec", "count"), [("int4", 1), *(("fp32", n) for n in (1, 2, 8, 9))])
@torch.inference_mode()
def test_a_step_is_the_model_on_each_sequence(
    codec: str, count: int, device: torch.device, generator: torch.Generator
) -> None:
    # Case G04: 9 sequences run as 16 rows, whose padding changes no page and no output.
    decoder = make_decoder(codec, "torch", device, generator)
    rng = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    sequences = make_sequences(rng, count, decoder.config.vocab_size)
    pool = make_pool(decoder, count * MAX_MODEL_LEN // PAGE_SIZE)
    prefill(decoder, pool, sequences)
    expected_pool = make_pool(decoder, pool.num_pages)
    expected_pool.pages_LPGB.copy_(pool.pages_LPGB)
    graphs = make_graphs(decoder, pool, run_step)
    logits_SV, sampled = graphs.run(last_tokens(sequences), has_more=True)
    for row, sequence in enumerate(sequences):
        step = make_step(
            token_ids=[sequence.token_ids[-1:]],
            starts=[len(sequence.token_ids) - 1],
            page_ids=[sequence.page_ids],
            device=decoder.device,
        )
        expected_V = decoder(step, expected_pool.pages_LPGB)[0]
        # Rows that share a matrix product round in another way: some units of the last of 24 bits.
        tolerance = 0 if count == 1 else 1e-5
        torch.testing.assert_close(logits_SV[row], expected_V, atol=tolerance, rtol=0)
        assert sampled[row] == int(logits_SV[row].argmax())
    written, expected = (p.pages_LPGB.view(torch.float32) for p in (pool, expected_pool))
    if count == 1:
        written, expected = pool.pages_LPGB, expected_pool.pages_LPGB
    torch.testing.assert_close(written, expected, atol=tolerance, rtol=0, equal_nan=True)


@torch.inference_mode()
def test_inputs_of_the_next_step_are_read(device: torch.device, generator: torch.Generator) -> None:
    # Case G03: the same size, other tokens, lengths and pages; then fewer rows, then more.
    decoder = make_decoder("fp32", "torch", device, generator)
    rng = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    sequences = make_sequences(rng, 6, decoder.config.vocab_size)
    pool = make_pool(decoder, 6 * MAX_MODEL_LEN // PAGE_SIZE)
    prefill(decoder, pool, sequences)
    graphs = make_graphs(decoder, pool, run_step)
    alone = [graphs.run([item])[0][0].clone() for item in last_tokens(sequences)]
    for chosen in ([0, 1], [3, 2], [5], [4, 0, 1, 2, 3], [1, 4], [5, 4, 3, 2, 1, 0]):
        logits_SV, _ = graphs.run(last_tokens([sequences[i] for i in chosen]))
        for row, i in enumerate(chosen):
            torch.testing.assert_close(logits_SV[row], alone[i], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_sequence_that_moves_to_other_pages_is_followed(
    device: torch.device, generator: torch.Generator
) -> None:
    # As after a preemption: as many pages as before, but others.
    decoder = make_decoder("fp32", "torch", device, generator)
    rng = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    (sequence,) = make_sequences(rng, 1, decoder.config.vocab_size)
    pool = make_pool(decoder, 2 * MAX_MODEL_LEN // PAGE_SIZE)
    prefill(decoder, pool, [sequence])
    graphs = make_graphs(decoder, pool, run_step)
    before_V = graphs.run(last_tokens([sequence]))[0][0].clone()
    pool.pages_LPGB.fill_(0xFF)
    sequence.page_ids = [page + MAX_MODEL_LEN // PAGE_SIZE for page in sequence.page_ids]
    prefill(decoder, pool, [sequence])
    after_V = graphs.run(last_tokens([sequence]))[0][0]
    assert torch.equal(after_V, before_V)


class CountingModel:
    """Logits whose largest is a fixed function of the last token and its position; counts steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.positions: list[list[int]] = []

    def __call__(self, step: StepTensors, _: torch.Tensor) -> torch.Tensor:
        if step.kv_len_S.any():
            self.positions.append(step.position_T.tolist())
        token_S = self.follow(step.token_id_T, step.position_T)
        return torch.nn.functional.one_hot(token_S, 50).float()

    @staticmethod
    def follow(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return (7 * token + 3 * position + 1) % 50


def counting_graphs(model: Model, pool: PagePool, max_model_len: int) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        pool,
        sample=sample_torch,
        advance=advance_torch,
        max_batch=4,
        max_model_len=max_model_len,
        device=pool.pages_LPGB.device,
        capture=run_step,
    )


def take(graphs: DecodeGraphs, sequences: list[Sequence]) -> list[int]:
    """One step as the engine does it: run, append."""
    logits_SV, sampled = graphs.run(last_tokens(sequences))
    assert logits_SV.argmax(-1).tolist() == sampled
    for sequence, token in zip(sequences, sampled, strict=True):
        last, position = sequence.token_ids[-1], len(sequence.token_ids) - 1
        assert token == int(CountingModel.follow(torch.tensor(last), torch.tensor(position)))
        sequence.token_ids.append(token)
    return sampled


@pytest.fixture
def pool(device: torch.device) -> PagePool:
    return PagePool(1, 8, 1, kv_format("bf16", 16), device)


def counted(tokens: list[int], pages: list[int], **params: object) -> Sequence:
    request = Request(
        request_id=str(pages),
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(**({"temperature": 0.0} | params)),
        seed=0,
    )
    sequence = Sequence.from_request(request)
    sequence.page_ids = pages
    return sequence


def test_the_next_step_runs_ahead_and_is_taken(device: torch.device, pool: PagePool) -> None:
    model = CountingModel(device)
    graphs = counting_graphs(model, pool, 512)
    sequences = [counted([1, 2], [0]), counted([3, 4, 5, 6], [1])]
    for i in range(20):
        take(graphs, sequences)
        # One step is always under way, and none runs twice.
        assert len(model.positions) == i + 2
    assert model.positions == [[1 + i, 3 + i] for i in range(21)]


def test_the_device_moves_its_inputs_on_by_itself(
    device: torch.device, pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = []
    upload = Inputs.upload
    monkeypatch.setattr(Inputs, "upload", lambda inputs: (uploads.append(1), upload(inputs)))
    model = CountingModel(device)
    graphs = counting_graphs(model, pool, 512)
    long, short = counted([1] * 60, [3]), counted([5, 6], [1])
    seen = []
    for _ in range(10):
        if len(long.token_ids) == PAGE_SIZE:
            long.page_ids = [3, 6]  # as the scheduler does, before the step that needs it
        take(graphs, [long, short])
        seen.append(len(uploads))
    # Padding before the capture, and the first step; then the one whose page came after the inputs
    # had moved on.
    assert seen == [2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert model.positions == [[59 + i, 1 + i] for i in range(11)]


def test_a_step_ahead_is_dropped_where_another_is_wanted(
    device: torch.device, pool: PagePool
) -> None:
    model = CountingModel(device)
    graphs = counting_graphs(model, pool, 512)
    first, second, third = counted([1, 2], [0]), counted([3, 4], [1]), counted([5, 6, 7], [2])
    take(graphs, [first, second])
    take(graphs, [first, third])  # one is new
    graphs.drop_ahead()
    take(graphs, [first, third])
    take(graphs, [second])  # it paused, and its step ahead is long gone
    assert first.num_output == 3 and second.num_output == 2
    # Each of the three changes cost one step, and one is under way.
    assert len(model.positions) == 4 + 3 + 1


def test_a_step_ahead_serves_those_of_its_rows_that_go_on(
    device: torch.device, pool: PagePool
) -> None:
    model = CountingModel(device)
    graphs = counting_graphs(model, pool, 512)
    four = [counted([i, i + 1], [i]) for i in range(4)]
    take(graphs, four)
    for live in ([3, 0, 2, 1], [3, 0, 1], [0, 1], [1]):
        take(graphs, [four[i] for i in live])
    assert [sequence.num_output for sequence in four] == [4, 5, 2, 3]
    assert len(model.positions) == 5 + 1
    assert model.positions[-3:] == [[4, 4, 4], [5, 5], [6]]


def test_logits_are_those_of_the_rows_that_go_on(device: torch.device, pool: PagePool) -> None:
    model = CountingModel(device)
    graphs = counting_graphs(model, pool, 512)
    three = [counted([i, i + 1], [i]) for i in range(3)]
    take(graphs, three)
    logits_SV, sampled = graphs.run(last_tokens([three[2], three[0]]), has_more=True)
    assert logits_SV.argmax(1).tolist() == sampled
    assert len(model.positions) == 2


def test_an_end_that_is_known_leaves_the_others_their_step_ahead(
    device: torch.device, pool: PagePool
) -> None:
    model = CountingModel(device)
    graphs = counting_graphs(model, pool, 512)
    ends = [3, 5, 5, 9]
    live = [counted([i, i + 1], [i], max_tokens=end) for i, end in enumerate(ends)]
    for number in range(1, 10):
        take(graphs, live)
        live = [s for s in live if s.num_output < s.request.sampling.max_tokens]
        # The next step is under way, for them alone; after the last token there is none.
        assert len(model.positions) == min(number + 1, 9)
        assert not live or len(model.positions[-1]) == len(live)
    assert not live


def test_a_step_ahead_opens_its_page_in_the_pool(device: torch.device) -> None:
    opened: list[int] = []

    class Pool(PagePool):
        def prepare(self, spans: PySequence[Span]) -> None:
            opened.extend(span.page_ids[span.start // PAGE_SIZE] for span in spans)

    model = CountingModel(device)
    graphs = counting_graphs(model, Pool(1, 8, 1, kv_format("bf16", 16), device), 512)
    sequence = counted([1] * (PAGE_SIZE - 2), [5, 3])
    for _ in range(6):
        take(graphs, [sequence])
    assert len(model.positions) == 7
    assert opened == [3]


def test_only_an_arrival_keeps_an_engine_from_running_ahead(device: torch.device) -> None:
    """Requests that cross pages, and end one after another."""
    model = CountingModel(device)
    pool = PagePool(1, 9, 1, kv_format("bf16", 16), device)
    graphs = counting_graphs(model, pool, 512)
    runner = Runner(model, pool, sample=sample_torch, vocab_size=50, device=device, graphs=graphs)
    scheduler = Scheduler(
        PageAllocator(9), max_num_seqs=4, max_num_batched_tokens=256, max_model_len=512
    )
    engine = Engine(scheduler, runner)
    counts = []
    for number in range(3):
        request = Request(
            request_id=str(number),
            prompt_token_ids=(number + 1,) * (20 + number),
            sampling=SamplingParams(temperature=0.0, max_tokens=80 + 3 * number),
            seed=0,
        )
        engine.add(request)
        while engine.has_work and len(counts) < 5 * (number + 1) + 1000 * (number == 2):
            before = len(model.positions)
            engine.step()
            counts.append(len(model.positions) - before)
    assert engine.stats.num_ended[FinishReason.LENGTH] == 3
    assert len(counts) == 10 + 86
    # Each step runs the model once, for the next one; the first after a prefill for itself too.
    assert [i for i, count in enumerate(counts) if count != 1] == [1, 6, 11, 95]
    assert [counts[i] for i in (1, 6, 11, 95)] == [2, 2, 2, 0]


@pytest.mark.parametrize("why", ["pages", "max_tokens", "max_model_len", "penalties", "has_more"])
def test_no_step_ahead_that_cannot_be_wanted(
    device: torch.device, pool: PagePool, why: str
) -> None:
    model = CountingModel(device)
    graphs = counting_graphs(model, pool, 32 if why == "max_model_len" else 512)
    params = {"max_tokens": {"max_tokens": 1}, "penalties": {"presence_penalty": 1.0}}.get(why, {})
    tokens = {"pages": 64, "max_model_len": 31}.get(why, 5)
    sequence = counted([1] * tokens, [0], **params)
    graphs.run(last_tokens([sequence]), has_more=why == "has_more")
    assert len(model.positions) == 1


def test_rows_with_bad_logits_end_alone(device: torch.device, pool: PagePool) -> None:
    # Case G04's kind: the step ahead gets token 0 in place of no token, not -1.
    model = CountingModel(device)

    def bad(step: StepTensors, pages: torch.Tensor) -> torch.Tensor:
        logits_SV = model(step, pages)
        logits_SV[step.position_T == 4] = torch.nan
        assert int(step.token_id_T.min()) >= 0
        return logits_SV

    graphs = counting_graphs(bad, pool, 512)
    good, ends = counted([1, 2], [0]), counted([3, 4, 5, 6, 7], [1])
    _, sampled = graphs.run(last_tokens([good, ends]))
    assert sampled[1] == BAD_LOGITS and sampled[0] != BAD_LOGITS
    good.token_ids.append(sampled[0])
    take(graphs, [good])


def test_a_graph_for_each_size_and_bucket(device: torch.device, generator: torch.Generator) -> None:
    decoder = make_decoder("fp32", "torch", device, generator)
    pool = make_pool(decoder, 4)
    captured = []

    def capture(step: Step) -> Step:
        captured.append(step)
        return step

    graphs = DecodeGraphs(
        lambda step, _: torch.zeros(len(step.kv_len_S), 3, device=device),
        pool,
        sample=decoder.ops.sample,
        advance=decoder.ops.advance,
        max_batch=17,
        max_model_len=5000,
        device=device,
        capture=capture,
    )
    lengths = (1, MIN_KV_BUCKET, MIN_KV_BUCKET + 1, 4 * MIN_KV_BUCKET, 5000)
    seen = []
    for count in (1, 8, 9, 16, 17):
        for length in lengths:
            request = Request(
                request_id="a", prompt_token_ids=(1,) * length, sampling=GREEDY, seed=0
            )
            sequence = Sequence.from_request(request)
            sequence.page_ids = [0] * -(-length // PAGE_SIZE)
            items = last_tokens([sequence] * count)
            logits_SV, sampled = graphs.run(items, has_more=True)
            assert logits_SV.shape == (count, 3) and len(sampled) == count
        seen.append(len(captured))
    assert seen == [3, 6, 9, 9, 12]
    with pytest.raises(AssertionError):
        graphs.run(last_tokens([sequence] * 18), has_more=True)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["bf16", "int4"])
@torch.inference_mode()
def test_steps_ahead_change_no_token(
    codec: str, device: torch.device, generator: torch.Generator
) -> None:
    decoder = make_decoder(codec, "triton", device, generator)
    seed = int(torch.randint(2**31, (1,), generator=generator))
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=1000)
    outputs = []
    for capture, has_more in ((capture_cuda_graph, False), (run_step, True)):
        rng = random.Random(seed)
        sequences = make_sequences(rng, 3, decoder.config.vocab_size, params)
        for sequence in sequences:
            del sequence.token_ids[30:]
            sequence.num_prompt = len(sequence.token_ids)
        for i, sequence in enumerate(sequences):
            sequence.page_ids = [2 * i + 1, 2 * i]
        pool = make_pool(decoder, 6)
        prefill(decoder, pool, sequences)
        graphs = make_graphs(decoder, pool, capture)
        for step in range(90):
            # From time to time the batch changes, and a step ahead is thrown away.
            live = sequences[: 1 + step // 10 % 3]
            _, sampled = graphs.run(last_tokens(live), has_more=has_more)
            for sequence, token in zip(live, sampled, strict=True):
                if len(sequence.token_ids) < MAX_MODEL_LEN - 1:
                    sequence.token_ids.append(token)
        outputs.append([sequence.token_ids for sequence in sequences])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_equal_the_step_itself(device: torch.device, generator: torch.Generator) -> None:
    # Case G02: prefills of other shapes allocate and free between replays; bits must stay equal.
    decoder = make_decoder("int4", "triton", device, generator)
    rng = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    vocab = decoder.config.vocab_size
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
    sequences = make_sequences(rng, 12, vocab, params)
    per_sequence = MAX_MODEL_LEN // PAGE_SIZE
    pool = make_pool(decoder, 13 * per_sequence)
    prefill(decoder, pool, sequences)
    replayed = make_graphs(decoder, pool, capture_cuda_graph, max_batch=12)
    stepped = make_graphs(decoder, pool, run_step, max_batch=12)
    runner = Runner(
        decoder,
        pool,
        sample=decoder.ops.sample,
        vocab_size=vocab,
        device=device,
        graphs=replayed,
    )
    spare = list(range(12 * per_sequence, 13 * per_sequence))
    for round_ in range(10_000):
        items = last_tokens(rng.sample(sequences, rng.randrange(1, 13)))
        expected_SV, expected = (None, None)
        if round_ % 20 == 0:
            logits_SV, expected = stepped.run(items)
            expected_SV = logits_SV.clone()
        # A step ahead would overwrite the logits.
        logits_SV, sampled = replayed.run(items, has_more=expected_SV is not None)
        if expected_SV is not None:
            assert torch.equal(logits_SV, expected_SV)
            assert sampled == expected
        if round_ % 50 == 0:
            tokens = tuple(rng.randrange(vocab) for _ in range(rng.randrange(2, MAX_MODEL_LEN)))
            request = Request(request_id="p", prompt_token_ids=tokens, sampling=params, seed=1)
            sequence = Sequence.from_request(request)
            sequence.page_ids = spare
            item = BatchItem(sequence=sequence, start=0, num_tokens=len(tokens))
            (token,) = runner.run(Batch(items=(item,)))
            assert token is not None and 0 <= token < vocab
