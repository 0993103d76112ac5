"""Rules of the UDP driver, on real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from swimprotocol.packet import Ping, Source
from swimprotocol.udp.pack import UdpPack

from membership.gossip.gossip import Gossip, Member, monotonic_ms
from membership.gossip.packets import Datagram, encode
from membership.gossip.swim import Swim, SwimSettings
from membership.sealing.bound import Opened
from membership.sealing.seal import NO_SECRET, GossipKey, Seal
from membership.sealing.signed import SignedForm

FAST = SwimSettings(
    probe_period_ms=100, probe_timeout_ms=40, suspicion_ms=300, gossip_period_ms=20, seek_period_ms=200
)


def key_of(secret: bytes) -> GossipKey:
    """The keys of a secret; what is derived is not the secret itself."""
    return GossipKey(b"derived from " + secret, secret)


def seal_of(*secrets: bytes, newer: bool = True) -> Seal:
    """The seal of a process of its own."""
    return Seal(lambda: [key_of(each) for each in secrets], is_newer=lambda: newer, draw=os.urandom)


# Reached only by what hangs.
LIMIT_S = 60


async def soon(done: Callable[[], bool]) -> None:
    """Wait until a condition holds that nothing announces."""
    async with asyncio.timeout(LIMIT_S):
        while not done():  # noqa: ASYNC110  # what is waited for is a counter, not an event
            await asyncio.sleep(0.01)


def has_received(gossip: Gossip, count: int) -> bool:
    return gossip.statistics()["received"] >= count


def listening() -> set[str]:
    """The TCP sockets on which this process listens, by inode: a port may be another program's."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/self/net", name).read_text().splitlines()
    ]
    found = {row[9] for row in rows if row[3] == "0A"}
    opened = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing
            opened.add(os.readlink(link))
    return {inode for inode in found if f"socket:[{inode}]" in opened}


class Cluster:
    """Gossips on loopback, and an event for every change that any of them reports."""

    def __init__(self) -> None:
        self.gossips: dict[str, Gossip] = {}
        self.addresses: dict[str, str] = {}
        self.sockets: dict[str, socket.socket] = {}
        self.news = asyncio.Event()

    def add(
        self,
        name: str,
        *,
        seeds: list[str] | None = None,
        secrets: Sequence[bytes] = (b"key",),
        newer: Callable[[], bool] = lambda: True,
    ) -> Gossip:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        gossip = Gossip(
            sock=sock,
            node=name,
            address=address,
            keys=lambda: [key_of(secret) for secret in secrets],
            is_newer=newer,
            info={"shards": 2, "url": f"http://{name}", "ports": [1, 2, 3], "id": b"\0\1"},
            rng=random.Random(name),
            settings=FAST,
            on_change=lambda member: self.news.set(),
        )
        self.gossips[name], self.addresses[name], self.sockets[name] = gossip, address, sock
        gossip.start(list(self.addresses.values())[:1] if seeds is None else seeds)
        return gossip

    def statuses(self, name: str) -> dict[str, str]:
        return {member.node: member.status for member in self.gossips[name].members().values()}

    def all_alive(self) -> bool:
        wanted = dict.fromkeys(self.gossips, "alive")
        return all(self.statuses(name) == wanted for name in self.gossips)

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not done():
                self.news.clear()
                await self.news.wait()

    def die(self, name: str) -> None:
        """Without a farewell: no timer, no reader, the socket closed."""
        gossip = self.gossips.pop(name)
        asyncio.get_running_loop().remove_reader(self.sockets[name])
        assert gossip._timer is not None
        gossip._timer.cancel()
        self.sockets.pop(name).close()


@asynccontextmanager
async def running() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        for gossip in cluster.gossips.values():
            await gossip.close()
        for sock in cluster.sockets.values():
            sock.close()


