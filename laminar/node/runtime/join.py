"""Joining: a new node finds its cluster through the HTTP address of any member.

`--join` takes the one address that operators know, the shared HTTP port. The member there answers with the
addresses of the controllers. All else goes over the node transport, which the secret protects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from laminar.http.client.connection import ask_once
from laminar.http.client.tls import SYSTEM, Trust
from laminar.http.protocol.answer import ConnectionFailed
from laminar.node.host.certificates import Certificates
from laminar.node.runtime.join_proof import authorization
from laminar.node.secret.keyring import Keyring
from laminar.node.secret.keys import Keys
from laminar.node.transport.transport import Address, TcpAddress
from membership.boot_history import BootRecord
from membership.records import (
    CatalogState,
    NodeRecord,
)

_log = logging.getLogger("laminar.joining")

TIMEOUT_S = 2.0


class Join(msgspec.Struct, frozen=True):
    """A node's request to join the cluster. `former` are the boot records of its folder's earlier starts."""

    record: NodeRecord
    former: list[BootRecord] = []


class JoinAnswer(msgspec.Struct, frozen=True):
    """The answer: the node's replica id in group 0, group 0's configuration, and the catalog to begin with.

    An empty cluster id means "not now, ask again". `refused` says why the node may never join; else it is
    empty. `code_version` is the one that the cluster has enabled; 0 from an older program.
    """

    cluster_id: bytes = b""
    replica_id: int = 0
    configuration: bytes = b""
    catalog: CatalogState = CatalogState()
    refused: str = ""
    epoch: bytes = b""
    code_version: int = 0


class _Node(msgspec.Struct):
    peer: str


class _Cluster(msgspec.Struct):
    nodes: list[_Node]
    cluster_id: str | None = None


async def find_controllers(
    joins: Sequence[str],
    *,
    secrets: Keyring,
    certificates: Certificates | None = None,
    tell: Callable[[str], None],
) -> list[Address]:
    """Return the controllers' addresses, from the first of `joins` (HTTP `host:port`) that answers; else [].

    With `secrets` the request carries a proof of the secret, because members give the addresses only to nodes
    that know it, or to clients with a token. `tell` gets a
    sentence for each of `joins` that did not answer as a node. With `certificates` they are asked over TLS,
    and their certificate must name the host of `joins`.
    """
    cluster = await _ask(joins, secrets, certificates, tell)
    addresses: list[Address] = []
    for node in cluster.nodes if cluster is not None else ():
        host, _, port = node.peer.rpartition(":")
        addresses.append(TcpAddress(host.strip("[]"), int(port)))
    return addresses


async def find_cluster(
    joins: Sequence[str], *, secrets: Keyring, certificates: Certificates | None = None
) -> bytes | None:
    """Return the cluster's id, from the first of `joins` (HTTP `host:port`) that answers; else None."""
    cluster = await _ask(joins, secrets, certificates, _log.debug)
    try:
        return bytes.fromhex(cluster.cluster_id) if cluster is not None and cluster.cluster_id else None
    except ValueError:
        return None


async def _ask(
    joins: Sequence[str],
    secrets: Keyring,
    certificates: Certificates | None,
    tell: Callable[[str], None],
) -> _Cluster | None:
    scheme = "http" if certificates is None else "https"
    trust = SYSTEM if certificates is None else Trust.of(certificates.current.join, "tls_ca")
    for join in joins:
        try:
            for headers in _proofs(secrets.first):
                answer = await ask_once(
                    f"{scheme}://{join}",
                    "GET",
                    "/v1/cluster",
                    headers=headers,
                    timeout_s=TIMEOUT_S,
                    trust=trust,
                )
                if answer.status != 401:
                    break
            if answer.status == 200:
                cluster = msgspec.json.decode(answer.body, type=_Cluster)
                if cluster.nodes:
                    return cluster
                tell(f"{join} has not joined a cluster itself yet")  # another of `joins` may have
            elif answer.status == 401:
                tell(f"{join} does not accept this node's secret, or the clocks of the two differ by minutes")
            else:
                tell(f"{join} answered with status {answer.status}")
        except ConnectionFailed as error:
            tell(f"{join}: {error}")
        except (ValueError, msgspec.DecodeError):
            tell(f"{join} answered, and not as a node does")
    return None


def _proofs(keys: Keys | None) -> Iterator[dict[str, str]]:
    """Yield the request headers to try one after the other, until one is accepted."""
    if keys is None:
        yield {}
        return
    for older in (False, True):
        yield {"Authorization": authorization(keys, now_ms=time.time_ns() // 1_000_000, older=older)}
