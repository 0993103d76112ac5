"""A data folder's identity (cluster, store, node, format), and `node.json`, which says where the node serves.

The identity is made once, when a folder is formatted, and never guessed: a folder with data but without an
identity, or with one that does not fit the settings, is refused. An empty folder becomes a *new store* with a
new store id, so a node whose folder was emptied is not taken for the one it was. Only a start without `join`
makes a cluster id. Each start adds a boot record to the folder, durably and before anything else, by which a
cluster recognises an older copy of the folder (`membership.boot_history`). The data itself is not read here.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from typing import Any

import msgspec

from laminar.log.disk.disk import Disk, Lock
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DiskError
from laminar.node.runtime.listeners import Ports
from membership.boot_history import BootRecord, begin
from membership.catalog import CODE_VERSION

FIRST_FORMAT = 1
"""The format version of a new folder. Code version 0 has the same formats as 1."""

_LOCK_NAME = "lock"
_LOCK_WAIT_S = 3.0
_NODE_FILE = "node.json"
_BEGINNINGS = frozenset({_LOCK_NAME, _NODE_FILE, "lost+found"})
"""Names that a folder without an identity may have: left by a crash before it, or the file system's own."""


class IdentityError(Exception):
    """This data folder can't be used as it is; the text says why, and what to do."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a data folder's identity file, which each start and each change writes again."""

    format_version: int
    """The code version that a program must know to use the folder: the highest that the cluster is known to
    have enabled. Only what it permits is written into the folder's files."""
    store_id: bytes
    """16 random bytes, drawn when the folder was formatted. A copy of the folder has the same."""
    node: str
    cluster_id: bytes
    """16 bytes; empty while the node is joining."""
    founding: bool
    """The node made the cluster id, and has not recorded that group 0 is made: a start may found it again."""
    boot_history: tuple[BootRecord, ...] = ()
    """The newest boot record that the catalog is known to have, and all since; the last is this start's."""
    epoch: bytes = b""
    """Names the last recovery of this node's catalog: 8 bytes that count, 8 random ones; empty for none."""
    has_peers: bool = False
    """Other nodes have joined the cluster that this node founded or joined; never false again."""


class _Versioned(msgspec.Struct):
    format_version: int


