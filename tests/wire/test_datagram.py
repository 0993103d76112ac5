"""Datagrams of appends: the bytes, the proof, and what damage does to them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import build
from laminar.http.api.problems import CODES
from laminar.node.runtime.reuseport import HASH_POSITION
from laminar.wire.datagram import (
    ANSWER_MAGIC,
    MAC_BYTES,
    MAX_DATAGRAM_BYTES,
    QUESTION_MAGIC,
    SMALLEST_ANSWER_LIMIT,
    Answer,
    DatagramCodec,
    Forged,
    Leader,
    Malformed,
    NextRoute,
    Problem,
    Question,
    Receipt,
    credential_of,
    partition_hash,
    room_bytes,
)
from router import partition_hash as routers_partition_hash

SECRET = b"sixteen or more characters"
CODEC = DatagramCodec(SECRET)
NUMBER = b"12345678"
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "datagram.json").read_text())

topics = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-", min_size=1, max_size=200
)
partitions = st.integers(0, 2**32 - 1)
numbers = st.binary(min_size=8, max_size=8)
u64 = st.integers(0, 2**64 - 1)
receipts = st.builds(
    Receipt,
    offset=u64,
    count=st.integers(0, 2**32 - 1),
    replicas=st.integers(0, 2**16 - 1),
    synced=st.booleans(),
    duplicate=st.booleans(),
)
leaders = st.builds(Leader, host=st.text(max_size=60), port=st.integers(0, 65535))
ranges = st.tuples(st.integers(0, 10**6), st.integers(0, 65_535), st.integers(1, 65_536))
next_routes = st.builds(NextRoute, u64, st.lists(ranges, max_size=80).map(tuple))
problems = st.sampled_from(sorted(CODES)).map(lambda code: {"code": code, "status": CODES[code].status})
answers = st.builds(
    Answer,
    number=numbers,
    shard=st.integers(0, 63),
    body=st.one_of(receipts, leaders, problems, next_routes),
)


def frame(value: bytes = b"21.5") -> bytes:
    return bytes(build([value], producer_id=b"p" * 16, producer_epoch=1, sequence=2))


def question(value: bytes = b"21.5") -> Question:
    return Question("sensors", 3, NUMBER, frame(value))


# -- the bytes -----------------------------------------------------------------------------------


def test_the_golden_question_and_answers() -> None:
    """Others may have written what sends and reads these: they change with the magic, not otherwise."""
    asked = Question("sensors", 3, NUMBER, bytes.fromhex(GOLDEN["frame"]))

    assert GOLDEN["question"] == CODEC.encode_question(asked).hex()
    by_route = Question("sensors", 3, NUMBER, bytes.fromhex(GOLDEN["frame"]), 3)
    assert GOLDEN["question_with_route"] == CODEC.encode_question(by_route).hex()
    bodies: list[Receipt | Leader | Problem | NextRoute] = [
        Receipt(812, 4, 3, True, False),
        Leader("127.0.0.2", 7070),
        {"status": 404, "code": "no_such_topic"},
        NextRoute(3, ((1, 0, 30_000), (4, 30_000, 35_536))),
    ]
    for body, expected in zip(bodies, GOLDEN["answers"], strict=True):
        answer = Answer(NUMBER, 1, body)
        assert expected == CODEC.encode_answer(answer, limit_bytes=500).hex()
        assert answer == CODEC.decode_answer(bytes.fromhex(expected))


def test_the_mac_can_be_made_from_the_documentation() -> None:
    """BLAKE2s with 16 bytes, its key BLAKE2s of the secret; personalised by direction."""
    datagram = CODEC.encode_question(question())
    key = hashlib.blake2s(SECRET, person=b"LMU1 key").digest()
    mac = hashlib.blake2s(datagram[:-16], digest_size=16, key=key, person=b"question").digest()

    assert mac == datagram[-16:]


def test_the_kernels_program_finds_the_hash_where_it_is_written() -> None:
    """And it is the one by which `router` names the owner."""
    datagram = CODEC.encode_question(question())

    assert routers_partition_hash("sensors", 3) == int.from_bytes(
        datagram[HASH_POSITION : HASH_POSITION + 4], "big"
    )


@given(topics, partitions)
def test_the_partitions_hash_is_that_of_the_router(topic: str, partition: int) -> None:
    assert routers_partition_hash(topic, partition) == partition_hash(topic, partition)


@given(topics, partitions, numbers, st.binary(min_size=1, max_size=900))
def test_a_question_is_read_as_it_was_written(
    topic: str, partition: int, number: bytes, content: bytes
) -> None:
    """And a batch that just has room makes the largest datagram."""
    datagram = CODEC.encode_question(Question(topic, partition, number, content))
    read = CODEC.decode_question(datagram)

    assert (topic, partition, number, content) == (read.topic, read.partition, read.number, bytes(read.frame))
    assert MAX_DATAGRAM_BYTES - len(datagram) == room_bytes(topic) - len(content)


@given(answers)
def test_an_answer_is_read_as_it_was_written(answer: Answer) -> None:
    assert answer == CODEC.decode_answer(CODEC.encode_answer(answer, limit_bytes=MAX_DATAGRAM_BYTES))


@pytest.mark.parametrize(
    ("said", "field", "read"), [(None, 0, None), (0, 0, None), (1, 2, 1), (65_534, 65_535, 65_534)]
)
def test_a_question_says_the_version_of_its_route_plus_one(
    said: int | None, field: int, read: int | None
) -> None:
    """Nothing for route 0, as nodes of before there were others refuse it; nor beyond what fits."""
    datagram = CODEC.encode_question(Question("sensors", 3, NUMBER, frame(), said))

    assert field.to_bytes(2, "big") == datagram[10:12]
    assert read == CODEC.decode_question(datagram).route
    beyond = CODEC.encode_question(Question("sensors", 3, NUMBER, frame(), 65_535))
    assert CODEC.decode_question(beyond).route is None
    said_0 = remade(CODEC.encode_question(question()), 10, b"\0\1")
    assert 0 == CODEC.decode_question(said_0).route


def test_a_route_that_is_too_long_is_only_named() -> None:
    long = Answer(NUMBER, 0, NextRoute(7, tuple((1000 + each, 600 * each, 600) for each in range(100))))

    datagram = CODEC.encode_answer(long, limit_bytes=1_000)

    assert len(datagram) <= SMALLEST_ANSWER_LIMIT
    assert NextRoute(7) == CODEC.decode_answer(datagram).body


# -- damage --------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_bit_anywhere_is_noticed(place: int, change: int) -> None:
    for datagram, read in (
        (CODEC.encode_question(question()), CODEC.decode_question),
        (
            CODEC.encode_answer(Answer(NUMBER, 0, Receipt(1, 1, 3, True, False)), limit_bytes=300),
            CODEC.decode_answer,
        ),
    ):
        damaged = bytearray(datagram)
        damaged[place % len(damaged)] ^= change
        with pytest.raises(Forged):
            read(bytes(damaged))


def test_every_truncation_and_any_trailing_byte_is_noticed() -> None:
    """A datagram is whole, or it is none."""
    for datagram, read in (
        (CODEC.encode_question(question()), CODEC.decode_question),
        (CODEC.encode_answer(Answer(NUMBER, 0, Leader("a", 1)), limit_bytes=300), CODEC.decode_answer),
    ):
        for size in range(len(datagram)):
            with pytest.raises(Forged):
                read(datagram[:size])
        for more in (b"\0", datagram[:1], datagram):
            with pytest.raises(Forged):
                read(datagram + more)


@given(st.binary(max_size=300))
def test_noise_is_dropped(noise: bytes) -> None:
    """Also behind the right magic."""
    for datagram in (noise, QUESTION_MAGIC + noise, ANSWER_MAGIC + noise):
        with pytest.raises(Forged):
            CODEC.decode_question(datagram)
        with pytest.raises(Forged):
            CODEC.decode_answer(datagram)


def test_another_secret_and_the_other_direction_prove_nothing() -> None:
    """What a node sent can't be sent back to it as a question, nor a question as an answer."""
    datagram = CODEC.encode_question(question())
    turned = ANSWER_MAGIC + datagram[4:]

    for codec in (DatagramCodec(b""), DatagramCodec(SECRET + b"x")):
        with pytest.raises(Forged):
            codec.decode_question(datagram)
    with pytest.raises(Forged):
        CODEC.decode_answer(turned)
    assert "sixteen" not in repr(CODEC)


