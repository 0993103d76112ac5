"""The audit's queue and counts: what is bounded, what is repeated, what is said of records that are lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest

from laminar.http.api.names import AUDIT_TOPIC
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access.principals import UNPROVEN, Principal
from laminar.node.access.tokens import new_token
from laminar.node.api.audit.audit_log import MOST_AT_ONCE, MOST_QUEUED, MOST_REFUSED, Asked, AuditLog
from laminar.node.api.audit.summaries import WINDOW_MS
from laminar.node.api.common.forwarding import Forwarder
from laminar.node.transport.transport import Peer
from laminar.wire.audit import AuditRecord
from tests.node.services import Services, Stopped


class Topic:
    """The topic `_audit` as the log writes it: it takes batches, by their keys, or refuses all."""

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.tries: list[tuple[str, bytes]] = []
        self.records: list[AuditRecord] = []
        self.clock = Stopped(1_000_000)
        self.services = Services(clock=self.clock)
        self.log = AuditLog(self.services, self.append, self.make, makes_topic=True)

    async def append(self, lines: bytes, key: str) -> None:
        self.tries.append((key, lines))
        if self.problem is not None:
            raise self.problem
        self.records += [msgspec.json.decode(line, type=AuditRecord) for line in lines.splitlines()]

    async def make(self, topic: str, *, partitions: int, settings: object = None) -> None:
        assert (AUDIT_TOPIC, 1) == (topic, partitions)

    async def write(self) -> None:
        """Write all that waits; a pause after a failure is over at once."""
        while True:
            self.log._not_before_ms = 0
            tries, work = len(self.tries), self.log._tick()
            if work is None:
                return
            await work
            if self.problem is not None and len(self.tries) > tries:
                return

    def counted(self) -> int:
        return sum(record.count for record in self.records)


class From(Forwarder):
    """A connection from an address."""

    def __init__(self, address: str) -> None:
        super().__init__(Peer("n", 1, b""))
        self._address = address

    @property
    def peer(self) -> str:
        return f"{self._address}:4711"


@pytest.fixture
async def topic() -> Topic:
    return Topic()


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="laminar.audit"):
        yield caplog


def asked(
    method: str = "PUT",
    target: str = "/v1/topics/t",
    *,
    address: str = "10.0.0.1",
    principal: Principal = UNPROVEN,
    authorization: str = "",
) -> Asked:
    headers = {"authorization": authorization} if authorization else {}
    request = Request(RequestHead(method, target, headers), b"", From(address))
    return Asked(request, principal, "create_topic", {"topic": "t"})


async def test_a_flood_of_refusals_makes_few_records_that_count_all(
    topic: Topic, lines: pytest.LogCaptureFixture
) -> None:
    """From one address, and from more addresses than are distinguished."""
    refusal = Problem("unauthorized", "the request has no token")
    for number in range(20_000):
        topic.log.failed(asked(address=f"10.0.{number % 100}.1"), refusal, is_call=False)
    await topic.write()
    known = asked(address="10.0.99.1", principal=Principal("billing"))
    topic.log.failed(known, Problem("forbidden"), is_call=False)
    await topic.write()
    assert ("billing", 403) == (topic.records[-1].principal, topic.records[-1].status)  # not hidden by them
    del topic.records[-1], lines.records[-1]
    assert MOST_REFUSED == len(topic.records) == topic.log.statistics()["written"] - 1

    topic.clock._wall_ms += WINDOW_MS
    await topic.write()

    assert 2 * MOST_REFUSED + 1 == len(topic.records) == len(lines.records)
    assert 20_000 == topic.counted() == topic.log.statistics()["refused"] - 1
    rest = next(record for record in topic.records if record.address == "(several)")
    assert (70 * 200, "refused", 0) == (rest.count, rest.kind, rest.status)
    again = next(record for record in topic.records if record.address == "10.0.3.1" and record.count > 1)
    assert (199, 401, "unauthorized", "anonymous") == (again.count, again.status, again.code, again.principal)


async def test_changes_are_never_summed_up_and_reads_are(topic: Topic) -> None:
    admin = Principal("admin")
    for _ in range(5):
        topic.log.answered(asked(principal=admin), Response(200))
        topic.log.answered(asked("GET", principal=admin), Response(200))
        topic.log.failed(asked(principal=admin), Problem("invalid", "no"), is_call=True)
        topic.log.failed(asked(principal=admin), TimeoutError(), is_call=True)
    topic.log.failed(asked(principal=admin), Problem("not_found"), is_call=False)  # nothing of an admin
    topic.clock._wall_ms += WINDOW_MS
    await topic.write()

    found = [(record.method, record.status, record.count) for record in topic.records]
    assert 5 == found.count(("PUT", 200, 1)) == found.count(("PUT", 500, 1))
    assert {("GET", 200, 1), ("GET", 200, 4), ("PUT", 422, 1), ("PUT", 422, 4)} < set(found)
    assert 20 == topic.counted()


async def test_what_the_queue_has_no_room_for_is_counted_and_said_later(
    topic: Topic, lines: pytest.LogCaptureFixture
) -> None:
    """While the topic takes nothing; each line of the log was written."""
    topic.problem = Problem("no_leader", "the catalog has no leader")
    await topic.write()
    for number in range(MOST_QUEUED + 7):
        topic.log.answered(asked(target=f"/v1/topics/t{number}"), Response(201))
        await topic.write()
    refusal = Problem("unauthorized")
    for number in range(MOST_REFUSED):  # they may not displace a change
        topic.log.failed(asked(address=f"10.0.{number}.1"), refusal, is_call=False)

    said = topic.log.statistics()
    # One batch has left the queue for the topic, which refuses it.
    waiting = MOST_QUEUED + 1
    assert (0, 6 + MOST_REFUSED, waiting) == (said["written"], said["dropped"], said["waiting"])
    assert MOST_QUEUED + 7 + MOST_REFUSED == sum(" from 10." in each.message for each in lines.records)
    topic.problem = None
    await topic.write()

    assert 6 + MOST_REFUSED == next(each.count for each in topic.records if each.kind == "missed")
    assert MOST_QUEUED + 7 + MOST_REFUSED == topic.counted()
    assert (0, 0) == (topic.log.statistics()["waiting"], topic.log._missed)


async def test_a_batch_that_will_never_be_taken_is_missed_with_all_that_it_stood_for(topic: Topic) -> None:
    """Also the record in it that said how many were missed before; none is counted as dropped twice."""
    topic.problem = Problem("no_leader", "the catalog has no leader")
    await topic.write()
    for number in range(MOST_QUEUED + 7):
        topic.log.answered(asked(target=f"/v1/topics/t{number}"), Response(201))
    topic.problem = Problem("invalid", "this topic takes no such records")
    topic.log._not_before_ms = 0
    work = topic.log._tick()
    assert work is not None
    await work
    dropped = 7 + MOST_AT_ONCE
    assert (dropped, dropped) == (topic.log._missed, topic.log.statistics()["dropped"])
    topic.problem = None
    await topic.write()

    assert dropped == next(each.count for each in topic.records if each.kind == "missed")
    assert MOST_QUEUED + 7 == topic.counted()
    assert dropped == topic.log.statistics()["dropped"]


async def test_a_batch_is_repeated_under_its_key_until_it_is_durable(topic: Topic) -> None:
    topic.problem = Problem("outcome_unknown")
    topic.log.answered(asked(), Response(201))
    await topic.write()
    topic.log.answered(asked(), Response(201))
    await topic.write()
    topic.problem = None
    await topic.write()

    assert topic.tries[0] == topic.tries[1] == topic.tries[2] != topic.tries[3]
    assert 2 == len(topic.records)


async def test_a_pause_after_a_failure_grows_and_ends_with_a_success(topic: Topic) -> None:
    topic.problem = Problem("no_leader")
    topic.log.answered(asked(), Response(201))
    work = topic.log._tick()
    assert work is not None
    await work
    assert topic.log._tick() is None  # in the pause
    first = topic.log._pause_ms
    await topic.write()
    assert first < topic.log._pause_ms
    topic.problem = None
    await topic.write()
    assert topic.log._pause_ms < first


async def test_many_records_are_written_in_batches(topic: Topic) -> None:
    for _ in range(MOST_AT_ONCE + 1):
        topic.log.answered(asked(), Response(201))
    await topic.write()

    assert [MOST_AT_ONCE, 1] == [len(lines.splitlines()) for _, lines in topic.tries]


async def test_no_secret_and_no_line_end_is_in_a_record_or_a_line(
    topic: Topic, lines: pytest.LogCaptureFixture
) -> None:
    """Of a token in the head there is the id; in a path, where none belongs, it is cut, encoded or not."""
    token = new_token(lambda size: bytes(range(size)))
    secret = token.text.split("_", 2)[2]
    encoded = token.text.replace("l", "%6c", 1)
    for target in (f"/v1/admin/tokens/{token.text}?token={token.text}", f"/v1/admin/tokens/{encoded}%0a!"):
        bearer = f"Bearer {token.text}"
        topic.log.answered(asked("DELETE", target, authorization=bearer), Response(204))
    made = Response(201, [("Location", f"/v1/admin/tokens/{token.id}")])
    topic.log.answered(asked("POST", "/v1/admin/tokens"), made)
    await topic.write()

    text = "".join(lines.messages) + msgspec.json.encode(topic.records).decode()
    assert secret not in text and "?token" not in text and "%0a" not in text and "\n" not in text
    assert {token.id, ""} == {record.credential for record in topic.records}
    assert {"topic": "t", "location": f"/v1/admin/tokens/{token.id}"} == topic.records[2].subject
    assert f"/v1/admin/tokens/lam_{token.id}_(cut)" == topic.records[0].path


async def test_a_node_that_asks_no_one_notes_what_is_done_only_beside_nodes_that_do() -> None:
    """Else each cluster of a developer would have the topic."""
    topic = Topic()
    topic.log = AuditLog(topic.services, topic.append, topic.make, makes_topic=False)
    topic.log.answered(asked(), Response(201))
    await topic.write()
    assert [] == topic.tries
