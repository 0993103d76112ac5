"""Decides whose Raft messages a process takes into account (docs/consensus.md#a-folder-that-goes-back).

A message is dropped if its sender's node is unknown here, or when that node's data folder is an older
copy of itself: such a copy has forgotten votes and acknowledgements that this process may rely on. A peer
shows the boot history of its folder (`membership.boot_history`) in the handshake. It is compared with the
newest start of that node known here, from the catalog or from an earlier handshake. A node that was removed
from the cluster may come back with another folder, to which the starts of the former one do not apply. So a
peer also shows its folder's id (an older program does not). Two cases need care: the catalog here may be so
old that it names the former folder; and a former folder may come back after the catalog has named it as
removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from laminar.node.transport.transport import Peer
from membership.boot_history import BootRecord, contradicts, newer

_log = logging.getLogger("laminar.process")


class PeerAdmission:
    """Decides, in one process, which peers' Raft messages are accepted. `node` is its own node.

    `knows(node)` says whether this process has heard of a node. `known_boot(node)` returns the newest boot
    record of the node, and `known_store(node)` the id of its folder, as the catalog has named them to this
    process; None if it has named none. `is_removed(store)` says whether the catalog lists the folder with
    this id as a removed node's.
    """

    def __init__(
        self,
        node: str,
        *,
        knows: Callable[[str], bool],
        known_boot: Callable[[str], BootRecord | None],
        known_store: Callable[[str], bytes | None],
        is_removed: Callable[[bytes], bool] = lambda store: False,
    ) -> None:
        self._node = node
        self._knows = knows
        self._known_boot = known_boot
        self._known_store = known_store
        self._is_removed = is_removed
        # By node and folder: the newest start that an admitted process has shown in a handshake.
        self._shown: dict[tuple[str, bytes], BootRecord] = {}
        # The same of processes that do not show their folder. By node: its folder in the catalog, None if the
        # catalog had none then, and the start.
        self._greeted: dict[str, tuple[bytes | None, BootRecord]] = {}
        # By node and role: the process judged last, the start that it was compared with, and the verdict.
        self._verdicts: dict[tuple[str, int], tuple[Peer, BootRecord | None, bool]] = {}

    def admits(self, peer: Peer) -> bool:
        """Return whether this process accepts Raft messages of `peer`."""
        if peer.node == self._node:
            return True
        verdict = self._verdicts.get((peer.node, peer.role))
        store = self._known_store(peer.node)
        is_another = store is not None and peer.store_id not in (b"", store)
        if is_another and self._is_removed(peer.store_id):
            if verdict is None or verdict[0] is not peer:
                self._verdicts[peer.node, peer.role] = peer, None, False
                _log.warning(
                    "ignoring Raft messages from process %d of node %s: its data folder is that of a removed "
                    "node",
                    *(peer.role, peer.node),
                )
            return False
        recorded = None if is_another else self._known_boot(peer.node)
        known = newer(recorded, self._greeted_by(peer, store))
        if verdict is not None and verdict[0] is peer and verdict[1] is known:
            return verdict[2] and (store is not None or self._knows(peer.node))
        if not self._knows(peer.node):
            return False
        admitted = known is None or not history_contradicts(peer.history, known)
        self._verdicts[peer.node, peer.role] = peer, known, admitted
        if admitted:
            self._remember(peer)
        elif known is not None:
            # The last messages of an ended process may arrive after its successor's first.
            _log.log(
                logging.ERROR if known is recorded else logging.WARNING,
                "ignoring Raft messages from process %d of node %s: its data folder is an older copy "
                "(expected start %d, tick %d or later)",
                *(peer.role, peer.node, known.number, known.tick),
            )
        return admitted

    def _greeted_by(self, peer: Peer, known: bytes | None) -> BootRecord | None:
        """Return the newest boot record that the peer's folder has shown in a handshake; None without any.

        A peer that does not show its folder's id is assumed to have `known`, the folder that the catalog
        names. Records of a former folder of the node are dropped.
        """
        node = peer.node
        store, shown = self._greeted.get(node, (known, None))
        if peer.store_id:
            return newer(
                self._shown.get((node, peer.store_id)), shown if store in (None, peer.store_id) else None
            )
        if known is None:
            return shown
        if shown is not None and store is None:
            self._greeted[node] = known, shown
        elif store != known:
            del self._greeted[node]
            shown = None
        return newer(self._shown.get((node, known)), shown)

    def _remember(self, peer: Peer) -> None:
        """Store the newest start that `peer` has shown: from now on its node's boot history must contain it.

        Otherwise a copy of the folder from before that start would be admitted until the catalog names the
        start, although the node has made promises to this process since.
        """
        history = msgspec.msgpack.decode(peer.history, type=list[BootRecord]) if peer.history else []
        known = self._known_store(peer.node)
        shown = newer(self._greeted_by(peer, known), history[-1] if history else None)
        if shown is not None and peer.store_id:
            self._shown[peer.node, peer.store_id] = shown
        elif shown is not None:
            former, _ = self._greeted.get(peer.node, (None, shown))
            # The catalog has no folder of a node that was just removed: this is of the former one.
            self._greeted[peer.node] = known or former, shown


def encode_history(history: Sequence[BootRecord]) -> bytes:
    """Return a boot history encoded for the handshake."""
    return msgspec.msgpack.encode(history)


def history_contradicts(history: bytes, known: BootRecord) -> bool:
    """Return whether a handshake's boot history shows an older copy than `known`; True if unreadable."""
    try:
        return contradicts(msgspec.msgpack.decode(history, type=list[BootRecord]) if history else (), known)
    except msgspec.DecodeError:
        return True
