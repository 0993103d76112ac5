"""Groups that go over splits, merges and moves: nothing is lost, and no key's records come out of order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

import laminar
from laminar import aio
from laminar.testing.nodes import serve
from tests.client.keyed import KEYS, Keyed, check, read_all
from tests.client.members import MemberProcess, ended, until


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One node of two shards."""
    with serve(shards=2) as found:
        yield found


@pytest.fixture
def topic(url: str, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, of two partitions."""
    name = request.node.name.replace("[", "-").replace("]", "")
    with laminar.connect(url) as client:
        client.create_topic(name, partitions=2)
    return str(name)


def test_three_members_go_over_every_change_and_kills(url: str, topic: str) -> None:
    """Split, merge and move under load, a member killed in each, another that comes."""
    # Short for those that are killed, and longer than a process may stand still on a machine that is busy.
    members = [MemberProcess([url], topic, "g", session_s=5.0) for _ in range(3)]
    with (
        laminar.connect(url, timeout=60) as client,
        ended(members),
        Keyed(url, topic, pause_s=0.3) as sending,
    ):
        handle = client.topic(topic)
        until(lambda: sum(map(len, (member.read for member in members))) > 3 * KEYS, "they read")

        def after(change: Callable[[], laminar.RouteInfo], kill: int) -> None:
            new = change()
            members[kill].kill()
            members.append(MemberProcess([url], topic, "g", session_s=20.0))
            changed_s = time.monotonic()
            wanted = set(new.ranges)
            until(
                lambda: wanted <= {place[0] for member in members for place in member.read_since(changed_s)},
                f"{wanted} are read",
            )

        after(lambda: handle.split(0), 0)
        after(lambda: handle.merge([3, 1]), 1)
        after(lambda: handle.move(2), 2)
        count = sending.end()
        until(read_all(members, count), "all is read")
        until(lambda: handle.describe_cursor("g").total_lag == 0, "all is committed")
        check(members, count)


async def test_a_group_that_was_away_gets_all_in_order(url: str, topic: str) -> None:
    """Its cursor stands two changes back; what is new to it begins at 0."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)

        async def send(first: int, after: int) -> None:
            async with handle.producer() as producer:
                for number in range(first, after):
                    for key in range(KEYS):
                        producer.send(b"%d-%d" % (key, number), key=b"key %d" % key)

        await send(0, 2)
        async with handle.subscribe("g", session=2.0) as records:
            async for _ in records:
                await records.commit()
                break
        await handle.split(0)
        await send(2, 4)
        await handle.merge([2, 3])
        await send(4, 6)
        seen: dict[int, list[int]] = defaultdict(list)
        async with asyncio.timeout(60):
            async with handle.subscribe("g", session=2.0) as records:
                async for record in records:
                    key, number = map(int, record.text.split("-"))
                    seen[key].append(number)
                    await records.commit()
                    if sum(map(len, seen.values())) == 6 * KEYS - 1:
                        break
        assert all(each == sorted(each) for each in seen.values())


async def test_each_member_of_a_broadcast_goes_over_a_change(url: str, topic: str) -> None:
    """By its own cursor, and again from the beginning after a rewind of that."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        for number in range(3):
            for key in range(KEYS):
                await handle.append(b"%d-%d" % (key, number), key=b"key %d" % key)
        read: dict[str, dict[int, list[int]]] = {}

        async def member(name: str, count: int) -> None:
            seen = read[name] = defaultdict(list)
            async with handle.subscribe("b", "broadcast", name, session=2.0) as records:
                async for record in records:
                    key, number = map(int, record.text.split("-"))
                    seen[key].append(number)
                    await records.commit()
                    if sum(map(len, seen.values())) == count:
                        return

        async with asyncio.timeout(60):
            tasks = [asyncio.ensure_future(member(name, 5 * KEYS)) for name in ("x", "y")]
            await handle.split(0)
            await handle.move(1)
            for number in (3, 4):
                for key in range(KEYS):
                    await handle.append(b"%d-%d" % (key, number), key=b"key %d" % key)
            await asyncio.gather(*tasks)
        for seen in read.values():
            assert {key: list(range(5)) for key in range(KEYS)} == dict(seen)


async def test_a_rewind_under_a_group_gives_it_all_again_in_order(url: str, topic: str) -> None:
    """The members are fenced, the inputs come first again, and what follows when they are acknowledged."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        for number in range(2):
            for key in range(KEYS):
                await handle.append(b"%d-%d" % (key, number), key=b"key %d" % key)
        await handle.split(1)
        for number in (2, 3):
            for key in range(KEYS):
                await handle.append(b"%d-%d" % (key, number), key=b"key %d" % key)
        seen: dict[int, list[int]] = defaultdict(list)
        again = False
        async with asyncio.timeout(60), handle.subscribe("g", session=2.0) as records:
            async for record in records:
                key, number = map(int, record.text.split("-"))
                seen[key].append(number)
                try:
                    await records.commit()
                except laminar.Fenced:
                    assert again
                if not again and sum(map(len, seen.values())) == 4 * KEYS:
                    await client.session.call(
                        "PUT",
                        f"/v1/topics/{topic}/cursors/g",
                        body=b'{"rewind": "earliest"}',
                        headers={"Content-Type": "application/json"},
                    )
                    first, seen, again = seen, defaultdict(list), True
                elif again and all(each[-1] == 3 for each in seen.values()) and len(seen) == KEYS:
                    break
        assert {key: [0, 1, 2, 3] for key in range(KEYS)} == dict(first) == dict(seen)


async def test_a_program_that_does_not_know_routes_is_told_so(url: str, topic: str) -> None:
    """It would leave what follows unread; before the first change it may be a member."""
    async with aio.connect(url) as client:
        path = f"/v1/topics/{topic}/groups/g/members/old"

        async def renew() -> None:
            await client.session.call(
                "PUT", path, body=b"{}", headers={"Content-Type": "application/json"}, timeout_s=30
            )

        await renew()
        await client.topic(topic).move(0)
        with pytest.raises(laminar.Error) as refused:
            await renew()
        assert (409, "stale_route", 1) == (refused.value.status, refused.value.code, refused.value.limit)


@pytest.mark.parametrize("commits", [True, False])
async def test_a_consumer_that_commits_rarely_gets_what_follows(url: str, topic: str, commits: bool) -> None:
    """It waits for its next record, and all that there is follows what it has not committed."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        for number in range(3):
            await handle.append(b"%d" % number, key="k")
        await handle.move(await handle.partition_of("k"))
        await handle.append(b"3", key="k")
        read: list[str] = []
        async with handle.subscribe("rare", session=2.0, commit_ends=commits) as records:
            stream = aiter(records)
            async with asyncio.timeout(60):
                while len(read) < (4 if commits else 3):
                    read.append((await anext(stream)).text)
            if not commits:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(4.0):
                        read.append((await anext(stream)).text)
    assert ["0", "1", "2", "3"][: 4 if commits else 3] == read
