"""Errors as clients of the API meet them: a status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

RETRY_AFTER_S = 1

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "cancelled",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200; `param` is the field of the request that is to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {
            "error": {
                "message": self.message,
                "type": _KINDS[self.status],
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole answer, with Retry-After where trying again can help."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), status=self.status, headers=headers)


def bad_field(param: str, message: str) -> ApiError:
    """The 400 for a field."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def json_response(
    value: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`value` as JSON."""
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )
