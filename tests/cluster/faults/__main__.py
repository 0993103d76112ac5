"""`make cluster-faults`: a real cluster under real faults, or rounds of one kind of them.

python -m tests.cluster.faults --minutes 30 --profile mixed --nodes 3 --seed 7
python -m tests.cluster.faults --minutes 10 --workload transactions
python -m tests.cluster.faults --rounds power --count 100

It ends with 0 if nothing acknowledged was lost, doubled or reordered and no read was stale. A failure leaves
histories, data folders, logs and a timeline (HTML) in the folder it names.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.faults.channels import run_channels
from tests.cluster.faults.groups import run_groups
from tests.cluster.faults.profiles import PROFILES, run_profile
from tests.cluster.faults.rounds import ROUNDS, run_rounds
from tests.cluster.faults.routes import run_routes
from tests.cluster.faults.transactions import run_transactions
from tests.cluster.long_run import judged


def main(arguments: list[str]) -> int:
    """0: all is well; 1: an anomaly; 2: the run itself failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.faults")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults go on")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="mixed")
    parser.add_argument(
        "--only",
        default="",
        help="of profiles mixed and each: these faults, with commas between; not with groups",
    )
    parser.add_argument("--nodes", type=int, choices=(3, 5), default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rate", type=float, default=150.0, help="appends a second, of all writers together")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--workload",
        choices=("records", "groups", "transactions", "routes", "channels"),
        default="records",
        help="groups: consumers, too; transactions: drivers of sinks, too; routes: partitions that change; "
        "channels: consumers of channels, too",
    )
    parser.add_argument(
        "--no-spark",
        action="store_true",
        help="of routes: without the Spark query, which runs where Spark can",
    )
    parser.add_argument("--rounds", choices=sorted(ROUNDS), default=None, help="rounds of one kind instead")
    parser.add_argument("--count", type=int, default=20, help="how many rounds")
    parser.add_argument("--folder", type=Path, default=None, help="where data and histories go; kept")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    what = f"--rounds {given.rounds} --count {given.count}" if given.rounds else f"--profile {given.profile}"
    run: Callable[[Path], Coroutine[Any, Any, bool]]
    if given.rounds:
        run = partial(run_rounds, given.rounds, count=given.count, seed=seed)
    else:
        workloads: dict[str, Callable[..., Coroutine[Any, Any, bool]]] = {
            "records": run_profile,
            "groups": run_groups,
            "transactions": run_transactions,
            "channels": run_channels,
            "routes": partial(run_routes, spark=not given.no_spark),
        }
        only = [name.strip() for name in given.only.split(",") if name.strip()]
        run = partial(
            workloads[given.workload],
            given.profile,
            minutes=given.minutes,
            nodes=given.nodes,
            shards=given.shards,
            seed=seed,
            appends_per_s=given.rate,
            **({} if given.workload == "groups" else {"only": only}),
        )
    return judged("faults", f"{what} --nodes {given.nodes} --seed {seed}", given.folder, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
