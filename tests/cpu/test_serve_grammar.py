"""Answers that must follow a schema, an expression or a grammar, whatever the model would say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from openai import APIError, BadRequestError, OpenAI
from serving import GENE, KEY, MODEL, TEXTS, Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    """OpenAI's client of the server that all tests share."""
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "is_big": {"type": "boolean"}},
    "required": ["kind", "is_big"],
    "additionalProperties": False,
}


def check_schema(text: str) -> None:
    value = json.loads(text)
    assert value["kind"] in ("cat", "dog")
    assert isinstance(value["is_big"], bool)
    assert len(value) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_followed_by_a_model_of_noise(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    settings = {"model": MODEL, "messages": chat("a pet"), "max_tokens": 900, "temperature": 5}
    settings |= {"response_format": form, "stream": stream}
    answer = client.chat.completions.create(**settings)
    if stream:
        chunks = list(answer)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    check_schema(text)
    assert finish == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "b"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_can_be_forced(client, choice, stream):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "ab"
    ]
    settings = {"model": MODEL, "messages": chat("call"), "max_tokens": 900, "temperature": 5}
    settings |= {"tools": tools, "tool_choice": choice, "stream": stream}
    answer = client.chat.completions.create(**settings)
    if stream:
        calls = [c for chunk in answer for c in chunk.choices[0].delta.tool_calls or []]
    else:
        calls = answer.choices[0].message.tool_calls
        assert answer.choices[0].message.content is None
        assert answer.choices[0].finish_reason == "tool_calls"
    assert len(calls) == 1
    assert calls[0].function.name in ("ab" if choice == "required" else "b")
    check_schema(calls[0].function.arguments)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_strict", [None, False, True])
def test_strict_functions_are_called_by_their_schema(client, is_strict, stream):
    # The model of its own will calls add with the number 1, and says how it comes to that.
    parameters = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    parameters["additionalProperties"] = False
    function = {"name": "add", "parameters": parameters}
    if is_strict is not None:
        function["strict"] = is_strict
    other = {"type": "function", "function": {"name": "other"}}
    settings = {"model": MODEL, "messages": chat("call"), "max_tokens": 900, "stream": stream}
    settings["tools"] = [{"type": "function", "function": function}, other]
    answer = client.chat.completions.create(**settings)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        text = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or []]
    else:
        text, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls
    assert text.startswith("I add. ")
    assert calls, text
    assert calls[0].function.name == "add"
    given = json.loads(calls[0].function.arguments)
    assert given.keys() == {"x"}
    assert given["x"] in (("a", "b") if is_strict else (1,))


def test_text_beside_strict_functions_is_free(client):
    function = {"name": "add", "strict": True, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    for name in ("fox", "gene", "calls"):
        answer = client.chat.completions.create(model=MODEL, messages=chat(name), tools=tools)
        message = answer.choices[0].message
        assert (message.content or "") == ("" if name == "calls" else TEXTS[name])
        assert len(message.tool_calls or ()) == (3 if name == "calls" else 0)
    odd = [{"type": "function", "function": function | {"parameters": {"type": "wizard"}}}]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=chat("fox"), tools=odd)
    assert caught.value.param == "tools"
    # One that is not called needs no schema that can be followed.
    settings = {"messages": chat("fox"), "tools": odd, "tool_choice": "none"}
    assert client.chat.completions.create(model=MODEL, **settings).choices[0].message.content


def test_a_json_object_can_be_asked_for(client):
    settings = {"model": MODEL, "messages": chat("fox"), "response_format": {"type": "json_object"}}
    # The model would write its sentence; what it may write instead begins an object.
    answer = client.chat.completions.create(**settings, max_tokens=3, temperature=0)
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "wizard"},
        {"$ref": "#"},
        {"$ref": "http://localhost/x"},
        {"type": "string", "pattern": "["},
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"enum": ["x" * 70_000]},
        json.loads('{"items":' * 40 + "{}" + "}" * 40),
        # Takes minutes to try.
        {"allOf": [{"type": "string", "pattern": f"(a|b|c){{{i}}}x.*"} for i in range(40)]},
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_schemas_that_cannot_be_followed(client, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    settings = {"model": MODEL, "messages": chat("fox"), "response_format": form}
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**settings)
    assert caught.value.param == "response_format.json_schema.schema"


CHOICES = ["a/b", 'c"d\\', f"e\nf {GENE}", "a", "%ignore", "\x7f\x80\u2028"]


