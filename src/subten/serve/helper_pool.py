"""Helper processes that requests take turns at."""

from __future__ import annotations

import asyncio
from typing import Any

from subten.serve.errors import ApiError
from subten.serve.helper import Helper

MAX_WAITING = 256


class HelperPool:
    """`num` helpers of a module, for at most `max_waiting` requests that wait for their turn."""

    def __init__(self, module: str, *, limit_s: float, num: int, max_waiting: int) -> None:
        self.all = [Helper(module, limit_s=limit_s) for _ in range(num)]
        self._idle: asyncio.LifoQueue[Helper] = asyncio.LifoQueue()
        for helper in self.all:
            self._idle.put_nowait(helper)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """What a helper answers, None where it was stopped over it; ApiError 429 if many wait."""
        if self._idle.empty() and self._num_waiting >= self._max_waiting:
            raise ApiError(429, "too many requests are waiting", code="queue_full")
        self._num_waiting += 1
        try:
            helper = await self._idle.get()
        finally:
            self._num_waiting -= 1
        # One that leaves in its turn would else cost a process, which must end in the middle.
        return await asyncio.shield(self._finish(helper, request))

    async def close(self) -> None:
        """End the processes."""
        for helper in self.all:
            await helper.close()

    async def _finish(self, helper: Helper, request: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return await helper.ask(request)
        finally:
            self._idle.put_nowait(helper)
