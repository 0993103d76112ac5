"""GET /v1/nodes/{node}/bundle: the support bundle of a node, a report for people who help its operators.

Any node answers, by asking the named node, where one shard asks the other processes. `allowed` lists what
may be in a bundle; `tests/cluster/test_bundle.py` looks for planted secrets and records in one.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from itertools import islice
from typing import Any, Final

import msgspec

from laminar.compiled import described
from laminar.http.api.documents import server as documents
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.bundle.allowed import MOST_SAMPLES, samples_of, settings_of
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.node_call import NodeCall, of_siblings
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.slices import in_slices
from laminar.node.api.health.cluster_health import ClusterHealth
from laminar.node.api.metrics.route import MetricsRoute
from laminar.node.partition.partition import Partition
from laminar.node.runtime.boot import CONTROLLER, role_name
from laminar.node.runtime.process_report import ProcessReport
from laminar.node.transport.transport import Peer, TransportError
from membership.catalog import CODE_VERSION

NODE_WAIT_S: Final = 8.0
SIBLING_WAIT_S: Final = 1.0
MOST_PARTITIONS: Final = 2_000
PACKAGES: Final = ("uvloop", "msgspec", "laminar-mq")
_LIMITS: Final[Mapping[str, int]] = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
    "core_bytes": resource.RLIMIT_CORE,
}


class ShardPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of one shard in the bundle of its node: its report, and the states of its replicas."""

    report: ProcessReport
    partitions: list[documents.BundlePartition]
    left_out: int


