"""Whether a person may accept a loss, by what the catalog has and what the replicas say."""

from __future__ import annotations

import pytest

from laminar.node.api.cluster.accept_loss import _Survey
from laminar.node.api.cluster.replica_status import ReplicaState
from membership.records import (
    LeavingReplica,
    PartitionRecord,
    ReplicaRecord,
)

GROUP = b"g" * 16


def replica(number: int, *, made: bool = True) -> ReplicaRecord:
    return ReplicaRecord(number, "_abcde"[number], bytes(16), made=made)


def told(node: str, voters: list[int], last_index: int) -> ReplicaState:
    return ReplicaState(0, node, voters=voters, last_term=3 if last_index else 0, last_index=last_index)


@pytest.mark.parametrize(
    ("replicas", "leaving", "voters", "absent"),
    [
        # The third voter died while the one that takes the place of the second was being filled.
        ([1, 3, 4], [], [1, 3], ["c"]),
        # Of two voters one died for good, and nobody led who could have added the other's successor.
        ([1, 4], [2], [1, 2], ["b"]),
    ],
)
@pytest.mark.parametrize("filled", [0, 10])
def test_a_replica_that_is_no_voter_yet_makes_no_majority(
    replicas: list[int], leaving: list[int], voters: list[int], absent: list[str], filled: int
) -> None:
    """It elects nobody: else the group waits for ever, and is said to elect a leader by itself."""
    record = PartitionRecord(
        *("t", 0, GROUP, "live"),
        [replica(each, made=each != 4 or filled > 0) for each in replicas],
        1,
        leaving=[LeavingReplica(replica(each), "dead") for each in leaving],
    )
    states = {(0, "a"): told("a", voters, 20), (0, "d"): told("d", voters if filled else [], filled)}
    survey = _Survey(record, states)

    assert "" == survey.refusal({"a", "d"}, empty=False)
    assert not survey.has_majority
    assert ("a", absent) == (survey.best.node, survey.absent)


def test_voters_that_are_a_majority_elect_a_leader_by_themselves() -> None:
    record = PartitionRecord("t", 0, GROUP, "live", [replica(each) for each in (1, 2, 4)], 1)
    states = {(0, "a"): told("a", [1, 2], 20), (0, "b"): told("b", [1, 2], 20)}

    assert "they elect a leader by themselves" in _Survey(record, states).refusal({"a", "b"}, empty=True)


def test_the_loss_of_all_copies_is_accepted_only_by_its_name() -> None:
    """None answers, or only a new replica that nothing has filled: all records are given up."""
    record = PartitionRecord("t", 0, GROUP, "live", [replica(1)], 1)
    assert "--empty" in _Survey(record, {}).refusal(set(), empty=False)
    assert "" == _Survey(record, {}).refusal(set(), empty=True)
    assert "are alive" in _Survey(record, {}).refusal({"a"}, empty=True)

    replaced = PartitionRecord(
        *("t", 0, GROUP, "live"), [replica(4, made=False)], 1, leaving=[LeavingReplica(replica(1), "dead")]
    )
    states = {(0, "d"): told("d", [], 0)}
    assert "--empty" in _Survey(replaced, states).refusal({"d"}, empty=False)
    assert "" == _Survey(replaced, states).refusal({"d"}, empty=True)

    states[0, "a"] = told("a", [1], 20)
    assert "elect a leader" in _Survey(replaced, states).refusal({"a", "d"}, empty=True), "it is back"


@pytest.mark.parametrize("filled", [0, 10])
def test_what_a_replica_that_is_to_leave_holds_is_not_given_up_while_it_answers(filled: int) -> None:
    """The others died while the new one was being filled. To go on with that one would drop what is there."""
    record = PartitionRecord(
        *("t", 0, GROUP, "live"),
        [replica(4, made=filled > 0), replica(2), replica(3)],
        1,
        leaving=[LeavingReplica(replica(1), "moved")],
    )
    states = {(0, "a"): told("a", [1, 2, 3], 20), (0, "d"): told("d", [1, 2, 3] if filled else [], filled)}
    for empty in (False, True):
        assert "on a is to leave, and holds more" in _Survey(record, states).refusal({"a", "d"}, empty=empty)

    del states[0, "a"]
    assert "" == _Survey(record, states).refusal({"d"}, empty=not filled), "a person has stopped it for good"
    assert "are alive" in _Survey(record, states).refusal({"a", "d"}, empty=not filled)
