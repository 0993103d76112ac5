"""The catalog: the cluster's agreed metadata, as PySyncObj's replicated objects over our own Raft group 0.

A command is a call of a replicated method, encoded by PySyncObj. Group 0 commits it (`Proposer`), and `apply`
performs it on every node in log order. The same entries give the same state everywhere, because the methods
only compare and set (`catalog_rules`); the outcome is a `Result`, never an exception. How group 0 works is
not known here. Nothing is forwarded: a proposer that does not lead raises `NotCatalogLeader`, and the node
passes the request on to the leader's controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from membership import catalog_rules as rules
from membership import (
    channel_rules,
    credential_rules,
    limit_rules,
    placement_rules,
    replica_rules,
    route_rules,
)
from membership.boot_history import BootRecord
from membership.changes import Change
from membership.records import (
    CatalogState,
    NodeRecord,
    Setting,
)
from membership.replicated import BadCommand, Replicated, ReplicatedObjects, replicated, replicated_since
from membership.requests import (
    AccessStep,
    ChangeAccess,
    ChangeChannel,
    ChangeLimits,
    ChangePlacement,
    ChangeReplicas,
    ChangeRoute,
    ChannelStep,
    CreateTopic,
    DeleteTopic,
    FoundCluster,
    MarkMade,
    MarkRemoved,
    PlacementChange,
    RegisterNode,
    ReplicaChange,
    Result,
    RouteStep,
    UpdateTopicSettings,
)
from membership.tables import encoded

SNAPSHOT_FORMAT = 1

CODE_VERSION = 7
"""The highest code version that this program knows (`Catalog.enable`; docs/upgrading.md lists them)."""

ACCESS_SINCE = 6
"""The code version from which on there are credentials."""

LIMITS_SINCE = limit_rules.LIMITS_SINCE
"""The code version from which on principals have limits, and topics owners."""

RESULTS_KEPT = 1024
"""Most results that are kept for proposals which were applied before the proposer received their index."""


class NotCatalogLeader(Exception):
    """This node doesn't lead group 0. `leader` is the node that seems to lead it, or None."""

    def __init__(self, leader: str | None = None) -> None:
        super().__init__(f"the catalog's leader is {leader or 'unknown'}")
        self.leader = leader


class OutcomeUnknown(Exception):
    """The command may be committed, but its result is not known here.

    The catalog's state came from a snapshot that includes the command, or this node's catalog stopped before
    the command was applied.
    """


