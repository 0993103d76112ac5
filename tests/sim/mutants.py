"""`python -m tests.sim.mutants`: each rule of the protocol switched off in turn; somebody must notice.

For each mutant a process of its own runs the tests that are named with it, then seeds of the simulator until
one fails; where no tests are named the simulator comes first, and then the tests of the protocol. What nobody
catches is a hole in the checkers. All times are of CPU, so that a busy machine changes no verdict; a process
that goes on beyond its share is ended by the system, and its mutant counts as one that nobody caught.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tests.mutation import Mutant
from tests.sim.simulation import options_of
from tests.sim.world import Options

RAFT = ("tests/raft",)
NODE = ("tests/node/test_consensus.py",)
MARKS = ("tests/raft/test_marks.py",)
REST = ("tests/raft/test_rest.py",)
QUIET = ("tests/node/test_quiet.py",)
ELECTIONS = ("tests/node/test_elections.py",)
DERIVED = ("tests/node/test_derived.py",)
KEYS = ("tests/node/test_keys.py",)
OPENING = ("tests/node/test_opening.py",)
OLD_CATALOG = ("tests/node/test_old_catalog.py",)
CATCH_UP = ("tests/node/test_catch_up.py",)
WINDOW = ("tests/node/test_window.py",)
ACCEPTED = ("tests/client/test_accepted.py",)
REPAIR = ("tests/node/test_repair.py",)
STAGES = ("tests/node/test_stages.py",)
COORDINATOR = ("tests/node/test_coordinator.py",)


@dataclass(frozen=True, slots=True)
class Case:
    """A mutant, and the tests that must catch it where the simulator need not (none: the protocol's)."""

    mutant: Mutant
    tests: tuple[str, ...] = ()
    # Liveness or speed is all that it breaks: not the simulator's to see.
    tests_only: bool = False


def _case(name: str, where: str, old: str, new: str, **options: bool | tuple[str, ...]) -> Case:
    return Case(Mutant(name, where, old, new), **options)  # type: ignore[arg-type]


WIPED = ("tests/sim/test_replacement.py::test_pitfall_35_a_wiped_node_is_refused_under_its_old_name",)
MOVED = (
    "tests/sim/test_replacement.py::"
    "test_pitfall_50_what_was_moved_is_kept_until_no_loss_of_power_brings_it_back",
)

CASES = [
    _case(
        "a configuration of an interval log counts before it is synced",
        "laminar.log.passage:Passage._go",
        "if action.frame[KIND_AT] == Kind.CONFIGURATION:",
        "if False:",
        tests=MOVED,
    ),
    _case(
        "another folder is taken for the one that a node had",
        "membership.catalog_rules:register_node",
        "if known is not None and known.store_id != record.store_id:",
        "if False:",
        tests=WIPED,
    ),
    _case(
        "a vote is not recorded",
        "raft.elector:Elector._answer_vote",
        "self._hard_state_changed = True",
        "pass",
    ),
    _case(
        "a vote leaves before the sync",
        "raft.elector:Elector._answer_vote",
        "self._effects.after_sync.append(",
        "self._effects.messages.append(",
    ),
    _case(
        "a second vote in a term",
        "raft.elector:Elector._answer_vote",
        "is_free = self.vote == message.sender or (self.vote == 0 and self.leader_id == 0)",
        "is_free = True",
    ),
    _case(
        "a vote for a shorter log",
        "raft.elector:Elector._up_to_date",
        "return message.last_term > log.last_term or (",
        "return True or (",
    ),
    _case(
        "longer log beats later term",
        "raft.elector:Elector._up_to_date",
        "message.last_term > log.last_term or (",
        "message.last_index > log.last_index or (",
    ),
    _case(
        "a leader without a no-op of its term",
        "raft.leadership:Leadership._advance_commit",
        "and index >= self.term_start",
        "",
    ),
    _case(
        "append acknowledged before the sync",
        "raft.following:Following.append",
        "self._effects.after_sync.append(",
        "self._effects.messages.append(",
    ),
    _case(
        "a leader counts itself before the sync",
        "raft.leadership:Leadership.propose",
        "self._log.append(entries)",
        "self._log.append(entries); self.own.matched(self._log.last_index); self._advance_commit()",
    ),
    _case(
        "cut on any overlap",
        "raft.following:Following.append",
        "if term != entry.term:",
        "if index > log.committed_index:",
    ),
    _case(
        "no check of the previous entry's term",
        "raft.following:Following.append",
        "elif log.term(prev_index) != prev_term:",
        "elif prev_index > log.last_index:",
    ),
    _case(
        "ABA: an old completion confirms a new entry",
        "raft.log:RaftLog.persisted",
        "if cuts != self.cuts:",
        "if index > self._view_last or self._view.term(index) not in (term, None):",
    ),
    _case(
        "durable index not lowered by a truncation",
        "raft.log:RaftLog.truncate",
        "self.durable_index = min(self.durable_index, index - 1)",
        "pass",
    ),
    _case(
        "follower commits min(leader's, last index)",
        "raft.following:Following._learn_commit",
        "min(self._leader_commit, self.matched_index)",
        "max(self._log.committed_index, min(self._leader_commit, self._log.last_index))",
    ),
    _case(
        "no check-quorum",
        "raft.leadership:Leadership.expire",
        "if not self._quorum_is_active():",
        "if not self._quorum_is_active() and False:",
        tests_only=True,
    ),
    _case(
        "configuration change without a commit in the term",
        "raft.leadership:Leadership.propose_configuration",
        "if log.committed_index < self.term_start:",
        "if False:",
    ),
    _case(
        "two configuration changes at once",
        "raft.leadership:Leadership.propose_configuration",
        "if log.configurations.index > log.committed_index:",
        "if False:",
    ),
    _case(
        "a truncated configuration stays in force",
        "raft.log:RaftLog.truncate",
        "self.configurations.truncated(index)",
        "pass",
    ),
    _case(
        "a learner becomes a voter before it has caught up",
        "raft.leadership:Leadership.propose_configuration",
        "if match_index < wanted_index:",
        "if False:",
    ),
    _case(
        "answers are counted, not collected",
        "raft.election:Ballot.record",
        "self._grants[replica_id] = (granted, marked)",
        "self._grants[replica_id if not granted or replica_id not in self._grants else "
        "next((v for v in self._voters if v not in self._grants), replica_id)] = (granted, marked)",
    ),
    _case(
        "half of the voters elect",
        "raft.quorum:majority",
        "return size // 2 + 1",
        "return (size + 1) // 2 if size != 3 else 1",
    ),
    _case(
        "half of the voters commit",
        "raft.quorum:agreed_value",
        "return values[(size - 1) >> 1]",
        "return values[size >> 1 if size % 2 == 0 else -1]",
    ),
    _case(
        "a read is confirmed by nobody",
        "raft.leadership:Leadership._confirm_reads",
        "agreed_value([progress.acked_round for progress in self._voters])",
        "self._round",
    ),
    _case(
        "a read before the term has committed",
        "raft.leadership:Leadership._begin_round",
        "if self._log.committed_index >= self.term_start:",
        "if True:",
    ),
    _case(
        "a candidate's own vote is not durable",
        "raft.elector:Elector._stand_for_votes",
        "self._effects.after_sync.extend(",
        "self._effects.messages.extend(",
    ),
    _case(
        "a lone leader sends before its term is durable",
        "raft.elector:Elector._stand_for_votes",
        "self._lead(held=True, now_ms=now_ms)",
        "self._lead(held=False, now_ms=now_ms)",
    ),
    _case(
        "messages of a former incarnation count",
        "raft.core:Core.receive",
        "if message.incarnation < self._incarnations.get(message.sender, 0):",
        "if False:",
    ),
    _case(
        "a pre-vote is granted beside a living leader",
        "raft.elector:Elector._answer_pre_vote",
        "and not self._hears_leader(now_ms=now_ms)",
        "",
        tests_only=True,
    ),
    _case(
        "a retry is taken for a new batch",
        "laminar.node.producers:Producers.check",
        '"""',
        'return None\n    """',
        tests=NODE,
    ),
    _case(
        "producers not rolled back by a truncation",
        "laminar.node.tables:Tables.truncated",
        "self.producers.truncated(index)",
        "pass",
        tests=NODE,
    ),
    _case(
        "keys not rolled back by a truncation",
        "laminar.node.tables:Tables.truncated",
        "self.keys.truncated(index)",
        "pass",
        tests=KEYS,
    ),
    _case(
        "a request with a key is taken for a new one",
        "laminar.node.retries:first_try",
        "entry = partition.tables.keys.get(header.producer_id)",
        "entry = None",
        tests=KEYS,
    ),
    _case(
        "keys are not in the document of derived state",
        "laminar.node.tables:Tables.state_at",
        "keys=self.keys.stored_at(index)",
        "keys=[]",
        tests=(*DERIVED, *KEYS),
    ),
    _case(
        "a truncated entry is acknowledged",
        "laminar.node.partition:Partition.truncated",
        "fail(waiter.future, cut_off(self, outcome))",
        "waiter.future.done() or waiter.future.set_result(waiter.receipt)",
        tests=NODE,
    ),
    _case(
        "answers leave before the journal is synced",
        "laminar.node.driver:Driver._settle",
        "for message in ready.messages:",
        "for message in [*ready.messages, *ready.messages_after_sync]:",
        tests=NODE,
    ),
    _case(
        "the journal is not synced",
        "laminar.log.journal:Journal.write",
        "self._file.pwritev_synced(",
        "self._file.pwritev(",
        tests=("tests/log/test_restarts.py",),
    ),
    _case(
        "a truncation is not journaled",
        "laminar.log.recovery:_Replay._apply_to_log",
        "elif kind is RecordKind.TRUNCATE:",
        "elif kind is RecordKind.TRUNCATE and False:",
        tests=("tests/log/test_restarts.py", "tests/log/test_crashes.py"),
    ),
    _case(
        "a joining node is taken before the founder is known",
        "laminar.node.controller:Controller._on_join",
        "if self.group is None or self.boot.node not in self.group.catalog.state().nodes:",
        "if self.group is None:",
        tests=("tests/sim/test_simulation.py",),
    ),
    _case(
        "marked grants count as normal",
        "raft.election:Ballot.record",
        "self._grants[replica_id] = (granted, marked)",
        "self._grants[replica_id] = (granted, False)",
        tests=MARKS,
    ),
    _case(
        "a marked candidate's own grant counts as normal",
        "raft.elector:Elector._open_ballot",
        "marked=self.marked",
        "marked=False",
        tests=MARKS,
    ),
    _case(
        "a vote does not say that its voter is marked",
        "raft.elector:Elector._answer_vote",
        "granted, self.marked)",
        "granted, False)",
        tests=MARKS,
    ),
    _case(
        "a mark falls by length",
        "raft.following:Following.is_complete",
        "min(self.matched_index, log.durable_index)\n        and log.term(log.committed_index) == self.term",
        "log.durable_index",
        tests=MARKS,
    ),
    _case(
        "a mark falls before the goal is on the disk",
        "raft.following:Following.is_complete",
        "min(self.matched_index, log.durable_index)",
        "self.matched_index",
        tests=MARKS,
    ),
    _case(
        "a mark falls before the term has committed",
        "raft.following:Following.is_complete",
        "log.term(log.committed_index) == self.term",
        "True",
        tests=MARKS,
    ),
    _case(
        "a marked leader trusts itself before its disk holds its term",
        "raft.leadership:Leadership.is_complete",
        "min(self._log.committed_index, self._log.durable_index)",
        "self._log.committed_index",
        tests=MARKS,
    ),
    _case(
        "a goal without the commit index",
        "raft.leadership:Leadership.reincarnated",
        "max(self._log.committed_index, self.term_start)",
        "self.term_start",
        tests=MARKS,
    ),
    _case(
        "a goal without the term's first entry",
        "raft.leadership:Leadership._new_progress",
        "max(self._log.committed_index, self.term_start)",
        "self._log.committed_index",
        tests=MARKS,
    ),
    _case(
        "a goal without the term's first entry for one that comes back",
        "raft.leadership:Leadership.reincarnated",
        "max(self._log.committed_index, self.term_start)",
        "self._log.committed_index",
        tests=MARKS,
    ),
    _case(
        "a goal of a former incarnation counts",
        "raft.following:Following._learn_goal",
        "message.goal > self.goal and message.receiver_incarnation == self._identity.incarnation",
        "message.goal > self.goal",
        tests=MARKS,
    ),
    _case(
        "a match is kept over an incarnation",
        "raft.progress:Progress.reset",
        "self.match_index = 0",
        "pass",
        tests=MARKS,
    ),
    _case(
        "a new incarnation is not noticed by the leader",
        "raft.core:Core.receive",
        "self._leadership.reincarnated(message.sender)",
        "pass",
        tests=MARKS,
    ),
    _case(
        "an answer of a former incarnation counts",
        "raft.core:Core.receive",
        "if message.incarnation < self._incarnations.get(message.sender, 0):",
        "if message.incarnation < self._incarnations.get(message.sender, 0) "
        "and not isinstance(message, AppendAnswer):",
        tests=MARKS,
    ),
    _case(
        "what was given up by a person is cut",
        "raft.following:Following.append",
        "if (log.term(prev_index) or prev_term) != prev_term:",
        "if False:",
        tests=MARKS,
    ),
    _case(
        "quiet without nonce",
        "laminar.node.pairs:Pairs.heard",
        "elif pair.nonce != peer.nonce:",
        "elif False:",
        tests=("tests/node/test_quiet.py",),
    ),
    _case(
        "a group rests when the first has agreed",
        "raft.rest:Rest.agreed",
        "return not self._missing",
        "return True",
        tests=REST,
    ),
    _case(
        "an agreement to an older offer counts",
        "raft.rest:Rest.is_answer",
        "round_ >= self._first_round and",
        "",
        tests=REST,
    ),
    _case(
        "a leader lets those rest who lack entries",
        "raft.leadership:Leadership._hold_all",
        "and p.match_index == log.last_index",
        "",
        tests=REST,
    ),
    _case(
        "a follower rests though its match is below its last entry",
        "raft.following:Following.heartbeat",
        "and message.commit == log.committed_index == log.last_index == self.matched_index",
        "",
        tests=REST,
    ),
    _case(
        "a quiet leader rests on with a minority",
        "raft.leadership:Leadership.rest_without",
        "if sum(p is self.own or p.replica_id in left for p in self._voters) < majority(len(self._voters)):",
        "if False:",
        tests=REST,
    ),
    _case(
        "a quiet leader rests without one whose return is no news",
        "laminar.node.pairs:Pairs._rests_without",
        "if any(pair is None or pair.is_up for pair in pairs) or not",
        "if not",
        tests=QUIET,
        tests_only=True,
    ),
    _case(
        "all groups stand at once",
        "laminar.node.elections:Elections._begin",
        "while self and len(self._under_way) < self._most_at_once:",
        "while self:",
        tests=ELECTIONS,
        tests_only=True,
    ),
    _case(
        "a group that cannot elect holds up the others for ever",
        "laminar.node.elections:Elections._begin",
        "if now_ms < until_ms:",
        "if True:",
        tests=ELECTIONS,
        tests_only=True,
    ),
    _case(
        "the producer table is of committed entries only",
        "laminar.node.producers:Producers.check",
        "known = self._producers.get(producer_id)",
        "known = next((was for _, who, was in self._undo if who == producer_id), "
        "self._producers.get(producer_id))",
        tests=("tests/node/test_producers.py", "tests/node/test_append_outcomes.py"),
    ),
    _case(
        "the window calls committed what is appended",
        "laminar.node.api.accepted:window",
        "partition.end_offset",
        "partition.log.next_offset",
        tests=WINDOW,
    ),
    _case(
        "what is told of a producer as durable is not committed",
        "laminar.node.producers:Producers.committed_progress",
        "known = before",
        "pass",
        tests=WINDOW,
        tests_only=True,
    ),
    _case(
        "an epoch that began is forgotten",
        "laminar.node.tables:Tables.appended",
        "if header.kind in (Kind.DATA, Kind.FENCE):",
        "if header.kind == Kind.DATA:",
        tests=WINDOW,
        tests_only=True,
    ),
    _case(
        "what a leader accepted counts as durable under the next one",
        "laminar.client.decisions_lane:Lane.durable",
        "first.term != term",
        "first.term < 0",
        tests=ACCEPTED,
        tests_only=True,
    ),
    _case(
        "what a lost leader had accepted is not sent again",
        "laminar.client.decisions_lane:Lane.heard",
        "self.hold(until_ms=0)",
        "pass",
        tests=ACCEPTED,
        tests_only=True,
    ),
    _case(
        "producers are not in the document of derived state",
        "laminar.node.tables:Tables.state_at",
        "producers=self.producers.stored_at(index)",
        "producers=[]",
        tests=DERIVED,
    ),
    _case(
        "cursors are not in the document of derived state",
        "laminar.node.tables:Tables.state_at",
        "cursors=self.cursors.stored_at(index)",
        "cursors=[]",
        tests=DERIVED,
    ),
    _case(
        "derived state is taken from entries that are not committed",
        "laminar.node.tables:Tables.state_at",
        "self.producers.stored_at(index)",
        "self.producers.stored()",
        tests=DERIVED,
    ),
    _case(
        "a configuration that is not committed is kept as derived state",
        "laminar.node.derived:derived_of",
        "tables.configurations_up_to(index)[-1:]",
        "tables.configurations_up_to(1 << 60)[-1:]",
        tests=DERIVED,
    ),
    _case(
        "derived state of another history is believed",
        "laminar.node.derived:read",
        "or log.term(derived.index) != derived.term",
        "",
        tests=DERIVED,
    ),
    _case(
        "a replica without its vote takes part",
        "laminar.node.opening:Opening.open",
        " or not sure:",
        ":",
        tests=OPENING,
    ),
    _case(
        "a blank vote after an emptied directory",
        "laminar.node.opening:Opening.open",
        "(empty and entry.state != EMPTY)",
        "False",
        tests=OPENING,
    ),
    _case(
        "a catalog without its votes takes part",
        "laminar.node.controller:Controller._promises_are_lost",
        "return True",
        "pass",
        tests=OPENING,
    ),
    _case(
        "bootstrap on the node's own copy of the catalog",
        "laminar.node.in_line:InLine.make_missing",
        "creating = set(answer.creating)",
        "creating = {record.group for record, _ in new}",
        tests=OLD_CATALOG,
    ),
    _case(
        "bootstrap without the store id",
        "laminar.node.in_line:InLine.make_missing",
        "and replica.store_id == shard.boot.store_id",
        "",
        tests=OLD_CATALOG,
    ),
    _case(
        "a tombstone of the node's own copy deletes",
        "laminar.node.in_line:InLine.remove_deleted",
        "deleted = set(answer.deleted)",
        "deleted = {entry.group for entry in candidates}",
        tests=OLD_CATALOG,
    ),
    _case(
        "a new replica is made on the node's own copy of the catalog",
        "laminar.node.moves:Moves.at_home",
        "if each[1] in answer.joining",
        "",
        tests=OLD_CATALOG,
    ),
    _case(
        "a removed replica deletes before that is confirmed",
        "laminar.node.moves:Moves.at_home",
        "for _, replica_id in removed if replica_id in answer.removed",
        "for _, replica_id in removed",
        tests=OLD_CATALOG,
    ),
    _case(
        "a removal is told to the catalog before it is committed",
        "laminar.node.moves:Moves._report",
        "configurations_up_to(partition.committed_index)",
        "configurations_up_to(1 << 60)",
        tests=("tests/node/test_moves.py",),
    ),
    _case(
        "a log_start entry does not tell the configuration",
        "laminar.node.replica:replay",
        "elif header.kind == Kind.LOG_START:",
        "elif False:",
        tests=DERIVED,
    ),
    _case(
        "a log_start entry does not tell the producers",
        "laminar.node.tables:Tables.appended",
        "self._restore_tables(record.derived())",
        "pass",
        tests=("tests/node/test_retention.py",),
    ),
    _case(
        "a start is carried out before it is committed",
        "laminar.node.tables:Tables.committed",
        "while self._starts and self._starts[0][0] <= index:",
        "while self._starts:",
        tests=DERIVED,
    ),
    _case(
        "a catch-up puts a shorter log in the place of a longer one",
        "laminar.node.catch_up.install:refusal_to_replace",
        "if old.last_index > new.last_index and",
        "if False and",
        tests=CATCH_UP,
    ),
    _case(
        "a catch-up brings a log of a later term than the replica's",
        "laminar.node.catch_up.install:refusal_to_replace",
        "if core.term < new.last_term:",
        "if False:",
        tests=CATCH_UP,
    ),
    _case(
        "a log that takes another's place forgets the mark",
        "laminar.log.storage:Storage.replace_log",
        "if old.recovering or old.incarnation > new.incarnation:",
        "if False:",
        tests=("tests/log/test_restarts.py",),
    ),
    _case(
        "a repair takes a batch of another term",
        "laminar.node.repair:Repairs._put_back",
        "if term and header.term != term:",
        "if False:",
        tests=REPAIR,
    ),
    _case(
        "a repair takes an entry that may not be committed",
        "laminar.node.repair:Repairs._put_back",
        "if not term and not reply.committed:",
        "if False:",
        tests=REPAIR,
    ),
    _case(
        "an entry of another term is given for a repair",
        "laminar.node.repair:Repairs._look_up",
        "if ask.term and term != ask.term:",
        "if False:",
        tests=REPAIR,
    ),
    _case(
        "an entry that may not be committed is given for a repair",
        "laminar.node.repair:Repairs._look_up",
        "if not ask.term and not committed:",
        "if False:",
        tests=REPAIR,
    ),
    _case(
        "the epoch is not checked where the decision is applied",
        "laminar.node.coordinator:Coordinator._decided",
        "if epoch != sink.epoch:",
        "if epoch > sink.epoch:",
        tests=COORDINATOR,
    ),
    _case(
        "a batch is published before its decision is committed",
        "laminar.node.coordinator:Coordinator._publish",
        "if committed is None or committed.undone != decision:",
        "if False:",
        tests=COORDINATOR,
    ),
    _case(
        "the next batch is decided before the last is published",
        "laminar.node.coordinator:Coordinator.commit",
        "if sink.undone is not None:",
        "if False:",
        tests=COORDINATOR,
    ),
    _case(
        "begin answers before its epoch is committed",
        "laminar.node.coordinator:Coordinator._raise",
        "await self._change(sink_id, begun)",
        "self._change(sink_id, begun).add_done_callback(lambda done: done.exception())",
        tests=COORDINATOR,
    ),
    _case(
        "a commit answers before all partitions have published",
        "laminar.node.coordinator:Coordinator._finished",
        "if sink.number >= number and (",
        "if sink.number >= number and (True or ",
        tests=COORDINATOR,
    ),
    _case(
        "a later pin takes away what an earlier one has promised",
        "laminar.node.staging:Staging.pin",
        "if known is None or not known.pinned:",
        "if True:",
        tests=STAGES,
    ),
    _case(
        "a pin is answered before it is committed",
        "laminar.node.api.sinks:SinkRoutes._do",
        "await staging.pin(batch, request.stages)",
        "staging.pin(batch, request.stages).add_done_callback(lambda done: done.exception())",
        tests=COORDINATOR,
    ),
    _case(
        "a pin is released by time",
        "laminar.node.stages:Stages.left_behind",
        "if not batch.pinned and",
        "if",
        tests=STAGES,
    ),
    _case(
        "stages are not rolled back by a truncation",
        "laminar.node.tables:Tables.truncated",
        "self.stages.truncated(index)",
        "pass",
        tests=COORDINATOR,
    ),
    _case(
        "sinks are not rolled back by a truncation",
        "laminar.node.tables:Tables.truncated",
        "self.sinks.truncated(index)",
        "pass",
        tests=COORDINATOR,
    ),
    _case(
        "the log begins between a stage and its publish",
        "laminar.node.partition:Partition.start_limit",
        "whole = self.tables.stages.start_limit(index)",
        "whole = index",
        tests=STAGES,
    ),
    _case(
        "a publish for another group of the name counts as done",
        "laminar.node.api.sinks:SinkRoutes._do",
        """raise Problem("not_leader", detail, outcome="not_applied")""",
        "return None",
        tests=COORDINATOR,
    ),
]


# CPU seconds: of simulation for each mutant, at least and at most; what the tests of one take, about; and
# beyond all of that, before the system ends its process.
LEAST_S = 3.0
MOST_S = 60.0
TESTS_S = 8.0
SPARE_S = 30.0


def _busy(seed: int) -> Options:
    """Seeds of more trouble than most: what is open for a moment only is met by some fault."""
    options = options_of(seed)
    return replace(
        options,
        clients=3,
        client_pause_s=0.05,
        fault_pause_s=2.0,
        trouble_s=60.0,
        disk_s=(0.001, 0.05, 0.3)[seed % 3],
    )


def _simulate(case: Case, seconds: float) -> str:
    """Which seed caught it, or an empty string."""
    from tests.sim.simulation import simulate

    began_s = time.process_time()
    seed = 0
    while not case.tests_only and time.process_time() - began_s < seconds:
        seed += 1
        try:
            simulate(_busy(seed))
        except Exception as error:  # noqa: BLE001  # that is what we are waiting for
            text = str(error).splitlines()[0] if str(error) else ""
            return f"seed {seed}: {type(error).__name__} {text}"[:150]
    return ""


def _test(tests: tuple[str, ...]) -> str:
    """The tests, if one of them failed; else an empty string."""
    import pytest

    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    code = pytest.main(
        ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header", *quiet, *tests]
    )
    return f"tests: {' '.join(tests)}" if code == pytest.ExitCode.TESTS_FAILED else ""


def run_one(case: Case, seconds: float) -> str:
    """In a process of its own: what caught it, or an empty string."""
    most_s = int(seconds + TESTS_S + SPARE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    case.mutant.apply()
    if case.tests:
        return _test(case.tests) or _simulate(case, seconds)
    return _simulate(case, seconds) or _test(RAFT)


def main() -> int:
    """The number of mutants that nobody caught is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("--one", type=int, default=None, help="(inside) the number of one case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--seconds", type=float, default=None, help="of CPU to simulate each; else a fair part"
    )
    parser.add_argument("--minutes", type=float, default=14.0, help="that all together may take, about")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    given = parser.parse_args()
    if given.one is not None:
        found = run_one(CASES[given.one], given.seconds or 0.0)
        print(f"\ncaught: {found}" if found else "\nsurvived", flush=True)
        return 0
    numbers = [number for number, case in enumerate(CASES) if given.only in case.mutant.name]
    seconds = given.seconds
    if seconds is None:
        # The tests take their time, too.
        each_s = given.minutes * 60 * given.jobs / max(len(numbers), 1)
        seconds = min(max(each_s - TESTS_S, LEAST_S), MOST_S)

    by: Counter[str] = Counter()

    def judge(number: int) -> bool:
        command = [sys.executable, "-m", "tests.sim.mutants", "--one", str(number)]
        began_s = time.monotonic()
        done = subprocess.run(
            [*command, "--seconds", str(seconds)], capture_output=True, text=True, check=False
        )
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        caught = last.startswith("caught: ")
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            verdict = "survived: it never came to an end"
        else:
            verdict = last if caught or last == "survived" else f"BROKEN {done.stderr[-400:]}"
        by["nobody" if not caught else "the tests" if "caught: tests:" in last else "the simulator"] += 1
        took_s = time.monotonic() - began_s
        print(f"{CASES[number].mutant.name:<75} {took_s:5.0f} s  {verdict}", flush=True)
        return caught

    with ThreadPoolExecutor(given.jobs) as pool:
        survived = list(pool.map(judge, numbers)).count(False)
    print(f"{len(numbers)} mutants, {survived} survived; caught by {dict(by)}")
    return survived


if __name__ == "__main__":
    sys.exit(main())
