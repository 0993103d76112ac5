"""A node whose disk is the fault disk: `python -m tests.disks.serve`, with the flags of `laminar.node`.

Unsynced bytes live in its processes, so killing them is a loss of power. Beside the data folder lie its
hidden files (`<data>.unsynced`) and the rules, which may be changed at any time (`<data>.rules`, a JSON list
of `tests.disks.faults.Rule`). LAMINAR_TEST_WRITEBACK is the chance that a write leaves a block early.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar.node.__main__ import settings_of
from laminar.node.runtime.environment import Environment
from laminar.node.start import serve
from laminar.testing.cluster import LocalCluster
from tests.disks.fault_disk import FaultDisk
from tests.disks.faults import Rule

WRITEBACK = "LAMINAR_TEST_WRITEBACK"


class FaultCluster(LocalCluster):
    """A cluster of such nodes: `kill` takes a node's unsynced bytes with it.

    `writeback_chance` is that of nodes that are started from now on.
    """

    writeback_chance = 0.0

    def command(self, number: int) -> list[str]:
        laminar = super().command(number)
        place = laminar.index("laminar.node")
        # Not -P, which hides the folder that `tests` is in.
        return [sys.executable, "-m", "tests.disks.serve", *laminar[place + 1 :]]

    def environment(self) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        return super().environment() | {"PYTHONPATH": root, WRITEBACK: str(self.writeback_chance)}

    def set_rules(self, number: int, rules: Sequence[Rule]) -> None:
        """What from now on goes wrong with a node's disk."""
        data = self.members[number].data
        written = data.with_name(f"{data.name}.rules.new")
        written.write_bytes(msgspec.json.encode(rules))
        written.rename(data.with_name(f"{data.name}.rules"))


def main(arguments: Sequence[str]) -> int:
    """The exit code of `laminar.node.start.serve`."""
    settings = settings_of(arguments)
    data = os.path.abspath(settings.data)
    environment = Environment()
    environment.disk = disk = FaultDisk.over(f"{data}.unsynced", rules_path=f"{data}.rules")
    disk.writeback_chance = float(os.environ.get(WRITEBACK, "0"))
    return serve(settings, environment=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
