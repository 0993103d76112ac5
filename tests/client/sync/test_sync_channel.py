"""Consumers of a channel without a loop, on a real node."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

import laminar
from laminar.testing.nodes import serve

_numbers = itertools.count()


@pytest.fixture(scope="module")
def client() -> Iterator[laminar.Client]:
    with serve() as url, laminar.connect(url) as found:
        yield found


@pytest.fixture
def topic(client: laminar.Client) -> laminar.Topic[bytes]:
    """A topic with ten records."""
    topic = client.create_topic(f"t{next(_numbers)}", partitions=2)
    with topic.producer() as producer:
        for number in range(10):
            producer.send(b"%d" % number, key=f"k{number}")
    return topic


def test_jobs_are_received_and_acknowledged(topic: laminar.Topic[bytes]) -> None:
    channel = topic.channel("c", exist_ok=True)
    seen = []
    for job in channel.receive(4):
        assert 1 == job.attempt and job.floor <= job.offset and job.key is not None
        job.ack()
        seen.append(job.value)
        if len(seen) == 10:
            break

    assert [b"%d" % number for number in range(10)] == sorted(seen)
    assert [] == channel.receive_batch(wait=0)
    assert 0 == channel.describe().depth


def test_a_loop_that_breaks_off_gives_back_what_it_has(topic: laminar.Topic[bytes]) -> None:
    channel = topic.channel("c", exist_ok=True)
    jobs = channel.receive()
    next(jobs).extend(60)
    jobs.close()  # type: ignore[attr-defined]
    left: list[laminar.Job[bytes]] = []
    while len(left) < 9:
        left += channel.receive_batch(wait=5)

    assert {1} == {job.attempt for job in left}
    left[0].nack(reason="no")
    with pytest.raises(laminar.Late):
        left[0].release()


def test_work_calls_its_handler_in_threads(topic: laminar.Topic[bytes]) -> None:
    """As many at a time as it says; a failure is tried again, and the end is that of the channel."""
    channel = topic.channel("c", retry_ms=10)
    together, calls = threading.Barrier(3, timeout=60), itertools.count()
    seen: list[tuple[bytes, int]] = []

    def handle(job: laminar.Job[bytes]) -> None:
        if next(calls) < 3:
            together.wait()
        if job.value == b"5" and job.attempt == 1:
            raise laminar.Retry("not yet", delay=0.01)
        seen.append((job.value, job.attempt))
        if len(seen) == 10:
            channel.close()

    channel.work(handle, concurrency=3)

    assert {(b"%d" % number, 1 + (number == 5)) for number in range(10)} == set(seen)
    assert 0 == channel.describe().depth
