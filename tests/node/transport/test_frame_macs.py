"""Frames without TLS are bound to their connection: what is added, changed, repeated or reordered ends it."""

from __future__ import annotations

import asyncio
import struct

import msgspec
import pytest
from crc32c import crc32c

from laminar.node.secret.keyring import Keyring
from laminar.node.secret.keys import KEYS_SINCE, Keys
from laminar.node.transport.frame_check import MAC_BYTES, FrameMac
from laminar.node.transport.handshake import Transcript, encode_hello, encode_reply
from laminar.node.transport.link import HEADER, FrameKind
from laminar.node.transport.transport import Channel, PeerLost, TcpAddress
from tests.node.transport.ends import NO_PINGS, PATIENCE_S, End, Make, Proxy, get, soon

HEAD = HEADER.size + MAC_BYTES


def frames(data: bytes) -> list[bytes]:
    """The whole sealed frames in some bytes, which hold nothing else."""
    found = []
    while data:
        size = HEAD + HEADER.unpack_from(data)[0]
        found.append(data[:size])
        data = data[size:]
    return found


class Neighbour:
    """A wire between two nodes that passes the handshake on, and then does what it likes."""

    def __init__(self, act: str) -> None:
        self._act = act
        self.acts = False
        self.taken: list[bytes] = []

    def change(self, data: bytes) -> list[bytes]:
        """What travels on in place of these bytes."""
        if not self.acts:
            return [data]
        seen = frames(data)
        self.taken += seen
        match self._act:
            case "injects":
                # As a node of before would send it, and numbered as the receiver expects it.
                number = HEADER.unpack_from(seen[0])[4]
                head = HEADER.pack(8, FrameKind.DATA, 0, 0, number)
                checksum = struct.pack("<I", crc32c(b"injected", crc32c(head)))
                return [head + checksum + bytes(MAC_BYTES - len(checksum)) + b"injected", data]
            case "changes":
                return [data[:-1] + bytes([data[-1] ^ 1])]
            case "changes the kind":
                return [data[:4] + bytes([FrameKind.PING]) + data[5:]]
            case "repeats":
                return [seen[0], *seen]
            case "repeats, renumbered":
                number = HEADER.unpack_from(seen[0])[4] + 1
                return [seen[0], seen[0][:8] + struct.pack("<I", number) + seen[0][12:]]
            case "reorders":
                return list(reversed(seen))
            case "leaves out":
                return seen[1:]
        raise AssertionError(self._act)


async def two(make: Make, **settings: object) -> tuple[End, End]:
    """Two new nodes that share a secret, and send nothing by themselves."""
    return (
        await make("a", code_version=KEYS_SINCE, limits=NO_PINGS, **settings),
        await make("b", code_version=KEYS_SINCE, limits=NO_PINGS, **settings),
    )


@pytest.mark.parametrize(
    "act",
    ["injects", "changes", "changes the kind", "repeats", "repeats, renumbered", "reorders", "leaves out"],
)
async def test_a_neighbour_behind_the_handshake(make: Make, act: str) -> None:
    """It passed the proofs on, so both sides believe each other; none of its frames is heard."""
    a, b = await two(make)
    neighbour = Neighbour(act)
    proxy = Proxy(b.address, neighbour.change)
    address = await proxy.start()
    a.transport.send(address, Channel.CONTROL, [b"before"])
    assert b"before" == bytes((await get(b.frames))[2])

    neighbour.acts = True
    for payload in (b"first", b"second"):  # in one turn of the loop, so in one piece
        a.transport.send(address, Channel.CONTROL, [payload])

    lost = await get(b.lost)
    await proxy.stop()
    assert a.peer == lost and 1 == b.count("frames_forged")
    heard = [bytes(b.frames.get_nowait()[2]) for _ in range(b.frames.qsize())]
    # What is right in its place is heard, and once; "changes" means the second frame.
    assert heard == ([b"first"] if act.startswith("repeats") or act == "changes" else [])
    assert len(neighbour.taken) == 2


async def test_a_frame_of_another_connection_is_none_of_this(make: Make) -> None:
    """Of the same two processes, under the same secret, with the same number."""
    a, b = await two(make)
    taken: list[bytes] = []
    replaces = asyncio.Event()

    def keep(data: bytes) -> list[bytes]:
        taken.append(data)
        return [data]

    one = Proxy(b.address, keep)
    other = Proxy(b.address, lambda data: [taken[-1] if replaces.is_set() else data])
    address, another = await one.start(), await other.start()
    for place in (address, another):
        a.transport.send(place, Channel.CONTROL, [b"0"])
        await get(b.frames)
    a.transport.send(address, Channel.CONTROL, [b"1"])
    assert b"1" == bytes((await get(b.frames))[2])

    replaces.set()
    a.transport.send(another, Channel.CONTROL, [b"2"])

    lost = await get(b.lost)
    await one.stop()
    await other.stop()
    assert a.peer == lost
    assert b.frames.empty() and 1 == b.count("frames_forged")


