"""A cluster to be broken: `LocalCluster` whose nodes run under `launch`, on wires that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from laminar.testing.cluster import STOP_TIMEOUT_S, LocalCluster, processes_of_group
from tests.cluster.faults import wires
from tests.cluster.faults.launch import BOOT, DISK, WRITEBACK
from tests.disks.faults import Rule


class FaultyCluster(LocalCluster):
    """`forgets`: unsynced bytes die with a node, and its machine has another boot id afterwards."""

    wires: wires.Wires | None = None
    forgets = False
    # Of nodes that are started from now on.
    writeback_chance = 0.0
    _boots = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        # How long each node's log was when it was started.
        self._told_bytes = [0] * self.nodes

    def command(self, number: int) -> list[str]:
        laminar = super().command(number)
        place = laminar.index("laminar.node")
        inside = self.wires.inside(number) if self.wires is not None else []
        # Not -P, which hides the folder that `tests` is in.
        return [
            *_absolute(inside),
            sys.executable,
            "-m",
            "tests.cluster.faults.launch",
            *laminar[place + 1 :],
        ]

    def environment(self) -> dict[str, str]:
        given = super().environment() | {"PYTHONPATH": str(Path(__file__).parents[3])}
        if self.forgets:
            self._boots += 1
            given |= {DISK: "forgets", BOOT: str(self._boots), WRITEBACK: str(self.writeback_chance)}
        return given

    def spawn(self, number: int) -> None:
        log = self.members[number].log
        self._told_bytes[number] = log.stat().st_size if log.exists() else 0
        super().spawn(number)

    def gave_up(self, number: int) -> bool:
        """Whether a node has given one of its processes up, which died too often, since it was started."""
        with self.members[number].log.open("rb") as log:
            log.seek(self._told_bytes[number])
            return b"; not started again after" in log.read()

    def set_rules(self, number: int, rules: Sequence[Rule]) -> None:
        """What from now on goes wrong with a node's disk."""
        self._write(number, "rules", msgspec.json.encode(rules))

    def set_clock(self, number: int, wrong_by_ms: int) -> None:
        """By how much a node's wall clock is wrong from now on."""
        self._write(number, "clock", str(wrong_by_ms).encode())

    def _write(self, number: int, name: str, content: bytes) -> None:
        data = self.members[number].data
        written = data.with_name(f"{data.name}.{name}.new")
        written.write_bytes(content)
        written.rename(data.with_name(f"{data.name}.{name}"))

    def end(self, number: int) -> None:
        """Tell a node to stop, and wait until it has: its last checkpoint is made, its journal needless."""
        process = self.members[number].process
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        self.kill(number)

    def signal(self, number: int, what: signal.Signals) -> None:
        """To all processes of a node, if it runs."""
        process = self.members[number].process
        for pid in processes_of_group(process.pid) if process is not None else []:
            os.kill(pid, what)


def _absolute(command: list[str]) -> list[str]:
    """`execv` looks nothing up."""
    return [shutil.which(command[0]) or command[0], *command[1:]] if command else []


@contextmanager
def faulty_cluster(
    folder: Path,
    *,
    nodes: int = 3,
    shards: int = 2,
    forgets: bool = False,
    cuttable: bool = True,
    settings: Mapping[str, str | int] | None = None,
) -> Iterator[FaultyCluster]:
    """Such a cluster, running. Cuttable only where this machine allows it; then `wires` is not None."""
    given: dict[str, str | int] = {"pin": "off", **(settings or {})}
    if not cuttable or not wires.can_be_made():
        cluster = FaultyCluster(folder, nodes=nodes, shards=shards, settings=given)
        cluster.forgets = forgets
        with cluster:
            yield cluster
        return
    net = wires.Wires(nodes)
    try:
        given["secret"] = "the secret of a cluster that is broken"
        given["insecure"] = True
        cluster = FaultyCluster(
            folder, nodes=nodes, shards=shards, hosts=net.hosts, ports=[7070] * nodes, settings=given
        )
        cluster.forgets, cluster.wires = forgets, net
        with cluster:
            yield cluster
    finally:
        net.close()
