"""The rules of reclaim, by their names in docs/routes.md."""

from __future__ import annotations

from tests.sim.mutants.case import case

RECLAIM = ("tests/node/api/consumers/test_reclaim.py",)
_MODULE = "laminar.node.api.consumers.reclaim"
_RECLAIMS = f"{_MODULE}:Reclaims"
_COMMANDS = "laminar.node.partition.cursor_commands:CursorCommands"

RECLAIMS = [
    case(
        "drained: a partition is reclaimed while a cursor is behind in it",
        f"{_RECLAIMS}._check_drained",
        "if behind:",
        "if False:",
        reclaims=True,
    ),
    case(
        "held: a partition is reclaimed while a rewind holds a cursor at its end",
        f"{_RECLAIMS}._check_drained",
        "or is_rewind(cursor.owner)",
        "or False",
        tests=RECLAIM,
        reclaims=True,
    ),
    case(
        "a partition is reclaimed by itself when it has just ended",
        f"{_RECLAIMS}._is_due",
        "if self._services.clock.wall_ms() < seal.time_ms + RECLAIM_AGE_MS:",
        "if False:",
        tests=RECLAIM,
        tests_only=True,
    ),
    case(
        "order: a partition is reclaimed before those that it follows",
        f"{_MODULE}:_before",
        "if each in record.all_numbers]",
        "if False]",
        tests=RECLAIM,
        tests_only=True,
    ),
    case(
        "order: the catalog forgets a partition before those that it follows",
        "membership.route_rules:reclaim_partition",
        "if before:",
        "if False:",
        tests=("tests/membership/test_route_rules.py", "tests/membership/test_any_route_steps.py"),
        tests_only=True,
    ),
    case(
        "follow: a partition is reclaimed before its cursors begin in what follows",
        f"{_RECLAIMS}._follow",
        "for output in outputs",
        "for output in outputs[:0]",
        tests=RECLAIM,
        reclaims=True,
    ),
    case(
        "follow: a cursor begins in the first of the partitions that follow alone",
        f"{_RECLAIMS}._follow",
        "for output in outputs",
        "for output in outputs[:1]",
        tests=RECLAIM,
        reclaims=True,
    ),
    case(
        "a cursor begins in a partition that is being reclaimed",
        f"{_COMMANDS}._check_fence",
        "if self.is_fenced():",
        "if False:",
        tests=RECLAIM,
    ),
    case(
        "a cursor at the end is deleted in a partition that is being reclaimed",
        f"{_COMMANDS}.set",
        "if current is not None and self._is_at_end(current):",
        "if False:",
        tests=RECLAIM,
    ),
    case(
        "a partition is reclaimed without a fence",
        f"{_RECLAIMS}._carry_out",
        "await commands.fence(now_ms=wall_ms)",
        "pass",
        tests=RECLAIM,
    ),
    case(
        "a refused reclaim leaves its fence",
        f"{_RECLAIMS}._carry_out",
        "if not was_fenced:",
        "if False:",
        tests=RECLAIM,
        tests_only=True,
    ),
    case(
        "the fence of an earlier attempt is taken down with a refusal",
        f"{_RECLAIMS}._carry_out",
        "if not was_fenced:",
        "if True:",
        tests=RECLAIM,
        tests_only=True,
    ),
    case(
        "a fence that was left stays for ever",
        f"{_RECLAIMS}._end_fences",
        "await self._end_fence(partition, term)",
        "pass",
        tests=RECLAIM,
        reclaims=True,
    ),
    case(
        "a fence that was left is taken down at once",
        f"{_RECLAIMS}._end_fences",
        "elif now_ms >= since_ms + FENCE_MS and",
        "elif",
        tests=RECLAIM,
        tests_only=True,
    ),
    case(
        "a partition with records is reclaimed by itself",
        f"{_RECLAIMS}._is_due",
        "or partition.start_offset < seal.end",
        "or False",
        tests=RECLAIM,
        tests_only=True,
    ),
    case(
        "a partition that takes records is reclaimed",
        f"{_RECLAIMS}._end_of",
        "if seal is None or partition.kept_seal is None:",
        "if False:",
        tests=RECLAIM,
        tests_only=True,
    ),
    case(
        "a partition that is reclaimed is one that never was",
        "laminar.node.api.records.fetch:FetchRoutes._reclaimed",
        "if seal is None:",
        "if True:",
        tests=RECLAIM,
        reclaims=True,
    ),
]
