"""Group 0: the catalog's log, and the state machine that applies it.

The catalog's commands are entries of kind `command` in a group like any other. This module proposes them,
applies them in log order once committed, and confirms that this replica leads. What a command does is in
`membership.catalog`.

This log is never trimmed: it has no retention and no snapshots, as it grows only when nodes, topics or places
of replicas change, by a few hundred bytes each time. So the other replicas always hold every entry that a
replica lacks, even a new one or one that was away for years. The leader sends these as ordinary appends,
bounded by the limit of bytes in flight; a restart replays the log in pieces of 128 KiB.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from laminar.batch import Buffer, Header, Kind, body_of, build_control
from laminar.log.disk.errors import DamagedRange
from laminar.log.partition_log.log import Log
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.replica import Replica
from membership.catalog import Catalog, NotCatalogLeader, OutcomeUnknown
from raft.values import EntryTooLarge, NotLeader, TooMuchUncommitted

_log = logging.getLogger("laminar.catalog")
# Some 1,000 commands, which are applied in 50 ms between two turns of the loop.
_READ_BYTES = 128 * 1024


class CatalogGroup:
    """Applies group 0's committed commands to the catalog on this node, and proposes new ones for it."""

    def __init__(
        self,
        *,
        driver: Driver,
        log: Log,
        on_applied: Callable[[], None],
        on_led: Callable[[bool], None],
        on_failed: Callable[[Exception], None],
        wait_for_repair: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Make the state machine of `log`.

        `wait_for_repair()` waits until a damaged entry may have been repaired. Without it, damage is a
        failure. `on_applied()` is called after the catalog's version, or
        the code version that is enabled, has changed, `on_led(leading)` when this
        replica begins or ceases to lead.
        """
        self.replica: Replica
        self.catalog = Catalog(self)
        self._driver = driver
        self._catalog_log = log
        self._loop = asyncio.get_running_loop()
        self._on_applied = on_applied
        self._on_led = on_led
        self._on_failed = on_failed
        self._wait_for_repair = wait_for_repair
        # A committed command is damaged here: the catalog stops until the entry is repaired.
        self._stalled = asyncio.Event()
        self._waiters: dict[int, tuple[int, asyncio.Future[int]]] = {}
        self.committed_index = log.start.index
        self.applied_index = log.start.index
        self._applying = False
        self._task: asyncio.Task[None] | None = None
        self._until: list[tuple[int, asyncio.Future[None]]] = []

    # -- the machine -------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Always True: no entry is left out; a damaged one is applied when it has been repaired."""
        return True

    @property
    def stalled(self) -> bool:
        """Whether the next committed entry is damaged, so that nothing is applied until it is repaired."""
        return self._stalled.is_set()

    def appended(self, header: Header, frame: Buffer) -> None:
        """Change nothing: commands change the catalog when they are committed, not before."""

    def truncated(self, index: int) -> None:
        """Fail the proposals whose entries are truncated, from `index` on."""
        for lost in [waiting for waiting in self._waiters if waiting >= index]:
            _, future = self._waiters.pop(lost)
            if not future.done():
                future.set_exception(NotCatalogLeader(self.replica.leader_node))

    def committed(self, index: int) -> None:
        """Start a task that applies the commands up to `index` to the catalog, in log order."""
        self.committed_index = index
        if not self._applying:
            self._applying = True
            self._task = self._loop.create_task(self._apply())

    def led(self, leading: bool) -> None:
        """Note that this replica became, or ceased to be, the leader."""
        self._on_led(leading)

    def failed(self, error: Exception) -> None:
        """Fail uncommitted proposals with `OutcomeUnknown`; committed ones are still applied."""
        for index in [waiting for waiting in self._waiters if waiting > self.committed_index]:
            _, future = self._waiters.pop(index)
            if not future.done():
                future.set_exception(OutcomeUnknown(f"this node's catalog has stopped: {error}"))
        self._on_failed(error)

    async def _apply(self) -> None:
        """Apply what is committed and not applied yet, in log order. One run at a time."""
        version = self.catalog.state().version, self.catalog.code_version
        try:
            while self.applied_index < self.committed_index:
                frames = await self._read(self.applied_index + 1)
                for frame in frames:
                    header = Header.unpack(frame)
                    if header.kind == Kind.COMMAND:
                        self.catalog.apply(header.index, bytes(body_of(frame)))
                    self.applied_index = header.index
                    self._resolve(header)
                await asyncio.sleep(0)  # a read of what is in memory ends no turn of the loop
        except Exception as error:  # noqa: BLE001  # ends the process: this node's catalog has stopped
            self._on_failed(error)
            return
        finally:
            self._applying = False
        waiting, self._until = self._until, []
        for index, future in waiting:
            if index > self.applied_index:
                self._until.append((index, future))
            elif not future.done():
                future.set_result(None)
        if (self.catalog.state().version, self.catalog.code_version) != version:
            self._on_applied()

    async def _read(self, index: int) -> list[Buffer]:
        """Return committed entries from `index` on, waiting for the repair of damaged ones.

        No entry is applied out of order.
        """
        while True:
            try:
                frames = await self._catalog_log.read(index, self.committed_index, max_bytes=_READ_BYTES)
            except DamagedRange:
                if self._wait_for_repair is None or len(self.replica.configuration.members()) == 1:
                    raise
                self._stalled.set()
                await self._wait_for_repair()
            else:
                self._stalled.clear()
                return frames

    def _resolve(self, header: Header) -> None:
        waiting = self._waiters.pop(header.index, None)
        if waiting is None:
            return
        term, future = waiting
        if future.done():
            return
        if term == header.term:
            future.set_result(header.index)
        else:
            future.set_exception(NotCatalogLeader(self.replica.leader_node))

    # -- the proposer ------------------------------------------------------------------

    async def propose(self, command: bytes) -> int:
        """Append a catalog command and return its index once it is committed and applied here.

        Raises:
            NotCatalogLeader: this replica does not lead, or lost the leadership before the command was
                committed.
        """
        if not self.replica.core.is_leader:
            raise NotCatalogLeader(self.replica.leader_node)
        future: asyncio.Future[int] = self._loop.create_future()
        index = self.replica.log.last_index + 1
        self._waiters[index] = (self.replica.core.term, future)
        try:
            placed, _, _ = self._driver.propose(self.replica, build_control(Kind.COMMAND, command))
        except (NotLeader, TooMuchUncommitted) as error:
            # A leader with that much uncommitted has lost its majority, so it is treated as deposed.
            del self._waiters[index]
            raise NotCatalogLeader(None) from error
        except EntryTooLarge:
            del self._waiters[index]
            raise
        assert placed == index, f"catalog command proposed at {placed}, expected {index}"
        return await future

    async def confirm(self) -> None:
        """Return once a majority confirms that this replica leads, and all committed entries are applied.

        Await it before answering from this node's copy of the catalog if the answer must be up to date: while
        the log is replayed, the copy passes through old states (docs/consensus.md#the-catalog).

        Raises:
            NotCatalogLeader: this replica does not lead.
        """
        if not self.replica.core.is_leader:
            raise NotCatalogLeader(self.replica.leader_node)
        try:
            index = await self._driver.confirm(self.replica)
        except ConnectionError as error:
            raise NotCatalogLeader(self.replica.leader_node) from error
        await self.applied(index)

    async def applied_or_stalled(self, index: int) -> None:
        """Return once everything up to `index` is applied here, or this catalog is stalled by damage."""
        applied = self._loop.create_task(self.applied(index))
        stalled = self._loop.create_task(self._stalled.wait())
        await asyncio.wait((applied, stalled), return_when=asyncio.FIRST_COMPLETED)
        stalled.cancel()
        if not applied.done():
            applied.cancel()

    async def applied(self, index: int) -> None:
        """Return once everything up to `index` is applied here."""
        if self.applied_index < index:
            future: asyncio.Future[None] = self._loop.create_future()
            self._until.append((index, future))
            await future
