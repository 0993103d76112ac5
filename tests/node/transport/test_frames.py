"""Frames arrive whole and in order, and queues that are full drop them: over real sockets."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from typing import cast

import pytest

from laminar.node.transport.link import HEADER_SIZE, FrameKind
from laminar.node.transport.transport import Channel, Limits, RemoteError, UnixAddress
from tests.node.transport.ends import NO_PINGS, Make, Proxy, get


async def test_a_frame_arrives_whole_with_its_sender_and_channel(make: Make) -> None:
    """Its parts are one payload at the other end."""
    a, b = await make("a", role=2), await make("b")

    assert a.transport.send(b.address, Channel.CONTROL, [b"one", bytearray(b"two"), memoryview(b"three")])

    peer, channel, payload = await get(b.frames)
    assert (peer, channel, bytes(payload)) == (a.peer, Channel.CONTROL, b"onetwothree")
    assert (peer.node, peer.role) == ("a", 2)


async def test_all_connections_of_a_process_name_it_by_one_object(make: Make) -> None:
    """Who judges the sender of each frame compares no more than that; the next life is another."""
    a, b = await make("a"), await make("b")
    a.transport.send(b.address, Channel.CONTROL, [b"small"])
    first, _, _ = await get(b.frames)
    a.transport.send(b.address, Channel.BULK, [b"large"])
    second, channel, _ = await get(b.frames)

    assert first is second and channel is Channel.BULK


class Closed:
    """An open connection's transport after the loop has closed it, and before it says so."""

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, parts: list[bytes]) -> None:
        raise RuntimeError("the handler is closed")

    def abort(self) -> None:
        return None


async def test_who_sends_does_not_hear_that_the_loop_has_closed_a_connection(make: Make) -> None:
    """It would stop the replica whose message it is. The connection ends, and another is made."""
    a, b = await make("a"), await make("b")
    a.transport.send(b.address, Channel.CONTROL, [b"one"], at_once=True)
    await get(b.frames)
    link = next(link for link in a.transport._connections.links if link.channel is Channel.CONTROL)
    real, link.transport = link.transport, cast(asyncio.Transport, Closed())
    assert real is not None

    assert a.transport.send(b.address, Channel.CONTROL, [b"lost"], at_once=True)
    assert link.closing
    real.abort()
    await get(a.lost)
    a.transport.send(b.address, Channel.CONTROL, [b"two"], at_once=True)
    _, _, payload = await get(b.frames)
    assert bytes(payload) == b"two"


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


async def test_a_message_larger_than_a_frame_arrives_as_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, whatever its own parts are; the next message is not touched by it."""
    monkeypatch.setattr("laminar.node.transport.link.MAX_FRAME_BYTES", 1000)
    a, b = await make("a", limits=NO_PINGS), await make("b", limits=NO_PINGS)
    pieces = [os.urandom(size) for size in (10, 999, 1, 0, 5000, 990)]

    for sent in (pieces, [b"x" * 1000], [b"y" * 1001], [b"z"]):
        assert a.transport.send(b.address, Channel.BULK, sent)

        assert b"".join(sent) == bytes((await get(b.frames))[2])
    assert 0 == b.count("protocol_errors")


async def test_a_message_larger_than_all_parts_is_dropped_and_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends neither the connection nor the process; on other channels one frame is the limit."""
    monkeypatch.setattr("laminar.node.transport.link.MAX_FRAME_BYTES", 1000)
    monkeypatch.setattr("laminar.node.transport.link.MAX_MESSAGE_BYTES", 3000)
    a, b = await make("a", limits=NO_PINGS), await make("b", limits=NO_PINGS)

    assert a.transport.send(b.address, Channel.BULK, [bytes(3000)])
    assert 3000 == len((await get(b.frames))[2])
    assert not a.transport.send(b.address, Channel.BULK, [bytes(3001)])
    assert not a.transport.send(b.address, Channel.CONTROL, [bytes(1001)])
    with pytest.raises(RemoteError) as refused:
        await a.transport.call(b.address, "method", bytes(1001), timeout=1)
    assert ("too_large", 2) == (refused.value.code, a.count("frames_too_large"))
    assert a.transport.send(b.address, Channel.BULK, [b"still there"])
    assert b"still there" == bytes((await get(b.frames))[2])


async def test_parts_without_end_end_the_connection(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer makes us hold is bounded."""
    a, b = await make("a", limits=NO_PINGS), await make("b", limits=NO_PINGS)
    a.transport.send(b.address, Channel.BULK, [b"first"])
    await get(b.frames)
    monkeypatch.setattr("laminar.node.transport.link.MAX_MESSAGE_BYTES", 3000)
    link = next(link for link in a.transport._connections.links if link.established)

    for _ in range(4):
        link.send(FrameKind.PART, [bytes(1000)], 1000)

    assert await get(a.lost)
    assert b.frames.empty()


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
