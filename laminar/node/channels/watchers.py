"""Waits of streams of jobs for the end of their deliveries.

A stream's node asks the leader of a partition which of the stream's deliveries are over. If none is, the
request waits here until one of them may be. The wake-up tells nothing itself: the request then reads the
table again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Watcher:
    offsets: frozenset[int]
    future: asyncio.Future[bool]


class Watchers:
    """The waiting requests of one partition, at most one for each stream."""

    def __init__(self) -> None:
        # By channel, then by the number of the stream.
        self._waiting: dict[int, dict[int, _Watcher]] = {}

    async def wait(self, channel: int, stream: int, offsets: Collection[int], wait_s: float) -> bool:
        """Wait until the delivery of one of these records may have ended, and return True.

        Return False after `wait_s` seconds.

        It also returns False when the stream asks again: then the earlier caller no longer waits for the
        answer.

        Raises:
            Exception: the one that `refuse` was called with.
        """
        of_channel = self._waiting.setdefault(channel, {})
        before = of_channel.get(stream)
        if before is not None and not before.future.done():
            before.future.set_result(False)
        watcher = _Watcher(frozenset(offsets), asyncio.get_running_loop().create_future())
        of_channel[stream] = watcher
        try:
            async with asyncio.timeout(wait_s):
                return await watcher.future
        except TimeoutError:
            return False
        finally:
            if of_channel.get(stream) is watcher:
                del of_channel[stream]
                if not of_channel and self._waiting.get(channel) is of_channel:
                    del self._waiting[channel]

    def ended(self, channel: int, offsets: Iterable[int] | None = None) -> None:
        """Wake requests that wait for one of these records of a channel (None: for any of its records)."""
        of_channel = self._waiting.get(channel)
        if not of_channel:
            return
        ended = None if offsets is None else set(offsets)
        for watcher in of_channel.values():
            if not watcher.future.done() and (ended is None or not watcher.offsets.isdisjoint(ended)):
                watcher.future.set_result(True)

    def refuse(self, error: Exception) -> None:
        """Fail all waiting requests with `error`, because this replica no longer leads."""
        waiting, self._waiting = self._waiting, {}
        for of_channel in waiting.values():
            for watcher in of_channel.values():
                if not watcher.future.done():
                    watcher.future.set_exception(error)
