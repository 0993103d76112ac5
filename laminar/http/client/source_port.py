"""Connecting from a source port that leads to a wanted shard of a node.

All shards of a node listen on its shared port, and the kernel gives a connection to shard
`(source port >> 1) mod shards` (docs/decisions/0004). So a client that binds a fitting port before it
connects reaches the shard that owns what it wants, even if a firewall lets only the shared port through.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
import socket
from collections.abc import Iterator
from typing import Final

# RFC 6335's dynamic ports, halved as the rule halves them.
_FIRST_HALF: Final = 49_152 >> 1
_END_OF_HALVES: Final = 65_536 >> 1
# After this many ports that are taken, any port will do: another shard then forwards what it is asked.
_TRIES: Final = 32
_TAKEN: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


def fitting_ports(shard: int, shards: int, *, rng: random.Random) -> Iterator[int]:
    """Yield the odd dynamic source ports that lead to `shard`, each once, beginning at a random one.

    Only odd ports, because Linux's `connect` prefers even ones, so the odd are likely to be free.
    """
    assert 0 <= shard < shards, f"shard {shard} of {shards}"
    halves = range(_FIRST_HALF + (shard - _FIRST_HALF) % shards, _END_OF_HALVES, shards)
    first = rng.randrange(len(halves))
    for place in range(len(halves)):
        yield 2 * halves[(first + place) % len(halves)] + 1


async def connect_to_shard(
    host: str, port: int, *, shard: int, shards: int, rng: random.Random
) -> socket.socket:
    """Return a socket that is connected over a node's shared port `port` to `shard`.

    If no fitting source port is free, it is connected to any shard.

    Raises:
        OSError: connecting failed.
    """
    loop = asyncio.get_running_loop()
    refused: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        for source in (*itertools.islice(fitting_ports(shard, shards, rng=rng), _TRIES), 0):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                # Ports to one node may be those to another; the same pair twice fails at `connect`.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("", source))
                await loop.sock_connect(sock, address)
            except OSError as fault:
                sock.close()
                refused = fault
                if fault.errno not in _TAKEN:
                    break
            except BaseException:
                sock.close()
                raise
            else:
                return sock
    raise refused or OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
