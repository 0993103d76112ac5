"""A cluster that begins as one node and gets the others one by one, and what its HTTP API answers."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from laminar.testing.cluster import STOP_TIMEOUT_S, LocalCluster

PATIENCE_S = 180.0
"""Longest wait for anything that a cluster does by itself, on a machine that does other things too."""

_PAUSE_S = 0.2


class LifeFailed(Exception):
    """Something that the run insists on did not come about."""


class GrowingCluster(LocalCluster):
    """`LocalCluster` that starts with its first node alone; `nodes` is how many there may be."""

    def start(self, *, timeout: float = PATIENCE_S) -> None:
        """Start the first node, and wait until it serves."""
        self.spawn(0)
        self.wait_ready([0], timeout=timeout)

    def end(self, number: int) -> None:
        """Stop a node by SIGTERM, and wait until its processes are gone."""
        process = self.members[number].process
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        self.kill(number)

    def running(self) -> list[int]:
        """Return the numbers of the nodes that run."""
        return [member.number for member in self.members if member.running]


class Api:
    """The HTTP API of a cluster, of the first running node that answers."""

    def __init__(self, cluster: GrowingCluster) -> None:
        self._cluster = cluster
        self._http = httpx.AsyncClient(trust_env=False, timeout=10.0)

    async def get(self, path: str) -> Any:
        """Return the JSON of an address; None where no node answers 200."""
        for number in self._cluster.running():
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._http.get(self._cluster.urls[number] + path)
                if answer.status_code == 200:
                    return answer.json()
        return None

    async def told(self, path: str) -> Any:
        """Return the JSON of an address; ask until one node answers 200.

        Raises:
            LifeFailed: none did within `PATIENCE_S`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while (found := await self.get(path)) is None:
            if time.monotonic() >= deadline:
                raise LifeFailed(f"no node tells {path} in {PATIENCE_S:g} s")
            await asyncio.sleep(_PAUSE_S)
        return found

    async def metric(self, name: str) -> float:
        """Return the sum of a metric over the processes of the nodes that answer; 0 if none has it."""
        total = 0.0
        for number in self._cluster.running():
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._http.get(self._cluster.urls[number] + "/metrics")
                found = [line for line in answer.text.splitlines() if line.startswith(name + "{")]
                total += sum(float(line.rsplit(" ", 1)[1]) for line in found)
        return total

    async def command(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer to a command that may be repeated; ask until one node accepts it.

        Raises:
            LifeFailed: it was not accepted within `PATIENCE_S`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            told = "no node runs"
            for number in self._cluster.running():
                url = self._cluster.urls[number] + path
                try:
                    answer = await self._http.request(method, url, json=body)
                except httpx.HTTPError as error:
                    told = repr(error)
                    continue
                if answer.is_success:
                    return answer.json()
                told = answer.text
            if time.monotonic() >= deadline:
                raise LifeFailed(f"{method} {path} was not accepted in {PATIENCE_S:g} s: {told}")
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def until(what: str, missing: Callable[[], Awaitable[str]], *, timeout_s: float = PATIENCE_S) -> float:
    """Wait until `missing` returns "", and return how many seconds that took.

    Raises:
        LifeFailed: `timeout_s` have passed; the message says what is missing still.
    """
    began_s = time.monotonic()
    while still := await missing():
        if time.monotonic() - began_s >= timeout_s:
            raise LifeFailed(f"after {timeout_s:g} s still not {what}: {still}")
        await asyncio.sleep(_PAUSE_S)
    return time.monotonic() - began_s
