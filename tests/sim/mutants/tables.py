"""The rules of what is derived from a log: producers, keys, cursors, and what a client is told of them."""

from __future__ import annotations

from tests.sim.mutants.case import case

NODE = ("tests/node/consensus/test_consensus.py",)
DERIVED = ("tests/node/partition/test_snapshot.py",)
KEYS = ("tests/node/partition/state/test_idempotency_keys.py",)
WINDOW = ("tests/node/partition/test_window.py",)
ACCEPTED = ("tests/client/produce/test_accepted.py",)

TABLES = [
    case(
        "a retry is taken for a new batch",
        "laminar.node.partition.state.producers:Producers.check",
        '"""',
        'return None\n    """',
        tests=NODE,
    ),
    case(
        "a crowd of new keys or producers makes the others forgotten",
        "laminar.node.partition.deduplication:check_room",
        '"""',
        'return\n    """',
        tests=(*KEYS, "tests/node/partition/state/test_producers.py"),
        tests_only=True,
    ),
    case(
        "a deposed leader refuses by its tables",
        "laminar.node.partition.append_path:AppendPath.confirmed",
        "if refusal.code in FROM_TABLES:",
        "if not refusal.code:",
        tests=("tests/node/api/records/test_deposed_leader.py",),
        tests_only=True,
    ),
    case(
        "the batch of a producer that was forgotten is taken for a new one's",
        "laminar.node.partition.state.producers:Producers.check",
        'return None if sequence == 0 else Refused("unknown_producer", 0)',
        "return None",
        tests=("tests/node/partition/state/test_producers.py",),
        tests_only=True,
    ),
    case(
        "producers not rolled back by a truncation",
        "laminar.node.partition.state.state:PartitionState.truncated",
        "self.producers.truncated(index)",
        "pass",
        tests=NODE,
    ),
    case(
        "keys not rolled back by a truncation",
        "laminar.node.partition.state.state:PartitionState.truncated",
        "self.keys.truncated(index)",
        "pass",
        tests=KEYS,
    ),
    case(
        "a request with a key is taken for a new one",
        "laminar.node.partition.deduplication:find_key",
        "entry = context.state.keys.get(key_id)",
        "entry = None",
        tests=KEYS,
    ),
    case(
        "keys are not in the document of derived state",
        "laminar.node.partition.state.state:PartitionState.state_at",
        "keys=self.keys.stored_at(index)",
        "keys=[]",
        tests=(*DERIVED, *KEYS),
    ),
    case(
        "a truncated entry is acknowledged",
        "laminar.node.partition.append_path:AppendPath.truncated",
        "fail(waiter.future, truncated(self._context.name, outcome))",
        "waiter.future.done() or waiter.future.set_result(waiter.receipt)",
        tests=NODE,
    ),
    case(
        "the producer table is of committed entries only",
        "laminar.node.partition.state.producers:Producers.check",
        "known = self._producers.get(producer_id)",
        "known = next((was for _, who, was in self._undo if who == producer_id), "
        "self._producers.get(producer_id))",
        tests=(
            "tests/node/partition/state/test_producers.py",
            "tests/node/api/records/test_append_outcomes.py",
        ),
    ),
    case(
        "the window calls committed what is appended",
        "laminar.node.partition.min_replicas:Copies.window_up_to",
        "context.log.offset_after(index)",
        "context.log.next_offset",
        tests=WINDOW,
    ),
    case(
        "a table that an entry changed is not told of its commit",
        "laminar.node.partition.state.state:PartitionState._note_change",
        "self._changed[table] = header.index",
        "pass",
        tests=("tests/node/api/records/test_append_outcomes.py", "tests/node/partition/state"),
        tests_only=True,
    ),
    case(
        "who proposed what stopped its replica is not told",
        "laminar.node.partition.append_path:AppendPath.propose",
        "if context.replica.failure is not None:",
        "if False:",
        tests=("tests/node/consensus/test_consensus.py::test_a_mistake_in_a_core_stops_that_replica_alone",),
        tests_only=True,
    ),
    case(
        "requests that wait for room wait for ever",
        "laminar.http.server.reader:Connection._pause_reading",
        "self._paused_reading = self._writer.room_awaited = True",
        "self._paused_reading = True",
        tests=(
            "tests/http/server/test_server_limits.py::test_a_connection_is_read_again_when_its_answers_can_leave",
        ),
        tests_only=True,
    ),
    case(
        "what is told of a producer as durable is not committed",
        "laminar.node.partition.state.producers:Producers.committed_progress",
        "known = before",
        "pass",
        tests=WINDOW,
        tests_only=True,
    ),
    case(
        "an epoch that began is forgotten",
        "laminar.node.partition.state.state:PartitionState.appended",
        "if header.kind in (Kind.DATA, Kind.FENCE):",
        "if header.kind == Kind.DATA:",
        tests=WINDOW,
        tests_only=True,
    ),
    case(
        "what a leader accepted counts as durable under the next one",
        "laminar.client.policy.partition_queue:PartitionQueue.durable",
        "first.term != term",
        "first.term < 0",
        tests=ACCEPTED,
        tests_only=True,
    ),
    case(
        "what a lost leader had accepted is not sent again",
        "laminar.client.policy.partition_queue:PartitionQueue.observe_term",
        "self.hold(until_ms=0)",
        "pass",
        tests=ACCEPTED,
        tests_only=True,
    ),
    case(
        "producers are not in the document of derived state",
        "laminar.node.partition.state.state:PartitionState.state_at",
        "producers=self.producers.stored_at(index)",
        "producers=[]",
        tests=DERIVED,
    ),
    case(
        "cursors are not in the document of derived state",
        "laminar.node.partition.state.state:PartitionState.state_at",
        "cursors=self.cursors.stored_at(index)",
        "cursors=[]",
        tests=DERIVED,
    ),
    case(
        "derived state is taken from entries that are not committed",
        "laminar.node.partition.state.state:PartitionState.state_at",
        "self.producers.stored_at(index)",
        "self.producers.stored()",
        tests=DERIVED,
    ),
    case(
        "a configuration that is not committed is kept as derived state",
        "laminar.node.partition.snapshot:snapshot_of",
        "tables.configurations_up_to(index)[-1:]",
        "tables.configurations_up_to(1 << 60)[-1:]",
        tests=DERIVED,
    ),
    case(
        "derived state of another history is believed",
        "laminar.node.partition.snapshot:read",
        "or log.term(derived.index) != derived.term",
        "",
        tests=DERIVED,
    ),
    case(
        "a log_start entry does not tell the configuration",
        "laminar.node.consensus.replica:replay",
        "elif header.kind == Kind.LOG_START:",
        "elif False:",
        tests=DERIVED,
    ),
    case(
        "a log_start entry does not tell the producers",
        "laminar.node.partition.state.state:PartitionState.appended",
        "self._restore_tables(decode_state(record.state))",
        "pass",
        tests=("tests/node/partition/test_retention.py",),
    ),
    case(
        "a start is carried out before it is committed",
        "laminar.node.partition.state.state:PartitionState.committed",
        "while self._starts and self._starts[0][0] <= index:",
        "while self._starts:",
        tests=DERIVED,
    ),
]
