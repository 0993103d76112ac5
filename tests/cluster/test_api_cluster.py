"""The API where one node is not enough: who answers for whom, what replicas may not say, what others do."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from laminar.batch import build
from laminar.testing.cluster import LocalCluster
from tests.cluster.patience import PATIENCE_S, asked
from tests.cluster.patience import until as until
from tests.cluster.test_starting_node import HeldCluster

BATCH = "application/vnd.laminar.batch"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Asks whom it is told to."""
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def made(client: httpx.Client, cluster: LocalCluster, topic: str, partitions: int = 1) -> str:
    """The path of a new topic."""
    answer = asked(client, "PUT", f"{cluster.urls[0]}/v1/topics/{topic}", json={"partitions": partitions})
    assert answer.is_success, answer.text
    return f"/v1/topics/{topic}"


class Roles(NamedTuple):
    """URLs of the shards that hold a partition, and the term in which one of them leads."""

    leader: str
    followers: tuple[str, ...]
    term: int


def roles(client: httpx.Client, cluster: LocalCluster, topic: str, number: int = 0) -> Roles:
    """Who holds a partition, once one leads it."""

    def found() -> Roles | None:
        answer = asked(client, "GET", f"{cluster.urls[0]}{topic}/partitions/{number}").json()
        urls = {
            role: tuple(each["url"] for each in answer["replicas"] if each["role"] == role)
            for role in ("leader", "follower")
        }
        return Roles(urls["leader"][0], urls["follower"], answer["term"]) if urls["leader"] else None

    where: Roles = until(found)
    return where


def while_it_leads(find: Callable[[], Roles], check: Callable[[Roles], None]) -> None:
    """Check what holds as long as one replica leads; again, if that fails and the term is another one."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        where = find()
        try:
            check(where)
        except AssertionError:
            if find().term == where.term or time.monotonic() > deadline:
                raise
        else:
            return


def reached(client: httpx.Client, digest: str, index: int) -> bool:
    """Whether the replica asked has committed this entry."""
    told = client.get(digest, headers={"Laminar-Local": "1"}).json()
    return bool(told["committed_index"] >= index)


def is_gone(client: httpx.Client, url: str) -> bool:
    """Whether this node knows of no such topic."""
    return client.get(url).status_code == 404


def test_any_node_appends_and_reads_for_any_partition(
    client: httpx.Client, shared_cluster: LocalCluster
) -> None:
    """Passed on in one hop, to the leader where it must be, and it says who that was."""
    topic = made(client, shared_cluster, "any-node", 4)

    def check(path: str, where: Roles) -> None:
        for url in shared_cluster.urls:
            appended = asked(client, "POST", url + path, content=url.encode())
            assert 201 == appended.status_code, appended.text
            assert appended.headers.get("laminar-leader", where.leader) == where.leader
            read = asked(client, "GET", f"{url}{path}?read=leader&fields=value")
            assert url == read.json()["records"][-1]["value"]
            assert read.headers.get("laminar-leader", where.leader) == where.leader
            one = asked(client, "GET", url + appended.headers["location"])
            assert (200, url.encode()) == (one.status_code, one.content), "what was acknowledged is there"

    for number in range(4):
        path = f"{topic}/partitions/{number}/records"
        while_it_leads(partial(roles, client, shared_cluster, topic, number), partial(check, path))


def test_past_the_end_any_shard_of_any_node_says_so(
    client: httpx.Client, shared_cluster: LocalCluster
) -> None:
    """404 and 416, wherever it is asked: never an error that may be retried, as a replica that lags has."""
    topic = made(client, shared_cluster, "past-the-end", 4)
    nodes = client.get(f"{shared_cluster.urls[0]}/v1/cluster").json()["nodes"]
    urls = [shard["url"] for node in nodes for shard in node["shards"]]
    assert 6 == len(urls)

    def check(path: str, _: Roles) -> None:
        for url in urls:
            one, many = client.get(f"{url}{path}/99"), client.get(f"{url}{path}?offset=99")
            assert (404, "no_such_record", 0) == (one.status_code, one.json()["code"], one.json()["limit"])
            assert (416, "offset_beyond_end", 0) == (
                many.status_code,
                many.json()["code"],
                many.json()["limit"],
            )

    for number in range(4):
        path = f"{topic}/partitions/{number}/records"
        while_it_leads(partial(roles, client, shared_cluster, topic, number), partial(check, path))


def test_a_replica_behind_min_offset_waits_and_then_says_so(
    client: httpx.Client, shared_cluster: LocalCluster
) -> None:
    """Every replica: at once when it has it, 503 `replica_lagging` with the leader's URL when nobody has."""
    topic = made(client, shared_cluster, "seen")
    path = f"{topic}/partitions/0/records"
    local = {"Laminar-Local": "1"}

    def check(where: Roles) -> None:
        assert 2 == len(where.followers)
        for url in (*where.followers, where.leader):
            appended = asked(client, "POST", where.leader + path, content=b"x")
            end = appended.json()["placed"][0]["offset"] + 1
            seen = client.get(f"{url}{path}?min_offset={end}&offset={end - 1}&wait_ms=30000", headers=local)
            assert [end - 1] == [record["offset"] for record in seen.json()["records"]], seen.text
            deadline = time.monotonic() + PATIENCE_S
            while True:
                begun = time.monotonic()
                behind = client.get(f"{url}{path}?min_offset={end + 1}&wait_ms=200", headers=local)
                took_s = time.monotonic() - begun
                if url not in where.followers or "laminar-leader" in behind.headers:
                    break
                assert time.monotonic() < deadline, behind.text  # it knows no leader at the moment
            assert (503, "replica_lagging", end) == (
                behind.status_code,
                behind.json()["code"],
                behind.json()["limit"],
            )
            assert "retry-after" in behind.headers
            assert took_s > 0.15
            if url in where.followers:
                assert where.leader == behind.headers["laminar-leader"]

    while_it_leads(partial(roles, client, shared_cluster, topic), check)


