"""Renders chat templates in a helper process: sandboxed, little memory, bounded output."""

from __future__ import annotations

import functools
from typing import Any

import jinja2
from jinja2 import meta

from subten.serve.helper import answer_lines
from subten.tokenizer import template_sandbox

MEMORY_BYTES = 64 * 2**20
"""What rendering may take on top of what the process has at its start."""


def render(request: dict[str, Any]) -> dict[str, Any]:
    """{"text"} of a conversation, or {"error"}: what the template says, or what it cannot do.

    Where "names" is asked for, also the names that the template reads.
    """
    answer: dict[str, Any] = {"names": []}
    try:
        if request.get("names"):
            answer["names"] = _names(request["template"])
        answer["text"] = _text(request)
    except MemoryError:
        answer["error"] = "it needs too much memory"
    except RecursionError:
        answer["error"] = "it is nested too deeply"
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        answer["error"] = str(error)[:500]
    except (AttributeError, OSError) as error:
        answer["error"] = type(error).__name__
    return answer


def _text(request: dict[str, Any]) -> str:
    pieces: list[str] = []
    num_chars = 0
    for piece in _compiled(request["template"]).generate(**request["variables"]):
        num_chars += len(piece)
        if num_chars > request["max_chars"]:
            raise ValueError(f"its text is longer than {request['max_chars']} characters")
        pieces.append(piece)
    text = "".join(pieces)
    text.encode("utf-8")
    return text


def _names(template: str) -> list[str]:
    # Finding them folds constants, as compiling does: it can take all memory, too.
    environment = template_sandbox()
    found = meta.find_undeclared_variables(environment.parse(template))
    return sorted(found - environment.globals.keys())


@functools.lru_cache(maxsize=2)
def _compiled(template: str) -> jinja2.Template:
    return template_sandbox().from_string(template)


def main() -> None:
    """Render until stdin closes."""
    # What the first rendering imports is not the template's.
    render({"template": "{{ 1 }}", "variables": {}, "max_chars": 1})
    answer_lines(render, memory_bytes=MEMORY_BYTES)


if __name__ == "__main__":
    main()
