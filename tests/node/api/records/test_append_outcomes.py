"""What an append is told: `not_applied` is only said when no record of it can ever be read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laminar.batch import BATCH_TYPE, Header, build
from laminar.http.api.append_body import Append
from laminar.http.api.limits import Limits
from laminar.http.api.problem_response import answer_error
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.http.server.writer import failure_of
from laminar.node.api.common.forwarding import Exchange, Forwarder, PassedResponse
from laminar.node.api.common.leader_call import LeaderCall, append_policy
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records import append as append_module
from laminar.node.api.records.append import AppendRoutes
from laminar.node.api.records.topic_append import TopicAppends
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt, Waiter
from laminar.node.partition.state.producers import REMEMBERED_BATCHES, Producers
from laminar.node.transport.transport import Address, Peer, RemoteError, TcpAddress
from tests.node.alone import lone_partition
from tests.node.services import TOPIC, Services, exchange
from tests.node.trio import batch


def routes(
    services: Services | None = None, **others: Callable[[str, bytes], Awaitable[Any]]
) -> AppendRoutes:
    """The append routes of a shard, with what other shards answer it."""
    services, asking = services or Services(), exchange(**others)
    leaders = LeaderCall(services, Locator(services, asking))
    return AppendRoutes(services, asking, leaders, TopicLookup(services.view), limits=Limits())


def elsewhere(answers: Callable[[], PassedResponse]) -> AppendRoutes:
    """Routes of a shard that has no partition: node `x` leads, and answers appends so."""

    async def leader(node: str, payload: bytes) -> str:
        return "x"

    async def http(node: str, payload: bytes) -> PassedResponse:
        return answers()

    return routes(Services(elsewhere=["x"]), leader=leader, http=http)


def post(body: bytes | bytearray, **headers: str) -> Request:
    """An append to partition 0 of the topic."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    client = Forwarder(Peer("client", 1, b"n" * 16))
    return Request(RequestHead("POST", "/v1/topics/t/partitions/0/records", named), body, client)


async def appended(served: AppendRoutes, request: Request) -> Response:
    """Return the answer to an append to partition 0."""
    answer = served.partition(request, TOPIC, "0")
    return answer if isinstance(answer, Response) else await answer


def append(partition: Partition, frame: bytearray) -> asyncio.Future[Receipt]:
    return partition.appends.append_frame(frame, Header.unpack(frame))


async def answer(partition: Partition, frames: Sequence[bytearray]) -> Problem:
    """The problem that a request with these batches is answered with."""
    served = routes()
    with pytest.raises(Problem) as problem:
        append = Append(None, [memoryview(frame) for frame in frames])
        await served._answer_many(served._append_frames(partition, append), partition)
    return problem.value


async def test_a_refusal_of_the_second_batch_does_not_deny_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is durable, so a client that repeats everything doubles it: 504, not a retriable 503."""
    monkeypatch.setattr("laminar.node.partition.append_path.UNCOMMITTED_BYTES", 1000)
    async with lone_partition(tmp_path) as partition:
        problem = await answer(partition, [build([b"x" * 2000]), build([b"y"])])

        assert ("outcome_unknown", "unknown") == (problem.code, problem.outcome)
        assert "durable in t all the same: 0: 0 to 0" in str(problem.detail)
        assert 1 == partition.end_offset


async def test_pitfall_18_the_cores_limit_is_named_like_the_partitions_own(tmp_path: Path) -> None:
    """What leaders before this one left uncommitted counts too: refused with field, value and limit."""
    async with lone_partition(tmp_path) as partition:
        partition.replica.core._log.uncommitted_bytes += 64 << 20
        with pytest.raises(Problem) as refused:
            append(partition, build([b"x"]))

        problem = refused.value
        assert ("overloaded", "not_applied") == (problem.code, problem.outcome)
        waiting = partition.replica.core.uncommitted_bytes
        assert ("uncommitted_bytes", waiting, 64 << 20) == (problem.field, problem.value, problem.limit)
        partition.replica.core._log.uncommitted_bytes -= 64 << 20
        assert 0 == (await append(partition, build([b"x"]))).offset


async def test_a_gap_behind_a_durable_batch_is_named_and_not_called_unapplied(tmp_path: Path) -> None:
    """The code says what is wrong with the second; the outcome is the request's."""
    async with lone_partition(tmp_path) as partition:
        problem = await answer(partition, [batch(0, b"x"), batch(2, b"y")])

        assert ("out_of_sequence", "unknown") == (problem.code, problem.outcome)
        assert 1 == partition.end_offset


