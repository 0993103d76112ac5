"""The rules of the catalog's changes: one pure function for each command.

``rule(state, request) -> (state afterwards, result)``. A rule checks the request against the state, and
returns either the same state or a new one with the next version. It reads no clock and draws no random
number, because every node applies it by itself and must get the same state. How commands are encoded,
committed and applied is in `catalog` and `replicated`. Invariants:

1. A replica id is given once: `next_replica_id` only grows.
2. A group id, once seen (also in a tombstone), is never taken for another group.
3. A partition goes `creating` -> `live` -> tombstone (the record of a deleted group), never back.
4. A channel's id is given once, and its `FIXED` settings stay for its life.
5. A credential never changes: it is made, and revoked.
6. A principal owns no more objects in the catalog than its limits allow, also if it sends two requests at
   once. Lowered limits remove nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from membership.boot_history import BootRecord, contradicts, newer
from membership.records import (
    ANY_PRINCIPAL,
    CatalogState,
    ChannelRecord,
    CredentialRecord,
    Grant,
    LimitRecord,
    NodeRecord,
    PartitionRecord,
    ReplicaRecord,
    Tombstone,
    TopicRecord,
)
from membership.requests import (
    ChangeAccess,
    ChangeChannel,
    ChangeLimits,
    CreateChannel,
    CreateCredential,
    CreateTopic,
    DeleteChannel,
    DeleteTopic,
    FoundCluster,
    MarkMade,
    MarkRemoved,
    Outcome,
    RegisterNode,
    Result,
    RevokeCredential,
    UpdateChannel,
    UpdateTopicSettings,
)

GROUP_ID_BYTES = 16

MAX_CHANNELS = 64
"""Most channels of one topic.

As in `laminar.wire.channels`, which clients have without this package; a test compares the two.
"""

MOST_CHANNELS = 10_000
"""Most channels of all topics: each is a table in every replica of its topic's partitions."""

MOST_SETTINGS_BYTES = 4_096
"""Most bytes of a channel's settings as JSON: a topic's record has them all, and goes to all nodes."""

FIXED = ("start", "until", "order")
"""Settings of a channel that never change: where it begins and ends, and whether keys are kept in order."""

ROLES = ("read", "write", "admin", "metrics")
"""The roles that a grant may give, as in `laminar.http.api.roles`; a test compares the two."""

MOST_CREDENTIALS = 10_000
"""Most credentials of the cluster: every process has all of them in memory."""

MOST_GRANTS = 64
"""Most grants of a credential."""

MOST_SUBJECT_CHARACTERS = 1_000
"""Most characters of the subject name of a client certificate."""

CREDENTIAL_ID = re.compile(r"[0-9a-f]{16}")
PRINCIPAL = re.compile(r"[A-Za-z0-9._-]{1,200}")
PREFIX = re.compile(r"[A-Za-z0-9._-]{0,200}")
SALT_BYTES, DIGEST_BYTES = 16, 32

LIMITS = (
    "requests_per_s",
    "bytes_in_per_s",
    "bytes_out_per_s",
    "connections",
    "topics",
    "partitions",
    "channels",
    "cursors",
    "sinks",
    "uploads",
    "producers",
)
"""The names of limits, as in `laminar.http.api.documents.access`; a test compares the two."""

MOST_LIMITS = 10_000
"""Most principals with limits of their own: every process has all of them in memory."""

HIGHEST_LIMIT = 2**53 - 1

LIMITS_SINCE = 7
"""The code version from which on principals have limits, and topics owners."""

REFUSE_TOO_OLD = 2
"""From this code version on, a node whose program does not know the enabled version is not registered."""
Change = tuple[CatalogState, Result]


def _same(state: CatalogState, outcome: Outcome, detail: str = "", **more: Any) -> Change:
    return state, Result(outcome, state.version, detail, **more)


def _changed(state: CatalogState, outcome: Outcome, result: dict[str, Any], **fields: Any) -> Change:
    after = replace(state, version=state.version + 1, **fields)
    return after, Result(outcome, after.version, **result)


def found_cluster(state: CatalogState, request: FoundCluster) -> Change:
    """Give the cluster its id, once; the same id again changes nothing."""
    if not request.cluster_id:
        return _same(state, "invalid", "an empty cluster id")
    if state.cluster_id:
        same = state.cluster_id == request.cluster_id
        return _same(state, "exists" if same else "already_exists")
    return _changed(state, "created", {}, cluster_id=request.cluster_id)