@pytest.mark.parametrize(
    ("asked", "is_followed"),
    [
        ({"regex": r"(ab|c){3}[0-9]{2}/x"}, re.compile(r"(ab|c){3}[0-9]{2}/x").fullmatch),
        (
            {"grammar": 'start: "<" word+ ">"\nword: /[xy]{2}/'},
            re.compile("<([xy]{2})+>").fullmatch,
        ),
        ({"choice": CHOICES}, CHOICES.__contains__),
        ({"json": {"enum": [1, "b"]}}, ("1", '"b"').__contains__),
    ],
    ids=["regex", "grammar", "choice", "json"],
)
def test_grammars_are_followed_by_a_model_of_noise(client, asked, is_followed):
    settings = {"model": MODEL, "max_tokens": 900, "temperature": 5, "n": 3}
    settings |= {"extra_body": {"structured_outputs": asked}}
    whole = client.completions.create(prompt="noise", **settings)
    talk = client.chat.completions.create(messages=chat("noise"), **settings)
    texts = [c.text for c in whole.choices] + [c.message.content for c in talk.choices]
    assert all(is_followed(text) for text in texts), texts
    assert {c.finish_reason for c in (*whole.choices, *talk.choices)} == {"stop"}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"regex": ""},
        {"regex": "["},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"regex": "a" * 70_000},
        {"grammar": ""},
        {"grammar": 'root ::= "a"'},
        {"grammar": "start: missing"},
        {"grammar": "start: start"},
        {"choice": []},
        {"choice": [""]},
        {"choice": [1]},
        {"json": {"type": "wizard"}},
        {"json": "{}"},
        {"json_object": False},
        # Takes longer than anyone waits.
        {"grammar": "start: A\nA: " + " & ".join(f"/.*(a|b|c){{{i}}}x.*/" for i in range(40))},
    ],
    ids=lambda asked: str(asked)[:30],
)
def test_grammars_that_cannot_be_followed(client, asked):
    settings = {"model": MODEL, "extra_body": {"structured_outputs": asked}, "max_tokens": 3}
    for create, said in (
        (client.completions.create, {"prompt": "fox"}),
        (client.chat.completions.create, {"messages": chat("fox")}),
    ):
        with pytest.raises(BadRequestError) as caught:
            create(**settings, **said)
        assert caught.value.param.split(".")[0] == "structured_outputs"


def test_one_grammar_at_a_time(client):
    settings = {"model": MODEL, "messages": chat("fox")}
    settings |= {"extra_body": {"structured_outputs": {"regex": "a"}}}
    tool = {"type": "function", "function": {"name": "add"}}
    for other in (
        {"response_format": {"type": "json_object"}},
        {"tools": [tool], "tool_choice": "required"},
    ):
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(**settings, **other)
        assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_grammar_is_complete_ends_before_min_tokens(client, stream):
    asked = {"min_tokens": 10, "structured_outputs": {"choice": ["yes", "no"]}}
    settings = {"model": MODEL, "prompt": "hi", "extra_body": asked, "stream": stream}
    answer = client.completions.create(**settings)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) in ("yes", "no")
    assert choices[-1].finish_reason == "stop"


LATE = "|".join(f"[a-z]{{1,{i}}}{i}" for i in range(1, 300))
"""Can be begun, and then needs more than it may have."""


STOPPED = {"min_tokens": 5, "stop_token_ids": [ord("x")]}
CONST = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "axb"}}}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"structured_outputs": {"regex": LATE}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["xyz"]}} | STOPPED, "structured_outputs.choice"),
        ({"response_format": CONST} | STOPPED, "response_format.json_schema.schema"),
    ],
    ids=["limits", "stop tokens", "stop tokens later"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_on_its_way_is_the_requests_error(client, asked, param, stream):
    def ask() -> None:
        settings = {"model": MODEL, "messages": chat("hi"), "max_tokens": 200}
        list(client.chat.completions.create(**settings, extra_body=asked, stream=stream))

    # A stream that has begun ends with the error as an event, which has no status.
    with pytest.raises(APIError) as caught:
        ask()
    assert caught.value.body["param"] == param
    assert caught.value.body["type"] == "invalid_request_error"
    assert caught.value.body["message"].startswith(f"{param}: cannot be followed: ")
    assert getattr(caught.value, "status_code", 400) == 400
    assert stream or caught.type is BadRequestError
