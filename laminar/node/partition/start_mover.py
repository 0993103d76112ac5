"""The start of a partition's log: how far it may move, and the `log_start` entry that moves it everywhere.

The leader proposes the entry, which carries the derived state, and each replica moves its own start once it
knows the entry to be committed. This module decides where a log may begin; `retention` decides which records
are expired.
"""

from __future__ import annotations

import asyncio

from laminar.batch import HEADER_SIZE, Kind
from laminar.batch.header import seal
from laminar.http.api.problems import Problem
from laminar.log.format.index_entry import IndexEntry
from laminar.node.consensus.log_start import LogStartRecord
from laminar.node.partition.append_path import AppendPath
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.receipts import Appends, Receipt
from laminar.node.partition.state.channels import Deleted, channel_entry
from laminar.node.partition.state.derived_state import encode_state

# Bytes of the active segment that a new start must delete for the segment to be sealed.
WORTH_A_SEGMENT = 1024 * 1024
# The code version from which on all nodes know `skip` entries.
SKIPS_SINCE = 7
# Offsets that one `skip` entry takes at most, as a header counts records in 32 bits, and entries at a time.
SKIPPED_AT_ONCE = 2**32 - 1
MOST_SKIPS = 1_000


class StartMover:
    """The moves of the start of one replica's log."""

    def __init__(self, context: PartitionContext, appends: AppendPath) -> None:
        self._context = context
        self._appends = appends

    def carry_out(self) -> None:
        """Move the log's start to where the last committed `log_start` entry says, if that is due.

        In a log that failed nothing is moved: the entry is read again when the log is opened again. The
        journal is written in order, so the entry, which carries the derived state, is durable before the new
        start is.
        """
        log, state = self._context.log, self._context.state
        due = state.due_start
        if due is None or log.failure is not None:
            return
        _, record = due
        state.due_start = None
        # The start may have been moved there before a restart.
        if record.index > log.start.index:
            log.set_start(index=record.index, term=record.term, offset=record.offset, time_ms=record.time_ms)

    async def index_before(self, offset: int) -> int:
        """Return the index of the last committed entry before every record at `offset` and later.

        If there is none, return the index of the entry before the log's first.
        """
        context = self._context
        index = await context.log.find_offset(offset)
        if index is None:
            return context.log.start.index if offset <= context.start_offset else context.committed_index
        return min(index - 1, context.committed_index)

    def possible_start(self, index: int) -> int:
        """Return the highest index, at most `index`, of an entry that the log may begin after.

        It may not begin after an entry that is damaged here, as its end offset is unknown; nor between staged
        records and their publish; nor past the stages of an open batch, or an entry with delayed records that
        are pending. If there is no such entry, return the index of the entry before the log's first.
        """
        log, state = self._context.log, self._context.state
        lowest = log.start.index
        while index > lowest:
            whole = min(state.stages.possible_start(index), state.delayed.possible_start(index))
            if whole == index and log.term(index) is not None:
                return index
            index = min(whole, index - 1)
        return lowest

    def may_begin_after(self, index: int) -> bool:
        """Return whether only what can be copied keeps the log from beginning after entry `index`."""
        return (
            self._context.log.term(index) is not None
            and self._context.state.stages.possible_start(index) == index
        )

    def propose(self, index: int) -> asyncio.Future[Receipt]:
        """Propose that all replicas trim entry `index`, which is committed, and all before it. Leader only.

        `index` must be one that `possible_start` returns. When the future is resolved, the proposal is
        committed and the start of this replica's log has moved. The receipt's offset means nothing.
        """
        context = self._context
        context.check_leads()
        log = context.log
        assert log.start.index < index <= context.committed_index and self.possible_start(index) == index, (
            f"a start after {index} of {log!r}, committed {context.committed_index}"
        )
        row = log.index_entry(index)
        record = LogStartRecord(
            index=index,
            term=row.term,
            offset=row.next_offset,
            time_ms=row.append_time_ms,
            configuration=context.replica.configuration_record,
            state=encode_state(context.state.state()),
        )
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._appends.propose(record.frame(), [(future, 0)], opens_segment=self._is_worth_a_segment(row))
        return future

    def delete(self, index: int) -> asyncio.Future[Receipt]:
        """Propose the same on a person's command: what channels have open is lost to them, copied or not.

        These are two entries. If only the first is ever committed, the channels have lost copies before the
        new start and the log begins where it did: less than was asked for, and nothing else. The command
        was not answered then, and to repeat it does the rest.
        """
        self._propose_deleted(self._context.log.index_entry(index).next_offset, [])
        return self.propose(index)

    async def skip_to(self, offset: int) -> None:
        """Have the log go on at `offset`, if it ends before that: no record will have the offsets between.

        Only in a topic that is being imported: an importer's first record gets the offset that it had, and
        what lies before it is trimmed next. Leader only. Return when that is committed.

        Raises:
            Problem: 422 `invalid` for more offsets than are skipped at a time; 503 `not_enabled` while not
                all nodes know such entries; else as an append.
        """
        context, future = self._context, None
        context.check_leads()
        left = offset - context.log.next_offset
        if left > MOST_SKIPS * SKIPPED_AT_ONCE:
            raise Problem(
                "invalid",
                f"{context.name} ends at {context.log.next_offset}, too far before this offset",
                field="before",
                value=offset,
                limit=context.log.next_offset + MOST_SKIPS * SKIPPED_AT_ONCE,
                outcome="not_applied",
            )
        if left > 0:
            context.check_knows(SKIPS_SINCE, "imports")
        while left > 0:  # in one turn: the log ends where the last of them has left it
            count = min(left, SKIPPED_AT_ONCE)
            frame = seal(bytearray(HEADER_SIZE), Kind.SKIP, count=count)
            future = self._appends.append_control(frame, count=count)
            left -= count
        if future is not None:
            await future

    async def delete_copies(self, before: int) -> None:
        """Have channels lose the copies of records before an offset, on a person's command. Leader only.

        The records themselves are not in the log any more. Return when that is committed.
        """
        context = self._context
        context.check_leads()
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        if not self._propose_deleted(before, [(future, 0)]):
            receipt = Receipt(context.number, 0, 0)
            future = self._appends.when_committed(context.log.last_index, receipt, copied=False)
        await future

    def _propose_deleted(self, before: int, appends: Appends) -> bool:
        if not any(offset < before for offset in self._context.state.channels.copies):
            return False
        self._appends.propose(channel_entry([Deleted(0, before)], synced=True), appends)
        return True

    def _is_worth_a_segment(self, row: IndexEntry) -> bool:
        """Return whether the active segment should be sealed, as a start after entry `row` trims much of it.

        If it has no entry after `row`, its files are deleted at once, otherwise by a later start.
        """
        log = self._context.log
        return row.index >= log.segment_first_indexes[-1] and row.position + row.size >= WORTH_A_SEGMENT
