"""The rules of transactions: stages, pins, the coordinator's decisions."""

from __future__ import annotations

from tests.sim.mutants.case import case

STAGES = ("tests/node/test_stages.py",)
COORDINATOR = ("tests/node/test_coordinator.py",)

TRANSACTIONS = [
    case(
        "the epoch is not checked where the decision is applied",
        "laminar.node.coordinator:Coordinator._decided",
        "if epoch != sink.epoch:",
        "if epoch > sink.epoch:",
        tests=COORDINATOR,
    ),
    case(
        "a batch is published before its decision is committed",
        "laminar.node.coordinator:Coordinator._publish",
        "if committed is None or committed.undone != decision:",
        "if False:",
        tests=COORDINATOR,
    ),
    case(
        "the next batch is decided before the last is published",
        "laminar.node.coordinator:Coordinator.commit",
        "if sink.undone is not None:",
        "if False:",
        tests=COORDINATOR,
    ),
    case(
        "begin answers before its epoch is committed",
        "laminar.node.coordinator:Coordinator._raise",
        "await self._change(sink_id, begun)",
        "self._change(sink_id, begun).add_done_callback(lambda done: done.exception())",
        tests=COORDINATOR,
    ),
    case(
        "a commit answers before all partitions have published",
        "laminar.node.coordinator:Coordinator._finished",
        "if sink.number >= number and (",
        "if sink.number >= number and (True or ",
        tests=COORDINATOR,
    ),
    case(
        "a later pin takes away what an earlier one has promised",
        "laminar.node.staging:Staging.pin",
        "if known is None or not known.pinned:",
        "if True:",
        tests=STAGES,
    ),
    case(
        "a pin is answered before it is committed",
        "laminar.node.api.sinks:SinkRoutes._do",
        "await staging.pin(batch, request.stages)",
        "staging.pin(batch, request.stages).add_done_callback(lambda done: done.exception())",
        tests=COORDINATOR,
    ),
    case(
        "a pin is released by time",
        "laminar.node.stages:Stages.left_behind",
        "if not batch.pinned and",
        "if",
        tests=STAGES,
    ),
    case(
        "stages are not rolled back by a truncation",
        "laminar.node.tables:Tables.truncated",
        "self.stages.truncated(index)",
        "pass",
        tests=COORDINATOR,
    ),
    case(
        "sinks are not rolled back by a truncation",
        "laminar.node.tables:Tables.truncated",
        "self.sinks.truncated(index)",
        "pass",
        tests=COORDINATOR,
    ),
    case(
        "the log begins between a stage and its publish",
        "laminar.node.partition:Partition.start_limit",
        "whole = self.tables.stages.start_limit(index)",
        "whole = index",
        tests=STAGES,
    ),
    case(
        "a publish for another group of the name counts as done",
        "laminar.node.api.sinks:SinkRoutes._do",
        """raise Problem("not_leader", detail, outcome="not_applied")""",
        "return None",
        tests=COORDINATOR,
    ),
]
