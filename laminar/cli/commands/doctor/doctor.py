"""`laminar doctor`: a line for each check of this machine and of the cluster; and the file of bundles.

The checks of the cluster are those of `laminar cluster doctor`; here each is named, also where it found
nothing. Clocks are compared more exactly, by the bundle that each node is asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
from cyclopts import Parameter

from laminar.cli.commands.admin.doctor import Answers, Examined, answers_of, examined
from laminar.cli.commands.doctor import bundle_file, machine
from laminar.cli.commands.doctor.lines import WARNING, Line, fine, wrong
from laminar.cli.errors import Failed, code_of, complain, line_of
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing
from laminar.client.errors import Error

if TYPE_CHECKING:
    from laminar.client.sync.client import Client

BUNDLE_TIMEOUT_S = 15.0
# Clocks that are compared to the millisecond may differ by this, and by as long as the answer took.
CLOCK_S = 0.5
CLUSTER = "the cluster"

# Checks of the cluster, and what is said where they found nothing.
CHECKED = {
    "nodes": "all are alive and ready",
    "ports": "all are reached from here",
    "clocks": "",
    "disks": "",
    "sync time": "",
    "open files": "no node has too low a limit",
    "certificates": "none ends soon",
    "audit": "no record is missing",
    "programs": "all nodes run the same",
    "catalog": "it has a leader and its voters",
    "leaderless": "each partition has a leader",
    "appends refused": "no partition has too few replicas in sync",
    "under-replicated": "no partition has too few replicas",
    "route": "no partition is being sealed",
    "replicas": "none has stopped, none is lost",
    "damage": "no record is damaged",
    "leaders": "no node leads more than its share",
    "placement": "nothing is under way",
}


def doctor(
    *,
    bundle: Annotated[
        Path | None,
        Parameter(help="Write a tar.gz for those who help: versions, states, logs; no record, no secret."),
    ] = None,
    data: Annotated[
        Path | None, Parameter(help="The data folder whose disk is tried. [default: of the settings]")
    ] = None,
    config: Annotated[Path | None, Parameter(help="The TOML file of this machine's node.")] = None,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Check this machine and the cluster. Exit code 1 if something is wrong, 4 if no node answers."""
    from laminar.cli.output import show_json
    from laminar.client.net.endpoints import resolve

    if bundle is not None:
        bundle_file.check_new(bundle)
    endpoints = resolve(
        cluster.url, cluster.token, **{k: v for k, v in cluster.proof.items() if k != "token"}
    )
    lines = list(_of_machine(endpoints.urls, data, config))
    bundles: dict[str, Any] = {}
    failure: Error | None = None
    try:
        with cluster.connect() as client:
            lines += _of_cluster(client, bundles, is_wanted=bundle is not None)
    except Error as error:
        failure = error
        do = (
            "start its nodes, or name one that runs with --url"
            if code_of(error) != EXIT_FAILED
            else ("an admin's token is needed: --token-file")
        )
        lines.append(wrong("cluster", f"{error.code}: it was not examined", do, where=CLUSTER))
    if listing.format == "json":
        show_json([asdict(line) for line in lines])
    else:
        for line in lines:
            _print(line, is_short=listing.format == "names")
    if failure is not None:
        complain(line_of(failure))
    if bundle is not None:
        if not bundles:
            raise Failed(f"no node gave its bundle, so {bundle} was not written", code=EXIT_FAILED)
        bundle_file.write(bundle, lines, bundles)
        complain(f"{bundle} has the bundles of {len(bundles)} nodes; read it before you send it")
    if failure is not None:
        return code_of(failure)
    return EXIT_FAILED if any(line.status == WARNING for line in lines) else EXIT_DONE


def _print(line: Line, *, is_short: bool) -> None:
    """Print a line; the advice is on a line of its own, as a terminal may be narrow."""
    if is_short:
        if line.status == WARNING:
            print(line.check)
        return
    print(f"{line.status:<8} {line.check:<17} {line.where:<13} {line.finding}")
    if line.do:
        print(f"{'':<8} to do: {line.do}")


def _of_machine(urls: tuple[str, ...], data: Path | None, config: Path | None) -> Iterator[Line]:
    yield from machine.of_versions()
    lines, settings = machine.of_settings(config)
    yield from lines
    yield from machine.of_names(urls)
    yield from machine.of_limits()
    yield from machine.of_disk(Path(settings.data) if data is None else data, settings)


def _of_cluster(client: Client, bundles: dict[str, Any], *, is_wanted: bool) -> Iterator[Line]:
    """Yield the lines of the cluster; put the bundles that nodes give into `bundles`.

    With `is_wanted`, yield also a line for each node that gives no bundle, as older nodes do.
    """
    missing: dict[str, str] = {}

    def ask(asked: Client, node: Mapping[str, Any]) -> Answers:
        found = answers_of(asked, node)
        name, began_s = node["node"], time.time()
        try:
            answer = asked.ask_node(
                node["url"], f"/v1/nodes/{quote(name, safe='')}/bundle", timeout=BUNDLE_TIMEOUT_S
            )
        except Error as error:
            missing[name] = error.code
            return found
        ended_s = time.time()
        if answer.status != 200:
            missing[name] = f"status {answer.status}"
            return found
        document = bundles[name] = msgspec.json.decode(answer.body)
        found.ahead_s = document["wall_ms"] / 1000 - (began_s + ended_s) / 2
        found.ahead_within_s = CLOCK_S + ended_s - began_s
        return found

    found = examined(client, ask=ask)
    by_check: dict[str, list[Line]] = {name: [] for name in CHECKED}
    for each in found.findings:
        by_check.setdefault(each.check, []).append(
            wrong(each.check, each.finding, each.do, where=each.where or CLUSTER)
        )
    for check, lines in by_check.items():
        yield from lines or _fine(check, found)
    for name, why in sorted(missing.items()) if is_wanted else ():
        do = "its program may be older, or it does not run"
        yield wrong("bundle", f"it gave none: {why}", do, where=name)


def _fine(check: str, found: Examined) -> Iterator[Line]:
    """Yield the line of a check that found nothing."""
    answers = dict(sorted(found.answers.items()))
    if check == "clocks":
        ahead = [each.ahead_s for each in answers.values() if each.ahead_s is not None]
        if len(ahead) > 1:
            within_s = max(each.ahead_within_s for each in answers.values())
            text = f"they differ by {max(ahead) - min(ahead):.2f} s at most (allowed: {within_s:.1f} s)"
            yield fine(check, text, where=CLUSTER)
    elif check == "disks":
        for name, each in answers.items():
            disk = (each.ready or {}).get("disk")
            if disk:
                yield fine(check, f"{disk['free_bytes']:,} bytes are free", where=name)
    elif check == "sync time":
        for name, each in answers.items():
            if each.sync_buckets:
                yield fine(check, _said(each.sync_buckets), where=name)
    else:
        yield fine(check, CHECKED[check], where=CLUSTER)


def _said(buckets: Mapping[float, float]) -> str:
    """Return a sentence on the times of a node's syncs since its start."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]]
    if not total:
        return "no sync of the journal yet"
    half, most = (next(bound for bound in bounds if buckets[bound] >= share * total) for share in (0.5, 0.99))
    return f"of {total:,.0f} syncs of its journals half took {_ms(half)}, 99 % {_ms(most)}"


def _ms(bound_s: float) -> str:
    """Return the upper bound of a bucket as text; the last bucket has none."""
    return "longer than the histogram shows" if bound_s == math.inf else f"at most {bound_s * 1000:g} ms"