# -- what a friend may say wrong -----------------------------------------------------------------


def remade(datagram: bytes, position: int, content: bytes) -> bytes:
    """Changed by somebody who has the secret."""
    changed = datagram[:position] + content + datagram[position + len(content) : -MAC_BYTES]
    key = hashlib.blake2s(SECRET, person=b"LMU1 key").digest()
    return changed + hashlib.blake2s(changed, digest_size=16, key=key, person=b"question").digest()


@pytest.mark.parametrize(
    ("position", "content", "field"),
    [
        (4, b"\0\0\0\0", "partition_hash"),
        (8, b"\x03", "kind"),
        (9, b"\0", "topic_bytes"),
        (9, b"\xff", "topic_bytes"),
        (24, b"\xff", "topic_bytes"),
    ],
)
def test_what_a_friend_says_wrong_is_named(position: int, content: bytes, field: str) -> None:
    """With the question's number, so that it can be answered."""
    with pytest.raises(Malformed) as fault:
        CODEC.decode_question(remade(CODEC.encode_question(question()), position, content))

    assert (field, NUMBER) == (fault.value.field, fault.value.number)


def test_a_question_without_a_batch_is_named() -> None:
    with pytest.raises(Malformed):
        CODEC.decode_question(CODEC.encode_question(Question("sensors", 0, NUMBER, b"")))


