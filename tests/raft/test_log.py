"""The unstable log and the history of configurations, against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raft import Configuration, ConfigurationRefused, Entry, Written
from raft.configuration import check_step
from raft.log import RaftLog
from tests.raft.harness import MemoryLog, entries_of

THREE = Configuration((1, 2, 3))


def raft_log(view: MemoryLog, committed_index: int = 0) -> RaftLog:
    return RaftLog(view, committed_index=committed_index, configuration=THREE, configurations=())


class LogMachine(RuleBasedStateMachine):
    """The core's log, whose tail the driver takes over now and then, is one list of entries."""

    def __init__(self) -> None:
        super().__init__()
        self.view = MemoryLog()
        self.log = raft_log(self.view)
        self.model: list[Entry] = []
        self.term = 1
        # What was handed out and is not written yet, what lies on the disk, and what a sync has covered.
        self.writes: list[tuple[int | None, list[Entry]]] = []
        self.disk: list[Entry] = []
        self.completions: list[Written] = []

    @rule(count=st.integers(1, 3), raise_term=st.booleans(), change=st.booleans())
    def append(self, count: int, raise_term: bool, change: bool) -> None:
        self.term += raise_term
        entries: list[Entry] = []
        for _ in range(count):
            index = len(self.model) + len(entries) + 1
            configuration = Configuration((index,)) if change else None
            entries.append(Entry(index, self.term, b"", index, configuration))
        self.log.append(entries)
        self.model += entries

    @precondition(lambda self: len(self.model) > self.log.committed_index)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(self.log.committed_index + 1, len(self.model)))
        self.log.truncate(index)
        del self.model[index - 1 :]
        self.term += 1
        self.take()

    @precondition(lambda self: len(self.model) > self.log.committed_index + 1)
    @rule(data=st.data())
    def flap(self, data: st.DataObject) -> None:
        """Cut by a leader of another term, then sent again by one that has the old entries: A, B, A."""
        index = data.draw(st.integers(self.log.committed_index + 1, len(self.model)))
        again = self.model[index - 1 :]
        self.truncate_at(index)
        other = Entry(index, again[-1].term + 1, b"", index)
        self.log.append([other])
        self.model.append(other)
        self.take()
        if data.draw(st.booleans()):
            self.truncate_at(index)
            self.log.append(again)
            self.model += again
            self.take()
        self.term = max(self.term, other.term)

    def truncate_at(self, index: int) -> None:
        self.log.truncate(index)
        del self.model[index - 1 :]
        self.take()

    @rule()
    def take(self) -> None:
        truncate_from, entries = self.log.take()
        if truncate_from is not None:
            self.view.truncate(truncate_from)
        self.view.entries.extend(entries)
        assert self.model == self.view.entries
        if truncate_from is not None or entries:
            self.writes.append((truncate_from, list(entries)))
            if self.model:
                self.completions.append(Written(len(self.model), self.model[-1].term, self.log.truncations))
            else:
                self.completions.append(Written(0, 0, self.log.truncations))

    @precondition(lambda self: self.log.committed_index < len(self.model))
    @rule()
    def commit(self) -> None:
        self.log.commit(self.log.committed_index + 1)

    @precondition(lambda self: self.writes)
    @rule()
    def sync(self) -> None:
        """The disk does one more of the writes, in order, and says so."""
        truncate_from, entries = self.writes.pop(0)
        if truncate_from is not None:
            del self.disk[truncate_from - 1 :]
        self.disk += entries
        self.log.persisted(self.completions.pop(0))
        if not self.writes:
            self.take()
        if not self.writes:
            assert len(self.model) == self.log.durable_index

    @invariant()
    def durable_is_what_lies_on_the_disk(self) -> None:
        durable = self.log.durable_index
        assert self.disk[:durable] == self.model[:durable]

    @invariant()
    def what_waits_is_counted(self) -> None:
        """Whole calls are counted, and let go of when the last entry of each is committed."""
        waiting = sum(entry.size for entry in self.model[self.log.committed_index :])
        assert waiting <= self.log.uncommitted_bytes
        assert (waiting == 0) == (self.log.uncommitted_bytes == 0)

    @invariant()
    def reads_like_the_list(self) -> None:
        log, model = self.log, self.model
        assert len(model) == log.last_index
        assert (model[-1].term if model else 0) == log.last_term
        assert [0, *(e.term for e in model), None] == [log.term(i) for i in range(len(model) + 2)]
        assert [e.size for e in model] == [log.size(i) for i in range(1, len(model) + 1)]
        changes = [THREE, *(e.configuration for e in model if e.configuration is not None)]
        assert changes[-1] == log.configurations.current


TestLog = LogMachine.TestCase


@given(
    st.lists(st.integers(1, 4), max_size=12).map(sorted),
    st.integers(0, 14),
    st.integers(0, 5),
    st.integers(0, 12),
)
def test_the_search_by_term_finds_what_walking_finds(
    terms: list[int], bound: int, term: int, trimmed: int
) -> None:
    """Halving finds the last index at or below the bound whose term is low enough, as walking does."""
    view = MemoryLog(entries_of(*terms))
    view.trim(min(trimmed, len(terms)))
    log = raft_log(view, view.start_index)

    expected = bound if bound < view.start_index else min(bound, len(terms))
    while view.start_index <= expected and (log.term(expected) or 0) > term:
        expected -= 1

    assert expected == log.last_at_or_below_term(bound, term)


def test_committed_entries_are_never_cut() -> None:
    """A truncation at the commit index is a mistake of ours, and says so with the numbers."""
    log = raft_log(MemoryLog(entries_of(1, 1, 1)), committed_index=2)

    with pytest.raises(AssertionError, match="truncation at 2, committed 2"):
        log.truncate(2)


def test_a_driver_that_skips_a_ready_is_told() -> None:
    """The view must hold what the last Ready said before anything is appended."""
    log = raft_log(MemoryLog())
    log.append(entries_of(1))
    log.take()

    with pytest.raises(AssertionError, match="a Ready was not applied"):
        log.append([Entry(2, 1, b"", 1)])


ONE_STEP = [
    ("add a learner", Configuration((1, 2), (3,)), None),
    ("remove a voter", Configuration((1,)), None),
    ("add a voter directly", Configuration((1, 2, 3)), "not_a_learner"),
    ("swap a voter", Configuration((1,), (3,)), "not_one_step"),
    ("demote", Configuration((1,), (2,)), "not_one_step"),
    ("nothing", Configuration((1, 2)), "not_one_step"),
    ("nobody left", Configuration((), (1,)), "no_voters"),
    ("twice", Configuration((1, 2), (2,)), "malformed"),
]


@pytest.mark.parametrize(
    ("what", "new", "reason"), ONE_STEP, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_configuration_changes_by_one_step(what: str, new: Configuration, reason: str | None) -> None:
    """Thesis 4.1: one replica at a time, and a voter comes by way of a learner."""
    if reason is None:
        check_step(Configuration((1, 2)), new)
        return
    with pytest.raises(ConfigurationRefused) as refusal:
        check_step(Configuration((1, 2)), new)
    assert refusal.value.reason == reason


def test_steps_are_named() -> None:
    """The three steps by their names; each checks what it needs."""
    grown = Configuration((1,)).with_learner(2)

    assert Configuration((1,), (2,)) == grown
    assert Configuration((1, 2)) == grown.promoted(2)
    assert Configuration((1,)) == grown.without(2)
    for step, replica_id in ((grown.with_learner, 2), (grown.promoted, 1), (grown.without, 3)):
        with pytest.raises(ConfigurationRefused):
            step(replica_id)