class NotEnabled(Exception):
    """A node of the cluster does not know the command yet: `needed` is the code version that it must know."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"a node's program does not know code version {needed} of the catalog's commands")
        self.needed = needed


class Proposer(Protocol):
    """Group 0 as the catalog uses it: it gets a command committed."""

    async def propose(self, command: bytes) -> int:
        """Propose a command; return the index of the entry with which it was committed.

        Raises:
            NotCatalogLeader: it was not committed, and will not be proposed here.
        """


Request = TypeVar("Request", bound=msgspec.Struct)
Rule = Callable[[CatalogState, Request], Change]


class CatalogTables(Replicated):  # type: ignore[misc]  # pysyncobj has no types
    """The replicated object that holds the catalog's state. Its methods are the catalog's commands.

    Each method takes a request as JSON text and returns a `Result`.

    The names of the methods and their `ver` are part of the log's format: a call is stored as the method's
    number in the order of (ver, name). New methods take a higher ``ver``. New behaviour of an old one depends
    on the version that is enabled where the log has the call, so all nodes follow the same rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = CatalogState()

    def _follow(self, rule: Rule[Request], kind: type[Request], request: str) -> Result:
        try:
            after, result = rule(self.state, msgspec.json.decode(request, type=kind))
        except msgspec.MsgspecError as error:
            return Result("invalid", self.state.version, str(error))
        except (MemoryError, RecursionError):
            raise  # Only this process is concerned: if it went on, its state would differ from the others'.
        except Exception as error:  # noqa: BLE001
            # A bug, which occurs on every node alike. Rules are pure, so nothing changed; an exception would
            # stop every node at this entry for ever.
            return Result("failed", self.state.version, f"{type(error).__name__}: {error}")
        self.state = after
        return result

    @replicated
    def found_cluster(self, request: str) -> Result:
        """Give the cluster its id (`catalog_rules.found_cluster`)."""
        return self._follow(rules.found_cluster, FoundCluster, request)

    @replicated
    def register_node(self, request: str) -> Result:
        """Record a node, or its new addresses (`catalog_rules.register_node`)."""
        rule = partial(rules.register_node, enabled=self._syncObj.getCodeVersion())
        return self._follow(rule, RegisterNode, request)

    @replicated
    def create_topic(self, request: str) -> Result:
        """Record a topic and its partitions (`catalog_rules.create_topic`)."""
        rule = partial(rules.create_topic, enabled=self._syncObj.getCodeVersion())
        return self._follow(rule, CreateTopic, request)

    @replicated
    def mark_made(self, request: str) -> Result:
        """Record that a node has made its replicas of groups (`catalog_rules.mark_made`)."""
        return self._follow(rules.mark_made, MarkMade, request)

    @replicated
    def delete_topic(self, request: str) -> Result:
        """Delete a topic, and leave tombstones (`catalog_rules.delete_topic`)."""
        return self._follow(rules.delete_topic, DeleteTopic, request)

    @replicated
    def mark_removed(self, request: str) -> Result:
        """Record that a node has removed deleted replicas (`catalog_rules.mark_removed`)."""
        return self._follow(rules.mark_removed, MarkRemoved, request)

    @replicated
    def change_replicas(self, request: str) -> Result:
        """Change a partition's replicas in the catalog by one step (`replica_rules.change_replicas`)."""
        return self._follow(replica_rules.change_replicas, ChangeReplicas, request)

    @replicated
    def update_topic_settings(self, request: str) -> Result:
        """Change settings of a topic (`catalog_rules.update_topic_settings`)."""
        return self._follow(rules.update_topic_settings, UpdateTopicSettings, request)

    @replicated_since(ver=1)
    def change_placement(self, request: str) -> Result:
        """Change the wanted placement by one step (`placement_rules.change_placement`)."""
        return self._follow(placement_rules.change_placement, ChangePlacement, request)

    @replicated_since(ver=2)
    def change_route(self, request: str) -> Result:
        """Perform one step of a change of a topic's route (`route_rules.change_route`)."""
        return self._follow(route_rules.change_route, ChangeRoute, request)

    @replicated_since(ver=4)
    def change_channel(self, request: str) -> Result:
        """Change a topic's channels (`channel_rules.change_channel`)."""
        return self._follow(channel_rules.change_channel, ChangeChannel, request)

    @replicated_since(ver=6)
    def change_access(self, request: str) -> Result:
        """Change the credentials (`credential_rules.change_access`)."""
        return self._follow(credential_rules.change_access, ChangeAccess, request)

    @replicated_since(ver=7)
    def change_limits(self, request: str) -> Result:
        """Change the limits of a principal (`limit_rules.change_limits`)."""
        return self._follow(limit_rules.change_limits, ChangeLimits, request)


class _Snapshot(msgspec.Struct, frozen=True):
    format: int
    applied_index: int
    code_version: int
    tables: dict[str, CatalogState]


