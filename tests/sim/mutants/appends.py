"""The rules by which a node takes, refuses and sends again appends while the route of their topic changes."""

from __future__ import annotations

from tests.sim.mutants.case import case

STALE = ("tests/node/api/records/test_stale_routes.py",)
TO_TOPIC = ("tests/node/api/records/test_topic_append.py",)
OUTCOMES = ("tests/node/api/records/test_append_outcomes.py",)
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
        "oldest = partition.state.succession.opened_in",
        "oldest = 0",
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
        "a request with a key is not looked up in ended partitions",
        "laminar.node.api.records.topic_append:TopicAppends._look_up",
        "if mark is None:",
        "if True:",
        tests=TO_TOPIC,
        tests_only=True,
    ),
    case(
        "a key is looked up in a partition that may still take its request",
        "laminar.node.api.records.topic_append:_found_here",
        "if partition.context.final_seal is None:",
        "if False:",
        tests=TO_TOPIC,
        tests_only=True,
    ),
    case(
        "what was found of a request is appended again",
        "laminar.node.api.records.topic_append:TopicAppends._look_up",
        "if place not in here",
        "if True",
        tests=TO_TOPIC,
        tests_only=True,
    ),
    case(
        "all parts are appended again when one was refused",
        "laminar.node.api.records.topic_append:TopicAppends._place",
        "for place, _ in refused for row",
        "for place in range(len(parts)) for row",
        tests=TO_TOPIC,
        tests_only=True,
    ),
    case(
        "an append to a topic does not wait for the next route",
        "laminar.node.api.records.topic_append:_sorted_out",
        "answer.code in _ROUTE_CHANGES",
        "False",
        tests=TO_TOPIC,
        tests_only=True,
    ),
    case(
        "a sealed partition is not sure of earlier attempts",
        "laminar.node.api.common.attempts:combine_outcomes",
        ' and last.code != "sealed"',
        "",
        tests=OUTCOMES,
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