class BundleRoute:
    """The handler of `GET /v1/nodes/{node}/bundle`, which answers with a node's support bundle.

    Other nodes ask it for this node's bundle, and other shards of this node for this shard's part of it.
    """

    def __init__(
        self, services: HostServices, exchange: Exchange, health: ClusterHealth, metrics: MetricsRoute
    ) -> None:
        self._services = services
        self._health = health
        self._metrics = metrics
        # The bundle of another node is passed on as it is: its program may be of another version.
        self._nodes = NodeCall[documents.NodeBundle | dict[str, Any]](
            services,
            exchange,
            method="node_bundle",
            own=self._of_node,
            kind=dict[str, Any],
            wait_s=NODE_WAIT_S,
        )

    async def bundle(self, request: Request, node: str) -> Response:
        """Answer GET /v1/nodes/{node}/bundle.

        Raises:
            Problem: 404 `no_such_node`; 503 `node_silent`.
        """
        services = self._services
        if node != services.node and node not in services.view.nodes():
            raise Problem("no_such_node", f"no node {node!r} in this cluster", field="node", value=node)
        found = (await self._nodes.of_all([node]))[node]
        if found is None:
            detail = f"node {node} does not answer, or its program is older and has no bundle"
            raise Problem("node_silent", detail, field="node", value=node)
        return Response.json(found)

    async def on_node_bundle(self, peer: Peer, payload: bytes) -> documents.NodeBundle:
        """Answer another node with the bundle of this one."""
        return await self._of_node()

    async def on_shard_bundle(self, peer: Peer, payload: bytes) -> bytes:
        """Answer a sibling (another process of this node) with this shard's part."""
        return msgspec.msgpack.encode(await self._part())

    async def _part(self) -> ShardPart:
        services = self._services
        held = sorted(services.partitions.items())
        found: list[documents.BundlePartition] = []

        def look(item: tuple[tuple[str, int], Partition]) -> None:
            (topic, number), partition = item
            core = partition.replica.core
            found.append(
                documents.BundlePartition(
                    topic=topic,
                    partition=number,
                    state="stopped" if partition.replica.failure else "open",
                    leader=partition.replica.leader_node or "",
                    leads=core.is_leader,
                    term=core.term,
                    recovering=core.recovering,
                    start_offset=partition.start_offset,
                    end_offset=partition.end_offset,
                    committed_index=partition.committed_index,
                    last_index=partition.log.last_index,
                    bytes=partition.log.size_bytes,
                    damaged=len(partition.log.quarantine),
                )
            )

        await in_slices(islice(held, MOST_PARTITIONS), look, clock=services.clock)
        taken = {*services.partitions}
        failed = [entry for entry, _ in services.failed.values()]
        found += [
            documents.BundlePartition(entry.topic, entry.partition, "failed" if entry in failed else "lost")
            for entry in [*services.lost, *failed][:MOST_PARTITIONS]
            if (entry.topic, entry.partition) not in taken
        ]
        return ShardPart(services.report(), found, max(0, len(held) - MOST_PARTITIONS))

    async def _of_node(self) -> documents.NodeBundle:
        services = self._services
        answers = await of_siblings(services, "shard_bundle")
        parts = [await self._part()]
        parts += [
            msgspec.msgpack.decode(each, type=ShardPart) for each in answers.values() if each is not None
        ]
        reports = [part.report for part in parts]
        silent = [role_name(role) for role, answer in answers.items() if answer is None]
        if CONTROLLER in services.siblings:
            try:
                answer = await services.ask_sibling(CONTROLLER, "process_report", timeout_s=SIBLING_WAIT_S)
                reports.append(msgspec.msgpack.decode(answer, type=ProcessReport))
            except TransportError:
                silent.append(role_name(CONTROLLER))
        view = services.view
        known = {*view.nodes(), *view.topics(), services.node, *map(role_name, services.siblings)}
        samples = list(islice(samples_of(await self._metrics.lines()), MOST_SAMPLES + 1))
        health = await self._health.node_report()
        now_ms = services.clock.wall_ms()
        partitions = [each for part in parts for each in part.partitions]
        left_out = {
            "partitions": sum(part.left_out for part in parts) + max(0, len(partitions) - MOST_PARTITIONS),
            "metrics": int(len(samples) > MOST_SAMPLES),
        }
        return documents.NodeBundle(
            node=services.node,
            taken_at=format_time(now_ms),
            wall_ms=now_ms,
            versions=_versions() | {"code_version": CODE_VERSION, "enabled_code_version": view.code_version},
            settings={
                name: documents.BundleSetting(**each) for name, each in settings_of(services.settings).items()
            },
            limits={name: list(resource.getrlimit(which)) for name, which in _LIMITS.items()},
            disk=documents.DiskSpace(
                free_bytes=services.space.free_bytes,
                low_water_bytes=services.space.threshold_bytes,
                appends_refused=services.space.low,
                consumers_refused=services.space.reserve_is_used,
            ),
            problems=[
                documents.BundleProblem(
                    code=each.code,
                    topic=each.topic,
                    is_critical=each.is_critical,
                    since=format_time(each.since_ms or now_ms),
                )
                for each in health.found
            ],
            children=[
                {
                    "process": role_name(each.role),
                    "state": each.state.name.lower(),
                    "restarts": each.restarts,
                }
                for each in services.board.read_all()
            ],
            processes=[_process(report, known) for report in sorted(reports, key=lambda each: each.role)],
            silent=silent,
            partitions=partitions[:MOST_PARTITIONS],
            metrics=samples[:MOST_SAMPLES],
            left_out={name: count for name, count in left_out.items() if count},
        )


@cache
def _versions() -> dict[str, Any]:
    return {
        **{name: version(name) for name in PACKAGES},
        "modules": described(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
    }


def _process(report: ProcessReport, known: set[str]) -> documents.BundleProcess:
    return documents.BundleProcess(
        process="controller" if report.role == 0 else f"shard {report.role - 1}",
        pid=report.pid,
        loop=report.loop,
        last_long_turn=report.last_long_turn,
        threads=report.threads,
        log=[
            documents.BundleLine(
                at=format_time(line.at_ms),
                level=line.level,
                logger=line.logger,
                place=line.place,
                text=line.text,
                arguments=line.shown(known),
                error=line.error,
                frames=line.frames,
            )
            for line in report.log
        ],
    )
