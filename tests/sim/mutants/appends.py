"""The rules by which a node takes, refuses and sends again appends while the route of their topic changes."""

from __future__ import annotations

from tests.sim.mutants.case import case

STALE = ("tests/node/api/records/test_stale_routes.py",)
DROPPED = ("tests/node/transactions/test_drop_unprepared.py",)

APPENDS = [
    case(
        "keys are taken that were placed before the partition was opened",
        "laminar.node.api.records.stale_routes:StaleRoutes.check",
        "said >= oldest",
        "said >= 0",
        tests=STALE,
        tests_only=True,
    ),
    case(
        "keys are taken of a producer that knows no route",
        "laminar.node.api.records.stale_routes:StaleRoutes.check",
        "present == 0 or (said != NOT_SAID and said >= oldest)",
        "present == 0 or said == NOT_SAID or said >= oldest",
        tests=STALE,
        tests_only=True,
    ),
    case(
        "the opening of a partition is known from the view alone",
        "laminar.node.api.records.stale_routes:StaleRoutes.check",
        "opened.record.version if opened is not None else 0",
        "0",
        tests=STALE,
        tests_only=True,
    ),
    case(
        "a retry is refused for its old route",
        "laminar.node.api.records.stale_routes:StaleRoutes.check_append",
        "if not is_duplicate(partition.context, Header.unpack(frame))",
        "if True",
        tests=STALE,
        tests_only=True,
    ),
    case(
        "a change drops what is prepared",
        "laminar.node.transactions.participant:Participant.drop_unprepared",
        "if not held.prepared",
        "if True",
        tests=DROPPED,
        tests_only=True,
    ),
]