class Catalog:
    """One node's copy of the catalog: proposes commands, applies committed ones, and has the state.

    The driver of group 0 calls `apply` once for each committed command, in log order, on leader and follower
    alike, and `restore` when the log begins with a snapshot. `on_change` is called with the new state after
    each change.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._tables = CatalogTables()
        self._objects = ReplicatedObjects([self._tables], newest=CODE_VERSION)
        self._applied_index = 0
        self._proposing = 0
        self._results: dict[int, Result] = {}
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._encoded: tuple[int, bytes] = (-1, b"")
        self.on_change: Callable[[CatalogState], None] | None = None

    def __repr__(self) -> str:
        state = self.state()
        sizes = f"{len(state.nodes)} nodes, {len(state.topics)} topics"
        return f"<Catalog v{state.version} at {self._applied_index}: {sizes}>"

    @property
    def applied_index(self) -> int:
        """Index of the last entry of group 0 whose effect is in `state()`."""
        return self._applied_index

    def state(self) -> CatalogState:
        """Return the state as of `applied_index`, an immutable value. Nothing is copied."""
        state: CatalogState = self._tables.state
        return state

    def encoded_state(self) -> bytes:
        """Return the state as msgpack, encoded once for each version."""
        state = self.state()
        if self._encoded[0] != state.version:
            self._encoded = (state.version, encoded(state))
        return self._encoded[1]

    # What the driver of group 0 calls.

    def apply(self, index: int, command: bytes) -> Result:
        """Perform the command that was committed at `index`, and return its result.

        Raises:
            UnknownCodeVersion: this program is too old to follow. The node must stop applying, with its state
                as it was, until it is upgraded.
        """
        assert index > self._applied_index, (index, self._applied_index)
        before = self.state()
        try:
            result = self._objects.perform(command)
        except BadCommand as error:
            result = Result("invalid", before.version, str(error))
        if result is None:  # a switch of the code version changes no table
            result = Result("updated", before.version)
        self._applied_index = index
        waiting = self._waiting.pop(index, None)
        if waiting is not None:
            if not waiting.done():
                waiting.set_result(result)
        elif self._proposing:
            self._results[index] = result  # its proposer may receive the index only after this
            if len(self._results) > RESULTS_KEPT:
                del self._results[next(iter(self._results))]
        if self.on_change is not None and self.state() is not before:
            self.on_change(self.state())
        assert isinstance(result, Result), result
        return result

    def snapshot(self) -> bytes:
        """Return the state as of `applied_index`, and all else that `apply` needs to go on, as bytes."""
        snapshot = _Snapshot(
            SNAPSHOT_FORMAT, self._applied_index, self._objects.code_version(), self._tables._serialize()
        )
        return encoded(snapshot)

    def restore(self, snapshot: bytes) -> None:
        """Take over the state of `snapshot`; the next entry to apply is the one after its index.

        Raises:
            ValueError: `snapshot` has an unknown format (also `msgspec.MsgspecError`); nothing changed.
        """
        decoded = msgspec.msgpack.decode(snapshot, type=_Snapshot)
        if decoded.format != SNAPSHOT_FORMAT:
            raise ValueError(
                f"catalog snapshot of format {decoded.format}, this program knows {SNAPSHOT_FORMAT}"
            )
        assert decoded.applied_index >= self._applied_index, (decoded.applied_index, self._applied_index)
        if decoded.code_version != self._objects.code_version():
            self._objects.perform(self._objects.encode_code_version(decoded.code_version))
        self._tables._deserialize(decoded.tables)
        self._applied_index = decoded.applied_index
        self._encoded = (-1, b"")
        for index in [index for index in self._waiting if index <= decoded.applied_index]:
            waiting = self._waiting.pop(index)
            if not waiting.done():
                waiting.set_exception(OutcomeUnknown(f"entry {index} is inside a snapshot"))
        if self.on_change is not None:
            self.on_change(self.state())

    # Commands. Each returns what `apply` computed at its index on this node, so `state()` already shows it.

    async def found_cluster(self, cluster_id: bytes) -> Result:
        """Set the cluster's id. Outcomes: created, exists, already_exists, invalid."""
        return await self._command(self._tables.found_cluster, FoundCluster(cluster_id))

    async def register_node(self, record: NodeRecord, *, former: Sequence[BootRecord] = ()) -> Result:
        """Record a node. Outcomes: created, exists, updated, store_changed, rolled_back, invalid.

        store_changed: another store is recorded under this name. rolled_back: the store is an older copy of
        itself. `former` are boot records of earlier starts (see `RegisterNode`).
        ``result.node.catalog_replica`` is the node's replica id in group 0.
        """
        return await self._command(self._tables.register_node, RegisterNode(record, former=list(former)))

    async def update_node(self, record: NodeRecord) -> Result:
        """Change addresses, shards or weight of a node. The outcome is absent if the node isn't known."""
        return await self._command(self._tables.register_node, RegisterNode(record, known=True))

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int,
        replicas: int,
        settings: Mapping[str, Setting],
        groups: Sequence[bytes],
        placement: Sequence[Sequence[str]],
        created_ms: int,
        owner: str = "",
    ) -> Result:
        """Record a topic and its partitions, in state `creating`; it counts for the limits of its `owner`.

        Outcomes: created, exists (the same), already_exists, conflict, invalid, quota. `groups` has 16 random
        bytes for each partition, `placement` its nodes (from `router.place`), both by partition number.
        """
        request = CreateTopic(
            name,
            partitions,
            replicas,
            dict(settings),
            list(groups),
            [list(nodes) for nodes in placement],
            created_ms,
            owner,
        )
        return await self._command(self._tables.create_topic, request)

    async def mark_made(self, groups: Sequence[bytes], *, node: str, store_id: bytes) -> Result:
        """Report that a node has created its replicas of `groups`, durably. Outcomes: marked, unchanged.

        ``result.groups`` are the groups that are live now.
        """
        return await self._command(self._tables.mark_made, MarkMade(node, store_id, list(groups)))

    async def delete_topic(self, name: str, *, deleted_ms: int, version: int | None = None) -> Result:
        """Delete a topic, if it has `version` (None: any). Outcomes: deleted, absent, conflict.

        ``result.groups`` are the topic's groups, which have tombstones now.
        """
        return await self._command(self._tables.delete_topic, DeleteTopic(name, deleted_ms, version))

    async def mark_removed(self, groups: Sequence[bytes], *, node: str, store_id: bytes) -> Result:
        """Report that a node has deleted its replicas of deleted groups. Outcomes: marked, unchanged."""
        return await self._command(self._tables.mark_removed, MarkRemoved(node, store_id, list(groups)))

    async def change_replicas(self, change: ReplicaChange) -> Result:
        """Perform one step of a replica move (`replica_rules`).

        Outcomes: updated, marked, unchanged, absent, conflict, invalid.
        """
        return await self._command(self._tables.change_replicas, ChangeReplicas(change))

    async def change_placement(self, change: PlacementChange) -> Result:
        """Perform one change of the wanted placement (`placement_rules`).

        Outcomes: updated, deleted, unchanged, absent, conflict, invalid.

        Raises:
            NotEnabled: a node does not know this command yet.
        """
        if self.code_version < 1:
            raise NotEnabled(1)
        return await self._command(self._tables.change_placement, ChangePlacement(change))

    async def change_route(self, step: RouteStep) -> Result:
        """Perform one step of a change of a topic's route (`route_rules`).

        Outcomes: created, updated, deleted, exists, absent, conflict, invalid, quota.

        Raises:
            NotEnabled: a node does not know this command yet.
        """
        # Programs of code version 2 know the command, and not what nodes do for a change.
        if self.code_version < 3:
            raise NotEnabled(3)
        return await self._command(self._tables.change_route, ChangeRoute(step))

    async def change_channel(self, step: ChannelStep) -> Result:
        """Create, change or delete a channel of a topic (`channel_rules.change_channel`).

        Outcomes: created, updated, deleted, exists, unchanged, already_exists, absent, conflict, invalid,
        quota.

        Raises:
            NotEnabled: a node does not know this command yet.
        """
        if self.code_version < 4:
            raise NotEnabled(4)
        return await self._command(self._tables.change_channel, ChangeChannel(step))

    async def change_access(self, step: AccessStep) -> Result:
        """Create or revoke a credential (`credential_rules.change_access`).

        Outcomes: created, deleted, exists, already_exists, absent, conflict, invalid, quota.

        Raises:
            NotEnabled: a node does not know this command yet.
        """
        if self.code_version < ACCESS_SINCE:
            raise NotEnabled(ACCESS_SINCE)
        return await self._command(self._tables.change_access, ChangeAccess(step))

    async def change_limits(self, principal: str, limits: Mapping[str, int], *, version: int) -> Result:
        """Replace a principal's limits if they still have `version` (`limit_rules.change_limits`).

        Outcomes: created, updated, deleted, unchanged, conflict, invalid, quota.

        Raises:
            NotEnabled: a node does not know this command yet.
        """
        if self.code_version < LIMITS_SINCE:
            raise NotEnabled(LIMITS_SINCE)
        request = ChangeLimits(principal, dict(limits), version)
        return await self._command(self._tables.change_limits, request)

    @property
    def code_version(self) -> int:
        """The code version that the cluster has enabled."""
        return self._objects.code_version()

    async def enable(self, version: int) -> None:
        """Enable code version `version`. Call it only when all nodes support that version.

        Raises:
            NotCatalogLeader: as for every command.
            OutcomeUnknown: as for every command.
        """
        await self._propose(self._objects.encode_code_version(version))

    async def update_topic_settings(
        self, name: str, changes: Mapping[str, Setting | None], *, version: int
    ) -> Result:
        """Change settings (None removes one) of a topic that still has `version`.

        Outcomes: updated, unchanged, absent, conflict.
        """
        request = UpdateTopicSettings(name, dict(changes), version)
        return await self._command(self._tables.update_topic_settings, request)

    async def _command(self, method: Callable[[str], Result], request: msgspec.Struct) -> Result:
        """Propose the call; return its result once it is committed *and* applied here.

        Raises:
            NotCatalogLeader: the proposer raised it; any other exception of the proposer passes, too.
            OutcomeUnknown: the command is inside a snapshot.
        """
        return await self._propose(self._objects.encode(method, msgspec.json.encode(request).decode()))

    async def _propose(self, command: bytes) -> Result:
        self._proposing += 1
        try:
            index = await self._proposer.propose(command)
            # No await between here and the creation of the future, so `apply` can't run in between.
            result = self._results.pop(index, None)
        finally:
            self._proposing -= 1
            if not self._proposing:
                self._results.clear()
        if result is not None:
            return result
        if index <= self._applied_index:
            raise OutcomeUnknown(f"entry {index} is inside a snapshot")
        waiting: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[index] = waiting
        try:
            return await waiting
        finally:
            self._waiting.pop(index, None)
