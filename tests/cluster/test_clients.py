"""Clients that know nothing of leaders: whatever node they ask, the append is durable and right."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial

import httpx
import pytest
import requests

from laminar.testing.cluster import LocalCluster
from tests.cluster.load import leaders
from tests.cluster.patience import told, until

TOPIC = "anybody"
# One leads to the leader; each further one needs an election since the last.
HOPS = 5


def made(url: str, topic: str, partitions: int) -> None:
    """Make a topic whose partitions are led."""
    wish = {"partitions": partitions}
    until(lambda: requests.put(f"{url}/v1/topics/{topic}", json=wish, timeout=60).ok)
    leaders(url, topic)


@pytest.fixture(scope="module")
def strangers(shared_cluster: LocalCluster) -> list[str]:
    """URLs of partition 0's records on each node; at most one of them leads."""
    made(shared_cluster.urls[0], TOPIC, 1)
    leader = leaders(shared_cluster.urls[0], TOPIC)[0]
    others = [node.url for node in shared_cluster.members if node.name != leader]
    assert 2 == len(others)
    return [f"{url}/v1/topics/{TOPIC}/partitions/0/records" for url in others]


def stored(strangers: list[str], offset: int) -> bytes:
    """The value as another node than the asked one has it."""
    answer = requests.get(f"{strangers[1]}/{offset}", timeout=60)
    assert 200 == answer.status_code, answer.text
    return answer.content


def offset_of(answer: dict[str, object]) -> int:
    placed = answer["placed"]
    assert isinstance(placed, list)
    durable = answer["durable"]
    assert {"replicas": 3, "synced": True, "flush": "commit"} == durable
    return int(placed[0]["offset"])


def pieces() -> Iterator[bytes]:
    for number in range(40):
        yield b"piece %d " % number


STREAMED = b"".join(pieces())


def test_curl_with_a_plain_body(strangers: list[str]) -> None:
    """curl -d, as a bare user would."""
    done = subprocess.run(
        ["curl", "-sS", "-d", "from curl", strangers[0]], capture_output=True, check=True, timeout=60
    )

    assert b"from curl" == stored(strangers, offset_of(json.loads(done.stdout)))


def test_curl_with_a_streamed_body(strangers: list[str]) -> None:
    """A body of unknown length, sent chunked."""

    command = ["curl", "-sS", "-X", "POST", "-H", "Transfer-Encoding: chunked", "-T", "-", strangers[0]]
    done = subprocess.run(command, input=STREAMED, capture_output=True, check=True, timeout=60)

    assert STREAMED == stored(strangers, offset_of(json.loads(done.stdout)))


@pytest.mark.parametrize("streamed", [False, True])
def test_httpx(strangers: list[str], streamed: bool) -> None:
    """With bytes, and with a generator, which httpx sends chunked."""
    answer = httpx.post(strangers[0], content=pieces() if streamed else STREAMED, timeout=60)

    assert 201 == answer.status_code, answer.text
    assert STREAMED == stored(strangers, offset_of(answer.json()))


@pytest.mark.parametrize("streamed", [False, True])
def test_requests(strangers: list[str], streamed: bool) -> None:
    """With bytes, and with a generator: after a 307 it would send an empty body, so it must get none."""
    answer = requests.post(strangers[0], data=pieces() if streamed else STREAMED, timeout=60)

    assert 201 == answer.status_code, answer.text
    assert [] == answer.history, "an ordinary client is not redirected"
    assert STREAMED == stored(strangers, offset_of(answer.json()))


def test_who_asks_for_it_is_redirected_to_the_leader(strangers: list[str]) -> None:
    """laminarmq's S9 and C4: the answer is 307 with an absolute Location, before the body is read."""
    asks = {"Laminar-Redirect": "1"}

    def is_led_to_the_leader() -> bool:
        answers = [
            requests.post(url, data=b"x", headers=asks, allow_redirects=False, timeout=60)
            for url in strangers
        ]
        # The lead may have gone to one of the two since: never to both. Or to none, for the moment.
        assert {answer.status_code for answer in answers} <= {201, 307, 503}
        answer = next(each for each in answers if each.status_code != 201)
        if answer.status_code == 503:
            return False
        for _ in range(HOPS):
            place = answer.headers["Location"]
            assert place.startswith("http://")
            answer = requests.post(place, data=b"x", headers=asks, allow_redirects=False, timeout=60)
            assert answer.status_code in (201, 307, 503), answer.text
            if answer.status_code != 307:
                return answer.status_code == 201
            # Whoever led when it was named does not lead any more, and names another one.
            assert place != answer.headers["Location"]
        raise AssertionError(f"{HOPS} redirects, one after another, lead to no leader")

    until(is_led_to_the_leader)


def test_a_topic_append_puts_each_key_where_its_route_says(shared_cluster: LocalCluster) -> None:
    """NDJSON over many keys, asked of every node: the same key in the same place, in order."""
    base = shared_cluster.urls[0]
    made(base, "keyed", 8)
    lines = "".join(f'{{"k":"key-{n % 50}","n":{n}}}\n' for n in range(500))

    def append(url: str) -> dict[str, object] | None:
        # With a key: if no node leads one of eight partitions, what the others have is not appended again.
        headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": url}
        path = "/v1/topics/keyed/records?key_from=/k"
        answer = requests.post(url + path, data=lines, headers=headers, timeout=60)
        assert answer.status_code in (200, 503), answer.text
        return answer.json() if answer.ok else None

    for url in shared_cluster.urls:
        assert 500 == (until(partial(append, url)) or {})["appended"]

    where: dict[str, set[int]] = {}
    order: dict[str, list[int]] = {}
    for number in range(8):
        url = f"{base}/v1/topics/keyed/partitions/{number}/records?read=leader&limit=5000"
        for record in told(url)["records"]:
            where.setdefault(record["key"], set()).add(number)
            order.setdefault(record["key"], []).append(int(record["value"].split('"n":')[1].rstrip("}")))
    assert {f"key-{n}": 1 for n in range(50)} == {key: len(numbers) for key, numbers in where.items()}
    for key, numbers in order.items():
        once = [n for n in range(500) if f"key-{n % 50}" == key]
        assert once * 3 == numbers
