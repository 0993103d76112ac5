"""A cluster whose nodes run one of two programs, each as the test says."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from laminar.log.disk.disk import RealDisk
from laminar.node.runtime.data_folder import open_stopped
from laminar.testing.cluster import STOP_TIMEOUT_S
from tests.cluster.life.growing import GrowingCluster
from tests.cluster.upgrade.older import older_program

SECRET = "a secret of both programs"


class MixedCluster(GrowingCluster):
    """The nodes in `older` are started with the older program. The first three are to begin with.

    They share a secret, which both programs know, so that those in `guarded` may ask for tokens.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings = {"secret": SECRET, **self.settings}
        self.guarded: set[int] = set()
        self.program = older_program()
        self.older = {0, 1, 2}

    def start(self, *, timeout: float = 180.0) -> None:
        """Start the first three nodes, and wait until they serve."""
        for number in range(3):
            self.spawn(number)
        self.wait_ready([0, 1, 2], timeout=timeout)

    def command(self, number: int) -> list[str]:
        """Return the command line of a node, with the program that it is to run."""
        command = super().command(number)
        at = command.index("--access")
        if number in self.guarded:
            command[at + 1] = "tokens"
        if number not in self.older:
            return command
        del command[at : at + 2]  # a setting that it does not know; it asks for no token
        return ["/usr/bin/env", f"PYTHONPATH={self.program}", *command]

    def format_version(self, number: int) -> int:
        """Return the format version in the data folder of a stopped node."""
        folder = open_stopped(RealDisk(), str(self.members[number].data))
        folder.close()
        return folder.identity.format_version

    def fingerprint(self, number: int) -> dict[str, str]:
        """Return the checksum of every file in a node's data folder."""
        data = self.members[number].data
        files = sorted(path for path in data.rglob("*") if path.is_file())
        return {str(path.relative_to(data)): _checksum(path) for path in files}

    async def ended(self, number: int) -> str:
        """Wait until a node that can't go on has ended by itself; return what it wrote since its start."""
        process = self.members[number].process
        assert process is not None
        async with asyncio.timeout(8 * STOP_TIMEOUT_S):
            while process.poll() is None:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.05)
        assert process.returncode != 0, f"{self.members[number].name} ended as if all were well"
        self.kill(number)
        return self.members[number].log_tail()


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
