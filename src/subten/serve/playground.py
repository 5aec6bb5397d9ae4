"""The page at `/`: a chat that draws each token's latency. It holds nothing secret."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import Response

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


def page() -> Response:
    """GET /: the page, which may load nothing and talk to this server alone."""
    text, policy = _page_and_policy()
    return Response(
        text,
        media_type="text/html",
        headers={
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Cross-Origin-Opener-Policy": "same-origin",
            # Isolated pages get clocks of 5 us instead of 100 us.
            "Cross-Origin-Embedder-Policy": "require-corp",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


@functools.cache
def _page_and_policy() -> tuple[str, str]:
    """The page's own style and script are allowed by their hashes, everything else is not."""
    text = resources.files("subten.serve").joinpath("playground.html").read_text(encoding="utf-8")
    hashes = {kind: f"'sha256-{_sha256(body)}'" for kind, body in _INLINE.findall(text)}
    return text, "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes['script']}",
            f"style-src {hashes['style']}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Text of answers cannot become markup, even by mistake.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _sha256(body: str) -> str:
    return base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
