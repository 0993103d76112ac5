"""Who is let in, and what ends a connection: secrets, clusters, unauthenticated, bytes that changed."""

from __future__ import annotations

import asyncio
import os
import struct

import msgspec
import pytest
from crc32c import crc32c

from laminar.node.host.log_rate_limit import LINES
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.dialer import BACK_OFF_S
from laminar.node.transport.handshake import HandshakeError, decode_hello, encode_hello
from laminar.node.transport.link import HEADER, FrameKind, Link
from laminar.node.transport.transport import Channel, Limits, Peer, PeerLost, ProtocolError
from tests.node.transport.ends import CLUSTER, PATIENCE_S, Make, Proxy, get, soon

OURS, OTHER = Keyring(["s" * 16]), Keyring(["t" * 16])


@pytest.mark.parametrize(("ours", "theirs"), [(OURS, OTHER), (Keyring(), OTHER), (OURS, Keyring())])
async def test_without_the_same_secret_nothing_passes(make: Make, ours: Keyring, theirs: Keyring) -> None:
    """Dropped and counted; also when only one side has one."""
    a, b = await make("a", secrets=ours), await make("b", secrets=theirs)

    a.transport.send(b.address, Channel.CONTROL, [b"let me in"])
    with pytest.raises(PeerLost):
        await a.transport.call(b.address, "hi", b"", timeout=PATIENCE_S)

    await soon(lambda: a.count("refused_secret") == 2)
    assert b.frames.empty()
    assert b.count("connections_accepted") == 0


async def test_a_wrong_secret_is_said_once_and_not_tried_all_the_time(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A person must change something: till then one clear line is enough, and few connections."""
    a, b = await make("a", secrets=OURS), await make("b", secrets=OTHER)

    began_s = asyncio.get_running_loop().time()
    with pytest.raises(PeerLost, match="authentication failed: secrets differ"):
        await a.transport.call(b.address, "hi", b"", timeout=PATIENCE_S)
    for _ in range(50):
        with pytest.raises(PeerLost):
            await a.transport.call(b.address, "hi", b"", timeout=PATIENCE_S)
        await asyncio.sleep(0.01)

    lines = [record.getMessage() for record in caplog.records if "secrets differ" in record.getMessage()]
    host, port = b.address
    # One, unless this took so long that it was tried again.
    most = 1 + int((asyncio.get_running_loop().time() - began_s) / BACK_OFF_S)
    assert {f"connection to {host}:{port} (call): authentication failed: secrets differ"} == set(lines)
    assert 1 <= a.count("refused_secret") <= most
    assert len(lines) <= most


async def test_a_member_with_a_program_that_is_too_old_is_told_so(make: Make) -> None:
    """Whoever connects: it would get messages that it cannot read."""
    old = await make("old", code_version=2)
    new = await make("new", code_version=3, enabled=3)

    with pytest.raises(
        PeerLost, match=r"refused by the peer: .*'old' is too old: .* version 2, .* enabled 3"
    ):
        await old.transport.call(new.address, "hi", b"", timeout=PATIENCE_S)
    with pytest.raises(PeerLost, match="'old' is too old"):
        await new.transport.call(old.address, "hi", b"", timeout=PATIENCE_S)

    assert new.count("refused_version") == 2
    assert new.count("connections_accepted") == old.count("connections_accepted") == 0


@pytest.mark.parametrize(("cluster", "code_version"), [(None, 2), (CLUSTER, 3), (CLUSTER, 4)])
async def test_who_knows_what_is_enabled_is_let_in_and_who_joins_may_ask(
    make: Make, cluster: bytes | None, code_version: int
) -> None:
    """A joining node gets its refusal as an answer, which ends it."""
    a = await make("a", cluster=cluster, code_version=code_version)
    b = await make("b", code_version=3, enabled=3)
    b.transport.on_call = say_well_come

    assert b"well come" == await a.transport.call(b.address, "join", b"", timeout=PATIENCE_S)


async def say_well_come(peer: Peer, method: str, payload: bytes) -> bytes:
    """Answer any call."""
    return b"well come"


def test_a_hello_of_a_newer_program_is_read_and_one_of_the_first_has_code_version_1() -> None:
    """New fields go last."""
    first = [1, CLUSTER, "n", 0, b"n" * 16, Channel.CALL, b"x" * 32, b"", b""]

    assert decode_hello(msgspec.msgpack.encode(first)).code_version == 1
    assert decode_hello(msgspec.msgpack.encode([*first, 7, b"store", "unknown"])).code_version == 7
    with pytest.raises(HandshakeError, match="speaks version 2, we 1"):
        decode_hello(msgspec.msgpack.encode([2, *first[1:]]))


async def test_an_initiator_that_skips_the_proof_is_dropped(make: Make) -> None:
    """The acceptor checks for itself; it doesn't rely on the other side's leaving."""
    b = await make("b")
    liar = await make("a", secrets=OTHER)
    # It takes any answer for a right one, and goes on as if it had shown the secret.
    hello = liar.transport.hello(Channel.CONTROL)

    class Owner:
        """Greets and sends a wrong proof."""

        gone = asyncio.Event()

        def link_made(self, link: Link) -> None:
            link.send_at_once(FrameKind.HELLO, encode_hello(hello))

        def link_frame(self, link: Link, kind: int, payload: memoryview) -> None:
            link.send_at_once(FrameKind.PROOF, b"x" * 32)

        def link_lost(self, link: Link, error: Exception | None) -> None:
            self.gone.set()

    owner = Owner()
    loop = asyncio.get_running_loop()
    link = Link(owner, loop, memoryview(bytearray(65536)), channel=Channel.CONTROL, queue_limit_bytes=1000)
    await loop.create_connection(lambda: link, *b.address)

    await asyncio.wait_for(owner.gone.wait(), PATIENCE_S)
    assert (b.count("refused_secret"), b.count("connections_accepted"), b.count("unauthenticated")) == (
        1,
        0,
        0,
    )


async def test_another_cluster_is_refused_and_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Two clusters with one secret must not mix."""
    a, b = await make("a", cluster=b"d" * 16), await make("b")

    with pytest.raises(PeerLost, match="refused by the peer"):
        await a.transport.call(b.address, "hi", b"", timeout=PATIENCE_S)

    assert (b.count("refused_cluster"), a.count("refused_refused")) == (1, 1)
    assert f"is of cluster {(b'd' * 16).hex()}, we are of {CLUSTER.hex()}" in caplog.text


async def test_a_joining_node_may_call_and_nothing_else(make: Make) -> None:
    """It has no cluster id yet, so it can't be a member that votes."""
    a, b = await make("a", cluster=None), await make("b")

    async def answer(peer: Peer, method: str, payload: bytes) -> bytes:
        return b"welcome " + peer.node.encode()

    b.transport.on_call = answer

    assert await a.transport.call(b.address, "join", b"", timeout=PATIENCE_S) == b"welcome a"
    a.transport.send(b.address, Channel.CONTROL, [b"vote"])
    await soon(lambda: b.count("refused_cluster") == 1)
    assert b.frames.empty()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64, b"\0" * 16])
