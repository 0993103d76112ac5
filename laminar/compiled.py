"""The modules that a build may compile, and which of them are compiled in this installation.

The pure build has none: its wheel is the sources. The compiled build has, beside the same sources, extension
modules that mypyc made of the modules in `MODULES`; Python prefers them. A module is in the list because it
runs for each record, and becomes faster when compiled (docs/benchmarks.md#the-compiled-build). Such a
module has no class with class arguments, as `msgspec.Struct` classes have: mypyc drops these, which would
change the stored and sent bytes (docs/decisions/0033-compiled-by-mypyc.md).
"""

from __future__ import annotations

from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

MODULES = (
    "raft.candidacy",
    "raft.core",
    "raft.effects",
    "raft.election_timer",
    "raft.following",
    "raft.leadership",
    "raft.log",
    "raft.progress",
    "raft.quiescence",
    "raft.quorum",
    "raft.reads",
    "raft.sender",
    "laminar.batch.header",
    "laminar.batch.batch",
    "laminar.batch.builder",
    "laminar.batch.columns",
    "laminar.batch.single_value",
    "laminar.batch.validation",
    "laminar.log.partition_log.changes",
    "laminar.log.partition_log.entries",
    "laminar.log.partition_log.log",
    "laminar.log.partition_log.reads",
    "laminar.log.partition_log.readers",
    "laminar.log.partition_log.read_ahead",
    "laminar.log.commit.group_commit",
    "laminar.log.commit.journal",
    "laminar.log.commit.segment_writer",
    "laminar.log.commit.thread_requests",
    "laminar.log.commit.end_mark",
    "laminar.log.format.index_entry",
    "laminar.log.format.journal_codec",
    "laminar.log.segment.segment",
    "laminar.log.segment.segment_file",
    "laminar.log.disk.open_files",
    "laminar.node.consensus.driver",
    "laminar.node.consensus.outbox",
    "laminar.node.consensus.raft_frames",
    "laminar.node.consensus.replica",
    "laminar.node.consensus.quiescence",
    "laminar.node.consensus.keepalives",
    "laminar.node.consensus.timekeeper",
    "laminar.node.consensus.election_throttle",
    "laminar.node.consensus.timers",
    "laminar.node.transport.link",
    "laminar.node.transport.dialer",
    "laminar.node.transport.frame_check",
    "laminar.node.transport.receive_budget",
    "laminar.node.partition.append_batcher",
    "laminar.node.partition.append_path",
    "laminar.node.partition.receipts",
    "laminar.node.partition.deduplication",
    "laminar.node.partition.producer_progress",
    "laminar.node.partition.min_replicas",
    "laminar.node.partition.context",
    "laminar.http.protocol.request_head",
    "laminar.http.protocol.messages",
    "laminar.http.protocol.answer",
    "laminar.http.protocol.response_head",
    "laminar.http.protocol.flows",
    "laminar.http.server.reader",
    "laminar.http.server.writer",
    "laminar.http.server.turns",
    "laminar.http.server.budget",
    "laminar.http.server.server",
    "laminar.http.api.append_body",
    "laminar.http.api.cross_site",
    "laminar.http.api.records",
    "laminar.http.api.routes.matching",
    "laminar.http.api.timestamps",
    "laminar.node.api.records.append",
    "laminar.node.api.records.stale_routes",
    "laminar.node.api.app",
    "laminar.node.api.admission",
    "laminar.node.api.matched",
    "laminar.node.api.passed_requests",
    "laminar.node.api.common.answer_head",
    "laminar.node.api.common.query",
    "laminar.node.api.common.topic_lookup",
    "laminar.node.api.metrics.durations",
    "laminar.node.shard.refusals",
    "laminar.node.partition.reads",
    "laminar.node.partition.cursor_commands",
    "laminar.node.partition.state.state",
    "laminar.histogram",
)


@cache
def compiled_modules() -> tuple[str, ...]:
    """Return the names of the modules in `MODULES` that are compiled in this installation, in that order."""
    return tuple(name for name in MODULES if _is_extension(name))


def described() -> str:
    """Return ``pure`` or ``compiled``; if only some of `MODULES` are compiled, with their names."""
    found = compiled_modules()
    if not found:
        return "pure"
    return "compiled" if len(found) == len(MODULES) else f"compiled: {', '.join(found)}"


def _is_extension(name: str) -> bool:
    # Without an import, and as Python looks for it: `laminar --version` loads nothing for it.
    path = Path(__file__).parents[1].joinpath(*name.split("."))
    return any(path.with_name(path.name + suffix).exists() for suffix in EXTENSION_SUFFIXES)
