"""Jobs (records that a channel has given to this consumer), and the decoding of answers that contain them.

A job is a view of a row of a received batch, as `Record` is. Its outcome is sent by the collector of
acknowledgements (`laminar.client.consume.acks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from laminar.batch import Batch
from laminar.client.consume.acks import Acks, Said
from laminar.client.consume.large_values import Value
from laminar.client.errors import Error
from laminar.client.records import ReadBatch, Record
from laminar.http.protocol.answer import Buffer
from laminar.wire.channels import token

MAX_REASON = 200
"""Most characters of the reason of a nack."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Partition, floor, runs (first, count, delivery, attempt), batches; and what was settled first.
_Part = tuple[int, int, list[tuple[int, int, int, int]], list[bytes]]
_decoder = msgspec.msgpack.Decoder(tuple[list[_Part], Any])


class Delivery(NamedTuple):
    """The values that neighbouring jobs of one answer have in common.

    They are the channel, the number of the delivery, the attempt and the time limit.
    """

    channel_id: int
    number: int
    attempt: int
    floor: int
    timeout_s: float
    acks: Acks


class Job(Record[T_co]):
    """A record that a channel has given to this consumer. Others cannot get it until the delivery expires.

    Report the outcome before that: `ack` (done), `nack` (failed) or `release` (not tried); `extend` gives
    more time. Each raises `Late` if the time was over: then nothing was changed, and another consumer has the
    job or will get it.
    """

    __slots__ = ("_delivery", "_until_s")

    def __init__(self, batch: ReadBatch[T_co], position: int, delivery: Delivery, until_s: float) -> None:
        super().__init__(batch, position)
        self._delivery = delivery
        self._until_s = until_s

    def __repr__(self) -> str:
        return f"<Job {self.topic}/{self.partition}@{self.offset} attempt {self.attempt}>"

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1; exact even if the leader changed."""
        return self._delivery.attempt

    @property
    def token(self) -> str:
        """The text that names this delivery, for `Channel.settle` and the command line."""
        return token(self.partition, self.offset, self._delivery.number)

    @property
    def channel(self) -> str:
        """Name of the channel that gave the job."""
        return self._delivery.acks.channel

    @property
    def channel_id(self) -> int:
        """The number of the channel that gave the job; a channel that is created again gets a new number."""
        return self._delivery.channel_id

    @property
    def fence(self) -> tuple[int, int]:
        """A fencing token (partition, delivery number), which is higher at each delivery of the same key.

        For a channel with ``order="key"``: store the token with the data that a job writes for its key, and
        refuse writes with a lower one. So a consumer whose time was over cannot overwrite newer data.
        """
        return self.partition, self._delivery.number

    @property
    def floor(self) -> int:
        """Offset before which all records of this partition were acknowledged when the job was given out."""
        return self._delivery.floor

    @property
    def half_over(self) -> bool:
        """Whether more than half of the time for this job has passed."""
        now_s = self._delivery.acks.loop.time()
        return now_s > self._until_s - self._delivery.timeout_s / 2

    def open(self, *, timeout: float | None = None) -> Value:
        """Return the value as a stream, the only way to read a large record's value. See `Topic.open`."""
        acks = self._delivery.acks
        return Value(acks.session, self.topic, self.partition, self.offset, timeout_s=timeout)

    async def ack(self) -> None:
        """Acknowledge the job; return when that is committed. The job is not given out again.

        Acknowledgements of 5 ms are sent in one request, which is repeated if its answer is lost.

        Raises:
            Late: the job's time was over.
            OutcomeUnknown: no answer came in time; the job may be given out again.
        """
        await self._say("ack")

    async def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """Report a failed attempt: the job is given out again after `delay` seconds.

        Without `delay`, after the pause of the channel's settings. Of `reason` 200 characters are kept, to be
        shown with the record. Raises `Late` also if an earlier attempt of this report succeeded, and its
        answer was lost.
        """
        delay_ms = None if delay is None else round(delay * 1000)
        await self._say("nack", delay_ms=delay_ms, reason=reason_of(reason))

    async def release(self) -> None:
        """Return the job unprocessed: it is given out again at once, and the attempt does not count.

        Raises `Late` in the same cases as `nack`.
        """
        await self._say("release")

    async def extend(self, timeout: float | None = None) -> None:
        """Keep the job for `timeout` seconds from now; None means the time for which it was given out.

        Raises:
            Late: the job's time was over.
        """
        seconds = self._delivery.timeout_s if timeout is None else timeout
        until_s = self._delivery.acks.loop.time() + seconds
        await self._say("extend", timeout_ms=round(seconds * 1000))
        self._until_s = until_s
        if timeout is not None:
            self._delivery = self._delivery._replace(timeout_s=seconds)

    async def _say(self, verb: str, **more: Any) -> None:
        await self._delivery.acks.say(Said(verb, self.partition, self.offset, self._delivery.number, **more))


def reason_of(text: str) -> str:
    """Return `text` with characters that UTF-8 cannot encode replaced, so that a request can have it."""
    return text[:MAX_REASON].encode("utf-8", "replace").decode()


def jobs_of(
    body: Buffer,
    *,
    topic: str,
    node: str,
    channel_id: int,
    decode: Callable[[bytes], T],
    acks: Acks,
    timeout_s: float,
) -> list[Job[T]]:
    """Return the jobs in an answer to a request to receive, partition by partition.

    Raises:
        Error: (``gap``) the answer lacks a record that it names.
        BatchError: a batch is damaged.
    """
    until_s = acks.loop.time() + timeout_s
    parts, _ = _decoder.decode(body)
    return [
        Job(batch, position, delivery, until_s)
        for partition, floor, runs, frames in parts
        for batch, positions, delivery in _runs(
            [Batch(frame) for frame in frames],
            runs,
            (channel_id, floor),
            lambda frame, first, end, partition=partition: ReadBatch(  # type: ignore[misc]
                frame,
                topic=topic,
                partition=partition,
                start_offset=first,
                stop_offset=end,
                node=node,
                decode=decode,
            ),
            acks,
            timeout_s,
        )
        for position in positions
    ]


def _runs(
    frames: Sequence[Batch],
    runs: Sequence[tuple[int, int, int, int]],
    of: tuple[int, int],
    read: Callable[[Batch, int, int], ReadBatch[T]],
    acks: Acks,
    timeout_s: float,
) -> Iterator[tuple[ReadBatch[T], range, Delivery]]:
    """Yield (view of a batch, rows of the jobs in it, their delivery), for each run and batch.

    Both `runs` (first offset, count, delivery, attempt) and `frames` are in order of offsets.
    """
    at = 0
    channel_id, floor = of
    for first, count, number, attempt in runs:
        delivery = Delivery(channel_id, number, attempt, floor, timeout_s, acks)
        offset, end = first, first + count
        while offset < end:
            while at < len(frames) and not frames[at].base_offset <= offset < frames[at].next_offset:
                at += 1
            if at == len(frames):
                raise Error(
                    f"an answer lacks the record at {offset}, which it names", code="gap", value=offset
                )
            frame = frames[at]
            stop = min(end, frame.next_offset)
            base = frame.base_offset
            yield read(frame, offset, stop), range(offset - base, stop - base), delivery
            offset = stop
