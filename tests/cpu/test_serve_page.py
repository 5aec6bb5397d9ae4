"""The page at `/`: its headers, that it loads nothing, and a chat in a real browser."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

pytest.importorskip("fastapi")

from chromium import BINARY, Page
from serving import KEY, MAX_MODEL_LEN, MODEL, TEXTS, Server

needs_browser = pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")
IS_IDLE = "abort === null && answer !== null"


@pytest.fixture(scope="module")
def server():
    # Steps of 5 ms: each token arrives by itself.
    server = Server(engine={"step_s": 0.005}, api_key=[KEY])
    yield server
    assert server.close() == 0


@pytest.fixture
def page(tmp_path):
    page = Page(tmp_path, width=360, height=740)
    yield page
    page.close()


def sign_in(page: Page, server: Server) -> None:
    page.open(server.url + "/")
    page.until("document.activeElement.id === 'key'")
    page.type(KEY)
    page.evaluate("document.getElementById('text').focus()")
    page.until("model")


def say(page: Page, text: str) -> str:
    """Ask, wait for the end, and give the text of the answer's box."""
    page.type(text)
    page.press("Enter")
    page.until(IS_IDLE)
    return str(page.evaluate("[...document.querySelectorAll('.assistant p')].at(-1).textContent"))


def test_the_page_needs_no_key_and_may_load_nothing(server):
    status, headers, body = server.request("GET", "/")
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    text = body.decode("ascii")
    for kind in ("script", "style"):
        inner = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        assert len(inner) == 1
        digest = base64.b64encode(hashlib.sha256(inner[0].encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"https?:|//\w|\bsrc=|@import|url\(|innerHTML|\son\w+=|\bstyle=", text)
    assert not re.search(r"localStorage|sessionStorage|cookie|indexedDB", text)
    assert KEY not in text
    assert MODEL not in text
    status, _, _ = server.request("GET", "/", headers={"Host": "evil.example"})
    assert status == 401


def test_every_field_has_a_label(server):
    text = server.request("GET", "/")[2].decode()
    labelled = set(re.findall(r'<label for="([\w-]+)"', text))
    labelled |= set(re.findall(r'<label>[^<]+<input id="([\w-]+)"', text))
    assert labelled == set(re.findall(r'<(?:input|textarea) id="([\w-]+)"', text))
    assert '<html lang="en">' in text


@needs_browser
def test_a_chat_in_a_browser(server, page):
    sign_in(page, server)
    assert say(page, "fox") == TEXTS["fox"]
    found = page.evaluate(
        "({gaps: answer.gaps, tokens: answer.tokens, bars: bars.children.length})"
    )
    # One byte a token and one to end; the first is no gap.
    num_tokens = len(TEXTS["fox"]) + 1
    assert found["tokens"] == num_tokens
    assert 1 <= len(found["gaps"]) < num_tokens
    assert found["bars"] == min(len(found["gaps"]), page.evaluate("Math.floor(bars.clientWidth/4)"))
    for name in ("ttft", "p50", "p99", "rate", "bytes", "bits"):
        # Those of the cache come when the server is next asked for its metrics.
        page.until(f"/^[0-9]/.test(document.getElementById('{name}').textContent)", timeout_s=10)
    assert page.evaluate("document.querySelectorAll('#pages li').length") >= 1
    assert page.evaluate("messages.length") == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # The scripted model has no experts; a model's that has some.
    assert page.evaluate("document.getElementById('step').hidden")
    page.evaluate("drawStep(0.413, [1.9, 1.1, 0.7, 0.3], 0.9)")
    assert page.evaluate("document.getElementById('roof').textContent") == "41 %"
    assert page.evaluate("document.getElementById('maxvio').textContent") == "0.90"
    assert page.evaluate("document.querySelectorAll('#experts i').length") == 4
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    cut = "[...document.querySelectorAll('dt, dd')].filter((x) => x.scrollWidth > x.clientWidth)"
    assert page.evaluate(f"{cut}.map((x) => x.textContent)") == []
    assert page.evaluate("document.activeElement.id") == "text"
    assert [p for p in page.problems() if "401" not in p] == []
    asked = {event["request"]["url"] for event in page.of("Network.requestWillBeSent")}
    allowed = (server.url + "/", "data:", "about:")
    assert all(url.startswith(allowed) for url in asked), asked
    assert page.evaluate("document.cookie + localStorage.length + sessionStorage.length") == "00"


@needs_browser
def test_markup_stays_text(server, page):
    sign_in(page, server)
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    say(page, markup)
    page.evaluate("take(JSON.stringify({choices: [{delta: {content: '<i>x</i>'}}]}), chat)")
    assert page.evaluate("document.querySelectorAll('#chat img, #chat b, #chat i').length") == 0
    assert markup in page.evaluate("document.querySelector('.user').textContent")
    assert page.evaluate("(() => { try { chat.innerHTML = 'a'; } catch { return 1; } })()") == 1


@needs_browser
def test_a_failed_question_leaves_the_conversation_as_it_was(server, page):
    sign_in(page, server)
    say(page, "fox")
    too_long = "a" * MAX_MODEL_LEN
    say(page, too_long)
    assert page.evaluate("messages.length") == 2
    assert page.evaluate("document.getElementById('text').value") == too_long
    note = page.evaluate("[...document.querySelectorAll('small')].at(-1).textContent")
    assert note.startswith("400: messages"), note
    page.evaluate("document.getElementById('text').value = ''")
    say(page, "fox")
    assert page.evaluate("messages.length") == 4


@needs_browser
def test_stop_keeps_what_has_come(server, page):
    sign_in(page, server)
    page.type("noise, for long")
    page.press("Enter")
    page.until("answer && answer.text.length > 3")
    page.evaluate("document.getElementById('stop').click()")
    page.until(IS_IDLE)
    assert page.evaluate("messages.length") == 2
    assert page.evaluate("document.querySelector('.assistant small').textContent") == "stopped"
