"""Short schedules of marks, configuration changes, power losses and churn against the pure core, by seed.

Each schedule begins with a group that has a leader, takes some twenty steps that are drawn with a bias to
what is dangerous (a leader that is cut off in the instant of a change, a power loss after an acknowledgement,
a replica that stands with an old configuration, a learner that begins again), and ends healed. Two things
must never be: a leader that lacks what is committed while a member still holds it, and a group without a
leader though all its replicas are up. An acknowledged entry may be gone only when more voters than a minority
forgot at one time; a learner that began again when it was restarted forgot nothing that counted.

`python -m tests.raft.fuzz --schedules 1000000` runs many, `--seed N --schedules 1` one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

from raft import (
    AnyMessage,
    Configuration,
    ConfigurationRefused,
    Entry,
    HardState,
    NotLeader,
    Role,
    Settings,
)
from raft.messages import Heartbeat
from tests.raft.harness import CLUSTER, GROUP, MemoryLog, Replica, entries_of

AT_ONCE, ONE_BY_ONE = Settings(), Settings(max_append_bytes=1)
TIMEOUT_MS = AT_ONCE.election_timeout_ms
# (voters, learners) of a group at its birth: small, and often at the edge of a change.
SHAPES = ((3, 0), (3, 0), (2, 1), (2, 1), (3, 1), (1, 1), (4, 0))
STEPS = (10, 26)
MOST_DELIVERIES = 80
CONVERGE_ROUNDS = 60
MOST_BROKEN = 10
# A replica whose folder went back begins in a term so far above its leader's, as the driver has it.
TERMS_FORGOTTEN = 1000

Place = tuple[int, int]


class Broken(AssertionError):
    """What must hold does not; the text says what."""


class Disk(Replica):
    """A replica whose appends are acknowledged when they are written; `synced` entries outlast the power."""

    def __init__(self, replica_id: int, schedule: Schedule, configuration: Configuration) -> None:
        self.schedule = schedule
        self.synced = 1
        # It is recovering without a fault: a learner that began again when it was restarted.
        self.began_again = False
        entries = schedule.first_entries if replica_id in schedule.configuration.members() else ()
        super().__init__(
            replica_id,
            configuration,
            post=schedule.post,
            entries=entries,
            hard_state=HardState(1) if entries else HardState(0),
            now_ms=schedule.now_ms,
            settings=schedule.settings,
        )

    def start(self, *, now_ms: int) -> None:
        self.rng = self.schedule.rng
        super().start(now_ms=now_ms)
        self.core._tracer.trace = None
        self.synced = min(self.synced, len(self.log.entries))

    def act(self) -> None:
        """Do what the core decided; it is written at once."""
        while True:
            ready = self.perform()
            self.readies.clear()
            if ready.truncate_from is not None:
                self.synced = min(self.synced, ready.truncate_from - 1)
            if ready.entries:
                self._sync_configurations(ready.entries)
            if not self.unsynced:
                return
            self.flush()
            done, self.flushed = self.flushed, []
            for was, written in done:
                for message in was.messages_after_sync:
                    self.post(message, ())
                if written is not None:
                    self.core.persisted(written)

    def _sync_configurations(self, entries: object) -> None:
        # A configuration is synced before anything follows it (docs/consensus.md#recovering).
        log = self.log.entries
        for entry in reversed(log[self.synced : -1]):
            if entry.configuration is not None:
                self.synced = entry.index
                return

    @property
    def place(self) -> Place:
        return self.log.last_term, self.log.last_index

    @property
    def was_voter(self) -> bool:
        return self.replica_id in self.initial.voters or any(
            e.configuration is not None and self.replica_id in e.configuration.voters
            for e in self.log.entries
        )


class Schedule:
    """One seed's history."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        voters, learners = rng.choice(SHAPES)
        self.configuration = Configuration(
            tuple(range(1, voters + 1)), tuple(range(voters + 1, voters + learners + 1))
        )
        self.first_entries = entries_of(1)
        self.settings = rng.choice((AT_ONCE, ONE_BY_ONE))
        self.now_ms = 0
        self.packets: list[tuple[AnyMessage, tuple[Entry, ...]]] = []
        self.cut: set[tuple[int, int]] = set()
        # Packets that a cut or the network holds back; they come when it is healed.
        self.held: list[tuple[AnyMessage, tuple[Entry, ...]]] = []
        # Damage takes any suffix, power only what is not synced.
        self.damages = rng.random() < 0.3
        self.faults_left = rng.choice((1, 1, 1, 2, 3))
        self.replicas: dict[int, Disk] = {}
        for member in self.configuration.members():
            self.add(member, self.configuration)
        # (entry, voters that it was committed by, term in which).
        self.committed: list[tuple[Entry, tuple[int, ...], int]] = []
        self.seen: dict[int, tuple[int, int]] = {}
        self.leaders: dict[int, int] = {}
        self.led: set[tuple[int, int]] = set()
        self.removed: set[int] = set()
        self.gone = False
        self.number = 0
        # A round of asking: incarnations first, then places.
        self.asked: dict[int, int] | None = None
        self.answers: dict[int, Place] = {}
        self.releases = 0
        self.delays = rng.random() < 0.4

    def add(self, replica_id: int, configuration: Configuration) -> None:
        self.replicas[replica_id] = Disk(replica_id, self, configuration)

    def post(self, message: AnyMessage, entries: tuple[Entry, ...]) -> None:
        self.packets.append((message, entries))

    # Steps

    def run(self) -> None:
        """The whole schedule. Raises `Broken`."""
        rng = self.rng
        first = self.replicas[rng.choice(self.configuration.voters)]
        first.core.campaign(now_ms=0)
        self.act(first)
        self.deliver(MOST_DELIVERIES)
        steps = rng.choices(
            (
                self.reach,
                self.some,
                self.most,
                self.propose,
                self.change,
                self.fault,
                self.stand,
                self.heal,
                self.restart,
                self.ask,
                self.lose,
                self.late_word,
                self.put_back,
            ),
            (10, 14, 16, 10, 9, 7, 14, 8, 2, 6, 3, 2, 4),
            k=rng.randint(*STEPS),
        )
        for step in steps:
            step()
            if self.gone:
                return
        self.converge()

    def act(self, replica: Disk) -> None:
        replica.act()
        self.look(replica)

    def some(self) -> None:
        self.deliver(self.rng.randint(1, 6))

    def most(self) -> None:
        self.deliver(MOST_DELIVERIES)

    def lose(self) -> None:
        self.packets = [packet for packet in self.packets if self.rng.random() < 0.5]

    def deliver(self, count: int) -> None:
        """Deliver up to `count` packets, in order or not."""
        rng, cut = self.rng, self.cut
        shuffles = rng.random() < 0.2
        holds = self.delays
        while count > 0 and self.packets and not self.gone:
            packets, self.packets = self.packets, []
            if shuffles:
                rng.shuffle(packets)
            for place, (message, entries) in enumerate(packets):
                if (message.sender, message.receiver) in cut:
                    if holds and len(self.held) < 20:
                        self.held.append((message, entries))
                    continue
                if holds and rng.random() < 0.1:
                    self.held.append((message, entries))
                    continue
                replica = self.replicas.get(message.receiver)
                if replica is None:
                    continue
                replica.core.receive(message, entries, now_ms=self.now_ms)
                self.act(replica)
                count -= 1
                if count <= 0 or self.gone:
                    self.packets = packets[place + 1 :] + self.packets
                    break

    def reach(self) -> None:
        """Cut one off, mostly a leader; or split in two."""
        rng, ids = self.rng, list(self.replicas)
        leaders = [r.replica_id for r in self.replicas.values() if r.core.role is Role.LEADER]
        if leaders and rng.random() < 0.6:
            side = {rng.choice(leaders)}
        else:
            side = {each for each in ids if rng.random() < 0.5}
        self.cut = {(a, b) for a in ids for b in ids if (a in side) != (b in side)}
        if rng.random() < 0.2:
            self.packets.clear()

    def heal(self) -> None:
        self.cut = set()
        self.packets += self.held
        self.held = []
        if self.rng.random() < 0.3:
            self.tick()

    def leader(self) -> Disk | None:
        leaders = [r for r in self.replicas.values() if r.core.is_leader]
        return self.rng.choice(leaders) if leaders else None

    def propose(self) -> None:
        leader = self.leader()
        if leader is not None:
            self.number += 1
            place = leader.core.place()
            entry = Entry(place.index, place.term, b"%d" % self.number, 1)
            leader.core.propose([entry], now_ms=self.now_ms)
            self.act(leader)

    def change(self) -> None:
        leader = self.leader()
        if leader is None:
            return
        rng = self.rng
        current = leader.core.configuration
        steps = [current.promoted(each) for each in current.learners] * 3
        if len(current.voters) > 1:
            steps.append(current.without(rng.choice(current.voters)))
        new = max(self.replicas) + 1
        if not current.learners and new <= 5:
            steps.append(current.with_learner(new))
        step = rng.choice(steps) if steps else None
        if step is None:
            return
        cut_off = rng.random() < 0.4
        place = leader.core.place()
        entry = Entry(place.index, place.term, b"configuration", 1, step)
        try:
            leader.core.propose_configuration(entry, now_ms=self.now_ms)
        except (ConfigurationRefused, NotLeader):
            return
        if new in step.learners:
            self.add(new, self.configuration)
        if cut_off:
            own = leader.replica_id
            self.cut = {(a, own) for a in self.replicas} | {(own, a) for a in self.replicas}
        self.act(leader)

    def fault(self) -> None:
        """Power is lost, or a byte rots: what was acknowledged may be gone, and it comes back recovering."""
        if self.faults_left <= 0:
            return
        self.faults_left -= 1
        rng = self.rng
        replica = rng.choice(list(self.replicas.values()))
        held = len(replica.durable_log.entries)
        if self.damages:
            keep = rng.randint(0, held)
        else:
            keep = replica.synced if rng.random() < 0.7 else rng.randint(replica.synced, held)
        self.forget(replica, keep)
        if replica.recovering and not replica.was_voter and rng.random() < 0.5 and not self.gone:
            self.forget(replica, 0)  # A learner begins again.

    def put_back(self) -> None:
        """A folder goes back to an older copy, with its term and vote, and its leader notices."""
        leader = self.leader()
        if leader is None or self.faults_left <= 0:
            return
        known = [
            each
            for each, progress in leader.core.progress.items()
            if each != leader.replica_id
            and progress.match_index
            and progress.incarnation == self.replicas[each].incarnation
        ]
        if not known:
            return
        self.faults_left -= 1
        replica = self.replicas[self.rng.choice(known)]
        held = min(leader.core.progress[replica.replica_id].match_index, len(replica.durable_log.entries))
        keep = self.rng.randrange(held) if held else 0
        old_term = replica.durable_log.entries[keep - 1].term if keep else 0
        if replica.incarnation and self.rng.random() < 0.5:
            self.notice_an_older_incarnation(replica, leader, keep, HardState(old_term))
        replica.durable_hard_state = HardState(self.term_after(old_term, leader.core.term))
        self.forget(replica, keep)

    def notice_an_older_incarnation(
        self, replica: Disk, leader: Disk, keep: int, hard_state: HardState
    ) -> None:
        """The copy is from before an earlier mark: its next incarnation must be above all that it was."""
        former = replica.incarnation
        whole, replica.durable_log = replica.durable_log, MemoryLog(replica.durable_log.entries[:keep])
        replica.durable_hard_state = hard_state
        replica.incarnation, replica.recovering = self.rng.randrange(former), False
        replica.start(now_ms=self.now_ms)
        head = (CLUSTER, GROUP, leader.replica_id, replica.replica_id, leader.incarnation, leader.core.term)
        beat = Heartbeat(*head, leader.core.committed_index, 1, 0, former)
        replica.core.receive(beat, now_ms=self.now_ms)
        if not replica.core.log_regressed:
            raise Broken(f"{self.tell(replica)} does not see that it once was incarnation {former}")
        replica.incarnation, replica.durable_log = replica.core.last_incarnation, whole

    @staticmethod
    def term_after(old_term: int, leaders_term: int) -> int:
        return leaders_term + TERMS_FORGOTTEN

    def late_word(self) -> None:
        """A follower acknowledges and loses power; that word comes after the first of its next life."""
        leader = self.leader()
        if leader is None or self.faults_left <= 0 or len(leader.core.configuration.voters) < 2:
            return
        own = leader.replica_id
        voter = self.rng.choice([each for each in leader.core.configuration.voters if each != own])
        follower = self.replicas[voter]
        self.propose()
        self.deliver_to(voter)
        late = [packet for packet in self.packets if packet[0].sender == voter]
        self.packets = [packet for packet in self.packets if packet[0].sender != voter]
        self.faults_left -= 1
        self.forget(
            follower, self.rng.randint(0, len(follower.log.entries)) if self.damages else follower.synced
        )
        self.packets = [packet for packet in self.packets if packet[0].receiver != voter]
        self.now_ms += AT_ONCE.heartbeat_ms
        leader.core.expire(now_ms=self.now_ms)
        self.act(leader)
        for receiver in (voter, own) * self.rng.randint(1, 3):
            self.deliver_to(receiver)
        self.packets += late
        self.deliver_to(own)
        for receiver in (voter, own) * self.rng.randint(0, 2):
            self.deliver_to(receiver)
        self.cut = {(each, own) for each in self.replicas} | {(own, each) for each in self.replicas}

    def deliver_to(self, receiver: int) -> None:
        """Deliver what is under way to one replica, cut or not."""
        packets = [packet for packet in self.packets if packet[0].receiver == receiver]
        self.packets = [packet for packet in self.packets if packet[0].receiver != receiver]
        replica = self.replicas[receiver]
        for message, entries in packets:
            if not self.gone:
                replica.core.receive(message, entries, now_ms=self.now_ms)
                self.act(replica)

    def forget(self, replica: Disk, keep: int, *, fault: bool = True) -> None:
        replica.began_again = not fault
        replica.synced = min(replica.synced, keep) if self.damages else keep
        replica.forget(len(replica.durable_log.entries) - keep, now_ms=self.now_ms)
        replica.synced = keep
        self.seen.pop(replica.replica_id, None)
        own = replica.replica_id
        if self.rng.random() < 0.8:
            self.packets = [p for p in self.packets if p[0].receiver != own]
        if self.rng.random() < 0.5:
            # The last words of its former life arrive behind the first of the next.
            self.held += [p for p in self.packets if p[0].sender == own]
            self.packets = [p for p in self.packets if p[0].sender != own]
        self.check_held()
        self.act(replica)

    def check_held(self) -> None:
        """What is committed is with a member, unless too many forgot. One that was removed may be deleted."""
        members = [self.replicas[each] for each in self.recorded()]
        changes = [entry.configuration.voters for entry, _, _ in self.committed if entry.configuration]
        present = changes[-1] if changes else self.configuration.voters
        for entry, voters, _ in self.committed:
            if any(self.holds(each, entry) for each in members):
                continue
            if not any(self.too_many_forgot(each) for each in (voters, present)):
                raise Broken(f"{entry} of {voters} is gone, and only a minority of {present} forgot")
            self.gone = True

    def too_many_forgot(self, voters: tuple[int, ...]) -> bool:
        found = [self.replicas[each] for each in voters]
        return 2 * sum(each.recovering and not each.began_again for each in found) >= len(voters)

    @staticmethod
    def holds(replica: Replica, entry: Entry) -> bool:
        entries = replica.durable_log.entries
        return len(entries) >= entry.index and entries[entry.index - 1].term == entry.term

    def restart(self) -> None:
        replica = self.rng.choice(list(self.replicas.values()))
        if not (replica.was_voter or replica.recovering or self.damages):
            self.forget(replica, 0, fault=False)  # A learner begins again.
            return
        self.seen.pop(replica.replica_id, None)
        replica.crash()
        replica.start(now_ms=self.now_ms)
        self.act(replica)

    def tick(self) -> None:
        """Leaders that hear no majority step down."""
        self.now_ms += TIMEOUT_MS
        for replica in list(self.replicas.values()):
            if replica.core.role is Role.LEADER:
                replica.core.expire(now_ms=self.now_ms)
                self.act(replica)

    def stand(self) -> None:
        rng = self.rng
        self.now_ms += 2 * TIMEOUT_MS
        if rng.random() < 0.5:
            self.tick()
        replica = rng.choice(list(self.replicas.values()))
        replica.core.campaign(now_ms=self.now_ms)
        self.act(replica)
        if rng.random() < 0.7:
            self.deliver(MOST_DELIVERIES)

    # Release (docs/consensus.md#when-all-replicas-have-answered)

    def recorded(self) -> list[int]:
        """Whom the catalog knows of: the fewest that may be asked."""
        return [each for each in self.replicas if each not in self.removed]

    def to_ask(self) -> list[int]:
        return self.recorded()

    def ask(self) -> None:
        """A bit of a round of asking: it begins, some answer, it ends."""
        rng = self.rng
        if self.asked is None:
            self.asked = {each: self.replicas[each].incarnation for each in self.to_ask()}
            self.answers = {}
        for each, incarnation in self.asked.items():
            if each not in self.answers and rng.random() < 0.6:
                replica = self.replicas[each]
                if not self.may_answer(replica, incarnation):
                    self.asked = None
                    return
                self.answers[each] = replica.place
        if self.answers.keys() == self.asked.keys():
            self.release()

    @staticmethod
    def may_answer(replica: Disk, incarnation: int) -> bool:
        return replica.incarnation == incarnation and replica.core.role is not Role.LEADER

    def release(self, *, arrives: float = 0.9) -> None:
        assert self.asked is not None
        term, index = max(self.answers.values())
        for each, incarnation in self.asked.items():
            if self.rng.random() < arrives:
                self.replicas[each].core.release(
                    incarnation=incarnation, last_term=term, last_index=index, now_ms=self.now_ms
                )
        self.asked = None

    # The end

    def converge(self) -> None:
        """All are up and hear each other: somebody leads, if need be after a release."""
        self.cut = set()
        self.delays = False
        self.packets = self.held
        if self.find_leader(CONVERGE_ROUNDS // 3):
            return
        for _ in range(3):
            if not any(replica.recovering for replica in self.replicas.values()):
                break
            self.releases += 1
            self.asked = {each: self.replicas[each].incarnation for each in self.replicas}
            self.answers = {each: self.replicas[each].place for each in self.asked}
            self.release(arrives=1.0)
            if self.find_leader(CONVERGE_ROUNDS):
                return
        if not self.gone:
            raise Broken("no leader, and all are up: " + ", ".join(map(self.tell, self.replicas.values())))

    def find_leader(self, rounds: int) -> bool:
        """Whether, in so many turns of standing, somebody commits something of its own term."""
        for _ in range(rounds):
            for replica in self.replicas.values():
                core = replica.core
                if core.role is Role.LEADER and core.committed_index >= core.last_index:
                    return True
            due = [(r.core.deadline_ms(), r.replica_id) for r in self.replicas.values()]
            deadline_ms, replica_id = min(((d, i) for d, i in due if d is not None), default=(None, 0))
            if deadline_ms is None:
                return False
            self.now_ms = max(self.now_ms, deadline_ms)
            replica = self.replicas[replica_id]
            replica.core.expire(now_ms=self.now_ms)
            self.act(replica)
            self.deliver(200)
            if self.gone:
                return True
        return False

    @staticmethod
    def tell(replica: Disk) -> str:
        c = replica.core
        return f"{c!r} {'recovering ' if replica.recovering else ''}{c.configuration.voters} {replica.terms}"

    # What must hold

    def look(self, replica: Disk) -> None:
        core = replica.core
        own = replica.replica_id
        if core.role is Role.LEADER and (own, core.term) not in self.led:
            self.led.add((own, core.term))
            other = self.leaders.setdefault(core.term, own)
            if other != own:
                raise Broken(f"{other} and {own} both lead term {core.term}")
            entries = replica.log.entries
            for entry, _, term in self.committed:
                if term < core.term and (
                    len(entries) < entry.index or entries[entry.index - 1].term != entry.term
                ):
                    raise Broken(f"{self.tell(replica)} leads without {entry}, committed in term {term}")
        commit = core.committed_index
        incarnation, before = self.seen.get(own, (replica.incarnation, 0))
        if commit <= before and incarnation == replica.incarnation:
            return
        self.seen[own] = (replica.incarnation, commit)
        known = self.committed
        for entry in replica.log.entries[before:commit]:
            if entry.index <= len(known):
                if known[entry.index - 1][0].term != entry.term:
                    raise Broken(f"{self.tell(replica)} commits {entry}, and {known[entry.index - 1]} was")
                continue
            voters = core.configuration.voters
            known.append((entry, voters, core.term))
            if entry.configuration is not None:
                members = entry.configuration.members()
                self.removed = {each for each in self.replicas if each not in members}
                self.check_held()


def main() -> int:
    """Run schedules; 1 if any is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="of the first; drawn and printed by default")
    parser.add_argument("--count-file", type=Path, help="the count so far is kept here")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**48) if options.seed is None else options.seed
    print(f"raft-fuzz: SEED={seed} SCHEDULES={options.schedules}", flush=True)
    began = time.monotonic()
    count: Counter[str] = Counter()
    for number in range(1, options.schedules + 1):
        schedule = Schedule(seed + number - 1)
        try:
            schedule.run()
        except AssertionError as error:
            count["broken"] += 1
            print(f"seed {schedule.seed}: {type(error).__name__}: {error}", flush=True)
        count["leaders"] += len(schedule.led)
        count["entries committed"] += len(schedule.committed)
        count["went on after a release"] += schedule.releases > 0
        count["lost more than a minority"] += schedule.gone
        done = number == options.schedules or count["broken"] >= MOST_BROKEN
        if done or number % 1000 == 0:
            told = ", ".join(f"{value} {what}" for what, value in sorted(count.items()))
            text = f"{number} schedules from seed {seed} in {time.monotonic() - began:.0f} s: {told}\n"
            if options.count_file:
                options.count_file.write_text(text)
            if done:
                print(f"{text}{count['broken']} broken")
                break
    return count["broken"] > 0


if __name__ == "__main__":
    sys.exit(main())
