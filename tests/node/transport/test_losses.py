"""News that a peer is lost: at once, once, and not for a silence that was our own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laminar.node.transport.dialer import FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_s
from laminar.node.transport.transport import Channel, Limits, Peer, TcpAddress
from tests.node.transport.ends import NO_PINGS, QUICK, Make, get, refusing, soon

ROOT = Path(__file__).resolve().parents[3]


async def test_a_refused_connect_is_news_and_the_next_send_waits_a_little(make: Make) -> None:
    """`on_lost` with the address; in the pause after it frames are dropped, then it connects again."""
    a = await make("a")
    with refusing() as (held, address):
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        assert a.transport.send(address, Channel.CONTROL, [b"x"])

        assert await get(a.lost) == address
        paused = not a.transport.send(address, Channel.CONTROL, [b"x"])
        assert paused or loop.time() >= before_s + FIRST_PAUSE_S / 2
        held.listen()
        b = await make("b", listen=held)
        await soon(lambda: a.transport.send(address, Channel.CONTROL, [b"y"]))
        received = await get(b.frames)
        assert bytes(received[2]) == b"y"


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
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.transport import *
async def main():
    ids = {"cluster_id": lambda: b"c" * 16, "node": "k", "role": 1, "nonce": os.urandom(16)}
    transport = Transport(**ids, secrets=Keyring(["s" * 16]))
    transport.on_frame = lambda peer, channel, payload: print("frame", flush=True)
    sock = socket.create_server(("127.0.0.1", 0))
    await transport.serve_tcp(sock)
    print(sock.getsockname()[1], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@contextmanager
def a_process() -> Iterator[tuple[subprocess.Popen[bytes], TcpAddress]]:
    """A peer in a process of its own, which can be killed."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(ROOT)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process, TcpAddress("127.0.0.1", int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_killed_peer_is_news_at_once_and_once(make: Make) -> None:
    """kill -9 closes its connections: both channels, one report; nobody waits for silence to tell."""
    a = await make("a", limits=NO_PINGS)
    with a_process() as (process, address):
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


async def test_a_peer_that_is_silent_is_given_up(make: Make) -> None:
    """A machine that lost its power closes nothing: control connections ping."""
    a = await make("a", limits=Limits(ping_interval_ms=400, silent_pings=3))
    with a_process() as (process, address):
        for channel in (Channel.CONTROL, Channel.BULK):
            a.transport.send(address, channel, [b"x"])
        await get(a.up)
        await get(a.up)

        def has_ponged() -> bool:
            # On a slow machine it may have been silent for too long already, and is connected to anew.
            for channel in (Channel.CONTROL, Channel.BULK):
                a.transport.send(address, channel, [b"x"])
            return bool(a.transport.round_trips_s())

        await soon(has_ponged)

        os.kill(process.pid, signal.SIGSTOP)

        lost = await get(a.lost)
        assert isinstance(lost, Peer)
        assert lost.node == "k"
        await soon(lambda: (a.count("peers"), a.count("connections_bulk")) == (0, 0))
        assert a.count("silent") >= 1


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
