"""The rules of delayed records (docs/delay.md): once each, not before their time, over copies and changes."""

from __future__ import annotations

from tests.sim.mutants.case import case

ENDED = ("tests/node/api/delayed/test_ended_partitions.py",)
LEADERS = ("tests/node/delay/test_leaders.py",)
OPENING = ("tests/node/channels/test_opening.py",)
PUBLISHER = ("tests/node/delay/test_publisher.py",)
TABLE = ("tests/node/partition/state/test_delayed_records.py",)
_PUBLISHER = "laminar.node.delay.publisher:Publisher"
_SENDER = "laminar.node.delay.sender:Sender"
_TABLE = "laminar.node.partition.state.delayed_records:DelayedRecords"

DELAYED = [
    case(
        "a delayed record is published before its time",
        f"{_PUBLISHER}._chosen",
        "near[0].due_ms <= now_ms",
        "near[0].due_ms <= now_ms + 400",
        tests=PUBLISHER,
        channels=True,
    ),
    case(
        "what was cancelled or moved while it was read is published",
        f"{_PUBLISHER}._publish",
        "records = [each for each in records if self._is_due(each[0])]",
        "records = list(records)",
        tests=PUBLISHER,
        channels=True,
    ),
    case(
        "a record that has another time is published at its first one",
        f"{_PUBLISHER}._is_due",
        "return moved is None or moved.due_ms == due.due_ms",
        "return True",
        tests=PUBLISHER,
        channels=True,
    ),
    case(
        "a record is said to be cancelled before that is committed",
        f"{_PUBLISHER}.change",
        "await future",
        "future.add_done_callback(lambda done: done.exception())",
        tests=LEADERS,
        channels=True,
    ),
    case(
        "a state is told that a deposed leader read",
        f"{_PUBLISHER}.state",
        "await self._seen()",
        "pass",
        tests=LEADERS,
        channels=True,
    ),
    case(
        "a partition that has ended publishes",
        f"{_PUBLISHER}.publishes",
        "self._partition.leads and self._partition.state.succession.takes_records",
        "self._partition.leads",
        tests=PUBLISHER,
        routes=True,
    ),
    case(
        "a copy revives what ended since it was made",
        f"{_TABLE}._copy",
        "if batch is None or not batch.is_pending(place.row):",
        "if batch is None:",
        tests=TABLE,
        channels=True,
    ),
    case(
        "a copy forgets the time that a record was given",
        f"{_TABLE}._copy",
        "if moved is not None:",
        "if False:",
        tests=TABLE,
        channels=True,
    ),
    case(
        "a batch that another partition sends twice is taken twice",
        f"{_TABLE}._receive",
        "if change.sequence < self.received.get(change.stream, 0):",
        "if False:",
        tests=TABLE,
        routes=True,
    ),
    case(
        "what was sent on stays pending",
        f"{_SENDER}._send_to",
        "rows = [value for each in chosen for value in each.place]",
        "rows = []",
        tests=("tests/node/delay/test_sender.py",),
        routes=True,
    ),
    case(
        "a truncated entry leaves the times that it changed",
        f"{_TABLE}._end",
        "self._put(self.moved, number, None)",
        "del self.moved[number]",
        tests=TABLE,
        channels=True,
    ),
    case(
        "what a reclaimed partition had cancelled is said to be published",
        "laminar.node.api.delayed.records:DelayedRoutes._ask",
        "forgotten_ms = named.due_ms",
        "pass",
        tests=ENDED,
        reclaims=True,
    ),
    case(
        "a queue goes on with a table that a snapshot made again",
        "laminar.node.channels.lines:Lines.is_stale",
        "line.queue.channel is not",
        "None is",
        tests=OPENING,
        channels=True,
    ),
    case(
        "delayed records are copied again before the log begins where their copies let it",
        "laminar.node.delay.carrier:Carrier.keep",
        "self._partition.log.start.index < self._before",
        "False",
        tests=PUBLISHER,
        tests_only=True,
    ),
    case(
        "large delayed records are joined, which makes no fewer batches",
        "laminar.node.delay.carrier:Carrier.check",
        "and batch.size_bytes * batch.left < SMALL_BYTES * batch.count",
        "",
        tests=PUBLISHER,
        tests_only=True,
    ),
    case(
        "one small batch of delayed records is joined with nothing",
        "laminar.node.delay.carrier:Carrier.check",
        "if len(small) > 1:",
        "if True:",
        tests=PUBLISHER,
        tests_only=True,
    ),
    case(
        "copies of delayed records count what goes without them as what they free",
        "laminar.node.partition.retention:Retention._make_way",
        "2 * takes <= freed - free_without",
        "2 * takes <= freed",
        tests=PUBLISHER,
        tests_only=True,
    ),
    case(
        "a record in a copy is looked for where one has ended",
        "laminar.node.partition.state.delayed_records:DelayedBatch.pending_row",
        "if self.is_pending(row):",
        "if True:",
        tests=TABLE,
        tests_only=True,
    ),
    case(
        "a record that is moved while it is copied waits for the next look",
        f"{_PUBLISHER}._chosen",
        "due = due._replace(place=moved.place)",
        "pass",
        tests=PUBLISHER,
        tests_only=True,
    ),
    case(
        "a batch that is sent on has only the times of its records at first",
        f"{_SENDER}._send_to",
        "times += [each.due_ms for each in chosen]",
        "pass",
        tests=("tests/node/delay/test_sender.py",),
        tests_only=True,
    ),
]
