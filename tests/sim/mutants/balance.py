"""The rules of the balance by load: what may move, what moves first, and when."""

from __future__ import annotations

from tests.sim.mutants.case import case

DECISIONS = ("tests/node/placement/test_balance.py",)
ROUNDS = ("tests/node/catalog/test_balancing.py",)

_BALANCE = "laminar.node.placement.balance:"
_LOAD = "laminar.node.placement.load:"
_BALANCER = "laminar.node.catalog.balancing:Balancer."

# By the rule that it breaks: a name, a function, the text and what becomes of it, and the tests.
_MUTANTS = (
    # What is in the way.
    (
        "loads move while a node is absent",
        _BALANCE + "Survey.obstacle",
        "if missing:",
        "if False:",
        DECISIONS,
    ),
    (
        "a node that is drained and stopped holds the balance up",
        _BALANCE + "Survey.obstacle",
        "set(absent) & (belonging | self._holding)",
        "set(absent)",
        DECISIONS,
    ),
    (
        "a draining node that still holds replicas may be absent",
        _BALANCE + "Survey.obstacle",
        "set(absent) & (belonging | self._holding)",
        "set(absent) & belonging",
        DECISIONS,
    ),
    ("loads move while a node is silent", _BALANCE + "Survey.obstacle", "if silent:", "if False:", DECISIONS),
    (
        "loads move while a replica leaves",
        _BALANCE + "Survey._why_unfinished",
        "or partition.leaving",
        "or False",
        DECISIONS,
    ),
    (
        "loads move while a replica is not made",
        _BALANCE + "Survey._why_unfinished",
        "or not all(each.made for each in partition.replicas)",
        "or False",
        DECISIONS,
    ),
    (
        "loads move while a partition is being created",
        _BALANCE + "Survey._why_unfinished",
        'partition.state != "live"',
        "False",
        DECISIONS,
    ),
    (
        "loads move while a replica is lost",
        _BALANCE + "Survey._why_unfinished",
        "if any(each.lost or each.abandoned for each in partition.replicas):",
        "if False:",
        DECISIONS,
    ),
    (
        "loads move while a partition lacks a copy",
        _BALANCE + "Survey._why_unfinished",
        "if len(held) < wanted_number(self.state, partition):",
        "if False:",
        DECISIONS,
    ),
    (
        "loads move while a partition is not on its wanted set",
        _BALANCE + "Survey._why_unfinished",
        "if held != set(self._wanted.nodes(partition)):",
        "if False:",
        DECISIONS,
    ),
    # The threshold, the score, and the margin.
    (
        "loads move below the threshold",
        _BALANCE + "deciding",
        "if by_node[order[0]].value <= threshold:",
        "if False:",
        DECISIONS,
    ),
    (
        "a move need not lower any score",
        _BALANCE + "deciding",
        "option.after <= score.value - MARGIN",
        "True",
        DECISIONS,
    ),
    (
        "a score is not of a node's weight",
        _LOAD + "Scores.shares",
        "weight = self._weights[node]",
        "weight = 1.0",
        DECISIONS,
    ),
    (
        "a small load has a score",
        _LOAD + "Scores.__init__",
        "each / weight + small",
        "each / weight + 1e-9",
        DECISIONS,
    ),
    # What moves.
    (
        "replicas move before leaders do",
        _BALANCE + "deciding",
        "(found.swaps(hot, score), found.replica_moves(hot, score))",
        "(found.replica_moves(hot, score), found.swaps(hot, score))",
        DECISIONS,
    ),
    (
        "leadership goes one way",
        _BALANCE + "_Round.swaps",
        "PreferLeaders({given.partition: other, taken.partition: hot})",
        "PreferLeaders({given.partition: other})",
        DECISIONS,
    ),
    (
        "a partition that moved lately moves again",
        _BALANCE + "_Round._movable",
        "each.partition not in self._resting",
        "True",
        DECISIONS,
    ),
    (
        "a partition that is being handed over moves",
        _BALANCE + "_Round._movable",
        "(partition.preferred_leader == node) == each.leads",
        "True",
        DECISIONS,
    ),
    (
        "the balance takes the place of an operator's pin",
        _BALANCE + "_Round.replica_moves",
        "if pinned or (each.leads and len(held) > 1):",
        "if each.leads and len(held) > 1:",
        DECISIONS,
    ),
    (
        "a replica that leads moves beside others",
        _BALANCE + "_Round.replica_moves",
        "if pinned or (each.leads and len(held) > 1):",
        "if pinned:",
        DECISIONS,
    ),
    (
        "a node whose disk is low gets a replica",
        _BALANCE + "_Round.replica_moves",
        " or self._reports[other].disk_is_low",
        "",
        DECISIONS,
    ),
    (
        "the balance puts replicas into one zone",
        _BALANCE + "_Round.replica_moves",
        "if self._spread(nodes) < self._spread(held):",
        "if False:",
        DECISIONS,
    ),
    # Pins of its own, and of others.
    (
        "the balance lifts an operator's pin",
        _BALANCE + "_pinned",
        " and partition.pin.owner == OWNER",
        "",
        DECISIONS,
    ),
    (
        "a pin of the balance is lifted though a node would be hot without it",
        _BALANCE + "_Round.lift",
        "if after <= limit:",
        "if True:",
        DECISIONS,
    ),
    (
        "a pin of the balance keeps a topic from growing",
        _BALANCE + "stale_pins",
        "len(partition.pin.nodes) != state.topics[partition.topic].replicas",
        "False",
        DECISIONS,
    ),
    (
        "a pin of the balance keeps a node from being drained",
        _BALANCE + "stale_pins",
        "not weights.keys() >= set(partition.pin.nodes)",
        "False",
        DECISIONS,
    ),
    # When.
    (
        "the last allowed hour is allowed",
        _BALANCE + "allowed_at",
        "return first <= hour < last if",
        "return first <= hour <= last if",
        DECISIONS,
    ),
    (
        "loads move in the first round",
        _BALANCER + "run_pass",
        " or (above and self._rounds < ROUNDS)",
        "",
        ROUNDS,
    ),
    (
        "rounds above the threshold add up",
        _BALANCER + "run_pass",
        "self._rounds + 1 if above else 0",
        "self._rounds + above",
        ROUNDS,
    ),
    (
        "loads move at any hour",
        _BALANCER + "run_pass",
        "not allowed_at(self._hours, hour)",
        "False",
        ROUNDS,
    ),
    (
        "one move follows the other at once",
        _BALANCER + "_perform",
        "self._paused_until_ms = now_ms + PAUSE_MS",
        "pass",
        ROUNDS,
    ),
    (
        "a partition moves again after the next one",
        _BALANCER + "_perform",
        "self._moved |= dict.fromkeys(decision.partitions, now_ms)",
        "pass",
        ROUNDS,
    ),
    (
        "an old report counts",
        _BALANCER + "_fresh",
        "if now_ms - at_ms <= REPORT_VALID_MS",
        "if True",
        ROUNDS,
    ),
    (
        "reports of an earlier term count",
        _BALANCER + "_follow_term",
        "self._term, self._reports, self._rounds = term, {}, 0",
        "self._term, self._rounds = term, 0",
        ROUNDS,
    ),
    (
        "a new leader does not wait as after a move",
        _BALANCER + "_follow_term",
        "self._paused_until_ms = self._clock.monotonic_ms() + PAUSE_MS",
        "pass",
        ROUNDS,
    ),
    (
        "a stranger reports a load",
        _BALANCER + "take",
        "report.node in group.catalog.state().nodes and ",
        "",
        ROUNDS,
    ),
)

BALANCE = [
    case(name, where, old, new, tests=tests, tests_only=True) for name, where, old, new, tests in _MUTANTS
]
