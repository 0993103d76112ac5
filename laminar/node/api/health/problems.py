"""The problems of a cluster's health: their codes, severity and remedies.

`REMEDIES` is the only list of codes. A problem is found by a shard (`shard_health`) or by the node that
answers a request (`cluster_health`). Two findings with the same code and subject are the same problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from laminar.http.api.documents.cluster import HealthProblem, Remedy
from laminar.http.api.timestamps import format_time

CATALOG: Final = "catalog"
"""The subject of problems of the catalog."""

MOST_LISTED: Final = 100
"""The most problems of a code in an answer; the others are counted."""
MOST_LEADERLESS: Final = 1_000
"""The most partitions without a leader that a node reports; it is higher, as other nodes may know leaders."""


class Found(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A problem of the cluster's health that a check has found.

    With a `topic`, only a principal that may describe this topic sees it; with an empty one all do.
    """

    code: str
    subject: str
    text: str
    topic: str = ""
    is_critical: bool = False
    since_ms: int = 0
    """The time at which it was first seen, by the finder's wall clock; 0 for just now."""
    node: str = ""
    """The node that has the problem, if `subject` is something else."""


REMEDIES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "no_leader": (
        ("start the nodes of its replicas", "laminar cluster doctor"),
        ("if they are gone for good, accept what is lost", "laminar group recover {subject}"),
    ),
    "appends_refused": (
        ("start the nodes of the other replicas", "laminar node list"),
        ("or ask for fewer in sync", "laminar topic alter {topic} --setting min_replicas=N"),
    ),
    "under_replicated": (
        ("start those nodes, or add nodes; see what is under way", "laminar operations list"),
    ),
    "lost": (("nothing, if there are other replicas: it is copied from them", "laminar operations list"),),
    "log_failed": (
        ("check the disk of the node, then restart the node: the replica is restored from its journal", ""),
    ),
    "damaged": (
        ("other replicas repair it; check the disk if it happens again", "laminar log verify"),
        ("if no replica has it, continue reading after it", "laminar consume {topic} --on-damage skip"),
    ),
    "disk_low": (
        ("shorten retention", "laminar topic alter TOPIC --setting retention_bytes=N"),
        ("trim", "laminar topic trim TOPIC --before=-7d"),
        ("or move partitions elsewhere", "laminar node weight {subject} 0.5"),
    ),
    "node_dead": (
        ("start it again", ""),
        ("if it is gone for good, let others take its partitions", "laminar node drain {subject}"),
    ),
    "node_silent": (("look into its log: it is alive, but does not answer", "laminar cluster doctor"),),
    "not_ready": (("wait if it has just started, else look into its log", "laminar cluster doctor"),),
    "process_given_up": (("look into the node's log for the reason, then restart the node", ""),),
    "folder_rolled_back": (
        ("stop it, and put its newest folder back, or start it with an empty one and a new name", ""),
    ),
    "leaders_uneven": (
        ("wait: leaders return when their preferred nodes have been alive for settle_ms", ""),
        ("or move one", "laminar leader transfer TOPIC/PARTITION --to NODE"),
    ),
    "overtaken": (
        (
            "these records are lost: let it continue at the first one that is left",
            "laminar cursor set {topic} {name} --at earliest",
        ),
        ("keep records longer", "laminar topic alter {topic} --setting retention_ms=N"),
    ),
    "overtaken_soon": (
        ("start or speed up its consumers", "laminar cursor list {topic}"),
        ("or keep records longer", "laminar topic alter {topic} --setting retention_ms=N"),
    ),
    "channel_blocked": (
        ("start its consumers", "laminar channel describe {topic} CHANNEL"),
        ("or drop its dead records", "laminar channel dead {topic} CHANNEL"),
        (
            "or skip all its records, which loses jobs",
            "laminar channel seek {topic} CHANNEL --at latest --drop",
        ),
    ),
    "change_waiting": (("see what it waits for", "laminar operations list"),),
    "import_stopped": (
        ("run the import again: it continues", "laminar topic import FOLDER --as {topic}"),
        ("or delete the topic, and begin again", "laminar topic delete {topic}"),
    ),
    "program_old": (("finish the upgrade: start the node with the newer program", ""),),
}
"""By code the remedies: texts, each with a command, in which ``{subject}`` and its parts are filled in."""


def remedies(found: Found) -> list[Remedy]:
    """Return the remedies of a problem, as commands and texts for operators."""
    topic, _, name = found.subject.rpartition("/")
    words = {"subject": found.subject, "topic": found.topic or topic or found.subject, "name": name}
    if found.code == "no_leader" and found.subject == CATALOG:
        return [
            Remedy("start nodes until a majority of its voters runs", "laminar node list"),
            Remedy("if they are gone for good", "laminar catalog recover"),
        ]
    return [Remedy(text, command.format(**words)) for text, command in REMEDIES[found.code]]


def document(found: Found) -> HealthProblem:
    """Return the JSON document, for GET /v1/health, of a problem that was found."""
    return HealthProblem(
        code=found.code,
        severity="critical" if found.is_critical else "warning",
        subject=found.subject,
        since=format_time(found.since_ms),
        text=found.text,
        do=remedies(found),
    )


class Since:
    """Remembers when each problem was first seen, for as long as it is found again."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """Begin without problems; `now_ms` returns the wall-clock time in ms since the epoch."""
        self._now_ms = now_ms
        self._first: dict[tuple[str, str], int] = {}

    def noted(self, found: Iterable[Found]) -> list[Found]:
        """Return the present problems, each with the time at which it was first seen."""
        now_ms, known = self._now_ms(), self._first
        noted = [
            msgspec.structs.replace(each, since_ms=known.get((each.code, each.subject), now_ms))
            for each in found
        ]
        self._first = {(each.code, each.subject): each.since_ms for each in noted}
        return noted


def merged(found: Iterable[Found]) -> list[Found]:
    """Return each problem once, with its earliest time and worst severity; critical ones first."""
    by_key: dict[tuple[str, str], Found] = {}
    for each in found:
        key = each.code, each.subject
        known = by_key.get(key)
        if known is not None:
            worse = known if known.is_critical or not each.is_critical else each
            each = msgspec.structs.replace(worse, since_ms=min(known.since_ms, each.since_ms))
        by_key[key] = each
    return sorted(by_key.values(), key=lambda each: (not each.is_critical, each.code, each.subject))


def limited(
    found: Iterable[Found], *, most: Mapping[str, int] | None = None
) -> tuple[list[Found], Counter[str]]:
    """Return at most `MOST_LISTED` problems of each code (or `most` of it), and the numbers of others."""
    kept, counts, left = [], Counter[str](), Counter[str]()
    for each in found:
        if counts[each.code] < (most or {}).get(each.code, MOST_LISTED):
            counts[each.code] += 1
            kept.append(each)
        else:
            left[each.code] += 1
    return kept, left
