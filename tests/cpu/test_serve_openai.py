"""The server as OpenAI's own client sees it, with an engine whose every token is known."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from openai import BadRequestError, NotFoundError, OpenAI
from serving import GENE, KEY, MAX_MODEL_LEN, MODEL, TEXTS, Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    """OpenAI's client of the server that all tests share."""
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == MAX_MODEL_LEN
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.param == "model"


def test_a_chat_answer_whole_and_in_pieces(client):
    whole = client.chat.completions.create(model=MODEL, messages=chat("fox"))
    choice = whole.choices[0]
    assert choice.message.content == TEXTS["fox"]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    num_output = len(TEXTS["fox"]) + 1  # a token a byte, and the end token
    assert whole.usage.completion_tokens == num_output
    assert whole.usage.prompt_tokens == len("user:fox\n")
    assert whole.usage.total_tokens == num_output + len("user:fox\n")

    chunks = list(client.chat.completions.create(model=MODEL, messages=chat("fox"), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == TEXTS["fox"]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_text_is_the_whole_text(client, name):
    settings = {"model": MODEL, "prompt": name, "max_tokens": 200}
    whole = client.completions.create(**settings).choices[0]
    chunks = list(client.completions.create(**settings, stream=True))
    assert whole.text == TEXTS[name]
    assert "".join(c.choices[0].text for c in chunks) == whole.text
    assert not any("\ufffd" in c.choices[0].text for c in chunks)


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("fox", "brown fox"),
        ("fox", ["brown", "brown fox"]),
        ("fox", ["own fox jumps", "own f"]),
        ("fox", "t"),
        ("gene", GENE),
        ("gene", f"\u00e9 {GENE} d"),
        ("fox", "not there"),
    ],
)
def test_stop_strings_never_leak(client, name, stop):
    settings = {"model": MODEL, "prompt": name, "max_tokens": 200, "stop": stop}
    stops = [stop] if isinstance(stop, str) else stop
    text = TEXTS[name]
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text
    whole = client.completions.create(**settings).choices[0]
    chunks = list(client.completions.create(**settings, stream=True))
    assert whole.text == expected
    assert whole.finish_reason == "stop"
    assert "".join(c.choices[0].text for c in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_usage_in_streams_only_when_asked(client):
    # Case A11.
    settings = {"model": MODEL, "messages": chat("fox"), "stream": True}
    for options in (None, {}, {"include_usage": False}):
        more = {} if options is None else {"stream_options": options}
        chunks = list(client.chat.completions.create(**settings, **more))
        assert all(chunk.choices for chunk in chunks)
        assert all(chunk.usage is None for chunk in chunks)
    asked = {"stream_options": {"include_usage": True}, "n": 2}
    chunks = list(client.chat.completions.create(**settings, **asked))
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    whole = client.chat.completions.create(model=MODEL, messages=chat("fox"), n=2)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_cached_tokens_are_told_apart(client):
    prompt = "".join(random.choices("abcdefgh", k=200))
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0)
    second = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 192  # whole pages of 64
    assert second.usage.prompt_tokens == 200
    assert first.choices[0].text == second.choices[0].text


def test_n_answers_with_one_seed_differ_and_come_again(client):
    settings = {"model": MODEL, "prompt": "noise", "max_tokens": 12, "n": 3, "seed": 7}
    first = [c.text for c in client.completions.create(**settings).choices]
    assert first == [c.text for c in client.completions.create(**settings).choices]
    assert len(set(first)) == 3
    alone = client.completions.create(**settings | {"n": 1})
    assert alone.choices[0].text == first[0]
    unseeded = {k: v for k, v in settings.items() if k != "seed"}
    # 12 tokens of 320 nearly equal logits: two draws agree with probability below 1e-20.
    assert [c.text for c in client.completions.create(**unseeded).choices] != first


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_compute_their_prompt_once(client, server, stream):
    prompt = "noise" + "".join(random.choices("abcdefgh", k=295))
    settings = {"model": MODEL, "max_tokens": 16, "seed": 11, "temperature": 1.0}
    settings |= {"extra_body": {"ignore_eos": True}}
    before = server.metrics()
    answer = client.completions.create(**settings, prompt=prompt, n=4, stream=stream)
    texts = [""] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    server.until(lambda: server.metrics()["subten:num_requests_running"] == 0)
    after = server.metrics()
    name = "subten:iteration_tokens_total_sum"
    # 300 tokens once, 44 beyond the whole pages of 64 for each of the others, and 15 steps each.
    assert after[name] - before[name] == 300 + 3 * 44 + 4 * 15
    alone = [
        client.completions.create(**settings | {"seed": 11 + i}, prompt=prompt).choices[0].text
        for i in range(4)
    ]
    assert texts == alone
    # Bytes that are no text look alike: 2 tokens of 5 are such, but not 16 in turn.
    assert len(set(texts)) == 4