class DataFolder:
    """An open, locked data folder. Forked children share the lock, which ends with the last of them."""

    def __init__(self, disk: Disk, directory: str, lock: Lock, identity: Identity) -> None:
        self.disk = disk
        self.directory = directory
        self.identity = identity
        self._lock = lock

    def close(self) -> None:
        """Close this process's descriptor of the lock; the last process to do so releases the lock."""
        self._lock.close()

    def read_identity(self) -> Identity:
        """Return the identity as it is on the disk now: a child may have joined since."""
        identity = _read(self.disk, self.directory)
        assert identity is not None and identity.store_id == self.identity.store_id, (
            "the identity has changed"
        )
        self.identity = identity
        return identity

    def record_epoch(self, epoch: bytes) -> None:
        """Record the epoch, which names the last recovery of the cluster's catalog. Durable on return."""
        self.identity = msgspec.structs.replace(self.read_identity(), epoch=epoch)
        _write(self.disk, self.directory, self.identity)

    def record_cluster(self, cluster_id: bytes, epoch: bytes = b"") -> None:
        """Record the cluster that the node belongs to; durable on return.

        From now on the node can no longer found a cluster of its own. If it has this cluster already, it
        keeps its epoch.

        Raises:
            IdentityError: the node belongs to another cluster already.
        """
        assert len(cluster_id) == 16, f"cluster id of {len(cluster_id)} bytes"
        known = self.read_identity()
        if known.cluster_id not in (b"", cluster_id):
            raise IdentityError(
                f"{self.directory} belongs to cluster {known.cluster_id.hex()}, not {cluster_id.hex()}"
            )
        epoch = known.epoch if known.cluster_id else epoch
        self.identity = msgspec.structs.replace(known, cluster_id=cluster_id, founding=False, epoch=epoch)
        _write(self.disk, self.directory, self.identity)

    def record_boot_history(self, history: tuple[BootRecord, ...]) -> None:
        """Record the boot history, of which the last record is this start's; durable when it returns."""
        known = self.read_identity()
        assert [each.nonce for each in history[-1:]] == [each.nonce for each in known.boot_history[-1:]]
        self.identity = msgspec.structs.replace(known, boot_history=history)
        _write(self.disk, self.directory, self.identity)

    def record_format_version(self, version: int) -> None:
        """Record, durably, that programs which do not know code version `version` can't use the folder."""
        known = self.read_identity()
        if known.format_version < version:
            self.identity = msgspec.structs.replace(known, format_version=version)
            _write(self.disk, self.directory, self.identity)

    def record_has_peers(self) -> None:
        """Record, durably, that other nodes have joined this cluster.

        This node never again elects itself alone (docs/decisions/0010).
        """
        known = self.read_identity()
        if not known.has_peers:
            self.identity = msgspec.structs.replace(known, has_peers=True)
            _write(self.disk, self.directory, self.identity)

    def read_ports(self) -> Ports | None:
        """Return the ports that the system chose at an earlier start; None if none are recorded."""
        payload = Document(self.disk, self.directory, "ports").read()
        return None if payload is None else msgspec.msgpack.decode(payload, type=Ports)

    def write_ports(self, ports: Ports) -> None:
        """Record the ports for the next start."""
        if self.read_ports() != ports:
            Document(self.disk, self.directory, "ports").write(msgspec.msgpack.encode(ports))

    def write_node_file(self, content: dict[str, Any]) -> None:
        """Replace `node.json` atomically: a reader sees the old file, the new one, or none."""
        path = os.path.join(self.directory, _NODE_FILE)
        text = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
        temporary = path + ".new"
        self.disk.unlink(temporary)
        file = self.disk.open(temporary, create=True, exclusive=True)
        try:
            file.pwritev([text], 0)
            file.sync()
        finally:
            file.close()
        self.disk.rename(temporary, path)
        self.disk.sync_directory(self.directory)

    def remove_node_file(self) -> None:
        """Remove `node.json`, because the node can no longer be reached."""
        self.disk.unlink(os.path.join(self.directory, _NODE_FILE))


