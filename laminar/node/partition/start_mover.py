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
from laminar.node.partition.state.channel_changes import Deleted, channel_entry
from laminar.node.partition.state.derived_state import encode_state

# Bytes of the active segment that a new start must delete for the segment to be sealed.
WORTH_A_SEGMENT = 1024 * 1024
# The code version from which on all nodes know `skip` entries.
SKIPS_SINCE = 7
# Offsets that one `skip` entry takes at most, as a header counts records in 32 bits, and entries at a time.
SKIPPED_AT_ONCE = 2**32 - 1
MOST_SKIPS = 1_000


class StartMover:
    """Moves the start of one replica's log: proposes new starts as leader, and carries them out."""

    def __init__(self, context: PartitionContext, appends: AppendPath) -> None:
        self._context = context
        self._appends = appends

    def carry_out(self) -> None:
        """Move the log's start as the last committed `log_start` entry says, unless that is done already.

        If the log has failed nothing is moved; the entry is found again when the log is opened again. The
        journal is written in order, so the entry with the derived state is durable before the new start is.
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
        """Return the index of the last committed entry whose records are all before `offset`.

        If there is none, return the index of the entry before the log's first.
        """
        context = self._context
        index = await context.log.find_offset(offset)
        if index is None:
            return context.log.start.index if offset <= context.start_offset else context.committed_index
        return min(index - 1, context.committed_index)

    def possible_start(self, index: int) -> int:
        """Return the highest index, at most `index`, of an entry after which the log may begin.

        The log may not begin after an entry that is damaged here, because its end offset is unknown; nor
        between staged records and the entry that publishes them; nor after staged records of an open batch or
        delayed records that are pending. If no index is possible, return that before the log's first entry.
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
        """Return whether the log may begin after entry `index` once channels' and delayed records are copied.

        False if `index` is damaged, or staged records keep the log.
        """
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
        """Propose to trim entries up to `index` on an operator's command, without regard to channels.

        Records that channels have out or aside before the new start are lost to them, copied or not. Two
        entries are proposed: the first deletes the copies, the second moves the start. If only the first is
        committed, the log begins where it did before and the command has failed; repeating it does the rest.
        Leader only.
        """
        self._propose_deleted(self._context.log.index_entry(index).next_offset, [])
        return self.propose(index)

    async def skip_to(self, offset: int) -> None:
        """Skip offsets so that the next record gets `offset`, if the log ends before it. Leader only.

        This is for topics that are being imported: the first imported record gets the offset that it had in
        the source, and the skipped offsets are trimmed next. Returns when the `skip` entries are committed.

        Raises:
            Problem: 422 `invalid` if too many offsets would be skipped; 503 `not_enabled` until all nodes
                run a version that knows `skip` entries; and the problems of an append.
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
        while left > 0:  # in one turn of the loop, so that no other append comes between these entries
            count = min(left, SKIPPED_AT_ONCE)
            frame = seal(bytearray(HEADER_SIZE), Kind.SKIP, count=count)
            future = self._appends.append_control(frame, count=count)
            left -= count
        if future is not None:
            await future

    async def delete_copies(self, before: int) -> None:
        """Delete the copies that channels have of records before an offset, on an operator's command.

        The original records have been trimmed already, so the channels lose these records. Returns when the
        deletion is committed. Leader only.
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
        """Return whether to seal the active segment, because a start after entry `row` trims much of it.

        If the segment has no entry after `row`, its files are deleted at once, otherwise by a later start.
        After skipped offsets a new segment is opened in any case: a segment that contained both the skipped
        offsets and records would have a first offset far before its first record.
        """
        log = self._context.log
        is_worth = row.kind == Kind.SKIP or row.position + row.size >= WORTH_A_SEGMENT
        return is_worth and row.index >= log.segment_first_indexes[-1]
