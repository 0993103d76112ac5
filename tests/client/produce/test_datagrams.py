"""The client's end of datagrams, before sockets that answer as a test says, or not at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import laminar
from laminar import aio
from laminar.batch import Batch
from laminar.client.errors import Error, Fenced, OutcomeUnknown, TimedOut, Unavailable
from laminar.client.produce import datagrams as datagrams_module
from laminar.wire.datagram import Answer, DatagramCodec, Leader, NextRoute, Problem, Question, Receipt
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route

CODEC = DatagramCodec(b"")
Reply = Receipt | Problem | Leader | NextRoute | None


class Peer(asyncio.DatagramProtocol):
    """A node of one socket: `say(question, times it was asked)` is its answer, None for silence."""

    def __init__(self, say: Callable[[Question, int], Reply]) -> None:
        self.say = say
        self.asked: list[Question] = []
        self.heard = asyncio.Event()
        self.transport: Any = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.transport.get_extra_info("sockname")[:2]
        return host, port

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        question = CODEC.decode_question(data)
        self.asked.append(question)
        self.heard.set()
        said = self.say(question, sum(each.number == question.number for each in self.asked))
        if said is not None:
            answer = CODEC.encode_answer(Answer(question.number, 0, said), limit_bytes=1_000)
            self.transport.sendto(answer, addr)


@asynccontextmanager
async def peer(say: Callable[[Question, int], Reply]) -> AsyncIterator[Peer]:
    loop = asyncio.get_running_loop()
    transport, made = await loop.create_datagram_endpoint(lambda: Peer(say), local_addr=("127.0.0.1", 0))
    try:
        yield made
    finally:
        transport.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent again because an answer is slow: for nodes that answer all, and tests that count."""
    monkeypatch.setattr(datagrams_module, "RESEND_MS", 60_000)
    monkeypatch.setattr(datagrams_module, "LONGEST_RESEND_MS", 60_000)


def placed(question: Question, count: int = 1) -> Receipt:
    return Receipt(7, count, 3, synced=True, duplicate=False)


def problem(code: str, status: int, **more: Any) -> Problem:
    return {"code": code, "status": status, "detail": f"it is {code}", **more}


def heads(made: Peer) -> list[tuple[int, int]]:
    """Epoch and sequence of each question."""
    return [
        (header.producer_epoch, header.sequence)
        for header in (Batch(memoryview(bytes(each.frame))).header for each in made.asked)
    ]