def open_data_folder(
    disk: Disk,
    directory: str,
    *,
    node: str,
    joining: bool,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> DataFolder:
    """Lock the folder (made if missing), read or make its identity, and add a boot record.

    `node` is the wanted name, or empty; `joining` says whether the node was given a cluster to join.

    Raises:
        IdentityError: the folder can't be used.
        StorageError: the disk failed, or the identity is damaged.
    """
    disk.make_directory(directory)
    lock = _lock(disk, directory)
    try:
        identity = _read(disk, directory)
        if identity is None:
            identity = _format(disk, directory, node=node, joining=joining, random_bytes=random_bytes)
        check(identity, directory, node=node, joining=joining)
        identity = _begin_life(disk, directory, identity, random_bytes=random_bytes)
    except BaseException:
        lock.close()
        raise
    return DataFolder(disk, directory, lock, identity)


def check_owner(directory: str) -> None:
    """Refuse a folder in which other users can put files. One that doesn't exist yet passes.

    Raises:
        IdentityError: the folder is another user's, or writable for every user.
    """
    try:
        found = os.stat(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise IdentityError(f"{directory}: {error.strerror}") from error
    if found.st_uid != os.geteuid():
        raise IdentityError(
            f"{directory} belongs to the user {found.st_uid}, this process runs as {os.geteuid()}: run it as "
            f"that user, or give the folder to this one (chown -R {os.geteuid()} {directory})"
        )
    if found.st_mode & stat.S_IWOTH:
        raise IdentityError(f"every user can write in {directory}: take that away (chmod o-w {directory})")


def open_stopped(disk: Disk, directory: str) -> DataFolder:
    """Lock the folder of a node that does not run, without a new boot record.

    Raises:
        IdentityError: it is no data folder, or is in use.
    """
    if not disk.exists(os.path.join(directory, _LOCK_NAME)):
        raise IdentityError(f"{directory} is no data folder")
    lock = _lock(disk, directory)
    try:
        identity = _read(disk, directory)
        if identity is None:
            raise IdentityError(f"{directory} has no identity: it is no data folder, or has lost it")
    except BaseException:
        lock.close()
        raise
    return DataFolder(disk, directory, lock, identity)


def _begin_life(
    disk: Disk, directory: str, identity: Identity, *, random_bytes: Callable[[int], bytes]
) -> Identity:
    after = msgspec.structs.replace(identity, boot_history=begin(identity.boot_history, random_bytes(16)))
    try:
        _write(disk, directory, after)
    except DiskError as error:
        if not error.is_full:
            raise
        # A full disk must not keep a node from serving what it holds: it goes on under the boot record of its
        # last start.
        return identity
    return after


def check(identity: Identity, directory: str, *, node: str, joining: bool) -> None:
    """Refuse an identity that doesn't fit the settings.

    Raises:
        IdentityError: the identity doesn't fit.
    """
    if node and node != identity.node:
        raise IdentityError(
            f"{directory} is the folder of node {identity.node!r}, not of {node!r}: give the right folder, "
            "or no name"
        )
    if not identity.cluster_id and not joining:
        raise IdentityError(
            f"node {identity.node!r} began to join a cluster and has not finished: say again which one with "
            "--join"
        )


def _lock(disk: Disk, directory: str) -> Lock:
    # The children of a killed supervisor hold its lock until the kernel has killed them too, a moment later.
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            return disk.lock(os.path.join(directory, _LOCK_NAME), wait=False)
        except DiskError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() > deadline:
                raise IdentityError(f"{directory} is in use by another Laminar process") from error
            time.sleep(0.02)


def _read(disk: Disk, directory: str) -> Identity | None:
    payload = _read_document(Document(disk, directory, "identity"))
    if payload is None:
        return None
    try:
        # The version first: a newer program may have changed the rest.
        version = msgspec.msgpack.decode(payload, type=_Versioned).format_version
        if version > CODE_VERSION:
            raise IdentityError(
                f"{directory}: the file identity has format version {version}, and this program knows "
                f"versions up to {CODE_VERSION}: start the newer program that wrote it; nothing was changed"
            )
        return msgspec.msgpack.decode(payload, type=Identity)
    except msgspec.ValidationError as error:
        raise IdentityError(f"the identity in {directory} can't be understood: {error}") from error


def _read_document(document: Document) -> bytes | None:
    # The controller may replace the document, and so remove the file that we are about to open: then a newer
    # file is there.
    for _ in range(10):
        try:
            return document.read()
        except DiskError as error:
            if not error.is_missing:
                raise
    return document.read()


def _write(disk: Disk, directory: str, identity: Identity) -> None:
    Document(disk, directory, "identity").write(msgspec.msgpack.encode(identity))


def _format(
    disk: Disk, directory: str, *, node: str, joining: bool, random_bytes: Callable[[int], bytes]
) -> Identity:
    begun = ("identity-1.", "identity.")  # such a file is incomplete, or `_read` would have found an identity
    found = [name for name in disk.list(directory) if name not in _BEGINNINGS and not name.startswith(begun)]
    if found:
        raise IdentityError(
            f"{directory} is not empty ({', '.join(found[:3])}) and has no identity: it is no data folder, "
            "or has lost it; give an empty one"
        )
    store_id = random_bytes(16)
    identity = Identity(
        format_version=FIRST_FORMAT,
        store_id=store_id,
        node=node or f"node-{store_id[:4].hex()}",
        cluster_id=b"" if joining else random_bytes(16),
        founding=not joining,
    )
    _write(disk, directory, identity)
    return identity
