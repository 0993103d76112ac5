"""Scenario files: commands to a small group, and below each what came of it.

A file begins with comments that say what it shows. Then come blocks, parted by empty lines: commands, a line
`----`, and the output expected of them. `pytest tests/raft --rewrite` writes the output anew; what changed is
then read in the diff. The commands are the methods of `Scenario` that begin with `do_`; their docstrings say
what follows the command's name. `quietly` before a command shows nothing of what it does.

The output names what each replica was told to do, in order: `1: ...` is what it does itself, `1 -> 2: ...` a
message that leaves at once, `1 ~> 2: ...` one that waits for its sync, `1 => 2: ...` one that arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from raft import (
    AnyMessage,
    Append,
    Configuration,
    ConfigurationRefused,
    Entry,
    HardState,
    NotLeader,
    Ready,
    Role,
    Settings,
    TooMuchUncommitted,
)
from raft.messages import AppendAnswer, Heartbeat, HeartbeatAnswer, PreVote, Vote
from tests.raft.harness import MemoryLog, Network, Packet, Replica, entries_of

RULE = "----"


class Block(msgspec.Struct):
    """Commands, and what is expected of them; comments stand before the commands as they are."""

    commands: list[str]
    expected: list[str] | None


def parse(text: str) -> list[Block]:
    """The blocks of a file. One without a rule line expects nothing, such as the comments at the head."""
    blocks = []
    for chunk in text.strip("\n").split("\n\n"):
        lines = chunk.strip("\n").splitlines()
        if RULE in lines:
            place = lines.index(RULE)
            blocks.append(Block(lines[:place], lines[place + 1 :]))
        else:
            blocks.append(Block(lines, None))
    return blocks


def play(text: str) -> str:
    """The file as it should be: every output as it is now."""
    scenario = Scenario()
    written = []
    for block in parse(text):
        output: list[str] = []
        commands = [line for line in block.commands if line and not line.startswith("#")]
        for command in commands:
            output += scenario.perform(command)
        written.append("\n".join([*block.commands, *([RULE, *(output or ["ok"])] if commands else [])]))
    return "\n\n".join(written) + "\n"


def files() -> list[Path]:
    """All scenario files."""
    return sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


class Scenario:
    """A group that obeys commands and says what happens."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._world: Network | None = None

    @property
    def world(self) -> Network:
        assert self._world is not None, "the first command of a scenario is `cluster`"
        return self._world

    def perform(self, command: str) -> list[str]:
        """Do what a line says; the lines that came of it."""
        words = command.split()
        is_quiet = words[0] == "quietly"
        if is_quiet:
            words = words[1:]
        method: Callable[..., None] = getattr(self, "do_" + words[0].replace("-", "_"))
        named = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        self._lines = []
        try:
            method(*[word for word in words[1:] if "=" not in word], **named)
        except (NotLeader, ConfigurationRefused, TooMuchUncommitted) as error:
            return [f"refused: {error}"]
        return [] if is_quiet else self._lines

    def say(self, line: str) -> None:
        self._lines.append(line)

    # The group

    def do_cluster(self, size: str, **options: str) -> None:
        """SIZE [learners=N] [log1=1,1,2 (terms of replica 1's entries)] [term1=4] and any of the settings."""
        logs = {int(k[3:]): entries_of(*_numbers(v)) for k, v in options.items() if k.startswith("log")}
        terms = {int(k[4:]): HardState(int(v)) for k, v in options.items() if k.startswith("term")}
        names = set(Settings.__dataclass_fields__)
        self._world = Network(
            int(size),
            learners=int(options.get("learners", 0)),
            settings=Settings(**{k: int(v) for k, v in options.items() if k in names}),
            logs=logs,
            hard_states=terms,
        )
        for replica in self.world.replicas.values():
            replica.on_ready = self._shown(replica)

    def do_add(self, replica_id: str) -> None:
        """REPLICA: an empty replica that knows the first configuration but is not in it."""
        replica = self.world.add(int(replica_id))
        replica.on_ready = self._shown(replica)

    def do_crash(self, *ids: str) -> None:
        """REPLICA...: what was not synced is lost."""
        for replica in self._replicas(ids):
            replica.crash()

    def do_restart(self, *ids: str) -> None:
        """REPLICA...: come up with what the disk holds."""
        for replica in self._replicas(ids):
            self.world.restart(replica.replica_id)

    def do_isolate(self, *ids: str) -> None:
        """REPLICA...: cut them off from all others."""
        for replica in self._replicas(ids):
            self.world.isolate(replica.replica_id)

    def do_cut(self, sender: str, receiver: str) -> None:
        """SENDER RECEIVER: nothing passes in this direction."""
        self.world.cut.add((int(sender), int(receiver)))

    def do_heal(self) -> None:
        """Nothing is cut any more."""
        self.world.heal()

    # Inputs

    def do_campaign(self, replica_id: str) -> None:
        """REPLICA: stand at once."""
        replica = self._replica(replica_id)
        replica.core.campaign(now_ms=self.world.now_ms)
        replica.perform()

    def do_propose(self, replica_id: str, *data: str) -> None:
        """REPLICA DATA...: one entry per word; `x*100` is a hundred bytes."""
        items = [word.split("*") for word in data]
        self._replica(replica_id).propose(
            *[item[0].encode() * int(item[1] if len(item) > 1 else 1) for item in items],
            now_ms=self.world.now_ms,
        )

    def do_learner(self, replica_id: str, learner: str) -> None:
        """LEADER REPLICA: add a learner."""
        self._configure(replica_id, lambda current: current.with_learner(int(learner)))

    def do_promote(self, replica_id: str, learner: str) -> None:
        """LEADER REPLICA: make a learner a voter."""
        self._configure(replica_id, lambda current: current.promoted(int(learner)))

    def do_remove(self, replica_id: str, member: str) -> None:
        """LEADER REPLICA: remove a member."""
        self._configure(replica_id, lambda current: current.without(int(member)))

    def do_transfer(self, replica_id: str, target: str) -> None:
        """LEADER REPLICA: hand over."""
        replica = self._replica(replica_id)
        if not replica.core.transfer_leadership(int(target), now_ms=self.world.now_ms):
            self.say(f"refused: {target} is no other voter")
        replica.perform()

    def do_read(self, replica_id: str, context: str) -> None:
        """REPLICA NUMBER: ask for an index that covers all that is committed."""
        replica = self._replica(replica_id)
        replica.core.read_index(int(context), now_ms=self.world.now_ms)
        replica.perform()

    def do_suspect(self, *ids: str) -> None:
        """REPLICA...: news that the leader is gone."""
        for replica in self._replicas(ids):
            replica.core.suspect_leader(now_ms=self.world.now_ms)
            replica.perform()

    def do_unreachable(self, replica_id: str, member: str) -> None:
        """LEADER REPLICA: news that what was sent there is lost."""
        replica = self._replica(replica_id)
        replica.core.unreachable(int(member))
        replica.perform()

    # Time, disks and the network

    def do_tick(self, duration_ms: str) -> None:
        """MS: time passes, and what is due is done; nothing is delivered."""
        self.world.pass_time(int(duration_ms), settle=False)

    def do_run(self, duration_ms: str) -> None:
        """MS: time passes from deadline to deadline, and at each everything comes to rest."""
        world = self.world
        end_ms = world.now_ms + int(duration_ms)
        while True:
            due = [r.core.deadline_ms() for r in world.replicas.values() if r.alive]
            next_ms = min((deadline for deadline in due if deadline is not None), default=end_ms)
            if next_ms > end_ms:
                break
            world.pass_time(max(next_ms - world.now_ms, 0), settle=False)
            self.do_stabilise()
            if next_ms == end_ms:
                break
        world.now_ms = end_ms

    def do_sync(self, *ids: str, count: str = "") -> None:
        """REPLICA... [count=N]: make what was written durable, or N writes of it, and send what waited."""
        for replica in self._replicas(ids):
            replica.flush(int(count) if count else None)
            self._complete(replica)

    def do_flush(self, *ids: str) -> None:
        """REPLICA...: make what was written durable, and tell nobody yet."""
        for replica in self._replicas(ids):
            replica.flush()

    def do_deliver(self, **which: str) -> None:
        """[from=N] [to=N] [kind=Append] [count=N or last=N] [copies=2]: what is under way arrives."""
        for packet in self._take(**{k: v for k, v in which.items() if k != "copies"}):
            for _ in range(int(which.get("copies", 1))):
                self._arrive(packet)

    def do_drop(self, **which: str) -> None:
        """[from=N] [to=N] [kind=Append] [count=N]: what is under way is lost."""
        for message, _ in self._take(**which):
            self.say(f"lost {message.sender} -> {message.receiver}: {_shown_message(message)}")

    def do_stabilise(self, *ids: str) -> None:
        """[REPLICA...]: deliver and sync until nothing moves, among these alone if some are named."""
        members = {int(i) for i in ids} or set(self.world.replicas)
        for _ in range(10_000):
            packet = next((p for p in self.world.packets if _between(p, members)), None)
            if packet is not None:
                self.world.packets.remove(packet)
                self._arrive(packet)
                continue
            waiting = [
                self.world[i] for i in sorted(members) if self.world[i].unsynced or self.world[i].flushed
            ]
            waiting = [replica for replica in waiting if replica.alive]
            if not waiting:
                return
            for replica in waiting:
                replica.flush()
                self._complete(replica)
        raise AssertionError("the group does not come to rest")

    def do_trim(self, replica_id: str, index: str) -> None:
        """REPLICA INDEX: its log begins behind this entry from now on, as by retention."""
        replica = self._replica(replica_id)
        replica.log.trim(int(index))
        replica.durable_log.trim(int(index))

    def do_catch_up(self, replica_id: str, source: str, index: str) -> None:
        """REPLICA SOURCE INDEX: its log is replaced by the source's up to this entry; it starts anew."""
        replica, log = self._replica(replica_id), self._replica(source).log
        entries = log.slice(log.first_index, int(index))
        replica.durable_log = MemoryLog(entries, start_index=log.start_index, start_term=log.start_term)
        self.world.restart(replica.replica_id)

    # What is to be seen

    def do_state(self, *ids: str) -> None:
        """[REPLICA...]: role, term, leader and log of each."""
        for replica in self._replicas(ids):
            core = replica.core
            what = core.role.value if replica.alive else "down"
            if replica.alive and replica.replica_id not in core.configuration.voters:
                what += ", no voter"
            durable = replica.core._log.durable_index
            self.say(
                f"{replica.replica_id}: {what}, term {core.term}, leader {core.leader_id or '-'}, "
                f"committed {core.committed_index}, last {core.last_index}, synced {durable}"
            )

    def do_logs(self, *ids: str) -> None:
        """[REPLICA...]: index/term:data of every entry, a no-op's without data; a bar behind the commit."""
        for replica in self._replicas(ids):
            shown = []
            for entry in replica.log.entries:
                shown.append(_shown_entry(entry))
                if entry.index == replica.core.committed_index:
                    shown.append("|")
            self.say(f"{replica.replica_id}: {' '.join(shown) or 'empty'}")

    def do_progress(self, replica_id: str) -> None:
        """LEADER: what it knows of the others."""
        for member, progress in self._replica(replica_id).core.progress.items():
            if member != int(replica_id):
                self.say(
                    f"{member}: {progress.flow.value}, match {progress.match_index}, "
                    f"next {progress.next_index}, under way {len(progress.inflight)} "
                    f"with {progress.inflight_bytes} bytes"
                )

    def do_packets(self) -> None:
        """What is under way."""
        for message, entries in self.world.packets:
            shown = _shown_message(message, entries)
            self.say(f"{message.sender} -> {message.receiver}: {shown}")

    # Helpers

    def _replica(self, replica_id: str) -> Replica:
        return self.world[int(replica_id)]

    def _replicas(self, ids: Sequence[str]) -> list[Replica]:
        return [self.world[int(i)] for i in ids] if ids else list(self.world.replicas.values())

    def _configure(self, replica_id: str, step: Callable[[Configuration], Configuration]) -> None:
        replica = self._replica(replica_id)
        replica.configure(step(replica.core.configuration), now_ms=self.world.now_ms)

    def _complete(self, replica: Replica) -> None:
        if replica.flushed:
            place = len(self._lines)
            before = replica.core.dropped.get("old_completion", 0)
            replica.complete()
            is_old = replica.core.dropped.get("old_completion", 0) > before
            said = "synced, which says nothing about its log any more" if is_old else "synced"
            self._lines.insert(place, f"{replica.replica_id}: {said}")

    def _take(self, **which: str) -> list[Packet]:
        places = [
            place
            for place, (message, _) in enumerate(self.world.packets)
            if which.get("from", str(message.sender)) == str(message.sender)
            and which.get("to", str(message.receiver)) == str(message.receiver)
            and which.get("kind", type(message).__name__) == type(message).__name__
        ]
        places = places[: int(which.get("count", len(places)))]
        places = places[-int(which["last"]) :] if "last" in which else places
        taken = [self.world.packets[place] for place in places]
        for place in reversed(places):
            del self.world.packets[place]
        return taken

    def _arrive(self, packet: Packet) -> None:
        message, entries = packet
        shown = _shown_message(message, entries)
        way = f"{message.sender} => {message.receiver}"
        receiver = self.world.replicas.get(message.receiver)
        if receiver is None or not receiver.alive or (message.sender, message.receiver) in self.world.cut:
            self.say(f"lost {message.sender} -> {message.receiver}: {shown}")
            return
        self.say(f"{way}: {shown}")
        before = dict(receiver.core.dropped)
        receiver.receive(packet, now_ms=self.world.now_ms)
        for reason, times in receiver.core.dropped.items():
            if times != before.get(reason, 0):
                self.say(f"{message.receiver}: not acted upon ({reason})")

    def _shown(self, replica: Replica) -> Callable[[Ready], None]:
        def shown(ready: Ready) -> None:
            for line in _shown_ready(replica, ready):
                self.say(line)

        return shown


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _between(packet: Packet, members: set[int]) -> bool:
    return packet[0].sender in members and packet[0].receiver in members