def test_several_prompts_keep_their_order(client):
    answer = client.completions.create(model=MODEL, prompt=["fox", "gene"], n=2, max_tokens=100)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == [TEXTS["fox"]] * 2 + [TEXTS["gene"]] * 2
    assert answer.usage.prompt_tokens == len("fox") + len("gene")
    ids = client.completions.create(model=MODEL, prompt=[list(b"fox")], max_tokens=100)
    assert ids.choices[0].text == TEXTS["fox"]


def test_echo(client):
    settings = {"model": MODEL, "prompt": "fox", "echo": True}
    assert client.completions.create(**settings, max_tokens=3).choices[0].text == "foxthe"
    scored = client.completions.create(**settings, max_tokens=0)
    assert scored.choices[0].text == "fox"
    assert scored.usage.completion_tokens == 0
    chunks = list(client.completions.create(**settings, max_tokens=3, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "foxthe"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_chat_logprobs(client, stream, num_top):
    settings = {"model": MODEL, "messages": chat("gene"), "logprobs": True, "n": 2}
    settings |= {"top_logprobs": num_top, "temperature": 0}
    answer = client.chat.completions.create(**settings, stream=stream)
    content: dict[int, list] = {0: [], 1: []}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            content[choice.index] += choice.logprobs.content if choice.logprobs else []
    for entries in content.values():
        assert b"".join(bytes(e.bytes) for e in entries) == (TEXTS["gene"] + "</s>").encode()
        assert all(len(e.top_logprobs) == num_top for e in entries)
        assert all(e.logprob <= 0 for e in entries)
        if num_top:
            assert all(e.top_logprobs[0].bytes == e.bytes for e in entries)


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs_whole_and_in_pieces(client, num_top, echo):
    # Case A12: among the tokens are single bytes of a character, and a stop string holds text back.
    settings = {"model": MODEL, "prompt": "gene", "max_tokens": 99, "temperature": 0, "n": 2}
    settings |= {"logprobs": num_top, "echo": echo, "stop": ["doing"]}
    whole = client.completions.create(**settings)
    chunks = list(client.completions.create(**settings, stream=True))
    for index, choice in enumerate(whole.choices):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert [c.finish_reason for c in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert choice.finish_reason == "stop"
        text = "gene" * echo + TEXTS["gene"]
        assert choice.text == "".join(c.text for c in parts) == text
        found = choice.logprobs
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces = [value for c in parts if c.logprobs for value in getattr(c.logprobs, name)]
            assert pieces == getattr(found, name), name
        # One entry for each byte, and for the token of the end.
        text_bytes = text.encode()
        assert len(found.tokens) == len(text_bytes) + 1
        starts = [len(text_bytes[:i].decode(errors="ignore")) for i in range(len(text_bytes) + 1)]
        assert found.text_offset == starts
        assert all(len(top) in (num_top, num_top + 1) for top in found.top_logprobs if top)


def test_completion_logprobs(client):
    settings = {"model": MODEL, "prompt": "fox", "max_tokens": 4, "temperature": 0, "echo": True}
    found = client.completions.create(**settings, logprobs=1).choices[0].logprobs
    assert found.tokens == [*"fox", *"the "]
    assert found.text_offset == list(range(7))
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert client.completions.create(**settings).choices[0].logprobs is None


def test_logit_bias(client):
    bias = {str(ord("z")): 100.0}
    settings = {"model": MODEL, "prompt": "fox", "max_tokens": 5, "temperature": 0}
    assert client.completions.create(**settings, logit_bias=bias).choices[0].text == "zzzzz"


def test_penalties(client):
    # Penalties of every kind are told apart by what they do to a token that another is close to.
    settings = {"model": MODEL, "prompt": "fox", "max_tokens": 6, "temperature": 0}
    settings["logit_bias"] = {str(ord("z")): 100.0, str(ord("y")): 99.0}

    def text(**more: float) -> str:
        extra = {name: more.pop(name) for name in list(more) if name == "repetition_penalty"}
        return client.completions.create(**settings, **more, extra_body=extra).choices[0].text

    assert text() == "zzzzzz"
    # 0.4 each time: y passes z after its third, and they go on in turns.
    assert text(frequency_penalty=0.4) == "zzzyzy"
    # One and a half once: z falls behind y, which falls behind z.
    assert text(presence_penalty=1.5) == "zyzzzz"
    assert text(repetition_penalty=1.1) == "zyzzzz"


def test_min_tokens_and_ignored_ends(client):
    settings = {"model": MODEL, "prompt": "fox", "max_tokens": 40, "temperature": 0}
    long = client.completions.create(**settings, extra_body={"ignore_eos": True})
    assert long.usage.completion_tokens == 40
    assert long.choices[0].finish_reason == "length"
    early = client.completions.create(**settings, stop="quick", extra_body={"min_tokens": 9})
    assert early.choices[0].text == TEXTS["fox"]


def test_a_function_call_whole_and_in_pieces(client):
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    settings = {"model": MODEL, "messages": chat("call"), "max_tokens": 200}
    plain = client.chat.completions.create(**settings).choices[0]
    assert plain.message.content == TEXTS["call"]
    assert plain.finish_reason == "stop"
    whole = client.chat.completions.create(**settings, tools=[tool]).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I add. "
    assert whole.message.tool_calls[0].function.name == "add"
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"x": 1}
    text, calls = "", []
    for chunk in client.chat.completions.create(**settings, tools=[tool], stream=True):
        text += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
    assert text == "I add. "
    assert [call.function.name for call in calls] == ["add"]
    assert chunk.choices[0].finish_reason == "tool_calls"
    none = client.chat.completions.create(**settings, tools=[tool], tool_choice="none")
    assert none.choices[0].message.content == TEXTS["call"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_parallel", [None, True, False])
def test_one_call_where_no_more_are_wanted(client, is_parallel, stream):
    tool = {"type": "function", "function": {"name": "add"}}
    settings = {"model": MODEL, "messages": chat("calls"), "tools": [tool], "stream": stream}
    if is_parallel is not None:
        settings["parallel_tool_calls"] = is_parallel
    answer = client.chat.completions.create(**settings)
    if stream:
        calls = [c for chunk in answer for c in chunk.choices[0].delta.tool_calls or []]
        assert [call.index for call in calls] == list(range(len(calls)))
    else:
        calls = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
    numbers = [json.loads(call.function.arguments)["x"] for call in calls]
    assert numbers == ([1] if is_parallel is False else [1, 2, 3])


def test_the_longest_prompt_gets_one_token(client):
    # Case A09.
    for num_tokens, is_taken in ((MAX_MODEL_LEN - 1, True), (MAX_MODEL_LEN, False)):
        settings = {"model": MODEL, "prompt": "a" * num_tokens, "max_tokens": 2**31}
        if is_taken:
            answer = client.completions.create(**settings)
            assert answer.usage.completion_tokens == 1
            assert answer.choices[0].finish_reason == "length"
            continue
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(**settings)
        assert caught.value.code == "context_length_exceeded"
        assert f"{MAX_MODEL_LEN}" in str(caught.value)
        assert f"{MAX_MODEL_LEN - 1}" in str(caught.value)


def test_tokens_there_and_back(server):
    status, value = server.post("/tokenize", {"model": MODEL, "prompt": TEXTS["gene"]})
    assert status == 200
    assert value["tokens"] == list(TEXTS["gene"].encode())
    assert value["count"] == len(value["tokens"])
    assert server.post("/detokenize", {"tokens": value["tokens"]})[1]["prompt"] == TEXTS["gene"]
    chat_ids = server.post("/tokenize", {"messages": chat("fox")})[1]["tokens"]
    assert bytes(chat_ids) == b"user:fox\n"


def test_template_variables(server):
    body = {"model": MODEL, "messages": chat("x"), "max_tokens": 1}
    plain = server.post("/v1/chat/completions", body)[1]
    moody = server.post("/v1/chat/completions", body | {"chat_template_kwargs": {"mood": "glad"}})[
        1
    ]
    assert moody["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + len("glad\n")
    for name in ("tokenize", "messages", "bos_token", "chat_template", "__class__"):
        status, value = server.post(
            "/v1/chat/completions", body | {"chat_template_kwargs": {name: True}}
        )
        assert status == 400
        assert value["error"]["param"] == f"chat_template_kwargs.{name}"


def test_metrics_count_each_end_once(server):
    before = server.metrics()
    server.complete("fox", max_tokens=100)
    server.complete("fox", max_tokens=3, n=2)
    after = server.metrics()

    def grown(name: str) -> float:
        return after[name] - before[name]

    ends = {
        reason: grown(f'subten:request_success_total{{finished_reason="{reason}"}}')
        for reason in ("stop", "length", "cancelled", "error", "rejected")
    }
    assert ends == {"stop": 1, "length": 2, "cancelled": 0, "error": 0, "rejected": 0}
    assert grown("subten:request_accepted_total") == 3
    assert grown("subten:generation_tokens_total") == len(TEXTS["fox"]) + 1 + 6
    assert grown("subten:prompt_tokens_total") == 6
    assert grown("subten:time_to_first_token_seconds_count") == 3
    assert grown("subten:inter_token_latency_seconds_count") == len(TEXTS["fox"]) + 4
    assert grown("subten:iteration_tokens_total_sum") == len(TEXTS["fox"]) + 3 + 2 * (3 + 2)
    # Counts of the engine itself come at most 0.1 s later.
    server.until(lambda: server.metrics()["subten:num_requests_running"] == 0)
    final = server.metrics()
    pages = [final[f'subten:kv_pages{{state="{s}"}}'] for s in ("free", "cached", "used")]
    assert sum(pages) == 64
    assert pages[2] == 0
    assert final["subten:engine_ready"] == 1
    assert final['subten:kv_true_bits{kv_cache_dtype="bf16"}'] > 0
    assert any(name.startswith("subten:kv_pages_by_fidelity{") for name in final)
    names = ("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total")
    assert all(f"subten:{name}" in final for name in names)


def test_responses_whole_and_in_pieces(client):
    whole = client.responses.create(model=MODEL, input="fox")
    assert whole.output_text == TEXTS["fox"]
    assert whole.status == "completed"
    assert whole.usage.output_tokens == len(TEXTS["fox"]) + 1
    assert whole.usage.input_tokens == len("user:fox\n")
    events = list(client.responses.create(model=MODEL, input="fox", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXTS["fox"]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == TEXTS["fox"]
    cut = client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "fox"}]}],
        max_output_tokens=16,
        temperature=0,
    )
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage.input_tokens == len("system:Be brief.\nuser:fox\n")
    for odd in ({"store": True}, {"previous_response_id": "resp_1"}, {"input": ""}):
        with pytest.raises(BadRequestError):
            client.responses.create(**{"model": MODEL, "input": "fox"} | odd)


def test_a_response_goes_on_from_an_earlier_one(client):
    first = client.responses.create(model=MODEL, input="fox")
    told = [{"role": "user", "content": "fox"}, *first.output, {"role": "user", "content": "fox"}]
    second = client.responses.create(model=MODEL, input=told, max_output_tokens=1)
    text = f"user:fox\nassistant:{TEXTS['fox']}\nuser:fox\n"
    assert second.usage.input_tokens == len(text)
    part = {"type": "output_text", "text": "a", "annotations": [{"type": "url_citation"}]}
    with pytest.raises(BadRequestError) as caught:
        # What cannot be given to the model is not dropped.
        client.responses.create(model=MODEL, input=[{"role": "assistant", "content": [part]}])
    assert caught.value.param == "input.0.content.0.annotations"


def test_the_log_has_no_prompt(server):
    secret = "".join(random.choices("qxzjkvw", k=30))
    server.post("/v1/completions", {"model": MODEL, "prompt": secret, "max_tokens": 2})
    server.post("/v1/completions", {"model": MODEL, "prompt": [secret], "max_tokens": -1})
    server.post("/v1/chat/completions", {"model": MODEL, "messages": chat(secret), "max_tokens": 2})
    server.until(lambda: len(server.logged("request")) >= 3)
    assert secret not in json.dumps(server.lines)
