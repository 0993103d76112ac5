"""Entries on their way to a majority: what is counted, what is cut, what is under way at a time.

Numbers are those of docs/pitfalls.md: 2 to 5, 18, 21, 25, 53.
"""

from __future__ import annotations

import pytest

from raft import Configuration, Entry, EntryTooLarge, HardState, Role, TooMuchUncommitted, Written
from raft.messages import (
    Append,
    AppendAnswer,
    Heartbeat,
    HeartbeatAnswer,
    PreVoteAnswer,
    VoteAnswer,
)
from raft.progress import Flow
from raft.values import Settings
from tests.raft.harness import Network, Replica, entries_of, head, sent


def test_pitfall_02_a_leader_sends_before_its_sync_and_counts_itself_after_it() -> None:
    """The leader's disk works in parallel, but its own copy counts only when it is durable."""
    network = Network()
    leader = network.elect(1)
    ready = leader.propose(b"a", now_ms=0)
    assert [send.last_index for send in ready.appends] == [2, 2]

    # One follower holds it; our own disk has not answered: one durable copy of three.
    leader.receive((AppendAnswer(*head(2, 1, 1), 2), ()), now_ms=0)
    assert leader.core.committed_index == 1
    leader.sync()
    assert leader.core.committed_index == 2


def test_pitfall_02_followers_alone_can_commit_before_the_leaders_own_disk() -> None:
    """A majority is a majority, also without the leader."""
    network = Network()
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)

    for follower in (2, 3):
        leader.receive((AppendAnswer(*head(follower, 1, 1), 2), ()), now_ms=0)

    assert leader.core.committed_index == 2


def test_pitfall_02_a_follower_acknowledges_only_what_is_durable() -> None:
    """The answer to an append waits for a sync, also the answer to a duplicate not yet synced itself."""
    follower = Network()[2]
    packet = (Append(*head(1, 2, 1), 0, 0, 0, 1), tuple(entries_of(1)))

    for expected in (1, 0):
        ready = follower.receive(packet, now_ms=0)
        assert len(ready.entries) == expected
        assert not ready.messages
        assert [m.match_index for m in ready.messages_after_sync if isinstance(m, AppendAnswer)] == [1]


def test_pitfall_02_a_lone_voter_sends_nothing_before_its_disk_confirmed_its_term() -> None:
    """Else it could crash, lead the same term again, and give a learner another entry for the same place."""
    network = Network(1, learners=1)
    leader = network[1]
    leader.core.campaign(now_ms=0)
    ready = leader.perform()
    assert leader.core.role is Role.LEADER
    leader.core.expire(now_ms=300)
    for told in (ready, leader.perform()):
        assert not told.messages and not told.appends

    network.restart(1)
    assert leader.core.term == 0
    leader.core.campaign(now_ms=300)
    leader.perform()
    network.settle()
    assert network[2].log.entries == leader.log.entries
    assert leader.core.committed_index == 1


def test_pitfall_03_an_old_completion_never_confirms_an_overwrite() -> None:
    """Written, cut, replaced by another leader's entry: the first sync's completion says nothing about it."""
    network = Network()
    replica = network[1]
    replica.receive((Append(*head(2, 1, 1), 0, 0, 0, 2), tuple(entries_of(1, 1))), now_ms=0)
    overwrite = (Append(*head(3, 1, 2), 0, 0, 0, 2), tuple(entries_of(2, 2)))
    ready = replica.receive(overwrite, now_ms=0)
    assert ready.truncate_from == 1

    # The replica becomes leader of term 3 while both of its disk's answers are under way.
    replica.core.campaign(now_ms=0)
    replica.perform()
    replica.receive((PreVoteAnswer(*head(2, 1, 3), granted=True), ()), now_ms=0)
    replica.receive((VoteAnswer(*head(2, 1, 3), granted=True), ()), now_ms=0)
    assert replica.core.is_leader
    replica.core.persisted(Written(2, 1, truncations=0))
    assert replica.core.progress[1].match_index == 0
    assert replica.core.dropped == {"old_completion": 1}

    replica.core.persisted(Written(2, 2, truncations=1))
    assert replica.core.progress[1].match_index == 2


