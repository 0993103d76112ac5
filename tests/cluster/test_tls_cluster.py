"""A cluster that speaks TLS: it elects, replicates, survives; who has no certificate of it stays outside."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from laminar.testing.cluster import get_json
from tests.certificates import Authority, Pair
from tests.cluster.patience import PATIENCE_S, asked, until
from tests.cluster.tls_cluster import TlsCluster

TOPICS = "/v1/topics"


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[TlsCluster]:
    """Three nodes, which found each other over https."""
    with TlsCluster(real_disk / "cluster", nodes=3, shards=1) as running:
        yield running


def create(cluster: TlsCluster, topic: str) -> None:
    with cluster.client() as client:
        wish = {"partitions": 2, "replicas": 3}
        made = asked(client, "PUT", f"{cluster.urls[0]}/v1/topics/{topic}", json=wish)
    assert made.is_success, made.text


def append(client: httpx.Client, url: str, topic: str, value: str) -> bool:
    """Append a record; return whether it was acknowledged. While a leader is elected it is sent again."""
    deadline = time.monotonic() + PATIENCE_S
    status = 503
    while status in (503, 504) and time.monotonic() < deadline:
        try:
            status = client.post(
                f"{url}/v1/topics/{topic}/partitions/0/records",
                content=value,
                headers={"content-type": "application/octet-stream", "idempotency-key": value},
            ).status_code
        except httpx.HTTPError:
            return False
    return status == 201


def values_of(cluster: TlsCluster, number: int, topic: str) -> list[str]:
    """What a node has of a topic; a replica serves what it knows to be committed."""
    path = f"/v1/topics/{topic}/partitions/0/records?offset=0&limit=10000"
    return [record["value"] for record in told(cluster, number, path)["records"]]


def told(cluster: TlsCluster, number: int, path: str) -> Any:
    """What a node answers as JSON, as soon as it does."""
    return until(lambda: cluster.get(number, path), path)


def replicas_in_sync(cluster: TlsCluster, number: int, topic: str) -> bool:
    return all(
        each["in_sync"] for each in told(cluster, number, f"{TOPICS}/{topic}/partitions/0")["replicas"]
    )


def leader(cluster: TlsCluster, number: int, topic: str) -> str:
    """The node that leads the first partition, as a node tells it; "" while there is none."""
    led = told(cluster, number, f"{TOPICS}/{topic}/partitions/0")["leader"]
    return str(led["node"]) if led is not None else ""


def transport(cluster: TlsCluster, name: str) -> float:
    """A counter of the connections between all nodes."""
    return sum(cluster.metric(number, f"laminar_transport_{name}_total") for number in range(3))


def shows_others_than(cluster: TlsCluster, before: list[str]) -> bool:
    return all(cluster.serial(number) != serial for number, serial in enumerate(before))


def reached(counts: dict[str, int], least: int) -> bool:
    return min(counts.values()) > least


def test_it_elects_replicates_and_survives_a_kill(cluster: TlsCluster) -> None:
    """Every URL that is given is of https, and nothing acknowledged is missing."""
    create(cluster, "t")
    about = told(cluster, 0, "/v1/cluster")
    urls = [node["url"] for node in about["nodes"]]
    urls += [shard["url"] for node in about["nodes"] for shard in node["shards"]]
    assert all(url.startswith("https://") for url in urls), urls
    assert about["insecure"] is False
    for number in range(3):
        assert get_json(f"{cluster.urls[number].replace('https', 'http')}/readyz") is None

    acknowledged: list[str] = []
    with cluster.client() as client:
        for count in range(60):
            if count == 20:
                name = until(lambda: leader(cluster, 0, "t"), "it is led")
                victim = next(node.number for node in cluster.members if node.name == name)
                cluster.kill(victim)
            value = f"v{count}"
            live = next(node.number for node in cluster.members if node.running)
            deadline = time.monotonic() + PATIENCE_S
            while not append(client, cluster.urls[live], "t", value):
                assert time.monotonic() < deadline, value
                time.sleep(0.1)
            acknowledged.append(value)
        cluster.restart(victim)

    until(lambda: replicas_in_sync(cluster, victim, "t"), "the restarted node catches up")
    until(lambda: len(acknowledged) <= len(values_of(cluster, victim, "t")), "it knows what is committed")
    assert acknowledged == values_of(cluster, victim, "t")


def test_certificates_are_rotated_under_load(cluster: TlsCluster) -> None:
    """On all nodes, by a signal and without: no request fails, no peer is lost, all show the new ones.

    Unless one was silent for long: then both sides lose the other, and no more is lost than that.
    """
    create(cluster, "t")
    before = [cluster.serial(number) for number in range(3)]
    silent, lost = transport(cluster, "silent"), transport(cluster, "peers_lost")
    stop = threading.Event()
    counts = {"kept": 0, "new": 0}
    failures: list[str] = []

    def load(kind: str) -> None:
        with cluster.client() as kept:
            number = 0
            while not stop.is_set():
                number += 1
                with cluster.client() if kind == "new" else _same(kept) as client:
                    if not append(client, cluster.urls[number % 3], "t", f"{kind}-{number}"):
                        failures.append(f"{kind}-{number}")
                counts[kind] += 1

    threads = [threading.Thread(target=load, args=(kind,)) for kind in counts]
    for thread in threads:
        thread.start()
    try:
        for round_ in range(2):
            for number in range(3):
                cluster.certify(number, days=20 + round_)
                if round_ == 0:
                    cluster.hang_up(number)
            until(partial(shows_others_than, cluster, before), "the new certificates are not shown")
            before = [cluster.serial(number) for number in range(3)]
            until(partial(reached, counts, 20 * (round_ + 1)), "the load stands still")
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert [] == failures
    # Asked again for a while, as the numbers of one side may be older than the other's.
    until(
        lambda: transport(cluster, "peers_lost") - lost <= 2 * (transport(cluster, "silent") - silent),
        "only peers that were silent are lost",
        patience_s=10,
    )
    until(lambda: sum(counts.values()) <= len(values_of(cluster, 1, "t")), "all of it is committed")
    values = values_of(cluster, 1, "t")
    assert sum(counts.values()) == len(values) == len(set(values))


class _same:
    """A client that stays open at the end of a block."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def __enter__(self) -> httpx.Client:
        return self._client

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize("fault", ["another CA", "another name"])
def test_a_node_with_a_bad_certificate_cannot_join(cluster: TlsCluster, real_disk: Path, fault: str) -> None:
    """It keeps asking and is refused; the cluster goes on and never lists it."""
    create(cluster, "t")
    host = cluster.members[0].host.rpartition(".")[0] + ".9"
    if fault == "another CA":
        other = Authority(real_disk / "other")
        pair = other.node("stranger", host)
        both = other.folder / "both.pem"
        both.write_bytes(other.pem.read_bytes() + cluster.authority.pem.read_bytes())
        settings = other.settings(pair) | {"tls_ca": str(both)}
        name = "stranger"
    else:
        pair = cluster.authority.node("stranger", host)
        settings = cluster.authority.settings(pair)
        name = "node-1"  # which its certificate does not name
    command = cluster.command(1)
    for setting, value in {
        "data": str(real_disk / "stranger"),
        "node": name,
        "host": host,
        **settings,
    }.items():
        command[command.index(f"--{setting.replace('_', '-')}") + 1] = value
    stranger = subprocess.Popen(
        command, env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        if fault == "another CA":
            assert stranger.stdout is not None
            said = next(line for line in stranger.stdout if "joining: " in line)
            assert "still trying" in said
            until(
                lambda: (
                    cluster.metric(0, "laminar_transport_refused_total", 'reason="certificate"')
                    + cluster.metric(0, "laminar_http_tls_failed_total")
                    > 0
                ),
                "the refusal is not counted",
            )
        else:
            text, _ = stranger.communicate(timeout=PATIENCE_S)
            assert 1 == stranger.returncode
            assert "names stranger, and this node is node-1" in text
    finally:
        stranger.terminate()
        stranger.communicate(timeout=PATIENCE_S)

    with cluster.client() as client:
        assert append(client, cluster.urls[1], "t", "still-served")
    listed = told(cluster, 0, "/v1/cluster")
    assert ["node-1", "node-2", "node-3"] == [node["node"] for node in listed["nodes"]]


def test_an_expired_certificate_starts_no_node(real_disk: Path) -> None:
    """The last line of its log says which file it is, and why."""
    authority = Authority(real_disk / "ca")
    pair: Pair = authority.node("n1", days=-1)
    flags = [
        part
        for setting, value in authority.settings(pair).items()
        for part in (f"--{setting.replace('_', '-')}", value)
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "laminar.node",
            "--data",
            str(real_disk / "data"),
            "--port",
            "0",
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert 1 == done.returncode
    assert "n1.pem would be refused by other nodes: certificate has expired" in done.stderr
    assert not (real_disk / "data").exists()
