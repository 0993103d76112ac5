"""The addresses of the other nodes' controllers.

The catalog has them. But an old copy of the catalog, or one that stopped at a damaged entry, lacks the nodes
that joined or moved since; and without the leader's address, the copy's node can't even answer the leader
that would bring it up to date. So there are other sources. In order: what a node announces of itself by
gossip, which is the newest; the catalog; the catalog that this node was given when it joined; a small
document beside the catalog's log, which is ignored if it is missing or damaged. A wrong address does no harm,
as every message names its receiver.

That document also keeps the newest boot record of each node's data folder, with the folder's store id. So an
older copy of a folder is not admitted even while our own catalog, after a restart, is still in an old state.
A record of a folder whose node was removed from the cluster is ignored, because another folder may have taken
the node's name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from laminar.log.disk.document import Document
from laminar.log.disk.errors import StorageError
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.transport.transport import Address, TcpAddress
from membership.boot_history import BootRecord, newer
from membership.gossip.gossip import Member
from membership.records import (
    CatalogState,
)

_log = logging.getLogger("laminar.controller")

NAME = "peers"

# Keys of what a node announces about itself by gossip.
HOST, PORT = "peer_host", "peer_port"


class KnownFolder(msgspec.Struct, frozen=True, array_like=True):
    """A data folder of another node: its newest known boot record (one for each start), and its store id."""

    store_id: bytes
    boot: BootRecord


class AddressBook:
    """Finds the address of another node's controller: by gossip, the catalog, or a document on disk."""

    def __init__(self) -> None:
        self._announced: dict[str, Address] = {}
        # The catalog that this node was given when it joined.
        self.joined = CatalogState()
        self.remembered: dict[str, Address] = {}
        self.folders: dict[str, KnownFolder] = {}

    def announce(self, members: Mapping[str, Member], *, cluster: str) -> None:
        """Replace the announced addresses by those in `members`, without dead nodes and other clusters."""
        self._announced = {
            name: TcpAddress(host, port)
            for name, member in members.items()
            if member.status != "dead" and member.info.get("cluster") == cluster
            if isinstance(host := member.info.get(HOST), str)
            if isinstance(port := member.info.get(PORT), int)
        }

    def address(self, node: str, state: CatalogState) -> Address | None:
        """Return the address of `node`'s controller; None if unknown.

        The sources are asked in this order: gossip, `state` (our copy of the catalog), the catalog that this
        node joined with, and the document on disk.
        """
        announced = self._announced.get(node)
        if announced is not None:
            return announced
        record = state.nodes.get(node) or self.joined.nodes.get(node)
        if record is not None:
            return TcpAddress(record.host, record.peer_ports[0])
        return self.remembered.get(node)

    def folder(self, node: str, state: CatalogState) -> KnownFolder | None:
        """Return the newest boot record and the store id of `node`'s data folder; None if none is known.

        They come from `state` (our copy of the catalog) or from the document on disk. `state` may be old and
        name an earlier folder of the node, or none.
        """
        record = state.nodes.get(node)
        remembered = self.folders.get(node)
        if remembered is not None and remembered.store_id in state.removed_stores:
            remembered = None
        if record is None or record.boot is None:
            return remembered
        if remembered is None or remembered.store_id == record.store_id:
            boot = newer(record.boot, None if remembered is None else remembered.boot)
            assert boot is not None
            return KnownFolder(record.store_id, boot)
        return remembered


class _Where(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    folder: KnownFolder | None = None


class Peers(msgspec.Struct, frozen=True):
    """The content of the document on disk: by node, its controller's address and its newest boot record."""

    addresses: dict[str, Address] = {}
    folders: dict[str, KnownFolder] = {}


_decoder = msgspec.msgpack.Decoder(dict[str, _Where])


def read(log: Log) -> Peers:
    """Return the content of the document beside `log`; empty `Peers` if it can't be read. Blocks briefly."""
    try:
        payload = Document(log.files.disk, log.files.directory, NAME).read()
        known = _decoder.decode(payload) if payload is not None else {}
    except (StorageError, msgspec.DecodeError) as error:
        _log.warning("the document of the other controllers' addresses cannot be read: %s", error)
        return Peers()
    return Peers(
        {node: TcpAddress(where.host, where.port) for node, where in known.items()},
        {node: where.folder for node, where in known.items() if where.folder is not None},
    )


async def keep(storage: Storage, log: Log, peers: Peers) -> None:
    """Write `peers` to the document beside the catalog's `log`, in place of the former content.

    Raises:
        StorageError: it could not be written; the previous one stays.
    """
    where = {
        node: _Where(address.host, address.port, peers.folders.get(node))
        for node, address in peers.addresses.items()
        if isinstance(address, TcpAddress)
    }
    await storage.write_log_document(log, NAME, msgspec.msgpack.encode(where))
