"""The rules of transactions: stages, pins, the coordinator's decisions."""

from __future__ import annotations

from tests.sim.mutants.case import case

STAGES = ("tests/node/test_stages.py",)
COORDINATOR = ("tests/node/test_coordinator.py",)
ONCE = ("tests/node/test_once.py",)
FINGERPRINTS = ("tests/spark/test_fingerprints.py",)
DELETION = ("tests/node/test_sink_deletion.py",)

TRANSACTIONS = [
    case(
        "the epoch is not checked where the decision is applied",
        "laminar.node.coordinator:refuse_epoch",
        "if epoch != sink.epoch or sink.epoch == 0 or sink.deletion:",
        "if epoch > sink.epoch or sink.epoch == 0 or sink.deletion:",
        tests=COORDINATOR,
    ),
    case(
        "a batch of another fingerprint is taken for the one that is committed",
        "laminar.node.coordinator:Coordinator._decided",
        "if number == sink.number and fingerprint and known and fingerprint != known:",
        "if False:",
        tests=COORDINATOR,
    ),
    case(
        "a batch of a checkpoint that was put back is taken for an older one",
        "laminar.spark.fingerprints:committed_before",
        "if other is not None and not fingerprint.is_of(other):",
        "if False:",
        tests=FINGERPRINTS,
    ),
    case(
        "batches of as many records are taken for one, whatever Spark has journaled of them",
        "laminar.spark.fingerprints:Fingerprint.is_of",
        "if self.journal is not None and other.journal is not None:",
        "if False:",
        tests=FINGERPRINTS,
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
        "a part that is said to be pinned is decided without a pin",
        "laminar.node.staging:Staging.pinned",
        "if have != count:",
        "if False:",
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
        "if not batch.pinned",
        "if True",
        tests=STAGES,
    ),
    case(
        "what is staged goes by its age though its write is open",
        "laminar.node.api.leftovers:Leftovers.clean",
        "hour_ago_ms if self._shard.space.low else now_ms - OPEN_AGE_MS",
        "hour_ago_ms",
        tests=ONCE,
    ),
    case(
        "a write that nobody commits is kept for ever",
        "laminar.node.stages:Stages.left_behind",
        "batch.first.append_time_ms < begun_before_ms",
        "False",
        tests=ONCE,
    ),
    case(
        "the age of a pin counts from the stages",
        "laminar.node.stages:Stages._pinned",
        "pinned_ms=header.append_time_ms",
        "pinned_ms=0",
        tests=ONCE,
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
        "a sink is forgotten while its batch is being published",
        "laminar.node.sinks:Sinks._set",
        "elif sink.once and sink.undone is None and not sink.deletion:",
        "elif sink.once and not sink.deletion:",
        tests=ONCE,
    ),
    case(
        "the epoch of a sink that was forgotten comes again",
        "laminar.node.sinks:first_once_epoch",
        "FIRST_ONCE_EPOCH + index % _ONCE_EPOCHS",
        "FIRST_ONCE_EPOCH",
        tests=ONCE,
    ),
    case(
        "a sink that was forgotten is said to have committed nothing",
        "laminar.node.coordinator:refuse_epoch",
        "if epoch >= FIRST_ONCE_EPOCH and (",
        "if False and (",
        tests=ONCE,
    ),
    case(
        "a pin is dropped before a newer epoch keeps its driver from deciding",
        "laminar.node.api.leftovers:Leftovers._is_over",
        "known = await self._coordinators.end(sink, epoch)",
        "return True",
        tests=ONCE,
    ),
    case(
        "what is pinned for a sink that nobody knows any more is kept for ever",
        "laminar.node.api.leftovers:Leftovers._is_over",
        "if undecided or known.epoch == 0:",
        "if undecided:",
        tests=ONCE,
    ),
    case(
        "a batch is ended though it was decided meanwhile",
        "laminar.node.coordinator:Coordinator.end",
        "or sink.number >= 0:",
        "or False:",
        tests=ONCE,
    ),
    case(
        "a sink is deleted while its batch is being published",
        "laminar.node.coordinator:Coordinator.delete",
        "if sink.undone is not None:",
        "if False:",
        tests=DELETION,
    ),
    case(
        "a leader that was deposed says that a sink is deleted",
        "laminar.node.coordinator:Coordinator.deleted",
        "await self.partition.confirmed_end()",
        "pass",
        tests=DELETION,
    ),
    case(
        "a deletion that comes again deletes the next sink of that name",
        "laminar.node.coordinator:Coordinator.delete",
        "or (request and sink.deleted_by == request)",
        "",
        tests=DELETION,
    ),
    case(
        "a sink that was deleted begins with an epoch that it had",
        "laminar.node.coordinator:Coordinator.begin",
        """sink = Sink("", epoch=sink.epoch, first=sink.epoch + 1, deleted_by=sink.begun_by)""",
        """sink = Sink("")""",
        tests=DELETION,
    ),
    case(
        "a sink is begun anew while partitions still know of the old one",
        "laminar.node.coordinator:Coordinator.begin",
        "if sink.deletion is Deletion.BEGUN:",
        "if False:",
        tests=DELETION,
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
