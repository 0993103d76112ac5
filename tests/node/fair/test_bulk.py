"""The shares of bulk: how many bytes are on their way, beside whom, and in whose turn."""

from __future__ import annotations

import asyncio

from laminar.node.fair import bulk as module
from laminar.node.fair.bulk import ALONE_BYTES, BESIDE_BYTES, Bulk

MIB = 1 << 20
HERE, ELSEWHERE = object(), object()


async def turn() -> None:
    """Let everything run that is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


class Client:
    """A client whose bulk begins when it may; each piece ends when the test says so."""

    def __init__(self, bulk: Bulk, name: str = "a", *, size: int = MIB // 2) -> None:
        self._bulk, self._name, self._size = bulk, name, size
        self.begun: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, count: int) -> None:
        """Offer so many pieces at once."""
        self.tasks += [asyncio.create_task(self._piece()) for _ in range(count)]

    async def _piece(self) -> None:
        async with self._bulk.share(self._name, self._size, HERE):
            end = asyncio.Event()
            self.begun.append(end)
            await end.wait()

    async def end(self) -> None:
        """End all pieces, those that begin meanwhile too."""
        while not all(task.done() for task in self.tasks):
            for each in self.begun:
                each.set()
            await asyncio.sleep(0.001)


async def test_alone_as_much_is_on_its_way_as_keeps_a_disk_busy_and_no_more() -> None:
    """64 pieces of half a MiB: 32 begin, the others wait, and each that ends lets one begin."""
    bulk = Bulk()
    client = Client(bulk)

    client.send(64)
    await turn()

    assert len(client.begun) == ALONE_BYTES // (MIB // 2)
    assert bulk.statistics()["on_their_way_bytes"] == ALONE_BYTES
    client.begun[0].set()
    await turn()
    assert len(client.begun) == ALONE_BYTES // (MIB // 2) + 1
    await client.end()
    assert bulk.statistics()["on_their_way_bytes"] == bulk.statistics()["rests"] == 0
    assert bulk.statistics()["bytes"] == 64 * MIB // 2


async def test_beside_small_appends_of_another_little_is_on_its_way_and_it_rests() -> None:
    """Two pieces of half a MiB, whatever waits; and the disk is left alone after them."""
    bulk = Bulk()
    client = Client(bulk)
    bulk.small(ELSEWHERE)

    client.send(10)
    await turn()

    assert len(client.begun) == BESIDE_BYTES // (MIB // 2)
    # They take this long, so the rest after them does, too: longer than a busy machine holds up five passes.
    await asyncio.sleep(0.2)
    for each in client.begun:
        each.set()
    await turn()
    assert len(client.begun) == 2, "the next begin after a rest only"
    bulk.small(ELSEWHERE)
    await client.end()
    assert bulk.statistics()["rests"] >= 2


async def test_a_producers_own_small_appends_are_not_those_of_another() -> None:
    """The last batch of a producer is small, and must not slow down the next ones."""
    bulk = Bulk()
    client = Client(bulk)
    client.send(1)
    await turn()

    bulk.small(HERE)
    client.send(63)
    await turn()

    assert len(client.begun) == ALONE_BYTES // (MIB // 2)
    await client.end()


async def test_those_who_wait_begin_by_turns() -> None:
    """A client with many pieces in the queue does not keep another's one piece from beginning."""
    bulk = Bulk()
    many, one = Client(bulk, "many", size=ALONE_BYTES), Client(bulk, "one", size=ALONE_BYTES)
    many.send(5)
    await turn()
    one.send(1)
    await turn()

    for number in range(2):
        many.begun[number].set()
        await turn()

    assert (len(many.begun), len(one.begun)) == (2, 1)
    await asyncio.gather(one.end(), many.end())


async def test_what_is_never_committed_keeps_nobody_for_long() -> None:
    """A group without a majority holds its room for `HELD_S`; then the bulk of others goes on."""
    bulk = Bulk()
    stuck, other = Client(bulk, "stuck", size=ALONE_BYTES), Client(bulk, "other", size=ALONE_BYTES)
    stuck.send(1)
    await turn()
    other.send(1)
    await turn()
    assert not other.begun

    async with asyncio.timeout(10 * module.HELD_S):
        while not other.begun:  # noqa: ASYNC110  # a counter
            await asyncio.sleep(0.01)

    assert not stuck.tasks[0].done()
    assert bulk.statistics()["on_their_way_bytes"] == ALONE_BYTES
    await asyncio.gather(stuck.end(), other.end())
    assert bulk.statistics()["on_their_way_bytes"] == 0
