"""The fuzzer over marks and changes finds nothing in the rules, and finds each rule that is switched off."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from raft import AnyMessage, Configuration, Core, Entry
from raft.candidacy import Candidacy
from raft.following import Following
from raft.quorum import Outcome, VoteTally, vote_outcome
from tests.mutation import need_pure_build
from tests.raft import fuzz
from tests.raft.fuzz import Broken, Disk, Schedule

SCHEDULES = 1_000
# So many schedules may pass before a rule that is switched off is missed.
MOST = 20_000

Switch = Callable[[pytest.MonkeyPatch], None]


def test_schedules_of_marks_changes_and_losses() -> None:
    """No leader lacks what is committed, and no group whose replicas are all up waits for ever."""
    releases = changes = 0
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        schedule.run()
        releases += schedule.releases > 0
        changes += any(entry.configuration is not None for entry, _, _ in schedule.committed)

    # The schedules must not be so tame that nothing happens in them.
    assert releases > SCHEDULES // 20
    assert changes > SCHEDULES // 20


def every_voter(patch: pytest.MonkeyPatch) -> None:
    """Grants of every voter win, recovering or not: the rule as it once was."""

    def outcome(self: VoteTally) -> Outcome:
        if self._voters and all(self._grants.get(each, (False, False))[0] for each in self._voters):
            return Outcome.WON
        return vote_outcome(self._voters, self._grants)

    patch.setattr(VoteTally, "outcome", outcome)


def one_power_loss(patch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """One replica forgets once, and nobody's disk is damaged."""
    patch.setattr(fuzz, "SHAPES", (shape,))
    patch.setattr(Schedule, "put_back", lambda self: None)
    make = Schedule.__init__

    def init(self: Schedule, seed: int) -> None:
        make(self, seed)
        self.damages, self.faults_left = False, 1

    patch.setattr(Schedule, "__init__", init)


def every_voter_and_a_removal(patch: pytest.MonkeyPatch) -> None:
    every_voter(patch)
    one_power_loss(patch, (3, 0))
    patch.setattr(Configuration, "with_learner", lambda self, new: self.without(self.voters[-1]))


def every_voter_and_a_promotion(patch: pytest.MonkeyPatch) -> None:
    every_voter(patch)
    one_power_loss(patch, (2, 1))
    patch.setattr(Configuration, "without", lambda self, member: self)


def marks_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Candidacy, "_grants_recovering", lambda self, last_term, last_index: False)


def mark_falls_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Following, "is_complete", property(lambda self: True))


def match_kept_over_an_incarnation(patch: pytest.MonkeyPatch) -> None:
    """What a former incarnation acknowledged is counted when it arrives."""
    receive = Core.receive

    def received(self: Core, message: AnyMessage, entries: tuple[Entry, ...] = (), *, now_ms: int) -> None:
        known = self._incarnations.get(message.sender, 0)
        if message.incarnation < known:
            message = msgspec.structs.replace(message, incarnation=known)
        receive(self, message, entries, now_ms=now_ms)

    patch.setattr(Core, "receive", received)


def own_grant_unmarked(patch: pytest.MonkeyPatch) -> None:
    def opened(self: Candidacy) -> VoteTally:
        self._tally = tally = VoteTally(self._log.configurations.current.voters)
        tally.record(self._identity.replica_id, granted=True, recovering=False)
        return tally

    patch.setattr(Candidacy, "_open_tally", opened)


def released_below_the_latest_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Candidacy, "_reaches_floor", lambda self, last_term, last_index: self._floor is not None)


def released_without_the_learners(patch: pytest.MonkeyPatch) -> None:
    def voters(self: Schedule) -> list[int]:
        committed = [e.configuration for e, _, _ in self.committed if e.configuration is not None]
        now = committed[-1] if committed else self.configuration
        return [each for each in self.recorded() if each in now.voters]

    patch.setattr(Schedule, "to_ask", voters)


def released_after_one_round(patch: pytest.MonkeyPatch) -> None:
    """The end of a log is told together with the incarnation, not after all of these are known."""
    patch.setattr(
        Schedule, "may_answer", staticmethod(lambda replica, incarnation: not replica.core.is_leader)
    )
    release = Schedule.release

    def released(self: Schedule, *, arrives: float = 0.9) -> None:
        self.asked = {each: self.replicas[each].incarnation for each in self.asked or ()}
        release(self, arrives=arrives)

    patch.setattr(Schedule, "release", released)


def old_term_after_a_folder_went_back(patch: pytest.MonkeyPatch) -> None:
    """A replica whose folder went back is recovering, and takes part in the term of its copy."""
    patch.setattr(Schedule, "term_after", staticmethod(lambda old_term, leaders_term: old_term))


# The seed that shows it, as long as the core draws its random numbers as it does now.
@pytest.mark.parametrize(
    ("switch", "seed"),
    [
        (every_voter_and_a_removal, 2402),
        (every_voter_and_a_promotion, 12992),
        (marks_ignored, 14),
        (mark_falls_at_once, 14),
        (match_kept_over_an_incarnation, 1648),
        (own_grant_unmarked, 42),
        (released_below_the_latest_log, 42),
        (released_without_the_learners, 135),
        (released_after_one_round, 3670),
        (old_term_after_a_folder_went_back, 2454),
    ],
)
def test_a_rule_that_is_switched_off_is_missed(
    switch: Switch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the million schedules that found nothing would say nothing."""
    need_pure_build()
    switch(monkeypatch)
    for each in (seed, *range(MOST)):
        try:
            Schedule(each).run()
        except Broken as error:
            if "no leader" not in str(error):
                return
    raise AssertionError(f"{switch.__name__}: {MOST} schedules, and nobody misses the rule")


def test_a_schedule_replays_exactly() -> None:
    """Same seed, same history."""
    ends = []
    for _ in range(2):
        schedule = Schedule(7)
        schedule.run()
        ends.append([Schedule.tell(replica) for replica in schedule.replicas.values()])

    assert ends[0] == ends[1]
    assert all(isinstance(replica, Disk) for replica in schedule.replicas.values())
