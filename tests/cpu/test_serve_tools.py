"""Calls of functions in the forms that models write: found in texts, streamed, forced, strict."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from openai import OpenAI
from scripted import byte_tokenizer
from serving import KEY, MODEL, Server
from tokenizers import AddedToken

from subten.serve import tool_calls
from subten.serve.grammar import Grammar, GrammarChecker, of_call, of_strict_calls
from subten.serve.masks import byte_tokenizer as grammar_tokenizer
from subten.serve.masks import make_tokenizer, new_matcher
from subten.serve.protocol import NamedTool, ToolSpec
from subten.serve.tool_calls import FORMS, ToolCallReader, form_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARK, TAG = "[TOOL_CALLS]", "<|python_tag|>"
CALL = '{"name": "add", "arguments": {"x": 1}}'
LLAMA = '{"name": "add", "parameters": {"x": 1}}'

CASES = [
    ("hermes", "plain", "plain", 0),
    ("hermes", f"a{OPEN}{CALL}{CLOSE}b", "ab", 1),
    ("hermes", f"{OPEN}{CALL}{CLOSE}{OPEN}\n{CALL}\n{CLOSE}", "", 2),
    ("hermes", f"{OPEN}[{CALL},\n{CALL}]{CLOSE}", "", 2),
    ("hermes", f"{OPEN}{CALL}", "", 1),
    ("hermes", f"{OPEN}not json{CLOSE}", f"{OPEN}not json{CLOSE}", 0),
    ("hermes", f"{OPEN}[1]{CLOSE}", f"{OPEN}[1]{CLOSE}", 0),
    ("hermes", f"{OPEN}[{CALL}, 1]{CLOSE}", f"{OPEN}[{CALL}, 1]{CLOSE}", 0),
    ("hermes", f"{OPEN}{CLOSE}", f"{OPEN}{CLOSE}", 0),
    ("hermes", '<tool_call{"a"', '<tool_call{"a"', 0),
    ("hermes", f"a{CLOSE}", f"a{CLOSE}", 0),
    ("hermes", f"{OPEN}{'[' * 5000}{CLOSE}", f"{OPEN}{'[' * 5000}{CLOSE}", 0),
    ("hermes", "a<", "a<", 0),
    ("hermes", f"a {MARK}[{CALL}]", f"a {MARK}[{CALL}]", 0),
    ("mistral", "plain", "plain", 0),
    ("mistral", f"a{MARK} [{CALL}]", "a", 1),
    ("mistral", f"{MARK}[{CALL}, {CALL}]", "", 2),
    ("mistral", f'{MARK}add[ARGS]{{"x": 1}}', "", 1),
    ("mistral", f'{MARK}add[CALL_ID]a1b2c3d4e[ARGS]{{"x": 1}}{MARK}add{{"x": 1}}', "", 2),
    ("mistral", f"{MARK} [{CALL}] and so on", f"{MARK} [{CALL}] and so on", 0),
    ("mistral", f'{MARK}add[ARGS]{{"x": ', f'{MARK}add[ARGS]{{"x": ', 0),
    ("mistral", f'{MARK}add[ARGS]{{"x": 1}} no', f'{MARK}add[ARGS]{{"x": 1}} no', 0),
    ("mistral", f"{MARK}{MARK}[{CALL}]", MARK, 1),
    ("mistral", "a[TOOL_CALLS", "a[TOOL_CALLS", 0),
    ("llama3_json", "plain", "plain", 0),
    ("llama3_json", LLAMA, "", 1),
    ("llama3_json", f"\n {LLAMA}; {LLAMA}\n{LLAMA}", "", 3),
    ("llama3_json", f"{TAG}{LLAMA}", "", 1),
    ("llama3_json", f"Well. {TAG}{LLAMA};{LLAMA}", "Well. ", 2),
    ("llama3_json", f"Well: {LLAMA}", f"Well: {LLAMA}", 0),
    ("llama3_json", f"{TAG}print(1)", f"{TAG}print(1)", 0),
    ("llama3_json", '{"color": "red"}', '{"color": "red"}', 0),
    ("llama3_json", '{"name": "Ada", "age": 9}', '{"name": "Ada", "age": 9}', 0),
    ("llama3_json", f"{LLAMA} and so on", f"{LLAMA} and so on", 0),
    ("llama3_json", "  ", "  ", 0),
    ("llama3_json", f'{{"note": "{"x" * 220}", {LLAMA[1:]}', None, 0),
    ("llama3_json", f"{{{' ' * 220}{LLAMA[1:]}", "", 1),
    ("llama3_json", f'{{"note": 1, {LLAMA[1:]}{TAG}{LLAMA}', f'{{"note": 1, {LLAMA[1:]}', 1),
]


def read(form: str, text: str, size: int) -> tuple[str, list[Any]]:
    """Text and calls of a text that comes in random pieces of up to `size`."""
    rng = random.Random()
    reader, shown, calls = ToolCallReader(FORMS[form]), "", []
    while text:
        length = rng.randint(1, size)
        found = reader.push(text[:length])
        text = text[length:]
        shown += found.text
        calls += found.calls
    found = reader.flush()
    return shown + found.text, calls + found.calls


@pytest.mark.parametrize(("form", "text", "shown", "num_calls"), CASES)
def test_calls_are_found_however_the_text_is_split(form, text, shown, num_calls):
    for size in (1, 2, 7, 10_000):
        found_text, calls = read(form, text, size)
        assert found_text == (text if shown is None else shown)
        assert [call.name for call in calls] == ["add"] * num_calls
        assert all(json.loads(call.arguments) == {"x": 1} for call in calls)


PARTS = [
    *(OPEN, CLOSE, MARK, TAG, CALL, LLAMA, f"[{CALL}]", "[ARGS]", "[CALL_ID]abc", "add", ";", " "),
    *("\n", "text", "<", "</", "<tool_", "[", "{", '"', "}", '{"x": 1}', '{"a": 1}', "x" * 30),
    '{"type": "function", "name": "add", "parameters": {"x": 1}}',
    f'{{"note": 1, {LLAMA[1:]}',
    *(OPEN, CLOSE, MARK, TAG, CALL.replace("1", "1" * 100)) * 3,
]


@pytest.mark.parametrize("form", FORMS)
def test_random_texts_are_read_alike_whole_and_in_pieces(form, monkeypatch):
    # Short enough that some of them are too long for a call.
    monkeypatch.setattr(tool_calls, "MAX_CALL_CHARS", 100)
    rng = random.Random()
    for _ in range(3000):
        text = "".join(rng.choices(PARTS, k=rng.randrange(1, 9)))
        whole = ToolCallReader(FORMS[form])
        found, rest = whole.push(text), whole.flush()
        expected = found.text + rest.text, found.calls + rest.calls
        assert read(form, text, rng.choice((1, 3, 20))) == expected, text


@pytest.mark.parametrize(
    ("value", "is_call"), [("NaN", False), ("-Infinity", False), ("1e999", False), ("1e9", True)]
)
def test_arguments_are_json_that_every_client_reads(value, is_call):
    text = f'{OPEN}{{"name": "add", "arguments": {{"x": {value}}}}}{CLOSE}'
    shown, calls = read("hermes", text, 7)
    assert (shown == "") == is_call == bool(calls)


def test_half_a_surrogate_pair_stays_an_escape():
    _, calls = read("hermes", f'{OPEN}{{"name": "f", "arguments": {{"x": "\\ud800"}}}}{CLOSE}', 7)
    calls[0].arguments.encode()
    assert json.loads(calls[0].arguments) == {"x": "\ud800"}
    text = f'{OPEN}{{"name": "\\ud800", "arguments": {{}}}}{CLOSE}'
    assert read("hermes", text, 7) == (text, [])


@pytest.mark.parametrize("form", FORMS)
def test_hostile_text_takes_linear_time(form):
    mark = FORMS[form].open
    piece = (mark[:-1] + "<") * 200
    times = []
    for num_pieces in (20, 80):
        reader = ToolCallReader(FORMS[form])
        began_s = time.process_time()
        reader.push('{"name')
        for _ in range(num_pieces):
            reader.push(piece)
        reader.push(mark)
        for _ in range(num_pieces):
            reader.push(piece)
        times.append(time.process_time() - began_s)
    # Four times the text: quadratic time would be sixteen times as much.
    assert times[1] < 10 * max(times[0], 0.005), times


def test_json_that_is_no_call_is_not_held_back():
    reader = ToolCallReader(FORMS["llama3_json"])
    assert reader.push('{"co').text == ""
    assert reader.push('lor": ').text == '{"color": '
    assert reader.push('"red"').text == '"red"'


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tools></tools> <tool_call></tool_call>{% endif %}", "hermes"),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|start_header_id|>ipython<|end_header_id|>' }}", "llama3_json"),
        ("{{ messages }}", "hermes"),
        (None, "hermes"),
    ],
)
def test_a_template_tells_the_form(template, form):
    assert form_of("auto", template) is FORMS[form]
    assert form_of("mistral", template) is FORMS["mistral"]
    assert form_of("none", template) is None


def test_ids_are_as_templates_want_them():
    for form in FORMS.values():
        ids = {form.new_id() for _ in range(50)}
        assert len(ids) == 50
        assert all(re.fullmatch(r"[A-Za-z0-9-]{9,40}", call_id) for call_id in ids)
    # Mistral's raise an exception for any other.
    assert re.fullmatch(r"[A-Za-z0-9]{9}", FORMS["mistral"].new_id())


def test_special_marks_are_those_of_the_tokenizer():
    tokenizer = byte_tokenizer(special=(MARK, "[INST]"))
    [(token_id, text)] = FORMS["mistral"].special_marks(tokenizer).items()
    assert text == MARK
    assert tokenizer.encode_part(MARK) == [token_id]
    assert FORMS["hermes"].special_marks(tokenizer) == {}
    # Qwen3 has Hermes' marks as tokens that are text.
    tokenizer.backend.add_tokens([AddedToken(OPEN, special=False, normalized=False)])
    assert FORMS["hermes"].special_marks(tokenizer) == {}


BYTES = 256
STRICT = ToolSpec.model_validate(
    {
        "type": "function",
        "function": {
            "name": "add",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"x": {"enum": ["a", "b"]}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
)


def strict_grammar(form: str, special: dict[str, int]) -> Grammar:
    marks = {token_id: name for name, token_id in special.items() if name != "</s>"}
    grammar = of_strict_calls([STRICT], FORMS[form], marks)
    assert grammar is not None
    return grammar


def follows(form: str, special: dict[str, int], parts: list[str]) -> bool:
    """Whether a strict grammar takes an answer whose special tokens are parts of their own."""
    names = sorted(special, key=special.__getitem__)
    tokens = [*(bytes([byte]) for byte in range(BYTES)), *(name.encode() for name in names)]
    ids = list(range(BYTES, len(tokens)))
    tokenizer = make_tokenizer(
        tokens,
        lambda text: list(text.encode()),
        end_ids=[special["</s>"]],
        special_ids=ids,
        vocab_size=len(tokens),
    )
    matcher = new_matcher(tokenizer, strict_grammar(form, special).text)
    for part in [*parts, "</s>"]:
        for token_id in [special[part]] if part in special else list(part.encode()):
            matcher.compute_bitmask()
            if not matcher.consume_token(token_id):
                return False
    return True


async def is_taken_by_the_checker(grammar: Grammar) -> bool:
    checker = GrammarChecker()
    try:
        return await checker.check(grammar) == grammar.text
    finally:
        await checker.close()


@pytest.mark.parametrize(
    ("form", "marks", "call"),
    [
        ("hermes", [], [OPEN + '{"name": "add", "arguments": {"x": "Q"}}' + CLOSE]),
        ("hermes", [OPEN, CLOSE], [OPEN, '\n{"name": "add", "arguments": {"x": "Q"}}\n', CLOSE]),
        ("mistral", [MARK], [MARK, ' [{"name": "add", "arguments": {"x": "Q"}}]']),
        ("mistral", [MARK, "[ARGS]"], [MARK, "add", "[ARGS]", '{"x": "Q"}']),
        ("llama3_json", [], ['{"name": "add", "parameters": {"x": "Q"}}']),
        ("llama3_json", [TAG], [TAG, '{"name": "add", "parameters": {"x": "Q"}}']),
    ],
)
def test_strict_grammars_take_a_form_and_its_arguments_alone(form, marks, call):
    special = {name: BYTES + index for index, name in enumerate(["</s>", *marks])}

    def takes(value: str) -> bool:
        return follows(form, special, [part.replace("Q", value) for part in call])

    # A process that knows bytes alone has to take it, too.
    assert asyncio.run(is_taken_by_the_checker(strict_grammar(form, special)))
    assert takes("a")
    assert takes("b")
    assert not takes("c")
    assert follows(form, special, ["just text, {and} [more]"])
    assert follows(form, special, [])


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
POINT |= {"additionalProperties": False}
LOCAL_REFS = {
    "$defs": ({"p": {"$ref": "#/$defs/P"}}, {"$defs": {"P": POINT}}),
    "definitions": ({"p": {"$ref": "#/definitions/P"}}, {"definitions": {"P": POINT}}),
    "chain": (
        {"p": {"anyOf": [{"$ref": "#/$defs/Q"}]}},
        {"$defs": {"P": POINT, "Q": {"$ref": "#/$defs/P"}}},
    ),
    "property": ({"p": {"$ref": "#/properties/q"}, "q": POINT}, {}),
    "escaped": ({"p": {"$ref": "#/$defs/a%20~1b"}}, {"$defs": {"a /b": POINT}}),
    "anchor": ({"p": {"$ref": "#P"}}, {"$defs": {"P": POINT | {"$anchor": "P"}}}),
    "$id": ({"p": {"$ref": "#/$defs/P"}}, {"$defs": {"P": POINT}, "$id": "https://x.example/y"}),
    "named as keys": (
        {
            "p": {"$ref": "#/$defs/const"},
            "$ref": {"type": "integer"},
            "enum": {"$ref": "#/$defs/e"},
        },
        {"$defs": {"const": POINT, "e": {"enum": [{"$ref": "#"}]}}},
    ),
}


def takes_call(grammar: Grammar, text: str) -> bool:
    matcher = new_matcher(grammar_tokenizer(), grammar.text)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("num_functions", [1, 2])
@pytest.mark.parametrize("refs", LOCAL_REFS)
def test_a_functions_schema_may_refer_to_itself(refs, num_functions):
    properties, more = LOCAL_REFS[refs]
    parameters = {"type": "object", "properties": properties, "required": ["p"]}
    function = {"name": "add", "parameters": parameters | more, "strict": True}
    functions = [{"name": "other"}, function][-num_functions:]
    tools = [ToolSpec.model_validate({"type": "function", "function": f}) for f in functions]
    choice = {"type": "function", "function": {"name": "add"}}
    good = json.dumps({"name": "add", "arguments": {"p": {"x": 1}}})
    for asked in ("required", NamedTool.model_validate(choice)):
        grammar = of_call(tools, asked)
        assert takes_call(grammar, good)
        assert not takes_call(grammar, good.replace("1", '"a"'))
    strict = of_strict_calls(tools, FORMS["hermes"], {})
    assert strict is not None
    assert takes_call(strict, OPEN + good + CLOSE)
    assert not takes_call(strict, OPEN + good.replace("1", '"a"') + CLOSE)
    if refs == "named as keys":
        odd = {"p": {"x": 1}, "$ref": 1, "enum": {"$ref": "#"}}
        assert takes_call(of_call(tools, "required"), json.dumps({"name": "add", "arguments": odd}))


def test_a_schema_of_trees_means_itself_and_not_the_call():
    tree = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}}
    function = {"name": "add", "parameters": tree | {"additionalProperties": False}}
    tools = [ToolSpec.model_validate({"type": "function", "function": function})]
    good = json.dumps({"name": "add", "arguments": {"c": [{"c": []}, {}]}})
    assert takes_call(of_call(tools, "required"), good)
    assert not takes_call(of_call(tools, "required"), good.replace("{}", good))


ANSWERS = {
    "mistral": f"I add. {MARK} [{CALL}, {CALL.replace('1', '2')}]",
    "llama3_json": f"{LLAMA}; {LLAMA.replace('1', '2')}",
}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}


@pytest.fixture(scope="module", params=ANSWERS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, OpenAI]]:
    """A server whose template shows another form than Hermes', and its client."""
    form = request.param
    engine = {
        "special": [FORMS[form].open],
        # Calls of earlier messages, as each kind of model writes them.
        "more_template": "{# [TOOL_CALLS] #}" if form == "mistral" else "{# ipython #}",
        "texts": {"sum": ANSWERS[form], "json": '{"color": "red"}'},
    }
    server = Server(engine=engine, api_key=[KEY])
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield form, client
    assert server.close() == 0


