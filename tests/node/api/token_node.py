"""A real node that asks for tokens, and the tokens of those who ask it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from laminar.testing.cluster import LocalCluster


@dataclass
class TokenNode:
    """A node of several shards, with tokens by name."""

    cluster: LocalCluster
    http: httpx.Client
    tokens: dict[str, str]

    def ask(self, who: str, method: str, target: str, *, shard: int = 0, **more: Any) -> httpx.Response:
        """Ask a shard; without a token if `who` is empty.

        All shards know a token when its creation is answered, but on a machine that is slow: then it is asked
        again.
        """
        member = self.cluster.members[0]
        headers = {"authorization": f"Bearer {self.tokens[who]}"} if who else {}
        headers |= more.pop("headers", {})
        until = time.monotonic() + 60
        while True:
            url = f"http://{member.host}:{member.port + 1 + shard}{target}"
            answer = self.http.request(method, url, headers=headers, **more)
            if answer.status_code != 401 or not who or time.monotonic() > until:
                return answer
            time.sleep(0.02)

    def make(self, name: str, *grants: tuple[str, str]) -> None:
        """Make a token of a principal; a grant is a role and a prefix."""
        document = {"name": name, "grants": [{"role": role, "prefix": prefix} for role, prefix in grants]}
        answer = self.ask("admin", "POST", "/v1/admin/tokens", json=document)
        assert 201 == answer.status_code, answer.text
        self.tokens[name] = answer.json()["token"]
