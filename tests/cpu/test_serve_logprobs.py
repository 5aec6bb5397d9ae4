"""Log-probabilities: where tokens begin in a text, and that many of them keep nobody waiting."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import MAX_MODEL_LEN, MODEL
from test_serve_parts import busy_supervisor
from test_tokenizer import TOKENIZERS, CountingBackend

from subten.core import SamplingParams, TokenLogprobs
from subten.serve import completions, ipc
from subten.serve.generation import Generator, Job, Piece
from subten.serve.logprobs import CompletionLogprobs, TokenTexts
from subten.serve.metrics import Metrics
from subten.serve.supervisor import EngineState
from subten.tokenizer import Tokenizer


def scored(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-1.0, rank=1, top=())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_begin_where_the_text_has_them(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    rng = random.Random()
    # Tokens that stand for a text, special ones, and spaces that the beginning of a text loses.
    shown = [i for i in range(tokenizer.vocab_size) if "\ufffd" not in tokenizer.decode([i])]
    for _ in range(200):
        prompt, answer = (rng.choices(shown, k=rng.randrange(1, 9)) for _ in range(2))
        texts = TokenTexts(tokenizer)
        echo = tokenizer.decode(prompt)
        found = CompletionLogprobs(texts).of([prompt[0], *map(scored, prompt[1:])])
        starts = [len(tokenizer.decode(prompt[:i])) for i in range(len(prompt))]
        assert found["text_offset"] == starts
        maker = CompletionLogprobs(texts, context=prompt, num_chars=len(echo))
        offsets = [maker.of([scored(token)])["text_offset"][0] for token in answer]
        assert offsets == [
            len(tokenizer.decode([*prompt, *answer[:i]])) for i in range(len(answer))
        ]


def test_texts_of_tokens_do_not_write_the_whole_tokenizer() -> None:
    class Backend(CountingBackend):
        def to_str(self) -> str:
            raise AssertionError

    tokenizer: Tokenizer = TOKENIZERS["byte level"]()
    backend: Any = Backend(tokenizer.backend)
    tokenizer.backend = backend
    assert TokenTexts(tokenizer).bytes_of(0x80) == b"\x80"


class Submits:
    """A supervisor that keeps what it is asked."""

    state, num_live = EngineState.READY, 0

    def __init__(self) -> None:
        self.asked: list[tuple[ipc.Submit, bool]] = []
        self.sinks: list[Any] = []
        self.released: list[str] = []

    def submit(self, request: ipc.Submit, sink: Any, *, is_held: bool) -> None:
        self.asked.append((request, is_held))
        self.sinks.append(sink)

    def release(self, request: ipc.Submit) -> None:
        self.released.append(request.request_id)

    def cancel(self, request_ids: Any) -> None:
        """Nothing runs."""


def test_the_logprobs_of_a_prompt_come_once() -> None:
    supervisor: Any = Submits()
    generator = Generator(supervisor, None, Metrics("m", busy_supervisor()), max_live=99)
    sampling = SamplingParams(logprobs=2, prompt_logprobs=2)
    generator.start(Job(prompts=[[1, 2, 3], [4, 5, 6]], sampling=sampling, n=3))
    first = [request.sampling.prompt_logprobs is not None for request, _ in supervisor.asked]
    assert first == [True, False, False] * 2
    # The others come after it, however short the prompt.
    assert [is_held for _, is_held in supervisor.asked] == [False, True, True] * 2
    supervisor.sinks[3](ipc.TokenOut(request_id="3", token_id=5))
    assert supervisor.released == ["4", "5"]


def test_a_long_echo_is_written_beside_the_event_loop() -> None:
    threads = []

    def choice(_piece: Piece) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    async def pieces() -> Any:
        for num_rows in (0, 10_000):
            rows = (scored(1),) * num_rows
            yield Piece(index=0, logprobs=[scored(1)], prompt_logprobs=rows)

    class Writer(completions._Writer):
        def __init__(self) -> None:
            self.head: dict[str, Any] = {}

    async def run() -> None:
        writer = Writer()
        writer.choice = choice  # type: ignore[method-assign]
        generation: Any = SimpleNamespace(pieces=pieces)
        events = completions._events(generation, writer, has_usage=False)
        assert len([data async for data in events]) == 3

    asyncio.run(run())
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_answers_share_the_echo_of_their_prompt(server: Any) -> None:
    settings = {"echo": True, "logprobs": 2, "n": 2, "max_tokens": 3}
    found = server.complete(["fox", "a gene"], **settings)["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in found] == [6, 6, 9, 9]
    assert all(None not in choice["logprobs"]["token_logprobs"][1:] for choice in found)
    assert found[0]["logprobs"] == found[1]["logprobs"]


def test_an_echo_has_a_budget(server: Any) -> None:
    body = {"model": MODEL, "prompt": [5] * (MAX_MODEL_LEN - 9), "echo": True, "logprobs": 20}
    status, value = server.post("/v1/completions", body | {"n": 16, "max_tokens": 1})
    assert status == 400
    assert value["error"]["param"] == "logprobs"
    assert str(completions.MAX_ECHOED_LOGPROBS) in value["error"]["message"]
    status, _ = server.post("/v1/completions", body | {"n": 2, "max_tokens": 1})
    assert status == 200
