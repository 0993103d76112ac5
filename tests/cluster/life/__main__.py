"""`make cluster-life`: a cluster of real processes from one node on, grown, drained and restarted under load.

python -m tests.cluster.life --nodes 5 --topics 3 --partitions 4 --seed 7

It prints a timeline and ends with 0 if every check held: nothing acknowledged was lost, doubled or reordered,
placement ended at the wanted set with three replicas of everything, leaders were spread evenly, and no
partition was without an acknowledged append for longer than `--most-gap`. A failure leaves history, data
folders, logs and a timeline (HTML) in the folder it names.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from functools import partial
from pathlib import Path

from tests.cluster.life.run import Plan, run_life
from tests.cluster.long_run import judged


def main(arguments: list[str]) -> int:
    """0: all is well; 1: a check failed."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.life")
    parser.add_argument("--nodes", type=int, default=plan.nodes, help="4 or more; how many there are at most")
    parser.add_argument("--topics", type=int, default=plan.topics)
    parser.add_argument("--partitions", type=int, default=plan.partitions, help="of each topic")
    parser.add_argument("--shards", type=int, default=plan.shards)
    parser.add_argument("--drains", type=int, default=plan.drains, help="how many nodes are drained, removed")
    parser.add_argument("--rate", type=float, default=plan.appends_per_s, help="appends a second")
    parser.add_argument("--calm", type=float, default=plan.calm_s, help="seconds of load without a change")
    parser.add_argument("--most-gap", type=float, default=30.0, help="seconds; 0: printed and not judged")
    parser.add_argument(
        "--most-p99",
        type=float,
        default=0.0,
        help="times the p99 of appends before the first join; 0: printed and not judged",
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="where data and history go; kept")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    plan = Plan(
        nodes=given.nodes,
        topics=given.topics,
        partitions=given.partitions,
        shards=given.shards,
        drains=given.drains,
        appends_per_s=given.rate,
        calm_s=given.calm,
        most_gap_s=given.most_gap,
        most_p99_factor=given.most_p99,
    )
    said = f"{' '.join(arguments)} --seed {seed}"
    return judged("life", said, given.folder, partial(run_life, plan=plan, seed=seed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
