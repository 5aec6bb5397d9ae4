"""The web application: routes, who may use them, and one log line for each request."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from subten import __version__
from subten.serve import admin, playground
from subten.serve.chat import create_chat_completion
from subten.serve.completions import create_completion
from subten.serve.context import Context
from subten.serve.errors import ApiError
from subten.serve.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    TokenizeBody,
)
from subten.serve.responses import create_response

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def make_app(context: Context) -> Guard:
    """The application around one model.

    Every route asks for a key but `/` and the health probes, and so do paths without a route.
    """
    # Without FastAPI's own route of the schema, which would ask for no key.
    app = FastAPI(title="subten", version=__version__, openapi_url=None, redirect_slashes=False)

    def check_key(request: Request) -> None:
        request.state.tenant = context.keys.check(request)

    open_router = APIRouter()
    router = APIRouter(dependencies=[Depends(check_key)])

    @open_router.get("/", include_in_schema=False)
    async def page() -> Response:
        return playground.page()

    @open_router.get("/health/live")
    async def health_live() -> Response:
        return admin.live()

    @open_router.get("/health")
    @open_router.get("/health/ready")
    async def health_ready() -> Response:
        return admin.ready(context)

    @router.get("/v1/models")
    async def models() -> Response:
        return admin.list_models(context)

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return admin.show_model(context, name)

    @router.get("/version")
    async def version() -> Response:
        return admin.version()

    @router.get("/metrics")
    async def metrics() -> Response:
        return await admin.metrics(context)

    @router.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def completions(request: Request) -> Response:
        return await create_completion(context, request)

    @router.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(context, request)

    @router.post("/v1/responses", openapi_extra=_takes(ResponsesBody))
    async def responses(request: Request) -> Response:
        return await create_response(context, request)

    @router.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        return await admin.tokenize(context, request)

    @router.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        return await admin.detokenize(context, request)

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return app.openapi()

    app.include_router(open_router)
    app.include_router(router)
    _handle_errors(app, context)
    return Guard(app, context)


def _takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI part for a body that the route reads itself, after the key is checked."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _handle_errors(app: FastAPI, context: Context) -> None:
    async def on_api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        try:
            # Which routes there are is not for everyone either.
            context.keys.check(request)
        except ApiError as refusal:
            return refusal.response()
        message = {404: "no such route", 405: "method: not allowed here"}
        status = error.status_code if error.status_code in message else 400
        return ApiError(status, message.get(status, "the request is malformed")).response()

    async def on_bug(_request: Request, _error: Exception) -> Response:
        return ApiError(500, "the server failed at this request", code="internal_error").response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)


class Guard:
    """Around the application: host names, request ids, and the log."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        state = scope.setdefault("state", {})
        request_id = secrets.token_hex(12)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            request_id = _given_id(scope) or request_id
            self._check_host(HTTPConnection(scope))
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        finally:
            _log(scope, request_id, status, began_s, state.get("generation"))

    def _check_host(self, connection: HTTPConnection) -> None:
        try:
            self._context.hosts.check(connection)
        except ApiError:
            # To those without a key every door looks the same.
            self._context.keys.check(connection)
            raise


def _given_id(scope: Scope) -> str | None:
    """The client's own X-Request-Id; ApiError 400 for one that is no plain word."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if not given:
        return None
    text: str = given[0].decode("latin-1")
    if len(given) > 1 or not _REQUEST_ID.fullmatch(text):
        raise ApiError(
            400, "X-Request-Id: allowed: 1 to 64 of A-Z a-z 0-9 _ -", param="X-Request-Id"
        )
    return text


def _log(scope: Scope, request_id: str, status: int, began_s: float, generation: Any) -> None:
    """One JSON line; no text of prompts or answers."""
    if scope["path"].startswith("/health") and status == 200:
        return
    line: dict[str, Any] = {
        "event": "request",
        "request_id": request_id,
        "method": scope["method"],
        "path": scope["path"][:128],
        "status": status,
        "duration_ms": round((time.perf_counter() - began_s) * 1e3, 3),
    }
    if generation is not None:
        first_s = generation.first_token_s
        line |= {
            "prompt_tokens": generation.num_prompt_tokens,
            "cached_tokens": generation.num_cached_tokens,
            "completion_tokens": generation.num_output_tokens,
            "finish_reasons": generation.finish_reasons(),
            "ttft_ms": None if first_s is None else round(first_s * 1e3, 3),
        }
    logger.info("%s", json.dumps(line))
