"""The rules of a change of routes, as far as one partition's log has them: how it ends, and how it begins."""

from __future__ import annotations

from tests.sim.mutants.case import case

SEAL = (
    "tests/node/partition/test_seal.py",
    "tests/node/partition/test_seal_replicated.py",
    "tests/node/partition/test_seal_schedules.py",
)
TABLE = ("tests/node/partition/state/test_succession.py",)
DERIVED = ("tests/node/partition/test_snapshot.py",)

ROUTES = [
    case(
        "sealed is said before the seal is committed",
        "laminar.node.partition.state.state:PartitionState.committed_seal",
        "sealed is not None and sealed.index <= self.committed_index",
        "sealed is not None",
        tests=SEAL,
    ),
    case(
        "records are taken after a seal",
        "laminar.node.partition.state.succession:Succession._set",
        'self.status == "open"',
        'self.status != "waiting"',
        tests=SEAL,
    ),
    case(
        "an output takes records before it is opened",
        "laminar.node.partition.state.succession:Succession._set",
        'self.status == "open"',
        'self.status != "sealed"',
        tests=SEAL,
    ),
    case(
        "a partition is sealed over what is prepared",
        "laminar.node.partition.partition:Partition.propose_seal",
        "if under_way:",
        "if False:",
        tests=SEAL,
    ),
    case(
        "a batch of a sink begins while a partition is about to be sealed",
        "laminar.node.transactions.participant:Participant.stage",
        "partition.check_may_begin()",
        "pass",
        tests=SEAL,
        tests_only=True,
    ),
    case(
        "a partition is sealed before the appends that came first",
        "laminar.node.partition.partition:Partition.propose_seal",
        "self.appends.flush()",
        "pass",
        tests=SEAL,
        tests_only=True,
    ),
    case(
        "a retry is refused as sealed",
        "laminar.node.partition.append_path:AppendPath.append_frame",
        "self._check_open()",
        "return self.closed()",
        tests=SEAL,
    ),
    case(
        "a batch that was sent behind a refused one is out of sequence",
        "laminar.node.partition.deduplication:_is_surely_new",
        'refused.code == "out_of_sequence"',
        "False",
        tests=SEAL,
        tests_only=True,
    ),
    case(
        "the second batch of a producer that is new is no better known after a seal",
        "laminar.node.partition.deduplication:_is_surely_new",
        "not context.state.producers.is_full",
        "False",
        tests=SEAL,
        tests_only=True,
    ),
    case(
        "a batch of a forgotten producer is refused as sealed",
        "laminar.node.partition.deduplication:_is_surely_new",
        "not context.state.producers.is_full",
        "True",
        tests=SEAL,
        tests_only=True,
    ),
    case(
        "what waits behind a seal is not answered when its leader is deposed",
        "laminar.node.partition.append_path:AppendPath.lost_leadership",
        'self._refuse_after_seal(not_leader(self._context.name, outcome="not_applied"))',
        "pass",
        tests=SEAL,
        tests_only=True,
    ),
    case(
        "what waits behind a seal is refused as sealed when its leader is deposed",
        "laminar.node.partition.append_path:AppendPath.lost_leadership",
        'self._refuse_after_seal(not_leader(self._context.name, outcome="not_applied"))',
        "self._refuse_after_seal(sealed(self._context.name, 3))",
        tests=SEAL,
    ),
    case(
        "a seal is not rolled back by a truncation",
        "laminar.node.partition.state.state:PartitionState.truncated",
        "self.succession.truncated(index)",
        "pass",
        tests=(*TABLE, *SEAL),
    ),
    case(
        "a seal is not in the document of derived state",
        "laminar.node.partition.state.state:PartitionState.state_at",
        "succession=self.succession.stored_at(index)",
        "succession=Succession().stored()",
        tests=(*DERIVED, *TABLE),
    ),
    case(
        "a log_start entry does not tell the seal",
        "laminar.node.partition.state.state:PartitionState.state",
        "succession=self.succession.stored()",
        "succession=Succession().stored()",
        tests=SEAL,
    ),
    case(
        "a seal is reported before it is synced by a majority",
        "laminar.node.partition.partition:Partition.seal_is_kept",
        "return holding >= majority(len(voters))",
        "return True",
        tests=SEAL,
    ),
    case(
        "a seal is reported before it is committed",
        "laminar.node.partition.partition:Partition.seal_is_kept",
        "seal = self.state.committed_seal",
        "seal = self.state.succession.sealed",
        tests=SEAL,
    ),
    case(
        "a seal counts as synced when it is written",
        "laminar.node.partition.partition:Partition.synced_seal",
        "seal.index > self.log.synced_index",
        "seal.index > self.log.durable_index",
        tests=SEAL,
    ),
    case(
        "the records of an output are older than its inputs' seals",
        "laminar.node.partition.partition:Partition.propose_open",
        "not_before_ms=not_before_ms",
        "not_before_ms=0",
        tests=SEAL,
        tests_only=True,
    ),
    case(
        "an accepted loss does not say that a seal may be missing",
        "laminar.node.partition.partition:Partition.may_lack_seal",
        "bool(self.replica.configuration.abandoned) or ",
        "",
        tests=SEAL,
        tests_only=True,
    ),
]
