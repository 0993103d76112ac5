"""Appends by datagram: the bytes of a question and of its answer, and the MAC that authenticates both.

One datagram, the *question*, carries one small batch to one partition; one *answer* comes back, with the
receipt, an error or the leader's address. Both end in a MAC over everything before it, keyed with the
cluster's secret, or with the key of a credential (a client's token) that the question names. A receiver
checks the MAC before anything else; a datagram that fails (`Forged`) must be dropped without an answer. The
MAC proves that the sender has the key; nothing is encrypted. A question with a credential also contains the
minute, so that a copy of it is refused later. The partition's hash is at a fixed position near the start of a
question, where BPF programs in the kernel read it (`laminar.node.runtime.reuseport`). Pure: no socket, clock
or randomness. ``docs/protocol.md`` has every byte.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, TypeAlias

import mmh3
import msgspec

from laminar.batch import Buffer

QUESTION_MAGIC: Final = b"LMU1"
ANSWER_MAGIC: Final = b"LMA1"
MAC_BYTES: Final = 16
NUMBER_BYTES: Final = 8
MAX_DATAGRAM_BYTES: Final = 1_200
"""With the headers of IPv6 and UDP it is within IPv6's smallest path MTU (1,280): never fragmented."""
LONGEST_TOPIC_BYTES: Final = 200

# Magic, partition hash, kind, length of the topic's name, route, partition, number. Big-endian.
_QUESTION: Final = struct.Struct(">4sIBBHI8s")
# Of a question by a credential, before the topic: the credential's id, the minute since 1970.
_BY: Final = struct.Struct(">8sI")
# Magic, kind, shard, reserved, number.
_ANSWER: Final = struct.Struct(">4sBBH8s")
# First offset, records, replicas, flags.
_RECEIPT: Final = struct.Struct(">QIHB")
_KIND_POSITION: Final = 8
_SYNCED, _DUPLICATE = 1, 2
_LAST_ROUTE: Final = 0xFFFF
SMALLEST_ANSWER_LIMIT: Final = 200
"""An answer has at most as many bytes as its question, or this number if the question is smaller."""


class Forged(Exception):
    """The datagram's MAC is wrong: its sender does not have the key. It is dropped without an answer."""


class Malformed(Exception):
    """The sender has the key, but a field of the question cannot be understood.

    `field` names the field, `value` is its value, `limit` the right value. `number` is the question's number,
    which the answer has to repeat.
    """

    def __init__(self, message: str, *, field: str, value: Any, limit: Any = None, number: bytes) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit
        self.number = number


class AnswerKind(IntEnum):
    """The kinds of answers to an append by datagram."""

    RECEIPT = 1
    """The batch is durable as its topic promises."""
    PROBLEM = 2
    """It was refused, or its outcome is unknown."""
    LEADER = 3
    """Another node leads: ask it."""
    ROUTE = 4
    """The partition takes no more records: go by this route of the topic."""


APPEND: Final = 1
"""A question by no credential."""
APPEND_BY: Final = 2
"""A question by a credential."""
MINUTES_VALID: Final = 15
"""How far the minute of a question may be from that of the node's clock."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request to append the batch `frame` to a partition.

    `number` is a random one of `NUMBER_BYTES` bytes, which the answer repeats. `route` is the version of the
    topic's route by which the client chose the partition; None if the question does not contain it. Version 0
    is left out, because older nodes would refuse it.
    """

    topic: str
    partition: int
    number: bytes
    frame: Buffer
    route: int | None = None
    credential: str = ""
    """Of whom it is: 16 hexadecimal digits; empty: of one who has the cluster's secret."""
    minute: int = 0
    """Of a question by a credential: when it was sent, in minutes since 1970."""

    def by(self, credential: str, minute: int) -> Question:
        """Return this question with a credential's id, and the minute (since 1970) of sending."""
        return replace(self, credential=credential, minute=minute)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The place and durability of an appended batch: `count` records from `offset` on.

    `replicas` is the number of voters of the partition. `synced` is true if the batch was synced to disk
    before it was acknowledged, `duplicate` if an earlier copy of the question had appended it.
    """

    offset: int
    count: int
    replicas: int
    synced: bool
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Leader:
    """The host of the node that leads the partition, and the port that its shards share."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class NextRoute:
    """The topic's next route, in the answer of a partition that takes no more records.

    `ranges` says which partition takes which keys: (partition, first logical partition, number of logical
    partitions), in order. It is empty if the ranges do not fit into the datagram, or are not known yet: then
    a client requests the route over HTTP.
    """

    version: int
    ranges: tuple[tuple[int, int, int], ...] = ()