def ask(client: OpenAI, stream: bool, text: str = "sum", **more: Any) -> tuple[str, list, str]:
    """Text, calls as (id, name, arguments) and the finish reason of an answer."""
    settings = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 300}
    settings |= {"tools": [{"type": "function", "function": ADD}]} | more
    answer = client.chat.completions.create(**settings, stream=stream)
    if not stream:
        choice = answer.choices[0]
        calls = [
            (c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []
        ]
        return choice.message.content or "", calls, choice.finish_reason
    text, parts, finish = "", [], None
    for chunk in answer:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        parts += choice.delta.tool_calls or []
        finish = choice.finish_reason or finish
    assert [part.index for part in parts] == list(range(len(parts)))
    return text, [(c.id, c.function.name, c.function.arguments) for c in parts], finish


@pytest.mark.parametrize("stream", [False, True])
def test_other_forms_are_read(served, stream):
    form, client = served
    text, calls, finish = ask(client, stream)
    assert text == ("I add. " if form == "mistral" else "")
    assert [(name, json.loads(given)) for _, name, given in calls] == [
        ("add", {"x": 1}),
        ("add", {"x": 2}),
    ]
    assert finish == "tool_calls"
    assert all(len(call_id) == 9 for call_id, *_ in calls) == (form == "mistral")
    assert ask(client, stream, parallel_tool_calls=False)[1][0][1:] == calls[0][1:]


@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_the_text_is_the_models(served, stream):
    form, client = served
    # Marks that are special tokens are no text, and no call is looked for.
    text, calls, finish = ask(client, stream, tool_choice="none")
    assert (text, calls, finish) == (ANSWERS[form].replace(MARK, ""), [], "stop")
    assert ask(client, stream, "json") == ('{"color": "red"}', [], "stop")
    assert ask(client, stream, "fox")[0] == "the quick brown fox jumps"


@pytest.mark.parametrize("stream", [False, True])
def test_strict_functions_in_other_forms(served, stream):
    form, client = served
    parameters = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    strict = ADD | {"strict": True, "parameters": parameters | {"additionalProperties": False}}
    tools = [{"type": "function", "function": strict}]
    text, calls, finish = ask(client, stream, tools=tools, max_tokens=900)
    assert text == ("I add. " if form == "mistral" else "")
    assert finish == "tool_calls"
    assert all(json.loads(given)["x"] in ("a", "b") for _, _, given in calls)
    assert ask(client, stream, "fox", tools=tools)[0] == "the quick brown fox jumps"
