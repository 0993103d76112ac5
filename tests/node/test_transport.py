"""Messages between processes over real sockets: delivery, bounds, greetings, calls, news of a loss."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from laminar.node.handshake import encode_hello
from laminar.node.line import FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_s
from laminar.node.link import HEADER_SIZE, FrameKind, Link
from laminar.node.transport import (
    Address,
    CallTimeout,
    Channel,
    Limits,
    Peer,
    PeerLost,
    ProtocolError,
    RemoteError,
    TcpAddress,
    Transport,
    UnixAddress,
)

CLUSTER = b"c" * 16
# How long tests wait for what should come at once.
PATIENCE_S = 30.0
QUICK = Limits(ping_interval_ms=40, silent_pings=3, connect_timeout_ms=30_000)
# Nothing is sent but what a test sends, and silence tells nothing.
NO_PINGS = Limits(ping_interval_ms=3_600_000)
ROOT = Path(__file__).resolve().parents[2]


class End:
    """A transport that serves on a TCP port, and what it was told."""

    def __init__(self, transport: Transport, address: TcpAddress) -> None:
        self.transport = transport
        self.address = address
        self.frames: asyncio.Queue[tuple[Peer, Channel, memoryview]] = asyncio.Queue()
        self.lost: asyncio.Queue[Peer | Address] = asyncio.Queue()
        self.up: asyncio.Queue[Peer] = asyncio.Queue()
        transport.on_frame = lambda peer, channel, payload: self.frames.put_nowait((peer, channel, payload))
        transport.on_lost = self.lost.put_nowait
        transport.on_up = self.up.put_nowait

    @property
    def peer(self) -> Peer:
        """What others call this end."""
        return Peer(self.transport.node, self.transport.role, self.transport.nonce)

    def count(self, name: str) -> int:
        """One of the statistics."""
        return self.transport.statistics().get(name, 0)


T = TypeVar("T")
Make = Callable[..., Awaitable[End]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Make ends; all are closed when the test ends."""
    ends: list[End] = []

    async def make_one(
        node: str,
        *,
        role: int = 1,
        secret: bytes | None = b"s" * 16,
        cluster: bytes | None = CLUSTER,
        limits: Limits | None = None,
        nonce: bytes | None = None,
        listen: socket.socket | None = None,
    ) -> End:
        transport = Transport(
            cluster_id=lambda: cluster,
            node=node,
            role=role,
            nonce=nonce or os.urandom(16),
            secret=secret,
            limits=limits,
            rng=random.Random(1),
        )
        with listen or socket.create_server(("127.0.0.1", 0)) as sock:
            await transport.serve_tcp(sock)
            end = End(transport, TcpAddress("127.0.0.1", sock.getsockname()[1]))
        ends.append(end)
        return end

    yield make_one
    for end in ends:
        await end.transport.close(timeout=0.2)