async def test_one_timer_wakes_it_however_often_seeds_and_information_are_set() -> None:
    """Each change of the catalog sets the seeds: a node of many topics must not wake more often for that."""
    probes, read = 5, 0

    def clock() -> int:
        nonlocal read
        read += 1
        return monotonic_ms()

    loop = asyncio.get_running_loop()
    with socket.socket(type=socket.SOCK_DGRAM) as sock, socket.socket(type=socket.SOCK_DGRAM) as seed:
        for each in (sock, seed):
            each.bind(("127.0.0.1", 0))
        seed.setblocking(False)
        seeds = [f"127.0.0.1:{seed.getsockname()[1]}"]
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        keys = [key_of(b"key")]
        gossip = Gossip(
            sock=sock, node="a", address=address, keys=lambda: keys, info={}, clock=clock, settings=FAST
        )
        gossip.start(seeds)
        for number in range(100):
            gossip.set_seeds(seeds)
            gossip.set_seeds([*seeds, f"127.0.0.1:{number + 1}"])
            gossip.update_info({"number": number})
        gossip.set_seeds(seeds)
        while seed in select.select([seed], [], [], 0)[0]:
            seed.recv(2_000)
        read = 0
        async with asyncio.timeout(LIMIT_S):
            for _ in range(probes):
                await loop.sock_recv(seed, 2_000)
        await gossip.close()

    # It is alone: each probe period it looks for its seed, and each gossip period it has news for nobody.
    wakes = probes * (FAST.probe_period_ms // FAST.gossip_period_ms + 1)
    assert read <= 2 * 2 * wakes, f"the clock was read {read} times in {probes} probe periods"


async def test_three_nodes_find_each_other_and_notice_death_return_and_farewell() -> None:
    """The whole way once, over UDP: join, information, crash, restart, leave."""
    async with running() as cluster:
        for name in ("a", "b", "c"):
            cluster.add(name)
        await cluster.until(cluster.all_alive)
        member = cluster.gossips["a"].members()["c"]
        assert member.address == cluster.addresses["c"]
        assert member.info == {"shards": 2, "url": "http://c", "ports": [1, 2, 3], "id": b"\0\1"}

        cluster.gossips["b"].update_info({"shards": 4})
        await cluster.until(lambda: cluster.gossips["a"].members()["b"].info == {"shards": 4})

        cluster.die("c")
        await cluster.until(lambda: {cluster.statuses(name)["c"] for name in "ab"} == {"dead"})
        cluster.add("c")
        await cluster.until(cluster.all_alive)
        assert cluster.gossips["a"].members()["c"].incarnation > member.incarnation

        await cluster.gossips.pop("b").close()
        await cluster.until(lambda: {cluster.statuses(name)["b"] for name in "ac"} == {"dead"})


async def test_datagrams_without_our_signature_are_dropped_and_counted() -> None:
    """Noise, a wrong key, a changed bit, swim-protocol's pickles, and what is too long: none is read."""
    async with running() as cluster:
        gossip = cluster.add("a")
        body = encode(Datagram(Ping(Source("evil", b"")), 1))
        ours, here = seal_of(b"key"), cluster.addresses["a"]
        changed = bytearray(ours.close(body, here))
        changed[-1] ^= 1
        pickled = bytes(UdpPack(SignedForm(b"key")._signatures).pack(Ping(Source("evil", b""))))
        bad = [b"", b"noise", seal_of(b"other").close(body, here), seal_of().close(body, here)]
        bad += [bytes(changed), pickled, SignedForm(b"other").close(body)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", int(cluster.addresses["a"].rpartition(":")[2])))
            sock.settimeout(LIMIT_S)
            for data in [*bad, b"x" * 1_201, b"y" * 60_000]:
                sock.send(data)
            for content in (b"\x91\x01", body):
                sock.send(ours.close(content, here))
                if content != body:
                    again = ours.open(await asyncio.to_thread(sock.recv, 2_000), here)
                    assert again.send is not None
                    sock.send(again.send[1])
            answer = ours.open(await asyncio.to_thread(sock.recv, 2_000), here)

        counts = gossip.statistics()
        assert "challenged" == answer.outcome, "the node asks us to show that we are there, before it answers"
        assert (len(bad), 1, 2) == (counts["bad_signature"], counts["malformed"], counts["oversize"])
        assert {"a"} == gossip.members().keys()


async def test_clusters_with_different_secrets_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not one with a secret and one without."""
    async with running() as cluster:
        one, other, none = (
            cluster.add("a"),
            cluster.add("b", secrets=[b"other"]),
            cluster.add("c", secrets=[]),
        )
        refused = one._seal.open

        def watched(data: bytes, sender: str) -> Opened:
            cluster.news.set()
            return refused(data, sender)

        monkeypatch.setattr(one._seal, "open", watched)
        await cluster.until(lambda: one.statistics()["bad_signature"] >= 4)

        assert [len(gossip.members()) for gossip in (one, other, none)] == [1, 1, 1]


async def test_a_seed_that_is_a_host_name_is_looked_up_and_a_bad_one_harms_nobody() -> None:
    """swim-protocol: a host name raises in a stray task. Here a failed look-up is counted and tried again."""
    strays: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: strays.append(context))
    async with running() as cluster:
        cluster.add("a", seeds=[])
        port = cluster.addresses["a"].rpartition(":")[2]
        seeds = ["no-such-host.invalid:7000", "x" * 70 + "..:1", "localhost:no", f"localhost:{port}"]
        gossip = cluster.add("b", seeds=seeds)

        await cluster.until(cluster.all_alive)

        # The good one may be found first, and the network may be asked for a bad one.
        await soon(lambda: gossip.statistics()["unresolved"] >= 2)
    assert strays == []


async def test_seeds_that_come_later_are_looked_up_too_and_stay_when_others_come() -> None:
    """The catalog tells them after the start, again at each of its entries. Names were dropped then."""
    async with running() as cluster:
        cluster.add("a", seeds=[])
        gossip = cluster.add("b", seeds=[])
        name = f"localhost:{cluster.addresses['a'].rpartition(':')[2]}"

        gossip.set_seeds([name])
        gossip.set_seeds([name, "127.0.0.1:1"])

        await cluster.until(cluster.all_alive)


def test_releases_of_swim_protocol_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """swim-protocol: its version is inside the signature, so a rolling upgrade parts the cluster."""
    signed = SignedForm(b"key").close(b"body")
    monkeypatch.setattr("swimprotocol.sign.__version__", "9.9.9")

    assert SignedForm(b"key").open(signed) == b"body"


def test_a_cluster_without_a_secret_has_a_key_of_its_own() -> None:
    """swim-protocol would take the machine's network address, so two machines could never talk."""
    one, other = seal_of(newer=False), seal_of(newer=False)
    assert other.open(one.close(b"body", "here"), "there").body == b"body"
    assert SignedForm(NO_SECRET).open(one.close(b"body", "here")) == b"body"


async def test_no_tcp_side_exists() -> None:
    """swim-protocol: its TCP side buffers without limit before any check. Nothing here listens but the one
    socket.
    """
    before = listening()
    async with running() as cluster:
        cluster.add("a")
        await asyncio.sleep(0)

        assert set() == listening() - before


@pytest.mark.parametrize("wrong", ["localhost:1", "nonsense", "1.2.3.4:0"])
def test_an_own_address_that_others_could_not_use_is_refused(wrong: str) -> None:
    """Here, not at every peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, pytest.raises(ValueError, match=r"."):
        Gossip(sock=sock, node="a", address=wrong, keys=list, info={})


def test_information_may_not_take_a_reserved_name_nor_too_much_room() -> None:
    """A ValueError when it is said, with the sizes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with pytest.raises(ValueError, match="reserved"):
            Gossip(sock=sock, node="a", address="127.0.0.1:1", keys=list, info={"address": "x"})
        with pytest.raises(ValueError, match="800"):
            Gossip(sock=sock, node="a", address="127.0.0.1:1", keys=list, info={"long": "x" * 900})


async def test_a_callback_sees_the_member_as_it_is() -> None:
    """`on_change` gets the whole record, and may ask for all members."""
    async with running() as cluster:
        seen: list[tuple[Member, Member]] = []

        def changed(member: Member) -> None:
            seen.append((member, cluster.gossips["a"].members()[member.node]))
            cluster.news.set()

        cluster.add("a").on_change = changed
        cluster.add("b")

        await cluster.until(lambda: bool(seen))

        told, asked = seen[0]
        assert told == asked and "b" == told.node


class Tap:
    """What travelled between the gossips of a cluster, as one who listens has it."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        # Of each datagram who sent it, to which address.
        self.taken: list[tuple[str, str, bytes]] = []
        for name, gossip in cluster.gossips.items():
            send = gossip._send

            def tapped(
                address: str, data: bytes, name: str = name, send: Callable[[str, bytes], None] = send
            ) -> None:
                self.taken.append((name, address, data))
                send(address, data)

            monkeypatch.setattr(gossip, "_send", tapped)


async def test_what_was_recorded_is_not_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whom it was for, by another, and after that one's restart; nor is more sent for it than it has."""
    async with running() as cluster:
        for name in "abc":
            cluster.add(name)
        tap = Tap(cluster, monkeypatch)
        await cluster.until(cluster.all_alive)
        cluster.gossips["b"].update_info({"shards": 9})
        await cluster.until(
            lambda: all(cluster.gossips[name].members()["b"].info["shards"] == 9 for name in "ac")
        )
        recorded = [data for _, _, data in tap.taken]
        assert len(recorded) > 10

        cluster.die("c")
        await cluster.until(lambda: cluster.statuses("a")["c"] == "dead")
        cluster.add("c", seeds=[])  # it has heard nothing yet, of anyone
        victims = [cluster.gossips["a"], cluster.gossips["c"]]
        outcomes: list[str] = []
        received: list[Datagram] = []
        for victim in victims:
            core, seal = victim._core, victim._seal

            def opened(data: bytes, sender: str, seal: Seal = seal) -> Opened:
                found = Seal.open(seal, data, sender)
                if sender == thief:
                    outcomes.append(found.outcome)
                return found

            def receive(datagram: Datagram, *, sender: str, now_ms: int, core: Swim = core) -> None:
                if sender == thief:
                    received.append(datagram)
                Swim.receive(core, datagram, sender=sender, now_ms=now_ms)

            monkeypatch.setattr(seal, "open", opened)
            monkeypatch.setattr(core, "receive", receive)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            sock.setblocking(False)
            thief = f"127.0.0.1:{sock.getsockname()[1]}"
            sent = 0
            for name in "ac":
                for data in recorded:
                    sock.sendto(data, ("127.0.0.1", int(cluster.addresses[name].rpartition(":")[2])))
                    sent += 1
                    if sent % 20 == 0:  # so that its buffer holds them, however busy the machine is
                        await soon(lambda sent=sent: len(outcomes) == sent)  # type: ignore[misc]
            await soon(lambda: len(outcomes) == sent)
            answered = 0
            while True:
                try:
                    answered += len(sock.recv(2_000))
                except BlockingIOError:
                    break

        assert [] == received
        assert 2 * len(recorded) == sent and set(outcomes) <= {"replayed", "challenged"}
        assert answered < 2 * sum(map(len, recorded))


async def test_gossip_goes_on_while_the_secret_changes() -> None:
    """Node by node, each step on all before the next: no one is doubted for it."""
    held = {name: [b"old"] for name in "ab"}
    async with running() as cluster:
        for name in "ab":
            cluster.add(name, secrets=held[name])
        await cluster.until(cluster.all_alive)
        for step in ([b"old", b"new"], [b"new", b"old"], [b"new"]):
            for name in "ab":
                held[name][:] = step
                for gossip in cluster.gossips.values():
                    await soon(partial(has_received, gossip, gossip.statistics()["received"] + 4))
                # One that ran late may have doubted the other for a moment. Not for what it sent: see below.
                await cluster.until(cluster.all_alive)
        assert all(gossip.statistics()["bad_signature"] == 0 for gossip in cluster.gossips.values())


async def test_programs_of_two_versions_hear_each_other_until_all_are_new() -> None:
    """Until then all send the older form; one that hears the newer one knows that all know it."""
    newer = {"a": False, "b": False}
    async with running() as cluster:
        for name in "ab":
            cluster.add(name, newer=partial(newer.__getitem__, name))
        await cluster.until(cluster.all_alive)
        assert not any(gossip._seal.newer for gossip in cluster.gossips.values())

        newer["a"] = True  # it learns first what is enabled
        await soon(lambda: cluster.gossips["b"]._seal.newer)
        await cluster.until(cluster.all_alive)
        assert newer == {"a": True, "b": False}

        older = SignedForm(b"key").close(encode(Datagram(Ping(Source("evil", b"")), 1)))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(older, ("127.0.0.1", int(cluster.addresses["a"].rpartition(":")[2])))
            await soon(lambda: bool(cluster.gossips["a"].statistics()["outdated"]))


async def test_who_takes_over_a_dead_nodes_address_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the key it can answer no ping, and its own are noise."""
    async with running() as cluster:
        for name in "abc":
            cluster.add(name)
        tap = Tap(cluster, monkeypatch)

        def told_it() -> dict[str, bytes]:
            return {name: data for name, address, data in tap.taken if address == cluster.addresses["c"]}

        await cluster.until(cluster.all_alive)
        await soon(lambda: told_it().keys() == {"a", "b"})
        port = int(cluster.addresses["c"].rpartition(":")[2])
        cluster.die("c")
        thief = seal_of(b"a guess")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", port))
            sock.setblocking(False)
            loop = asyncio.get_running_loop()

            def answer(data: bytes, to: str) -> None:
                address = ("127.0.0.1", int(to.rpartition(":")[2]))
                sock.sendto(data, address)  # what it has heard, sent back
                sock.sendto(thief.close(encode(Datagram(Ping(Source("c", b"x" * 8)), 1)), ""), address)

            def echo() -> None:
                data, (host, port) = sock.recvfrom(2_000)
                answer(data, f"{host}:{port}")

            loop.add_reader(sock, echo)
            # To both of them: one may hear of the death by the other, and never ask.
            for name, data in told_it().items():
                answer(data, cluster.addresses[name])
            await cluster.until(lambda: {cluster.statuses(name)["c"] for name in "ab"} == {"dead"})
            counts = [cluster.gossips[name].statistics for name in "ab"]
            await soon(lambda: all(count()["bad_signature"] and count()["replayed"] for count in counts))
            loop.remove_reader(sock)