def test_pitfall_03_an_entry_cut_and_sent_again_waits_for_its_own_sync() -> None:
    """A, B, A: written, cut, replaced, cut, and the first one sent again. Index and term are the same, the
    disk is not: until its own sync a crash brings back what was in between.
    """
    network = Network(logs={1: entries_of(1)}, hard_states={1: HardState(1)})
    replica = network[1]
    first, other = Entry(2, 1, b"A", 1), Entry(2, 2, b"B", 1)
    replica.receive((Append(*head(2, 1, 1), 1, 1, 0, 1), (first,)), now_ms=0)
    replica.receive((Append(*head(3, 1, 2), 1, 1, 0, 1), (other,)), now_ms=0)
    replica.receive((Append(*head(2, 1, 3), 1, 1, 0, 1), (first,)), now_ms=0)

    durable = []
    for _ in range(3):
        replica.sync(1)
        durable.append((replica.core._log.durable_index, [e.data for e in replica.durable_log.entries[1:]]))

    assert durable == [(1, [b"A"]), (1, [b"B"]), (2, [b"A"])]
    assert replica.core.dropped == {"old_completion": 2}


def test_pitfall_04_acknowledgements_of_an_earlier_term_count_for_nothing() -> None:
    """Copies are counted only by answers of this term, and only entries of this term are counted."""
    network = Network(logs={1: entries_of(1, 1)}, hard_states={1: HardState(1)})
    leader = network[1]
    network.drop = lambda message: isinstance(message, Append)
    network.elect(1)
    for follower in (2, 3):
        leader.receive((AppendAnswer(*head(follower, 1, 1), 3), ()), now_ms=0)
    assert leader.core.committed_index == 0

    # In this term, but only for the entries of the earlier one (a follower that catches up).
    for follower in (2, 3):
        leader.receive((AppendAnswer(*head(follower, 1, 2), 2), ()), now_ms=0)
    assert leader.core.committed_index == 0

    leader.receive((AppendAnswer(*head(2, 1, 2), 3), ()), now_ms=0)
    assert leader.core.committed_index == 3


@pytest.mark.parametrize("count", [0, 1, 2])
def test_pitfall_05_an_old_append_never_shortens_a_log_that_matches(count: int) -> None:
    """A duplicated or reordered append that fits changes nothing, and is acknowledged as far as we know."""
    follower = Network()[2]
    log = tuple(entries_of(1, 1, 1))
    follower.receive((Append(*head(1, 2, 1), 0, 0, 0, 3), log), now_ms=0)

    ready = follower.receive((Append(*head(1, 2, 1), 0, 0, 0, count), log[:count]), now_ms=0)

    assert ready.truncate_from is None and not ready.entries
    assert follower.core.last_index == 3
    assert [m.match_index for m in ready.messages_after_sync if isinstance(m, AppendAnswer)] == [3]


def test_pitfall_05_a_conflict_cuts_exactly_what_conflicts() -> None:
    """Entries before the first one of another term stay."""
    follower = Network(logs={2: entries_of(1, 1, 2, 2)}, hard_states={2: HardState(2)})[2]

    ready = follower.receive(
        (Append(*head(1, 2, 3), 1, 1, 0, 2), (entries_of(1, 1)[1], Entry(3, 3, b"new", 1))), now_ms=0
    )

    assert (ready.truncate_from, [e.data for e in ready.entries]) == (3, [b"new"])
    assert follower.terms == [1, 1, 3]


def test_pitfall_18_what_is_not_committed_is_bounded_and_the_refusal_names_it() -> None:
    """Without a majority a leader takes its limit and no more; a commit makes room; one always fits."""
    network = Network(settings=Settings(max_uncommitted_bytes=100))
    leader = network.elect(1)
    network.isolate(1)
    leader.propose(b"x" * 1_000, now_ms=0)
    with pytest.raises(TooMuchUncommitted) as refused:
        leader.propose(b"y", now_ms=0)
    assert (refused.value.uncommitted_bytes, refused.value.limit_bytes) == (1_000, 100)
    assert leader.data == [b"x" * 1_000]

    network.heal()
    network.pass_time(600)
    assert leader.core.uncommitted_bytes == 0
    leader.propose(b"y" * 60, now_ms=network.now_ms)
    leader.propose(b"z" * 40, now_ms=network.now_ms)
    with pytest.raises(TooMuchUncommitted):
        leader.propose(b"!", now_ms=network.now_ms)


def test_pitfall_18_a_new_leader_counts_what_it_inherits() -> None:
    """Else each of many leaders without a majority could add another limit's worth."""
    network = Network(settings=Settings(max_uncommitted_bytes=1_000))
    leader = network.elect(1)
    network.drop = lambda message: isinstance(message, AppendAnswer)
    leader.propose(b"x" * 990, now_ms=0)
    network.settle()
    leader.crash()
    network.pass_time(6_000)
    heir = network.leader()

    assert heir.core.committed_index == 1
    with pytest.raises(TooMuchUncommitted):
        heir.propose(b"y" * 20, now_ms=network.now_ms)
    network.heal()
    network.pass_time(600)
    heir.propose(b"y" * 20, now_ms=network.now_ms)


