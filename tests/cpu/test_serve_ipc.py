"""Messages between server and engine: whatever arrives is a message or a typed error."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

pytest.importorskip("msgspec")

import msgspec
from scripted import ScriptedModel, byte_tokenizer, fake_loaded

from subten.core import ErrorCause, FinishReason, SamplingParams, TokenLogprobs
from subten.engine.llm import LLM
from subten.serve import ipc
from subten.serve.channel import Channel
from subten.serve.engine_process import serve

SUBMIT = ipc.Submit(
    request_id="7",
    token_ids=[1, 2, 3],
    sampling=SamplingParams(stop=("a",), logit_bias={3: -1.5}, logprobs=2, max_tokens=4),
    seed=2**63 - 1,
    tenant="t",
    grammar="{}",
)
TOKEN = ipc.TokenOut(
    request_id="7",
    token_id=5,
    finish_reason=FinishReason.STOP,
    error_cause=ErrorCause.MASK,
    logprobs=TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, float("-inf")))),
)


def payload(message: object) -> bytes:
    return ipc.pack(message)[4:]


def test_messages_come_back_as_they_were():
    assert ipc.read_to_engine(payload(SUBMIT)) == SUBMIT
    tokens = ipc.Tokens(num_computed=3, items=[TOKEN])
    assert ipc.read_from_engine(payload(tokens)) == tokens


def test_a_value_that_no_request_may_have_is_refused_on_the_way_in():
    odd = payload(ipc.Cancel(request_ids=["7"])).replace(b"cancel", b"submit")
    with pytest.raises(ipc.IpcError):
        ipc.read_to_engine(odd)
    hot = payload(SUBMIT).replace(
        msgspec.msgpack.encode({"temperature": 1.0})[1:],
        msgspec.msgpack.encode({"temperature": float("nan")})[1:],
    )
    assert hot != payload(SUBMIT)
    with pytest.raises(ipc.IpcError, match="temperature"):
        ipc.read_to_engine(hot)


def test_frames_may_come_in_any_pieces():
    rng = random.Random()
    payloads = [rng.randbytes(rng.choice([0, 1, 5, 1000])) for _ in range(50)]
    stream = b"".join(len(p).to_bytes(4, "little") + p for p in payloads)
    for _ in range(20):
        reader, found, rest = ipc.FrameReader(1000), [], stream
        while rest:
            size = rng.choice([1, 2, 3, 7, 500, 5000])
            found += reader.feed(rest[:size])
            rest = rest[size:]
        assert found == payloads


def test_a_frame_that_is_too_long_is_skipped():
    long = (1001).to_bytes(4, "little") + b"x" * 1001
    good = (2).to_bytes(4, "little") + b"ok"
    for size in (1, 3, 997, 5000):
        stream, found = long + good + long + good, []
        reader = ipc.FrameReader(1000)
        for start in range(0, len(stream), size):
            found += reader.feed(stream[start : start + size])
        assert [isinstance(f, ipc.IpcError) for f in found] == [True, False, True, False]
        assert found[1] == found[3] == b"ok"


def test_random_payloads_are_typed_errors():
    rng = random.Random()
    seeds = [payload(SUBMIT), payload(ipc.Cancel(request_ids=["1"])), b""]
    num_errors = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(seeds) or rng.randbytes(rng.randrange(40)))
        for _ in range(rng.randrange(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        for read in (ipc.read_to_engine, ipc.read_from_engine):
            try:
                read(bytes(data))
            except ipc.IpcError:
                num_errors += 1
    assert num_errors > 20_000


@pytest.fixture
def engine():
    """The server's end of a socket whose other end an engine serves in a thread."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    llm = LLM(
        fake_loaded(ScriptedModel(), tokenizer=byte_tokenizer()), dtype="float32", num_pages=8
    )
    thread = threading.Thread(target=serve, args=(Channel(theirs), llm), daemon=True)
    thread.start()
    yield ours, llm
    ours.close()
    thread.join(20)
    assert not thread.is_alive(), "the engine goes on without its server"
    theirs.close()


def receive(sock: socket.socket, reader: ipc.FrameReader, kind: type) -> list:
    """All messages up to the first of a kind."""
    found: list = []
    while True:
        for frame in reader.feed(sock.recv(65536)):
            found.append(ipc.read_from_engine(frame))
        if any(isinstance(message, kind) for message in found):
            return found


def test_the_engine_outlives_random_frames(engine):
    sock, _ = engine
    reader = ipc.FrameReader(ipc.FROM_ENGINE_BYTES)
    receive(sock, reader, ipc.Ready)
    rng = random.Random()
    for _ in range(300):
        data = rng.randbytes(rng.randrange(60))
        sock.sendall(len(data).to_bytes(4, "little") + data)
    request = ipc.Submit(
        request_id="1", token_ids=[5], sampling=SamplingParams(max_tokens=3), seed=0
    )
    sock.sendall(ipc.pack(request))
    messages = receive(sock, reader, ipc.Tokens)
    while sum(len(m.items) for m in messages if isinstance(m, ipc.Tokens)) < 3:
        messages += receive(sock, reader, ipc.Tokens)
    tokens = [item for m in messages if isinstance(m, ipc.Tokens) for item in m.items]
    assert [t.finish_reason for t in tokens] == [None, None, FinishReason.LENGTH]


def test_what_can_never_be_served_is_refused(engine):
    sock, _ = engine
    reader = ipc.FrameReader(ipc.FROM_ENGINE_BYTES)
    receive(sock, reader, ipc.Ready)
    request = ipc.Submit(
        request_id="1", token_ids=[5] * 600, sampling=SamplingParams(max_tokens=3), seed=0
    )
    sock.sendall(ipc.pack(request))
    refused = receive(sock, reader, ipc.Refused)[-1]
    assert refused.request_id == "1"
    assert "512" in refused.message


def test_a_server_that_does_not_read_delays_no_step(engine):
    sock, llm = engine
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader = ipc.FrameReader(ipc.FROM_ENGINE_BYTES)
    receive(sock, reader, ipc.Ready)
    for number in range(4):
        request = ipc.Submit(
            request_id=str(number),
            token_ids=[5],
            sampling=SamplingParams(max_tokens=100, ignore_eos=True, logprobs=20),
            seed=0,
        )
        sock.sendall(ipc.pack(request))
    end_s = time.monotonic() + 60
    while llm.engine.stats.num_ended.total() < 4 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert llm.engine.stats.num_ended[FinishReason.LENGTH] == 4
    tokens: list[ipc.TokenOut] = []
    while len(tokens) < 400:
        for message in receive(sock, reader, ipc.Tokens):
            if isinstance(message, ipc.Tokens):
                tokens += message.items
    assert len(tokens) == 400
