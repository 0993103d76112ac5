"""Record a load, crash it at many instants, and check what each crash leaves."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.crash import check, node_load, trace
from tests.crash.acts import Act, load, promised
from tests.crash.model import WAYS, Crash, Disk
from tests.crash.trace import Call

# A crash in so many of 100 states is followed by a recovery that is recorded, and crashed itself.
RECOVERIES = 12


class RunFailed(Exception):
    """A recorded program ended with an error."""


@dataclass(frozen=True, slots=True)
class Load:
    """A recorded run."""

    name: str
    calls: Sequence[Call]
    acts: Sequence[Act]
    inode: int

    @property
    def begin(self) -> int:
        return self.calls[0].began

    @property
    def end(self) -> int:
        return max(call.ended for call in self.calls)


@dataclass(frozen=True, slots=True)
class Found:
    """One state that was checked: where it came from, and what was wrong."""

    state: str
    problems: Sequence[str]


def record_library(
    folder: Path, library: Path, *, seed: int, seconds: float, mixed: bool, mutant: str | None = None
) -> Load:
    """Run the library's load under the recorder. `folder` is empty, and is used for everything."""
    root = folder / "root"
    root.mkdir(parents=True)
    inode = root.stat().st_ino
    command = ["tests.crash.library_load", "run", str(root), str(folder / "acts"), f"--seed={seed}"]
    command += [
        f"--seconds={seconds}",
        *(["--mixed"] if mixed else []),
        *(["--mutant", mutant] if mutant else []),
    ]
    _run(command, library, root, folder)
    name = f"library, {'mixed' if mixed else 'commit'}, seed {seed}"
    return Load(name, trace.read(folder / "trace"), load(folder / "acts"), inode)


def record_node(folder: Path, library: Path, *, seed: int, seconds: float) -> Load:
    """Run a node's load under the recorder, as `record_library`."""
    root = folder / "root"
    root.mkdir(parents=True)
    inode = root.stat().st_ino
    acts = asyncio.run(node_load.run(folder, library, seed=seed, seconds=seconds))
    return Load(f"node, seed {seed}", trace.read(folder / "trace"), acts, inode)


def _run(command: Sequence[str], library: Path, root: Path, folder: Path) -> None:
    output = folder / "output"
    process = trace.start(command, library=library, folder=root, trace=folder / "trace", output=output)
    try:
        code = process.wait(timeout=300)
    finally:
        process.kill()
        process.wait()
    if code != 0:
        raise RunFailed(f"{command[0]} ended with {code}: {output.read_text()[-2000:]}")


def whole(recorded: Load, root: Path) -> list[str]:
    """Whether the calls that were recorded explain all that lies on the disk: differences, one line each."""
    disk = Disk(recorded.inode)
    for call in recorded.calls:
        disk.feed(call)
    copy = root.with_name(root.name + "-copy")
    disk.materialise(copy)
    try:
        ours = {path.relative_to(copy): path for path in copy.rglob("*")}
        real = {path.relative_to(root): path for path in root.rglob("*")}
        names = [f"{path}: only on one side" for path in ours.keys() ^ real.keys()]
        return names + [
            f"{path}: other bytes"
            for path in ours.keys() & real.keys()
            if real[path].is_file() and real[path].read_bytes() != ours[path].read_bytes()
        ]
    finally:
        shutil.rmtree(copy)


def crash_library(
    recorded: Load,
    folder: Path,
    library: Path,
    *,
    states: int,
    seed: int,
    mutant: str | None = None,
    recoveries: int = RECOVERIES,
) -> Iterator[Found]:
    """Check `states` crashes of a recorded load, some of them again in the recovery that follows."""
    for left, at, crash, state, rng in _crashes(recorded, states, seed):
        root = folder / f"state-{at}"
        if rng.randrange(100) < recoveries:
            yield from _crash_recovery(recorded, left, root, library, at, crash, state, rng, mutant)
        else:
            left.materialise(root)
            yield Found(state, check.library(root, promised(recorded.acts, at), crash))
            shutil.rmtree(root)