def _shown_entry(entry: Entry) -> str:
    if entry.configuration is not None:
        return f"{entry.index}/{entry.term}:{_shown_configuration(entry.configuration)}"
    if entry.data.startswith(b"noop"):
        return f"{entry.index}/{entry.term}"
    data = entry.data.decode()
    return f"{entry.index}/{entry.term}:{data if len(data) < 12 else data[:1] + '*' + str(len(data))}"


def _shown_configuration(configuration: Configuration) -> str:
    voters = ",".join(map(str, configuration.voters))
    learners = ",".join(map(str, configuration.learners))
    return f"({voters}+{learners})" if learners else f"({voters})"


def _shown_message(message: AnyMessage, entries: Sequence[Entry] = ()) -> str:
    """The message's name, term and fields; those that say nothing are left out."""
    parts = [type(message).__name__, f"term {message.term}"]
    match message:
        case PreVote() | Vote():
            parts.append(f"last {message.last_index}/{message.last_term}")
            parts += ["hand-over"] if isinstance(message, Vote) and message.transfer else []
        case Append():
            parts.append(f"behind {message.prev_index}/{message.prev_term}, commit {message.commit}")
            if entries or message.entry_count:
                shown = map(_shown_entry, entries) if entries else [f"{message.entry_count} entries"]
                parts.append(f"[{' '.join(shown)}]")
        case AppendAnswer():
            if message.rejected:
                hint = f"{message.hint_index}/{message.hint_term}"
                parts.append(f"rejected behind {message.prev_index}, hint {hint}")
            else:
                parts.append(f"match {message.match_index}")
        case Heartbeat():
            parts.append(f"commit {message.commit}" + (f", round {message.round}" if message.round else ""))
        case HeartbeatAnswer():
            parts.append(f"round {message.round}")
        case _:
            if hasattr(message, "granted"):
                parts.append("granted" if message.granted else "refused")
    return " ".join(parts)


