"""The sync face: the same promises from a thread without a loop, and the same shape."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

import laminar
from laminar.client import client as aio_client
from laminar.client import topic as aio_topic
from laminar.client.consume import channel as aio_channel
from laminar.client.consume import jobs as aio_jobs
from laminar.client.consume import large_values as aio_values
from laminar.client.consume import reader as aio_reader
from laminar.client.consume.group import subscription as aio_subscription
from laminar.client.produce import datagrams as aio_datagrams
from laminar.client.produce import producer as aio_producer
from laminar.client.sync import channel as sync_channel
from laminar.client.sync import client as sync
from laminar.client.sync import datagrams as sync_datagrams
from laminar.client.sync import large_values as sync_values
from laminar.client.sync import portal as portal_module
from laminar.client.sync import producer as sync_producer
from laminar.client.sync import reader as sync_reader
from laminar.client.sync import sinks as sync_sinks
from laminar.client.sync import subscription as sync_subscription
from laminar.client.sync import topic as sync_topic
from laminar.client.sync.portal import Portal
from laminar.client.transact import sinks as aio_sinks

TWINS = [
    (aio_client.Client, sync.Client),
    (aio_topic.Topic, sync_topic.Topic),
    (aio_producer.Producer, sync_producer.Producer),
    (aio_reader.Reader, sync_reader.Reader),
    (aio_datagrams.Datagrams, sync_datagrams.Datagrams),
    (aio_subscription.Subscription, sync_subscription.Subscription),
    (aio_sinks.Sink, sync_sinks.Sink),
    (aio_sinks.Stager, sync_sinks.Stager),
    (aio_sinks.Transaction, sync_sinks.Transaction),
    (aio_values.Value, sync_values.Value),
    (aio_channel.Channel, sync_channel.Channel),
    (aio_jobs.Job, sync_channel.Job),
]
# What only one face needs: the other's machinery.
ONLY_ASYNC = {
    "session",
    "end",
    "open_sender",
    "add_acks",
    "take_ready",
    "take",
    "may_hand_out",
    "still_owned",
    "ready",
    "expect",
    "page_of_delayed",
}


def public(kind: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith("_") and inspect.isfunction(member)
    }


@pytest.mark.parametrize(("async_kind", "sync_kind"), TWINS, ids=lambda kind: kind.__name__)
def test_both_faces_have_the_same_shape(async_kind: type, sync_kind: type) -> None:
    """Every public method of one is in the other, with the same parameters and defaults."""
    theirs = {name: each for name, each in public(async_kind).items() if name not in ONLY_ASYNC}
    ours = public(sync_kind)

    assert theirs.keys() == ours.keys()
    for name, method in theirs.items():
        expected = [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
        found = [(p.name, p.kind, p.default) for p in inspect.signature(ours[name]).parameters.values()]
        assert expected == found, name


@pytest.mark.parametrize("waits", ["for its work", "for a receipt"])
def test_an_interrupt_that_comes_just_before_the_wait_ends_it(cluster: Any, waits: str) -> None:
    """Python only notes it then, as it does one that another thread takes; a wait for a lock goes on."""

    async def interrupt() -> None:
        await asyncio.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.Event().wait()

    cluster.leaderless = waits != "for its work"
    with laminar.connect(cluster.urls) as client:
        portal = client._open()
        if waits == "for its work":
            with pytest.raises(KeyboardInterrupt):
                portal.run(interrupt)
            return
        with pytest.raises(KeyboardInterrupt), client.topic("t").producer() as producer:
            delivery = producer.send(b"x", partition=0)
            interrupting = asyncio.run_coroutine_threadsafe(interrupt(), portal.loop)
            try:
                delivery.result()
            finally:
                interrupting.cancel()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_work_is_begun_on_the_loop_or_not_at_all(cluster: Any) -> None:
    """An interrupt on the way there leaves no coroutine that was made and never run."""
    made = []

    async def work() -> int:
        return threading.get_ident()

    def make() -> Coroutine[Any, Any, int]:
        made.append(threading.get_ident())
        return work()

    with laminar.connect(cluster.urls) as client:
        portal = client._open()
        there = portal.run(make)
        given_up: Future[int] = Future()
        given_up.cancel()
        portal.loop.call_soon_threadsafe(portal._begin, make, given_up)
        assert there == portal.run(work)

    assert [there] == made
    assert there != threading.get_ident()


def test_the_first_lines_of_the_manual(cluster: Any) -> None:
    """Create, append, produce, read."""
    with laminar.connect(cluster.urls[0]) as client:
        hello = client.create_topic("hello", partitions=4, exist_ok=True)
        receipt = hello.append(b"hi", key="SFO")
        with hello.producer() as producer:
            for number in range(5_000):
                producer.send(b"%d" % number, key=b"%d" % (number % 11))
        read: dict[bytes | None, list[bytes]] = {}
        for record in hello.read(start="earliest"):
            read.setdefault(record.key, []).append(record.value)

    assert (0, 3) == (receipt.offset, receipt.replicas)
    assert [b"hi"] == read.pop(b"SFO")
    assert {b"%d" % k: [b"%d" % n for n in range(k, 5_000, 11)] for k in range(11)} == read


async def test_it_works_under_a_running_loop(cluster: Any) -> None:
    """As in a notebook: the caller's loop is not used and not in the way."""
    client = laminar.connect(cluster.urls)
    client.topic("t").append(b"x", partition=0)
    client.close()
    client.close()

    assert [b"x"] == cluster.values("t", 0)