Problem: TypeAlias = dict[str, Any]
"""The members of a problem document that have a value and can't be looked up by its `code`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the question `number`; `shard` is the number of the shard that received the question."""

    number: bytes
    shard: int
    body: Receipt | Problem | Leader | NextRoute


def partition_hash(topic: str, partition: int) -> int:
    """Return the hash by which kernel programs steer to a partition; equal to `router.partition_hash`."""
    return mmh3.hash(topic.encode() + b"\0" + struct.pack("<I", partition), 0, signed=False)


def room_bytes(topic: str, credential: str = "") -> int:
    """Return how many bytes a batch for this topic may have, to fit into a datagram."""
    head = _QUESTION.size + (_BY.size if credential else 0)
    return MAX_DATAGRAM_BYTES - head - len(topic.encode()) - MAC_BYTES


def credential_of(datagram: bytes) -> str:
    """Return the credential's id in a question that is not verified yet; "" if it has none."""
    if len(datagram) < _QUESTION.size + _BY.size or datagram[_KIND_POSITION] != APPEND_BY:
        return ""
    return datagram[_QUESTION.size : _QUESTION.size + _BY.size - 4].hex()


class DatagramCodec:
    """The encoder and decoder of datagrams that are signed with a secret or a credential's key.

    The MACs of questions and answers differ, so that a question is never taken for an answer. With an empty
    secret the MAC detects damage, but keeps out no attacker.
    """

    __slots__ = ("_key",)

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2s(secret, person=b"LMU1 key").digest()

    def __repr__(self) -> str:
        return "<DatagramCodec>"

    def _mac(self, content: Buffer, direction: bytes) -> bytes:
        return hashlib.blake2s(content, digest_size=MAC_BYTES, key=self._key, person=direction).digest()

    def _opened(self, datagram: bytes, *, magic: bytes, size: int, direction: bytes) -> memoryview:
        """Verify the MAC of a datagram; return the bytes before it. Raises `Forged` if it is wrong."""
        if len(datagram) < size + MAC_BYTES or datagram[:4] != magic:
            raise Forged
        content = memoryview(datagram)[:-MAC_BYTES]
        if not hmac.compare_digest(self._mac(content, direction), datagram[-MAC_BYTES:]):
            raise Forged
        return content

    def encode_question(self, question: Question) -> bytes:
        """Return the datagram of a question; its batch must have at most `room_bytes(topic)` bytes."""
        topic = question.topic.encode()
        assert len(question.number) == NUMBER_BYTES and 0 < len(topic) <= LONGEST_TOPIC_BYTES, question
        head = _QUESTION.pack(
            QUESTION_MAGIC,
            partition_hash(question.topic, question.partition),
            APPEND_BY if question.credential else APPEND,
            len(topic),
            _route_field(question.route),
            question.partition,
            question.number,
        )
        by = b""
        if question.credential:
            by = _BY.pack(bytes.fromhex(question.credential), question.minute)
        content = b"".join((head, by, topic, question.frame))
        return content + self._mac(content, _ASKED)

    def decode_question(self, datagram: bytes) -> Question:
        """Return the question in an authenticated datagram.

        Raises:
            Forged: the MAC is wrong.
            Malformed: a field cannot be understood.
        """
        content = self._opened(datagram, magic=QUESTION_MAGIC, size=_QUESTION.size, direction=_ASKED)
        _, hashed, kind, length, route, partition, number = _QUESTION.unpack_from(content)
        if kind not in (APPEND, APPEND_BY):
            raise Malformed(
                "no such kind of question", field="kind", value=kind, limit=APPEND_BY, number=number
            )
        credential, minute, begin = credential_of(datagram), 0, _QUESTION.size
        if credential:
            _, minute = _BY.unpack_from(content, begin)
            begin += _BY.size
        try:
            topic = str(content[begin : begin + length], "utf-8")
        except UnicodeDecodeError:
            topic = ""
        frame = content[begin + length :]
        if not topic or length > LONGEST_TOPIC_BYTES or "\0" in topic or not frame:
            raise Malformed(
                "the name of a topic, followed by a batch, is required",
                field="topic_bytes",
                value=length,
                limit=LONGEST_TOPIC_BYTES,
                number=number,
            )
        if hashed != partition_hash(topic, partition):
            raise Malformed(
                f"the hash is not that of {topic}/{partition}",
                field="partition_hash",
                value=hashed,
                limit=partition_hash(topic, partition),
                number=number,
            )
        return Question(topic, partition, number, frame, route - 1 if route else None, credential, minute)

    def encode_answer(self, answer: Answer, *, limit_bytes: int) -> bytes:
        """Return the datagram of an answer; it has at most `limit_bytes`, or `SMALLEST_ANSWER_LIMIT` bytes.

        The larger of the two applies. The text of a problem is cut to fit, and a route's ranges are left out
        if they do not fit.
        """
        kind, body = _encode_body(
            answer.body, max(limit_bytes, SMALLEST_ANSWER_LIMIT) - _ANSWER.size - MAC_BYTES
        )
        content = _ANSWER.pack(ANSWER_MAGIC, kind, answer.shard, 0, answer.number) + body
        return content + self._mac(content, _ANSWERED)

    def decode_answer(self, datagram: bytes) -> Answer:
        """Return the answer in an authenticated datagram.

        Raises:
            Forged: the MAC is wrong, or the content cannot be decoded, as of an unknown version.
        """
        content = self._opened(datagram, magic=ANSWER_MAGIC, size=_ANSWER.size, direction=_ANSWERED)
        _, kind, shard, _, number = _ANSWER.unpack_from(content)
        body = content[_ANSWER.size :]
        try:
            return Answer(number, shard, _decode_body(kind, body))
        except (struct.error, msgspec.MsgspecError, ValueError) as error:
            raise Forged from error


