"""Bits that turn over on the disks, such that each entry keeps one good copy.

Every machine may lose a tenth of the committed entries' frames and another tenth of their index rows, and no
two machines the same: so whatever rots, a peer has it, wherever replicas go. Copies of derived state go
anywhere, as a log stands for them; of the other controllers' addresses one of two copies stays. Blocks of a
journal at rest go on one machine only, as behind such a loss a replica may have forgotten something, and more
than a minority of those is more than is promised.
"""

from __future__ import annotations

import re

from laminar.log.format.index_entry import ROW_SIZE, UNKNOWN_KIND
from laminar.log.partition_log.log import Log
from laminar.log.segment.segment_file import INDEX_HEAD_SIZE
from tests.sim.machine import Machine
from tests.sim.world import World

MACHINES = 5
CLASSES = 2 * MACHINES
_JOURNAL = re.compile(r".*/journal-\d+")


def rot_entry(world: World, machine: Machine) -> bool:
    """One bit of a frame or of an index row that is committed and not the log's last, if one is there."""
    rng = world.rng
    logs = [
        (replica.log, replica.core.committed_index)
        for running in machine.running.values()
        for replica in running.process.driver.replicas.values()
        if len(replica.configuration.voters) >= 3 and replica.log.failure is None
    ]
    if not logs:
        return False
    log, committed = rng.choice(logs)
    own = list(world.machines).index(machine.node)
    assert own < MACHINES, f"{own + 1} machines, but rot knows {MACHINES}"
    index = rng.randrange(log.first_index, max(min(committed, log.last_index - 1), log.first_index) + 1)
    if index > min(committed, log.last_index - 1):
        return False
    if index % CLASSES == own:
        return _rot_frame(world, machine, log, index)
    if index % CLASSES == own + MACHINES:
        segment = log.segment_of(index)
        path = segment.file.path.removesuffix(".log") + ".index"
        position = INDEX_HEAD_SIZE + (index - segment.first_index) * ROW_SIZE + rng.randrange(ROW_SIZE)
        return _flip(world, machine, path, position, f"row {index}")
    return False


def _rot_frame(world: World, machine: Machine, log: Log, index: int) -> bool:
    row = log.index_entry(index)
    if row.kind == UNKNOWN_KIND:
        return False
    position = row.position + world.rng.randrange(row.size)
    return _flip(world, machine, log.segment_of(index).file.path, position, f"entry {index}")


def rot_derived(world: World, machine: Machine) -> bool:
    """One bit of a copy of what is kept beside the logs."""
    files = [
        each for each in machine.disk.files("data/logs") if "/derived-" in each[0] or "/peers-" in each[0]
    ]
    if not files:
        return False
    path, size = world.rng.choice(files)
    # No log that is whole need stand for the addresses: one of their copies stays.
    if "/peers-" in path:
        if path in machine.rotten or path[:-1] + "ab"[path.endswith("a")] in machine.rotten:
            return False
        machine.rotten.add(path)
    return _flip(world, machine, path, world.rng.randrange(size), "a copy")


def rot_journal(world: World, machine: Machine) -> bool:
    """One bit of a journal at rest, whose node is down."""
    files = [each for each in machine.disk.files("data") if _JOURNAL.fullmatch(each[0])]
    if not files:
        return False
    path, size = world.rng.choice(files)
    held = machine.disk.held(path)
    blocks = [block for block in range(0, size, 4096) if any(held[block : block + 64])]
    if not blocks:
        return False
    position = world.rng.choice(blocks) + world.rng.randrange(64)
    world.forgetting(machine)
    return _flip(world, machine, path, position, "journal")


def _flip(world: World, machine: Machine, path: str, position: int, what: str) -> bool:
    if not machine.disk.exists(path) or position >= len(machine.disk.held(path)):
        return False  # still in memory only
    world.note(f"rot {machine.node} {path} {position} {what}")
    machine.disk.rot(path, position, mask=1 << world.rng.randrange(8))
    return True