def test_a_follower_serves_reads_and_not_what_needs_the_leader(
    client: httpx.Client, shared_cluster: LocalCluster
) -> None:
    """Asked to answer itself, it refuses read=leader, and digests are equal everywhere."""
    topic = made(client, shared_cluster, "follower")
    local = {"Laminar-Local": "1"}
    path = f"{topic}/partitions/0"
    assert asked(client, "POST", f"{shared_cluster.urls[0]}{path}/records", content=b"x").is_success

    def check(where: Roles) -> None:
        for url in where.followers:
            read = client.get(f"{url}{path}/records?min_offset=1&wait_ms=30000", headers=local)
            assert ["x"] == [record["value"] for record in read.json()["records"]]
            linear = client.get(f"{url}{path}/records?read=leader", headers=local)
            assert (503, "not_leader") == (linear.status_code, linear.json()["code"])

    while_it_leads(partial(roles, client, shared_cluster, topic), check)
    where = roles(client, shared_cluster, topic)
    index = client.get(f"{where.leader}{path}/digest", headers=local).json()["committed_index"]
    digests = set()
    for url in (where.leader, *where.followers):
        until(partial(reached, client, f"{url}{path}/digest", index))
        digests.add(client.get(f"{url}{path}/digest?to_index={index}", headers=local).json()["digest"])
    assert 1 == len(digests)


def test_a_long_poll_at_a_follower_is_woken(client: httpx.Client, shared_cluster: LocalCluster) -> None:
    """It hears of the commit and answers at once."""
    topic = made(client, shared_cluster, "woken")
    path = f"{topic}/partitions/0/records"
    for round_, url in enumerate(roles(client, shared_cluster, topic).followers):
        with ThreadPoolExecutor(1) as pool:
            begun = time.monotonic()
            target = f"{url}{path}?offset={round_}&wait_ms=30000"
            waiting = pool.submit(httpx.get, target, timeout=PATIENCE_S, trust_env=False)
            assert asked(client, "POST", shared_cluster.urls[0] + path, content=b"x").is_success
            answer = waiting.result(PATIENCE_S)
        assert [round_] == [record["offset"] for record in answer.json()["records"]]
        assert time.monotonic() - begun < 25


def test_who_wants_a_redirect_gets_one_before_the_body_is_read(
    client: httpx.Client, shared_cluster: LocalCluster
) -> None:
    """307 with an absolute Location to the leader's own shard, where the request then succeeds; reads too."""
    topic = made(client, shared_cluster, "redirected")
    path = f"{topic}/partitions/0/records"
    asks = {"Laminar-Redirect": "1"}

    def check(where: Roles) -> None:
        for url in where.followers:
            told = asked(client, "POST", url + path, content=b"x", headers=asks)
            assert (307, where.leader + path) == (told.status_code, told.headers.get("location"))
            assert where.leader == told.headers["laminar-leader"]
            read = asked(client, "GET", f"{url}{path}?read=leader&offset=0", headers=asks)
            assert (307, f"{where.leader}{path}?read=leader&offset=0") == (
                read.status_code,
                read.headers.get("location"),
            )
            served = asked(client, "GET", f"{url}{path}?offset=0", headers=asks)
            assert 200 == served.status_code, "a replica may answer"
        assert 201 == asked(client, "POST", where.leader + path, content=b"x", headers=asks).status_code

    while_it_leads(partial(roles, client, shared_cluster, topic), check)