@given(st.text(max_size=2_000), st.integers(0, MAX_DATAGRAM_BYTES))
def test_an_answer_is_not_larger_than_its_question(detail: str, limit: int) -> None:
    """Its text is cut first, then all but the code; what is left can be read."""
    problem: Problem = {
        "status": 422,
        "code": "invalid",
        "outcome": "not_applied",
        "detail": detail,
        "field": "x" * 80,
        "value": "y" * 100,
    }
    datagram = CODEC.encode_answer(Answer(NUMBER, 0, problem), limit_bytes=limit)
    read = CODEC.decode_answer(datagram).body

    assert len(datagram) <= max(limit, SMALLEST_ANSWER_LIMIT)
    assert isinstance(read, dict)
    assert ("invalid", 422) == (read["code"], read["status"])


# -- by a credential -----------------------------------------------------------------------------


@given(topic=topics, partition=partitions, minute=st.integers(0, 2**32 - 1), route=st.integers(1, 65_534))
def test_a_question_by_a_credential_names_it_and_its_minute(
    topic: str, partition: int, minute: int, route: int
) -> None:
    """Before the topic, which leaves so much less room; the hash stays in its place."""
    credential = "0123456789abcdef"
    asked = Question(topic, partition, NUMBER, frame(), route).by(credential, minute)

    datagram = CODEC.encode_question(asked)

    assert asked == CODEC.decode_question(datagram)
    assert credential == credential_of(datagram)
    assert partition_hash(topic, partition) == int.from_bytes(datagram[HASH_POSITION : HASH_POSITION + 4])
    assert 12 == room_bytes(topic) - room_bytes(topic, credential)
    assert "" == credential_of(CODEC.encode_question(question()))
    assert [""] * 36 == [credential_of(datagram[:size]) for size in range(36)]
