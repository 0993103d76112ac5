"""A process that no cluster knows speaks on the ports of a node: it reaches no Raft, and ends nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from laminar.node.consensus.raft_frames import control_frame
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.transport import Channel, TcpAddress, Transport
from membership.catalog import CODE_VERSION
from raft.messages import AnyMessage, Heartbeat, Vote
from tests.node.attacks.victim import Victim, victim


@pytest.fixture(scope="module")
def attacked() -> Iterator[Victim]:
    with victim() as found:
        yield found


def _listening(attacked: Victim) -> list[TcpAddress]:
    """Every port of the node, as any program of this machine may read."""
    host = str(urlsplit(str(attacked.http.base_url)).hostname)
    wanted = socket.inet_aton(host)[::-1].hex().upper()
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [TcpAddress(host, int(port, 16)) for address, port in places if address == wanted]


@pytest.fixture
async def stranger(attacked: Victim) -> AsyncIterator[Transport]:
    """A process of the node `evil`, which the catalog does not know, with the cluster's public id."""
    cluster = bytes.fromhex(attacked.http.get("/v1/cluster").json()["cluster_id"])
    evil = Transport(
        cluster_id=lambda: cluster,
        node="evil",
        role=1,
        nonce=b"n" * 16,
        secrets=Keyring(),
        code_version=CODE_VERSION,
    )
    yield evil
    await evil.close()


@pytest.mark.parametrize("term", [2**64 - 1, 2**62 - 1, 2**40])
async def test_a_term_without_end_from_a_stranger(attacked: Victim, stranger: Transport, term: int) -> None:
    """One frame under a name that nobody knows: it ended every process, for ever, from the hard state."""
    record = attacked.http.post("/v1/topics/innocent/partitions/0/records", content=b"x")
    etag = attacked.http.get(record.headers["location"]).headers["etag"]
    cluster = stranger._cluster_id()
    assert cluster is not None

    for address in _listening(attacked):
        for group in (cluster, bytes.fromhex(etag.strip('"').split("/")[0])):
            for receiver in range(1, 9):
                head = (cluster, group, 2**20, receiver, 0, term)
                messages: list[AnyMessage] = [Heartbeat(*head, 0, 1), Vote(*head, 9, 9)]
                stranger.send(address, Channel.CONTROL, control_frame(messages))
    async with asyncio.timeout(60):
        while stranger.statistics().get("connections_made", 0) < 2:  # noqa: ASYNC110  # a counter
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)  # until what is under way is read; the node tells nobody of it

    assert attacked.unharmed()
    made = attacked.http.put(f"/v1/topics/made-after-{term}", json={"partitions": 1})
    assert 201 == made.status_code, made.text


async def test_frames_of_junk_end_their_connection_alone(attacked: Victim, stranger: Transport) -> None:
    for junk in (b"", b"\xff" * 100, b"\x02\x05\x00\x00\x00\x92\xc4\x01\x90\x90"):
        for address in _listening(attacked):
            stranger.send(address, Channel.BULK, [junk])
            stranger.send(address, Channel.CONTROL, [junk])
        await asyncio.sleep(0.05)

    assert attacked.unharmed()
