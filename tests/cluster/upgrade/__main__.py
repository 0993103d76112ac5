"""`make cluster-upgrade`: a cluster of real processes is upgraded node by node, under load.

python -m tests.cluster.upgrade --topics 3 --partitions 4 --seed 7

Three nodes run the program that `OLDER` names (a tag or commit, built from git into build/older). Each is
stopped and started with the program of this folder; one goes back, and forward again. It prints a timeline
and ends with 0 if every check held: nothing acknowledged was lost, doubled or reordered; topics, leaders and
logs moved both ways between the programs; the new code version was enabled when all nodes knew it, and not
before; from then on the older program was refused, and said why; no partition was without an acknowledged
append for longer than `--most-gap`.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from functools import partial
from pathlib import Path

from tests.cluster.life.run import Plan, run_life
from tests.cluster.long_run import judged
from tests.cluster.upgrade.cluster import MixedCluster
from tests.cluster.upgrade.older import NoOlderProgram, older_program, revision
from tests.cluster.upgrade.run import SEGMENTS, Upgrade, whole


def main(arguments: list[str]) -> int:
    """0: all is well; 1: a check failed, or there is no older program."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.upgrade")
    parser.add_argument("--topics", type=int, default=2, help="2 or more")
    parser.add_argument("--partitions", type=int, default=4, help="of each topic")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--rate", type=float, default=100.0, help="appends a second")
    parser.add_argument("--calm", type=float, default=5.0, help="seconds of load without a change")
    parser.add_argument("--most-gap", type=float, default=30.0, help="seconds; 0: printed and not judged")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="where data and history go; kept")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    try:
        print(f"the older program: {revision()} ({older_program()})")
    except NoOlderProgram as error:
        print(f"FAILED: {error}")
        return 1
    plan = Plan(
        nodes=5,
        topics=given.topics,
        partitions=given.partitions,
        shards=given.shards,
        appends_per_s=given.rate,
        calm_s=given.calm,
        most_gap_s=given.most_gap,
    )
    run = partial(
        run_life,
        plan=plan,
        seed=seed,
        script=whole,
        kind=Upgrade,
        cluster_kind=MixedCluster,
        more_settings=SEGMENTS,
    )
    return judged("upgrade", f"{' '.join(arguments)} --seed {seed}", given.folder, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
