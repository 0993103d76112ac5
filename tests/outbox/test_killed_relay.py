"""A relay that is killed with -9, at each step and at any time: each committed row is in the topic once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import pytest

import laminar
from laminar.testing import nodes
from tests.long_examples import long
from tests.outbox.applications import Application
from tests.outbox.relaying import STEPS
from tests.outbox.test_relay import Topic, send, values

ROWS = 150
INSERTERS = 3
# It ends what hangs, and judges nothing.
PATIENCE_S = 120

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(application: Application, topic: Topic, url: str) -> Iterator[Start]:
    """Starts a relay in a process; all that are left are killed at the end."""
    with ExitStack() as ends:

        def begin(*step: str) -> subprocess.Popen[bytes]:
            where = [url, topic.name, application.driver, application.place]
            return ends.enter_context(relay(*where, *step))

        yield begin


@contextmanager
def relay(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A relay in a process, once it runs; killed at the end."""
    told, log = os.pipe()
    with open(told, "rb") as lines:
        with open(log, "wb") as writer:
            command = [sys.executable, "-m", "tests.outbox.relaying", *arguments]
            running = nodes.start_process(command, env=os.environ, log=writer)
        try:
            assert b"running\n" == lines.readline()
            yield running
        finally:
            running.kill()
            running.wait()


LATER = ("claiming", "claimed", "sending", "durable")


@pytest.mark.parametrize(
    ("step", "times"),
    [*((step, 1) for step in STEPS), ("deleting", 3), *long(*((step, 3) for step in LATER))],
)
def test_killed_at_a_step(
    step: str, times: int, application: Application, topic: Topic, start: Start
) -> None:
    """25 rows, in claims of ten: the first time and a later one."""
    rows = [b"%d" % number for number in range(25)]
    application.add(*rows)
    running = start(step, str(times))

    assert -signal.SIGKILL == running.wait(PATIENCE_S)
    send(application, topic)

    assert rows == values(topic)
    assert [] == application.rows("SELECT id FROM outbox")


@pytest.mark.parametrize("kills", [3, *long(8)])
def test_killed_at_any_time_while_rows_come(
    application: Application, client: laminar.Client, url: str, kills: int
) -> None:
    """Several insert until the last is killed, so ids are committed out of order; some are rolled back."""
    topic = client.create_topic(f"any-{application.driver}-{kills}", partitions=3)
    rng = random.Random(17)
    chances = [random.Random(seed) for seed in range(INSERTERS)]
    committed: list[list[bytes]] = [[] for _ in range(INSERTERS)]

    killed = threading.Event()

    def insert(number: int) -> None:
        chance = chances[number]
        with application.opened() as connection:
            for row in count():
                if row >= ROWS and killed.is_set():
                    return
                value = b"%d %d" % (number, row)
                application.insert(connection, value, key=f"{number}")
                if chance.random() < 0.2:
                    connection.rollback()
                    continue
                connection.commit()
                committed[number].append(value)

    threads = [threading.Thread(target=insert, args=(number,)) for number in range(INSERTERS)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(kills):
            with (
                relay(url, topic.name, application.driver, application.place) as running,
                pytest.raises(subprocess.TimeoutExpired),
            ):
                running.wait(rng.uniform(0.02, 0.3))
    finally:
        killed.set()
        for thread in threads:
            thread.join()
    send(application, topic)

    found: list[list[bytes]] = [[] for _ in range(INSERTERS)]
    for record in topic.read():
        found[int(record.value.split()[0])].append(record.value)
    assert committed == found
    assert min(map(len, found)) > ROWS / 2


def test_the_next_relay_takes_over_when_the_first_is_killed(
    application: Application, topic: Topic, start: Start
) -> None:
    first, second = start(), start()
    with topic.read(follow=True) as reader:
        records = iter(reader)
        application.add(b"one")
        assert b"one" == next(records).value
        for each in (first, second):
            each.kill()
            each.wait(PATIENCE_S)
            third = start()
            application.add(b"more")
            assert b"more" == next(records).value
        third.send_signal(signal.SIGTERM)
        assert 0 == third.wait(PATIENCE_S)
        start().kill()
