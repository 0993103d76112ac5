"""Source ports that lead to a shard, and connections from them."""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.http.client.source_port import connect_to_shard, fitting_ports
from router import shard_of_source_port


@given(st.integers(1, 64), st.data())
def test_every_fitting_port_leads_to_its_shard_and_none_comes_twice(shards: int, data: st.DataObject) -> None:
    """By the arithmetic of `router`, which a client may not import."""
    shard = data.draw(st.integers(0, shards - 1))

    ports = list(fitting_ports(shard, shards, rng=random.Random(0)))

    assert {shard} == {shard_of_source_port(port, shards) for port in ports}
    assert len(set(ports)) == len(ports) >= 8192 // shards
    assert min(ports) >= 49_152 and max(ports) < 65_536


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_connection_comes_from_a_fitting_port(host: str) -> None:
    """Whatever the shard, for IPv4 and IPv6."""
    try:
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip(f"no {host} here")
    with server:
        for shard in range(5):
            port = server.getsockname()[1]
            with await connect_to_shard(host, port, shard=shard, shards=5, rng=random.Random()) as sock:
                assert shard == shard_of_source_port(sock.getsockname()[1], 5)


async def test_a_port_that_is_taken_is_passed_over() -> None:
    """The same draw comes first again, and the same pair of addresses can't be had twice."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        first = await connect_to_shard("127.0.0.1", port, shard=1, shards=3, rng=random.Random(5))
        second = await connect_to_shard("127.0.0.1", port, shard=1, shards=3, rng=random.Random(5))
        with first, second:
            ports = {first.getsockname()[1], second.getsockname()[1]}

    assert 2 == len(ports)
    assert {1} == {shard_of_source_port(each, 3) for each in ports}


async def test_a_refused_connection_says_so() -> None:
    with socket.socket() as nobody_listens:  # and nobody else can, while it has the port
        nobody_listens.bind(("127.0.0.1", 0))
        port = nobody_listens.getsockname()[1]

        with pytest.raises(ConnectionRefusedError):
            await connect_to_shard("127.0.0.1", port, shard=0, shards=2, rng=random.Random())