async def test_a_stranger_who_speaks_something_else_is_dropped(make: Make, noise: bytes) -> None:
    """At once, and without reserving memory for the length it claims."""
    b = await make("b")
    reader, writer = await asyncio.open_connection(*b.address)

    writer.write(noise)

    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), PATIENCE_S)
    writer.close()
    await soon(lambda: b.count("unauthenticated") == 0)


async def test_a_silent_stranger_is_dropped_in_time_and_too_many_at_once(make: Make) -> None:
    """Connections that don't greet can't use up the node."""
    patient = await make("b", limits=Limits(connect_timeout_ms=3_600_000, unauthenticated=3))
    strict = await make("c", limits=Limits(connect_timeout_ms=100, unauthenticated=3))
    many = [await asyncio.open_connection(*patient.address) for _ in range(5)]
    few = [await asyncio.open_connection(*strict.address) for _ in range(3)]

    for reader, _ in [*many[3:], *few]:
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    assert (patient.count("refused_unauthenticated"), patient.count("refused_late")) == (2, 0)
    assert (strict.count("refused_unauthenticated"), strict.count("refused_late")) == (0, 3)
    for _, writer in [*many, *few]:
        writer.close()


async def test_a_changed_byte_ends_the_connection(make: Make) -> None:
    """Every frame carries a checksum; the peer's loss is news like any other."""
    b = await make("b")
    damage = asyncio.Event()

    def change(data: bytes) -> list[bytes]:
        return [data[:-1] + bytes([data[-1] ^ 1])] if damage.is_set() else [data]

    proxy = Proxy(b.address, change)
    address = await proxy.start()
    a = await make("a")
    a.transport.send(address, Channel.CONTROL, [b"right"])
    assert bytes((await get(b.frames))[2]) == b"right"

    damage.set()
    a.transport.send(address, Channel.CONTROL, [b"wrong"])

    assert await get(b.lost) == a.peer
    assert b.frames.empty()
    await proxy.stop()


