"""The rules by which a change of a topic's route is carried out: what nodes do for it, beside the catalog."""

from __future__ import annotations

from tests.sim.mutants.case import case

SEAL = ("tests/node/partition/test_seal.py", "tests/node/partition/test_seal_replicated.py")

_SHARD = "laminar.node.shard.route_changes:"

ROUTE_STEPS = [
    case(
        "an input is sealed before its change closes",
        f"{_SHARD}duty_of",
        'ends = end is not None and end.state != "preparing"',
        "ends = end is not None",
        routes=True,
    ),
    case(
        "an output opens before all inputs are sealed",
        f"{_SHARD}duty_of",
        'origin.state == "done"',
        'origin.state != "preparing"',
        routes=True,
    ),
    case(
        "a leader reports a seal that a majority has not synced",
        f"{_SHARD}RouteChanges._seal",
        "if reported or partition.seal_is_kept(await self._synced_seals(partition)):",
        "if True:",
        routes=True,
    ),
    case(
        "a leader reports the seal of its predecessor only",
        f"{_SHARD}duty_of",
        "number not in end.seals or partition.kept_seal is None",
        "partition.state.succession.sealed is None",
        routes=True,
    ),
    case(
        "sealed is said in an interval log when the seal is committed",
        "laminar.node.partition.context:PartitionContext.final_seal",
        "self.log.policy.is_interval and ",
        "False and ",
        tests=SEAL,
        tests_only=True,
    ),
    case(
        "a leader that may lack a seal takes records before it has asked",
        "laminar.node.partition.partition:Partition.led",
        "self.doubt()",
        "pass",
        tests=(*SEAL, "tests/sim/test_routes.py"),
        tests_only=True,
    ),
    case(
        "a leader that lacks its seal takes records though the change is done",
        f"{_SHARD}duty_of",
        "and succession.in_doubt and not ends:",
        "and succession.in_doubt:",
        tests=("tests/sim/test_routes.py",),
        tests_only=True,
    ),
    case(
        "a leader seals again only while the change is closing",
        f"{_SHARD}duty_of",
        "number not in end.seals or partition.kept_seal is None",
        "number not in end.seals",
        tests=("tests/sim/test_routes.py",),
        tests_only=True,
    ),
    case(
        "entry 1 of an output names no change",
        "laminar.node.shard.replicas.reconcile:Reconciler._finish",
        "successor_of=origins[entry.group]",
        "successor_of=0",
        routes=True,
    ),
    case(
        "a change closes though its inputs do not hold",
        "laminar.node.routes.plan:decide",
        "if not waits_for and last.held and",
        "if not waits_for and",
        tests=("tests/node/routes/test_plan.py",),
        tests_only=True,
    ),
    case(
        "a change closes by old answers",
        "laminar.node.routes.plan:decide",
        "now_ms - last.asked_ms < FRESH_MS",
        "True",
        tests=("tests/node/routes/test_plan.py",),
        tests_only=True,
    ),
    case(
        "a seal waits for ever for what is not prepared",
        f"{_SHARD}RouteChanges._clear_the_way",
        "drop_unprepared(partition)",
        "pass",
        tests=("tests/node/routes/test_changes.py",),
        tests_only=True,
    ),
    case(
        "a leader in doubt refuses its own seal",
        "laminar.node.partition.state.succession:Succession.takes",
        'if self._in_doubt and self.status == "open" and kind in _IN_DOUBT:',
        "if False:",
        tests=("tests/sim/test_routes.py",),
        tests_only=True,
    ),
    case(
        "a quiesced group is not woken for a member that came up while the others agreed",
        "laminar.node.consensus.quiescence:Quiescence.processed",
        "self._wake_for_returned(replica)",
        "pass",
        tests=("tests/node/consensus/test_quiescence.py",),
        tests_only=True,
    ),
    case(
        "a change closes though an input has no leader",
        "laminar.node.routes.plan:_inputs",
        'absent.append(f"partition {held.number} has no leader")',
        "pass",
        tests=("tests/node/routes/test_plan.py",),
        tests_only=True,
    ),
]