def _shown_ready(replica: Replica, ready: Ready) -> list[str]:
    number = replica.replica_id
    lines = []
    if ready.became is not None:
        leader = f", leader {ready.became.leader_id}" if ready.became.role is Role.FOLLOWER else ""
        lines.append(f"{number}: {ready.became.role.value} of term {ready.became.term}{leader}")
    if ready.hard_state is not None:
        lines.append(f"{number}: writes term {ready.hard_state.term}, vote {ready.hard_state.vote or '-'}")
    if ready.truncate_from is not None:
        lines.append(f"{number}: cuts from {ready.truncate_from}")
    if ready.entries:
        lines.append(f"{number}: writes {' '.join(map(_shown_entry, ready.entries))}")
    if ready.configuration is not None:
        lines.append(f"{number}: configuration {_shown_configuration(ready.configuration)}")
    if ready.committed_index is not None:
        lines.append(f"{number}: commits {ready.committed_index}")
    lines += [f"{number}: answers read {context} with {index}" for context, index in ready.reads]
    lines += [f"{number}: gives up read {context}" for context in ready.reads_failed]
    lines += [f"{number} -> {m.receiver}: {_shown_message(m)}" for m in ready.messages]
    for send in ready.appends:
        entries = replica.log.slice(send.first_index, send.last_index)
        lines.append(f"{number} -> {send.message.receiver}: {_shown_message(send.message, entries)}")
    lines += [f"{number} ~> {m.receiver}: {_shown_message(m)}" for m in ready.messages_after_sync]
    return lines
