"""`laminar cluster doctor`: checks of machines, catalog and every partition, each finding with what to do.

It asks each node itself, so it finds what only that node can tell: its clock by the `Date` of its answers,
its disk and warnings by ``/readyz``, sync times and limits by ``/metrics``, its ports by connecting to them.
An operation that is under way is a finding as well, because the cluster is not yet as it was asked to be.
"""

from __future__ import annotations

import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from laminar.cli.commands.cluster import Partitions, all_operations, changes_of, mixed_programs, waits_for
from laminar.cli.commands.topic import all_topics
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing
from laminar.client.errors import Error

if TYPE_CHECKING:
    from laminar.client.sync.client import Client

ASK_TIMEOUT_S = 3.0
# `Date` has whole seconds, and is up to a second old.
MOST_SKEW_S = 3.0
# Syncs that take this long on average, once there were some, or ever.
SLOW_SYNC_MS = 100
FEWEST_SYNCS = 20
LONGEST_SYNC_MS = 5_000
FEWEST_OPEN_FILES = 4_096
FEWEST_VOTERS = 3
# As the log of a node warns (`laminar.node.host.certificates`).
CERTIFICATE_DAYS = 14
CA_DAYS = 60
# How a node's warning begins that names channels which keep logs.
KEPT = "channels keep logs "
_SYNC_BOUND = re.compile(r'le="([^"]+)"')
# Leaders of one node beyond its share by weight: a tenth, and these.
MORE_LEADERS = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that a check found: the check's name, the node or partition, and what to do."""

    check: str
    where: str
    finding: str
    do: str


@dataclass(slots=True)
class Answers:
    """The answers of one node about itself; a field is None or empty if the node did not answer."""

    ready: dict[str, Any] | None = None
    ahead_s: float | None = None
    """How far its clock is ahead of this machine's."""
    ahead_within_s: float = MOST_SKEW_S
    """How far clocks may differ before it counts: as far as this is not exact, and some more."""
    version: str = ""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """By name, a value for each process."""
    sync_buckets: dict[float, float] = field(default_factory=dict)
    """By bound in seconds, how many syncs of its journals took at most that long."""
    closed: list[str] = field(default_factory=list)
    """Ports that could not be reached."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The answers of a cluster, and the findings in them."""

    about: Mapping[str, Any]
    answers: Mapping[str, Answers]
    partitions: int
    findings: list[Finding]


