"""Routes beside the answers: models, health, metrics, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from subten import __version__
from subten.serve.context import Context
from subten.serve.errors import bad_field, json_response
from subten.serve.protocol import DetokenizeBody, TokenizeBody, read_body
from subten.serve.requests import template_messages
from subten.serve.streams import unless_gone
from subten.tokenizer import Tokenizer


def list_models(context: Context) -> Response:
    """GET /v1/models."""
    return json_response(
        {"object": "list", "data": [_model(context, name) for name in context.names]}
    )


def show_model(context: Context, name: str) -> Response:
    """GET /v1/models/{name}."""
    context.check_model(name)
    return json_response(_model(context, name))


def live() -> Response:
    """GET /health/live: 200 while this process answers."""
    return json_response({"status": "live"})


def ready(context: Context) -> Response:
    """GET /health/ready, and /health: 200 while requests are taken, else 503."""
    context.generator.check_ready()
    return json_response({"status": "ready"})


def version() -> Response:
    """GET /version."""
    return json_response({"version": __version__})


async def metrics(context: Context) -> Response:
    """GET /metrics."""
    return Response(await context.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def tokenize(context: Context, request: Request) -> Response:
    """POST /tokenize: the ids of a text, or of a conversation."""
    body = await read_body(TokenizeBody, request)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "allowed: prompt or messages, one of them")
    if body.prompt is not None:
        is_part = body.add_special_tokens is False
        token_ids = await context.encode(body.prompt, param="prompt", is_part=is_part)
    else:
        assert body.messages is not None
        rendered = context.need_templates("messages").render(
            template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        text = await unless_gone(request, rendered)
        token_ids = await context.encode_chat(text, param="messages")
    shown: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": context.info.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        tokenizer = context.need_tokenizer("return_token_strs")
        shown["token_strs"] = await asyncio.to_thread(_spellings, tokenizer, token_ids)
    return json_response(shown)


async def detokenize(context: Context, request: Request) -> Response:
    """POST /detokenize: the text of ids, special tokens included."""
    body = await read_body(DetokenizeBody, request)
    context.check_model(body.model)
    context.check_ids(body.tokens, param="tokens")
    return json_response({"prompt": await context.decode(body.tokens, param="tokens")})


def _spellings(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str | None]:
    return [tokenizer.backend.id_to_token(token_id) for token_id in token_ids]


def _model(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created_s,
        "owned_by": "subten",
        "root": context.names[0],
        "max_model_len": context.info.max_model_len,
    }
