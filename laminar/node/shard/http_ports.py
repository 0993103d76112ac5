"""The HTTP ports of a shard: when they begin to listen, and how they are closed.

Before a port listens it refuses connections, so that clients ask other nodes at once. That is best until this
shard knows the catalog, has opened its replicas, and knows which nodes lead them: before that, a request
would wait here although another node can answer it. But an operator must be able to ask a node for what it
waits, and some replicas may have no leader for long. So each wait is bounded.

Once the ports of a node listen, they do so until the node ends. If the supervisor restarts a shard, the new
process finds its ports listening and connections waiting, so it answers without delay.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable

from laminar.http.server.reader import Connection
from laminar.http.server.server import HttpServer
from laminar.http.server.state import ServerLimits
from laminar.node.host.certificates import reason_of
from laminar.node.host.log_rate_limit import LimitedLog
from laminar.node.host.tls_listener import TlsListener
from laminar.node.partition.partition import Partition
from laminar.node.runtime.boot import Boot
from laminar.node.runtime.cluster_view import View
from laminar.node.runtime.listeners import BACKLOG, begin_to_listen, listens

log = logging.getLogger("laminar.http")
_shard_log = logging.getLogger("laminar.shard")

LATEST_S = 5.0
"""The time (seconds) after which a shard whose replicas are open listens, even if it is not ready.

A node that has joined has a view after 3 s at the latest (`UNCONFIRMED_S` in
`laminar/node/catalog/controller.py`), and `LEADERS_S` come on top.
"""
LEADERS_S = 1.0
"""The longest wait (seconds) for leaders: an election takes less, and without a majority none comes."""
_LEADERS_CHECK_S = 0.01


def max_connections(open_files: int) -> int:
    """Return how many HTTP connections a process may have, if it may open `open_files` files.

    The logs take half of the files at most. An eighth is left for the journal, for other nodes, and for
    connections that are accepted only to be closed.
    """
    return min(ServerLimits().max_connections, max(8, open_files * 3 // 8))


class HttpPorts:
    """The HTTP ports of one shard: its own port, and its socket on the port that all shards share."""

    def __init__(self, boot: Boot, server: HttpServer) -> None:
        self._boot = boot
        self._server = server
        self._servers: list[asyncio.Server | TlsListener[Connection]] = []
        self._log = LimitedLog(log, now_s=asyncio.get_running_loop().time)
        self._closed = False

    @property
    def held(self) -> bool:
        """Whether this shard has an own port that does not listen yet."""
        return self._boot.http_own is not None and not listens(self._boot.http_own)

    async def until_ready(self, ready: asyncio.Event, partitions: Iterable[Partition], view: View) -> None:
        """Wait until the shard is ready and its replicas know their leaders, `LATEST_S` at most.

        `partitions` is read once the shard is ready, so it is a view of the table and not a copy. There is no
        wait if the shard's own port listens already, or if there is none.
        """
        if not self.held:
            return
        try:
            async with asyncio.timeout(LATEST_S):
                await ready.wait()
                await leaders_known(partitions, view)
        except TimeoutError:
            _shard_log.warning(
                "the HTTP port is opened after %g s although this shard is not ready: it has no view of "
                "its cluster, or its replicas know no leaders yet",
                LATEST_S,
            )

    async def open(self) -> None:
        """Listen and answer on the shard's own port, and report that to the supervisor."""
        own = self._boot.http_own
        if own is None or self._closed:
            return
        if not listens(own):
            begin_to_listen(own)
        await self._serve(own)
        self._boot.answers()

    async def open_shared(self) -> None:
        """Answer on the shared port, once the supervisor listens on it."""
        shared = self._boot.http_shared
        if shared is None:
            return
        await self._boot.until_shared_port_listens()
        # If the supervisor has died, the port does not listen, and must not begin to here: the sockets of the
        # shared port must begin in the order of shards, and `create_server` listens, too.
        if not self._closed and listens(shared):
            await self._serve(shared)

    async def _serve(self, sock: socket.socket) -> None:
        duplicate = sock.dup()  # the loop closes its server's socket, but `sock` stays open
        duplicate.setblocking(False)
        backlog = min(BACKLOG, self._server.limits.max_connections // 4)
        factory, certificates = self._server.protocol_factory, self._boot.certificates
        server: asyncio.Server | TlsListener[Connection]
        if certificates is None:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(factory, sock=duplicate, backlog=backlog)
        else:
            duplicate.listen(backlog)
            server = TlsListener(
                duplicate,
                make=factory,
                failed=self._tls_failed,
                context=lambda: certificates.current.http,
                most=backlog,
            )
        self._servers.append(server)
        if self._closed:
            server.close()

    def _tls_failed(self, connection: Connection, error: BaseException) -> None:
        self._server.counts.tls_failed += 1
        self._log.warning("tls", "HTTP connection refused: TLS: %s", reason_of(error))

    def close(self) -> None:
        """Stop accepting connections, on both ports."""
        self._closed = True
        for server in self._servers:
            server.close()
        # Otherwise the kernel would go on accepting connections that are not served: a client would send its
        # request, and get a reset when this process ends. A client that is refused asks another node at once.
        for sock in (self._boot.http_shared, self._boot.http_own):
            if sock is not None:
                sock.close()


async def leaders_known(partitions: Iterable[Partition], view: View) -> None:
    """Wait up to `LEADERS_S` until these replicas know their leaders.

    Replicas whose group cannot have a leader on another node are not waited for.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LEADERS_S
    unled = list(partitions)
    while unled := [each for each in unled if _may_be_led_elsewhere(each, view)]:
        if loop.time() >= deadline:
            return
        await asyncio.sleep(_LEADERS_CHECK_S)


def _may_be_led_elsewhere(partition: Partition, view: View) -> bool:
    """Return whether a replica knows no leader, although another voter's node may be alive."""
    replica = partition.replica
    if replica.leader_node is not None or replica.failure is not None:
        return False
    statuses = view.message.statuses if view.message is not None else {}
    others = (member for member in replica.configuration.voters if member != replica.replica_id)
    return any(statuses.get(replica.nodes[member]) != "dead" for member in others)
