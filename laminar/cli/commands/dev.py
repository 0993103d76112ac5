"""`laminar dev`: a cluster of real nodes on this machine, in the foreground, until Ctrl-C.

While it runs there is a context `dev`, in which a topic is created when it is first used. It becomes the
current context if there was none. The table is computed by pure functions from answers that any client can
request.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.commands.cluster import Partitions, node_rows
from laminar.cli.commands.topic import all_topics
from laminar.cli.contexts import Contexts
from laminar.cli.errors import Failed, UsageError, complain
from laminar.cli.exit_codes import EXIT_DONE
from laminar.cli.output import console_of, table_of
from laminar.client.errors import Error
from laminar.client.net.endpoints import process_mark

if TYPE_CHECKING:
    from rich.live import Live

    from laminar.client.sync.client import Client
    from laminar.testing.cluster import LocalCluster

CONTEXT = "dev"
REFRESH_S = 1.0
# Timeout of a request for the table. If it fails, the next one follows soon.
ASK_TIMEOUT_S = 5.0
MAX_NODES = 9
RESTART_AFTER_S = 3.0
MAX_ENDS = 5
COLUMNS = ("node", "status", "url", "leads", "replicas", "records", "records_per_s")


def dev(
    *,
    nodes: Annotated[int, Parameter(help="Number of nodes.")] = 3,
    shards: Annotated[int, Parameter(help="Shards of each node; each is a process.")] = 2,
    port: Annotated[
        int, Parameter(help="Port of the first node; each further one uses the next 200 higher.")
    ] = 7070,
    data: Annotated[
        Path | None, Parameter(help="Where data and logs stay; if left out, they are gone at the end.")
    ] = None,
) -> int:
    """Start a cluster, show it, and stop it at Ctrl-C. Every node is a real one, on 127.0.0.1."""
    from laminar.client.sync.client import connect
    from laminar.testing.cluster import PORT_STEP, LocalCluster
    from laminar.testing.nodes import ServerFailed

    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes is between 1 and {MAX_NODES}, not {nodes}")
    ports = [port + PORT_STEP * number for number in range(nodes)]
    with contextlib.ExitStack() as stack:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laminar-dev-")))
        cluster = LocalCluster(folder, nodes=nodes, shards=shards, hosts=["127.0.0.1"] * nodes, ports=ports)
        try:
            stack.enter_context(cluster)
        except ServerFailed as failure:
            raise Failed(str(failure)) from None
        name, is_current = stack.enter_context(own_context(cluster.urls))
        client = stack.enter_context(connect(cluster.urls, timeout=ASK_TIMEOUT_S))
        table = _table()
        # From here on nothing is imported. If an interrupt comes while Python runs `exec`, as the import of a
        # dataclass does, the process ends itself by SIGINT later, even if the interrupt was caught.
        print(welcome(cluster.urls[0], context=None if is_current else name), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            watch(cluster, client, table)
    return EXIT_DONE


def welcome(url: str, *, context: str | None = None) -> str:
    """Return the next steps for the user, as lines to copy.

    `context` is the one to choose first, if another one is current; else None.
    """
    choose = [] if context is None else [f"laminar context use {context}"]
    lines = [
        *choose,
        "echo hi | laminar produce hello",
        "laminar consume hello -f",
        f"curl {url}/v1/cluster",
    ]
    return "\n".join(
        ["ready; in a second terminal:", "", *(f"  {line}" for line in lines), "", "Ctrl-C ends it."]
    )


@contextlib.contextmanager
def own_context(urls: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Keep a context for this cluster while the block runs; yield its name and whether it is current.

    No existing context is changed: if the name `dev` is taken, a number is added. The context becomes the
    current one only if there is none, because otherwise commands in other terminals would suddenly use this
    cluster. If this process is killed, the context counts as removed.
    """
    mine = {"urls": list(urls), "create_topics": True, "process": process_mark(os.getpid())}
    contexts = Contexts.load()
    names = [CONTEXT, *(f"{CONTEXT}-{number}" for number in range(2, len(contexts.by_name) + 3))]
    name = next(name for name in names if name not in contexts.by_name)
    contexts.by_name[name] = mine
    if contexts.current is None:
        contexts.current = name
    contexts.save()
    try:
        yield name, contexts.current == name
    finally:
        contexts = Contexts.load()  # it may have been changed meanwhile
        if contexts.by_name.get(name, {}).get("process") == mine["process"]:
            del contexts.by_name[name]
            if contexts.current == name:
                contexts.current = None
            contexts.save()