def doctor(*, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> int:
    """Check everything that can be checked from here. Exit code 1 if there is a finding."""
    from laminar.cli.output import show, show_json

    with cluster.connect() as client:
        found = examined(client)
    if listing.format == "json":
        show_json({"nodes": sorted(found.answers), "findings": found.findings})
    elif found.findings:
        rows = [asdict(each) for each in found.findings]
        show(rows, listing, columns=("check", "where", "finding", "do"), name="where")
    elif listing.format == "table":
        print(f"{len(found.answers)} nodes, {found.partitions} partitions: nothing found")
    return EXIT_FAILED if found.findings else EXIT_DONE


def examined(
    client: Client, *, ask: Callable[[Client, Mapping[str, Any]], Answers] | None = None
) -> Examined:
    """Ask the cluster, and by `ask` each of its nodes; check the answers."""
    about = client.cluster()
    nodes = client.request_json("GET", "/v1/admin/nodes")["nodes"]
    topics = {topic["topic"]: topic for topic in all_topics(client)}
    partitions = {name: [dict(each.raw) for each in client.topic(name).partitions()] for name in topics}
    under_way = all_operations(client)
    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(partial(ask or answers_of, client), about["nodes"])
        answers = {node["node"]: found for node, found in zip(about["nodes"], asked, strict=True)}
    findings = [
        *of_nodes(nodes, answers),
        *of_clocks(answers),
        *of_disks(answers),
        *of_certificates(answers),
        *of_audit(answers),
        *of_programs(about, answers),
        *of_catalog(about, nodes),
        *of_partitions(topics, partitions),
        *of_leaders(nodes),
        *of_operations(under_way),
    ]
    return Examined(about, answers, sum(map(len, partitions.values())), findings)


# -- asking a node ---------------------------------------------------------------------------


def answers_of(client: Client, node: Mapping[str, Any]) -> Answers:
    """Ask one node about itself; `node` is its description in the answer of ``/v1/cluster``."""
    found = Answers(closed=[place for place in _ports(node) if not _reaches(place)])
    began_s = time.time()
    body, date = _get(client, node, "/readyz")
    if body:
        found.ready = msgspec.json.decode(body)
    if date:
        found.ahead_s = parsedate_to_datetime(date).timestamp() - (began_s + time.time()) / 2
    body, _ = _get(client, node, "/v1/version")
    if body:
        found.version = msgspec.json.decode(body)["version"]
    body, _ = _get(client, node, "/metrics")
    for line in body.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name and not name.startswith("#"):
            short, _, labels = name.partition("{")
            found.metrics.setdefault(short, []).append(float(value))
            bound = _SYNC_BOUND.search(labels) if short == "laminar_disk_sync_seconds_bucket" else None
            if bound is not None:
                bound_s = float(bound[1])
                found.sync_buckets[bound_s] = found.sync_buckets.get(bound_s, 0.0) + float(value)
    return found


def _get(client: Client, node: Mapping[str, Any], path: str) -> tuple[bytes, str]:
    """Return the body and the `Date` of an answer; both are empty without an answer or without permission."""
    try:
        answer = client.ask_node(node["url"], path, timeout=ASK_TIMEOUT_S)
    except Error:
        return b"", ""
    return b"" if answer.status in (401, 403) else bytes(answer.body), answer.headers.get("date", "")


def _ports(node: Mapping[str, Any]) -> list[str]:
    urls = [node["url"], *(shard["url"] for shard in node.get("shards") or ())]
    return [*dict.fromkeys(urlsplit(url).netloc for url in urls), node["peer"]]


def _reaches(place: str) -> bool:
    parts = urlsplit(f"//{place}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=ASK_TIMEOUT_S):
            return True
    except OSError:
        return False


# -- the checks ------------------------------------------------------------------------------


def of_nodes(nodes: Sequence[Mapping[str, Any]], answers: Mapping[str, Answers]) -> Iterator[Finding]:
    """Yield a finding for each node that is dead or not ready, and for each unreachable port."""
    for node in nodes:
        name, found = node["node"], answers.get(node["node"], Answers())
        if not node["alive"]:
            yield Finding(
                "nodes",
                name,
                "it is not alive",
                f"start it again; if it is gone for good, drain it: `laminar node drain {name}`. No load is "
                f"balanced until then",
            )
            continue
        for place in found.closed:
            yield Finding(
                "ports",
                name,
                f"{place} cannot be reached from here",
                "open it in firewalls between the nodes",
            )
        if found.ready is None:
            yield Finding("nodes", name, "it does not answer /readyz", "look into its log")
            continue
        for reason in found.ready.get("reasons") or ():
            yield Finding("nodes", name, reason, "look into its log")


def of_clocks(answers: Mapping[str, Answers]) -> Iterator[Finding]:
    """Yield a finding for each node whose clock differs from the median of all."""
    ahead = {name: found.ahead_s for name, found in answers.items() if found.ahead_s is not None}
    if len(ahead) < 2:
        return
    middle = statistics.median(ahead.values())
    for name, seconds in sorted(ahead.items()):
        skew_s = seconds - middle
        if abs(skew_s) > answers[name].ahead_within_s:
            digits = 0 if abs(skew_s) > MOST_SKEW_S else 1
            yield Finding(
                "clocks",
                name,
                f"its clock is {abs(skew_s):.{digits}f} s {'ahead' if skew_s > 0 else 'late'}",
                "have it set by NTP: retention and the times of records follow it",
            )


def of_disks(answers: Mapping[str, Answers]) -> Iterator[Finding]:
    """Yield a finding for each disk that is nearly full or slow, and for each low limit of open files."""
    for name, found in sorted(answers.items()):
        disk = (found.ready or {}).get("disk") or {}
        if disk.get("appends_refused"):
            refused = "appends and consumers are" if disk.get("consumers_refused") else "appends are"
            yield Finding(
                "disks",
                name,
                f"{refused} refused: {disk['free_bytes']:,} bytes are free",
                "free some, shorten retention, or move partitions: `laminar node weight`",
            )
        elif disk and disk["free_bytes"] < 2 * disk["low_water_bytes"]:
            yield Finding(
                "disks",
                name,
                f"{disk['free_bytes']:,} bytes are free, appends need {disk['low_water_bytes']:,}",
                "free some, shorten retention, or move partitions: `laminar node weight`",
            )
        for warning in (found.ready or {}).get("warnings") or ():
            if warning.startswith(KEPT):
                yield Finding(
                    "disks",
                    name,
                    warning,
                    "have the channels' consumers go on, or move the channels (`laminar channel seek`), drop "
                    "what is dead (`laminar channel dead`), or delete them",
                )
        syncs = sum(found.metrics.get("laminar_disk_sync_seconds_count", ()))
        total_ms = sum(found.metrics.get("laminar_disk_sync_seconds_sum", ())) * 1000
        longest_ms = max(found.metrics.get("laminar_disk_longest_sync_seconds", ()), default=0.0) * 1000
        if syncs >= FEWEST_SYNCS and total_ms / syncs > SLOW_SYNC_MS:
            yield Finding(
                "sync time",
                name,
                f"a sync of the journal takes {total_ms / syncs:.0f} ms",
                "each append waits for one: use another disk, or move what else writes to it",
            )
        if longest_ms > LONGEST_SYNC_MS:
            yield Finding(
                "sync time",
                name,
                f"a sync of the journal once took {longest_ms / 1000:.0f} s",
                "look into the machine's log for errors of the disk",
            )
        limit = min(found.metrics.get("laminar_node_open_files_limit", ()), default=FEWEST_OPEN_FILES)
        if limit < FEWEST_OPEN_FILES:
            yield Finding(
                "open files",
                name,
                f"a process may open {limit:.0f} files",
                "raise the hard limit (LimitNOFILE of systemd, `ulimit -Hn`) to 65536 or more",
            )


def of_certificates(answers: Mapping[str, Answers]) -> Iterator[Finding]:
    """Yield a finding for each certificate of a node or CA that expires soon."""
    for name, found in sorted(answers.items()):
        for what, metric, most_days, do in (
            (
                "certificate",
                "laminar_tls_certificate_left_seconds",
                CERTIFICATE_DAYS,
                f"make a new one: `laminar cert node {name} --host HOST --replace`",
            ),
            (
                "CA",
                "laminar_tls_ca_left_seconds",
                CA_DAYS,
                "add a new one to tls_ca on all nodes, then make new certificates (docs/operating.md#tls)",
            ),
        ):
            left = min(found.metrics.get(metric, ()), default=None)
            if left is not None and left < most_days * 86_400:
                ends = f"ends in {left / 86_400:.0f} days" if left > 0 else "has ended"
                yield Finding("certificates", name, f"its {what} {ends}", do)


def of_audit(answers: Mapping[str, Answers]) -> Iterator[Finding]:
    """Yield a finding for each node that could not write all its records to `_audit`."""
    for name, found in sorted(answers.items()):
        dropped = sum(found.metrics.get("laminar_audit_dropped_total", ()))
        if dropped:
            yield Finding(
                "audit",
                name,
                f"{dropped:.0f} records since its start are in its log only, not in `_audit`",
                "look why `_audit` takes none: `laminar topic describe _audit`; keep the log",
            )


def of_programs(about: Mapping[str, Any], answers: Mapping[str, Answers]) -> Iterator[Finding]:
    """Yield a finding for each node whose version is not that of most, or that lacks the newest commands."""
    versions = {name: found.version for name, found in answers.items() if found.version}
    if len(set(versions.values())) > 1:
        usual = statistics.mode(sorted(versions.values()))
        for name, version in sorted(versions.items()):
            if version != usual:
                yield Finding(
                    "programs",
                    name,
                    f"it runs version {version}, most nodes run {usual}",
                    "end the upgrade: restart the rest on the newer version",
                )
    for name, finding in mixed_programs(about):
        yield Finding(
            "programs",
            name,
            finding,
            "end the upgrade: start it with the newer program (docs/upgrading.md); remove it if it is gone",
        )


def of_catalog(about: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield findings about the catalog's leader and voters."""
    if not about.get("catalog_leader"):
        yield Finding(
            "catalog",
            "",
            "it has no leader: no topic can be created, changed or deleted",
            "start nodes until a majority of its voters runs; if they are gone for good: "
            "`laminar catalog recover`",
        )
        return
    voters = [node for node in nodes if node["catalog_voter"]]
    fit = [node for node in nodes if node["alive"] and not node["draining"]]
    if voters and len(voters) < min(FEWEST_VOTERS, len(fit)):
        yield Finding(
            "catalog",
            ", ".join(node["node"] for node in voters),
            f"{len(voters)} nodes vote in it, though {len(fit)} could",
            "wait: the catalog's leader adds voters when they have caught up",
        )
    for node in voters:
        if not node["alive"]:
            yield Finding(
                "catalog",
                node["node"],
                "it votes in the catalog and is not alive",
                "start it again; another takes its place after `replace_after_ms`, if there is one",
            )


def of_partitions(topics: Mapping[str, Mapping[str, Any]], partitions: Partitions) -> Iterator[Finding]:
    """Yield a finding for each partition without a leader, or whose replicas are out of sync or stuck."""
    for topic, listed in sorted(partitions.items()):
        about = topics[topic]
        fewest = int(about.get("settings", {}).get("min_replicas", 1))
        for partition in listed:
            place = f"{topic}/{partition['partition']}"
            replicas = partition.get("replicas") or ()
            in_sync = [each["node"] for each in replicas if each.get("in_sync")]
            absent = [each["node"] for each in replicas if not each.get("in_sync")]
            if partition.get("leader") is None:
                yield Finding(
                    "leaderless",
                    place,
                    f"no replica leads it{waits_for(partition)}",
                    "start the nodes of its replicas; if they are gone for good: `laminar group recover`",
                )
                continue
            if len(in_sync) < fewest:
                yield Finding(
                    "appends refused",
                    place,
                    f"{len(in_sync)} replicas are in sync, min_replicas is {fewest}",
                    "start the nodes of the others, or lower min_replicas: `laminar topic alter`",
                )
            if absent or len(replicas) < about["replicas"]:
                missing = f"; not in sync: {', '.join(absent)}" if absent else ""
                yield Finding(
                    "under-replicated",
                    place,
                    f"{len(in_sync)} of {about['replicas']} replicas are in sync{missing}",
                    "start those nodes, or add nodes: `laminar operations list` shows what is under way",
                )
            if partition.get("status") == "sealing":
                yield Finding(
                    "route",
                    place,
                    "it is being sealed, and its keys are not writable until the change is done",
                    f"wait; `laminar topic route {topic}` says what the change waits for",
                )
            yield from _of_replicas(place, partition)


def _of_replicas(place: str, partition: Mapping[str, Any]) -> Iterator[Finding]:
    for each in partition.get("replicas") or ():
        if each.get("state") == "failed":
            yield Finding(
                "replicas", place, f"on {each['node']} it has stopped: {each['reason']}", "restart the node"
            )
        if each.get("state") == "lost":
            yield Finding(
                "replicas", place, f"on {each['node']} its files are lost", "it is replaced by itself"
            )
    for node in sorted({each["node"] for each in partition.get("damaged") or ()}):
        yield Finding(
            "damage",
            place,
            f"records on {node} are damaged",
            "they are repaired from another replica; check the disk if it happens again",
        )


def of_leaders(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each node that leads more than its share by weight."""
    fit = [each for each in nodes if each["alive"] and not each["draining"] and each["leads"] is not None]
    total, weights = sum(each["leads"] for each in fit), sum(each["weight"] for each in fit)
    for node in fit:
        share = total * node["weight"] / weights if weights else 0.0
        if node["leads"] > 1.1 * share + MORE_LEADERS:
            yield Finding(
                "leaders",
                node["node"],
                f"it leads {node['leads']} partitions, its share is {share:.0f}",
                "wait: leaders go back to their preferred nodes when these have been calm for a while",
            )


def of_operations(operations: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each operation under way, with what blocks it."""
    for each, sentence in ((each, changes_of([each])) for each in operations):
        if not sentence or each["kind"] in ("join", "leave"):
            continue
        blocked = each["blocked_by"]
        yield Finding(
            "placement",
            each["what"],
            sentence[0].partition("; blocked: ")[0],
            f"blocked: {'; '.join(blocked)}" if blocked else "wait, or cancel it: `laminar operations list`",
        )