async def test_the_first_batchs_refusal_refuses_the_request(tmp_path: Path) -> None:
    """Nothing was proposed: it may be sent again."""
    async with lone_partition(tmp_path) as partition:
        await append(partition, batch(0, b"w"))
        problem = await answer(partition, [batch(2, b"x"), batch(3, b"y")])

        assert ("out_of_sequence", "not_applied") == (problem.code, problem.outcome)
        assert 1 == partition.end_offset


async def test_a_retry_is_recognised_before_anything_is_refused(tmp_path: Path) -> None:
    """A full disk does not make an applied batch unapplied; and a number long taken is not "not applied"."""
    async with lone_partition(tmp_path) as partition:
        for sequence in range(REMEMBERED_BATCHES + 1):
            await append(partition, batch(sequence, b"x"))
        partition.appends.refusal = lambda: Problem("disk_full", outcome="not_applied")

        assert 1 == (await append(partition, batch(1, b"x"))).offset
        with pytest.raises(Problem) as forgotten:
            append(partition, batch(0, b"x"))
        with pytest.raises(Problem) as full:
            append(partition, batch(REMEMBERED_BATCHES + 1, b"x"))

        assert ("out_of_sequence", "unknown") == (forgotten.value.code, forgotten.value.outcome)
        assert ("disk_full", "not_applied") == (full.value.code, full.value.outcome)


@pytest.mark.parametrize(("voters", "outcome"), [(3, "not_applied"), (5, "unknown")])
async def test_a_truncated_append_is_surely_gone_only_of_three(
    tmp_path: Path, voters: int, outcome: str
) -> None:
    """Of five, a follower may hold the cut entry, be elected by two that never saw its successor, and
    commit it.
    """
    members = ConfigurationRecord(voters=tuple((number + 1, "here") for number in range(voters)))
    async with lone_partition(tmp_path, voters=members) as partition:
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        partition.appends.waiters[2] = [Waiter(future, Receipt(0, 0, 1), term=1, since_s=0.0)]

        partition.truncated(2)

        error = future.exception()
        assert isinstance(error, Problem)
        assert outcome == error.outcome


async def test_a_batch_does_not_overtake_what_stands_at_the_door(tmp_path: Path) -> None:
    """So one connection's appends keep their order, and `If-Match` holds for the offset that was checked."""
    async with lone_partition(tmp_path) as partition:
        assert partition.appends.would_start_at(0)
        conditional = partition.appends.append_records(Records([b"only at 0"]))
        overtaking = append(partition, build([b"a", b"b"]))

        assert [0, 1] == [(await conditional).offset, (await overtaking).offset]


@pytest.mark.parametrize(
    ("said", "code", "outcome"),
    [
        (RemoteError("overloaded"), "overloaded", "not_applied"),
        (RemoteError("timeout"), "outcome_unknown", "unknown"),
        (RemoteError("bug"), "internal_error", "unknown"),
    ],
)
async def test_a_call_that_fails_over_there_is_unknown_unless_it_was_never_begun(
    said: RemoteError, code: str, outcome: str
) -> None:
    """A handler that ran out of time may have appended."""

    class Failing:
        async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
            raise said

    with pytest.raises(Problem) as problem:
        await Exchange(Failing()).ask(TcpAddress("x", 1), "http", b"", kind=PassedResponse, timeout_s=1)
    assert (code, outcome) == (problem.value.code, problem.value.outcome)


@pytest.mark.parametrize("then", ["nobody leads", "it is not reached", "it is full"])
async def test_a_later_try_that_was_refused_does_not_deny_an_earlier_one(then: str) -> None:
    """A producer's batch is passed on again when its leader died; the first try may stand in the log. Who was
    told otherwise would give its number to another batch, which were then taken for this one.
    """
    refused = {
        "nobody leads": Problem("no_leader", outcome="not_applied"),
        "it is not reached": Problem("no_leader", outcome="not_applied"),
        "it is full": Problem("disk_full", outcome="not_applied"),
    }[then]
    tries = 0

    def answers() -> PassedResponse:
        nonlocal tries
        tries += 1
        raise Problem("no_leader", "the connection ended", outcome="unknown") if tries == 1 else refused

    services = Services(elsewhere=["x"])
    policy = replace(append_policy(repeatable=True, repeats_here=True), attempts_s=0.3, election_wait_s=0.3)

    async def leader(node: str, payload: bytes) -> str:
        return "" if then == "nobody leads" and tries else "x"

    async def http(node: str, payload: bytes) -> PassedResponse:
        return answers()

    served = routes(services, leader=leader, http=http)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_module, "append_policy", lambda **_: policy)
        with pytest.raises(Problem) as problem:
            await appended(served, post(batch(0, b"x"), content_type=BATCH_TYPE))

    assert tries
    assert ("outcome_unknown", "unknown") == (problem.value.code, problem.value.outcome)


