"""A loopback net for each test cluster: 127.77.N.1, 127.77.N.2, ... with the same ports on every address.

All of 127.0.0.0/8 is loopback on Linux and needs no root. A cluster with a net of its own can use fixed
ports: there is no race for a free one, and a node that restarts comes back where it was.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

NETS = range(1, 255)
# For who has to be on 127.0.0.1. Below 32768 the kernel gives no port of its own choice.
PORT_BLOCKS = range(20_000, 32_000, 400)


@dataclass(frozen=True)
class ClusterNet:
    """One net, held until `close`. `host(1)` is its first address, and so on to 254."""

    number: int
    claim: socket.socket

    def host(self, number: int) -> str:
        assert 1 <= number <= 254, f"host {number} of a net"
        return f"127.77.{self.number}.{number}"

    def hosts(self, count: int) -> list[str]:
        return [self.host(number + 1) for number in range(count)]

    def close(self) -> None:
        self.claim.close()


def claim_net() -> ClusterNet:
    """A net that no other test on this machine holds.

    The claim is an abstract Unix socket: taking its name is atomic between all processes, and it is given
    back when we die. Each process begins its search elsewhere, so that a net just given back rests a while.
    """
    for number in _from(NETS):
        claim = _claim(f"test-net-127.77.{number}")
        if claim is not None:
            return ClusterNet(number, claim)
    raise RuntimeError(f"all {len(NETS)} loopback nets are taken")


@contextmanager
def port_block() -> Iterator[int]:
    """The first of 400 ports of 127.0.0.1 that are within the block no other test's on this machine."""
    for port in _from(PORT_BLOCKS):
        claim = _claim(f"test-ports-{port}")
        if claim is not None:
            with claim:
                yield port
            return
    raise RuntimeError(f"all {len(PORT_BLOCKS)} blocks of ports are taken")


def _claim(name: str) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{name}")
    except OSError:
        claim.close()
        return None
    return claim


_given = 0


def _from(choices: Sequence[int]) -> Iterator[int]:
    global _given
    _given += 1
    for step in range(len(choices)):
        yield choices[(os.getpid() * 31 + _given + step) % len(choices)]