def register_node(state: CatalogState, request: RegisterNode, *, enabled: int = 0) -> Change:
    """Record a node, or change its addresses, shards or announced weight and zone.

    Refused are another store under a known name, an older copy of the known store, and the store of a removed
    node. Also refused is a node whose program does not know `enabled`, the code version that the cluster has
    enabled, because it could not apply the catalog's commands.
    """
    record = request.record
    if enabled >= REFUSE_TOO_OLD and record.code_version < enabled:
        # "invalid" is an outcome that older programs can decode.
        return _same(state, "invalid", too_old(record.node, record.code_version, enabled=enabled))
    if record.store_id in state.removed_stores:
        return _same(state, "removed", f"this data directory is of a node {record.node!r} that was removed")
    known = state.nodes.get(record.node)
    if known is None and request.known:
        return _same(state, "absent", f"no node {record.node!r}")
    if known is not None and known.store_id != record.store_id:
        return _same(
            state, "store_changed", f"{record.node!r} is known with another data directory", node=known
        )
    if known is not None and contradicts(_lives(request), known.boot):
        return _same(state, "rolled_back", _how_old(record, known), node=known)
    wrong = _wrong_node(state, request)
    if wrong:
        return _same(state, "invalid", wrong)

    next_replica_id = state.next_replica_id
    if known is not None:
        # A late message may show an earlier boot record.
        record = replace(
            kept_by_command(record, known),
            catalog_replica=known.catalog_replica,
            boot=newer(record.boot, known.boot),
        )
    elif record.catalog_replica == 0:
        record = replace(record, catalog_replica=next_replica_id)
    next_replica_id = max(next_replica_id, record.catalog_replica + 1)
    if record == known:
        return _same(state, "exists", node=known)
    return _changed(
        state,
        "created" if known is None else "updated",
        {"node": record},
        nodes=state.nodes | {record.node: record},
        next_replica_id=next_replica_id,
    )


def too_old(node: str, code_version: int, *, enabled: int) -> str:
    """Return the reason for which a node with this code version is refused, as text for people."""
    return (
        f"the program of node {node!r} is too old: it knows code version {code_version}, and the cluster has "
        f"enabled {enabled}: start it with a program as new as that of the other nodes"
    )


def kept_by_command(record: NodeRecord, known: NodeRecord) -> NodeRecord:
    """Return a node's new registration, with the fields that only commands change copied from `known`."""
    return replace(
        record,
        draining=known.draining,
        set_weight=known.set_weight,
        set_zone=known.set_zone,
        version=known.version,
    )


def _lives(request: RegisterNode) -> list[BootRecord]:
    life = request.record.boot
    return request.former if life is None else [*request.former, life]


def _how_old(record: NodeRecord, known: NodeRecord) -> str:
    assert known.boot is not None
    number = record.boot.number if record.boot is not None else 0
    return (
        f"the data directory of {record.node!r} is an older copy: it begins start {number} of a history that "
        f"is not the one the cluster knows up to start {known.boot.number}, tick {known.boot.tick}"
    )


def _wrong_node(state: CatalogState, request: RegisterNode) -> str:
    record = request.record
    if not record.node or not record.store_id:
        return "a node needs a name and a store id"
    if not (record.weight >= 0 and math.isfinite(record.weight)):
        return f"weight {record.weight}"
    if record.shards < 1 or len(record.shard_http_ports) != record.shards:
        return f"{record.shards} shards with {len(record.shard_http_ports)} HTTP ports"
    if len(record.peer_ports) != record.shards + 1:
        return f"{record.shards} shards with {len(record.peer_ports)} peer ports"
    other = next((n for n in state.nodes.values() if n.store_id == record.store_id), None)
    if other is not None and other.node != record.node:
        return f"this data directory is known as {other.node!r}"
    given = record.catalog_replica
    if given < 0 or (record.node not in state.nodes and 0 < given < state.next_replica_id):
        return f"catalog replica {given} was given before; the next is {state.next_replica_id}"
    return ""


