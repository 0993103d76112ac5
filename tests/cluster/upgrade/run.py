"""A rolling upgrade as a script: the stages of `make cluster-upgrade`, under the load of `cluster/life`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import urllib.request
from typing import Any

import httpx

import laminar
from laminar.cli.commands.cluster import mixed_programs
from laminar.testing.cluster import get_json
from membership.catalog import CODE_VERSION
from tests.cluster.faults.groups import Crowd, read_to_the_end
from tests.cluster.life.growing import PATIENCE_S, LifeFailed, until
from tests.cluster.life.placement import describe, leaders
from tests.cluster.life.run import REPLICAS, Life
from tests.cluster.upgrade.cluster import MixedCluster

# What the older program knows.
OLD_VERSION = 3
SEGMENTS = {"catch_up_bytes": 64 * 1024}

_OLDER_CLIENT = """
import sys, laminar
with laminar.connect(sys.argv[1]) as client:
    topic = client.topic(sys.argv[2])
    sent = [topic.append(f"older {n}".encode()) for n in range(5)]
    print(laminar.__file__, [each.offset for each in sent])
"""


async def decided(http: httpx.AsyncClient, method: str, url: str, **more: Any) -> httpx.Response:
    """Return the answer to a request that may be repeated; asked again while the catalog has no leader."""
    found: list[httpx.Response] = []

    async def missing() -> str:
        found[:] = [await http.request(method, url, **more)]
        is_transient = found[0].status_code in (503, 504) and found[0].json().get("code") != "not_enabled"
        return found[0].text if is_transient else ""

    await until(f"answered: {method} {url}", missing)
    return found[0]


class Upgrade(Life):
    """A life in which nodes change their program."""

    cluster: MixedCluster
    crowd: Crowd | None = None
    guarded: int | None = None
    """The node that asks for tokens at the end; None: none does."""

    def name(self, number: int) -> str:
        """Return a node's name."""
        return self.cluster.members[number].name

    # -- programs --------------------------------------------------------------------------------

    async def change_program(self, number: int, *, older: bool) -> None:
        """Stop a node and start it with the other program; wait until its replicas keep up."""
        async with self.stage("back to the older program" if older else "upgrade", number):
            await self._stop(number)
            await self.start_with(number, older=older)
            await until("all replicas in sync", self._misplaced)

    async def start_with(self, number: int, *, older: bool) -> None:
        """Start a stopped node with a program, and wait until it serves."""
        (self.cluster.older.add if older else self.cluster.older.discard)(number)
        self.cluster.spawn(number)
        await self.ready(number)

    async def _stop(self, number: int) -> None:
        await asyncio.to_thread(self.cluster.end, number)

    async def about(self) -> dict[str, Any]:
        """Return the cluster as a node with the newer program describes it."""
        for number in self.cluster.running():
            if number not in self.cluster.older:
                found = await asyncio.to_thread(get_json, f"{self.cluster.urls[number]}/v1/cluster")
                if found is not None:
                    assert isinstance(found, dict)
                    return found
        raise LifeFailed("no node with the newer program answers")

    async def expect_mixed(self) -> None:
        """Check that the older program, and nothing else, keeps the new version from being enabled."""
        about: dict[str, Any] = {}

        async def missing() -> str:
            nonlocal about
            about = await self.about()
            known = {node["node"]: node["code_version"] for node in about["nodes"]}
            wanted = {
                member.name: OLD_VERSION if member.number in self.cluster.older else CODE_VERSION
                for member in self.cluster.members
                if member.name in known
            }
            return "" if known == wanted else f"code versions are {known}, not {wanted}"

        await until("each node's code version", missing)
        if about["code_version"] != OLD_VERSION:
            raise LifeFailed(f"code version {about['code_version']} is enabled in a mixed cluster")
        blamed = [name for name, _ in mixed_programs(about)]
        older = sorted(self.name(number) for number in self.cluster.older)
        if blamed != [name for name in older if name in {node["node"] for node in about["nodes"]}]:
            raise LifeFailed(f"{older} run the older program, and {blamed} are named")
        for _, sentence in mixed_programs(about):
            self.say(f"  {sentence}")

    async def expect_enabled(self) -> None:
        """Wait until the new version is enabled, and known so on every running node."""

        async def missing() -> str:
            told = [
                await asyncio.to_thread(get_json, f"{self.cluster.urls[number]}/v1/cluster")
                for number in self.cluster.running()
            ]
            found = [None if each is None else each["code_version"] for each in told]
            return "" if all(each == CODE_VERSION for each in found) else f"{found} are enabled"

        async with self.stage(f"code version {CODE_VERSION} is enabled"):
            await until("enabled", missing)
            if mixed_programs(await self.about()):
                raise LifeFailed("programs are mixed, and all are new")

    async def channel(self, number: int, *, refused: bool) -> None:
        """Create a channel, which the older program does not know: while one runs it is refused."""
        async with self.stage("a channel is refused" if refused else "a channel is created", number):
            topic, url = f"queue-{len(self.spans)}", self.cluster.urls[number]
            async with laminar.aio.connect([url]) as client:
                await client.create_topic(topic, partitions=2, replicas=REPLICAS)
                await client.topic(topic).append(b"one", b"key")
                path = f"{url}/v1/topics/{topic}/channels/c"
                async with httpx.AsyncClient(timeout=60) as http:
                    answer = await decided(http, "PUT", path, json={})
                if refused:
                    if (answer.status_code, answer.json().get("code")) != (503, "not_enabled"):
                        raise LifeFailed(f"a channel in a mixed cluster: {answer.text}")
                    return

                async def missing() -> str:
                    made = await client.topic(topic).create_channel("c", exist_ok=True)
                    return "" if made.depth == 1 else f"a channel of one record: {made}"

                await until("a channel of one record", missing)  # not all leaders may have answered at once

    async def token(self, number: int, *, refused: bool) -> None:
        """Make a token, which the older program does not know: while one runs it is refused."""
        async with self.stage("a token is refused" if refused else "a token is made", number):
            url = f"{self.cluster.urls[number]}/v1/admin/tokens"
            asked = {"name": "upgrade", "grants": [{"role": "read", "prefix": ""}]}
            async with httpx.AsyncClient(timeout=60) as http:
                answer = await decided(http, "POST", url, json=asked)
            found = (answer.status_code, answer.json().get("code"))
            if found != ((503, "not_enabled") if refused else (201, None)):
                raise LifeFailed(f"a token: {answer.text}")

    async def limits(self, number: int, *, refused: bool) -> None:
        """Set a principal's limits, which the older program does not know: while one runs it is refused."""
        async with self.stage("limits are refused" if refused else "limits are set", number):
            async with httpx.AsyncClient(timeout=60) as http:
                answer = await self._limit(http, number, topics=5)
                if refused:
                    # The older program has no such resource at all, nor does it answer as if it had.
                    (older, *_) = sorted(self.cluster.older)
                    unknown = await self._limit(http, older, topics=5)
                    if unknown.status_code != 404:
                        raise LifeFailed(f"limits, at the older program: {unknown.text}")
            found = (answer.status_code, answer.json().get("code"))
            if found != ((503, "not_enabled") if refused else (200, None)):
                raise LifeFailed(f"limits: {answer.text}")

    async def _limit(self, http: httpx.AsyncClient, number: int, **limits: int) -> httpx.Response:
        url = f"{self.cluster.urls[number]}/v1/admin/limits/limited"
        return await decided(http, "PUT", url, json=limits, headers={"If-Match": "*"})

    async def limits_hold(self, number: int) -> None:
        """A node asks for tokens for a while: it knows those made before, and what their principals may."""
        async with self.stage("tokens and limits", number):
            url, tokens = self.cluster.urls[number], {}
            async with httpx.AsyncClient(timeout=60, base_url=url) as http:
                for name, role in (("limited", "read"), ("operator", "admin")):
                    asked = {"name": name, "grants": [{"role": role, "prefix": ""}]}
                    made = await decided(http, "POST", "/v1/admin/tokens", json=asked)
                    tokens[name] = {"Authorization": f"Bearer {made.json()['token']}"}
                await self._limit(http, number, requests_per_s=2)
            await self._stop(number)
            self.cluster.guarded.add(number)
            self.cluster.spawn(number)

            async def missing() -> str:
                try:
                    async with httpx.AsyncClient(base_url=url) as http:
                        answer = await http.get("/v1/whoami", headers=tokens["operator"])
                except httpx.HTTPError as error:
                    return repr(error)
                return "" if answer.status_code == 200 else answer.text

            await until("the node asks for tokens", missing)
            found: dict[str, list[int]] = {}

            async def differs() -> str:
                """The node may know the tokens, and the limits, which are younger, not yet."""
                async with httpx.AsyncClient(timeout=60, base_url=url) as http:
                    for name, headers in {"none": {}, **tokens}.items():
                        answers = await asyncio.gather(
                            *(http.get("/v1/topics", headers=headers) for _ in range(20))
                        )
                        found[name] = sorted({each.status_code for each in answers})
                if found == {"none": [401], "limited": [200, 429], "operator": [200]}:
                    return ""
                return f"a node that asks for tokens answers {found}"

            await until("limits hold", differs)
            await self._stop(number)
            self.cluster.guarded.discard(number)
            await self.start_with(number, older=False)
            await until("all replicas in sync", self._misplaced)

    # -- work while programs are mixed -----------------------------------------------------------

    async def topics_by_both(self, one: int, other: int) -> None:
        """Make a topic through one node, alter and use it through the other."""
        for made_by, altered_by in ((one, other), (other, one)):
            topic = f"made-by-{self.name(made_by)}-{len(self.spans)}"
            async with self.stage("make and alter a topic", made_by, altered_by):
                url, other_url = self.cluster.urls[made_by], self.cluster.urls[altered_by]
                async with laminar.aio.connect([url]) as client:
                    await client.create_topic(topic, partitions=2, replicas=REPLICAS)
                    await client.topic(topic).append(b"one")
                async with laminar.aio.connect([other_url]) as client:
                    await client.request_json(
                        "PATCH",
                        f"/v1/topics/{topic}",
                        {"settings": {"retention_ms": 10**9}},
                        headers={"If-Match": "*"},
                    )
                    await client.topic(topic).append(b"two")

                    async def missing(client: laminar.aio.Client = client, topic: str = topic) -> str:
                        told = await client.request_json("GET", f"/v1/topics/{topic}")
                        is_seen = told["settings"].get("retention_ms") == 10**9
                        return "" if is_seen else f"the change of {topic} is not to be seen: {told}"

                    await until("a change is seen", missing)  # another node may answer, a little later

    async def leaders_on_both(self) -> None:
        """Wait until leaders are spread evenly, so nodes of either program lead and follow the other."""
        await self.even()
        led = (await leaders(self.api))[0]
        idle = [self.name(number) for number in self.cluster.running() if not led[self.name(number)]]
        if idle:
            raise LifeFailed(f"{idle} lead nothing: {led}")

    async def hand_over_log(self, *numbers: int) -> None:
        """Move a partition of one replica from node to node: each gets the whole log from another program."""
        topic, values = f"handed-over-{len(self.spans)}", [b"%04d" % n + b" " * 20_000 for n in range(400)]
        pin = f"/v1/admin/topics/{topic}/partitions/0/pin"
        async with (
            self.stage("a log is handed over", *numbers),
            laminar.aio.connect([self.cluster.urls[each] for each in numbers]) as client,
        ):
            await client.create_topic(topic, partitions=1, replicas=1)
            for number in numbers:
                name = self.name(number)
                await self.api.command("PUT", pin, {"nodes": [name], "reason": "to be caught up"})

                async def missing(name: str = name) -> str:
                    (told,) = (await describe(self.api))[topic]
                    held = [each["node"] for each in told["replicas"]]
                    return "" if held == [name] and not told["leaving"] else f"{topic}/0 is on {held}"

                before = await self._installed(number)
                await until(f"{topic}/0 on {name}", missing)
                if number == numbers[0]:
                    for value in values:
                        await client.topic(topic).append(value)
                else:
                    whole = await self._installed(number) > before
                    self.say(f"  {name} has the log, by {'whole segments' if whole else 'appends'}")
            found: list[bytes] = []
            async with client.topic(topic).read("earliest", follow=False) as records:
                async for record in records:
                    found.append(record.value)
            if found != values:
                raise LifeFailed(f"{len(values)} records were appended to {topic}, {len(found)} are there")
            # It has one replica, and the others are judged by having three.
            await client.topic(topic).delete()

    async def _installed(self, number: int) -> float:
        """Return how many logs a node has installed as whole segments since its start."""
        url = f"{self.cluster.urls[number]}/metrics"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5.0).read().decode())
        values = [
            line.rsplit(" ", 1)[1]
            for line in body.splitlines()
            if line.startswith("laminar_catch_up_installed_total")
        ]
        return sum(map(float, values))

    async def older_client(self, number: int) -> None:
        """Append by the client of the older program."""
        async with self.stage("the older client", number):
            command = [sys.executable, "-P", "-c", _OLDER_CLIENT, self.cluster.urls[number], self.older_topic]
            environment = os.environ | {"PYTHONPATH": str(self.cluster.program)}
            async with laminar.aio.connect([self.cluster.urls[number]]) as client:
                await client.create_topic(self.older_topic, partitions=1, replicas=REPLICAS)
            done = await asyncio.to_thread(
                subprocess.run, command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode or str(self.cluster.program) not in done.stdout:
                raise LifeFailed(f"the older client: {done.stdout} {done.stderr}")

    @property
    def older_topic(self) -> str:
        """The topic of the older client."""
        return "older-client"

    # -- what is refused -------------------------------------------------------------------------

    async def refuse_older_program_on_newer_folder(self, number: int) -> None:
        """The older program ends at once on this folder, and leaves it as it is."""
        async with self.stage("the older program on a newer folder", number):
            await self._stop(number)
            if self.cluster.format_version(number) != CODE_VERSION:
                raise LifeFailed(f"the folder has version {self.cluster.format_version(number)}")
            before = self.cluster.fingerprint(number)
            self.cluster.older.add(number)
            self.cluster.spawn(number)
            said = await self.cluster.ended(number)
            self._expect_said(said, f"format version {CODE_VERSION}", f"versions up to {OLD_VERSION}")
            if before != self.cluster.fingerprint(number):
                raise LifeFailed("the older program changed the folder that it refused")
            await self.start_with(number, older=False)

    async def refuse_older_member(self, number: int) -> None:
        """A node whose folder does not say yet that the version is enabled: the others refuse it."""
        async with self.stage("an older node that was away", number):
            self.cluster.older.add(number)
            self.cluster.spawn(number)

            async def missing() -> str:
                log = self.cluster.members[number].log.read_text(errors="replace")
                return "" if "refused by the peer" in log and "is too old" in log else "it is not refused"

            await until("refused", missing)
            self._expect_said(
                self.cluster.members[number].log.read_text(errors="replace"), f"enabled {CODE_VERSION}"
            )
            await self._stop(number)
            await self.start_with(number, older=False)
            await until("all replicas in sync", self._misplaced)

    async def refuse_older_join(self, number: int) -> None:
        """A new node with the older program is refused, and ends."""
        async with self.stage("an older node joins", number):
            self.cluster.older.add(number)
            self.cluster.members[number].joins = tuple(self.cluster.running())
            self.cluster.spawn(number)
            self._expect_said(await self.cluster.ended(number), "refuses this node", "is too old")
            told = await self.about()
            if self.name(number) in [node["node"] for node in told["nodes"]]:
                raise LifeFailed("the node that was refused is registered")

    def _expect_said(self, said: str, *parts: str) -> None:
        line = next((line for line in said.splitlines() if all(part in line for part in parts)), None)
        if line is None:
            raise LifeFailed(f"{parts} were to be said, and not: {said}")
        self.say(f"  {line[:300]}")

    # -- a group of consumers --------------------------------------------------------------------

    async def finish_clients(self) -> None:
        """End the clients; then the group has been given everything, and nothing committed twice."""
        await super().finish_clients()
        if self.crowd is not None:
            ends = await read_to_the_end(self.cluster.urls, self.crowd)
            wrong = self.crowd.wrong(ends)
            self.say(f"  the group was given {self.crowd.given().total():,} records")
            if wrong:
                raise LifeFailed("; ".join(wrong[:10]))
        if self.guarded is not None:
            await self.limits_hold(self.guarded)

    async def close(self) -> None:
        """End all clients, the group's members too."""
        await super().close()
        for member in self.crowd.all if self.crowd is not None else ():
            with contextlib.suppress(ProcessLookupError):
                member.close()


async def _begin(up: Upgrade, *, group: bool) -> None:
    async with up.stage("topics on three nodes of the older program"):
        async with laminar.aio.connect(up.cluster.urls[:3]) as client:
            for name in up.plan.names:
                await client.create_topic(name, partitions=up.plan.partitions, replicas=REPLICAS)
        await up.start_clients()
        if group:
            up.crowd = Crowd(up.cluster.urls, up.rng, topic=up.plan.names[1])
            for _ in range(2):
                up.crowd.join()
        await up.workload.more(50, timeout_s=PATIENCE_S)
    await up.calm("calm, the older program")


async def whole(up: Upgrade) -> None:
    """All stages. Nodes 0 to 2 begin with the older program, 3 joins with the newer one, 4 is refused."""
    await _begin(up, group=True)
    await up.change_program(0, older=False)
    await up.expect_mixed()
    await up.topics_by_both(0, 1)
    await up.older_client(0)
    await up.leaders_on_both()
    up.cluster.members[3].joins = (1,)
    await up.join(3)
    await up.converge("a newer node among the older")
    await up.expect_mixed()
    # From the older to the newer program, and from that to the older.
    await up.hand_over_log(1, 3, 2)
    await up.restart(1)
    await up.leaders_on_both()
    await up.change_program(1, older=False)
    await up.change_program(0, older=True)
    await up.expect_mixed()
    await up.topics_by_both(0, 1)
    await up.calm("calm, mixed programs")
    await up.change_program(0, older=False)
    # It is stopped while the version is enabled, so its folder does not say so. It is emptied first: with the
    # next one stopped, too, partitions on both would have no majority.
    await up.empty(0)
    async with up.stage("stop", 0):
        await asyncio.to_thread(up.cluster.end, 0)
    async with up.stage("upgrade", 2):
        await asyncio.to_thread(up.cluster.end, 2)
        await up.start_with(2, older=False)
    await up.expect_enabled()
    await up.refuse_older_member(0)
    await up.api.command("POST", f"/v1/admin/nodes/{up.name(0)}/undrain")
    await up.refuse_older_program_on_newer_folder(1)
    await up.channel(1, refused=False)
    await up.token(1, refused=False)
    await up.limits(1, refused=False)
    up.guarded = 2
    await up.refuse_older_join(4)
    await up.expect_enabled()
    await up.converge("the wanted set")
    await up.even()


async def short(up: Upgrade) -> None:
    """A part of it: one goes back while it may, and none when it may not."""
    await _begin(up, group=False)
    await up.change_program(0, older=False)
    await up.expect_mixed()
    await up.topics_by_both(0, 1)
    await up.channel(0, refused=True)
    await up.token(0, refused=True)
    await up.limits(0, refused=True)
    await up.change_program(0, older=True)
    for number in range(3):
        await up.change_program(number, older=False)
    await up.expect_enabled()
    await up.channel(1, refused=False)
    await up.token(1, refused=False)
    await up.limits(1, refused=False)
    up.guarded = 2
    await up.refuse_older_program_on_newer_folder(0)
    await up.refuse_older_join(3)
