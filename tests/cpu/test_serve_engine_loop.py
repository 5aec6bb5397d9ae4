"""The engine's loop with a device that fails: it ends, so that another engine can begin anew."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from scripted import ScriptedModel, byte_tokenizer, fake_loaded

from subten import device
from subten.config import EngineConfig
from subten.core import FinishReason, SamplingParams
from subten.engine.llm import LLM
from subten.serve import engine_loop, engine_process, ipc
from subten.serve.channel import ServerGoneError
from subten.serve.engine_loop import MAX_FAILED_STEPS, EngineLoop

FAULT = "CUDA error: an illegal memory access was encountered"


class OneByOne:
    """A server that sends a request when the one before has ended, and goes after the last."""

    def __init__(self, model: ScriptedModel, plan: str) -> None:
        self._model = model
        self._plan = list(plan)
        self._num_sent = 0
        self._is_busy = False
        self.is_over = threading.Event()
        self.reasons: list[FinishReason] = []

    def receive(self, _timeout_s: float) -> list[ipc.ToEngine]:
        if self._is_busy:
            return []
        if not self._plan:
            raise ServerGoneError
        self._model.error = RuntimeError(FAULT) if self._plan.pop(0) == "x" else None
        self._is_busy = True
        self._num_sent += 1
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        name = str(self._num_sent)
        return [ipc.Submit(request_id=name, token_ids=[65], sampling=sampling, seed=0)]

    def send(self, message: ipc.FromEngine) -> None:
        for item in message.items if isinstance(message, ipc.Tokens) else ():
            if item.finish_reason is not None:
                self.reasons.append(item.finish_reason)
                self._is_busy = False

    def wake(self) -> None:
        """There is no grammar."""

    def wait_closed(self, timeout_s: float) -> bool:
        return self.is_over.wait(timeout_s)


def serve(plan: str) -> tuple[OneByOne, BaseException]:
    """Requests whose steps fail (x) or do not (.), and what ended the loop."""
    model = ScriptedModel()
    loaded = fake_loaded(model, tokenizer=byte_tokenizer())
    llm = LLM(loaded, dtype="float32", num_pages=8, max_num_seqs=2, max_model_len=64)
    channel: Any = OneByOne(model, plan)
    with pytest.raises((ServerGoneError, RuntimeError)) as caught:
        EngineLoop(channel, llm).run()
    channel.is_over.set()
    return channel, caught.value


def test_steps_that_fail_one_after_another_end_the_loop():
    channel, error = serve("x" * (MAX_FAILED_STEPS + 5))
    assert str(error) == FAULT
    # The last one has no end of the loop's; its server hears that the engine ended.
    assert channel.reasons == [FinishReason.ERROR] * (MAX_FAILED_STEPS - 1)


def test_a_step_between_that_computes_lets_it_go_on():
    channel, error = serve("xx.xx.x.xx")
    assert isinstance(error, ServerGoneError)
    assert channel.reasons.count(FinishReason.ERROR) == 7
    assert channel.reasons.count(FinishReason.LENGTH) == 3


def test_a_lost_device_ends_the_loop_at_once(monkeypatch):
    monkeypatch.setattr(engine_loop, "is_lost", lambda _device: True)
    channel, error = serve("..x....")
    assert str(error) == FAULT
    assert channel.reasons == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize(("error", "code"), [(None, 0), (RuntimeError(FAULT), 1)])
def test_the_process_ends_without_the_libraries_own_end(monkeypatch, caplog, error, code):
    def serve(*_args: Any) -> None:
        if error is not None:
            raise error

    def end(code: int) -> None:
        raise SystemExit(code)

    start = ipc.Start(model="x", config=EngineConfig(device="cpu"))
    monkeypatch.setattr(engine_process, "first_message", lambda _channel: start)
    for name in ("channel_from_arguments", "_source", "_check", "_measure_roof", "_load"):
        monkeypatch.setattr(engine_process, name, lambda *_args: None)
    monkeypatch.setattr(engine_process, "serve", serve)
    monkeypatch.setattr(engine_process.logging, "shutdown", lambda: None)
    monkeypatch.setattr(engine_process.os, "_exit", end)
    with pytest.raises(SystemExit) as caught:
        engine_process.main()
    assert caught.value.code == code
    assert caplog.messages == ["the engine ends"] * code


@pytest.mark.parametrize("error", [None, RuntimeError(FAULT), torch.AcceleratorError(FAULT)])
def test_a_lost_gpu_is_one_that_fails_when_asked(monkeypatch, error):
    def synchronize(_device: torch.device) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert device.is_lost(torch.device("cuda", 0)) == (error is not None)
    assert not device.is_lost(torch.device("cpu"))