_ASKED: Final = b"question"
_ANSWERED: Final = b"answer"

_leader_decoder: Final = msgspec.msgpack.Decoder(tuple[str, int])
_route_decoder: Final = msgspec.msgpack.Decoder(tuple[int, tuple[tuple[int, int, int], ...]])
_problem_decoder: Final = msgspec.msgpack.Decoder(dict[str, Any])


def _route_field(route: int | None) -> int:
    """Return the field of a question for its route: the version plus one; 0 if it is left out."""
    return route + 1 if route and route < _LAST_ROUTE else 0


def _encode_body(body: Receipt | Problem | Leader | NextRoute, room: int) -> tuple[AnswerKind, bytes]:
    match body:
        case Receipt():
            flags = _SYNCED * body.synced | _DUPLICATE * body.duplicate
            packed = _RECEIPT.pack(body.offset, body.count, min(body.replicas, 0xFFFF), flags)
            return AnswerKind.RECEIPT, packed
        case Leader():
            return AnswerKind.LEADER, msgspec.msgpack.encode((body.host, body.port))
        case NextRoute():
            encoded = msgspec.msgpack.encode((body.version, body.ranges))
            if len(encoded) > room:
                encoded = msgspec.msgpack.encode((body.version, ()))
            return AnswerKind.ROUTE, encoded
        case _:
            return AnswerKind.PROBLEM, _fitting(body, room)


def _fitting(problem: Problem, room: int) -> bytes:
    """Return a problem encoded in `room` bytes: if it is too long, with a shorter or without `detail`."""
    encoded = msgspec.msgpack.encode(problem)
    if len(encoded) <= room:
        return encoded
    detail = str(problem.get("detail", ""))
    over = len(encoded) - room
    if over + 3 < len(detail):
        # Characters may be longer than a byte, so this may cut a little more than needed, never less.
        cut = detail.encode()[: -over - 3].decode("utf-8", "ignore") + "…"
        encoded = msgspec.msgpack.encode(problem | {"detail": cut})
        if len(encoded) <= room:
            return encoded
    kept = {name: problem[name] for name in _NEEDED if name in problem}
    return msgspec.msgpack.encode(kept)


_NEEDED: Final = ("status", "code", "outcome", "retry_after_ms")


def _decode_body(kind: int, body: memoryview) -> Receipt | Problem | Leader | NextRoute:
    match kind:
        case AnswerKind.RECEIPT:
            if len(body) != _RECEIPT.size:
                raise ValueError(f"a receipt of {len(body)} bytes")
            offset, count, replicas, flags = _RECEIPT.unpack(body)
            return Receipt(offset, count, replicas, bool(flags & _SYNCED), bool(flags & _DUPLICATE))
        case AnswerKind.PROBLEM:
            problem = _problem_decoder.decode(body)
            if not isinstance(problem.get("code"), str) or not isinstance(problem.get("status"), int):
                raise ValueError("a problem without its code")
            return problem
        case AnswerKind.LEADER:
            return Leader(*_leader_decoder.decode(body))
        case AnswerKind.ROUTE:
            return NextRoute(*_route_decoder.decode(body))
        case _:
            raise ValueError(f"an answer of kind {kind}")
