"""Who votes in group 0: decided from records alone, one step that Raft allows at a time."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from laminar.node.catalog.voters import next_step
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.placement.planner import too_many_gone
from laminar.node.placement.wanted import Wanted
from membership.records import (
    CatalogState,
)
from raft.configuration import check_step
from tests.membership.nodes import node
from tests.node.placement.at_once import plan

IDS = {name: number for number, name in enumerate("abcdefgh", 1)}


def state_of(names: str) -> CatalogState:
    """A catalog that knows these nodes, and no topics."""
    return CatalogState(nodes={name: replace(node(name), catalog_replica=IDS[name]) for name in names})


def members(names: str) -> tuple[tuple[int, str], ...]:
    return tuple((IDS[name], name) for name in names)


def end(
    voters: str,
    learners: str = "",
    *,
    nodes: str,
    gone: Collection[str] = (),
    not_ready: str = "",
    put_back: str = "",
    draining: str = "",
    silent: str = "",
) -> tuple[list[str], str]:
    """The voters after each step to the last, and who follows then."""
    state = state_of(nodes)
    for name in put_back:
        older = replace(state.nodes[name], rolled_back=True)
        state = replace(state, nodes=state.nodes | {name: older})
    for name in draining:
        state = replace(state, nodes=state.nodes | {name: replace(state.nodes[name], draining=True)})
    current = ConfigurationRecord(members(voters), members(learners))
    passed = []

    def ready(replica_id: int, name: str) -> bool:
        assert IDS[name] == replica_id
        return name not in gone and name not in not_ready

    def majority_active(wanted: ConfigurationRecord) -> bool:
        answering = [name for _, name in wanted.voters if name not in silent and name not in gone]
        return 2 * len(answering) > len(wanted.voters)

    while (
        step := next_step(current, state, gone=gone, ready=ready, majority_active=majority_active)
    ) is not None:
        check_step(current.configuration(), step.configuration())
        current = step
        passed.append("".join(name for _, name in step.voters))
        assert len(passed) < 20, passed
    return passed, "".join(name for _, name in current.learners)


def test_five_nodes_vote_where_there_are_five_and_three_where_there_are_fewer() -> None:
    """The rest follow. Four voters would survive no more than three do."""
    assert end("a", nodes="ab") == (["a", "ab"], "")
    assert end("a", nodes="abcd") == (["a", "a", "a", "ab", "abc"], "d")
    passed, following = end("abc", "d", nodes="abcdefg")
    assert (passed[-1], following) == ("abcde", "fg")


def test_a_dead_voter_is_removed_before_another_is_promoted_and_follows_again() -> None:
    """In the order of partitions; under its id, as its store has kept what it promised."""
    assert end("abc", "d", nodes="abcd", gone="a") == (["bc", "bc", "bcd"], "a")


def test_of_two_unfit_voters_the_one_goes_without_whom_a_majority_answers() -> None:
    """A was put back and answers, b is gone: without a only c would, of two."""
    assert end("abc", "de", nodes="abcde", gone="b", put_back="a")[0][:1] == ["ac"]
    assert end("abc", "d", nodes="abcd", put_back="a", silent="b") == ([], "d")


def test_nobody_loses_a_seat_that_nobody_can_take() -> None:
    """Three keep a majority of two without the third, which may be back in time; five can do with fewer."""
    assert end("abc", "d", nodes="abcd", gone="a", not_ready="d") == ([], "d")
    assert end("abc", nodes="abc", gone="a") == ([], "")
    assert end("abcde", nodes="abcde", gone="a") == (["bcde", "bcde"], "a")
    assert end("bcde", "a", nodes="abcde", gone="ab") == (["cde", "cde"], "ab")
    assert end("cde", "ab", nodes="abcde", gone="abc") == ([], "ab")


def test_who_is_not_there_is_not_promoted() -> None:
    """Its log may hold all that is committed since it died."""
    assert end("ab", "cd", nodes="abcd", not_ready="c") == (["abd"], "c")


def test_no_voter_is_swapped_while_too_many_nodes_are_gone() -> None:
    """Two of five at once: then it is the network. Those that were given up before count no more."""
    assert end("abc", "de", nodes="abcde", gone="ab", not_ready="")[0] == []
    state = state_of("abcde")
    assert too_many_gone(state, "ab", voting="abc") and not too_many_gone(state, "ab", voting="bcde")
    assert not too_many_gone(state, "abcd", voting="e")
    wanted = Wanted(state, unfit="ab")
    assert plan(state, wanted, gone="ab", present="cde", settled="cde", voting="abc") == []


def test_a_node_that_comes_back_takes_its_seat_again() -> None:
    """Where five are there again, five vote."""
    assert end("bcde", "a", nodes="abcde") == (["bcdea"], "")


def test_a_voter_whose_folder_was_put_back_is_swapped_and_never_votes_again() -> None:
    """It is there, and holds all that is committed; but it has forgotten what it promised."""
    assert end("abc", "d", nodes="abcd", put_back="b") == (["ac", "ac", "acd"], "b")
    assert end("ac", "b", nodes="abc", put_back="b") == ([], "b")


def test_a_draining_voter_is_swapped_and_its_successor_votes_before_it_goes() -> None:
    """It can still vote until then, so there are never fewer voters."""
    assert end("abc", "d", nodes="abcd", draining="a") == (["abcd", "bcd", "bcd"], "a")
    passed, following = end("abcde", "fg", nodes="abcdefg", draining="ab")
    assert (passed[-1], following) == ("cdefg", "ab") and min(map(len, passed)) == 5
    assert end("abc", "d", nodes="abcd", draining="d") == ([], "d")  # nor does it begin to vote


def test_a_draining_voter_waits_for_a_successor_that_cannot_vote_yet() -> None:
    """And goes without one only when all nodes that stay vote already."""
    assert end("abc", "d", nodes="abcd", draining="a", not_ready="d") == ([], "d")
    assert end("abc", nodes="abc", draining="a") == (["bc", "bc"], "a")
    assert end("ab", nodes="ab", draining="ab") == ([], "")  # somebody must vote
    assert end("abc", nodes="abc", draining="a", silent="b") == ([], "")


def test_a_draining_voter_that_is_dead_is_removed_first() -> None:
    """It can vote no more, so it is one like any other that is gone."""
    assert end("abc", "d", nodes="abcd", draining="a", gone="a") == (["bc", "bc", "bcd"], "a")


def test_a_node_that_was_removed_is_no_member_any_more() -> None:
    """Voter or learner: but no step leads to voters of which no majority answers."""
    assert end("abc", "d", nodes="bcd") == (["bc", "bcd"], "")
    assert end("abc", "d", nodes="abc") == (["abc"], "")
    assert end("abc", nodes="bc", silent="b") == ([], "")
