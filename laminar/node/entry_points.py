"""The functions that a supervisor's children run: controller, shard and recovery, or those of a test.

The supervisor does not import them: it only knows that they are functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laminar.log import ReplicaEntry, recover_node
from laminar.node.host.settings import Settings
from laminar.node.runtime.boot import Boot
from laminar.node.runtime.environment import Environment
from router import owner_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPoints:
    """The functions that the children run; tests put their own here."""

    controller: Callable[[Boot], int]
    shard: Callable[[Boot], int]
    recover: Callable[[str, int], None]
    """`recover(data directory, shards)`: recover every store directory, before any other process reads the
    folder.
    """


def default_entry_points(settings: Settings, environment: Environment) -> EntryPoints:
    """Return the real controller, shard and recovery, loaded so that children find them in memory."""
    # Here and not at the top: a caller that has entry points of its own does not load all of this.
    from laminar.console.files import console_files
    from laminar.node.assembly import run_shard
    from laminar.node.catalog import controller

    if settings.console == "on":
        console_files()  # read and compressed once, and not by each shard

    def owner(entry: ReplicaEntry, shards: int) -> int:
        return owner_shard(entry.partition_hash, shards)

    def recover(directory: str, shards: int) -> None:
        recover_node(environment.disk, directory, shards=shards, shard_of=owner, settings=settings.of_storage)

    return EntryPoints(controller=controller.run, shard=run_shard, recover=recover)
