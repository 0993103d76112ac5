"""Appends by datagram, as a real node answers them: receipts, refusals, silence, and where each landed."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from laminar.batch import build
from laminar.testing.nodes import serve
from laminar.wire.datagram import SMALLEST_ANSWER_LIMIT, Answer, DatagramCodec, Question, Receipt
from router import owner_shard, partition_hash
from tests.node.api.asking import Partition, fresh_metrics, until

PATIENCE_S = 60
NewTopic = Callable[..., str]


class Asker:
    """A producer with a socket, who sends what a test tells him to and reads what comes back."""

    def __init__(self, url: str, secret: bytes = b"") -> None:
        parts = urlsplit(url)
        self.codec = DatagramCodec(secret)
        self.producer_id = os.urandom(16)
        self.sock = socket.socket(
            socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM
        )
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect((parts.hostname, parts.port))

    def question(
        self,
        topic: str,
        *,
        sequence: int = 0,
        epoch: int = 0,
        partition: int = 0,
        value: bytes = b"21.5",
        frame: bytes | None = None,
    ) -> bytes:
        if frame is None:
            frame = bytes(
                build([value], producer_id=self.producer_id, producer_epoch=epoch, sequence=sequence)
            )
        return self.codec.encode_question(Question(topic, partition, os.urandom(8), frame))

    def ask(self, datagram: bytes) -> Answer:
        """Send it, and read the answer to it."""
        self.sock.send(datagram)
        answer, size = self.read()
        assert datagram[16:24] == answer.number
        assert size <= max(len(datagram), SMALLEST_ANSWER_LIMIT)
        return answer

    def read(self) -> tuple[Answer, int]:
        raw = self.sock.recv(2_000)
        return self.codec.decode_answer(raw), len(raw)


@pytest.fixture
def asker(api_url: str) -> Iterator[Asker]:
    made = Asker(api_url)
    yield made
    made.sock.close()


def counted(http: httpx.Client, name: str) -> dict[str, int]:
    """A figure of the node's datagrams, by process, of now."""
    text = fresh_metrics(http)
    found = re.findall(rf'^laminar_datagrams_{name}_total{{process="([^"]+)"}} (\S+)', text, re.MULTILINE)
    return {process: int(float(value)) for process, value in found}


def receipt(answer: Answer) -> Receipt:
    assert isinstance(answer.body, Receipt), answer
    return answer.body


def code(answer: Answer) -> str:
    assert isinstance(answer.body, dict), answer
    return str(answer.body["code"])


def test_a_receipt_comes_back_and_the_record_is_there(
    asker: Asker, http: httpx.Client, new_topic: NewTopic
) -> None:
    """Durable like any other append; the answer says which shard."""
    topic = new_topic()
    partition = Partition(http, topic)
    partition.append("before")

    answer = asker.ask(asker.question(topic, value=b"by datagram"))

    assert Receipt(1, 1, 1, synced=True, duplicate=False) == answer.body
    assert ["before", "by datagram"] == [record["value"] for record in partition.records()]
    assert owner_shard(partition_hash(topic, 0), 2) == answer.shard


def test_what_comes_again_has_the_first_ones_receipt(
    asker: Asker, http: httpx.Client, new_topic: NewTopic
) -> None:
    """At once or later, the same copy or one under another number; nothing is doubled."""
    topic = new_topic()
    first = asker.question(topic, value=b"once")
    for _ in range(3):
        asker.sock.send(first)
    together = [receipt(asker.read()[0]) for _ in range(3)]
    second = receipt(asker.ask(asker.question(topic, sequence=1, value=b"twice")))
    again = receipt(asker.ask(asker.question(topic, value=b"once")))

    assert [0, 0, 0, 0] == [each.offset for each in (*together, again)]
    assert [False, True, True, True] == [each.duplicate for each in (*together, again)]
    assert (1, False) == (second.offset, second.duplicate)
    assert ["once", "twice"] == [record["value"] for record in Partition(http, topic).records()]


