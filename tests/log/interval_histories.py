"""A model of what each way of going down keeps of a log with the flush policy `interval`."""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.log import Log, Storage
from laminar.log.format.flush_policy import FlushPolicy
from tests.log.histories import contents, frame_for

# Never by a timer: a test says when a log is synced.
NEVER = FlushPolicy(interval_ms=3_600_000)
State = tuple[int, tuple[bytes, ...]]


@dataclass
class IntervalHistory:
    """One `interval` log: its state after each change, and what was acknowledged (by number of the state)."""

    storage: Storage
    log: Log = field(init=False)
    states: list[State] = field(default_factory=list)
    acknowledged: int = 0

    def create(self, policy: FlushPolicy = NEVER) -> None:
        self.log = self.storage.create_log("log", 1, policy=policy)
        self._note()

    def _note(self) -> None:
        log = self.log
        self.states.append((log.start.index, tuple(contents(log))))

    def write(self, *values: bytes, term: int | None = None, opens: bool | None = None) -> None:
        self.log.append([frame_for(self.log, list(values), term=term, opens=opens)])
        self._note()

    def again(self, frame: bytes) -> None:
        self.log.append([frame])
        self._note()

    def truncate(self, index: int) -> None:
        self.log.truncate(index)
        self._note()

    def set_start(self, index: int) -> None:
        row = self.log.index_entry(index)
        self.log.set_start(index=index, term=row.term, offset=row.next_offset)
        self._note()

    async def settle(self) -> None:
        """What a leader or follower waits for before it acknowledges."""
        number = len(self.states) - 1
        await self.storage.sync_log(self.log)
        assert self.log.durable_index == self.log.last_index
        self.acknowledged = number

    async def sync(self) -> None:
        """What the interval does when it is over."""
        await self.storage.sync(durable=True)

    def check(self, recovered: Storage, *, power_lost: bool) -> None:
        """What was synced is there; what was acknowledged too, or the log says that it may have forgotten."""
        log = recovered.logs.get(1)
        if log is None:
            assert self.acknowledged == 0 and self.log.synced_index == 0, "the log is gone"
            return
        found: State = (log.start.index, tuple(contents(log)))
        assert log.recovering <= power_lost, "a mark without a power loss"
        later = self.states[self.acknowledged :]
        if not log.recovering:
            assert found in later, f"{_shape(found)} is none of {[_shape(state) for state in later]}"
            return
        assert log.power_lost and log.incarnation == 1
        start, frames = found
        assert any(start == state[0] and frames == state[1][: len(frames)] for state in self.states), (
            f"{_shape(found)} is no beginning of any of {[_shape(state) for state in self.states]}"
        )
        kept = self.states[-1]
        synced = kept[1][: max(self.log.synced_index - kept[0], 0)]
        here = set(frames)
        assert all(frame in here for frame in synced[max(start - kept[0], 0) :]), (
            f"synced up to {self.log.synced_index} of {_shape(kept)}, found {_shape(found)}"
        )


def _shape(state: State) -> str:
    return f"{state[0]}+{[len(frame) for frame in state[1]]}"
