"""Tries grammars in a helper process: one that takes too long here never reaches the engine."""

from __future__ import annotations

from typing import Any

from subten.serve.helper import answer_lines
from subten.serve.masks import GrammarError, byte_tokenizer, new_matcher

MEMORY_BYTES = 100 * 2**20


def check(request: dict[str, Any]) -> dict[str, Any]:
    """{} for a grammar that can be followed, or {"error"}."""
    try:
        matcher = new_matcher(_tokenizer, request["grammar"])
        mask = matcher.compute_bitmask()
    except (GrammarError, MemoryError) as error:
        return {"error": str(error) or "it needs too much memory"}
    if matcher.is_error():
        return {"error": matcher.get_error().split("\n")[0]}
    return {} if any(mask) else {"error": "no text follows it"}


def main() -> None:
    """Check until stdin closes."""
    check({"grammar": '{"json_schema": {}}'})
    answer_lines(check, memory_bytes=MEMORY_BYTES)


_tokenizer = byte_tokenizer()

if __name__ == "__main__":
    main()
