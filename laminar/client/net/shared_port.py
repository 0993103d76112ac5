"""Where a shard can be reached by its node's shared port, for a client that may use no other.

The URLs that nodes report are those of the shards' own ports. Here each is looked up in the answer of
`/v1/cluster`: the node's shared port, and which shard it is of how many. The pool then connects from a source
port that leads there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from laminar.http.protocol.answer import Answer, ConnectionFailed

LOOK_AGAIN_MS = 1_000


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """One of `shards` shards at the shared port of the node at `url`."""

    url: str
    shard: int
    shards: int


class SharedPorts:
    """Places of shards by the URL of their own port, requested when an unknown one comes up.

    `nodes` are URLs to begin with, whichever shard they lead to. `ask` is `GET /v1/cluster` of one of them;
    it raises `ConnectionFailed`.
    """

    def __init__(
        self, nodes: Iterable[str], *, ask: Callable[[str], Awaitable[Answer]], now_ms: Callable[[], int]
    ) -> None:
        self._nodes = dict.fromkeys(nodes)
        self._ask = ask
        self._now_ms = now_ms
        self._places: dict[str, ShardPlace] = {}
        self._heard_at_ms: int | None = None

    async def place(self, url: str) -> ShardPlace | None:
        """Return where the shard with this URL is; None for a node's own URL, or one that no node names.

        Raises:
            ConnectionFailed: (not sent) no node could be asked.
        """
        if url in self._nodes:
            return None
        now_ms = self._now_ms()
        if url not in self._places and (
            self._heard_at_ms is None or now_ms - self._heard_at_ms >= LOOK_AGAIN_MS
        ):
            await self._learn()
            self._heard_at_ms = now_ms
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