def create_topic(state: CatalogState, request: CreateTopic, *, enabled: int = LIMITS_SINCE) -> Change:
    """Record a topic, its placement, and its partitions in state `creating`; assign their replica ids.

    `enabled` is the code version enabled at this entry of the log: before `LIMITS_SINCE` no topic has an
    owner.
    """
    wrong = _wrong_topic(request)
    if wrong:
        return _same(state, "invalid", wrong)
    known = state.topics.get(request.name)
    if known is not None:
        wanted = (request.partitions, request.replicas, request.settings)
        same = wanted == (known.partitions, known.replicas, known.settings)
        return _same(state, "exists" if same else "already_exists", topic=known)
    conflict = _conflict_of_topic(state, request)
    if conflict:
        return _same(state, "conflict", conflict)
    owner = request.owner if enabled >= LIMITS_SINCE else ""
    over = over_limit(state, owner, topics=1, partitions=request.partitions)
    if over is not None:
        return state, over

    replica_id = state.next_replica_id
    partitions = {}
    for number, (group, nodes) in enumerate(zip(request.groups, request.placement, strict=True)):
        replicas = []
        for node in nodes:
            replicas.append(ReplicaRecord(replica_id, node, state.nodes[node].store_id))
            replica_id += 1
        partitions[f"{request.name}/{number}"] = PartitionRecord(
            request.name, number, group, "creating", replicas, request.created_ms
        )
    topic = TopicRecord(
        request.name,
        request.partitions,
        request.replicas,
        request.settings,
        request.created_ms,
        state.version + 1,
        owner=owner,
    )
    return _changed(
        state,
        "created",
        {"topic": topic},
        topics=state.topics | {topic.name: topic},
        partitions=state.partitions | partitions,
        next_replica_id=replica_id,
    )


def _wrong_topic(request: CreateTopic) -> str:
    if not request.name or request.partitions < 1 or request.replicas < 1:
        return "a topic needs a name, a partition and a replica"
    if len(request.groups) != request.partitions or len(request.placement) != request.partitions:
        return (
            f"{request.partitions} partitions, {len(request.groups)} groups, {len(request.placement)} places"
        )
    if any(len(group) != GROUP_ID_BYTES or not any(group) for group in request.groups):
        return f"a group id is {GROUP_ID_BYTES} bytes and not zero"
    if len(set(request.groups)) != len(request.groups):
        return "two partitions with one group id"
    for nodes in request.placement:
        if not 1 <= len(nodes) <= request.replicas or len(set(nodes)) != len(nodes):
            return f"{request.replicas} replicas placed on {nodes}"
    return ""


def _conflict_of_topic(state: CatalogState, request: CreateTopic) -> str:
    absent = {node for nodes in request.placement for node in nodes} - state.nodes.keys()
    if absent:
        return f"placed on unknown nodes {sorted(absent)}"
    if any(state.partition_of_group(each) or each.hex() in state.tombstones for each in request.groups):
        return "a group id was used before"
    return ""


def mark_made(state: CatalogState, request: MarkMade) -> Change:
    """Record that a node has created its replicas; the last replica to be created makes a partition live.

    Groups that aren't known, and replicas that were promised to another store, are skipped.
    """
    found = map(state.partition_of_group, dict.fromkeys(request.groups))
    asked = [partition for partition in found if partition is not None]
    changed = {}
    for partition in asked:
        if partition.state != "creating":
            continue
        replicas = [
            replace(r, made=True) if (r.node, r.store_id) == (request.node, request.store_id) else r
            for r in partition.replicas
        ]
        if replicas == partition.replicas:
            continue
        now: Literal["creating", "live"] = "live" if all(r.made for r in replicas) else "creating"
        changed[f"{partition.topic}/{partition.number}"] = replace(partition, replicas=replicas, state=now)
    made = {partition.group for partition in changed.values() if partition.state == "live"}
    live = [each.group for each in asked if each.state == "live" or each.group in made]
    if not changed:
        return _same(state, "unchanged", groups=live)
    return _changed(state, "marked", {"groups": live}, partitions=state.partitions | changed)


