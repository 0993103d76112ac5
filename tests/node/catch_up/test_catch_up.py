"""The parts of a catch-up by themselves: what may be replaced, what is believed, what is read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from laminar.batch import build
from laminar.node.catch_up import install
from laminar.node.catch_up.install import refusal_to_replace, whole_frames
from laminar.node.catch_up.messages import Beginning, Offer, PieceRequest
from laminar.node.catch_up.pace import Pace
from laminar.node.catch_up.source import Source
from laminar.node.host.sealed_files import read_bytes
from laminar.node.transport.transport import TcpAddress
from tests.node.entries import stamped
from tests.node.trio import GROUP, batch, send, trio


def replica(*, term: int, last_index: int, terms: dict[int, int | None], committed: int = 0) -> Any:
    log = SimpleNamespace(last_index=last_index, term=terms.get)
    return SimpleNamespace(core=SimpleNamespace(term=term, committed_index=committed), log=log)


def new_log(last_index: int, last_term: int) -> Any:
    return SimpleNamespace(last_index=last_index, last_term=last_term)


@pytest.mark.parametrize(
    ("old", "refused"),
    [
        (replica(term=5, last_index=50, terms={}), False),
        (replica(term=5, last_index=100, terms={100: 4}), False),
        # It has gone on behind the new log's end: another leader brought it there, and counted on it.
        (replica(term=6, last_index=150, terms={100: 5}), True),
        # A longer tail that differs where the new log ends was never committed.
        (replica(term=5, last_index=250, terms={100: 3}), False),
        # Damaged there: nobody can tell.
        (replica(term=5, last_index=250, terms={100: None}), True),
        # A log of a later term than the replica's vote was given in.
        (replica(term=4, last_index=50, terms={}), True),
    ],
)
def test_pitfall_49_a_new_log_takes_nothing_back_that_was_acknowledged(old: Any, refused: bool) -> None:
    """The new log ends at entry 100 of term 5, and all of it is committed."""
    assert bool(refusal_to_replace(old, new_log(100, 5))) is refused


def frames(first: int, count: int) -> list[bytes]:
    found = []
    for index in range(first, first + count):
        frame = build([b"x" * 40])
        stamped(frame, index, time_ms=1)
        found.append(bytes(frame))
    return found


def test_a_piece_is_believed_up_to_its_first_doubtful_frame() -> None:
    """Cut off, damaged, or of another index: what is before it counts."""
    whole = frames(7, 4)
    data = b"".join(whole)

    assert [bytes(frame) for _, frame in whole_frames(data, 7)] == whole
    assert len(whole_frames(data[:-1], 7)) == 3
    assert whole_frames(data, 8) == []
    assert whole_frames(data[:100], 7) == []
    torn = bytearray(data)
    torn[len(whole[0]) + 140] ^= 1
    assert len(whole_frames(bytes(torn), 7)) == 1
    assert len(whole_frames(whole[0] + whole[2], 7)) == 1


async def test_bytes_are_read_from_the_middle_of_a_file(tmp_path: Path) -> None:
    """What is asked for, or what there is."""
    path = tmp_path / "segment"
    path.write_bytes(bytes(range(100)))

    assert await read_bytes(str(path), 10, 20) == bytes(range(10, 30))
    assert await read_bytes(str(path), 90, 20) == bytes(range(90, 100))
    with pytest.raises(FileNotFoundError):
        await read_bytes(str(tmp_path / "none"), 0, 1)


async def test_no_more_is_taken_than_the_pace_allows() -> None:
    """Three pieces of a tenth of a second each: the third leaves after two tenths."""
    pace = Pace(1000)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await asyncio.gather(*(pace.take(100) for _ in range(3)))

    assert loop.time() - started_s >= 0.19


async def test_an_entry_larger_than_a_piece_takes_its_own_time() -> None:
    """A MiB at 10 MiB a second: the next piece leaves a tenth of a second later."""
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"x" * 1_000_000))
        index = leader.partition.committed_index
        source = Source(by_group={GROUP: leader.partition}, read_bytes=read_bytes, bytes_per_s=10_000_000)
        request = msgspec.msgpack.encode(PieceRequest(GROUP, 9, index, verified=True))
        peer: Any = None
        started_s = asyncio.get_running_loop().time()
        for _ in range(2):
            assert len(await source.piece(peer, request)) > 1_000_000

        assert asyncio.get_running_loop().time() - started_s >= 0.095


async def test_a_shard_without_room_keeps_its_replica_from_standing_only_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be the only one that could lead: the catch-up is given up, and comes with a later offer."""
    monkeypatch.setattr(install, "ROOM_PATIENCE_S", 0.05)
    monkeypatch.setattr(install, "PAUSE_S", 0.01)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    new = SimpleNamespace(log_id=7, last_index=0, start=SimpleNamespace(index=0))
    beginning = Beginning(index=0, term=0, offset=0, time_ms=0, committed_index=100, size_bytes=1 << 20)
    home: Any = SimpleNamespace(
        storage=SimpleNamespace(
            refusal="the disk is full",
            logs={7: new},
            create_log=lambda name: new,
            sync_log=lambda log: done,
            delete_log=lambda log_id: done,
        ),
        driver=SimpleNamespace(is_current=lambda replica: True, process_ready=lambda replica: None),
        transport=SimpleNamespace(call=lambda *_, **__: asyncio.sleep(0, msgspec.msgpack.encode(beginning))),
        now_ms=lambda: 0,
    )
    sits_out: list[bool] = []
    core = SimpleNamespace(inhibit_campaign=lambda out, now_ms: sits_out.append(out))
    partition: Any = SimpleNamespace(
        topic="t", number=0, replica=SimpleNamespace(name="t/0", group=b"g", core=core)
    )
    installer = install.Installer(
        home,
        by_group={b"g": partition},
        address_of=lambda node, replica: TcpAddress("127.0.0.1", 1),
        spawn=asyncio.ensure_future,
    )
    offer = Offer(b"g", sender=2, receiver=1, term=1)
    installer.running[b"g"] = install.Progress(offer, "b")

    await asyncio.wait_for(installer._run(partition, offer, "b"), 60)
    assert [True, False] == sits_out
    assert 1 == installer.abandoned
