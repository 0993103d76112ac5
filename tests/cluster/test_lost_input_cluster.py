"""An input of a strict change is gone with its only disk before it has ended; an operator lets it go on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import laminar
from tests.cluster.conftest import until_all_vote
from tests.cluster.faults.cluster import FaultyCluster, faulty_cluster
from tests.cluster.patience import told
from tests.disks.faults import Rule

TOPIC = "orders"
GROUP = "billing"
KEYS = [f"key {number}" for number in range(40)]


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[FaultyCluster]:
    """Three nodes of one shard. Nothing is replaced by itself: an operator does not wait for that."""
    settings: dict[str, str | int] = {"replace_after_ms": 600_000}
    with faulty_cluster(real_disk / "cluster", nodes=3, shards=1, cuttable=False, settings=settings) as own:
        until_all_vote(own)
        yield own


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 180
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def leaders(cluster: FaultyCluster) -> dict[int, str]:
    rows = told(f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")["partitions"]
    return {each["partition"]: each["leader"]["node"] for each in rows if each["leader"]}


def sealed(topic: laminar.Topic[bytes]) -> dict[int, int]:
    """Return the inputs of the change that is closing that have ended, and where."""
    change = topic.route().raw["change"]
    inputs = change["inputs"] if change is not None and change["state"] == "closing" else []
    return {each["partition"]: each["end"] for each in inputs if each.get("end") is not None}


def recover(cluster: FaultyCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return what the command says, as an operator types it."""
    command = [sys.executable, "-P", "-m", "laminar.cli", "group", "recover", *arguments, "--json"]
    return subprocess.run(
        [*command, "--url", cluster.urls[0]],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_it_goes_on_without_records_and_the_change_ends(cluster: FaultyCluster) -> None:
    """What the other input had, and all that is appended afterwards, is read in order, by a group, too."""
    with laminar.connect(cluster.urls[0], timeout=60) as client:
        topic = client.create_topic(TOPIC, partitions=6, replicas=1)
        with topic.producer() as producer:
            for number in range(400):
                producer.send(b"%d" % number, key=KEYS[number % len(KEYS)])
        catalog = told(f"{cluster.urls[0]}/v1/cluster")["catalog_leader"]
        holders = until(lambda: len(found := leaders(cluster)) == 6 and found, "all are led")
        kept, lost = next(
            (one, other)
            for pair in pairwise(topic.route().ranges)
            for one, other in (pair, pair[::-1])
            if holders[one] != holders[other] and holders[other] not in (catalog, cluster.members[0].name)
        )
        node = next(each for each in cluster.members if each.name == holders[lost])
        gone = {number for number, holder in holders.items() if holder == node.name}
        for number in holders:
            client.request_json(
                "PUT", f"/v1/topics/{TOPIC}/cursors/{GROUP}", body={"positions": {str(number): 1}}
            )
        # No seal of this node is synced, so none is reported.
        cluster.set_rules(node.number, [Rule(operation="sync", stall_ms=600_000)])
        topic.merge([kept, lost], avoid=[node.name], detach=True)
        ends = until(lambda: (found := sealed(topic)).keys() == {kept} and found, "the other input has ended")
        cluster.kill(node.number)
        cluster.wipe(node.number)

        place = f"{TOPIC}/{lost}"
        # While the node may be alive nothing is given up.
        planned = until(lambda: (said := recover(cluster, place, "--empty")).stdout and said, "it is dead")
        assert "there is nothing to go on with" in recover(cluster, place, "--accept-loss").stderr
        [row] = json.loads(planned.stdout)
        assert (1, "", 0, [node.name]) == (
            planned.returncode,
            row["goes_on_from"],
            row["kept_offset"],
            row["abandoned"],
        )
        assert "closing" == topic.route().raw["change"]["state"]
        done = recover(cluster, place, "--accept-loss", "--empty")
        assert 0 == done.returncode, done.stderr
        until(lambda: topic.route().raw["change"] is None, "the change is done")
        assert {lost: 0, **ends} == topic.route().ends

        # The topic's other partitions on that node: all at once.
        done = recover(cluster, "--all", "--accept-loss", "--empty")
        assert 0 == done.returncode, done.stderr
        until(lambda: len(leaders(cluster)) == 7, "all are led")
        [output] = set(topic.route().ranges) - holders.keys()
        later = [
            (topic.append(b"%d" % (400 + place), key=key).partition, key) for place, key in enumerate(KEYS)
        ]
        assert output in dict(later)
        read = [(record.partition, record.key, int(record.value)) for record in topic.read()]
        assert len(read) == sum(topic.offsets().values()) and {400 + place for place in range(40)} <= {
            value for _, _, value in read
        }
    given = []
    # Another program: the first one has receipts of offsets that are lost, and would wait for them.
    with laminar.connect(cluster.urls[0], timeout=60) as client:
        with client.topic(TOPIC).subscribe(GROUP) as member:
            for record in member:
                given.append((record.partition, record.key, int(record.value)))
                member.commit()
                if len(given) == len(read) - len(holders.keys() - gone):
                    break
    for key in KEYS:
        values = [value for _, each, value in given if each == key.encode()]
        assert values == sorted(set(values)), key
    assert set(read) - set(given) == {
        next(each for each in read if each[0] == number) for number in holders.keys() - gone
    }