def delete_topic(state: CatalogState, request: DeleteTopic) -> Change:
    """Remove a topic and leave a tombstone for each of its groups, those of a change under way as well."""
    topic = state.topics.get(request.name)
    if topic is None:
        return _same(state, "absent", f"no topic {request.name!r}")
    if request.version is not None and request.version != topic.version:
        return _same(state, "conflict", f"version is {topic.version}", topic=topic)
    gone = state.partitions_of(request.name)
    tombstones = {p.group.hex(): tombstone_of(p, request.deleted_ms, state.version + 1) for p in gone}
    return _changed(
        state,
        "deleted",
        {"topic": topic, "groups": [p.group for p in gone]},
        topics=state.topics.changed({request.name: None}),
        partitions=state.partitions.changed({f"{p.topic}/{p.number}": None for p in gone}),
        tombstones=state.tombstones | tombstones,
    )


def tombstone_of(partition: PartitionRecord, deleted_ms: int, version: int) -> Tombstone:
    """Return the record of a deleted group: it lists the replicas whose nodes have data to delete."""
    replicas = [*partition.replicas, *(each.replica for each in partition.leaving), *partition.removed]
    return Tombstone(partition.topic, partition.number, partition.group, replicas, deleted_ms, version)


def mark_removed(state: CatalogState, request: MarkRemoved) -> Change:
    """Record that a node removed its replicas of deleted groups; the last one removes the tombstone."""
    changed: dict[str, Tombstone] = {}
    for key in (group.hex() for group in request.groups):
        stone = state.tombstones.get(key)
        if stone is None:
            continue
        left = [r for r in stone.replicas if (r.node, r.store_id) != (request.node, request.store_id)]
        if left != stone.replicas:
            changed[key] = replace(stone, replicas=left)
    if not changed:
        return _same(state, "unchanged")
    finished = [stone.group for stone in changed.values() if not stone.replicas]
    stones = {key: stone if stone.replicas else None for key, stone in changed.items()}
    tombstones = state.tombstones.changed(stones)
    return _changed(state, "marked", {"groups": finished}, tombstones=tombstones)


def update_topic_settings(state: CatalogState, request: UpdateTopicSettings) -> Change:
    """Change settings of a topic if its version is the request's; a value of None removes a setting."""
    topic = state.topics.get(request.name)
    if topic is None:
        return _same(state, "absent", f"no topic {request.name!r}")
    if request.version != topic.version:
        return _same(state, "conflict", f"version is {topic.version}", topic=topic)
    merged = topic.settings | request.changes
    settings = {name: value for name, value in merged.items() if value is not None}
    if settings == topic.settings:
        return _same(state, "unchanged", topic=topic)
    topic = replace(topic, settings=settings, version=state.version + 1)
    return _changed(state, "updated", {"topic": topic}, topics=state.topics | {topic.name: topic})


# -- channels --------------------------------------------------------------------------------


def change_channel(state: CatalogState, request: ChangeChannel) -> Change:
    """Create, change or delete a channel of a topic: dispatch on the kind of the request."""
    topic = state.topics.get(request.step.topic)
    if topic is None:
        return _same(state, "absent", f"no topic {request.step.topic!r}")
    match request.step:
        case CreateChannel() as create:
            return create_channel(state, topic, create)
        case UpdateChannel() as update:
            return update_channel(state, topic, update)
        case DeleteChannel() as delete:
            return delete_channel(state, topic, delete)


def create_channel(state: CatalogState, topic: TopicRecord, request: CreateChannel) -> Change:
    """Record a channel. If it exists, the same settings change nothing, and others are refused."""
    known = (topic.channels or {}).get(request.name)
    if known is not None:
        same = known.settings == request.settings
        return _same(state, "exists" if same else "already_exists", topic=topic)
    wrong = _wrong_channel(topic, request.name, request.settings)
    if wrong:
        return _same(state, "invalid", wrong, topic=topic)
    if len(topic.channels or ()) >= MAX_CHANNELS:
        return _same(state, "quota", f"topic {topic.name!r} has {MAX_CHANNELS} channels", topic=topic)
    if sum(len(each.channels) for each in state.topics.values() if each.channels) >= MOST_CHANNELS:
        return _same(state, "quota", f"all topics together have {MOST_CHANNELS} channels", topic=topic)
    over = over_limit(state, topic.owner, channels=1)
    if over is not None:
        return state, over
    version = state.version + 1
    whole_from = topic.next_partition or topic.partitions
    if topic.change is not None:
        whole_from = min(each.number for each in topic.change.outputs)
    record = ChannelRecord(version, version, request.settings, whole_from)
    return _with_channel(state, "created", topic, request.name, record)