async def test_frames_of_all_sizes_and_answers_pass(make: Make) -> None:
    """In both directions; also those that wait for the handshake, which decides on their check."""
    a, b = await two(make)
    sizes = [0, 1, 4095, 4097, (16 << 10) - HEAD, 300_000, 1 << 20, 5]
    for number, size in enumerate(sizes):
        assert a.transport.send(b.address, Channel.BULK, [bytes([number]) * size])

    async def echo(peer: object, method: str, payload: bytes) -> bytes:
        return payload

    b.transport.on_call = echo
    assert b"x" * 100_000 == await a.transport.call(b.address, "m", b"x" * 100_000, timeout=PATIENCE_S)

    for number, size in enumerate(sizes):
        assert bytes([number]) * size == bytes((await get(b.frames))[2])
    assert 2 == b.count("connections_sealed") == a.count("connections_sealed")


@pytest.mark.parametrize(
    ("older", "secrets"), [(KEYS_SINCE - 1, Keyring(["s" * 16])), (KEYS_SINCE, Keyring())]
)
async def test_an_older_node_and_one_without_a_secret_are_heard_as_before(
    make: Make, older: int, secrets: Keyring
) -> None:
    """While a cluster is upgraded the older node proves the secret itself, and has checksums only."""
    old = await make("old", code_version=older, secrets=secrets)
    new = await make("new", code_version=KEYS_SINCE, secrets=secrets)
    for one, other in ((old, new), (new, old)):
        one.transport.send(other.address, Channel.CONTROL, [b"hi"])
        assert b"hi" == bytes((await get(other.frames))[2])
    assert 0 == old.count("connections_sealed") == new.count("connections_sealed")


async def test_a_neighbour_cannot_make_two_new_nodes_speak_as_older_ones(make: Make) -> None:
    """The proofs cover the version that each side has said."""
    a, b = await two(make)

    def downgrade(data: bytes) -> list[bytes]:
        length = HEADER.unpack_from(data)[0]
        hello = bytearray(data[16 : 16 + length])
        if HEADER.unpack_from(data)[1] != FrameKind.HELLO:
            return [data]
        assert hello[-3] == KEYS_SINCE  # before the store id, which is empty: two bytes
        hello[-3] = KEYS_SINCE - 1
        head = data[: HEADER.size]
        return [head + struct.pack("<I", crc32c(hello, crc32c(head))) + hello + data[16 + length :]]

    proxy = Proxy(b.address, downgrade)
    address = await proxy.start()
    with pytest.raises(PeerLost, match="secrets differ"):
        await a.transport.call(address, "hi", b"", timeout=PATIENCE_S)
    assert 0 == b.count("connections_accepted")
    await proxy.stop()


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (["old"], ["old", "new"], True),
        (["old", "new"], ["new", "old"], True),
        (["new", "old"], ["new"], True),
        (["old"], ["new"], False),
    ],
)
@pytest.mark.parametrize("code_version", [KEYS_SINCE - 1, KEYS_SINCE])
async def test_nodes_meet_at_each_step_of_a_change_of_the_secret(
    make: Make, one: list[str], other: list[str], meet: bool, code_version: int
) -> None:
    """Whoever connects. Two steps at a time are too many."""
    long = [[f"the {name} secret, of any length" for name in names] for names in (one, other)]
    a = await make("a", code_version=code_version, secrets=Keyring(long[0]))
    b = await make("b", code_version=code_version, secrets=Keyring(long[1]))
    for first, second in ((a, b), (b, a)):
        first.transport.send(second.address, Channel.CONTROL, [b"hi"])
        if meet:
            assert b"hi" == bytes((await get(second.frames))[2])
    if not meet:
        await soon(lambda: min(a.count("refused_secret"), b.count("refused_secret")) >= 1)
        assert a.frames.empty() and b.frames.empty()


async def test_who_has_a_nodes_address_and_not_its_secret_gets_nothing(make: Make) -> None:
    """Not a frame, and no proof but of this one handshake: the connection ends before any is sent."""
    a = await make("a", code_version=KEYS_SINCE)
    heard = bytearray()

    async def thief(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(65536))
        # Its own hello, with a proof that it made up.
        liar = a.transport.hello(Channel.CONTROL)
        transcript = Transcript(b"", b"", derived=True)
        hello = encode_hello(msgspec.structs.replace(liar, node="b"))
        reply = encode_reply(hello, transcript.acceptor_proof(Keys(b"a guess of sixteen")))
        head = HEADER.pack(len(reply), FrameKind.REPLY, 0, 0, 0)
        writer.write(head + struct.pack("<I", crc32c(reply, crc32c(head))) + reply)
        heard.extend(await reader.read())
        writer.close()

    server = await asyncio.start_server(thief, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(PeerLost, match="secrets differ"):
        await a.transport.call(TcpAddress(host, port), "told", b"the payload", timeout=PATIENCE_S)
    server.close()
    await server.wait_closed()
    assert b"the payload" not in heard and 1 == heard.count(b"\x01\0\0\0\0\0\0\0")


def test_no_two_frames_have_one_mac() -> None:
    """The number is no part of the payload: it is counted on both sides, in 64 bits."""
    sender, receiver = FrameMac(b"k" * 32), FrameMac(b"k" * 32)
    macs = {sender.of(b"head", (b"pay", b"load")) for _ in range(3)}
    assert 3 == len(macs)
    assert {receiver.of(b"head", (b"payload",)) for _ in range(3)} == macs
