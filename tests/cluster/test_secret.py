"""A cluster with a secret: its nodes know each other by it, and who has another one stays outside."""

from __future__ import annotations

import subprocess
from pathlib import Path

import requests

from laminar.testing.cluster import LocalCluster, get_json

SECRET = "a secret of more than sixteen characters"


def test_nodes_with_the_secret_form_a_cluster_and_one_with_another_cannot_join(real_disk: Path) -> None:
    """The stranger keeps asking and is refused; the cluster never lists it."""
    with LocalCluster(real_disk / "cluster", nodes=2, shards=1, settings={"secret": SECRET}) as cluster:
        made = requests.put(f"{cluster.urls[0]}/v1/topics/t", json={"replicas": 2}, timeout=60)
        assert 201 == made.status_code, made.text
        sent = requests.post(f"{cluster.urls[1]}/v1/topics/t/records", data=b"x", timeout=60)
        assert 2 == sent.json()["durable"]["replicas"], sent.text

        command = cluster.command(1)
        host = cluster.members[0].host.rpartition(".")[0] + ".9"
        for flag, value in (
            ("--data", str(real_disk / "stranger")),
            ("--node", "stranger"),
            ("--host", host),
            ("--secret", "another secret of sixteen characters"),
        ):
            command[command.index(flag) + 1] = value
        stranger = subprocess.Popen(
            command, env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert stranger.stdout is not None
            said = next(line for line in stranger.stdout if "joining: through" in line)
        finally:
            stranger.terminate()
            stranger.communicate(timeout=60)

        assert f"{cluster.members[0].host}" in said
        listed = get_json(f"{cluster.urls[0]}/v1/cluster")
        assert ["node-1", "node-2"] == [node["node"] for node in listed["nodes"]]