def test_a_cursor_is_one_whoever_is_asked(client: httpx.Client, shared_cluster: LocalCluster) -> None:
    """Set at one node, compared at the next, read at the third; of racers at all nodes one wins."""
    topic = made(client, shared_cluster, "cursors", 3)
    for number in range(3):
        batch = bytes(build([b"x"] * 10))
        headers = {"Content-Type": BATCH}
        url = f"{shared_cluster.urls[number]}{topic}/partitions/{number}/records"
        assert asked(client, "POST", url, content=batch, headers=headers).is_success
    first, second, third = (f"{url}{topic}/cursors/c" for url in shared_cluster.urls)

    assert asked(client, "PUT", first, json={"positions": {"0": 1, "1": 2, "2": 3}}).is_success
    moved = client.put(second, json={"positions": {"1": 4}, "expected": {"1": 2}})

    assert 200 == moved.status_code, moved.text
    told = asked(client, "GET", third).json()
    assert ({"0": 1, "1": 4, "2": 3}, 22) == (told["positions"], told["total_lag"])

    def race(expected: int, goals: list[int], racer: int) -> int:
        body = {"positions": {"0": goals[racer]}, "expected": {"0": expected}}
        return httpx.put(
            (first, second, third)[racer % 3], json=body, trust_env=False, timeout=PATIENCE_S
        ).status_code

    def check(_: Roles) -> None:
        at = asked(client, "GET", first).json()["positions"]["0"]
        goals = [goal for goal in range(10) if goal != at][:6]
        with ThreadPoolExecutor(6) as pool:
            statuses = list(pool.map(partial(race, at, goals), range(6)))
        # In another term an attempt whose answer was lost may have won.
        assert [200] + [412] * 5 == sorted(statuses)
        assert goals[statuses.index(200)] == asked(client, "GET", second).json()["positions"]["0"]

    while_it_leads(partial(roles, client, shared_cluster, topic), check)


def test_an_etag_of_one_node_counts_at_every_other(
    client: httpx.Client, shared_cluster: LocalCluster
) -> None:
    """Even where the change it stands for has not been heard of yet."""
    path = made(client, shared_cluster, "etags")
    etag = asked(client, "GET", shared_cluster.urls[0] + path).headers["etag"]
    for turn in range(9):
        url = shared_cluster.urls[turn % 3] + path
        setting = {"min_replicas": 1 + turn % 3}
        changed = asked(client, "PATCH", url, json={"settings": setting}, headers={"If-Match": etag})
        assert 200 == changed.status_code, (turn, changed.text)
        other = shared_cluster.urls[(turn + 1) % 3] + path
        stale = asked(client, "PATCH", other, json={}, headers={"If-Match": etag})
        assert 412 == stale.status_code, stale.text
        etag = changed.headers["etag"]


def log_folders(cluster: LocalCluster, topic: str, folder: str) -> list[Path]:
    """Folders of a topic's logs on all nodes: those in use (`logs`), or given up (`trash`)."""
    return [path for node in cluster.members for path in (node.data / folder).glob(f"{topic}-*")]


def has_folders(cluster: LocalCluster, topic: str, count: int) -> bool:
    """Whether the logs of a topic, those in the trash included, are so many."""
    return count == sum(len(log_folders(cluster, topic, folder)) for folder in ("logs", "trash"))


def test_a_deleted_topic_goes_to_every_nodes_trash_and_its_name_is_free(
    client: httpx.Client, shared_cluster: LocalCluster
) -> None:
    """Deleted at one node, made again at the next at once, several times over: each time empty and usable."""
    name = "again"
    path = f"/v1/topics/{name}"
    for round_ in range(4):
        url = shared_cluster.urls[round_ % 3]
        answer = asked(client, "PUT", url + path, json={"partitions": 3})
        assert answer.is_success, answer.text
        for number in range(3):
            records = f"{shared_cluster.urls[number]}{path}/partitions/{number}/records"
            appended = asked(client, "POST", records, content=str(round_).encode())
            assert 0 == appended.json()["placed"][0]["offset"], appended.text
            assert [str(round_)] == [
                record["value"] for record in asked(client, "GET", f"{records}?read=leader").json()["records"]
            ]
        # All nine replicas are there: one that a slow node has not created yet never goes to the trash.
        until(partial(has_folders, shared_cluster, name, 9 * (round_ + 1)))
        if round_ == 0:
            assert 9 == len(log_folders(shared_cluster, name, "logs"))
        other = shared_cluster.urls[(round_ + 1) % 3] + path
        deleted = asked(client, "DELETE", other, headers={"If-Match": "*"})
        assert 202 == deleted.status_code, deleted.text

    for url in shared_cluster.urls:
        until(partial(is_gone, client, url + path))
    until(lambda: not log_folders(shared_cluster, name, "logs"))
    assert 4 * 9 == len(log_folders(shared_cluster, name, "trash"))


