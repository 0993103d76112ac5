"""The three loads: a producer's batches, appends of one record each, and a reader.

Each begins the tally that it is given, and ends it also if it is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from functools import partial

from laminar.cli.commands.bench.pace import Pace
from laminar.cli.commands.bench.tally import Latencies, Tally
from laminar.cli.errors import Failed
from laminar.client.consume.reader import Reader
from laminar.client.errors import Error
from laminar.client.policy.partition_queue import Pending
from laminar.client.produce.producer import DEFAULT_BATCH_BYTES, DEFAULT_BUFFER_BYTES
from laminar.client.produce.sender import Sender
from laminar.client.topic import Topic

WARM_UP_RECORDS = 200
"""Records before the load, which are not counted: they open the connections."""
HEAD_BYTES = 16
"""What a record of `latency` begins with: the run and its number."""

# What one turn of the loop hands over at most: other work of the loop waits meanwhile.
_TURN_BYTES = 256 << 10
# When a reader was silent for so long after the last acknowledgement, what it has not read counts as unread.
_READ_WAIT_S = 10.0
_LOOK_S = 0.1
# What records are given that have no answer when a load is interrupted: they did not fail.
_ENDED = Error("the load ended", code="load_ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load to send: records of `size` bytes, for `seconds`, `rate` a second (None: unlimited)."""

    size: int
    seconds: float
    rate: float | None = None
    batch_bytes: int = DEFAULT_BATCH_BYTES
    in_flight: int = 256
    value: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", os.urandom(self.size))


# -- produce ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """Records that were put into one batch one after the other: the place and the time of the first."""

    pending: Pending
    position: int
    due_s: float
    count: int = 0
    is_counted: bool = False


class _Stream:
    """Records on their way into a topic as a producer sends them, except that it goes on if some fail.

    They are due one each `apart_s` seconds; 0: all of one call when they are handed over.
    """

    def __init__(self, sender: Sender, load: Load, tally: Tally, *, apart_s: float) -> None:
        self.tally = tally
        self._sender = sender
        self._value = load.value
        self._apart_s = apart_s
        self._moved = asyncio.Event()
        sender.on_progress = self._moved.set

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full, with the same limit as a producer's."""
        return self._sender.accumulator.buffered_bytes >= DEFAULT_BUFFER_BYTES

    def hand_over(self, count: int, *, due_s: float | None = None) -> None:
        """Hand over records, the first of which was due at `due_s`."""
        now_s, accumulator, apart_s = time.perf_counter(), self._sender.accumulator, self._apart_s
        accumulator.failures.clear()  # each is counted by itself, and they would take memory
        first_s = now_s if due_s is None else due_s
        parts: list[_Part] = []
        for number in range(count):
            try:
                pending = accumulator.put(self._value, None, accumulator.sticky)
            except Error as error:
                self.tally.failed(error.code)
                continue
            if not parts or parts[-1].pending is not pending:
                parts.append(_Part(pending, len(pending.values) - 1, first_s + number * apart_s))
            parts[-1].count += 1
        for part in parts:
            self._observe(self.tally.own_delays, now_s, part)
            part.pending.when_settled(partial(self._settled, part))
        self._sender.wake()
        self.tally.sent += count

    def _observe(self, latencies: Latencies, now_s: float, part: _Part) -> None:
        if not self._apart_s:
            latencies.observe(now_s - part.due_s, part.count)
            return
        for each in range(part.count):
            latencies.observe(max(0.0, now_s - part.due_s - each * self._apart_s))

    def _settled(self, part: _Part) -> None:
        if part.is_counted:
            return
        part.is_counted = True
        now_s, pending = time.perf_counter(), part.pending
        if pending.parts is not None:  # a change of the route took the records to other batches
            for each in range(part.count):
                try:
                    pending.receipt(part.position + each)
                except Error as error:
                    self.tally.failed(error.code)
                    part.count -= 1
        elif pending.error is not None:
            if pending.error.code != _ENDED.code:
                self.tally.failed(pending.error.code, part.count)
            return
        self._observe(self.tally.latencies, now_s, part)
        self.tally.succeeded(now_s, part.count, part.count * len(self._value))

    async def moved(self, until_s: float | None = None) -> None:
        """Wait until a record is answered, or until a time."""
        self._moved.clear()
        left_s = None if until_s is None else max(0.001, until_s - time.perf_counter())
        try:
            await asyncio.wait_for(self._moved.wait(), left_s)
        except TimeoutError:
            return

    async def answered(self) -> None:
        """Wait until every record is answered or has failed."""
        with self._sender.hurry():
            while self._sender.accumulator.buffered_bytes > 0:
                await self.moved()


async def produce(topic: Topic[bytes], load: Load, tally: Tally) -> None:
    """Send records as a producer does; a latency is from when a record was due to its receipt.

    Without a rate a record is due when it is put into the buffer.
    """
    sender = await topic.appends.open_sender(stop_on_failure=False, batch_bytes=load.batch_bytes)
    try:
        warm = _Stream(sender, load, Tally(), apart_s=0.0)
        warm.hand_over(WARM_UP_RECORDS)
        await warm.answered()
        if not warm.tally.done:
            raise Failed(f"none of the first records was appended: {', '.join(warm.tally.errors)}")
        if load.rate is None:
            await _send_all(sender, load, tally)
        else:
            await _send_due(sender, load, tally, Pace(load.rate, load.seconds))
    finally:
        tally.end()
        sender.close(_ENDED)