def test_pitfall_18_a_full_tail_stops_no_configuration_change() -> None:
    """To remove who is gone may be what brings the majority back."""
    network = Network(2, settings=Settings(max_uncommitted_bytes=10))
    leader = network.elect(1)
    network[2].crash()
    leader.propose(b"x" * 10, now_ms=0)
    leader.configure(Configuration((1,)), now_ms=0)
    network.settle()

    assert leader.core.committed_index == 3
    assert leader.core.uncommitted_bytes == 0


def test_pitfall_18_what_is_under_way_is_bounded_in_number_too() -> None:
    """A thousand small appends cost a slow follower more than their bytes."""
    network = Network(settings=Settings(max_inflight_appends=3))
    leader = network.elect(1)
    network.drop = lambda message: message.receiver == 3
    for number in range(6):
        leader.propose(b"%d" % number, now_ms=0)
    assert [len(leader.core.progress[follower].inflight) for follower in (2, 3)] == [3, 3]
    assert leader.core.progress[2].next_index == 5

    leader.receive((AppendAnswer(*head(2, 1, 1), 3), ()), now_ms=0)
    assert leader.core.progress[2].next_index == 8, "the rest goes in one append"
    assert len(leader.core.progress[2].inflight) == 2


def test_pitfall_21_one_probe_then_a_pipeline_within_its_window() -> None:
    """Unknown: one append. Known: as many as the window of bytes holds; acknowledgements open it again."""
    settings = Settings(max_append_bytes=20, max_inflight_bytes=60)
    network = Network(settings=settings)
    network.drop = lambda message: isinstance(message, Append)
    leader = network.elect(1)
    item = b"0123456789"
    ready = leader.propose(*[item] * 20, now_ms=0)
    assert not ready.appends
    assert leader.core.progress[2].flow is Flow.PROBE

    ready = leader.receive((AppendAnswer(*head(2, 1, 1), 1), ()), now_ms=0)
    assert [(s.first_index, s.last_index) for s in ready.appends] == [(2, 3), (4, 5), (6, 7)]
    ready = leader.receive((AppendAnswer(*head(2, 1, 1), 5), ()), now_ms=0)
    assert [(s.first_index, s.last_index) for s in ready.appends] == [(8, 9), (10, 11)]


def test_pitfall_21_one_entry_larger_than_an_append_still_goes() -> None:
    """Limits cut between entries, never an entry."""
    network = Network(settings=Settings(max_append_bytes=4, max_inflight_bytes=4))
    leader = network.elect(1)
    leader.propose(b"0123456789", b"0123456789", now_ms=0)
    network.settle()

    assert network[2].core.committed_index == 3


def test_an_entry_that_no_message_carries_is_never_taken() -> None:
    """Not by an empty queue either, which takes what is above every other limit: else its leader, once
    elected with it, leads for ever and commits nothing.
    """
    network = Network(settings=Settings(max_uncommitted_bytes=4, max_entry_bytes=10))
    leader = network.elect(1)
    network.settle()

    with pytest.raises(EntryTooLarge) as refused:
        leader.propose(b"0123456789-", now_ms=0)
    assert (11, 10) == (refused.value.entry_bytes, refused.value.limit_bytes)
    leader.propose(b"0123456789", now_ms=0)
    network.settle()
    assert network[2].core.committed_index == 2


def test_pitfall_21_lost_appends_are_found_by_heartbeats() -> None:
    """A full pipeline was lost, nothing more is proposed: heartbeats find out, and everything arrives."""
    network = Network()
    leader = network.elect(1)
    network.drop = lambda message: isinstance(message, Append)
    leader.propose(b"a", b"b", now_ms=0)
    network.settle()
    network.heal()
    network.pass_time(3 * 200)

    assert network[2].data == network[3].data == [b"a", b"b"]
    assert leader.core.committed_index == 3


def test_pitfall_21_lost_answers_are_not_answered_with_the_data_again() -> None:
    """If the entries came and only the answers were lost, an empty append finds that out."""
    network = Network()
    leader = network.elect(1)
    network.drop = lambda message: isinstance(message, AppendAnswer)
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.heal()
    before = len(leader.readies)
    network.pass_time(3 * 200)

    resent = [send for ready in leader.readies[before:] for send in ready.appends]
    assert resent and all(send.first_index > send.last_index for send in resent)
    assert leader.core.committed_index == 2


def test_pitfall_21_commit_progress_is_told_at_once() -> None:
    """When nothing else goes to a follower, a notice that wants no answer tells it the commit index."""
    network = Network()
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    leader.sync()

    ready = leader.receive((AppendAnswer(*head(2, 1, 1), 2), ()), now_ms=0)

    assert ready.committed_index == 2
    notices = [m for m in ready.messages if isinstance(m, Heartbeat)]
    assert [(m.receiver, m.commit, m.round) for m in notices] == [(2, 2, 0), (3, 2, 0)]
    assert not network[2].receive((notices[0], ()), now_ms=0).messages


