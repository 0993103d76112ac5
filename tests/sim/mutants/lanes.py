"""The rules of a producer over a change of the route (`resolve`, `lookup` of docs/routes.md)."""

from __future__ import annotations

from tests.sim.mutants.case import case

LANES = ("tests/client/policy/test_lanes.py",)

DATAGRAMS = ("tests/client/produce/test_datagrams.py",)
STAGES = ("tests/client/policy/test_staging.py", "tests/node/routes/test_clients.py")
READERS = ("tests/node/routes/test_clients.py",)
PRODUCERS = ("tests/client/produce/test_route_changes.py",)

LANE_RULES = [
    case(
        "a batch in doubt is sent to an output",
        "laminar.client.policy.partition_queue:PartitionQueue.resolved",
        "and next(self._doubtful(), None) is None",
        "",
        tests=LANES,
        tests_only=True,
    ),
    case(
        "a batch without an answer is taken for one that an ended partition does not have",
        "laminar.client.policy.partition_queue:PartitionQueue.end",
        "self.hold(until_ms=0)",
        "[setattr(each, 'sequence', -1) for each in self.closed]",
        tests=LANES,
        tests_only=True,
    ),
    case(
        "an output is sent to before its inputs are resolved",
        "laminar.client.policy.partition_queue:PartitionQueue.take",
        "if self.gated:",
        "if False:",
        tests=LANES,
        tests_only=True,
    ),
    case(
        "an output waits for one of its inputs only",
        "laminar.client.policy.lanes:LaneChange.resolved",
        "all(queue.resolved for queue in self.inputs)",
        "any(queue.resolved and not queue.idle() for queue in self.inputs)",
        tests=LANES,
        tests_only=True,
    ),
    case(
        "what an input did not take comes after newer records",
        "laminar.client.policy.record_accumulator:RecordAccumulator._move",
        "queue.put_first(batches) if queue.gated else queue.put_closed(batches)",
        "queue.put_closed(batches)",
        tests=LANES,
        tests_only=True,
    ),
    case(
        "records of merged partitions are not mixed by their numbers",
        "laminar.client.policy.lanes:in_order",
        "records.sort(key=_number)",
        "pass",
        tests=LANES,
        tests_only=True,
    ),
    case(
        "a program that starts again looks in the present partition only",
        "laminar.client.policy.resume_numbers:Numbers.is_there",
        "max(over, default=0)",
        "over[-1]",
        tests=LANES,
        tests_only=True,
    ),
    case(
        "a reader begins with an output before it has read the inputs",
        "laminar.client.consume.reader:Reader._may_begin",
        "each in self._read or not self._reads(each)",
        "True",
        tests=READERS,
        tests_only=True,
    ),
    case(
        "what follows a partition waits for what is fetched, not for what was handed out",
        "laminar.client.consume.reader:Reader._resume",
        "position >= self.ends.get(partition, self._end_of(partition, position + 1))",
        "partition in self._read",
        tests=READERS,
        tests_only=True,
    ),
    case(
        "a cursor with a position in an ended partition begins at the end of what follows",
        "laminar.client.policy.lineage:Lineage.first_places",
        "elif not self.before(number).isdisjoint(known):",
        "elif False:",
        tests=READERS,
        tests_only=True,
    ),
    case(
        "a datagram goes to an output before the inputs are resolved",
        "laminar.client.produce.datagrams:Datagrams._start",
        "and not queue.after",
        "",
        tests=DATAGRAMS,
        tests_only=True,
    ),
    case(
        "a stage is cut anew while another one is under way",
        "laminar.client.policy.staging:Stages.waits_for_route",
        "and not place.under_way",
        "",
        tests=STAGES,
        tests_only=True,
    ),
    case(
        "a stage that an ended partition refuses ends the batch",
        "laminar.client.transact.stage_sender:StageSender._send",
        "if not isinstance(follows, int) or follows <= route:",
        "if True:",
        tests=STAGES,
        tests_only=True,
    ),
    case(
        "a run that was replaced goes over to an output",
        "laminar.client.produce.named_producer:begin_in",
        "number in ended or number not in known",
        "number in lineage.route and number not in known",
        tests=PRODUCERS,
        tests_only=True,
    ),
]
