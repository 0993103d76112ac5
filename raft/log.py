"""The replica's log as the core sees it: the driver's log, and entries that no `Ready` has handed out.

Between an input and `take_ready`, entries that the core has accepted are *pending* here. Terms and sizes are
answered over both parts as if they were one log. It also keeps `committed_index`, `durable_index` (what our
own disk holds) and the configurations in force. Invariants: the log has no gap, terms never fall along it,
and nothing committed is ever truncated. It knows nothing of leaders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from raft.configuration import Configuration, History
from raft.values import Entry, LogView, Written


class RaftLog:
    """The driver's log and the pending entries after it as one log, up to `last_index` and `last_term`."""

    __slots__ = (
        "_uncommitted",
        "_view",
        "_view_last",
        "committed_index",
        "configurations",
        "durable_index",
        "last_index",
        "last_term",
        "pending",
        "truncate_from",
        "truncations",
        "uncommitted_bytes",
    )

    def __init__(
        self,
        view: LogView,
        *,
        committed_index: int,
        configuration: Configuration,
        configurations: Iterable[tuple[int, Configuration]],
    ) -> None:
        self._view = view
        self._view_last = self.last_index = view.last_index
        self.last_term = view.last_term
        # What `take` hands out.
        self.pending: list[Entry] = []
        self.truncate_from: int | None = None
        assert view.first_index - 1 <= committed_index <= view.last_index, (
            f"committed {committed_index} outside of the log {view.first_index}..{view.last_index}"
        )
        self.committed_index = committed_index
        # A log that is there after a restart was read from the disk, so all of it is durable.
        self.durable_index = view.last_index
        # How often entries that a `Ready` had handed out were truncated since the start.
        self.truncations = 0
        # The entries that were appended since the start and are not committed, oldest first, as one pair
        # (last index, bytes) for each call of `append`.
        self._uncommitted: deque[tuple[int, int]] = deque()
        self.uncommitted_bytes = 0
        self.configurations = History(configuration, configurations)
        self.configurations.committed(committed_index)

    @property
    def first_index(self) -> int:
        """The index of the first entry that is kept; the term of the entry before it is known too."""
        return self._view.first_index

    def term(self, index: int) -> int | None:
        """Return the term of entry `index`; None if we don't hold it (any more), or it is damaged."""
        if index == self.last_index:
            return self.last_term
        if index <= self._view_last:
            return self._view.term(index)
        place = index - self._view_last - 1
        return self.pending[place].term if place < len(self.pending) else None

    def size(self, index: int) -> int:
        """Return the size of entry `index` in bytes; the log must hold that entry."""
        if index <= self._view_last:
            return self._view.size(index)
        return self.pending[index - self._view_last - 1].size

    def last_at_or_below_term(self, bound: int, term: int) -> int:
        """Return the last index at or below `bound` whose term is at most `term`.

        Terms never fall along a log, so this is a binary search. It begins at `first_index` - 1, the first
        entry whose term is known: the answer is `first_index` - 2 when every known term is later, and `bound`
        itself when no term at or below it is known.
        """
        low = self._view.first_index - 1
        high = min(bound, self.last_index)
        if high < low:
            return bound
        if _known(self.term(low)) > term:
            return low - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if self._term_at_or_before(middle) <= term:
                low = middle
            else:
                high = middle - 1
        return low

    def _term_at_or_before(self, index: int) -> int:
        """Return the term of an entry or, if it is damaged, of the nearest one before it that is not."""
        while (term := self.term(index)) is None:
            index -= 1
            assert index >= self._view.first_index - 1, "no term is known"
        return term

    def append(self, entries: Sequence[Entry]) -> None:
        """Add `entries` after the last one; the next `Ready` hands them out."""
        index, term = self.last_index, self.last_term
        size_bytes = 0
        if not self.pending and self.truncate_from is None:
            assert self._view.last_index == index, (
                f"the driver's log ends at {self._view.last_index}, ours at {index}: a Ready was not applied"
            )
        for entry in entries:
            index += 1
            assert entry.index == index, f"entry {entry.index} appended at {index}"
            assert entry.term >= term, f"entry {index} of term {entry.term} after term {term}"
            term = entry.term
            size_bytes += entry.size
            if entry.configuration is not None:
                self.configurations.appended(index, entry.configuration)
        self.pending.extend(entries)
        self.last_index, self.last_term = index, term
        self._uncommitted.append((index, size_bytes))
        self.uncommitted_bytes += size_bytes

    def truncate(self, index: int) -> None:
        """Remove entry `index` and all after it. Only for a real conflict, never what is committed."""
        assert self.committed_index < index <= self.last_index, (
            f"truncation at {index}, committed {self.committed_index}, last {self.last_index}"
        )
        last_term = _known(self.term(index - 1))
        self._uncount_from(index)
        if index <= self._view_last:
            self.truncations += 1
            self.pending.clear()
            self._view_last = index - 1
            if self.truncate_from is None or index < self.truncate_from:
                self.truncate_from = index
        else:
            del self.pending[index - self._view_last - 1 :]
        self.last_index, self.last_term = index - 1, last_term
        self.durable_index = min(self.durable_index, index - 1)
        self.configurations.truncated(index)

    def _uncount_from(self, index: int) -> None:
        """Take entry `index` and all after it out of `uncommitted_bytes`; call it before they are removed."""
        uncommitted = self._uncommitted
        while uncommitted and uncommitted[-1][0] >= index:
            _, size_bytes = uncommitted.pop()
            self.uncommitted_bytes -= size_bytes
            first = uncommitted[-1][0] + 1 if uncommitted else self.committed_index + 1
            if first < index:
                # Only the later entries of this call go. When it is the oldest call, some of its entries
                # may be committed already, and are counted until all are.
                kept_bytes = sum(self.size(kept) for kept in range(first, index))
                uncommitted.append((index - 1, min(kept_bytes, size_bytes)))
                self.uncommitted_bytes += uncommitted[-1][1]

    def commit(self, index: int) -> None:
        """Advance the commit index to `index`."""
        assert self.committed_index <= index <= self.last_index, (
            f"commit moves from {self.committed_index} to {index}, last is {self.last_index}"
        )
        if self.configurations.index > self.committed_index:
            self.configurations.committed(index)
        self.committed_index = index
        uncommitted = self._uncommitted
        while uncommitted and uncommitted[0][0] <= index:
            self.uncommitted_bytes -= uncommitted.popleft()[1]

    def persisted(self, written: Written) -> bool:
        """Note that our disk holds the log up to `written`, an earlier end; return False if that is outdated.

        While an entry's sync is under way, the entry may be truncated, and another one take its index; even
        the same one, when a third leader sends it again. Index and term do not tell these apart, so a
        completion counts only if nothing was truncated since its entries were written (docs/pitfalls.md,
        number 3). The sync of the truncation completes later, and covers all that is left.
        """
        if written.truncations != self.truncations:
            return False
        index, term = written.index, written.term
        # The term is unknown when the log's start has moved past that entry meanwhile.
        assert index <= self._view_last and self.term(index) in (term, None), (
            f"({index}, {term}) is durable, entry {index} has term {self.term(index)}, last {self.last_index}"
        )
        self.durable_index = max(self.durable_index, index)
        return True

    def take(self) -> tuple[int | None, Sequence[Entry]]:
        """Return the index to truncate from (or None) and the pending entries, and clear both.

        The driver applies both before the next input.
        """
        truncate_from, entries = self.truncate_from, self.pending
        self.truncate_from = None
        self._view_last = self.last_index
        self.pending = []
        return truncate_from, entries


def _known(term: int | None) -> int:
    assert term is not None, "the term of an entry within the log is unknown"
    return term