@dataclass(slots=True)
class Rates:
    """The records per second of each node: by how much the partitions that it leads have grown."""

    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    looked_at_s: float | None = None

    def look(self, topics: Partitions, *, now_s: float) -> dict[str, float]:
        """Return records a second by node since the last call; new partitions count from their start."""
        seconds = now_s - self.looked_at_s if self.looked_at_s is not None else None
        rates: dict[str, float] = {}
        ends: dict[tuple[str, int], int] = {}
        for topic, partitions in topics.items():
            for partition in partitions:
                place = topic, int(partition["partition"])
                ends[place] = int(partition.get("end_offset") or 0)
                leader = (partition.get("leader") or {}).get("node")
                if leader is not None and seconds:
                    grown = max(0, ends[place] - self.ends.get(place, 0))
                    rates[leader] = rates.get(leader, 0.0) + grown / seconds
        self.ends, self.looked_at_s = ends, now_s
        return rates


def table_rows(
    nodes: Sequence[Mapping[str, Any]], topics: Partitions, rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the table's rows, one per node: partitions, and records in those that it leads.

    `rates` has each node's records per second.
    """
    records: dict[str, int] = {}
    for partition in (each for partitions in topics.values() for each in partitions):
        leader = (partition.get("leader") or {}).get("node")
        if leader is not None:
            kept = int(partition.get("end_offset") or 0) - int(partition.get("start_offset") or 0)
            records[leader] = records.get(leader, 0) + kept
    return [
        {**row, "records": records.get(row["node"], 0), "records_per_s": round(rates.get(row["node"], 0.0))}
        for row in node_rows(nodes, topics)
    ]


@dataclass(slots=True)
class Revival:
    """The restarts of nodes that ended by themselves (or by a `kill -9` to try it out)."""

    cluster: LocalCluster
    starts_at_s: dict[int, float] = field(default_factory=dict)
    ends: Counter[int] = field(default_factory=Counter)

    def look(self, *, now_s: float) -> None:
        """Find nodes that have ended, and start those again that ended some time ago.

        Raises:
            Failed: a node ends repeatedly.
        """
        for node in self.cluster.members:
            if node.running:
                continue
            at_s = self.starts_at_s.get(node.number)
            if at_s is None:
                self.ends[node.number] += 1
                if self.ends[node.number] > MAX_ENDS:
                    raise Failed(f"{node.name} ended {MAX_ENDS + 1} times:\n{node.log_tail()}")
                complain(f"{node.name} ended; it is started again in {RESTART_AFTER_S:g} s")
                self.starts_at_s[node.number] = now_s + RESTART_AFTER_S
            elif now_s >= at_s:
                del self.starts_at_s[node.number]
                self.cluster.spawn(node.number)


def watch(cluster: LocalCluster, client: Client, table: Live | None) -> None:
    """Update the table until Ctrl-C, and restart nodes that end. Without a table, print nothing."""
    rates = Rates()
    revival = Revival(cluster)
    with table or contextlib.nullcontext():
        while True:
            revival.look(now_s=time.monotonic())
            if table is not None and (rows := _look(client, rates)) is not None:
                table.update(table_of(rows, COLUMNS), refresh=True)
            time.sleep(REFRESH_S)


def _table() -> Live | None:
    """Return an empty table that is updated in place; None where there is no terminal."""
    if not sys.stdout.isatty():
        return None
    from rich.live import Live

    return Live(table_of([], COLUMNS), console=console_of(sys.stdout), auto_refresh=False, transient=True)


def _look(client: Client, rates: Rates) -> list[dict[str, Any]] | None:
    """Return the rows as they are now; None if no node answers."""
    try:
        nodes = client.cluster()["nodes"]
        topics = {
            topic["topic"]: [dict(each.raw) for each in client.topic(topic["topic"]).partitions()]
            for topic in all_topics(client)
        }
    except Error:
        return None
    return table_rows(nodes, topics, rates.look(topics, now_s=time.monotonic()))
