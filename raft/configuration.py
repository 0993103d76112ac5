"""Configurations of a group: its members, and how they may change (thesis 4).

A configuration takes effect when its entry is *appended*. When that entry is truncated, the one before it is
in force again. So the current configuration follows from the log alone; `History` keeps the configurations
of the log in a stack, which a truncation pops. Changes are one at a time: consecutive voter sets differ by
one replica at most, so any two of their majorities share a voter (thesis 4.1) and no joint phase is needed.
When a change may be *proposed* depends on the leader's log and is decided in `raft.leadership`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class ConfigurationRefused(Exception):
    """This configuration change can't be proposed now, or at all; `.reason` is one word for programs."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class Configuration(msgspec.Struct, frozen=True, array_like=True):
    """The ids of the replicas that form majorities (`voters`), and of those that only follow (`learners`).

    `abandoned` are former members, perhaps a majority, without which the group goes on by an operator's
    decision. Their messages are ignored; every later configuration keeps the list.
    """

    voters: tuple[int, ...]
    learners: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()

    def members(self) -> tuple[int, ...]:
        """Return the ids of all members: voters first, then learners."""
        return self.voters + self.learners

    def with_learner(self, replica_id: int) -> Configuration:
        """Return the configuration after adding `replica_id` as a learner."""
        if replica_id in self.members():
            raise ConfigurationRefused("already_member", f"replica {replica_id} is in {self}")
        return Configuration(self.voters, (*self.learners, replica_id), self.abandoned)

    def promoted(self, replica_id: int) -> Configuration:
        """Return the configuration after making the learner `replica_id` a voter."""
        if replica_id not in self.learners:
            raise ConfigurationRefused("not_a_learner", f"replica {replica_id} is no learner of {self}")
        learners = _without(self.learners, replica_id)
        return Configuration((*self.voters, replica_id), learners, self.abandoned)

    def without(self, replica_id: int) -> Configuration:
        """Return the configuration after removing `replica_id`, a voter or a learner."""
        if replica_id not in self.members():
            raise ConfigurationRefused("not_a_member", f"replica {replica_id} is not in {self}")
        voters, learners = _without(self.voters, replica_id), _without(self.learners, replica_id)
        return Configuration(voters, learners, self.abandoned)


def _without(members: tuple[int, ...], replica_id: int) -> tuple[int, ...]:
    return tuple(member for member in members if member != replica_id)


def check_step(old: Configuration, new: Configuration) -> None:
    """Check that `new` is one allowed step away from `old`.

    The steps are: add a learner, promote a learner, remove a voter or learner. A voter is never added
    directly, because it would count before it holds anything, and never demoted, because it can be removed
    and added as a learner. No step changes the abandoned replicas: only an operator's decision adds to them.

    Raises:
        ConfigurationRefused: when `new` is not one allowed step away.
    """
    members = new.members()
    if not new.voters:
        raise ConfigurationRefused("no_voters", f"{new} has no voter")
    if len(set(members)) != len(members) or 0 in members:
        raise ConfigurationRefused("malformed", f"{new} names a replica twice, or replica 0")
    added = set(members) - set(old.members())
    removed = set(old.members()) - set(members)
    promoted = set(old.learners) & set(new.voters)
    demoted = set(old.voters) & set(new.learners)
    if len(added) + len(removed) + len(promoted) != 1 or demoted:
        raise ConfigurationRefused("not_one_step", f"{old} to {new} is not one step")
    if new.abandoned != old.abandoned or added & set(new.abandoned):
        raise ConfigurationRefused("abandoned", f"{old} to {new} changes who was abandoned")
    if added & set(new.voters):
        raise ConfigurationRefused("not_a_learner", f"replica {added.pop()} must join as a learner first")


class History:
    """The configurations of one log that are in force, or may be again after a truncation; oldest first.

    `current` is the configuration in force, and `index` is that of its entry; 0 if it precedes the log.
    """

    __slots__ = ("_stack", "current", "index")

    def __init__(self, initial: Configuration, found: Iterable[tuple[int, Configuration]] = ()) -> None:
        """Begin with `initial`, in force before the log's first entry, and the configurations in the log.

        `found` has the configurations in the log as pairs (index, configuration), ascending.
        """
        self._stack: list[tuple[int, Configuration]] = [(0, initial)]
        for index, configuration in found:
            self._push(index, configuration)
        self.index, self.current = self._stack[-1]

    def appended(self, index: int, configuration: Configuration) -> None:
        """Put `configuration`, which the log now holds at `index`, into force."""
        self._push(index, configuration)
        self.index, self.current = index, configuration

    def truncated(self, index: int) -> None:
        """Put the configuration before entry `index` in force: that entry and all after it are truncated."""
        while self._stack[-1][0] >= index:
            self._stack.pop()
            assert self._stack, f"truncation at {index} went below the first configuration"
        self.index, self.current = self._stack[-1]

    def committed(self, index: int) -> None:
        """Forget all configurations up to `index` but the newest: they can never be in force again."""
        while len(self._stack) > 1 and self._stack[1][0] <= index:
            del self._stack[0]

    def may_count(self, replica_id: int) -> bool:
        """Return whether `replica_id` is a voter of a configuration that is in force, or may be again."""
        return any(replica_id in configuration.voters for _, configuration in self._stack)

    def members(self) -> set[int]:
        """Return all members of every configuration that is in force, or may be again."""
        return {member for _, configuration in self._stack for member in configuration.members()}

    def _push(self, index: int, configuration: Configuration) -> None:
        assert index > self._stack[-1][0], f"configuration at {index} after one at {self._stack[-1][0]}"
        self._stack.append((index, configuration))