def test_send_waits_for_room(cluster: Any) -> None:
    """A buffer smaller than the stream holds back the sender, and everything arrives."""
    with laminar.connect(cluster.urls) as client:
        with client.topic("t").producer(buffer_bytes=4_000, batch_bytes=1_000) as producer:
            for number in range(2_000):
                producer.send(b"%05d" % number, partition=2)
                assert producer.statistics()["buffered_bytes"] <= 5_000

    assert [b"%05d" % n for n in range(2_000)] == cluster.values("t", 2)


def test_a_delivery_can_be_waited_for(cluster: Any) -> None:
    """result() blocks until the receipt is there."""
    with laminar.connect(cluster.urls) as client, client.topic("t").producer() as producer:
        deliveries = [producer.send(b"x", partition=0) for _ in range(3)]

        assert [0, 1, 2] == [delivery.result(60).offset for delivery in deliveries]


def test_threads_share_a_producer(cluster: Any) -> None:
    """Four threads, one producer: nothing is lost, and each thread's records keep their order."""
    with laminar.connect(cluster.urls) as client:
        with client.topic("t").producer(batch_bytes=2_000) as producer:

            def run(name: int) -> None:
                for number in range(500):
                    producer.send(b"%d %d" % (name, number), partition=0)

            threads = [threading.Thread(target=run, args=(name,)) for name in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    values = [tuple(map(int, value.split())) for value in cluster.values("t", 0)]
    assert 2_000 == len(values)
    for name in range(4):
        assert list(range(500)) == [number for who, number in values if who == name]


def test_a_failure_leaves_the_block_as_an_error(cluster: Any) -> None:
    """ProduceError in the sync face too, and the error of the block itself is not hidden."""
    cluster.append_faults.append("reject")
    with laminar.connect(cluster.urls) as client:
        with pytest.raises(laminar.ProduceError) as caught, client.topic("t").producer() as producer:
            producer.send(b"x", partition=0)
        with pytest.raises(ZeroDivisionError), client.topic("t").producer():
            raise ZeroDivisionError

    assert [b"x"] == [each.value for each in caught.value.undelivered]


def test_a_cursor_covers_what_the_loop_has_seen(cluster: Any) -> None:
    """Though batches cross over ahead of the loop, a commit stops at the record in hand."""
    with laminar.connect(cluster.urls) as client:
        topic = client.topic("t")
        with topic.producer() as producer:
            for number in range(10):
                producer.send(b"%d" % number, partition=0)
        with topic.read(cursor="c", partitions=[0]) as records:
            for record in records:
                if record.raw == b"6":
                    break

        assert {0: 7} == topic.cursor("c")
        assert [b"7", b"8", b"9"] == [r.raw for r in topic.read(cursor="c", partitions=[0])]


@pytest.mark.parametrize("follow", [False, True])
def test_a_loop_that_breaks_off_is_gone_on_with_by_the_next(cluster: Any, follow: bool) -> None:
    """In the middle of a batch, too; nothing is fetched meanwhile."""
    with laminar.connect(cluster.urls) as client:
        topic = client.topic("t")
        for _ in range(2):
            with topic.producer() as producer:
                for number in range(20):
                    producer.send(b"%d" % number, partition=number % 2)
        seen: list[list[int]] = [[], []]
        with topic.read(follow=follow) as records:
            for wanted in (1, 3, 17, 39):
                for record in records:
                    seen[record.partition].append(record.offset)
                    if sum(map(len, seen)) == wanted:
                        break
            batch = records.next_batch()
            assert batch is not None
            seen[batch.partition] += batch.offsets
            assert {0: 20, 1: 20} == {number: records.positions[number] for number in (0, 1)}
            if not follow:
                assert [] == list(records)

    assert [list(range(20))] * 2 == seen


def test_tables(cluster: Any) -> None:
    """to_arrow has a row per record, with its partition."""
    pytest.importorskip("pyarrow")
    with laminar.connect(cluster.urls) as client:
        topic = client.topic("t")
        with topic.producer() as producer:
            for number in range(100):
                producer.send(b"%d" % number, key=b"k%d" % number)
        table = topic.read().to_arrow()
        empty = topic.read("latest").to_arrow()

    assert {b"%d" % n for n in range(100)} == {value.as_py() for value in table["value"]}
    assert {0, 1, 2, 3} == {value.as_py() for value in table["partition"]}
    assert (0, table.schema) == (empty.num_rows, empty.schema)


def test_what_a_failed_call_left_under_way_ends_with_the_client() -> None:
    """Else its task met a closed loop when it was collected, in whatever ran then."""
    portal = Portal()
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise OSError

    async def call() -> None:
        await asyncio.gather(waits(), fails())

    with pytest.raises(OSError):
        portal.run(call)
    assert [] == ended
    portal.close()
    portal.close()
    assert ["waits"] == ended


def test_threads_that_close_at_once_all_return() -> None:
    """And the last call is made once."""
    for _ in range(100):
        portal = Portal()
        made: list[int] = []

        async def last(made: list[int] = made) -> None:
            made.append(1)

        threads = [threading.Thread(target=portal.close, args=[last]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [False] * 3 == [thread.is_alive() for thread in threads]
        assert [1] == made
        assert portal.loop.is_closed()


def test_a_call_that_another_thread_closes_under_way_may_have_been_applied(cluster: Any) -> None:
    """It raises an error with an outcome; before, the thread waited for ever."""
    cluster.leaderless = True
    found: list[BaseException] = []
    with laminar.connect(cluster.urls) as client:
        portal = client._open()
        begun = threading.Event()

        async def waits() -> None:
            begun.set()
            await asyncio.Event().wait()

        def call(work: Callable[[], Any]) -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001
                found.append(error)

        threads = [
            threading.Thread(target=call, args=[lambda: portal.run(waits)]),
            threading.Thread(target=call, args=[lambda: client.topic("t").append(b"x", partition=0)]),
        ]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
    for thread in threads:
        thread.join(60)
    assert [False] * 2 == [thread.is_alive() for thread in threads]
    assert all(isinstance(each, laminar.Error) and each.outcome for each in found), found
    assert 2 == len(found)


def test_what_goes_on_though_it_is_cancelled_holds_up_a_close_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is closed all the same."""
    monkeypatch.setattr(portal_module, "LAST_S", 0.05)
    portal = Portal()

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(stubborn())

    task = portal.run(begin)
    portal.close()
    assert portal.loop.is_closed() and not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