async def test_a_sealed_partition_is_sure_of_earlier_tries_too() -> None:
    """It would know the batch, and takes no late copy: the client may send it elsewhere."""
    answers = [
        Problem("no_leader", "the connection ended", outcome="unknown"),
        Problem("sealed", field="partition", limit=4, outcome="not_applied"),
    ]

    def answered() -> PassedResponse:
        raise answers.pop(0)

    with pytest.raises(Problem) as problem:
        await appended(elsewhere(answered), post(batch(0, b"x"), content_type=BATCH_TYPE))

    assert not answers
    assert ("sealed", "not_applied", 4) == (problem.value.code, problem.value.outcome, problem.value.limit)


@pytest.mark.parametrize("of_a_topic", [False, True])
async def test_a_request_with_a_key_waits_for_its_own_first_try_and_for_no_other(of_a_topic: bool) -> None:
    """The leader dies, the next one has the batch uncommitted: who asked once is not told that he did twice.
    If another's request is under way, it is told at once.
    """
    running = Problem("in_progress", outcome="unknown")
    lost = Problem("no_leader", "the connection ended", outcome="unknown")
    body = (
        b'{"appended":1,"placed":[{"partition":0,"offset":7,"count":1}],'
        b'"durable":{"replicas":1,"synced":true,"flush":"commit"}}'
    )
    done = PassedResponse(201, [("Laminar-Replayed", "1")], b"", memoryview(body))
    answers: list[Problem | PassedResponse] = []

    def answered() -> PassedResponse:
        answer = answers.pop(0)
        if isinstance(answer, Problem):
            raise answer
        return answer

    served = elsewhere(answered)
    whole = TopicAppends(
        served._services, served._exchange, served._leaders, served._topics, parse=served.parse
    )

    async def append() -> Response:
        if of_a_topic:
            return await whole.topic(post(b"x", idempotency_key="one", content_type="text/plain"), TOPIC)
        return await appended(served, post(b"x", idempotency_key="one", content_type="text/plain"))

    answers = [lost, running, running, done]
    answer = await append()
    assert not answers
    assert ("Laminar-Replayed", "1") in answer.headers

    answers = [running, done]
    with pytest.raises(Problem) as problem:
        await append()
    assert "in_progress" == problem.value.code


async def test_readers_who_gave_up_are_forgotten(tmp_path: Path) -> None:
    """On a partition where nothing happens, long polls that end leave nothing behind."""
    async with lone_partition(tmp_path) as partition:
        assert not any(await asyncio.gather(*(partition.reader.wait_past(0, 0.01) for _ in range(10))))
        gone = [asyncio.ensure_future(partition.reader.wait_past(0, 30)) for _ in range(10)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)

        assert not partition.reader.waiting


async def test_a_log_read_at_a_start_piles_up_no_way_back(tmp_path: Path) -> None:
    """Of a thousand batches only the last few may still be cut; no more than those is kept for it."""
    async with lone_partition(tmp_path) as partition:
        for sequence in range(200):
            await append(partition, batch(sequence, b"x"))
    most = 0

    class Watching(Producers):
        def appended(self, header: Header, *, delayed: tuple[int, int] | None = None) -> None:
            nonlocal most
            super().appended(header, delayed=delayed)
            most = max(most, len(self._undo))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laminar.node.partition.state.state.Producers", Watching)
        async with lone_partition(tmp_path) as partition:
            assert 200 == partition.producers.snapshot()[0][2]
    assert 0 < most < 10


async def test_a_request_that_was_given_up_may_have_been_carried_out() -> None:
    """So its answer is none that a client repeats by itself."""
    future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    future.cancel()

    error = failure_of(future)
    assert error is not None
    response = answer_error(error)

    assert response is not None and 504 == response.status
    assert isinstance(response.body, bytes) and b"outcome_unknown" in response.body