def test_pitfall_38_a_topic_deleted_and_made_again_while_a_node_was_away(
    client: httpx.Client, cluster: LocalCluster
) -> None:
    """It comes back with the old replica, gives it up, and takes part in the new topic only."""
    path = made(client, cluster, "away")
    url = f"{cluster.urls[0]}{path}/partitions/0/records"
    assert asked(client, "POST", url, content=b"old").is_success
    cluster.kill(2)

    def deleted() -> bool:
        # 404: an attempt whose answer was lost, as the node led the catalog.
        return client.delete(cluster.urls[0] + path, headers={"If-Match": "*"}).status_code in (202, 404)

    until(deleted)

    def make() -> httpx.Response | None:
        # It waits for the third node, which gossip does not take for dead so soon; a start that takes longer
        # is waited for by asking again.
        made = httpx.put(cluster.urls[0] + path, json={"partitions": 1}, timeout=PATIENCE_S, trust_env=False)
        return made if 503 != made.status_code else None

    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(until, make)
        cluster.spawn(2)
        cluster.wait_ready()
        again = making.result()

    assert again is not None and again.is_success, again.text
    until(lambda: "live" == client.get(cluster.urls[0] + path).json().get("state"))
    assert 3 == client.get(cluster.urls[0] + path).json()["replicas_placed"]
    records = f"{path}/partitions/0/records"
    appended = asked(client, "POST", cluster.urls[2] + records, content=b"new")
    assert 0 == appended.json()["placed"][0]["offset"], appended.text
    for url in cluster.urls:
        read = asked(client, "GET", f"{url}{records}?min_offset=1&wait_ms=30000")
        assert ["new"] == [record["value"] for record in read.json()["records"]], url
    until(lambda: len(list((cluster.members[2].data / "trash").glob("away-*"))) == 1)
    assert 1 == len(list((cluster.members[2].data / "logs").glob("away-*")))


def test_a_killed_shard_makes_its_node_not_ready_until_it_is_back(
    client: httpx.Client, real_disk: Path
) -> None:
    """/livez of the other goes on; /readyz says who is missing; then all is as before, data too."""
    cluster = HeldCluster(real_disk / "one", nodes=1, shards=2)
    held = cluster.held[0] = real_disk / "held"

    def release(listener: socket.socket, count: int) -> None:
        """Let so many shards recover their logs: none is back before the test has looked at its node."""
        for _ in range(count):
            listener.accept()[0].close()

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(PATIENCE_S)
        listener.bind(str(held))
        listener.listen()
        releasing = pool.submit(release, listener, 2)
        with cluster:
            releasing.result()
            path = made(client, cluster, "kept", 4)
            for number in range(4):
                records = f"{cluster.urls[0]}{path}/partitions/{number}/records"
                assert asked(client, "POST", records, content=b"kept").is_success
            survivor = client.get(f"{cluster.urls[0]}/v1/cluster").json()["nodes"][0]["shards"][0]["url"]
            pids = re.findall(r"shard 1 is ready \(pid (\d+)\)", cluster.members[0].log.read_text())

            def ready() -> tuple[int, str]:
                assert 200 == client.get(f"{survivor}/livez").status_code
                answer = client.get(f"{survivor}/readyz")
                return answer.status_code, answer.text

            def shard_is_missing() -> bool:
                status, text = ready()
                return status == 503 and "shard 1" in text

            os.kill(int(pids[-1]), signal.SIGKILL)
            until(shard_is_missing)
            release(listener, 1)
            until(lambda: 200 == ready()[0])

            for number in range(4):
                records = f"{cluster.urls[0]}{path}/partitions/{number}/records"
                read = asked(client, "GET", f"{records}?read=leader")
                assert 200 == read.status_code, read.text
                assert ["kept"] == [record["value"] for record in read.json()["records"]]
                more = asked(client, "POST", records, content=b"more")
                assert 1 == more.json()["placed"][0]["offset"]
