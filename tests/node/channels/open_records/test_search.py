"""What a channel has aside is listed with keys and tags, and no more of the log is read than a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.http.api.problems import Problem
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.open_records.jobs import Source
from laminar.node.channels.open_records.search import Budget, Page, Wanted, offsets_of, page_of
from laminar.node.partition.partition import Partition
from laminar.wire.channels import ChannelSettings
from tests.node.channels.delivering import CHANNEL, append, delivering, given, steps

DYING = ChannelSettings(max_attempts=1)
ANY = Wanted()
BATCH = 1_000
"""More than a batch of one record takes without its value."""


async def kill(partition: Partition, delivery: Delivery, count: int, *, size: int = 0) -> None:
    """Append so many records, a batch each, with keys k0 to k3 and tags, and have all of them die."""
    for number in range(count):
        tag = "even" if number % 2 == 0 else "odd"
        await append(partition, b"x" * size, keys=[b"k%d" % (number % 4)], tags=[tag])
    left = count
    while left:
        jobs = await given(delivery)
        left -= jobs.total
        await delivery.settle(CHANNEL, steps("nack", jobs, reason="no luck"))


async def dead(partition: Partition, wanted: Wanted = ANY, after: int = 0, **budget: int) -> Page:
    channel = partition.state.channels.by_id[CHANNEL]
    offsets = offsets_of(channel, is_dead=True, after=after, wanted=wanted)
    return await page_of(
        partition, channel, offsets, wanted=wanted, budget=Budget(**{"listed": 100} | budget)
    )


def found(page: Page) -> list[int]:
    return [each.offset for each in page.records]


async def test_records_are_found_by_key_tag_and_reason(tmp_path: Path) -> None:
    """All that is given has to be so."""
    async with delivering(tmp_path, DYING) as (partition, delivery):
        await kill(partition, delivery, 8)

        every = await dead(partition)

        assert every.next is None and found(every) == list(range(8))
        assert [(each.key, each.tag, each.is_read) for each in every.records[:2]] == [
            (b"k0", "even", True),
            (b"k1", "odd", True),
        ]
        assert found(await dead(partition, Wanted(key=b"k1"))) == [1, 5]
        assert found(await dead(partition, Wanted(tag="odd"))) == [1, 3, 5, 7]
        assert found(await dead(partition, Wanted(key=b"k1", tag="even"))) == []
        assert found(await dead(partition, Wanted(reason="luck"), after=6)) == [6, 7]
        assert found(await dead(partition, Wanted(reason="Luck"))) == []


async def test_no_more_is_listed_or_read_than_the_budget_says(tmp_path: Path) -> None:
    """The answer says where to go on, also when nothing was found; at last all was looked at."""
    async with delivering(tmp_path, DYING) as (partition, delivery):
        await kill(partition, delivery, 8, size=BATCH)

        listed = await dead(partition, listed=3)
        assert (found(listed), listed.next) == ([0, 1, 2], 3)
        none = await dead(partition, Wanted(key=b"k3"), records=2)
        assert (found(none), none.next, none.left) == ([], 2, Budget(100, 0, none.left.size))  # type: ignore[union-attr]  # it has a budget
        read = partition.reader.fetched_bytes
        few = await dead(partition, size=2 * BATCH)
        assert (found(few), few.next) == ([0, 1], 2)
        assert partition.reader.fetched_bytes - read < 4 * BATCH

        after, every = 0, list[int]()
        while True:
            page = await dead(partition, Wanted(tag="odd"), after=after, records=3)
            every += found(page)
            if page.next is None:
                break
            after = page.next
        assert every == [1, 3, 5, 7]


async def test_of_an_ordered_channel_only_records_of_the_key_are_read(tmp_path: Path) -> None:
    """The table knows the hash of each one's key."""
    settings = ChannelSettings(max_attempts=1, order="key")
    async with delivering(tmp_path, settings) as (partition, delivery):
        await kill(partition, delivery, 8)

        page = await dead(partition, Wanted(key=b"k3"), records=2)

        assert (found(page), page.next) == ([3, 7], None)


async def test_what_cannot_be_read_is_listed_without_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is nothing that is looked for by key or tag, only by its reason."""
    async with delivering(tmp_path, DYING) as (partition, delivery):
        await kill(partition, delivery, 3)
        read = Source.read

        async def reading(source: Source, at: int, end: int) -> object:
            if at == 1:
                raise Problem("offset_expired", "it is no more in the log")
            return await read(source, at, end)

        monkeypatch.setattr(Source, "read", reading)

        page = await dead(partition)

        assert [each.is_read for each in page.records] == [True, False, True]
        assert (page.records[1].key, page.records[1].tag) == (None, None)
        assert found(await dead(partition, Wanted(tag="odd"))) == []
        assert found(await dead(partition, Wanted(reason="luck"))) == [0, 1, 2]