async def soon(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that nothing announces."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for is a counter, not an event
            await asyncio.sleep(0.005)


async def get(queue: asyncio.Queue[T]) -> T:
    """The next item, in time."""
    return await asyncio.wait_for(queue.get(), PATIENCE_S)


class Proxy:
    """A TCP connection through us: `change(bytes)` says what travels on, in which pieces."""

    def __init__(self, target: TcpAddress, change: Callable[[bytes], list[bytes]]) -> None:
        self._target = target
        self._change = change
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> TcpAddress:
        """Where to connect to."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return TcpAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers += [writer, far_writer]
        await asyncio.gather(
            self._pump(reader, far_writer, self._change), self._pump(far_reader, writer, lambda data: [data])
        )

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        change: Callable[[bytes], list[bytes]],
    ) -> None:
        try:
            while data := await reader.read(65536):
                for piece in change(data):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        writer.close()

    async def stop(self) -> None:
        """End every connection."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.02)


# ---- frames


async def test_a_frame_arrives_whole_with_its_sender_and_channel(make: Make) -> None:
    """Its parts are one payload at the other end."""
    a, b = await make("a", role=2), await make("b")

    assert a.transport.send(b.address, Channel.CONTROL, [b"one", bytearray(b"two"), memoryview(b"three")])

    peer, channel, payload = await get(b.frames)
    assert (peer, channel, bytes(payload)) == (a.peer, Channel.CONTROL, b"onetwothree")
    assert (peer.node, peer.role) == ("a", 2)


async def test_frames_of_one_channel_arrive_in_order(make: Make) -> None:
    """Sizes around every border: small, joined, bigger than the shared buffer, empty."""
    a, b = await make("a"), await make("b")
    sizes = [0, 1, 4095, 4096, 4097, 16 << 10, (16 << 10) - HEADER_SIZE, 300_000, 5, 1 << 20, 0, 70_000]
    sent = [os.urandom(size) for size in sizes]

    for payload in sent:
        assert a.transport.send(b.address, Channel.BULK, [payload[:10], payload[10:]])

    assert [bytes((await get(b.frames))[2]) for _ in sent] == sent


async def test_frames_cut_anywhere_arrive_whole(make: Make) -> None:
    """TCP keeps no borders: every piece of every size must do."""
    b = await make("b")
    rng = random.Random(7)

    def cut(data: bytes) -> list[bytes]:
        pieces = []
        while data:
            size = rng.choice([1, 2, 3, 7, 15, 16, 17, 40, 5000])
            pieces.append(data[:size])
            data = data[size:]
        return pieces

    proxy = Proxy(b.address, cut)
    address = await proxy.start()
    a = await make("a")
    sent = [rng.randbytes(rng.choice([0, 1, 5, 16, 30, 200, 20_000])) for _ in range(200)]

    for payload in sent:
        assert a.transport.send(address, Channel.CONTROL, [payload])

    assert [bytes((await get(b.frames))[2]) for _ in sent] == sent
    await proxy.stop()


async def test_a_received_frame_may_be_kept(make: Make) -> None:
    """Neither a small frame nor a big one is overwritten by the next."""
    a, b = await make("a"), await make("b")
    for number in range(50):
        a.transport.send(b.address, Channel.BULK, [bytes([number]) * (100 if number % 2 else 200_000)])

    kept = [(await get(b.frames))[2] for _ in range(50)]

    assert [set(payload.tobytes()) for payload in kept] == [{number} for number in range(50)]


async def test_a_big_frame_lies_in_a_buffer_of_its_own(make: Make) -> None:
    """It is received there, not copied: the buffer is as long as the payload."""
    a, b = await make("a"), await make("b")

    a.transport.send(b.address, Channel.BULK, [os.urandom(1 << 20)])

    payload = (await get(b.frames))[2]
    assert isinstance(payload.obj, bytearray)
    assert len(payload.obj) == 1 << 20


async def test_a_frame_of_64_mib_passes(make: Make) -> None:
    """The largest there is."""
    a, b = await make("a"), await make("b")
    payload = bytes(64 << 20)

    assert a.transport.send(b.address, Channel.BULK, [payload])

    assert len((await get(b.frames))[2]) == 64 << 20


async def test_both_ends_use_one_connection_per_channel_and_direction(make: Make) -> None:
    """However many frames are sent."""
    a, b = await make("a"), await make("b")
    for _ in range(20):
        for channel in (Channel.CONTROL, Channel.BULK):
            a.transport.send(b.address, channel, [b"x"])
            await get(b.frames)

    assert (a.count("connections_made"), b.count("connections_accepted")) == (2, 2)


async def test_frames_of_one_turn_leave_in_one_write(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred heartbeats cost one call of the kernel."""
    a, b = await make("a", limits=NO_PINGS), await make("b", limits=NO_PINGS)
    a.transport.send(b.address, Channel.CONTROL, [b"first"])
    await get(b.frames)
    link = next(link for link in a.transport._connections.links if link.established)
    writes: list[int] = []
    real = link.transport
    assert real is not None
    forward = real.writelines

    class Counting:
        """The transport, counting."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def writelines(self, parts: list[bytes]) -> None:
            writes.append(len(parts))
            forward(parts)

    monkeypatch.setattr(link, "transport", Counting())
    big = bytes(100_000)
    for number in range(100):
        a.transport.send(b.address, Channel.CONTROL, [b"small", big] if number == 50 else [b"small"])
    for _ in range(100):
        await get(b.frames)

    assert writes == [3]  # what stands before the big part, the part itself, what stands behind it


async def test_unix_sockets_carry_the_same(make: Make) -> None:
    """Between processes of one node, by an abstract name."""
    a, b = await make("a", role=1), await make("a", role=2)
    name = f"laminar-test-{uuid.uuid4().hex}"
    await b.transport.serve_unix(name)

    assert a.transport.send(UnixAddress(name), Channel.BULK, [os.urandom(300_000)])

    assert len((await get(b.frames))[2]) == 300_000


# ---- bounds


async def test_a_full_bulk_queue_drops_and_control_still_passes(make: Make) -> None:
    """The receiver stops reading BULK: its sender's queue fills, then frames are dropped; CONTROL goes on."""
    limits = Limits(bulk_queue_bytes=4 << 20)
    a, b = await make("a", limits=limits), await make("b")
    a.transport.send(b.address, Channel.BULK, [b"first"])
    await get(b.frames)
    b.transport.pause_bulk()

    taken = 0
    while a.transport.send(b.address, Channel.BULK, [bytes(100_000)]):
        taken += 1
        await asyncio.sleep(0)
        assert taken < 1000
    assert a.transport.queued_bytes(b.address, Channel.BULK) <= limits.bulk_queue_bytes
    assert a.count("frames_dropped") == 1

    a.transport.send(b.address, Channel.CONTROL, [b"acknowledged"])
    assert bytes((await get(b.frames))[2]) == b"acknowledged"

    b.transport.resume_bulk()
    for _ in range(taken):
        assert len((await get(b.frames))[2]) == 100_000
    assert a.transport.send(b.address, Channel.BULK, [b"again"])


async def test_pitfall_43_both_sides_over_their_receive_budget_make_progress(make: Make) -> None:
    """Each stopped reading BULK and sends BULK: acknowledgements pass, and nothing waits for ever."""
    limits = Limits(bulk_queue_bytes=2 << 20)
    a, b = await make("a", limits=limits), await make("b", limits=limits)
    for one, other in ((a, b), (b, a)):
        one.transport.pause_bulk()
        for _ in range(100):
            other.transport.send(one.address, Channel.BULK, [bytes(100_000)])
            await asyncio.sleep(0)

    for one, other in ((a, b), (b, a)):
        assert one.transport.send(other.address, Channel.CONTROL, [b"acknowledged"])
        peer, channel, payload = await get(other.frames)
        while channel is not Channel.CONTROL:
            peer, channel, payload = await get(other.frames)
        assert (peer, bytes(payload)) == (one.peer, b"acknowledged")

    for one in (a, b):
        one.transport.resume_bulk()
        await get(one.frames)


async def test_a_frame_bigger_than_the_queue_passes_when_the_queue_is_empty(make: Make) -> None:
    """Else it could never be sent."""
    a, b = await make("a", limits=Limits(bulk_queue_bytes=1000)), await make("b")

    assert a.transport.send(b.address, Channel.BULK, [bytes(5000)])
    assert not a.transport.send(b.address, Channel.BULK, [bytes(5000)])

    assert len((await get(b.frames))[2]) == 5000


# ---- greetings


@pytest.mark.parametrize(("ours", "theirs"), [(b"s" * 16, b"t" * 16), (None, b"t" * 16), (b"s" * 16, None)])
async def test_without_the_same_secret_nothing_passes(
    make: Make, ours: bytes | None, theirs: bytes | None
) -> None:
    """Dropped and counted; also when only one side has one."""
    a, b = await make("a", secret=ours), await make("b", secret=theirs)

    a.transport.send(b.address, Channel.CONTROL, [b"let me in"])
    with pytest.raises(PeerLost):
        await a.transport.call(b.address, "hi", b"", timeout=PATIENCE_S)

    await soon(lambda: a.count("refused_secret") == 2)
    assert b.frames.empty()
    assert b.count("connections_accepted") == 0


async def test_an_initiator_that_skips_the_proof_is_dropped(make: Make) -> None:
    """The acceptor checks for itself; it doesn't rely on the other side's leaving."""
    b = await make("b")
    liar = await make("a", secret=b"t" * 16)
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
    assert (b.count("refused_secret"), b.count("connections_accepted"), b.count("strangers")) == (1, 0, 0)


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
    await soon(lambda: b.count("strangers") == 0)


async def test_a_silent_stranger_is_dropped_in_time_and_too_many_at_once(make: Make) -> None:
    """Connections that don't greet can't use up the node."""
    patient = await make("b", limits=Limits(connect_timeout_ms=3_600_000, strangers=3))
    strict = await make("c", limits=Limits(connect_timeout_ms=100, strangers=3))
    many = [await asyncio.open_connection(*patient.address) for _ in range(5)]
    few = [await asyncio.open_connection(*strict.address) for _ in range(3)]

    for reader, _ in [*many[3:], *few]:
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    assert (patient.count("refused_strangers"), patient.count("refused_late")) == (2, 0)
    assert (strict.count("refused_strangers"), strict.count("refused_late")) == (0, 3)
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


# ---- calls


async def answer_all(peer: Peer, method: str, payload: bytes) -> bytes:
    """The calls that the tests make."""
    if method == "refuse":
        raise RemoteError("not_leader", "ask b")
    if method == "break":
        raise ValueError("oh no")
    if method == "sleep":
        await asyncio.sleep(float(payload))
    return method.encode() + b":" + payload


async def test_calls_are_answered_concurrently_and_each_gets_its_own_answer(make: Make) -> None:
    """A slow one holds up nobody."""
    a, b = await make("a"), await make("b")
    go_on = asyncio.Event()

    async def answer(peer: Peer, method: str, payload: bytes) -> bytes:
        if method == "slow":
            await go_on.wait()
        return await answer_all(peer, method, payload)

    b.transport.on_call = answer

    slow = asyncio.ensure_future(a.transport.call(b.address, "slow", b"", timeout=PATIENCE_S))
    answers = await asyncio.gather(
        *(a.transport.call(b.address, "echo", b"%d" % number, timeout=PATIENCE_S) for number in range(100))
    )

    assert answers == [b"echo:%d" % number for number in range(100)]
    assert not slow.done()
    go_on.set()
    assert await slow == b"slow:"
    assert b.count("calls_answered") == 101


async def test_a_large_call_and_answer_pass(make: Make) -> None:
    """A snapshot of the catalog, say."""
    a, b = await make("a"), await make("b")
    b.transport.on_call = answer_all
    payload = os.urandom(3 << 20)

    assert await a.transport.call(b.address, "echo", payload, timeout=PATIENCE_S) == b"echo:" + payload


async def test_a_refusal_keeps_its_code_and_a_failure_is_a_bug(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler's exception is logged where it happened; the caller learns its kind."""
    a, b = await make("a"), await make("b")
    b.transport.on_call = answer_all

    with pytest.raises(RemoteError) as refused:
        await a.transport.call(b.address, "refuse", b"", timeout=PATIENCE_S)
    with pytest.raises(RemoteError) as broken:
        await a.transport.call(b.address, "break", b"", timeout=PATIENCE_S)

    assert (refused.value.code, refused.value.message) == ("not_leader", "ask b")
    assert (broken.value.code, broken.value.message) == ("bug", "ValueError: oh no")
    assert "call break failed" in caplog.text


async def test_a_call_ends_at_its_time_out_and_so_does_its_work(make: Make) -> None:
    """Nobody would read the answer."""
    a, b = await make("a"), await make("b")
    b.transport.on_call = answer_all
    await a.transport.call(b.address, "echo", b"", timeout=PATIENCE_S)

    with pytest.raises(CallTimeout):
        await a.transport.call(b.address, "sleep", b"600", timeout=0.05)

    await soon(lambda: b.count("calls_working") == 0)
    assert a.count("calls_waiting") == 0
    assert await a.transport.call(b.address, "echo", b"", timeout=PATIENCE_S) == b"echo:"


async def test_a_call_over_a_lost_connection_fails_at_once(make: Make) -> None:
    """And says that it was sent: the outcome is unknown."""
    a, b = await make("a"), await make("b")
    b.transport.on_call = answer_all
    call = asyncio.ensure_future(a.transport.call(b.address, "sleep", b"600", timeout=600))
    await soon(lambda: b.count("calls_working") == 1)

    await b.transport.close(timeout=0.1)

    with pytest.raises(PeerLost) as lost:
        await asyncio.wait_for(call, PATIENCE_S)
    assert lost.value.sent


async def test_a_call_to_nobody_fails_at_once(make: Make) -> None:
    """A refused connect is an answer too."""
    a = await make("a")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = TcpAddress("127.0.0.1", closed.getsockname()[1])

    with pytest.raises(PeerLost) as lost:
        await asyncio.wait_for(a.transport.call(address, "hi", b"", timeout=600), PATIENCE_S)
    assert not lost.value.sent


# ---- news


async def test_a_refused_connect_is_news_and_the_next_send_waits_a_little(make: Make) -> None:
    """`on_lost` with the address; in the pause after it frames are dropped, then it connects again."""
    a = await make("a")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = TcpAddress("127.0.0.1", closed.getsockname()[1])

    loop = asyncio.get_running_loop()
    before_s = loop.time()
    assert a.transport.send(address, Channel.CONTROL, [b"x"])

    assert await get(a.lost) == address
    paused = not a.transport.send(address, Channel.CONTROL, [b"x"])
    assert paused or loop.time() >= before_s + FIRST_PAUSE_S / 2
    b = await make("b", listen=socket.create_server(tuple(address)))
    await soon(lambda: a.transport.send(address, Channel.CONTROL, [b"y"]))
    assert bytes((await get(b.frames))[2]) == b"y"


def test_pauses_double_up_to_a_limit() -> None:
    """And differ, so that a cluster does not knock in step."""
    rng = random.Random(1)

    assert all(0.01 <= pause_s(1, rng) <= 0.02 for _ in range(100))
    assert all(0.04 <= pause_s(3, rng) <= 0.08 for _ in range(100))
    assert all(
        LONGEST_PAUSE_S / 2 <= pause_s(failures, rng) <= LONGEST_PAUSE_S for failures in range(7, 2000)
    )


SERVER = """
import asyncio, os, socket, sys
sys.path.insert(0, sys.argv[1])
from laminar.node.transport import *
async def main():
    ids = {"cluster_id": lambda: b"c" * 16, "node": "k", "role": 1, "nonce": os.urandom(16)}
    transport = Transport(**ids, secret=b"s" * 16)
    transport.on_frame = lambda peer, channel, payload: print("frame", flush=True)
    sock = socket.create_server(("127.0.0.1", 0))
    await transport.serve_tcp(sock)
    print(sock.getsockname()[1], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def start_process() -> tuple[subprocess.Popen[bytes], TcpAddress]:
    """A peer in a process of its own, which can be killed."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(ROOT)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    return process, TcpAddress("127.0.0.1", port)


async def test_a_killed_peer_is_news_at_once_and_once(make: Make) -> None:
    """kill -9 closes its connections: both channels, one report; nobody waits for silence to tell."""
    a = await make("a", limits=NO_PINGS)
    process, address = start_process()
    try:
        for channel in (Channel.CONTROL, Channel.BULK):
            a.transport.send(address, channel, [b"x"])
        assert {(await get(a.up)).node for _ in range(2)} == {"k"}

        process.kill()

        lost = await get(a.lost)
        assert isinstance(lost, Peer)
        assert (lost.node, lost.role) == ("k", 1)
        await asyncio.sleep(0.05)
        assert a.lost.empty()
        assert a.count("peers") == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def test_a_peer_that_is_silent_is_given_up(make: Make) -> None:
    """A machine that lost its power closes nothing: control connections ping."""
    a = await make("a", limits=Limits(ping_interval_ms=400, silent_pings=3))
    process, address = start_process()
    try:
        for channel in (Channel.CONTROL, Channel.BULK):
            a.transport.send(address, channel, [b"x"])
        await get(a.up)
        await get(a.up)
        await soon(lambda: bool(a.transport.round_trips_s()))

        os.kill(process.pid, signal.SIGSTOP)

        lost = await get(a.lost)
        assert isinstance(lost, Peer)
        assert lost.node == "k"
        assert (a.count("silent"), a.count("peers"), a.count("connections_bulk")) == (1, 0, 0)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def test_an_idle_connection_stays(make: Make) -> None:
    """Pings and their answers are signs of life on both sides."""
    a, b = await make("a", limits=QUICK), await make("b", limits=QUICK)
    a.transport.send(b.address, Channel.CONTROL, [b"x"])
    await get(b.frames)

    await asyncio.sleep(0.04 * 8)

    assert a.lost.empty()
    assert b.lost.empty()


async def test_pitfall_44_our_own_stall_is_not_the_peers_silence(make: Make) -> None:
    """After a long turn of the loop the peer's bytes lie in the socket: they are read first."""
    a, b = await make("a", limits=QUICK), await make("b")
    a.transport.send(b.address, Channel.CONTROL, [b"x"])
    await get(b.frames)

    for _ in range(3):
        time.sleep(0.3)  # noqa: ASYNC251  # the stall is what is tested
        await asyncio.sleep(0.01)

    assert a.lost.empty()


async def test_a_peer_with_a_new_nonce_has_lost_its_former_life(make: Make) -> None:
    """Its old connections are dropped even if nothing has closed them yet."""
    b = await make("b")
    former, later = await make("a"), await make("a")
    former.transport.send(b.address, Channel.CONTROL, [b"x"])
    await get(b.frames)

    later.transport.send(b.address, Channel.CONTROL, [b"y"])

    assert await get(b.lost) == former.peer
    assert (await get(b.frames))[0] == later.peer
    assert b.count("peers") == 1


async def test_our_own_close_is_no_news_to_us_and_news_to_them(make: Make) -> None:
    """What was queued still arrives."""
    a, b = await make("a"), await make("b")
    a.transport.send(b.address, Channel.CONTROL, [b"x"])
    await get(b.frames)
    a.transport.send(b.address, Channel.CONTROL, [b"last words"])

    await a.transport.close()

    assert bytes((await get(b.frames))[2]) == b"last words"
    assert await get(b.lost) == a.peer
    assert a.lost.empty()
    assert not a.transport.send(b.address, Channel.CONTROL, [b"x"])
