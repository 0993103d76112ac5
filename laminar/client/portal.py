"""A thread with an event loop of its own, through which the sync face runs the async one.

Its own thread, so that it works where a loop is running already (notebooks), and appends go
on while the caller computes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from laminar.client.errors import ConfigError

T = TypeVar("T")


class Portal:
    """Runs coroutines for other threads. Made running; `close` ends it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="laminar-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run on the portal's loop; an interrupt here cancels it there."""
        if threading.get_ident() == self._thread.ident or self.loop.is_closed():
            work.close()
            raise ConfigError("the client is closed, or called from its own thread", code="not_open")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and its thread. Idempotent."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