def test_a_gap_in_the_sequence_and_an_older_epoch_are_refused(asker: Asker, new_topic: NewTopic) -> None:
    """The order of a producer's batches in a partition is that of their numbers."""
    topic = new_topic()

    assert "unknown_producer" == code(asker.ask(asker.question(topic, sequence=1)))
    assert 0 == receipt(asker.ask(asker.question(topic))).offset
    gap = asker.ask(asker.question(topic, sequence=2))
    assert "out_of_sequence" == code(gap)
    assert isinstance(gap.body, dict) and 1 == gap.body["limit"]
    assert 1 == receipt(asker.ask(asker.question(topic, epoch=1))).offset
    assert "fenced" == code(asker.ask(asker.question(topic, sequence=1)))


def test_what_fails_its_mac_is_dropped_and_counted(
    asker: Asker, api_url: str, http: httpx.Client, new_topic: NewTopic
) -> None:
    """No answer, no record; the next one is served as if nothing had been."""
    topic = new_topic()
    whole = asker.question(topic, value=b"damaged")
    stranger = Asker(api_url, b"another secret of some length")
    before = sum(counted(http, "forged").values())

    flipped = [
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(8, len(whole), 7)
    ]
    bad = [*flipped, whole[:-1], whole[: len(whole) // 2], whole + b"\0", b"LMU1", b"", b"noise" * 20]
    bad.append(stranger.question(topic))
    for each in bad:
        asker.sock.send(each)
    stranger.sock.close()
    answer = asker.ask(asker.question(topic, value=b"whole"))

    assert 0 == receipt(answer).offset
    # Some went to the other shard: what is counted there need not be done when this shard answers.
    until(lambda: sum(counted(http, "forged").values()) >= before + len(bad))
    assert before + len(bad) == sum(counted(http, "forged").values())
    assert ["whole"] == [record["value"] for record in Partition(http, topic).records()]


def test_what_a_producer_says_wrong_is_named(asker: Asker, new_topic: NewTopic) -> None:
    """Errors have the codes of HTTP, and the field."""
    topic = new_topic()
    batch = bytes(build([b"x"], producer_id=asker.producer_id))
    damaged = bytearray(batch)
    damaged[-1] ^= 1
    expected = {
        ("no_such_topic", None): asker.question("nowhere"),
        ("no_such_partition", "partition"): asker.question(topic, partition=7),
        ("invalid", "topic"): asker.question("_transactions"),
        ("invalid", "producer_id"): asker.question(topic, frame=bytes(build([b"x"]))),
        ("invalid", "batches"): asker.question(topic, frame=batch * 2),
        ("bad_checksum", "body_crc"): asker.question(topic, frame=bytes(damaged)),
        ("malformed", "topic_bytes"): asker.question(topic, frame=b""),
    }

    for (wrong, field), datagram in expected.items():
        answer = asker.ask(datagram)
        assert wrong == code(answer)
        assert isinstance(answer.body, dict)
        assert "not_applied" == answer.body["outcome"]
        if field is not None:
            assert field == answer.body["field"], answer


@pytest.mark.parametrize(("host", "shards"), [("127.0.0.1", 3), ("::1", 4), ("127.0.0.1", 8)])
def test_every_datagram_lands_on_its_partitions_owner(host: str, shards: int) -> None:
    """By the answers, and by what each shard counted; with a secret, over IPv4 and IPv6."""
    secret = "a secret of these tests"
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"no {host} here")
    with serve(shards=shards, settings={"host": host, "secret": secret}) as url:
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            made = http.put("/v1/topics/many", json={"partitions": 64})
            assert 201 == made.status_code, made.text
            asker = Asker(url, secret.encode())
            owners = {number: owner_shard(partition_hash("many", number), shards) for number in range(64)}
            for sequence in range(5):
                for number in range(64):
                    answer = asker.ask(asker.question("many", partition=number, sequence=sequence))
                    assert sequence == receipt(answer).offset
                    assert owners[number] == answer.shard
            asker.sock.close()
            expected = Counter(owners.values())

            wanted = {f"shard-{shard}": 5 * expected[shard] for shard in range(shards)}
            for name in ("received", "appended"):
                until(lambda name=name: wanted == counted(http, name), lambda name=name: counted(http, name))  # type: ignore[misc]
