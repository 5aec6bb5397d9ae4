"""The socket of a server: its address is taken before a model is loaded, and listens after."""

from __future__ import annotations

import errno
import socket
from typing import Any

from subten.core import ConfigError, refuse


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen: clients are turned away until `listen`.

    ConfigError names the host or the port, whichever cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    # An address whose last connections are just closed can be had; until the socket listens,
    # though, the same option would let others have it as well.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        sock.bind(_resolve(host, port, family))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise refuse(ConfigError, "host", host, "an address of this machine") from error
        raise refuse(ConfigError, "port", port, f"a free one ({error.strerror})") from error
    except ConfigError:
        sock.close()
        raise
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return sock


def listen(sock: socket.socket) -> None:
    """Let clients connect."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.listen()


def _resolve(host: str, port: int, family: socket.AddressFamily) -> tuple[Any, ...]:
    name = host.strip("[]") or None
    try:
        # An address is bound as it is: a server asks no resolver for what it knows.
        socket.inet_pton(family, name or "")
    except OSError:
        pass
    else:
        return (name, port)
    try:
        found = socket.getaddrinfo(name, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no host name"
        allowed = f"an address of this machine, or a name of one ({why})"
        raise refuse(ConfigError, "host", host, allowed) from error
    return found[0][4]