def update_channel(state: CatalogState, topic: TopicRecord, request: UpdateChannel) -> Change:
    """Replace the settings of a channel that still has the request's version."""
    known = (topic.channels or {}).get(request.name)
    if known is None:
        return _same(state, "absent", f"no channel {request.name!r}", topic=topic)
    if known.version != request.version:
        return _same(state, "conflict", f"version is {known.version}", topic=topic)
    if known.settings == request.settings:
        return _same(state, "unchanged", topic=topic)
    wrong = _wrong_channel(topic, request.name, request.settings)
    changed = [each for each in FIXED if known.settings.get(each) != request.settings.get(each)]
    if wrong or changed:
        return _same(state, "invalid", wrong or f"{', '.join(changed)} never change", topic=topic)
    record = replace(known, version=state.version + 1, settings=request.settings)
    return _with_channel(state, "updated", topic, request.name, record)


def delete_channel(state: CatalogState, topic: TopicRecord, request: DeleteChannel) -> Change:
    """Delete a channel, if it still has the request's id; leaders then close it in their logs."""
    known = (topic.channels or {}).get(request.name)
    if known is None:
        return _same(state, "absent", f"no channel {request.name!r}", topic=topic)
    if known.id != request.id:
        return _same(state, "conflict", f"id is {known.id}", topic=topic)
    return _with_channel(state, "deleted", topic, request.name, None)


def _wrong_channel(topic: TopicRecord, name: str, settings: Mapping[str, Any]) -> str:
    if topic.name.startswith("_"):
        return f"topic {topic.name!r} belongs to the system, and has no channels"
    if not name:
        return "a channel needs a name"
    size = len(msgspec.json.encode(settings))
    if size > MOST_SETTINGS_BYTES:
        return f"the settings are {size} bytes, of at most {MOST_SETTINGS_BYTES}"
    return ""


def _with_channel(
    state: CatalogState, outcome: Outcome, topic: TopicRecord, name: str, record: ChannelRecord | None
) -> Change:
    """Set a channel of the topic; None: remove it. The topic has a new version, too."""
    channels = {each: known for each, known in (topic.channels or {}).items() if each != name}
    if record is not None:
        channels[name] = record
    topic = replace(topic, channels=channels or None, version=state.version + 1)
    return _changed(state, outcome, {"topic": topic}, topics=state.topics | {topic.name: topic})


# -- credentials -----------------------------------------------------------------------------


def change_access(state: CatalogState, request: ChangeAccess) -> Change:
    """Create or revoke a credential, depending on the request's kind."""
    match request.step:
        case CreateCredential() as create:
            return create_credential(state, create)
        case RevokeCredential() as revoke:
            return revoke_credential(state, revoke)


def create_credential(state: CatalogState, request: CreateCredential) -> Change:
    """Record a credential, unless its id is taken or, with `only_if_none`, any credential is recorded.

    The same request once more changes nothing.
    """
    wrong = _wrong_credential(request)
    if wrong:
        return _same(state, "invalid", wrong)
    known = state.credentials.get(request.id)
    if known is not None:
        same = (known.salt, known.digest) == (request.salt, request.digest)
        return _same(state, "exists" if same else "already_exists", f"credential {request.id!r} exists")
    if request.only_if_none and state.credentials:
        return _same(state, "conflict", "there are credentials already")
    if len(state.credentials) >= MOST_CREDENTIALS:
        return _same(state, "quota", f"there are {MOST_CREDENTIALS} credentials")
    record = CredentialRecord(
        id=request.id,
        name=request.name,
        grants=request.grants,
        salt=request.salt,
        digest=request.digest,
        created_ms=request.created_ms,
        expires_ms=request.expires_ms,
        version=state.version + 1,
        certificate=request.certificate,
    )
    return _changed(state, "created", {}, credentials=state.credentials | {record.id: record})


def revoke_credential(state: CatalogState, request: RevokeCredential) -> Change:
    """Delete the credential with the request's id; the result is `absent` if there is none."""
    if request.id not in state.credentials:
        return _same(state, "absent", f"no credential {request.id!r}")
    return _changed(state, "deleted", {}, credentials=state.credentials.changed({request.id: None}))


