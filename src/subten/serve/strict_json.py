"""Bodies of requests: read within limits, and as JSON that means one thing only."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from subten.serve.errors import ApiError

MAX_BODY_BYTES = 4 * 2**20
MAX_DEPTH = 64
BODY_TIMEOUT_S = 30.0
OFF_LOOP_BYTES = 2**16
"""A larger body is parsed and checked beside the event loop."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_bytes(request: Request) -> bytes:
    """A request's body, or ApiError: 408, 413, 415, 499."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, "content-encoding: only identity is allowed", param="content-encoding")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise ApiError(499, "the client has gone") from error
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, refusing what RFC 8259 leaves open.

    Repeated keys, NaN and infinities, numbers beyond float64, text that is not Unicode and nesting
    deeper than MAX_DEPTH raise ApiError 400.
    """
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise _malformed(f"nested deeper than {MAX_DEPTH}") from error
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from error
    except ValueError as error:
        raise _malformed(str(error)) from error
    if not isinstance(value, dict):
        raise _malformed("not an object")
    _check(value, has_surrogates=_SURROGATE.search(body) is not None)
    return value


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")


def _malformed(what: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {what}", code="invalid_json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {name[:64]!a} comes twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _check(root: dict[str, Any], *, has_surrogates: bool) -> None:
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            children = value.values() if isinstance(value, dict) else value
            below += [child for child in children if isinstance(child, dict | list)]
            if has_surrogates:
                texts = [*children, *value] if isinstance(value, dict) else children
                _check_texts(texts)
        if not below:
            return
        level = below
    raise _malformed(f"nested deeper than {MAX_DEPTH}")


def _check_texts(values: Any) -> None:
    for value in values:
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise _malformed("a lone surrogate in a text") from error
