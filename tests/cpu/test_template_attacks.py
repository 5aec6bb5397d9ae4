"""Templates that attack: each ends in an error or in a short text, and reaches nothing.

The forms are those that advisories tell of: attributes by every way that Jinja has, formats that
look attributes up by themselves, includes, frames of generators, changed arguments, and texts or
loops without end (threat table, T4 and T5).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from scripted import byte_tokenizer

from subten.serve import template_process
from subten.serve.errors import ApiError
from subten.serve.templates import RENDER_S, ChatTemplates

MAX_CHARS = 4096
MESSAGES = [{"role": "user", "content": "hi"}]
ROOTS = (
    *("''", "[]", "{}", "1", "none", "messages", "messages[0]", "self", "range", "dict", "lipsum"),
    *("cycler", "joiner", "namespace()", "raise_exception", "strftime_now"),
)
WAYS = (
    "{{ ROOT.__class__ }}",
    "{{ ROOT['__class__'] }}",
    "{{ ROOT|attr('__class__') }}",
    r"{{ ROOT|attr('\x5f\x5fclass\x5f\x5f') }}",
    "{{ ROOT|attr(['__cl', 'ass__']|join) }}",
    "{{ [ROOT]|map(attribute='__class__')|list }}",
    "{{ '{0.__class__}'.format(ROOT) }}",
    "{{ ('{0.__class__}'|attr('format'))(ROOT) }}",
    "{{ ['{0.__class__}']|map('format', ROOT)|list }}",
    "{% set found = ROOT.__class__ %}{{ found.__mro__[-1].__subclasses__() }}",
)
CHAINS = (
    *("cycler.__init__.__globals__.os.popen('id').read()", "lipsum.__globals__['os'].environ"),
    *("joiner.__init__.__globals__.os.system('true')", "self.__init__.__globals__"),
    "namespace.__init__.__globals__.__builtins__.open('/etc/passwd').read()",
    "raise_exception.__globals__.json.codecs.open('/etc/passwd')",
    "strftime_now.__closure__[0].cell_contents",
    "strftime_now.__globals__",
    "self._TemplateReference__context",
    "range.__self__.__import__('os')",
    "''.__class__.__base__.__subclasses__()",
    "dict.__base__.__subclasses__()",
    "(messages|map('upper')).gi_frame.f_globals",
    "(messages|map('upper')).gi_code.co_consts",
    "raise_exception.func_globals",
    "raise_exception.__code__.co_consts",
    "messages.append(1)",
    "messages[0].update(role='system')",
    "messages[0].clear()",
    "messages.sort()",
    "'{a.__class__}'.format_map({'a': 1})",
    "'{0.__class__.__mro__}'.format(messages)",
    "'%s' % messages.__class__",
    "[1, 2]|sum(attribute='__class__')",
    "messages|groupby('__class__')",
    "messages|sort(attribute='__class__')",
    "messages|selectattr('__class__')|list",
    "messages|unique(attribute='__class__')|list",
    "messages|tojson(indent=cycler)",
    "__import__('os')",
    "eval('1')",
    "open('/etc/passwd')",
    "config.items()",
    "request.application.__globals__",
    "get_flashed_messages.__globals__",
    "1 / 0",
    "'\\ud800'",
)
STATEMENTS = (
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% from 'os' import environ %}{{ environ }}",
    "{% extends 'base' %}",
    "{% if",
    "{{ ",
    "{% endfor %}",
    "{% do messages.append(1) %}",
    "{% set messages[0].role = 'x' %}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n.__class__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% block b %}{{ self.b.__globals__ }}{% endblock %}",
    "{{ '(' * 500 }}{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{{ 'a' " + "~ 'a' " * 20_000 + "}}",
)
LONG = (
    *("{{ 'a' * 5000 }}", "{{ 'a' * 10**9 }}", "{{ [0] * 10**9 }}", "{{ 'a'|center(10**9) }}"),
    *("{{ '%999999999d'|format(1) }}", "{{ '{:>999999999}'.format(1) }}"),
    *("{{ 'a'|indent(10**9, true) }}", "{{ lipsum(n=10**4) }}", "{{ [1]|batch(10**9, 'a')|list }}"),
    *("{{ (1, 2)|join('a' * 10**9) }}", "{{ 'aa'|replace('a', 'b' * 10**9) }}"),
    "{% for i in range(10**9) %}a{% endfor %}",
    "{% for i in range(99999) %}a{% endfor %}",
    "{% set x = 'a' * 4000 %}{{ x }}{{ x }}",
    "{% for i in range(999) %}{% for j in range(99) %}aa{% endfor %}{% endfor %}",
)
SLOW = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ messages|length ** (10 ** 9) }}{{ 7 ** (7 ** 9) }}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}",
)
REACHING = [
    *(way.replace("ROOT", root) for way, root in itertools.product(WAYS, ROOTS)),
    *("{{ " + chain + " }}" for chain in CHAINS),
    *STATEMENTS,
]
HARMLESS = re.compile(
    r"(dict\['__class__'\]|\{0\.__class__\}|Undefined|none|role|user|content|hi|[\s(){}\[\],:'])*",
    re.I,
)
"""What is left of those that say something: the messages, nothing, or what was no format."""


class Watch:
    """What Python opens, runs or connects to while `is_on` (an audit hook cannot be taken away)."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in ("open", "import") or event.startswith(("os.", "subprocess.", "socket.")):
            self.seen.append(f"{event} {arguments!r:.200}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def text_or_error(template: str) -> tuple[str, str]:
    request = {"template": template, "variables": {"messages": MESSAGES}, "max_chars": MAX_CHARS}
    answer = template_process.render(request)
    return answer.get("text", ""), answer.get("error", "")


def check_clean(said: str) -> None:
    """No secret, path, address or trace."""
    assert "canary" not in said
    assert not re.search(r"0x[0-9a-f]{6}|Traceback|/(etc|usr|root|home|tmp|work)/|root:x:", said)


def test_there_are_two_hundred_and_each_is_another():
    attacks = [*REACHING, *LONG, *SLOW]
    assert len(set(attacks)) == len(attacks) >= 200


def test_attacks_reach_no_file_no_process_and_no_variable(watch, monkeypatch):
    monkeypatch.setenv("SUBTEN_TEST_SECRET", "canary")
    text_or_error("{{ messages[0].content|tojson }}")
    before = repr(MESSAGES), dict(os.environ)
    for template in REACHING:
        # What Jinja itself imports and reads at a first time is not the template's doing.
        text_or_error(template)
        watch.seen.clear()
        watch.is_on = True
        text, error = text_or_error(template)
        watch.is_on = False
        assert watch.seen == [], template
        assert error or HARMLESS.fullmatch(text), (template, text)
        check_clean(text + error)
    assert (repr(MESSAGES), dict(os.environ)) == before


def test_the_watch_sees_what_a_template_that_gets_out_would_do(watch):
    watch.seen.clear()
    watch.is_on = True
    with open(os.devnull):
        pass
    os.system("true")
    watch.is_on = False
    assert {line.split()[0] for line in watch.seen} >= {"open", "os.system"}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_attacks_end_in_a_400_or_a_bounded_text_and_the_next_is_answered(loop):
    # As a server does it: other processes, killed when they take too long or too much.
    tokenizer = byte_tokenizer(chat_template="{{ messages[0].content }}")
    templates = ChatTemplates(tokenizer, max_chars=MAX_CHARS)

    async def ask(template: str) -> tuple[str, float]:
        tokenizer.chat_template = template
        began_s = time.monotonic()
        [found] = await asyncio.gather(templates.render(MESSAGES), return_exceptions=True)
        if isinstance(found, ApiError):
            assert (found.status, found.param) == (400, "messages"), template
            found = found.message
        assert isinstance(found, str), (template, found)
        assert len(found) <= MAX_CHARS
        return found, time.monotonic() - began_s

    async def run() -> None:
        try:
            await templates.start()
            for template in [*REACHING, *LONG, *SLOW]:
                said, took_s = await ask(template)
                check_clean(said)
                if template in (*LONG, *SLOW):
                    assert "chat template" in said, template
                if template in SLOW:
                    assert took_s >= RENDER_S or "memory" in said, template
                # A process that was killed starts anew at the next question, which may wait for it.
                assert took_s < RENDER_S + 30, template
            assert (await ask("{{ messages[0].content }}"))[0] == "hi"
        finally:
            await templates.close()

    loop.run(run())