def _wrong_credential(request: CreateCredential) -> str:
    if CREDENTIAL_ID.fullmatch(request.id) is None:
        return f"id {request.id!r} is not 16 hexadecimal digits"
    if PRINCIPAL.fullmatch(request.name) is None:
        return f"name {request.name!r} is not 1 to 200 of A-Z a-z 0-9 . _ -"
    if not 1 <= len(request.grants) <= MOST_GRANTS:
        return f"{len(request.grants)} grants, of 1 to {MOST_GRANTS}"
    if request.expires_ms < 0:
        return f"expires_ms {request.expires_ms} is below 0"
    if len(request.certificate) > MOST_SUBJECT_CHARACTERS:
        return f"certificate of {len(request.certificate)} characters, of at most {MOST_SUBJECT_CHARACTERS}"
    sizes = (len(request.salt), len(request.digest))
    if sizes != ((0, 0) if request.certificate else (SALT_BYTES, DIGEST_BYTES)):
        return f"salt and digest of {sizes[0]} and {sizes[1]} bytes"
    return next(filter(None, map(_wrong_grant, request.grants)), "")


def _wrong_grant(grant: Grant) -> str:
    if grant.role not in ROLES:
        return f"role {grant.role!r} is not one of {', '.join(ROLES)}"
    if PREFIX.fullmatch(grant.prefix) is None:
        return f"prefix {grant.prefix!r} is not at most 200 of A-Z a-z 0-9 . _ -"
    return ""


# -- limits of principals --------------------------------------------------------------------


def change_limits(state: CatalogState, request: ChangeLimits) -> Change:
    """Replace a principal's limits if they still have the request's version; empty limits remove the record.

    The same request once more changes nothing.
    """
    wrong = _wrong_limits(request)
    if wrong:
        return _same(state, "invalid", wrong)
    known = state.limits.get(request.principal)
    if (known.limits if known is not None else {}) == request.limits:
        return _same(state, "unchanged")
    if (known.version if known is not None else 0) != request.version:
        return _same(state, "conflict", f"version is {known.version if known is not None else 0}")
    if not request.limits:
        return _changed(state, "deleted", {}, limits=state.limits.changed({request.principal: None}))
    if known is None and len(state.limits) >= MOST_LIMITS:
        return _same(state, "quota", f"{MOST_LIMITS} principals have limits of their own")
    record = LimitRecord(request.principal, request.limits, state.version + 1)
    outcome: Outcome = "created" if known is None else "updated"
    return _changed(state, outcome, {}, limits=state.limits | {record.principal: record})


def _wrong_limits(request: ChangeLimits) -> str:
    if request.principal != ANY_PRINCIPAL and PRINCIPAL.fullmatch(request.principal) is None:
        return f"principal {request.principal!r} is not 1 to 200 of A-Z a-z 0-9 . _ -"
    for name, limit in request.limits.items():
        if name not in LIMITS:
            return f"there is no limit {name!r}: {', '.join(LIMITS)}"
        if not 0 < limit <= HIGHEST_LIMIT:
            return f"{name} {limit} is not 1 to {HIGHEST_LIMIT}"
    return ""


def owned_by(state: CatalogState, owner: str) -> dict[str, int]:
    """Return the numbers of topics, partitions and channels that a principal owns."""
    topics = [each for each in state.topics.values() if each.owner == owner]
    return {
        "topics": len(topics),
        "partitions": sum(len(each.all_numbers) for each in topics),
        "channels": sum(len(each.channels or ()) for each in topics),
    }


def over_limit(state: CatalogState, owner: str, **more: int) -> Result | None:
    """Return the refusal if `more` objects of an owner would exceed one of its limits; else None.

    The owner's objects are counted over all topics, which is only done if the owner has such a limit.
    """
    if not owner or not state.limits:
        return None
    limits = {name: state.limit(owner, name) for name in more}
    if not any(limit is not None for limit in limits.values()):
        return None
    owned = owned_by(state, owner)
    for name, limit in limits.items():
        value = owned[name] + more[name]
        if limit is not None and value > limit:
            detail = f"principal {owner!r} would have {value} {name}, and may have {limit}"
            return Result("quota", state.version, detail, what=name, value=value, limit=limit)
    return None
