"""The rules by which consumers go over changes of a topic's route, by their names in docs/routes.md."""

from __future__ import annotations

from tests.sim.mutants.case import case

GATES = ("tests/node/api/consumers/test_gates.py",)
ROSTER = ("tests/node/api/consumers/test_roster_moves.py",)
KEPT = ("tests/node/partition/test_kept_cursors.py",)
_GATES = "laminar.node.api.consumers.gates:Gates"
_STEPS = "laminar.node.api.consumers.cursor_steps"
_PLACES = "laminar.node.api.consumers.cursor_places:CursorPlaces"
_COMMANDS = "laminar.node.partition.cursor_commands:CursorCommands"

CONSUMERS = [
    case(
        "claim: a claim that was changed while its gate was asked stands",
        f"{_STEPS}:CursorSteps._set",
        "if commands.latest(step.name) is not claimed:",
        "if False:",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "claim: one whose answer was lost is not asked again",
        f"{_STEPS}:_may_claim",
        "before.owner != step.owner or before.position == step.position",
        "before.owner != step.owner",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "acked: a cursor below the end of a sealed partition is drained",
        f"{_COMMANDS}.is_drained",
        "cursor.position >= seal.end",
        "True",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "inputs: the first ancestor alone is asked",
        f"{_GATES}._check",
        "for number in ancestors if not answers",
        "for number in ancestors[:1] if not answers",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "ancestors: the inputs alone are asked",
        f"{_GATES}._ancestors",
        "lineage.ancestors_of(record, number, only_strict=True)",
        "[each for each in lineage.inputs_of(record, number) if each in record.all_numbers]",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "a partition is owned while the seals of its inputs may be lost",
        f"{_GATES}._opened",
        'if lineage.state_of(record, partition.number) == "waiting":',
        "if False:",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "keep: a claim that is undone takes the cursor away that it made",
        f"{_COMMANDS}.undo_claim",
        "return self._propose(name, claimed.position",
        "return self._propose(name, None",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "an undone claim takes what another claim got",
        f"{_COMMANDS}.undo_claim",
        "self.latest(name) is not claimed or",
        "False or",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "final: anybody takes a cursor off the end of a sealed partition",
        f"{_COMMANDS}._check_final",
        "if seal is None",
        "if True or seal is None",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "zero: a group begins at its place in a partition that is new to it",
        f"{_PLACES}.begin",
        "if new else 0",
        "if True else 0",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "new: a partition is new to a group that is in an input alone",
        f"{_PLACES}.begin",
        "lineage.ancestors_of(record, number)",
        "lineage.inputs_of(record, number)",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "begin: a group begins in inputs first",
        f"{_PLACES}.begin",
        "in reversed(generations)",
        "in generations",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "absent: a rewind leaves partitions alone where the group has no cursor",
        f"{_PLACES}._take_all",
        "if number not in taken]",
        "if number not in taken and name in self._services.partitions[topic, number].cursors.names()]",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "again: a rewind does not look at the route again",
        f"{_PLACES}._take_all",
        "if not missing:",
        "if not missing or taken:",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "held: a cursor that a rewind holds is drained",
        f"{_COMMANDS}.is_drained",
        "or is_rewind(cursor.owner)",
        "or False",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "drain, pass: a cursor of a partition that changed counts before it is synced",
        f"{_COMMANDS}._propose",
        "synced = synced or succession.successor_of > 0 or succession.sealed is not None",
        "pass",
        tests=KEPT,
        tests_only=True,
    ),
    case(
        "take: what a rewind holds counts before it is synced",
        f"{_COMMANDS}.take",
        "synced=synced",
        "synced=False",
        tests=KEPT,
        tests_only=True,
    ),
    case(
        "whole: a rewind sets what it holds before it holds all",
        f"{_PLACES}.rewind",
        "await self._take_all(",
        "with contextlib.suppress(Problem): await self._take_all(",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "oldest: a cursor is looked for in the newest partitions first",
        f"{_PLACES}.begin",
        "for numbers in generations:",
        "for numbers in reversed(generations):",
        tests=GATES,
        tests_only=True,
    ),
    case(
        "a group's members are known in two places",
        "laminar.node.api.consumers.groups:GroupRoutes._check_place",
        "if succession.sealed is None:",
        "if True:",
        tests=ROSTER,
        tests_only=True,
    ),
    case(
        "a group's new place takes the members that it does not know for dead",
        "laminar.node.api.consumers.groups:GroupRoutes._perform",
        "if opened is not None:",
        "if False:",
        tests=ROSTER,
        tests_only=True,
    ),
    case(
        "a member commits in a partition that another one owns",
        f"{_COMMANDS}._check_owner",
        'if present in (("", owner) if expected_owner is None else (expected_owner,)):',
        "if True:",
        tests=ROSTER,
        tests_only=True,
    ),
]
