"""`--join HOST:PORT` is all that a new node needs; a wrong one is answered with what to give instead."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.testing.cluster import LocalCluster, get_json
from membership.catalog import CODE_VERSION

PATIENCE_S = 60.0
SECRET = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One node that serves, with a secret, and room for a second one that each test starts."""
    cluster = _OneAndGuest(
        tmp_path_factory.mktemp("joins"), nodes=2, shards=1, settings={"secret": SECRET, "steer": "off"}
    )
    with cluster:
        yield cluster


class _OneAndGuest(LocalCluster):
    """The first node starts with the cluster. The second has the settings that a test gives."""

    guest: tuple[str, ...] = ()

    def start(self, *, timeout: float = PATIENCE_S) -> None:
        self.spawn(0)
        self.wait_ready([0], timeout=timeout)

    def command(self, number: int) -> list[str]:
        return [*super().command(number), *(self.guest if number else ())]


def _said(cluster: LocalCluster, *flags: str, until: tuple[str, ...]) -> None:
    """Start the guest with these flags; wait until its log has all of `until`.

    Of several reasons why it tries again the first may be another one: that of a node that stands still.
    """
    assert isinstance(cluster, _OneAndGuest)
    node = cluster.members[1]
    node.log.unlink(missing_ok=True)
    cluster.guest = flags
    cluster.spawn(1)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not all(words in (log := node.log_tail()) for words in until):
            assert time.monotonic() < deadline, f"{until} was not said: {log}"
            time.sleep(0.05)
    finally:
        cluster.kill(1)


@pytest.mark.parametrize("port", [7170, 7171, 9999])
def test_another_port_than_that_of_http_is_answered_with_which_to_give(
    cluster: LocalCluster, port: int
) -> None:
    """The ports of the controller and of the shard for other nodes, and one where nothing listens."""
    place = f"{cluster.members[0].host}:{port}"
    _said(
        cluster,
        *("--join", place),
        until=(f"no node answers at {place} ({place}", "with the port that it was given by --port"),
    )


def test_a_name_that_is_no_address_is_said(cluster: LocalCluster) -> None:
    _said(cluster, "--join", "nowhere.invalid:7070", until=("no node answers at nowhere.invalid:7070",))


def test_another_secret_is_said(cluster: LocalCluster) -> None:
    place = f"{cluster.members[0].host}:7070"
    _said(
        cluster,
        *("--join", place, "--secret", SECRET[::-1]),
        until=(
            "still trying",
            f"joining: through {cluster.members[0].host}:7170: connection lost (authentication failed",
        ),
    )


def test_the_port_of_a_shard_will_do_as_well(cluster: LocalCluster) -> None:
    """Last, as the node then belongs to the cluster."""
    node = cluster.members[0]
    about = get_json(f"{node.url}/v1/cluster")
    shard = about["nodes"][0]["shards"][0]["url"].removeprefix("http://")
    assert shard != f"{node.host}:{node.port}"

    _said(cluster, "--join", shard, until=("joined cluster",))


def test_a_new_node_gossips_in_the_form_that_the_cluster_has_enabled(tmp_path: Path) -> None:
    """The answer to its join says which. Else what it sends first is dropped, and it waits a second."""
    with _OneAndGuest(tmp_path, nodes=2, shards=1, settings={"steer": "off"}) as cluster:
        first = cluster.members[0]
        deadline = time.monotonic() + PATIENCE_S
        while f"commands of version {CODE_VERSION} are enabled" not in first.log.read_text():
            assert time.monotonic() < deadline, first.log_tail()
            time.sleep(0.01)

        until = ("joined cluster", "node node-2 is ready")
        _said(cluster, "--join", f"{first.host}:7070", until=until)

        with urllib.request.urlopen(f"{first.url}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
    counts = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    of = '{process="controller"}'
    assert float(counts[f"laminar_gossip_received_total{of}"]) > 0
    assert float(counts[f"laminar_gossip_outdated_total{of}"]) == 0