async def _send_all(sender: Sender, load: Load, tally: Tally) -> None:
    stream = _Stream(sender, load, tally, apart_s=0.0)
    each = max(1, _TURN_BYTES // load.size)
    tally.begin()
    ends_s = time.perf_counter() + load.seconds
    while time.perf_counter() < ends_s:
        if stream.is_full:
            await stream.moved(ends_s)
            continue
        stream.hand_over(each)
        await asyncio.sleep(0)
    tally.due = tally.sent
    await stream.answered()


async def _send_due(sender: Sender, load: Load, tally: Tally, pace: Pace) -> None:
    stream = _Stream(sender, load, tally, apart_s=1 / pace.rate)
    each = max(1, _TURN_BYTES // load.size)
    with pace.running():
        tally.begin()
        tally.due = pace.total
        while tally.sent < pace.total and (now_s := time.perf_counter()) < pace.ends_s:
            late = pace.due(now_s) - tally.sent
            if stream.is_full:
                await stream.moved(pace.ends_s)
            elif late > 0:
                stream.hand_over(min(late, each), due_s=pace.due_s(tally.sent))
                await asyncio.sleep(0)
            else:
                await pace.until(tally.sent)
        await stream.answered()


# -- latency ---------------------------------------------------------------------------------


async def latency(topic: Topic[bytes], load: Load, tally: Tally, read: Tally) -> None:
    """Append records one by one, and read them; latencies are from when each was due.

    `tally` has the latencies to the acknowledgement, `read` those until a reader that follows the topic got
    the record. At most `load.in_flight` appends are under way: a record that is due beyond that waits, and
    the wait is part of its latency.
    """
    assert load.rate is not None, "appends of one record each have a schedule"
    pace = Pace(load.rate, load.seconds)
    run, rest = os.urandom(8), load.value[HEAD_BYTES:]
    for _ in range(WARM_UP_RECORDS):
        await topic.append(bytes(HEAD_BYTES) + rest)
    under_way: set[asyncio.Task[None]] = set()

    async def append(number: int) -> None:
        try:
            which = number.to_bytes(8, "big")
            await topic.append(run + which + rest, key=which)  # with keys all partitions get some
        except Error as error:
            tally.failed(error.code)
            return
        now_s = time.perf_counter()
        tally.latencies.observe(now_s - pace.due_s(number))
        tally.succeeded(now_s, 1, load.size)

    reader = topic.read("latest", follow=True)
    async with reader:
        with pace.running():
            tally.begin()
            read.begin()
            tally.due = pace.total
            reading = asyncio.create_task(_read(reader, run, pace, read))
            try:
                while tally.sent < pace.total and (now_s := time.perf_counter()) < pace.ends_s:
                    if len(under_way) >= load.in_flight:
                        left_s = pace.ends_s - now_s
                        await asyncio.wait(under_way, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                    elif pace.due(now_s) > tally.sent:
                        tally.own_delays.observe(max(0.0, now_s - pace.due_s(tally.sent)))
                        task = asyncio.create_task(append(tally.sent))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                        tally.sent += 1
                    else:
                        await pace.until(tally.sent)
                while under_way:
                    await asyncio.wait(under_way)
                await _all_read(reading, tally, read)
            finally:
                tally.end()
                read.due = read.sent = tally.done
                for task in (reading, *under_way):
                    task.cancel()
                await asyncio.gather(reading, *under_way, return_exceptions=True)
                read.end()


async def _read(reader: Reader[bytes], run: bytes, pace: Pace, read: Tally) -> None:
    try:
        async for batch in reader.batches():
            now_s = time.perf_counter()
            for value in batch.values:
                if value[:8] == run:
                    read.latencies.observe(now_s - pace.due_s(int.from_bytes(value[8:HEAD_BYTES], "big")))
                    read.succeeded(now_s, 1, len(value))
    except Error as error:
        read.failed(error.code)


async def _all_read(reading: asyncio.Task[None], tally: Tally, read: Tally) -> None:
    """Wait until all acknowledged records are read, or no more arrive."""
    before, since_s = read.done, time.perf_counter()
    while read.done < tally.done and not reading.done():
        await asyncio.sleep(_LOOK_S)
        if read.done > before:
            before, since_s = read.done, time.perf_counter()
        elif time.perf_counter() - since_s > _READ_WAIT_S:
            return


# -- consume ---------------------------------------------------------------------------------


async def consume(topic: Topic[bytes], tally: Tally, *, rate: float | None, seconds: float | None) -> None:
    """Read all records that are there, or for some seconds.

        With a rate, a latency is the time from when a record was due until it was read; without one, the wait
    for a batch.
    """
    reader = topic.read("earliest")
    pace = Pace(rate or 1.0, seconds or 1.0)
    try:
        async with reader:
            with pace.running():
                tally.begin()
                asked_s = time.perf_counter()
                async for batch in reader.batches():
                    now_s, values = time.perf_counter(), batch.values
                    if rate is None:
                        tally.latencies.observe(now_s - asked_s)
                    else:
                        for number in range(tally.done, tally.done + len(values)):
                            tally.latencies.observe(max(0.0, now_s - pace.due_s(number)))
                    tally.succeeded(now_s, len(values), sum(map(len, values)))
                    if seconds is not None and now_s - pace.began_s >= seconds:
                        break
                    if rate is not None and pace.due_s(tally.done) > now_s:
                        await pace.until(tally.done)
                    asked_s = time.perf_counter()
    except Error as error:
        tally.failed(error.code)
    finally:
        tally.due = tally.sent = tally.done
        tally.end()
