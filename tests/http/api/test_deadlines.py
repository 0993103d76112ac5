"""Outer waits cover inner ones: what must hold between the durations of client and node."""

from __future__ import annotations

from laminar.http.api import deadlines as d


def test_each_outer_wait_of_an_append_covers_the_inner_one() -> None:
    """So the leader's answer, that the outcome is unknown, still reaches who asked."""
    assert d.CLIENT_ATTEMPT_S > d.FORWARDED_APPEND_S > d.COMMIT_WAIT_S + d.COMMIT_CHECK_S


def test_a_client_outlasts_one_election_of_the_leader() -> None:
    """Within one attempt: the old leader's silence is noticed, a new one is found, and it answers."""
    noticed_s = d.STILL_LEADS_CHECK_S + d.ASK_WHO_LEADS_S
    assert d.CLIENT_ATTEMPT_S > noticed_s + d.ELECTION_WAIT_S + d.FORWARDED_READ_S


def test_attempts_go_on_for_longer_than_an_election() -> None:
    """Else the first one that meets an election would be the last."""
    for attempts_s in (d.APPEND_ATTEMPTS_S, d.READ_ATTEMPTS_S, d.STEP_ATTEMPTS_S):
        assert attempts_s > d.ELECTION_WAIT_S > d.SECOND_HOP_WAIT_S > d.ASK_WHO_LEADS_S


def test_a_client_has_time_for_attempts_at_several_nodes() -> None:
    """Of three nodes, two may be silent."""
    assert d.CLIENT_TOTAL_S >= 3 * d.CLIENT_ATTEMPT_S


def test_a_client_waits_for_an_election_before_it_does_without_a_leader() -> None:
    """A replica may know less than was acknowledged; only a majority that is gone justifies asking it."""
    assert d.CLIENT_TOTAL_S / 2 > d.CLIENT_LEADER_WAIT_S > d.ELECTION_WAIT_S + d.ASK_WHO_LEADS_S


def test_pauses_are_short_beside_what_they_lie_between() -> None:
    """A look that comes late would be felt after each election."""
    assert 10 * d.LOOK_UP_PAUSE_S <= d.ELECTION_WAIT_S and 10 * d.STEP_PAUSE_S <= d.STEP_ATTEMPTS_S


def test_a_claim_is_undone_before_who_forwarded_it_gives_up() -> None:
    """Else the answer would be lost, and the member own the partition without knowing it."""
    assert d.FORWARDED_STEP_S > d.GATE_S + d.TRANSFER_S > d.GATE_ATTEMPTS_S + d.FORWARDED_GATE_S
