"""Logs of the server and its engine: JSON lines on stderr, without prompts."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class JsonLines(logging.Formatter):
    """One JSON object a line; what is one already goes in as it is."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        message = record.getMessage()
        if message.startswith("{") and record.name.startswith("subten."):
            line |= json.loads(message)
        else:
            line["message"] = message
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs() -> None:
    """JSON lines on stderr."""
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[output], force=True)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