def test_pitfall_25_back_tracking_skips_whole_terms() -> None:
    """A follower 500 entries deep in a foreign term is found after two refusals, not 500."""
    foreign = entries_of(*[1] * 10, *[2] * 500)
    own = entries_of(*[1] * 10, *[3] * 500)
    network = Network(logs={1: own, 2: foreign, 3: own}, hard_states=dict.fromkeys((1, 2, 3), HardState(3)))
    network.elect(1)

    refusals = [m for r in network[2].readies for m in sent(r, AppendAnswer) if getattr(m, "rejected", False)]
    assert len(refusals) <= 2
    assert network[2].log.entries == network[1].log.entries


def test_pitfall_53_a_follower_never_commits_an_old_tail() -> None:
    """Its log is as long as the leader's commit index, but its tail is another's."""
    network = Network(logs={2: entries_of(1, 1, 1)}, hard_states={2: HardState(1)})
    follower = network[2]

    ready = follower.receive((Heartbeat(*head(3, 2, 2), 3, 1), ()), now_ms=0)
    assert ready.committed_index is None
    assert isinstance(ready.messages[0], HeartbeatAnswer)

    # Matched up to 1 only: that much is committed, and no more.
    ready = follower.receive((Append(*head(3, 2, 2), 1, 1, 3, 0), ()), now_ms=0)
    assert ready.committed_index == 1


def test_pitfall_53_what_was_matched_is_forgotten_with_the_term_and_by_a_restart() -> None:
    """A new leader, or a new life, starts from nothing."""
    network = Network()
    follower = network[2]
    log = tuple(entries_of(1, 1))
    follower.receive((Append(*head(1, 2, 1), 0, 0, 0, 2), log), now_ms=0)
    follower.sync()

    ready = follower.receive((Heartbeat(*head(3, 2, 2), 2, 1), ()), now_ms=0)
    assert ready.committed_index is None
    follower.sync()
    network.restart(2)
    ready = follower.receive((Heartbeat(*head(3, 2, 2), 2, 1), ()), now_ms=0)
    assert ready.committed_index is None


def test_nothing_is_cut_behind_an_entry_whose_term_damage_hides() -> None:
    """A log must know the term that it ends with. So it waits for the repair (it took the process down),
    matches no further, and cuts what conflicts once the place is whole.
    """
    replica = Replica(
        1,
        Configuration((1, 2, 3)),
        post=lambda message, entries: None,
        entries=entries_of(1, 1, 1, 2),
        hard_state=HardState(3, 0),
    )
    core, whole = replica.core, replica.log
    # As stamped on entry 4, entry 3 is committed; and its bytes have rotted.
    core._log.commit(3)
    term = whole.term
    whole.term = lambda index: None if index == 3 else term(index)  # type: ignore[method-assign]
    append = (Append(*head(2, 1, 3), 2, 1, 3, 2), tuple(entries_of(1, 1, 1, 3)[2:]))

    ready = replica.receive(append, now_ms=1)
    assert ready.truncate_from is None and not ready.entries
    assert [3] == [m.match_index for m in ready.messages_after_sync if isinstance(m, AppendAnswer)]
    whole.term = term  # type: ignore[method-assign]
    ready = replica.receive(append, now_ms=2)
    assert 4 == ready.truncate_from
    assert [4] == [m.match_index for m in ready.messages_after_sync if isinstance(m, AppendAnswer)]


def test_a_leader_whose_appends_are_lost_steps_down_and_slow_disks_depose_nobody() -> None:
    """Heartbeats take another connection: the followers hear it, and nothing can be committed."""
    network = Network()
    leader = network.elect(1)
    network.pass_time(1_000)
    leader.propose(b"slow", now_ms=network.now_ms)
    for _ in range(60):
        network.pass_time(200, settle=False)
        network.settle(sync=False)
    assert network.leaders() == [1] and leader.core.committed_index < leader.core.last_index
    network.settle()
    assert leader.core.committed_index == leader.core.last_index

    network.drop = lambda message: isinstance(message, Append) and message.sender == 1
    network.pass_time(20_000)
    assert network.leaders() == [1], "nothing waits"
    leader.propose(b"lost", now_ms=network.now_ms)
    network.pass_time(20_000)
    other = network.leader()
    assert other is not leader and network.leaders() == [other.replica_id]
    other.propose(b"new", now_ms=network.now_ms)
    network.settle()
    network.pass_time(1_000)
    assert [b"slow", b"new"] == leader.data == other.data