async def test_a_repeated_frame_ends_the_connection(make: Make) -> None:
    """Frames are numbered: what TCP can't do, a broken box in between can."""
    b = await make("b")
    again = asyncio.Event()
    proxy = Proxy(b.address, lambda data: [data, data] if again.is_set() else [data])
    address = await proxy.start()
    a = await make("a")
    a.transport.send(address, Channel.CONTROL, [b"first"])
    await get(b.frames)

    again.set()
    a.transport.send(address, Channel.CONTROL, [b"twice"])

    assert bytes((await get(b.frames))[2]) == b"twice"
    assert await get(b.lost) == a.peer
    assert b.frames.empty()
    await proxy.stop()


async def test_a_handler_that_finds_a_breach_of_protocol_ends_the_connection(make: Make) -> None:
    """The peer's mistake is counted, and is the end of that connection only."""
    a, b = await make("a"), await make("b")

    def refuse(peer: Peer, channel: Channel, payload: memoryview) -> None:
        raise ProtocolError("a frame that can't be")

    b.transport.on_frame = refuse
    a.transport.send(b.address, Channel.CONTROL, [b"nonsense"])

    assert await get(a.lost) == b.peer
    assert b.count("protocol_errors") == 1


async def raw_hello(address: tuple[str, int], hello: bytes) -> bytes:
    """What comes back for a hello of these bytes."""
    reader, writer = await asyncio.open_connection(*address)
    head = HEADER.pack(len(hello), FrameKind.HELLO, 0, 0, 0)
    writer.write(head + struct.pack("<I", crc32c(hello, crc32c(head))) + hello)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return answer


@pytest.mark.parametrize("name", [b"\xff\xfe", b"", b"a\nb", b"\x1b[31m", b"x" * 64], ids=repr)
async def test_what_is_no_name_of_a_node_is_refused(make: Make, name: bytes) -> None:
    """Also bytes that are no text: a refusal that is counted, no exception in the loop."""
    b = await make("b")
    hello = encode_hello(msgspec.structs.replace(b.transport.hello(Channel.CONTROL), node="NODE"))
    hello = hello.replace(b"\xa4NODE", bytes([0xD9, len(name)]) + name)

    assert b"" == await raw_hello(b.address, hello)
    assert 1 == b.count("refused_malformed")


async def test_who_uses_our_own_name_over_tcp_is_refused(make: Make) -> None:
    """The processes of a node meet on its Unix sockets; what they say is believed by their name."""
    a, b = await make("b"), await make("b")

    a.transport.send(b.address, Channel.CONTROL, [b"I am you"])

    await soon(lambda: b.count("refused_node") == 1)
    assert b.frames.empty()


@pytest.mark.parametrize(("user", "heard"), [(os.getuid(), True), (None, True), (54_321, False), (-1, False)])
async def test_without_a_secret_another_users_process_is_not_heard(
    make: Make, monkeypatch: pytest.MonkeyPatch, user: int | None, heard: bool
) -> None:
    """As on a Unix socket; where the kernel cannot tell, all are heard as before."""
    monkeypatch.setattr("laminar.node.transport.connections.user_at_other_end", lambda sock: user)
    a, b = await make("a", secrets=Keyring()), await make("b", secrets=Keyring())

    a.transport.send(b.address, Channel.CONTROL, [b"hi"])

    await soon(lambda: b.count("refused_user" if not heard else "connections_accepted") == 1)


async def test_the_acceptor_counts_and_says_that_a_secret_is_wrong(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The one who knocks sees it first and leaves: else nobody here would ever know that someone guesses."""
    a, b = await make("a", secrets=OURS), await make("b", secrets=OTHER)

    a.transport.send(b.address, Channel.CONTROL, [b"let me in"])

    await soon(lambda: b.count("refused_secret") == 1)
    assert "may have another secret" in caplog.text


async def test_strangers_cannot_fill_the_log(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A few lines a minute, and their number with the next."""
    b = await make("b")
    for _ in range(40):
        await raw_hello(b.address, b"\xc1")

    assert 40 == b.count("refused_malformed")
    assert LINES == caplog.text.count("connection refused")
