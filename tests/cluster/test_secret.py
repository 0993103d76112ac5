"""A cluster with a secret: its nodes know each other by it, and who has another one stays outside."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import httpx

from laminar.cli.commands.admin import secret as steps
from laminar.testing.cluster import LocalCluster
from tests.cluster.appends import append
from tests.cluster.patience import asked, told, until

SECRET = "a secret of more than sixteen characters"


def test_nodes_with_the_secret_form_a_cluster_and_one_with_another_cannot_join(real_disk: Path) -> None:
    """The stranger keeps asking and is refused; the cluster never lists it."""
    with LocalCluster(real_disk / "cluster", nodes=2, shards=1, settings={"secret": SECRET}) as cluster:
        with httpx.Client(timeout=60, trust_env=False) as http:
            made = asked(http, "PUT", f"{cluster.urls[0]}/v1/topics/t", json={"replicas": 2})
            assert made.is_success, made.text
            sent = append(http, f"{cluster.urls[1]}/v1/topics/t/records", b"x")
        assert 2 == sent["durable"]["replicas"], sent

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
        listed = told(f"{cluster.urls[0]}/v1/cluster")
        assert ["node-1", "node-2"] == [node["node"] for node in listed["nodes"]]


@dataclass
class Filed(LocalCluster):
    """A cluster whose nodes have their secret from files, one each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        for number in range(self.nodes):
            self.file(number).write_text(f"{SECRET}\n")

    def file(self, number: int) -> Path:
        return Path(self.directory) / f"secret-{number}"

    def command(self, number: int) -> list[str]:
        return [*super().command(number), "--secret-file", str(self.file(number))]

    def refused(self, number: int) -> list[float]:
        """How many connections each process of a node refused for their secret."""
        text = httpx.get(f"{self.urls[number]}/metrics", timeout=60, trust_env=False).text
        pattern = r'^laminar_transport_refused_total{process="[^"]+",reason="secret"} (\S+)'
        return [float(count) for count in re.findall(pattern, text, re.MULTILINE)]

    def figures(self, number: int, name: str) -> list[float]:
        """A metric of both processes of a node, once both tell it."""
        return until(lambda: len(found := self.counted(number, name)) == 2 and found, name) or []

    def counted(self, number: int, name: str) -> list[float]:
        """A metric of those processes of a node that have it: a counter begins with what is counted."""
        text = httpx.get(f"{self.urls[number]}/metrics", timeout=60, trust_env=False).text
        return [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{")]


def held(url: str) -> list[str]:
    """The values of all partitions, as a node has them."""
    found = []
    for partition in range(3):
        path = f"/v1/topics/t/partitions/{partition}/records?offset=0&limit=10000"
        found += [record["value"] for record in told(f"{url}{path}")["records"]]
    return found


def test_the_secret_is_changed_node_by_node_under_load(real_disk: Path) -> None:
    """By the steps of `laminar secret`: no request is lost, no node doubted; then only the new one holds."""
    new = real_disk / "new-secret"
    new.write_text("another secret, as long as it has to be\n")
    with Filed(real_disk / "cluster", nodes=3, shards=1) as cluster:
        with httpx.Client(timeout=60, trust_env=False) as http:
            wish = {"partitions": 3, "replicas": 3}
            made = asked(http, "PUT", f"{cluster.urls[0]}/v1/topics/t", json=wish)
        assert made.is_success, made.text
        stop = threading.Event()
        sent: list[str] = []
        failures: list[str] = []

        def load() -> None:
            with httpx.Client(timeout=60, trust_env=False) as http:
                while not stop.is_set():
                    # Of three partitions and nodes, so most are passed on from one node to another.
                    number = len(sent)
                    url = f"{cluster.urls[number % 3]}/v1/topics/t/partitions/{number // 3 % 3}/records"
                    try:
                        append(http, url, f"v{number}")
                    except (AssertionError, httpx.HTTPError) as error:
                        failures.append(repr(error))
                    sent.append(f"v{number}")

        def takes(accepted: int, number: int) -> bool:
            return {accepted} == set(cluster.figures(number, "laminar_secret_accepted"))

        def alive() -> bool:
            nodes = told(f"{cluster.urls[0]}/v1/cluster")["nodes"]
            return [True] * 3 == [node["alive"] for node in nodes]

        loader = threading.Thread(target=load)
        loader.start()
        try:
            for accepted, step in (
                (2, lambda file: steps.add(file, new)),
                (2, steps.use),
                (1, steps.drop),
            ):
                for number in range(3):
                    before = len(sent)
                    loaded = sum(cluster.figures(number, "laminar_secret_loads_total"))
                    step(cluster.file(number))
                    process = cluster.members[number].process
                    assert process is not None
                    process.send_signal(signal.SIGHUP)
                    until(
                        lambda loaded=loaded, number=number: (  # type: ignore[misc]
                            sum(cluster.figures(number, "laminar_secret_loads_total")) == loaded + 2
                        ),
                        "the file is not read",
                    )
                    assert takes(accepted, number)
                    until(lambda before=before: len(sent) > before + 10, "the load stands still")  # type: ignore[misc]
                    until(alive, (accepted, number))
        finally:
            stop.set()
            loader.join()

        assert [] == failures
        for number in range(3):
            assert 0 == sum(cluster.counted(number, "laminar_transport_frames_forged_total"))
            assert 0 == sum(cluster.counted(number, "laminar_gossip_bad_signature_total"))
            assert 0 == sum(cluster.refused(number))
            assert sum(cluster.counted(number, "laminar_transport_connections_sealed_total")) > 0

        # Connections that were open went on; new ones are made with the new secret alone.
        cluster.kill(1)
        cluster.file(1).write_text(f"{SECRET}\n")
        cluster.spawn(1)
        until(
            lambda: sum(cluster.refused(0)) > 0,
            "a node with the old secret is not refused",
        )
        cluster.kill(1)
        cluster.file(1).write_text(new.read_text())
        cluster.restart(1)
        until(alive, "the restarted node is not heard")
        for url in cluster.urls:  # a replica serves what it knows to be committed
            until(lambda url=url: sorted(sent) == sorted(held(url)), "not all of it is there, once")  # type: ignore[misc]
