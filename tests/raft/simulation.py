"""A group under everything at once, from one seed: a small world for the core alone.

Steps are drawn one after another: deliveries out of order, losses, duplicates, cuts, crashes that lose what
was not synced, late disks, news, proposals, reads, configuration changes, hand-overs. After each step the
checkers look. Then everything heals, and all replicas must become the same. (The whole product has its own
simulator.)
"""

from __future__ import annotations

import random
from itertools import combinations

from raft import AnyMessage, Configuration, ConfigurationRefused, Entry, NotLeader, Role, Settings
from raft.messages import Vote, VoteAnswer
from raft.quorum import majority
from tests.raft.harness import Network, Replica

SETTINGS = Settings(max_append_bytes=60, max_inflight_bytes=150)
MOST_REPLICAS = 6


class Checkers:
    """What must hold at every step; each method raises AssertionError where it does not."""

    def __init__(self, world: Network) -> None:
        self.world = world
        self.leader_of: dict[int, int] = {}
        self.votes: dict[tuple[int, int], int] = {}
        self.committed: list[tuple[int, bytes]] = []
        self.seen_commit: dict[int, int] = {}
        # By (replica, context): what was committed anywhere when the read was asked.
        self.asked: dict[tuple[int, int], int] = {}
        # The configurations that were committed, in order.
        self.configurations = [world.configuration]

    def posted(self, message: AnyMessage) -> None:
        """One vote per replica and term, over all its lives."""
        if isinstance(message, VoteAnswer) and message.granted:
            vote = message.receiver
        elif isinstance(message, Vote):
            vote = message.sender
        else:
            return
        given = self.votes.setdefault((message.sender, message.term), vote)
        assert given == vote, f"{message.sender} voted for {given} and {vote} in term {message.term}"

    def restarted(self, replica: Replica) -> None:
        """A new life may know a lower commit index."""
        self.seen_commit[replica.replica_id] = 0

    def stepped(self, replica: Replica) -> None:
        """Look at the replica that has just done something."""
        core = replica.core
        assert replica.log.last_index == core.last_index
        if core.role is Role.LEADER:
            leader = self.leader_of.setdefault(core.term, replica.replica_id)
            if leader != replica.replica_id:
                raise AssertionError(f"{leader} and {replica.replica_id} both lead term {core.term}")
        commit = core.committed_index
        seen = self.seen_commit.get(replica.replica_id, 0)
        assert seen <= commit, f"{core!r} had committed {seen}"
        for entry in replica.log.slice(seen + 1, commit):
            self.entry_committed(replica, entry)
        self.seen_commit[replica.replica_id] = commit
        for context, index in replica.reads.items():
            assert index >= self.asked[(replica.replica_id, context)], f"{core!r} answered a stale read"
        replica.reads.clear()

    def entry_committed(self, replica: Replica, entry: Entry) -> None:
        """The same entry everywhere for ever, and durable on a majority when it is first committed."""
        value = (entry.term, entry.data)
        if entry.index <= len(self.committed):
            known = self.committed[entry.index - 1]
            assert known == value, f"{replica.core!r} has {value} at {entry.index}, committed was {known}"
            return
        assert entry.index == len(self.committed) + 1
        self.committed.append(value)
        if entry.configuration is not None:
            self.configuration_committed(entry.configuration)
        if replica.core.role is Role.LEADER:
            voters = replica.core.configuration.voters
            copies = [v for v in voters if self.world[v].durable_log.term(entry.index) == entry.term]
            assert len(copies) >= majority(len(voters)), (
                f"entry {entry.index} committed with {copies} of {voters}"
            )

    def configuration_committed(self, new: Configuration) -> None:
        """One step from the last, told the slow way: nobody votes unseen, and all majorities meet."""
        old = self.configurations[-1]
        assert set(new.voters) <= set(old.members()), f"{new} lets somebody vote who was not in {old}"
        for one in combinations(old.voters, majority(len(old.voters))):
            for other in combinations(new.voters, majority(len(new.voters))):
                assert set(one) & set(other), f"{old} to {new}: {one} and {other} don't meet"
        self.configurations.append(new)

    def new_leader(self, replica: Replica) -> None:
        """Leader completeness: all that was ever committed is in its log. And its votes, counted anew."""
        core = replica.core
        voters = core.configuration.voters
        known = {v: self.votes.get((v, core.term), 0) for v in voters}
        if replica.replica_id in known and core.vote == replica.replica_id:
            known[replica.replica_id] = replica.replica_id
        granted = [v for v, given in known.items() if given == replica.replica_id]
        assert 2 * len(granted) > len(voters), f"{core!r} leads with the votes of {granted} of {voters}"
        held = [(entry.term, entry.data) for entry in replica.log.entries[: len(self.committed)]]
        assert held == self.committed, f"{replica.core!r} leads without what is committed"

    def logs_match(self) -> None:
        """Log matching: where two logs agree on (index, term), they agree on everything before."""
        logs = [replica.log.entries for replica in self.world.replicas.values()]
        for number, one in enumerate(logs):
            for other in logs[number + 1 :]:
                common = [k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a.term == b.term]
                if common:
                    assert one[: common[-1] + 1] == other[: common[-1] + 1]
        for log in logs:
            pending = [entry for entry in log[len(self.committed) :] if entry.configuration is not None]
            assert len(pending) <= 1, f"two changes at once: {pending}"


