"""Rules of the UDP driver, on real sockets on loopback."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from swimprotocol.packet import Ping, Source
from swimprotocol.udp.pack import UdpPack

from membership.gossip import NO_SECRET, Gossip, Member, Seal
from membership.packets import Datagram, encode
from membership.swim import SwimSettings

FAST = SwimSettings(
    probe_period_ms=100, probe_timeout_ms=40, suspicion_ms=300, gossip_period_ms=20, seek_period_ms=200
)


class Cluster:
    """Gossips on loopback, and an event for every change that any of them reports."""

    def __init__(self) -> None:
        self.gossips: dict[str, Gossip] = {}
        self.addresses: dict[str, str] = {}
        self.sockets: dict[str, socket.socket] = {}
        self.news = asyncio.Event()

    def add(self, name: str, *, seeds: list[str] | None = None, secret: bytes | None = b"key") -> Gossip:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        gossip = Gossip(
            sock=sock,
            node=name,
            address=address,
            secret=secret,
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
        async with asyncio.timeout(30):
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
        changed = bytearray(Seal(b"key").close(body))
        changed[-1] ^= 1
        pickled = bytes(UdpPack(Seal(b"key")._signatures).pack(Ping(Source("evil", b""))))
        bad = [b"", b"noise", Seal(b"other").close(body), Seal(None).close(body), bytes(changed), pickled]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", int(cluster.addresses["a"].rpartition(":")[2])))
            sock.settimeout(30)
            for data in [*bad, Seal(b"key").close(b"\x91\x01"), b"x" * 1_201, b"y" * 60_000]:
                sock.send(data)
            sock.send(Seal(b"key").close(body))
            answer = await asyncio.to_thread(sock.recv, 2_000)

        counts = gossip.statistics()
        assert Seal(b"key").open(answer) is not None
        assert (len(bad), 1, 2) == (counts["bad_signature"], counts["malformed"], counts["oversize"])
        assert {"a"} == gossip.members().keys()


async def test_clusters_with_different_secrets_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not one with a secret and one without."""
    async with running() as cluster:
        one, other, none = cluster.add("a"), cluster.add("b", secret=b"other"), cluster.add("c", secret=None)
        refused = one._seal.open

        def watched(data: bytes) -> bytes | None:
            cluster.news.set()
            return refused(data)

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

        assert gossip.statistics()["unresolved"] >= 2
    assert strays == []


def test_releases_of_swim_protocol_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """swim-protocol: its version is inside the signature, so a rolling upgrade parts the cluster."""
    sealed = Seal(b"key").close(b"body")
    monkeypatch.setattr("swimprotocol.sign.__version__", "9.9.9")

    assert Seal(b"key").open(sealed) == b"body"


def test_a_cluster_without_a_secret_has_a_key_of_its_own() -> None:
    """swim-protocol would take the machine's network address, so two machines could never talk."""
    assert Seal(None).open(Seal(b"").close(b"body")) == b"body"
    assert Seal(NO_SECRET).open(Seal(None).close(b"body")) == b"body"


async def test_no_tcp_side_exists() -> None:
    """swim-protocol: its TCP side buffers without limit before any check. Nothing here listens but the one
    socket.
    """
    async with running() as cluster:
        cluster.add("a")
        port = int(cluster.addresses["a"].rpartition(":")[2])

        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("wrong", ["localhost:1", "nonsense", "1.2.3.4:0"])
def test_an_own_address_that_others_could_not_use_is_refused(wrong: str) -> None:
    """Here, not at every peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, pytest.raises(ValueError, match=r"."):
        Gossip(sock=sock, node="a", address=wrong, secret=None, info={})


def test_information_may_not_take_a_reserved_name_nor_too_much_room() -> None:
    """A ValueError when it is said, with the sizes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with pytest.raises(ValueError, match="reserved"):
            Gossip(sock=sock, node="a", address="127.0.0.1:1", secret=None, info={"address": "x"})
        with pytest.raises(ValueError, match="800"):
            Gossip(sock=sock, node="a", address="127.0.0.1:1", secret=None, info={"long": "x" * 900})


async def test_a_callback_sees_the_member_as_it_is() -> None:
    """`on_change` gets the whole record, and may ask for all members."""
    async with running() as cluster:
        seen: list[Member] = []

        def changed(member: Member) -> None:
            seen.append(member)
            cluster.news.set()

        cluster.add("a").on_change = changed
        cluster.add("b")

        await cluster.until(lambda: bool(seen))

        assert seen[0] == cluster.gossips["a"].members()["b"]
