"""TLS between nodes: who shows no certificate of the node that it says it is speaks to no one."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from laminar.checksum import crc32c
from laminar.node.host.certificates import Certificates, TlsFiles
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.handshake import CHALLENGE_SIZE, Channel, Hello, Initiator
from laminar.node.transport.link import HEADER, FrameKind
from laminar.node.transport.transport import Limits, PeerLost, TcpAddress
from tests.certificates import Authority, Pair
from tests.node.transport.ends import CLUSTER, NO_PINGS, PATIENCE_S, End, Make, Proxy, get, soon

SECRET = b"s" * 16
# What TLS 1.3 adds to a record: its header, the kind of its content, a tag.
RECORD_BYTES = 5 + 1 + 16
# `tcpi_bytes_received` of the kernel's `struct tcp_info`.
BYTES_RECEIVED = slice(128, 136)


def received_bytes(sock: socket.socket) -> int:
    """Return how many bytes a connection has received."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED.stop)
    return int.from_bytes(info[BYTES_RECEIVED], sys.byteorder)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The CA of the cluster."""
    return Authority(tmp_path / "ca")


def certified(authority: Authority, node: str) -> Certificates:
    return Certificates(authority.files(authority.node(node)), node=node)


async def send_until_received(sender: End, to: TcpAddress, receiver: End) -> bytes:
    """Send until a frame arrives, as Raft does; return it."""
    async with asyncio.timeout(PATIENCE_S):
        while receiver.frames.empty():
            sender.transport.send(to, Channel.CONTROL, [b"frame"])
            await asyncio.sleep(0.02)
    return bytes((await get(receiver.frames))[2])


async def test_what_fits_a_record_is_sealed_once(authority: Authority, make: Make) -> None:
    """The header of a frame is no record of its own, and no part of one that all fit into."""
    a = await make("a", certificates=certified(authority, "a"), limits=NO_PINGS)
    b = await make("b", certificates=certified(authority, "b"), limits=NO_PINGS)
    a.transport.send(b.address, Channel.BULK, [b"first"])
    await get(b.frames)
    link = next(link for link in b.transport._connections.links if link.channel is Channel.BULK)
    assert link.transport is not None
    sock = link.transport.get_extra_info("socket")

    added = []
    for parts in ([bytes(8000)], [bytes(100), bytes(7000), bytes(900)], [bytes(40_000)]):
        before, size = received_bytes(sock), sum(map(len, parts))
        a.transport.send(b.address, Channel.BULK, parts, at_once=True)
        assert size == len((await get(b.frames))[2])
        added.append(received_bytes(sock) - before - size - HEADER.size - 4)

    assert [RECORD_BYTES, RECORD_BYTES, 4 * RECORD_BYTES] == added, (
        "a header of its own, and records of 16 KiB"
    )


async def test_frames_and_calls_pass_between_certified_nodes(authority: Authority, make: Make) -> None:
    """On all channels; a large message too."""
    a = await make("a", certificates=certified(authority, "a"))
    b = await make("b", certificates=certified(authority, "b"))

    async def answer(peer: object, method: str, payload: bytes) -> bytes:
        return payload[::-1]

    b.transport.on_call = answer
    large = os.urandom(3 << 20)

    assert a.transport.send(b.address, Channel.BULK, [large[:1000], large[1000:]])
    assert large == bytes((await get(b.frames))[2])
    assert large[::-1] == await a.transport.call(b.address, "turn", large, timeout=PATIENCE_S)
    assert b"frame" == await send_until_received(a, b.address, b)
    assert "a" == (await get(b.up)).node


async def test_a_node_with_the_certificate_of_another_is_refused(authority: Authority, make: Make) -> None:
    """Although it knows the secret, and its certificate is of the CA."""
    victim = await make("b", certificates=certified(authority, "b"))
    liar = await make("a", certificates=certified(authority, "c"))

    liar.transport.send(victim.address, Channel.CONTROL, [b"frame"])
    await soon(lambda: victim.count("refused_certificate") == 1)

    assert victim.frames.empty()
    assert [] == list(victim.transport._connections.peers)


async def test_nothing_is_sent_to_a_node_with_the_certificate_of_another(
    authority: Authority, make: Make
) -> None:
    """The dialling side compares, too: it sends neither its proof nor a frame."""
    liar = await make("b", certificates=certified(authority, "c"))
    victim = await make("a", certificates=certified(authority, "a"))

    victim.transport.send(liar.address, Channel.CONTROL, [b"frame"])
    await soon(lambda: victim.count("refused_certificate") == 1)

    assert liar.frames.empty()
    assert liar.up.empty()


@pytest.mark.parametrize("fault", ["another CA", "expired", "none", "a client's"])
async def test_a_bad_certificate_is_refused_counted_and_disturbs_no_other(
    authority: Authority, make: Make, tmp_path: Path, fault: str
) -> None:
    """Of another CA, expired, for clients only, or none at all."""
    good = await make("a", certificates=certified(authority, "a"))
    victim = await make("b", certificates=certified(authority, "b"))
    await send_until_received(good, victim.address, victim)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    make_pair: Callable[[], Pair] | None = {
        "another CA": partial(Authority(tmp_path / "other").node, "c"),
        "expired": partial(authority.node, "c", days=-1),
        "a client's": partial(authority.client, "c"),
    }.get(fault)
    if make_pair is not None:
        pair = make_pair()
        context.load_cert_chain(pair.certificate, pair.key)

    for _ in range(3):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            reader, writer = await asyncio.open_connection(*victim.address, ssl=context)
            writer.write(b"\0" * 100)
            if await asyncio.wait_for(reader.read(), PATIENCE_S) == b"":
                raise ConnectionError("ended")

    await soon(lambda: victim.count("refused_certificate") == 3)
    assert 0 == victim.count("unauthenticated")
    assert b"frame" == await send_until_received(good, victim.address, victim)
    assert 1 == victim.count("connections_accepted")
    assert victim.lost.empty()


async def test_our_own_bad_certificate_is_reported_here(
    authority: Authority, make: Make, tmp_path: Path
) -> None:
    """The peer refuses it after our side of the handshake of TLS 1.3 is over; the dialler pauses."""
    victim = await make("b", certificates=certified(authority, "b"))
    stranger = Authority(tmp_path / "other")
    pair = stranger.node("a")
    both = tmp_path / "both.pem"
    both.write_bytes(stranger.pem.read_bytes() + authority.pem.read_bytes())
    files = TlsFiles(str(pair.certificate), str(pair.key), str(both))
    liar = await make("a", certificates=Certificates(files, node="a"))

    liar.transport.send(victim.address, Channel.CONTROL, [b"frame"])

    await soon(lambda: liar.count("refused_by_peer") == 1)
    await soon(lambda: victim.count("refused_certificate") == 1)


async def test_a_node_without_tls_and_one_with_it_refuse_each_other(authority: Authority, make: Make) -> None:
    """At once, in both directions, and no frame passes."""
    plain = await make("a", limits=NO_PINGS)
    secured = await make("b", certificates=certified(authority, "b"), limits=NO_PINGS)

    plain.transport.send(secured.address, Channel.CONTROL, [b"frame"])
    await soon(lambda: secured.count("refused_tls") == 1)
    secured.transport.send(plain.address, Channel.CONTROL, [b"frame"])
    await soon(lambda: secured.count("refused_tls") + secured.count("connects_failed") >= 2)

    assert plain.frames.empty()
    assert secured.frames.empty()


async def test_the_secret_is_proved_inside(authority: Authority, make: Make) -> None:
    """A certificate of the cluster is not enough."""
    victim = await make("b", certificates=certified(authority, "b"))
    other = await make("a", certificates=certified(authority, "a"), secrets=Keyring(["another" * 4]))

    other.transport.send(victim.address, Channel.CONTROL, [b"frame"])
    await soon(lambda: other.count("refused_secret") == 1)

    assert victim.frames.empty()


@pytest.mark.parametrize("where", ["flip", "insert", "drop"])
async def test_who_sits_between_two_nodes_changes_no_frame(
    authority: Authority, make: Make, where: str
) -> None:
    """Bytes that a proxy changes, adds or takes away end the connection before they are a frame."""
    a = await make("a", certificates=certified(authority, "a"), limits=NO_PINGS)
    b = await make("b", certificates=certified(authority, "b"), limits=NO_PINGS)
    honest = [True]

    def change(data: bytes) -> list[bytes]:
        if honest[0]:
            return [data]
        middle = len(data) // 2
        return {
            "flip": [data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]],
            "insert": [frame(FrameKind.DATA, b"injected"), data],
            "drop": [data[: len(data) - 1]],
        }[where]

    proxy = Proxy(b.address, change)
    through = await proxy.start()
    assert b"frame" == await send_until_received(a, through, b)
    assert a.transport.send(through, Channel.CONTROL, [b"the last"])
    while b"the last" != bytes((await get(b.frames))[2]):
        pass  # what was sent before

    honest[0] = False
    assert a.transport.send(through, Channel.CONTROL, [b"changed on the way"])
    assert a.transport.send(through, Channel.CONTROL, [b"and again"])
    if where == "drop":
        await asyncio.sleep(0.1)
        assert a.transport.send(through, Channel.CONTROL, [b"after the gap"])
    await get(b.lost)

    assert b.frames.empty()
    await proxy.stop()


def frame(kind: FrameKind, payload: bytes) -> bytes:
    """A frame with a right checksum, as anyone can make it."""
    head = HEADER.pack(len(payload), kind, 0, 0, 0)
    return head + struct.pack("<I", crc32c(payload, crc32c(head))) + payload


async def test_certificates_change_without_a_lost_peer(authority: Authority, make: Make) -> None:
    """Connections go on with the old ones; new connections have the new ones, of a new CA at last."""
    mine, theirs = certified(authority, "a"), certified(authority, "b")
    a = await make("a", certificates=mine)
    b = await make("b", certificates=theirs)
    assert b"frame" == await send_until_received(a, b.address, b)

    authority.node("a")
    authority.node("b")
    assert mine.refresh()
    assert theirs.refresh()
    assert b"frame" == await send_until_received(a, b.address, b)

    async def answer(peer: object, method: str, payload: bytes) -> bytes:
        return payload

    b.transport.on_call = answer
    assert b"x" == await a.transport.call(b.address, "echo", b"x", timeout=PATIENCE_S)
    assert a.lost.empty()
    assert b.lost.empty()


async def test_a_certificate_that_is_not_of_the_new_ca_is_out(
    authority: Authority, make: Make, tmp_path: Path
) -> None:
    """A CA that is taken out of the file is not trusted by the next connection."""
    ca = authority.pem.read_bytes()
    theirs = certified(authority, "b")
    b = await make("b", certificates=theirs)
    newer = Authority(tmp_path / "newer")
    pair = newer.node("b")
    pair.key.replace(theirs.files.key)
    pair.certificate.replace(theirs.files.certificate)
    authority.pem.write_bytes(newer.pem.read_bytes())
    assert theirs.refresh()
    authority.pem.write_bytes(ca)
    both = tmp_path / "both.pem"
    both.write_bytes(ca + newer.pem.read_bytes())
    old = authority.node("a")
    files = TlsFiles(str(old.certificate), str(old.key), str(both))
    a = await make("a", certificates=Certificates(files, node="a"))

    a.transport.send(b.address, Channel.CONTROL, [b"frame"])

    await soon(lambda: b.count("refused_certificate") == 1)


async def test_connections_that_never_shake_hands_hold_nothing_for_long(
    authority: Authority, make: Make
) -> None:
    """Their number is bounded, and each is ended after the time for a handshake."""
    limits = Limits(connect_timeout_ms=400, unauthenticated=16)
    victim = await make("b", certificates=certified(authority, "b"), limits=limits)
    silent = [socket.create_connection(victim.address) for _ in range(50)]
    good = await make("a", certificates=certified(authority, "a"))

    assert b"frame" == await send_until_received(good, victim.address, victim)
    # The good one, too, may have been too late at first.
    await soon(lambda: victim.count("refused_tls") >= 50)
    for sock in silent:
        sock.setblocking(True)
        sock.settimeout(PATIENCE_S)
        try:
            assert b"" == sock.recv(1)
        except ConnectionResetError:
            pass
        sock.close()


async def test_a_call_to_a_node_that_is_refused_fails_as_not_sent(authority: Authority, make: Make) -> None:
    """So the caller may ask another."""
    liar = await make("b", certificates=certified(authority, "c"))
    a = await make("a", certificates=certified(authority, "a"))

    with pytest.raises(PeerLost) as caught:
        await a.transport.call(liar.address, "x", b"", timeout=PATIENCE_S)

    assert not caught.value.sent


async def test_a_hello_over_tls_without_a_proof_is_no_peer(authority: Authority, make: Make) -> None:
    """A certified process that does not know the secret gets no further than the reply."""
    victim = await make("b", certificates=certified(authority, "b"))
    context = certified(authority, "a").current.connect
    reader, writer = await asyncio.open_connection(*victim.address, ssl=context)
    hello = Hello(1, CLUSTER, "a", 1, b"n", Channel.CONTROL, b"c" * CHALLENGE_SIZE)
    payload = Initiator(hello, ()).hello
    writer.write(frame(FrameKind.HELLO, payload))
    await asyncio.wait_for(reader.readexactly(16), PATIENCE_S)
    writer.write(frame(FrameKind.PROOF, b""))

    await soon(lambda: victim.count("refused_secret") == 1)
    assert victim.up.empty()
    writer.close()
