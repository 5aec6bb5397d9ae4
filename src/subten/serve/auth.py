"""Who may ask: API keys on every route but the health probes, and the Host names we answer to."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence

from starlette.requests import HTTPConnection

from subten.serve.errors import ApiError

_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]{1,255}))(?::[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether a bind address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class KeyRing:
    """The API keys, as hashes; without any, everyone may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, connection: HTTPConnection) -> str:
        """The tenant that the request's key names, "" where none is needed; ApiError 401.

        Takes as long for every wrong key, and looks at all keys, whichever is right.
        """
        if not self._digests:
            return ""
        headers = [v for k, v in connection.scope["headers"] if k == b"authorization"]
        scheme, _, sent = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        digest = _digest(sent.strip())
        found = ""
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                found = known.hex()
        if not found or scheme.lower() != b"bearer":
            raise ApiError(401, "an API key is needed: Authorization: Bearer KEY")
        return found


class HostList:
    """Host names under which the server may be asked; a defence against DNS rebinding.

    `allowed` empty means any well-formed name, which is for servers that ask for a key.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = {name.lower().strip("[]") for name in allowed}

    def check(self, connection: HTTPConnection) -> None:
        """ApiError 400 for a Host header that is missing, doubled, malformed or not ours."""
        hosts = [v for k, v in connection.scope["headers"] if k == b"host"]
        match = _HOST.fullmatch(hosts[0].decode("latin-1")) if len(hosts) == 1 else None
        name = (match[1] or match[2]).lower() if match else ""
        if not name or (self._allowed and name not in self._allowed):
            raise ApiError(
                400, "Host: not a name of this server (see --allowed-host)", param="Host"
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