class Simulation:
    """One seed's history. `churn`: above all changes of the configuration and hand-overs."""

    def __init__(self, seed: int, *, churn: bool = False) -> None:
        self.rng = random.Random(seed)
        self.churn = churn
        size = self.rng.choice((1, 2, 3, 3, 3, 5))
        learners = self.rng.choice((0, 1)) if churn and size < MOST_REPLICAS else 0
        self.world = Network(size, learners=learners, seed=seed, settings=SETTINGS)
        self.checkers = Checkers(self.world)
        for replica in self.world.replicas.values():
            self.watch(replica)
        self.counter = 0
        self.loss = self.rng.choice((0.0, 0.05, 0.3))
        self.duplication = self.rng.choice((0.0, 0.1, 0.4))
        self.crashes = self.rng.choice((0.0, 0.3, 1.0))
        self.changes = self.rng.choice((0.0, 1.0))
        self.transfers = 0.3
        if churn:
            self.loss = self.rng.choice((0.0, 0.0, 0.05))
            self.changes = self.rng.choice((3.0, 10.0))
            self.transfers = self.rng.choice((0.3, 3.0))
        self.led = 0

    def watch(self, replica: Replica) -> None:
        """See what the replica sends."""
        post = replica.post

        def watched(message: AnyMessage, entries: tuple[Entry, ...]) -> None:
            self.checkers.posted(message)
            post(message, entries)

        replica.post = watched

    def run(self, steps: int) -> None:
        """Everything at once, then heal; all replicas become the same."""
        if self.churn:
            self.look(self.world.elect(1), was_leader=False)
        actions = {
            self.deliver: 120.0 if self.churn else 60.0,
            self.disk: 40.0 if self.churn else 14.0,
            self.time: 10.0,
            self.propose: 14.0,
            self.read: 2.0,
            self.news: 1.0,
            self.cut: 0.8,
            self.heal: 0.7,
            self.crash: self.crashes,
            self.restart: 2 * self.crashes,
            self.change: self.changes,
            self.transfer: self.transfers,
        }
        for step, action in enumerate(self.rng.choices(list(actions), list(actions.values()), k=steps)):
            replica = self.rng.choice(list(self.world.replicas.values()))
            was_leader = replica.alive and replica.core.role is Role.LEADER
            action(replica)
            if step % 50 == 0:
                self.checkers.logs_match()
            self.look(replica, was_leader)
        self.converge()

    def look(self, replica: Replica, was_leader: bool) -> None:
        if replica.alive:
            self.checkers.stepped(replica)
            if replica.core.role is Role.LEADER and not was_leader:
                self.led += 1
                self.checkers.new_leader(replica)

    def deliver(self, replica: Replica) -> None:
        packets = self.world.packets
        if not packets:
            return
        place = self.rng.randrange(min(len(packets), 8))
        packets.rotate(-place)
        message, entries = packets[0]
        if self.rng.random() >= self.duplication:
            packets.popleft()
        packets.rotate(place)
        if (message.sender, message.receiver) in self.world.cut or self.rng.random() < self.loss:
            return
        receiver = self.world.replicas[message.receiver]
        if receiver.alive:
            was_leader = receiver.core.role is Role.LEADER
            receiver.receive((message, entries), now_ms=self.world.now_ms)
            self.look(receiver, was_leader)

    def disk(self, replica: Replica) -> None:
        if replica.alive:
            replica.flush(self.rng.choice((1, 2, None)))
            if self.rng.random() < 0.7:
                replica.complete()

    def time(self, replica: Replica) -> None:
        if self.rng.random() < 0.05:
            # Everybody stalls, as when the machine sleeps: all timers are over at once.
            self.world.now_ms += 2_000
        deadline_ms = replica.core.deadline_ms() if replica.alive else None
        if deadline_ms is not None and deadline_ms <= self.world.now_ms + self.rng.choice((200, 3_000)):
            self.world.now_ms = max(self.world.now_ms, deadline_ms)
            if self.rng.random() < 0.7:
                replica.core.offer_quiesce(absent=self.rng.choice(((), (1,))))
            replica.core.expire(now_ms=self.world.now_ms)
            replica.perform()

    def propose(self, replica: Replica) -> None:
        if replica.alive and replica.core.is_leader:
            self.counter += 1
            data = [b"%d.%d" % (self.counter, k) for k in range(self.rng.randint(1, 3))]
            replica.propose(*data, now_ms=self.world.now_ms)

    def read(self, replica: Replica) -> None:
        if replica.alive:
            self.counter += 1
            self.checkers.asked[(replica.replica_id, self.counter)] = len(self.checkers.committed)
            replica.core.read_index(self.counter, now_ms=self.world.now_ms)
            replica.perform()

    def news(self, replica: Replica) -> None:
        if replica.alive:
            replica.core.unquiesce(now_ms=self.world.now_ms)
            replica.core.suspect_leader(now_ms=self.world.now_ms)
            replica.core.unreachable(self.rng.choice(list(self.world.replicas)))
            replica.perform()

    def cut(self, replica: Replica) -> None:
        leaders = self.world.leaders()
        if leaders and self.rng.random() < 0.5:
            replica = self.world[leaders[-1]]
        share = self.rng.choice((0.5, 1.0))
        others = [other for other in self.world.replicas if self.rng.random() < share]
        self.world.cut |= {(replica.replica_id, other) for other in others}
        if self.rng.random() < 0.7:
            self.world.cut |= {(other, replica.replica_id) for other in others}

    def heal(self, replica: Replica) -> None:
        self.world.cut = set()

    def crash(self, replica: Replica) -> None:
        replica.crash()

    def restart(self, replica: Replica) -> None:
        if not replica.alive:
            replica.start(now_ms=self.world.now_ms)
            self.checkers.restarted(replica)

    def change(self, replica: Replica) -> None:
        if not replica.alive or not replica.core.is_leader:
            return
        current = replica.core.configuration
        member = self.rng.choice(current.members())
        steps = [current.without(member)] if len(current.members()) > 2 else []
        steps += [current.promoted(learner) for learner in current.learners]
        new_id = max(self.world.replicas) + 1
        if self.rng.random() < 0.1:
            # Nobody votes who has not been a learner, whenever it is asked for.
            steps.append(Configuration((*current.voters, new_id), current.learners))
        if new_id <= MOST_REPLICAS and not current.learners:
            steps.append(current.with_learner(new_id))
        if not steps:
            return
        step = self.rng.choice(steps)
        if new_id in step.learners:
            self.watch(self.world.add(new_id))
        try:
            replica.configure(step, now_ms=self.world.now_ms)
        except (ConfigurationRefused, NotLeader):
            return
        assert new_id not in step.voters, f"{replica.core!r} made a voter of {new_id}, which nobody knows"

    def transfer(self, replica: Replica) -> None:
        if replica.alive and replica.core.is_leader:
            voter = self.rng.choice(replica.core.configuration.voters)
            replica.core.transfer_leadership(voter, now_ms=self.world.now_ms)
            replica.perform()

    def converge(self) -> None:
        """Heal everything: a leader is found, what it commits reaches every member, all logs are equal."""
        world = self.world
        world.heal()
        for replica in world.replicas.values():
            self.restart(replica)
            # As whoever drives it does when others that it rests on have begun new lives.
            replica.core.unquiesce(now_ms=world.now_ms)
            replica.perform()
        world.settle()
        world.pass_time(20_000)
        leader = world.leader()
        leader.propose(b"last", now_ms=world.now_ms)
        world.settle()
        world.pass_time(1_000)
        for replica in world.replicas.values():
            self.look(replica, was_leader=True)
        self.checkers.logs_match()
        members = leader.core.configuration.members()
        assert b"last" in leader.data
        for member in members:
            replica = world[member]
            assert replica.core.committed_index == leader.core.last_index, repr(replica.core)
            assert replica.log.entries == replica.durable_log.entries == leader.log.entries