async def test_what_is_not_answered_is_sent_again_the_same() -> None:
    """Byte by byte, so that the node knows it again."""
    async with peer(lambda question, times: placed(question) if times == 3 else None) as node:
        async with laminar.aio.connect(node.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                receipt = await datagrams.append(b"x")
                told = datagrams.statistics()

    assert laminar.Receipt(0, 7, 3, True) == receipt
    assert {bytes(node.asked[0].frame)} == {bytes(each.frame) for each in node.asked}
    assert told["datagrams"] - 1 == told["resent"] >= 2


async def test_without_an_answer_the_outcome_is_unknown_and_the_next_begins_an_epoch() -> None:
    """An old copy that comes late can't be taken for a newer batch."""
    silent = True
    async with peer(lambda question, times: None if silent else placed(question)) as node:
        async with laminar.aio.connect(node.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                with pytest.raises(OutcomeUnknown, match=r"1\.5 s; last: 127\.0\.0\.1:\d+ did not answer"):
                    await datagrams.append(b"x", timeout=1.5)
                silent = False
                await datagrams.append(b"y")
                await datagrams.append(b"z")

    assert [(0, 0), (1, 0), (1, 1)] == list(dict.fromkeys(heads(node)))


@pytest.mark.usefixtures("patient")
async def test_a_leader_that_is_named_is_asked_and_remembered() -> None:
    """Also by those that come after."""
    async with peer(lambda question, times: placed(question)) as leader:
        host, port = leader.address
        async with peer(lambda question, times: Leader(host, port)) as other:
            async with laminar.aio.connect(other.url) as client:
                async with client.topic("t").datagrams(partitions=1) as datagrams:
                    for _ in range(3):
                        await datagrams.append(b"x")

    assert (1, 3) == (len(other.asked), len(leader.asked))


async def test_two_that_name_each_other_are_not_asked_without_a_pause() -> None:
    """While an election is under way, both may be wrong."""
    names: dict[str, Leader] = {}
    async with peer(lambda question, times: names["b"]) as a, peer(lambda question, times: names["a"]) as b:
        names |= {"a": Leader(*a.address), "b": Leader(*b.address)}
        async with laminar.aio.connect(a.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                with pytest.raises(OutcomeUnknown):
                    await datagrams.append(b"x", timeout=1.0)

    assert len(a.asked) + len(b.asked) < 100


async def test_a_passing_trouble_is_waited_out_and_a_lasting_one_is_raised(
    request: pytest.FixtureRequest,
) -> None:
    """As over HTTP, with the same exceptions."""

    def say(question: Question, times: int) -> Reply:
        if b"fenced" in bytes(question.frame):
            return problem("fenced", 409, outcome="not_applied", field="producer_epoch", value=0, limit=1)
        return placed(question) if times > 2 else problem("no_leader", 503, retry_after_ms=1)

    async with peer(say) as node:
        async with laminar.aio.connect(node.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                assert 7 == (await datagrams.append(b"x")).offset
                request.getfixturevalue("patient")  # beside a copy without an answer it would be unknown
                with pytest.raises(Fenced) as told:
                    await datagrams.append(b"fenced")

    assert ("not_applied", "producer_epoch", 409) == (told.value.outcome, told.value.field, told.value.status)


async def test_a_refusal_after_silence_leaves_the_outcome_unknown() -> None:
    """The copy that was not answered may have been appended."""
    async with peer(lambda question, times: problem("unknown_producer", 409) if times == 2 else None) as node:
        async with laminar.aio.connect(node.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                with pytest.raises(OutcomeUnknown, match="an earlier copy"):
                    await datagrams.append(b"x")


@pytest.mark.usefixtures("patient")
async def test_a_forgotten_producer_begins_the_next_epoch() -> None:
    """One of very many is forgotten where others come after it; what has a receipt stays as it is."""

    def say(question: Question, times: int) -> Reply:
        header = Batch(memoryview(bytes(question.frame))).header
        forgotten = (header.producer_epoch, header.sequence) == (0, 2)
        return problem("unknown_producer", 409, outcome="unknown") if forgotten else placed(question)

    async with peer(say) as node:
        async with laminar.aio.connect(node.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                for _ in range(4):
                    await datagrams.append(b"x")

    assert [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)] == heads(node)


@pytest.mark.usefixtures("patient")
async def test_what_waits_leaves_together_and_never_more_than_has_room() -> None:
    """One datagram of a partition is under way at a time."""
    sizes: list[int] = []

    def say(question: Question, times: int) -> Reply:
        count = Batch(memoryview(bytes(question.frame))).header.count
        sizes.append(count)
        return placed(question, count)

    async with peer(say) as node:
        async with laminar.aio.connect(node.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                receipts = await asyncio.gather(*(datagrams.append(b"v" * 100) for _ in range(40)))

    assert 40 == sum(sizes) == len(receipts)
    assert 4 <= len(sizes) <= 12
    assert all(len(each.frame) <= 1_200 - 24 - 1 - 16 for each in node.asked)


async def test_closing_says_what_becomes_of_what_is_under_way() -> None:
    """Sent: unknown; not sent yet: not applied; also where only the client is closed."""
    async with peer(lambda question, times: None) as node:
        for close_client in (False, True):
            async with laminar.aio.connect(node.url) as client:
                datagrams = client.topic("t").datagrams(partitions=1)
                node.heard.clear()
                first = asyncio.ensure_future(datagrams.append(b"first"))
                await node.heard.wait()
                second = asyncio.ensure_future(datagrams.append(b"second"))
                await asyncio.sleep(0)
                await (client.close() if close_client else datagrams.close())
                ends = await asyncio.gather(first, second, return_exceptions=True)
                assert [OutcomeUnknown, Unavailable] == [type(end) for end in ends]
                with pytest.raises(Unavailable):
                    await datagrams.append(b"third")


async def test_what_could_not_be_sent_in_time_was_not_applied() -> None:
    """It waited behind one that nobody answered."""
    async with peer(lambda question, times: None) as node:
        async with laminar.aio.connect(node.url) as client:
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                first = asyncio.ensure_future(datagrams.append(b"first"))
                await node.heard.wait()
                with pytest.raises(TimedOut) as told:
                    await datagrams.append(b"second", timeout=0.1)
                first.cancel()

    assert "not_applied" == told.value.outcome


@pytest.mark.usefixtures("patient")
async def test_answers_that_prove_nothing_are_not_heard() -> None:
    """Of another secret, of another number, noise."""

    class Liar(Peer):
        def datagram_received(self, data: bytes, addr: Any) -> None:
            question = CODEC.decode_question(data)
            said = Answer(question.number, 0, Receipt(1, 1, 1, True, False))
            self.transport.sendto(DatagramCodec(b"another").encode_answer(said, limit_bytes=300), addr)
            self.transport.sendto(b"noise", addr)
            said = Answer(b"12345678", 0, Receipt(2, 1, 1, True, False))
            self.transport.sendto(CODEC.encode_answer(said, limit_bytes=300), addr)
            super().datagram_received(data, addr)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: Liar(lambda question, times: placed(question)), local_addr=("127.0.0.1", 0)
    )
    host, port = transport.get_extra_info("sockname")
    async with laminar.aio.connect(f"http://{host}:{port}") as client:
        async with client.topic("t").datagrams(partitions=1) as datagrams:
            receipt = await datagrams.append(b"x")
            told = datagrams.statistics()
    transport.close()

    assert (7, 2) == (receipt.offset, told["forged"])


async def test_a_value_that_is_none_and_a_number_of_partitions_that_is_none() -> None:
    """Said where it is given, before anything is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        async with laminar.aio.connect(f"http://127.0.0.1:{sock.getsockname()[1]}") as client:
            with pytest.raises(laminar.ConfigError, match="partitions must be 1 or more, not 0"):
                client.topic("t").datagrams(partitions=0)
            async with client.topic("t").datagrams(partitions=1) as datagrams:
                with pytest.raises(TypeError):
                    await datagrams.append("text")  # type: ignore[arg-type]  # the mistake that is tested
                with pytest.raises(Error) as told:
                    await datagrams.append(b"x", timestamp_ms=1 << 70)
                assert "invalid" == told.value.code


async def test_a_batch_that_an_ended_partition_refuses_goes_on_ahead_of_newer_ones() -> None:
    """To the partitions that the answer names; after a merge not before every input is resolved."""
    half = LOGICAL_PARTITIONS // 2
    merged = Route(2, [0, half, LOGICAL_PARTITIONS], [4, 3])
    logs: dict[int, list[bytes]] = {}
    told: dict[bytes, Receipt] = {}
    early: list[bool] = []
    release = asyncio.Event()

    def say(question: Question, copies: int) -> Reply:
        batch = Batch(memoryview(bytes(question.frame)))
        if question.partition == 0:
            return NextRoute(1, ((2, 0, half // 2), (1, half // 2, half // 2), (3, half, half)))
        if question.partition in (1, 2):
            if question.partition == 2 and not release.is_set():
                return None  # in doubt: nothing is sent to what follows both
            return NextRoute(2, ((4, 0, half), (3, half, half)))
        early.append(question.partition == 4 and not release.is_set())
        if question.number not in told:
            log = logs.setdefault(question.partition, [])
            log += [bytes(value) for value in batch.values]
            count = len(batch.values)
            told[question.number] = Receipt(len(log) - count, count, 3, synced=True, duplicate=False)
        return told[question.number]

    def in_three(key: str) -> bool:
        return merged.partition_of_key(key) == 3

    async with peer(say) as node, aio.connect(node.url) as client:
        datagrams = client.topic("t").datagrams(partitions=1)
        keys = [f"key {number}" for number in range(12)]
        async with datagrams:
            first = [asyncio.create_task(datagrams.append(f"{key} 1".encode(), key)) for key in keys]
            while not {1, 2} <= {each.partition for each in node.asked}:
                node.heard.clear()
                await node.heard.wait()
            later = [asyncio.create_task(datagrams.append(f"{key} 2".encode(), key)) for key in keys]
            named = asyncio.create_task(datagrams.append(b"named", partition=2))
            while (route := datagrams._queues.route) is None or route.version < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            last = [asyncio.create_task(datagrams.append(f"{key} 3".encode(), key)) for key in keys]
            # What would be sent too soon is sent now.
            await asyncio.gather(*(task for key, task in zip(keys, last, strict=True) if in_three(key)))
            release.set()
            receipts = await asyncio.gather(*first, *later, *last)
            with pytest.raises(laminar.Sealed):
                await named
            with pytest.raises(laminar.Sealed):
                await datagrams.append(b"named", partition=2)
    for key, receipt in zip(keys * 3, receipts, strict=True):
        assert receipt.partition == merged.partition_of_key(key)
    for log in logs.values():
        words = [value.decode().rsplit(" ", 1) for value in log]
        for key in keys:
            turns = [turn for each, turn in words if each == key]
            assert turns in ([], ["1", "2", "3"])
    assert not any(early), "an output was sent to before its inputs were resolved"
