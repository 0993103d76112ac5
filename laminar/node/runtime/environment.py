"""The environment of a node's process: disk, clocks, randomness, connections, gossip.

`Environment` itself gives access to the real machine. The simulator passes in a subclass in which the same
controllers and shards run through years of simulated time; a test of real processes passes in one whose disk
loses what is not synced. Nothing here decides anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from laminar.log.disk.disk import Disk, RealDisk
from laminar.log.storage import Storage
from laminar.node.consensus.election_throttle import MOST_AT_ONCE
from laminar.node.host.certificates import Certificates
from laminar.node.host.clock import Clock
from laminar.node.host.sealed_files import read_bytes
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.receive_budget import RECEIVE_BUDGET_BYTES
from laminar.node.transport.transport import Address, Transport
from membership.gossip.gossip import Gossip
from raft.values import Trace

if TYPE_CHECKING:
    from laminar.log.format.settings import StorageSettings


class Environment:
    """A node's access to its machine: disk, clocks, random numbers, connections and gossip.

    A subclass may simulate them. Children inherit it by fork, so it holds no loop.
    """

    disk: Disk = RealDisk()
    elections_at_once: int = MOST_AT_ONCE
    receive_budget_bytes: int = RECEIVE_BUDGET_BYTES

    def clock(self) -> Clock:
        """Return the two clocks of a process."""
        return Clock()

    def rng(self) -> random.Random:
        """Return the random generator for timers and ids; seeded by the operating system."""
        return random.Random()

    def storage(
        self, store: str, logs_directory: str, *, settings: StorageSettings, forget: bool = False
    ) -> Storage:
        """Recover a store directory, and return it open. Blocks.

        `forget` lets the recovery go on if the manifest is lost (see `recover_store`).
        """
        return Storage.open(self.disk, store, logs_directory, settings=settings, forget=forget)

    async def read_bytes(self, path: str, position: int, size: int) -> bytes:
        """Return `size` bytes of a sealed segment's file from `position` on; fewer if the file ends before.

        It does not use the log's reader threads (`laminar.node.host.sealed_files`).
        """
        return await read_bytes(path, position, size)

    def transport(
        self,
        *,
        cluster_id: Callable[[], bytes | None],
        node: str,
        role: int,
        nonce: bytes,
        secrets: Keyring,
        certificates: Certificates | None,
        history: bytes,
        store_id: bytes,
        epoch: Callable[[], bytes],
        code_version: int,
        enabled: Callable[[], int],
        rng: random.Random,
    ) -> Transport:
        """Return a transport to the other processes (see `Transport`). Call it in the loop of the process."""
        return Transport(
            cluster_id=cluster_id,
            node=node,
            role=role,
            nonce=nonce,
            secrets=secrets,
            certificates=certificates,
            history=history,
            store_id=store_id,
            epoch=epoch,
            code_version=code_version,
            enabled=enabled,
            rng=rng,
        )

    def gossip(self, **arguments: Any) -> Gossip:
        """Return the gossip of a node; `arguments` are those of `Gossip`."""
        return Gossip(**arguments)

    async def find_controllers(
        self,
        joins: Sequence[str],
        *,
        secrets: Keyring,
        certificates: Certificates | None = None,
        tell: Callable[[str], None] = lambda reason: None,
    ) -> list[Address]:
        """Return controllers' addresses of the cluster that answers at one of `joins`; [] if none answers.

        The request carries a proof of the first of `secrets`. With `certificates` it goes over TLS. `tell`
        gets a sentence for each of `joins` that does not answer as a node.
        """
        # Here and not at the top: it brings an HTTP client, which most processes never need.
        from laminar.node.runtime.join import find_controllers

        return await find_controllers(joins, secrets=secrets, certificates=certificates, tell=tell)

    async def find_cluster(
        self, joins: Sequence[str], *, secrets: Keyring, certificates: Certificates | None = None
    ) -> bytes | None:
        """Return the id of the cluster that answers at one of `joins`; None if none does."""
        from laminar.node.runtime.join import find_cluster

        return await find_cluster(joins, secrets=secrets, certificates=certificates)

    def trace(self, name: str) -> Trace | None:
        """Return an observer that the Raft core of replica `name` calls at each step; None for none."""
        return None
