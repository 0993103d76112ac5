"""`make bench-swim`: how fast SWIM finds a dead node and tells all, and what it wrongly takes for dead.

The production core (`membership.gossip.swim`) with its default settings over simulated wires: virtual time, 1
to 10 ms for each datagram, so the figures say what the protocol does, not what this machine does. For each
size:

* a death: from the kill until the first member counts the dead one as offline, and until all do;
* a join: rounds (gossip periods) until all members see the new one, beside log2 N;
* wrong: live members that were declared offline, with 10 % of all datagrams lost, and with one member after
  the other stopped for less than the suspicion time. Suspicions that were refuted are counted beside it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial

from swimprotocol.status import Status

from tests.membership.gossip.swim_world import World

STOPS_MS = (500, 1_500, 2_500)


def death(size: int, seed: int) -> tuple[float, float]:
    """Return the seconds from a kill until the first, and until all, count the member as offline."""
    world = World(seed)
    names = world.cluster(size)
    world.declared.clear()
    died_ms = world.now_ms
    world.kill(names[-1])
    assert world.run_until(partial(world.all_see, names[-1], Status.OFFLINE), limit_ms=60_000)
    first_ms = min(
        at for at, _, name, status in world.declared if (name, status) == (names[-1], Status.OFFLINE)
    )
    return (first_ms - died_ms) / 1000, (world.now_ms - died_ms) / 1000


def join(size: int, seed: int) -> float:
    """Return the gossip rounds from a join until all see it."""
    world = World(seed)
    world.cluster(size)
    joined_ms = world.now_ms
    world.add("n300", seeds=["n0"])
    assert world.run_until(world.agreed, limit_ms=60_000)
    return (world.now_ms - joined_ms) / world.settings.gossip_period_ms


def wrong_by_loss(size: int, seed: int, *, seconds: int) -> tuple[int, int]:
    """Return the offline and the suspect declarations of live members with 10 % loss."""
    world = World(seed)
    world.cluster(size)
    world.declared.clear()
    world.loss = 0.1
    world.run(1000 * seconds)
    return _counts(world)


def wrong_by_stops(size: int, seed: int) -> tuple[int, int, int]:
    """Return the stops, and the offline and suspect declarations, of members stopped for short."""
    world = World(seed)
    names = world.cluster(size)
    world.declared.clear()
    stops = 0
    for number, name in enumerate(names[: 3 * len(STOPS_MS)]):
        world.stall(name, STOPS_MS[number % len(STOPS_MS)])
        world.run(8_000)
        stops += 1
    return (stops, *_counts(world))


def _counts(world: World) -> tuple[int, int]:
    offline = sum(status == Status.OFFLINE for _, _, _, status in world.declared)
    return offline, sum(status == Status.SUSPECT for _, _, _, status in world.declared)


def main() -> None:
    """Print one line for each size."""
    parser = argparse.ArgumentParser(prog="make bench-swim", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=120, help="virtual time with loss, for each seed")
    options = parser.parse_args()
    head = (
        "nodes",
        "offline first s",
        "offline all s",
        "join rounds",
        "log2 N",
        "loss: offline/suspect",
        "stops",
    )
    print(" | ".join(head))
    for size in options.sizes:
        seeds = range(options.seeds if size < 50 else max(2, options.seeds // 3))
        deaths = [death(size, seed) for seed in seeds]
        joins = [join(size, seed) for seed in seeds]
        lost = [wrong_by_loss(size, seed, seconds=options.seconds) for seed in seeds]
        stopped = [wrong_by_stops(size, seed) for seed in seeds]
        columns = (
            f"{size}",
            f"{_spread([first for first, _ in deaths])}",
            f"{_spread([last for _, last in deaths])}",
            f"{_spread(joins)}",
            f"{math.log2(size):.1f}",
            f"{sum(each[0] for each in lost)}/{sum(each[1] for each in lost)}"
            f" in {len(lost) * size * options.seconds / 3600:.1f} node hours",
            f"{sum(each[1] for each in stopped)}/{sum(each[2] for each in stopped)}"
            f" in {sum(each[0] for each in stopped)} stops",
        )
        print(" | ".join(columns), flush=True)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} (most {max(values):.1f})"


if __name__ == "__main__":
    main()
