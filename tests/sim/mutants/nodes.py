"""The rules of a node: its disk, its start, its place in the cluster, catch-up and repair."""

from __future__ import annotations

from tests.sim.mutants.case import case

NODE = ("tests/node/consensus/test_consensus.py",)
QUIET = ("tests/node/consensus/test_quiescence.py",)
ELECTIONS = ("tests/node/consensus/test_election_throttle.py",)
STOPPED = ("tests/node/consensus/test_stopped_replica.py",)
OPENING = ("tests/node/shard/test_replica_startup.py",)
LOST_MANIFEST = ("tests/node/shard/test_lost_manifest.py",)
LOST_MANIFESTS = ("tests/sim/test_lost_manifest.py",)
OLD_CATALOG = ("tests/node/shard/test_old_catalog.py",)
CATCH_UP = ("tests/node/catch_up/test_catch_up.py",)
REPAIR = ("tests/node/consensus/test_peer_repair.py",)
WIPED = ("tests/sim/test_replacement.py::test_pitfall_35_a_wiped_node_is_refused_under_its_old_name",)

COPIES = ("tests/node/partition/test_min_replicas.py",)
FEWER = ("tests/test_embedded.py::test_no_topic_is_born_silently_with_fewer_replicas_than_asked",)

PUT_BACK = (
    "tests/sim/test_roll_back.py::test_a_copy_too_young_to_be_seen_is_shown_by_the_leader_what_it_acknowledged",
)
ENDS = ("tests/sim/test_roll_back.py::test_a_node_whose_folder_was_put_back_ends_and_says_why",)
ACCEPTED = (
    "tests/sim/test_recovering.py::test_with_an_accepted_loss_no_log_below_the_latest_that_answers_wins",
)

DIED = ("tests/node/catalog/test_placement.py",)