def crash_node(recorded: Load, folder: Path, *, states: int, seed: int) -> Iterator[Found]:
    """Check `states` crashes of a node."""
    for left, at, crash, state, _ in _crashes(recorded, states, seed):
        root = folder / f"state-{at}"
        left.materialise(root)
        yield Found(state, check.node(root, promised(recorded.acts, at), crash))
        shutil.rmtree(root)


def _crashes(recorded: Load, states: int, seed: int) -> Iterator[tuple[Disk, int, Crash, str, random.Random]]:
    """What each of so many crashes leaves, the instant and kind of the crash, and words for both."""
    rng = random.Random(seed)
    disk = Disk(recorded.inode)
    waiting = iter(sorted(recorded.calls, key=lambda call: call.began))
    following = next(waiting, None)
    for at in _instants(recorded, states, rng):
        while following is not None and following.began <= at:
            disk.feed(following)
            following = next(waiting, None)
        crash = Crash.POWER if rng.random() < 0.7 else Crash.KILL
        how = rng.choice(WAYS)
        state = f"{recorded.name}: {crash}, {how}, at {(at - recorded.begin) / 1e6:.3f} ms"
        yield disk.crash(crash, at, how, rng), at, crash, state, rng


def _instants(recorded: Load, states: int, rng: random.Random) -> list[int]:
    """Half at any time; the rest where a call or an act that changes names or throws away is under way."""
    found = {rng.randint(recorded.begin, recorded.end) for _ in range(states // 2)}
    rare = [act for act in recorded.acts if act.doing in ("trim", "delete", "create", "policy") and act.ended]
    while len(found) < states:
        if rare and rng.random() < 0.5:
            act = rng.choice(rare)
            found.add(rng.randint(act.began, act.ended or act.began))
        else:
            call = rng.choice(recorded.calls)
            found.add(rng.randint(call.began, call.ended))
    return sorted(found)


def _crash_recovery(
    recorded: Load,
    left: Disk,
    folder: Path,
    library: Path,
    at: int,
    crash: Crash,
    state: str,
    rng: random.Random,
    mutant: str | None,
) -> Iterator[Found]:
    """Recover under the recorder, and crash that: power is lost at several instants of it."""
    root = folder / "root"
    left.materialise(root)
    left.adopt(root)
    lives = ",".join(f"{name}:{each.life}" for name, each in promised(recorded.acts, at).items() if each.may)
    command = ["tests.crash.library_load", "recover", str(root), str(folder / "acts"), f"--lives={lives}"]
    command += [f"--crash={crash}", *(["--mutant", mutant] if mutant else [])]
    try:
        _run(command, library, root, folder)
    except RunFailed as error:
        yield Found(state, [f"recovery: {error}"])
        return
    calls, acts = trace.read(folder / "trace"), load(folder / "acts")
    before = [
        act if (act.ended or at + 1) <= at else _unanswered(act) for act in recorded.acts if act.began <= at
    ]
    end = max(call.ended for call in calls)
    waiting = iter(sorted(calls, key=lambda call: call.began))
    following = next(waiting, None)
    instants = [rng.choice(calls) for _ in range(4)]
    for number, second in enumerate(sorted([*(rng.randint(c.began, c.ended) for c in instants), end])):
        while following is not None and following.began <= second:
            left.feed(following)
            following = next(waiting, None)
        how = rng.choice(WAYS)
        again = left.crash(Crash.POWER, second, how, rng)
        copy = folder / f"second-{number}"
        again.materialise(copy)
        promises = promised([*before, *acts], second)
        took = (second - calls[0].began) / 1e6
        yield Found(
            f"{state}; then power, {how}, {took:.3f} ms later", check.library(copy, promises, "power")
        )
        shutil.rmtree(copy)
    shutil.rmtree(folder)


def _unanswered(act: Act) -> Act:
    return Act(
        doing=act.doing,
        log=act.log,
        life=act.life,
        began=act.began,
        ended=None,
        offset=act.offset,
        stop=act.stop,
        interval=act.interval,
    )
