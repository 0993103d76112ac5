"""Access to a given shard of a node through the node's shared port, if a client can reach no other.

Nodes report the URLs of their shards' own ports. `SharedPorts` looks such a URL up in the answer of
`/v1/cluster`, and finds the node's shared port and the number of the shard. The pool then connects to the
shared port from a source port that the kernel maps to this shard.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from laminar.http.protocol.answer import Answer, ConnectionFailed

LOOK_AGAIN_MS = 1_000


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """The place of a shard: number `shard` of `shards`, behind the shared port of the node at `url`."""

    url: str
    shard: int
    shards: int


class SharedPorts:
    """A table from the URL of a shard's own port to its `ShardPlace`, requested from a node when needed.

    `nodes` are URLs of shared ports to begin with; any shard may answer there. `ask` sends ``GET
    /v1/cluster`` to one of them; it raises `ConnectionFailed` without an answer.
    """

    def __init__(
        self, nodes: Iterable[str], *, ask: Callable[[str], Awaitable[Answer]], now_ms: Callable[[], int]
    ) -> None:
        self._nodes = dict.fromkeys(nodes)
        self._ask = ask
        self._now_ms = now_ms
        self._places: dict[str, ShardPlace] = {}
        self._learned_at_ms: int | None = None

    async def place(self, url: str) -> ShardPlace | None:
        """Return the place of the shard with this URL; None for a URL of `nodes`, or one that no node names.

        Raises:
            ConnectionFailed: (`sent` is false) no node answered the request for the places.
        """
        if url in self._nodes:
            return None
        now_ms = self._now_ms()
        if url not in self._places and (
            self._learned_at_ms is None or now_ms - self._learned_at_ms >= LOOK_AGAIN_MS
        ):
            await self._learn()
            self._learned_at_ms = now_ms
        return self._places.get(url)

    async def _learn(self) -> None:
        last = "no node answered"
        for url in list(self._nodes):
            try:
                answer = await self._ask(url)
            except ConnectionFailed as failure:
                last = str(failure)
                continue
            if answer.status != 200:
                last = f"{url} answered {answer.status}"
                continue
            for node in answer.json()["nodes"]:
                shards = node["shards"]
                self._nodes[node["url"]] = None
                for each in shards:
                    self._places[each["url"]] = ShardPlace(node["url"], int(each["shard"]), len(shards))
            return
        raise ConnectionFailed(f"where the shards are is not known: {last}", sent=False)