NODES = [
    case(
        "a replica of a home that lost its manifest is born again",
        "laminar.node.shard.lost_manifest:LostManifest.settle",
        "if entry.group not in held",
        "if False",
        tests=LOST_MANIFEST,
        tests_only=True,
    ),
    case(
        "a shard that lost its manifest asks its own copy of the catalog",
        "laminar.node.shard.lost_manifest:LostManifest.settle",
        "await shard.refresh_view()",
        "pass",
        tests=LOST_MANIFEST,
        tests_only=True,
    ),
    case(
        "a replica that was being created when its manifest was lost was never here",
        "laminar.node.shard.lost_manifest:recorded_here",
        "if owner_shard(",
        'if record.state == "live" and owner_shard(',
        tests=LOST_MANIFEST,
        tests_only=True,
    ),
    case(
        "a shard that lost its manifest makes replicas before it knows what it held",
        "laminar.node.shard.shard:Shard._reconcile_loop",
        "if not await self._knows_its_replicas():",
        "if False:",
        tests=LOST_MANIFESTS,
        tests_only=True,
    ),
    case(
        "a shard that lost its manifest denies what it has promised",
        "laminar.node.consensus.lost_majority:Releases._end",
        " or not manifest.known",
        "",
        tests=LOST_MANIFEST,
        tests_only=True,
    ),
    case(
        "an only replica that is lost gets its new place where it cannot be made",
        "laminar.node.placement.planner:_Planner._place_for",
        "if not others and len(free) > 1 and replica.node in free:",
        "if False:",
        tests=LOST_MANIFESTS,
        tests_only=True,
    ),
    case(
        "a new topic is placed on a node that has just died",
        "laminar.node.catalog.service:CatalogService._weights_for",
        "return answering if len(answering) >= replicas else weights",
        "return weights",
        tests=DIED,
        tests_only=True,
    ),
    case(
        "a replica whose folder went back takes part in terms that it forgot",
        "laminar.node.runtime.replica_factory:ReplicaFactory.open",
        "if log.least_term > (hard.term if hard is not None else 0):",
        "if False:",
        tests=PUT_BACK,
        tests_only=True,
    ),
    case(
        "a copy from before an earlier mark does not see that it is one",
        "raft.following:Following.has_regressed",
        "if own < message.receiver_incarnation <= own + MOST_LOSSES:",
        "if False:",
        tests=("tests/raft/test_recovering.py",),
        tests_only=True,
    ),
    case(
        "a node whose catalog hears no leader asks nobody who leads",
        "laminar.node.catalog.service:CatalogService.ask",
        "loop.time() >= began + ASK_OTHERS_AFTER_S",
        "False",
        tests=ENDS,
        tests_only=True,
    ),
    case(
        "a request to the catalog is given up and sent again while it is carried out",
        "laminar.node.catalog.service:CatalogService.ask",
        "timeout_s=FORWARD_TIMEOUT_S",
        "timeout_s=ASK_OTHER_TIMEOUT_S",
        tests=("tests/sim/test_placement.py",),
        tests_only=True,
    ),
    case(
        "a learner that was let go takes part when its new log is there",
        "laminar.node.shard.replica_startup:ReplicaOpener._restart_empty",
        "if not shard.repairs.keeps(new):",
        "if False:",
        tests=OPENING,
        tests_only=True,
    ),
    case(
        "a replica that is let go deletes the log that it had before",
        "laminar.node.shard.replica_moves:ReplicaMover._delete",
        "for each in known\n",
        "for each in entries\n",
        tests=OPENING,
        tests_only=True,
    ),
    case(
        "who lost an answer takes its own work for a refusal",
        "laminar.node.catalog.service:_doubted",
        "if not lost or",
        "if True or",
        tests=(
            "tests/sim/test_placement.py::test_who_lost_an_answer_does_not_take_its_own_work_for_a_refusal",
        ),
        tests_only=True,
    ),
    case(
        "a replica that is made takes back what is changed in the manifest meanwhile",
        "laminar.node.shard.reconcile:Reconciler._make",
        "change_manifest(lambda known: [*known, *entries])",
        "write_manifest([*shard.storage.manifest.entries, *entries])",
        tests=("tests/node/shard/test_old_catalog.py",),
        tests_only=True,
    ),
    case(
        "the first topic of a fresh leader is placed on those that it has heard",
        "laminar.node.catalog.service:CatalogService._first_round",
        "if rest_s > 0:",
        "if False:",
        tests=("tests/sim/test_placement.py",),
        tests_only=True,
    ),
    case(
        "a replica that is no voter yet counts for the majority that answers",
        "laminar.node.api.cluster.accept_loss:_Survey.voters",
        "voters or (",
        "(",
        tests=("tests/node/api/cluster/test_accept_loss.py",),
        tests_only=True,
    ),
    case(
        "with an accepted loss each goes on from its own log",
        "laminar.node.api.cluster.accept_loss:AcceptLossRoutes._send_consent",
        "latest.last_term, latest.last_index)",
        "0, 0)",
        tests=ACCEPTED,
        tests_only=True,
    ),
    case(
        "an append is acknowledged without its copies",
        "laminar.node.partition.min_replicas:Copies.acknowledged_index",
        "if wanted > majority(len(voters)):",
        "if False:",
        tests=COPIES,
        tests_only=True,
    ),
    case(
        "an append is taken while too few replicas are in sync",
        "laminar.node.partition.min_replicas:Copies.check",
        "if len(in_sync) < wanted:",
        "if False:",
        tests=COPIES,
        tests_only=True,
    ),
    case(
        "a topic is created with as many replicas as there are nodes",
        "laminar.node.catalog.service:CatalogService._create_topic",
        "if len(weights) < wanted:",
        "if False:",
        tests=FEWER,
        tests_only=True,
    ),
    case(
        "a configuration of an interval log counts before it is synced",
        "laminar.log.partition_log.log:Log.append",
        "if kind == _CONFIGURATION:",
        "if False:",
        tests=("tests/log/commit/test_interval_flush.py::test_a_configuration_counts_when_it_is_synced",),
    ),
    case(
        "what a stopped replica had gathered leaves",
        "laminar.node.consensus.driver:Driver.stop_replica",
        "self._outbox.discard(replica.group)",
        "pass",
        tests=STOPPED,
        tests_only=True,
    ),
    case(
        "those given up are served until they are deleted",
        "laminar.node.shard.reconcile:Reconciler.stop_abandoned",
        "if partition is not None and partition.replica.replica_id in gone:",
        "if False:",
        tests=("tests/sim/test_lost_majority.py",),
        tests_only=True,
    ),
    case(
        "nodes of different epochs talk",
        "laminar.node.transport.handshake:check_epoch",
        "if not mine.cluster or not theirs.cluster or mine.epoch == theirs.epoch:",
        "if True:",
        tests=("tests/node/catalog/test_recovery.py",),
        tests_only=True,
    ),
    case(
        "another folder is taken for the one that a node had",
        "membership.catalog_rules:register_node",
        "if known is not None and known.store_id != record.store_id:",
        "if False:",
        tests=WIPED,
    ),
    case(
        "answers leave before the journal is synced",
        "laminar.node.consensus.driver:Driver._process_ready",
        "for message in ready.messages:",
        "for message in [*ready.messages, *ready.messages_after_sync]:",
        tests=NODE,
    ),
    case(
        "the journal is not synced",
        "laminar.log.commit.journal:Journal.write",
        "self._file.pwritev_synced(",
        "self._file.pwritev(",
        tests=("tests/log/recovery/test_restarts.py",),
    ),
    case(
        "a truncation is not journaled",
        "laminar.log.recovery.replay:Replay._apply_to_log",
        "elif kind is RecordKind.TRUNCATE:",
        "elif kind is RecordKind.TRUNCATE and False:",
        tests=("tests/log/recovery/test_restarts.py", "tests/log/recovery/test_crashes.py"),
    ),
    case(
        "a joining node is taken before the founder is known",
        "laminar.node.catalog.controller:Controller._on_join",
        "if self.group is None or self.boot.node not in self.group.catalog.state().nodes:",
        "if self.group is None:",
        tests=("tests/sim/test_simulation.py",),
    ),
    case(
        "quiet without nonce",
        "laminar.node.consensus.quiescence:Quiescence.contact",
        "elif liveness.nonce != peer.nonce:",
        "elif False:",
        tests=("tests/node/consensus/test_quiescence.py",),
    ),
    case(
        "a quiet leader rests without one whose return is no news",
        "laminar.node.consensus.quiescence:Quiescence._rests_without",
        "if peer.is_up or not",
        "if not",
        tests=QUIET,
        tests_only=True,
    ),
    case(
        "all groups stand at once",
        "laminar.node.consensus.election_throttle:ElectionThrottle.next",
        "if self and len(self._under_way) < self._most_at_once:",
        "if self:",
        tests=ELECTIONS,
        tests_only=True,
    ),
    case(
        "a group that cannot elect holds up the others for ever",
        "laminar.node.consensus.election_throttle:ElectionThrottle.next",
        "if now_ms < until_ms:",
        "if True:",
        tests=ELECTIONS,
        tests_only=True,
    ),
    case(
        "a replica without its vote takes part",
        "laminar.node.shard.replica_startup:ReplicaOpener.open",
        " or not sure:",
        ":",
        tests=OPENING,
    ),
    case(
        "a blank vote after an emptied directory",
        "laminar.node.shard.replica_startup:ReplicaOpener.open",
        "(empty and entry.state != EMPTY)",
        "False",
        tests=OPENING,
    ),
    case(
        "a catalog without its votes takes part",
        "laminar.node.catalog.local_replica:promises_are_lost",
        "return True",
        "pass",
        tests=OPENING,
    ),
    case(
        "bootstrap on the node's own copy of the catalog",
        "laminar.node.shard.reconcile:Reconciler.make_missing",
        "creating = set(answer.creating)",
        "creating = {record.group for record, _ in new}",
        tests=OLD_CATALOG,
    ),
    case(
        "bootstrap without the store id",
        "laminar.node.shard.reconcile:Reconciler.make_missing",
        "and replica.store_id == shard.store_id",
        "",
        tests=OLD_CATALOG,
    ),
    case(
        "a tombstone of the node's own copy deletes",
        "laminar.node.shard.reconcile:Reconciler.remove_deleted",
        "deleted = set(answer.deleted)",
        "deleted = {entry.group for entry in candidates}",
        tests=OLD_CATALOG,
    ),
    case(
        "a new replica is made on the node's own copy of the catalog",
        "laminar.node.shard.replica_moves:ReplicaMover.at_home",
        "if each[1] in answer.joining",
        "",
        tests=OLD_CATALOG,
    ),
    case(
        "a removed replica deletes before that is confirmed",
        "laminar.node.shard.replica_moves:ReplicaMover.at_home",
        "for _, replica_id in removed if replica_id in answer.removed",
        "for _, replica_id in removed",
        tests=OLD_CATALOG,
    ),
    case(
        "one that is thought dead is removed though no majority is left",
        "laminar.node.shard.replica_moves:next_step",
        "if majority_active(without):",
        "if True:",
        tests=("tests/node/shard/test_replica_moves.py",),
    ),
    case(
        "a removal is told to the catalog before it is committed",
        "laminar.node.shard.replica_moves:ReplicaMover._report",
        "configurations_up_to(partition.committed_index)",
        "configurations_up_to(1 << 60)",
        tests=("tests/node/shard/test_replica_moves.py",),
    ),
    case(
        "a catch-up puts a shorter log in the place of a longer one",
        "laminar.node.catch_up.install:refusal_to_replace",
        "if old.last_index > new.last_index and",
        "if False and",
        tests=CATCH_UP,
    ),
    case(
        "a catch-up brings a log of a later term than the replica's",
        "laminar.node.catch_up.install:refusal_to_replace",
        "if core.term < new.last_term:",
        "if False:",
        tests=CATCH_UP,
    ),
    case(
        "a log that takes another's place forgets the mark",
        "laminar.log.storage:Storage.replace_log",
        "if old.recovering or old.incarnation > new.incarnation:",
        "if False:",
        tests=("tests/log/recovery/test_restarts.py",),
    ),
    case(
        "a repair takes a batch of another term",
        "laminar.node.consensus.peer_repair:PeerRepair._put_back",
        "if term and header.term != term:",
        "if False:",
        tests=REPAIR,
    ),
    case(
        "a repair takes an entry that may not be committed",
        "laminar.node.consensus.peer_repair:PeerRepair._put_back",
        "if not term and not reply.committed:",
        "if False:",
        tests=REPAIR,
    ),
    case(
        "an entry of another term is given for a repair",
        "laminar.node.consensus.peer_repair:PeerRepair._find_entry",
        "if ask.term and term != ask.term:",
        "if False:",
        tests=REPAIR,
    ),
    case(
        "an entry that may not be committed is given for a repair",
        "laminar.node.consensus.peer_repair:PeerRepair._find_entry",
        "if not ask.term and not committed:",
        "if False:",
        tests=REPAIR,
    ),
]
