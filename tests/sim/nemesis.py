"""What goes wrong: faults drawn one after another, and a way back from all of them."""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations

from tests.disks.fault_disk import FaultDisk
from tests.sim.loop import Life
from tests.sim.machine import Machine
from tests.sim.moving import Moving
from tests.sim.rot import rot_derived, rot_entry, rot_journal
from tests.sim.world import World


def pairs_around(rng: random.Random, world: World, machine: Machine) -> list[tuple[str, str]]:
    """Wires between a machine, perhaps with some others, and the rest; in one direction now and then."""
    others = [node for node in world.machines if node != machine.node]
    away = set(rng.sample(others, rng.randrange(1, len(others))))
    if rng.random() < 0.3:
        away = set(others)
    here = world.machines.keys() - away
    pairs = [(one, other) for one in sorted(here) for other in sorted(away)]
    if rng.random() < 0.7:
        pairs += [(other, one) for one, other in pairs]
    return pairs


class Nemesis:
    """Makes trouble until it is told to stop; `heal` undoes everything."""

    def __init__(self, world: World, *, pause_s: float) -> None:
        self.world = world
        self.rng = world.rng
        self.pause_s = pause_s
        self.faults: Counter[str] = Counter()
        self.stopping = False
        self._faults: list[tuple[int, Callable[[], None]]] = [
            (6, self.kill_one),
            (2, self.kill_all),
            (4, self.power_one),
            (4, self.power_all),
            (4, self.pause_one),
            (5, self.isolate),
            (3, self.one_way),
            (3, self.bridge),
            (4, self.bad_wires),
            (3, self.slow_disk),
            (3, self.failing_sync),
            (3, self.full_disk),
            (3, self.cold_cache),
            (8, self.rot),
            (2, self.rot_journal),
            (3, self.step_clock),
            (2, self.drift),
            (2, self.other_shards),
            (3, self.restart_in_order),
            (3, self.hand_over),
            (3, self.forget_behind),
            (3, self.roll_back),
            (4, self.wipe),
            (3, self.move),
            (3, self.join_late),
            (1, self.long_absence),
        ]
        if world.options.admin_pause_s:
            self._faults += [(3, self.flap), (6, self.cut_at_a_change)]
        if world.options.thin:
            # What forgets, or rots, needs another copy.
            forgetting = (self.rot, self.rot_journal, self.roll_back, self.wipe)
            self._faults = [each for each in self._faults if each[1] not in forgetting]
        self.moving = Moving(world)
        # Whether the next change of a group is met by a cut.
        self._waits_for_change = False
        # Nodes whose replicas may have forgotten something, as far as is known: never more than a minority
        # but by `power_all`, which says so.
        self.doubtful: set[str] = set()
        # One disk at a time is put back.
        self.rolling = False

    def start(self) -> asyncio.Task[None]:
        """Begin."""
        return self.world.loop.start(Life("nemesis"), self._run())

    async def _run(self) -> None:
        weights = [weight for weight, _ in self._faults]
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.pause_s))
            if self.stopping:
                return
            fault = self.rng.choices(self._faults, weights)[0][1]
            self.faults[fault.__name__] += 1
            fault()

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        self.world.loop.call_in(None, seconds, work)

    def _one(self) -> Machine | None:
        up = self.world.up
        return self.rng.choice(up) if up else None

    def _back(self, machine: Machine) -> None:
        if not machine.up:
            machine.start()

    # -- processes and power ---------------------------------------------------------------

    def kill_one(self) -> None:
        machine = self._one()
        if machine is not None:
            machine.kill()
            self._later(self.rng.random() * 8, lambda: self._back(machine))

    def kill_all(self) -> None:
        for machine in self.world.up:
            machine.kill()
            self._later(self.rng.random() * 4, lambda machine=machine: self._back(machine))  # type: ignore[misc]

    def _may_forget(self, machine: Machine) -> bool:
        """Whether no other's mark still stands: one of three at a time loses nothing."""
        machines = self.world.machines
        self.doubtful = {
            node for node in self.doubtful if machines[node].is_old or not machines[node].holds_all()
        }
        return self.doubtful <= {machine.node} and not self.moving.is_wiped

    def is_calm(self) -> bool:
        """Whether no disk may have forgotten anything, and none is about to."""
        node = next(iter(self.world.machines))
        return not self.rolling and self._may_forget(self.world.machines[node]) and not self.doubtful

    def power_one(self) -> None:
        machine = self._one()
        if machine is None:
            return
        if not self.world.options.is_interval:
            machine.cut_power(keep=self.rng.choice((0.0, 0.5, 1.0)))
        elif self._may_forget(machine):
            self.doubtful.add(machine.node)
            machine.cut_power(keep=self.rng.choice((0.0, 0.5, 1.0)))
        else:
            machine.kill()
        self._later(self.rng.random() * 8, lambda: self._back(machine))

    def power_all(self) -> None:
        machines = self.world.up
        if self.world.options.is_interval and self.moving.is_wiped:
            # Who all lost something ask everybody for a vote, and one of them never answers again.
            self.kill_all()
            return
        if self.world.options.is_interval:
            # The last interval may go. A host whose node is down has pages to lose, too.
            self.world.losing()
            machines = list(self.world.machines.values())
            self.doubtful = set(self.world.machines)
        for machine in machines:
            machine.lose_power(keep=self.rng.choice((0.0, 0.5, 1.0)))
            self._later(self.rng.random() * 4, lambda machine=machine: self._back(machine))  # type: ignore[misc]

    def forget_behind(self) -> None:
        """What two of three acknowledged while the third was cut off: one of them forgets it, the other dies,
        and the third hears again. Without marks the two that are left would lead.
        """
        lagging, forgetful = self.rng.sample(list(self.world.machines.values()), 2)
        others = [node for node in self.world.machines if node != lagging.node]
        self.world.cut([(lagging.node, node) for node in others] + [(node, lagging.node) for node in others])

        def forget() -> None:
            if self.stopping:
                return
            if self.world.options.is_interval and forgetful.up and self._may_forget(forgetful):
                self.doubtful.add(forgetful.node)
                forgetful.cut_power(keep=0.0)
                self._later(0.1 + self.rng.random(), lambda: self._back(forgetful))
            for machine in self.world.up:
                if machine is not lagging:
                    machine.kill()
                    self._later(5 + self.rng.random() * 5, lambda machine=machine: self._back(machine))  # type: ignore[misc]
            self.world.cut([])

        self._later(4 + self.rng.random() * 8, forget)

    def roll_back(self) -> None:
        """A disk is put back to what it was before its node's last start, and later to what it was then."""
        machine = self._one()
        if machine is None or machine.is_old or self.rolling:
            return
        self.rolling = True
        picture = machine.picture()
        machine.kill()
        machine.start()
        folder = machine.folder
        self._later(10.0 + self.rng.random() * 20, lambda: self._put_back(machine, picture, folder, tries=5))

    def _put_back(self, machine: Machine, picture: FaultDisk, folder: int, *, tries: int) -> None:
        if self.stopping:
            return
        if machine.folder != folder:
            # It has lost its disk since: the picture is of a node that is no more.
            self.rolling = False
            return
        if not machine.up or not self.world.all_remember(machine) or not self._may_forget(machine):
            # Who has not heard of the last start can't tell the copy from it.
            self.rolling = tries > 0
            if tries:
                self._later(5.0, lambda: self._put_back(machine, picture, folder, tries=tries - 1))
            return
        self.doubtful.add(machine.node)
        self.faults["put_back"] += 1
        machine.kill()
        machine.put_back(picture)
        machine.start()
        self._later(1.0 + self.rng.random() * 20, lambda: self._end_roll_back(machine))

    def _end_roll_back(self, machine: Machine) -> None:
        self.rolling = False
        if machine.is_old:
            if machine.up:
                machine.kill()
            machine.put_back_newest()
            machine.start()

    def pause_one(self) -> None:
        machine = self._one()
        if machine is not None:
            machine.pause()
            starts = machine.starts

            def resume() -> None:
                if machine.up and machine.starts == starts:
                    machine.resume()

            self._later(self.rng.random() * 6, resume)

    def restart_in_order(self) -> None:
        machine = self._one()
        if machine is None:
            return
        for running in machine.running.values():
            self.world.loop.call_in(running.life, 0.0, running.process.stop)
        starts = machine.starts

        def end() -> None:
            if machine.up and machine.starts == starts:
                machine.kill()
                self._later(self.rng.random(), lambda: self._back(machine))

        self._later(2.0, end)

    def other_shards(self) -> None:
        machine = self._one()
        if machine is not None:
            machine.kill()
            machine.shards = self.rng.randrange(1, 4)
            self._later(self.rng.random() * 2, lambda: self._back(machine))

    # -- wires -----------------------------------------------------------------------------

    def isolate(self) -> None:
        machine = self.rng.choice(list(self.world.machines.values()))
        others = [node for node in self.world.machines if node != machine.node]
        pairs = [(machine.node, node) for node in others] + [(node, machine.node) for node in others]
        self._cut(pairs)

    def one_way(self) -> None:
        sender, receiver = self.rng.sample(list(self.world.machines), 2)
        self._cut([(sender, receiver)])

    def bridge(self) -> None:
        """Two that hear a third, but not each other."""
        one, other = self.rng.choice(list(combinations(self.world.machines, 2)))
        self._cut([(one, other), (other, one)])

    def _cut(self, pairs: list[tuple[str, str]]) -> None:
        self.world.cut(pairs)
        self._later(self.rng.random() * 10, lambda: self.world.cut([]))

    def bad_wires(self) -> None:
        wires, rng = self.world.wires, self.rng
        wires.loss = rng.choice((0.0, 0.02, 0.2))
        wires.duplication = rng.choice((0.0, 0.1, 0.4))
        wires.reorder = rng.choice((0.0, 0.1, 0.5))
        wires.delay_s = rng.choice((0.0005, 0.005, 0.05))
        self.world.note(f"wires {wires.loss} {wires.duplication} {wires.reorder} {wires.delay_s}")
        self._later(rng.random() * 10, self._good_wires)

    def _good_wires(self) -> None:
        wires = self.world.wires
        wires.loss = wires.duplication = wires.reorder = 0.0
        wires.delay_s = 0.0005

    # -- disks and clocks ------------------------------------------------------------------

    @property
    def _none_may_fail(self) -> bool:
        """Behind a failure an `interval` log may have forgotten something, too."""
        return self.world.options.is_interval and self.moving.is_wiped

    def slow_disk(self) -> None:
        machine = self.rng.choice(list(self.world.machines.values()))
        machine.slow_disk_s = self.rng.choice((0.01, 0.1, 1.0))
        self._later(self.rng.random() * 8, lambda: setattr(machine, "slow_disk_s", 0.0))

    def failing_sync(self) -> None:
        """The next sync of a journal fails: the process ends, and comes back."""
        machine = self._one()
        if machine is None or self._none_may_fail:
            return

        def fail(operation: str, path: str) -> int | None:
            if operation == "sync" and "/journal-" in path:
                machine.disk.error = None
                return errno.EIO
            return None

        machine.disk.error = fail

    def full_disk(self) -> None:
        """No room for anything new, for a while."""
        machine = self._one()
        if machine is None or self._none_may_fail:
            return
        machine.disk.room_bytes = self.rng.choice((0, 50_000))
        self._later(self.rng.random() * 10, lambda: setattr(machine.disk, "room_bytes", None))

    def cold_cache(self) -> None:
        """Nothing that is read is in memory, for a while."""
        machine = self.rng.choice(list(self.world.machines.values()))
        machine.disk.cold = True
        self._later(self.rng.random() * 10, lambda: setattr(machine.disk, "cold", False))

    def rot(self) -> None:
        """Some bits of what lies on a disk turn over; each entry keeps a good copy."""
        machine = self._one()
        # In a world that forgets, the other copies of what rots may be the ones that are forgotten.
        for _ in range(0 if self.world.options.is_interval else 20):
            if machine is not None:
                rot_entry(self.world, machine)
        if machine is not None and self.rng.random() < 0.2:
            rot_derived(self.world, machine)

    def rot_journal(self) -> None:
        """The journals of one machine, always the same, lose a block while its node is down."""
        machine = next(iter(self.world.machines.values()))
        if machine.up and machine.holds_all() and self._may_forget(machine):
            self.doubtful.add(machine.node)
            machine.kill()
            rot_journal(self.world, machine)
            self._later(self.rng.random() * 4, lambda: self._back(machine))

    def step_clock(self) -> None:
        machine = self.rng.choice(list(self.world.machines.values()))
        machine.wall_offset_ms += self.rng.choice((-3_600_000, -1000, 1000, 3_600_000))

    def drift(self) -> None:
        machine = self._one()
        if machine is not None and not machine.up:
            machine.drift = 1.0 + (self.rng.random() - 0.5) * 0.02

    # -- leaders ---------------------------------------------------------------------------

    def hand_over(self) -> None:
        """A leader gives up what it leads, in order."""
        machine = self._one()
        if machine is not None:
            for running in machine.running.values():
                driver = running.process.driver
                self.world.loop.start(running.life, driver.hand_over(timeout_s=1.0))

    # -- replicas that come and go ---------------------------------------------------------

    def wipe(self) -> None:
        """A machine loses its whole disk, and comes back as a new node where the old one was."""
        machine = self._one()
        if machine is not None and not self.doubtful:
            self.moving.wipe_when_whole(machine)

    def move(self) -> None:
        """Somebody wants a replica elsewhere, while all is well with it."""
        self.moving.move()

    def join_late(self) -> None:
        """One that was not there yet comes."""
        machine = next((each for each in self.world.machines.values() if not each.starts), None)
        if machine is not None:
            machine.start()

    def long_absence(self) -> None:
        """Down for so long that what it held may be made anew elsewhere; it comes back all the same."""
        machine = self._one()
        if machine is not None:
            machine.kill()
            self._later(15 + self.rng.random() * 30, lambda: self._back(machine))

    def flap(self) -> None:
        """A node that comes and goes, faster than anybody takes it for gone, or for there to stay."""
        machine = self._one()
        if machine is not None:
            self._flap(machine, self.rng.randrange(4, 12))

    def _flap(self, machine: Machine, left: int) -> None:
        if self.stopping or not left:
            self._back(machine)
        elif machine.up:
            machine.kill()
            self._later(0.2 + self.rng.random() * 2, lambda: self._flap(machine, left - 1))
        else:
            machine.start()
            self._later(0.2 + self.rng.random(), lambda: self._flap(machine, left - 1))

    def cut_at_a_change(self) -> None:
        """The next group that changes its members loses wires in that moment."""
        self._waits_for_change = True

    def changing(self, machine: Machine, group: str) -> None:
        """A leader on this machine begins a change of this group."""
        if self._waits_for_change and not self.stopping:
            self._waits_for_change = False
            self.faults["cut_in_a_change"] += 1
            self._later(self.rng.choice((0.0, 0.0, 0.001, 0.05)), lambda: self._cut_around(machine))

    def _cut_around(self, machine: Machine) -> None:
        self._cut(pairs_around(self.rng, self.world, machine))

    # -- the way back ----------------------------------------------------------------------

    def heal(self) -> None:
        """Nothing is wrong any more: everything must converge."""
        self.stopping = True
        self.world.note("heal")
        self.world.cut([])
        self._good_wires()
        for machine in self.world.machines.values():
            machine.slow_disk_s = 0.0
            machine.disk.error = None
            machine.disk.room_bytes = None
            machine.disk.cold = False
            self._end_roll_back(machine)
            if machine.up:
                machine.resume()
                if machine.has_failed_logs():
                    # What an operator does when the disk is well again.
                    machine.kill()
                    machine.start()
            else:
                machine.start()
