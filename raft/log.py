"""The replica's log as the core sees it: the driver's log, plus what the driver has not been told yet.

Between an input and `take_ready`, entries that the core has accepted are *pending* here. Terms and sizes are
answered over both parts as if they were one log. Three marks stand on it: `committed_index`, `durable_index`
(what our own disk holds) and the configurations in force. This module keeps the log's own rules (no hole,
terms never fall, nothing committed is ever cut) and knows nothing of leaders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raft.configuration import Configuration, History
from raft.values import Entry, LogView


class RaftLog:
    """A log whose tail is pending; `last_index` and `last_term` include that tail."""

    __slots__ = (
        "_pending",
        "_truncate_from",
        "_view",
        "_view_last",
        "committed_index",
        "configurations",
        "durable_index",
        "last_index",
        "last_term",
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
        self._pending: list[Entry] = []
        self._truncate_from: int | None = None
        assert view.first_index - 1 <= committed_index <= view.last_index, (
            f"committed {committed_index} outside of the log {view.first_index}..{view.last_index}"
        )
        self.committed_index = committed_index
        # A log that is there after a restart was read from the disk, so all of it is durable.
        self.durable_index = view.last_index
        self.configurations = History(configuration, configurations)
        self.configurations.committed(committed_index)

    @property
    def first_index(self) -> int:
        """The first entry that can be read; the term of the one before it is known too."""
        return self._view.first_index

    def term(self, index: int) -> int | None:
        """The term of entry `index`; None if we don't hold it (any more)."""
        if index <= self._view_last:
            return self._view.term(index)
        place = index - self._view_last - 1
        return self._pending[place].term if place < len(self._pending) else None

    def size(self, index: int) -> int:
        """The bytes of entry `index`, which must be there."""
        if index <= self._view_last:
            return self._view.size(index)
        return self._pending[index - self._view_last - 1].size

    def last_at_or_below_term(self, bound: int, term: int) -> int:
        """The last index at or below `bound` whose term is at most `term`.

        Terms never fall along a log, so this halves instead of walking. The answer may lie one below what we
        know (`first_index` - 2) when everything we know is of a later term.
        """
        low = self._view.first_index - 1
        high = min(bound, self.last_index)
        if high < low:
            return bound
        if _known(self.term(low)) > term:
            return low - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if _known(self.term(middle)) <= term:
                low = middle
            else:
                high = middle - 1
        return low

    def append(self, entries: Sequence[Entry]) -> None:
        """Add `entries` behind the last one; the driver hears of them in the next Ready."""
        index, term = self.last_index, self.last_term
        if not self._pending and self._truncate_from is None:
            assert self._view.last_index == index, (
                f"the driver's log ends at {self._view.last_index}, ours at {index}: a Ready was not applied"
            )
        for entry in entries:
            index += 1
            assert entry.index == index, f"entry {entry.index} appended at {index}"
            assert entry.term >= term, f"entry {index} of term {entry.term} after term {term}"
            term = entry.term
            if entry.configuration is not None:
                self.configurations.appended(index, entry.configuration)
        self._pending.extend(entries)
        self.last_index, self.last_term = index, term

    def truncate(self, index: int) -> None:
        """Cut entry `index` and all behind it. Only for a real conflict, never for what is committed."""
        assert self.committed_index < index <= self.last_index, (
            f"truncation at {index}, committed {self.committed_index}, last {self.last_index}"
        )
        last_term = _known(self.term(index - 1))
        if index <= self._view_last:
            self._pending.clear()
            self._view_last = index - 1
            if self._truncate_from is None or index < self._truncate_from:
                self._truncate_from = index
        else:
            del self._pending[index - self._view_last - 1 :]
        self.last_index, self.last_term = index - 1, last_term
        self.durable_index = min(self.durable_index, index - 1)
        self.configurations.truncated(index)

    def commit(self, index: int) -> None:
        """Move the commit index up to `index`."""
        assert self.committed_index <= index <= self.last_index, (
            f"commit moves from {self.committed_index} to {index}, last is {self.last_index}"
        )
        self.committed_index = index
        self.configurations.committed(index)

    def persisted(self, index: int, term: int) -> bool:
        """Note that our disk holds the log up to (index, term); False if that entry is no longer ours.

        An entry may be written, cut, and replaced by one of the same index while its sync is under way. The
        term tells them apart: the sync of the old one says nothing about the new one (RELIABILITY.md, pitfall
        3).
        """
        if index > self._view_last or self._view.term(index) != term:
            return False
        self.durable_index = max(self.durable_index, index)
        return True

    def take(self) -> tuple[int | None, Sequence[Entry]]:
        """Hand over where to cut and what to append; the driver applies both before the next input."""
        truncate_from, entries = self._truncate_from, self._pending
        if truncate_from is None and not entries:
            return None, ()
        self._truncate_from = None
        self._view_last = self.last_index
        self._pending = []
        return truncate_from, entries


def _known(term: int | None) -> int:
    assert term is not None, "the term of an entry within the log is unknown"
    return term
