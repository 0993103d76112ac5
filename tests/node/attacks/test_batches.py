"""Batches that a hostile client writes: small ones that unfold without end, and such that nobody can read."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from laminar.batch import HEADER_SIZE, Codec, Kind, build
from laminar.batch.header import seal
from tests.node.attacks.victim import Victim, victim

BATCH = {"Content-Type": "application/vnd.laminar.batch"}
SINK = "/v1/sinks/attacker"


@pytest.fixture(scope="module")
def attacked() -> Iterator[Victim]:
    with victim() as found:
        begun = found.http.post(SINK, params={"epoch": 1})
        assert 200 == begun.status_code, begun.text
        yield found


ROUTES = [
    "/v1/topics/innocent/partitions/0/records",
    "/v1/topics/innocent/records",
    f"{SINK}/batches/0/stages?topic=innocent&partition=0&stage=0&epoch=1",
    "/v1/topics/innocent/partitions/0/uploads/u?parts=1&size_bytes=1&crc32c=00000000",
]


@pytest.mark.parametrize("route", ROUTES)
def test_a_small_batch_that_unfolds_to_75_mb_is_refused(attacked: Victim, route: str) -> None:
    """2.5 KB that no link can carry once they are unfolded: 413 on every route, at no cost."""
    bomb = bytes(build([bytes(8 << 20)] * 9, codec=Codec.ZSTD))
    assert len(bomb) < 4000
    before = attacked.rss_bytes()

    answer = attacked.http.post(route, content=bomb, headers=BATCH)

    assert (413, "too_large") == (answer.status_code, answer.json()["code"]), answer.text
    assert attacked.unharmed()
    assert attacked.rss_bytes() - before < 16 << 20


def poisoned() -> dict[str, bytes]:
    """Batches of right checksums that readers fail on, one for each kind of cell."""
    folded = build([b"x" * 1000], codec=Codec.ZSTD)
    folded[HEADER_SIZE + 8 + 32 + 40] ^= 0xFF
    tagged = build([b"a"], tags=["blue"])
    tagged[tagged.index(b"blue") + 1] = 0xFF
    headers = build([b"a"], headers=[{"name": b"v"}])
    junk = bytearray(headers)
    junk[junk.index(b"\x81\xa4name")] = 0xC1
    name = bytearray(headers)
    name[name.index(b"name")] = 0xFF
    key = build([b"a"], keys=[b"k" * (1 << 20)])
    many = build([b"a"], headers=[{f"n{i}": b"" for i in range(30_000)}])
    return {
        kind: bytes(_resealed(frame))
        for kind, frame in {
            "zstd": folded,
            "tag": tagged,
            "headers": junk,
            "header-name": name,
            "key-of-1-mib": key,
            "30000-headers": many,
        }.items()
    }


def _resealed(frame: bytearray) -> bytearray:
    (mask,) = struct.unpack_from("<Q", frame, 96)
    return seal(frame, Kind.DATA, count=1, tag_mask=mask)


@pytest.mark.parametrize("kind", poisoned())
@pytest.mark.parametrize("route", ROUTES[:3])
def test_a_batch_that_readers_fail_on_is_refused(attacked: Victim, route: str, kind: str) -> None:
    """Acknowledged, it would stop each reader of the partition for ever."""
    answer = attacked.http.post(route, content=poisoned()[kind], headers=BATCH)

    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["code"] in ("malformed", "too_large")
    read = attacked.http.get("/v1/topics/innocent/partitions/0/records")
    assert 200 == read.status_code, read.text


def test_several_compressed_batches_make_one_stage(attacked: Victim) -> None:
    """Valid input: it was taken for a mistake of the server's. The answer counts the records."""
    two = 2 * bytes(build([b"x" * 1000, b"y", b"z"], codec=Codec.ZSTD))

    answer = attacked.http.post(ROUTES[2], content=two, headers=BATCH)

    assert (201, 6) == (answer.status_code, answer.json()["count"]), answer.text


def test_a_malformed_batch_for_a_topic_is_the_clients_mistake(attacked: Victim) -> None:
    """Taken apart by key, as by partition."""
    frame = build([b"value"], keys=[b"key"])
    for position in range(HEADER_SIZE, len(frame), 3):
        changed = bytearray(frame)
        changed[position] ^= 0x55
        answer = attacked.http.post(ROUTES[1], content=bytes(_resealed(changed)), headers=BATCH)
        assert answer.status_code < 500, answer.text
