"""Settings of the server, checked before anything is loaded or opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from subten.config import EngineConfig
from subten.core import ConfigError, reason, refuse
from subten.serve.auth import is_loopback
from subten.serve.tool_calls import FORMS

TOOL_PARSERS = ("auto", *FORMS, "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """What `subten serve` sets; names are vLLM's where it has them.

    `served_model_name` () names the model as `model` does. `allowed_host` () means the names of
    this machine on a loopback `host`, and any name elsewhere, where a key is needed.
    `max_queued_requests` answers may wait besides the `max_num_seqs` that run.
    """

    model: str
    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    chat_template: Path | None = None
    tool_call_parser: str = "auto"
    max_queued_requests: int = 256
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise refuse(ConfigError, "port", self.port, "an integer from 0 to 65535")
        if self.max_queued_requests < 0:
            raise refuse(ConfigError, "max_queued_requests", self.max_queued_requests, "at least 0")
        if not 0.0 <= self.drain_timeout <= 3600.0:
            raise refuse(ConfigError, "drain_timeout", self.drain_timeout, "seconds from 0 to 3600")
        if self.tool_call_parser not in TOOL_PARSERS:
            raise refuse(
                ConfigError, "tool_call_parser", self.tool_call_parser, ", ".join(TOOL_PARSERS)
            )
        for key in self.api_key:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("api_key: allowed: at least 8 printable ASCII characters")
        for name in self.served_model_name:
            if not name or len(name) > 256 or not name.isprintable():
                raise refuse(ConfigError, "served_model_name", name, "1 to 256 characters")
        if not is_loopback(self.host) and not self.api_key:
            raise refuse(
                ConfigError,
                "host",
                self.host,
                "127.0.0.1, ::1 or localhost, or any address together with --api-key",
            )

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names to answer to; () for any."""
        if self.allowed_host or not is_loopback(self.host):
            return self.allowed_host
        return ("localhost", "127.0.0.1", "::1", self.host)

    def read_chat_template(self) -> str | None:
        """The template of --chat-template, if given."""
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            allowed = f"a UTF-8 text file ({reason(error)})"
            raise refuse(ConfigError, "chat_template", str(self.chat_template), allowed) from error
