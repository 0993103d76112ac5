"""Where the controllers of the other nodes are.

The catalog says so. But a copy of it that is old, or stands still because an entry is damaged, does not know
who has joined or moved since, and without an address its node can't even answer the leader that would bring
it up to date. So there are other sources, and a wrong one does no harm, as every message names whom it is
for: what a node says of itself by gossip comes first, as nobody has later news; then the catalog; then what
this node was given when it joined; then a small document beside the catalog's log, which is a help and no
source of truth: one that is missing or damaged is passed over. That document also keeps the newest life of
each node's data folder, so that an older copy of one is not heard when our own catalog begins with an old
state after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedDocument, DiskError
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.transport.transport import Address, TcpAddress
from membership.boot_history import BootRecord, newer
from membership.gossip import Member
from membership.records import CatalogState

_log = logging.getLogger("laminar.controller")

NAME = "peers"

# What a node says of itself by gossip.
HOST, PORT = "peer_host", "peer_port"


class AddressBook:
    """The sources of the module's head; `address` asks them in turn."""

    def __init__(self) -> None:
        self._announced: dict[str, Address] = {}
        # With what it joined: until its own copy says more, the catalog for this node.
        self.joined = CatalogState()
        self.remembered: dict[str, Address] = {}
        self.boots: dict[str, BootRecord] = {}

    def announce(self, members: Mapping[str, Member], *, cluster: str) -> None:
        """What gossip knows now; of nodes that seem dead nothing is believed."""
        self._announced = {
            name: TcpAddress(host, port)
            for name, member in members.items()
            if member.status != "dead" and member.info.get("cluster") == cluster
            if isinstance(host := member.info.get(HOST), str)
            if isinstance(port := member.info.get(PORT), int)
        }

    def address(self, node: str, state: CatalogState) -> Address | None:
        """Of the controller of `node`, `state` being this node's copy of the catalog."""
        announced = self._announced.get(node)
        if announced is not None:
            return announced
        record = state.nodes.get(node) or self.joined.nodes.get(node)
        if record is not None:
            return TcpAddress(record.host, record.peer_ports[0])
        return self.remembered.get(node)

    def boot(self, node: str, state: CatalogState) -> BootRecord | None:
        """The newest of the data folder of `node` that the catalog has ever said here."""
        record = state.nodes.get(node)
        return newer(record.boot if record is not None else None, self.boots.get(node))


class _Where(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    life: BootRecord | None = None


class Peers(msgspec.Struct, frozen=True):
    """By node: where its controller was, and the newest life of its folder (`membership.boot_history`)."""

    addresses: dict[str, Address] = {}
    boots: dict[str, BootRecord] = {}


_decoder = msgspec.msgpack.Decoder(dict[str, _Where])


def read(log: Log) -> Peers:
    """Nothing where nothing can be read. Blocks shortly."""
    try:
        payload = Document(log.files.disk, log.files.directory, NAME).read()
        known = _decoder.decode(payload) if payload is not None else {}
    except (DamagedDocument, DiskError, msgspec.DecodeError) as error:
        _log.warning("where the other controllers were is not known: %s", error)
        return Peers()
    return Peers(
        {node: TcpAddress(where.host, where.port) for node, where in known.items()},
        {node: where.life for node, where in known.items() if where.life is not None},
    )


async def keep(storage: Storage, log: Log, peers: Peers) -> None:
    """Replace the document. Raises `StorageError`; then the former one stands, if there is one."""
    where = {
        node: _Where(address.host, address.port, peers.boots.get(node))
        for node, address in peers.addresses.items()
        if isinstance(address, TcpAddress)
    }
    await storage.keep_beside(log, NAME, msgspec.msgpack.encode(where))
