"""The table of routes: method and path to the name of an operation.

The node maps operation names to handlers; OpenAPI and `/docs` are built from the same rows, which name the
types of parameters, bodies and answers. HEAD is answered wherever GET is. Matching is a walk over the path's
segments, already percent-decoded, so that a topic can't smuggle a slash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from laminar.batch import BATCH_TYPE
from laminar.http.api.append_body import ARROW_TYPE, JSON_TYPE, NDJSON_TYPE
from laminar.http.api.documents import (
    access,
    administration,
    channels,
    cluster,
    cursors,
    delayed,
    groups,
    jobs,
    key_routes,
    partitions,
    records,
    server,
    topics,
    transactions,
)
from laminar.http.api.documents.find import history, search, trace
from laminar.http.api.names import check_name
from laminar.http.api.parameters import (
    ACCEPT_LOSS,
    ACK,
    AFTER_VERSION,
    BEFORE,
    DELAY,
    DELAYED_LISTING,
    DESCRIBE_WAIT,
    DRY_RUN,
    EMPTY,
    EPOCH,
    FETCH,
    GUARANTEES,
    HISTORY,
    IF_MATCH,
    IF_MATCH_OFFSET,
    IF_NONE_MATCH,
    IF_RANGE,
    IMPORT,
    JOB_LISTING,
    KEY,
    KEY_TIME,
    LISTING,
    LOGICAL,
    MAX_NUMBER,
    METRICS_DETAIL,
    OFFSETS,
    ONCE,
    ONE_RECORD,
    RANGE,
    READ_REPLICA,
    READY_REPLICAS,
    RECORD,
    RECORD_HEADERS,
    ROUTE,
    SEQUENCE,
    SINK_EPOCH,
    STAGE,
    TO_INDEX,
    TOPIC_LISTING,
    TRACE,
    UPLOAD,
    WAIT,
    Parameter,
    needed,
)
from laminar.http.api.problem_response import problem_of
from laminar.http.api.problems import Problem
from laminar.http.api.roles import (
    ADMIN,
    ADMIN_OF_ALL,
    ANY,
    DESCRIBE,
    METRICS,
    PUBLIC,
    READ,
    WRITE,
    WRITE_SINK,
    WRITE_STAGE,
    Needs,
)
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.request_head import split_path
from laminar.wire.channels import JOBS_TYPE, STREAM_TYPE

# Numbers with more digits than any partition or offset has are refused before they are converted.
_NUMBER: Final = re.compile(r"(?:0|[1-9][0-9]{0,15})\Z", re.ASCII)


class Body(Enum):
    """The kind of body that an operation reads."""

    NONE = "none"
    JSON = "json"  # one of the documents in `documents`
    RECORDS = "records"  # records, in a body of any content type (`append_body`)


class Reply(NamedTuple):
    """An answer below 400: by media type the struct of its document, or None for other bytes."""

    status: int
    description: str
    content: Mapping[str, type[msgspec.Struct] | None] = MappingProxyType({})


class Route(NamedTuple):
    """A row: `template` has its path parameters in braces; `parameters` are those of query and head.

    `needs` is what its principal must be allowed to do (`laminar.http.api.roles`).

    `document` is the struct of a JSON body. Every route may also answer a problem.
    """

    method: str
    template: str
    operation: str
    needs: Needs
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: Body = Body.NONE
    document: type[msgspec.Struct] | None = None
    replies: tuple[Reply, ...] = ()

    @property
    def query(self) -> tuple[str, ...]:
        """The names of the query parameters that the operation reads."""
        return tuple(row.name for row in self.parameters if row.place == "query")


class Match(NamedTuple):
    """The operation that a request asks for, and its parameters."""

    operation: str
    params: dict[str, str]


_T: Final = "/v1/topics/{topic}"
_P: Final = _T + "/partitions/{partition}"
_C: Final = _T + "/channels/{channel}"
_D: Final = _T + "/delayed/{delayed}"
_S: Final = "/v1/sinks/{sink}"
_N: Final = "/v1/admin/nodes/{node}"
_A: Final = "/v1/admin/topics/{topic}/partitions/{partition}"


def _json(document: type[msgspec.Struct], description: str = "Done.", *, status: int = 200) -> Reply:
    return Reply(status, description, MappingProxyType({JSON_TYPE: document}))


def _bytes(*types: str, description: str = "Done.", status: int = 200) -> Reply:
    return Reply(status, description, MappingProxyType(dict.fromkeys(types)))


_RECEIPT: Final = _json(records.Appended, "Appended: the records are durable.")
_ONE_RECEIPT: Final = _json(records.Appended, "Appended one record, at `Location`.", status=201)
_ELSEWHERE: Final = Reply(307, "To a request with `Laminar-Redirect`: another node has the partition.")
_UNCHANGED: Final = Reply(304, "Nothing has changed.")
_NO_CONTENT: Final = Reply(204, "Done.")
_VALUE_TYPE: Final = "application/octet-stream"
_FETCHED: Final = Reply(
    200,
    "Records, with `Laminar-Next-Offset` to continue from.",
    MappingProxyType(
        {JSON_TYPE: records.FetchedRecords, NDJSON_TYPE: None, ARROW_TYPE: None, BATCH_TYPE: None}
    ),
)

ROUTES: Final = (
    Route(
        "GET",
        "/v1/topics",
        "list_topics",
        ANY,
        "List topics",
        TOPIC_LISTING,
        replies=(_json(topics.TopicPage),),
    ),
    Route(
        "GET",
        _T,
        "describe_topic",
        DESCRIBE,
        "Describe a topic",
        (IF_NONE_MATCH,),
        replies=(_json(topics.Topic), _UNCHANGED),
    ),
    Route(
        "PUT",
        _T,
        "create_topic",
        ADMIN,
        "Create a topic, if it isn't there yet",
        body=Body.JSON,
        document=topics.NewTopic,
        replies=(
            _json(topics.Topic, "Created.", status=201),
            _json(topics.Topic, "It exists already."),
        ),
    ),
    Route(
        "PATCH",
        _T,
        "update_topic",
        ADMIN,
        "Change a topic's settings by a merge patch, or its number of replicas",
        (needed(IF_MATCH),),
        body=Body.JSON,
        document=topics.TopicPatch,
        replies=(_json(topics.Topic),),
    ),
    Route(
        "DELETE",
        _T,
        "delete_topic",
        ADMIN,
        "Delete a topic and its records",
        (needed(IF_MATCH),),
        replies=(_json(topics.DeletedTopic, status=202),),
    ),
    Route(
        "GET",
        _T + "/partitions",
        "list_partitions",
        DESCRIBE,
        "List a topic's partitions with leaders and replicas",
        (DESCRIBE_WAIT, READ_REPLICA),
        replies=(_json(partitions.Partitions),),
    ),
    Route(
        "GET",
        _P,
        "describe_partition",
        DESCRIBE,
        "Describe a partition",
        replies=(_json(partitions.Partition),),
    ),
    Route(
        "DELETE",
        _P,
        "reclaim_partition",
        ADMIN,
        "Delete a partition that others follow, once its records are acknowledged",
        replies=(_json(records.DeletedRecords),),
    ),
    Route(
        "GET",
        _T + "/routes",
        "list_routes",
        DESCRIBE,
        "List the key ranges of a topic",
        replies=(_json(key_routes.KeyRoutes),),
    ),
    Route(
        "POST",
        _T + "/routes",
        "begin_route",
        ADMIN,
        "Split, merge or move partitions",
        body=Body.JSON,
        document=key_routes.NewRoute,
        replies=(
            _json(key_routes.RouteChange, "It is done already."),
            _json(key_routes.RouteChange, "Begun: `Location` says how far it is.", status=202),
        ),
    ),
    Route(
        "GET",
        _T + "/routes/{version}",
        "describe_route",
        DESCRIBE,
        "Describe the change that makes, or made, a route; with `wait_ms`, once it is done",
        (WAIT,),
        replies=(_json(key_routes.RouteChange),),
    ),
    Route(
        "DELETE",
        _T + "/routes/{version}",
        "cancel_route",
        ADMIN,
        "Cancel a change of a route that has not ended a partition yet",
        replies=(_NO_CONTENT,),
    ),
    Route(
        "POST",
        _T + "/records",
        "append_to_topic",
        WRITE,
        "Append records, to partitions chosen by key, by logical partition, or spread",
        (*RECORD, *DELAY, LOGICAL, *RECORD_HEADERS, KEY, KEY_TIME),
        body=Body.RECORDS,
        replies=(_RECEIPT,),
    ),
    Route(
        "POST",
        _P + "/records",
        "append_to_partition",
        WRITE,
        "Append records to a partition",
        (*RECORD, *DELAY, ACK, *RECORD_HEADERS, IF_MATCH_OFFSET, ROUTE, *GUARANTEES),
        body=Body.RECORDS,
        replies=(
            _ONE_RECEIPT,
            _RECEIPT,
            _json(records.Accepted, "With `ack=accepted`: not durable yet.", status=202),
            _ELSEWHERE,
        ),
    ),
    Route(
        "GET",
        _P + "/records",
        "fetch",
        READ,
        "Fetch records from an offset or a time",
        FETCH,
        replies=(_FETCHED, _ELSEWHERE),
    ),
    Route(
        "DELETE",
        _P + "/records",
        "delete_records",
        ADMIN,
        "Delete the records before an offset",
        (needed(BEFORE), DRY_RUN, IMPORT),
        replies=(_json(records.DeletedRecords),),
    ),
    Route(
        "GET",
        _T + "/delayed",
        "list_delayed",
        READ,
        "List the delayed records that are pending, or count them by time",
        DELAYED_LISTING,
        replies=(_json(delayed.DelayedPage),),
    ),
    Route(
        "GET",
        _D,
        "describe_delayed",
        DESCRIBE,
        "Describe a delayed record",
        replies=(_json(delayed.DelayedState),),
    ),
    Route(
        "PATCH",
        _D,
        "change_delayed",
        WRITE,
        "Give a pending delayed record another time",
        body=Body.JSON,
        document=delayed.DelayedChange,
        replies=(_json(delayed.DelayedState),),
    ),
    Route(
        "DELETE",
        _D,
        "cancel_delayed",
        WRITE,
        "Cancel a pending delayed record",
        replies=(_json(delayed.DelayedState),),
    ),
    Route(
        "POST",
        _P + "/recover",
        "recover_partition",
        ADMIN,
        "Accept the loss of what only absent replicas hold, where a partition waits for them",
        (ACCEPT_LOSS, EMPTY),
        replies=(_json(partitions.LossReport),),
    ),
    Route(
        "GET",
        _P + "/records/{offset}",
        "fetch_one",
        READ,
        "Fetch one record's value",
        (*ONE_RECORD, IF_NONE_MATCH, RANGE, IF_RANGE),
        replies=(
            _bytes(_VALUE_TYPE, description="The value; the rest of the record is in the head."),
            _bytes(_VALUE_TYPE, description="A range of a large value.", status=206),
            _UNCHANGED,
            _ELSEWHERE,
        ),
    ),
    Route(
        "GET",
        _P + "/offsets",
        "offsets",
        READ,
        "Find the offset at a time, the earliest or the latest",
        OFFSETS,
        replies=(_json(records.Offsets), _ELSEWHERE),
    ),
    Route(
        "GET",
        _P + "/producers/{producer}",
        "describe_producer",
        WRITE,
        "Describe a producer's progress in a partition, or wait until its batch is durable",
        (EPOCH, SEQUENCE, WAIT),
        replies=(_json(records.ProducerProgress),),
    ),
    Route(
        "PUT",
        _P + "/producers/{producer}",
        "fence_producer",
        WRITE,
        "Begin an epoch of a producer in a partition: older ones are refused from now on",
        (needed(EPOCH),),
        replies=(_json(records.ProducerProgress),),
    ),
    Route(
        "PUT",
        _P + "/uploads/{upload}/parts/{part}",
        "upload_part",
        WRITE,
        "Upload a part of a record that is larger than a request",
        body=Body.RECORDS,
        replies=(_json(records.UploadedPart, status=201), _ELSEWHERE),
    ),
    Route(
        "POST",
        _P + "/uploads/{upload}",
        "publish_upload",
        WRITE,
        "Append the record whose parts were uploaded",
        (*RECORD, *UPLOAD, *RECORD_HEADERS, ROUTE),
        body=Body.RECORDS,
        replies=(_ONE_RECEIPT, _ELSEWHERE),
    ),
    Route(
        "DELETE",
        _P + "/uploads/{upload}",
        "drop_upload",
        WRITE,
        "Drop an upload's parts",
        replies=(_NO_CONTENT,),
    ),
    Route(
        "GET",
        _P + "/records/{offset}/history",
        "record_history",
        READ,
        "Tell what became of a record: deliveries, acknowledgements, retries",
        HISTORY,
        replies=(_json(history.RecordHistory),),
    ),
    Route(
        "POST",
        _T + "/search",
        "search",
        READ,
        "Search a topic's records, a step at a time",
        body=Body.JSON,
        document=search.Search,
        replies=(_json(search.Found),),
    ),
    Route(
        "GET",
        _P + "/digest",
        "digest",
        READ,
        "Digest a replica's committed log",
        (TO_INDEX,),
        replies=(_json(records.Digest),),
    ),
    Route(
        "GET",
        _T + "/cursors",
        "list_cursors",
        READ,
        "List a topic's cursors",
        LISTING,
        replies=(_json(cursors.CursorPage),),
    ),
    Route(
        "GET",
        _T + "/cursors/{cursor}",
        "describe_cursor",
        READ,
        "Describe a cursor: positions and lag",
        replies=(_json(cursors.Cursor),),
    ),
    Route(
        "PUT",
        _T + "/cursors/{cursor}",
        "set_cursor",
        READ,
        "Move a cursor, by compare-and-set",
        body=Body.JSON,
        document=cursors.CursorChange,
        replies=(_json(cursors.Cursor),),
    ),
    Route(
        "DELETE",
        _T + "/cursors/{cursor}",
        "delete_cursor",
        READ,
        "Delete a cursor",
        replies=(_NO_CONTENT,),
    ),
    Route(
        "GET",
        _T + "/channels",
        "list_channels",
        DESCRIBE,
        "List a topic's channels",
        LISTING,
        replies=(_json(channels.ChannelPage),),
    ),
    Route(
        "GET",
        _C,
        "describe_channel",
        DESCRIBE,
        "Describe a channel: its settings, and where it stands in each partition",
        replies=(_json(channels.Channel),),
    ),
    Route(
        "PUT",
        _C,
        "create_channel",
        ADMIN,
        "Create a channel, if it isn't there yet",
        body=Body.JSON,
        document=channels.NewChannel,
        replies=(
            _json(channels.Channel, "Created, and open in all partitions.", status=201),
            _json(channels.Channel, "It exists already."),
        ),
    ),
    Route(
        "PATCH",
        _C,
        "update_channel",
        ADMIN,
        "Change a channel's settings by a merge patch",
        (needed(IF_MATCH),),
        body=Body.JSON,
        document=channels.ChannelPatch,
        replies=(_json(channels.Channel),),
    ),
    Route(
        "DELETE",
        _C,
        "delete_channel",
        ADMIN,
        "Delete a channel, and what it knows of each record",
        (IF_MATCH,),
        replies=(_NO_CONTENT,),
    ),
    Route(
        "POST",
        _C + "/receive",
        "receive_jobs",
        READ,
        "Receive records that go to no other consumer until they are late",
        body=Body.JSON,
        document=jobs.Receive,
        replies=(
            Reply(
                200,
                "What was given out; none if there was nothing in time. Or a stream of it.",
                MappingProxyType({JSON_TYPE: jobs.Received, JOBS_TYPE: None, STREAM_TYPE: None}),
            ),
        ),
    ),
    Route(
        "POST",
        _C + "/acks",
        "settle_jobs",
        READ,
        "Acknowledge, refuse, release or extend records that were received",
        body=Body.JSON,
        document=jobs.Acks,
        replies=(_json(jobs.Settled),),
    ),
    Route(
        "PUT",
        _C + "/position",
        "seek_channel",
        READ,
        "Move a channel: what comes after its new position is given out again",
        body=Body.JSON,
        document=jobs.Position,
        replies=(_json(jobs.Positioned),),
    ),
    Route(
        "GET",
        _C + "/aside",
        "list_aside",
        READ,
        "List the records that wait to be tried again",
        JOB_LISTING,
        replies=(_json(jobs.AsidePage),),
    ),
    Route(
        "GET",
        _C + "/dead",
        "list_dead",
        READ,
        "List the dead records",
        JOB_LISTING,
        replies=(_json(jobs.AsidePage),),
    ),
    Route(
        "POST",
        _C + "/dead",
        "settle_dead",
        READ,
        "Replay or drop dead records",
        body=Body.JSON,
        document=jobs.DeadChange,
        replies=(_json(jobs.DeadChanged),),
    ),
    Route(
        "GET",
        _T + "/groups/{group}",
        "describe_group",
        READ,
        "Describe a group: members and cursors",
        replies=(_json(groups.Group),),
    ),
    Route(
        "PUT",
        _T + "/groups/{group}/members/{member}",
        "renew_member",
        READ,
        "Join a group or renew a member's session, and list the members",
        body=Body.JSON,
        document=groups.Renewal,
        replies=(_json(groups.RenewedMember),),
    ),
    Route(
        "DELETE",
        _T + "/groups/{group}/members/{member}",
        "leave_group",
        READ,
        "Leave a group",
        replies=(_NO_CONTENT,),
    ),
    Route(
        "POST",
        "/v1/producers",
        "begin_producer",
        ANY,
        "Get a producer's id and epoch; with a name, its previous holder is refused from now on",
        (KEY,),
        body=Body.JSON,
        document=transactions.NewProducer,
        replies=(_json(transactions.Producer, status=201),),
    ),
    Route(
        "GET", "/v1/sinks", "list_sinks", ANY, "List sinks", LISTING, replies=(_json(transactions.SinkPage),)
    ),
    Route(
        "GET",
        _S,
        "describe_sink",
        WRITE_SINK,
        "Describe a sink: its epoch, and the last batch that was committed",
        replies=(_json(transactions.Sink),),
    ),
    Route(
        "POST",
        _S,
        "begin_sink",
        WRITE_SINK,
        "Begin to drive a sink: older drivers are refused from now on",
        (SINK_EPOCH, ONCE, KEY),
        replies=(_json(transactions.Sink),),
    ),
    Route(
        "DELETE",
        _S,
        "delete_sink",
        WRITE_SINK,
        "Delete a sink: its driver is refused, and its name is free",
        (KEY,),
        replies=(_NO_CONTENT,),
    ),
    Route(
        "POST",
        _S + "/batches/{number}/stages",
        "stage",
        WRITE_STAGE,
        "Stage records of a batch for a partition: they are readable when the batch is committed",
        (*RECORD, *STAGE, *RECORD_HEADERS, ROUTE),
        body=Body.RECORDS,
        replies=(_json(transactions.Staged, status=201),),
    ),
    Route(
        "POST",
        _S + "/batches/{number}/prepared",
        "prepare_stages",
        WRITE_SINK,
        "Keep stages of a batch in a partition, for a commit whose stages fill several requests",
        body=Body.JSON,
        document=transactions.Prepare,
        replies=(_json(transactions.Prepared),),
    ),
    Route(
        "PUT",
        _S + "/batches/{number}",
        "commit_batch",
        WRITE_SINK,
        "Commit a batch: all its stages in all partitions, or nothing",
        body=Body.JSON,
        document=transactions.Commit,
        replies=(_json(transactions.Committed),),
    ),
    Route(
        "GET",
        "/v1/cluster",
        "cluster",
        ANY,
        "Describe the cluster, or wait for its next version",
        (AFTER_VERSION, WAIT),
        replies=(_json(cluster.Cluster), _UNCHANGED),
    ),
    Route(
        "GET",
        "/v1/health",
        "health",
        ANY,
        "Show what is wrong in the cluster, and what to do about it",
        replies=(_json(cluster.Health),),
    ),
    Route("GET", "/v1/nodes", "list_nodes", ANY, "List nodes", replies=(_json(cluster.Nodes),)),
    Route("GET", "/v1/nodes/{node}", "describe_node", ANY, "Describe a node", replies=(_json(cluster.Node),)),
    Route(
        "GET",
        "/v1/nodes/{node}/bundle",
        "node_bundle",
        ADMIN_OF_ALL,
        "Tell what a node says of itself, for those who help: no data of records, no secret",
        replies=(_json(server.NodeBundle),),
    ),
    Route(
        "GET",
        "/v1/admin/nodes",
        "admin_nodes",
        ADMIN_OF_ALL,
        "List nodes as operators see them: weight, zone, draining, what is on each",
        replies=(_json(administration.AdminNodes),),
    ),
    Route(
        "GET",
        _N,
        "admin_node",
        ADMIN_OF_ALL,
        "Describe a node as operators see it, and what its drain still waits for",
        replies=(_json(administration.AdminNode),),
    ),
    Route(
        "PATCH",
        _N,
        "update_node",
        ADMIN_OF_ALL,
        "Set a node's weight or zone in place of the announced one",
        (needed(IF_MATCH),),
        body=Body.JSON,
        document=administration.NodePatch,
        replies=(_json(administration.AdminNode),),
    ),
    Route(
        "POST",
        _N + "/drain",
        "drain_node",
        ADMIN_OF_ALL,
        "Empty a node: its leaders and replicas go to other nodes",
        replies=(_json(administration.AdminNode, "The drain has begun.", status=202),),
    ),
    Route(
        "POST",
        _N + "/undrain",
        "undrain_node",
        ADMIN_OF_ALL,
        "Let a node hold replicas and lead again",
        replies=(_json(administration.AdminNode),),
    ),
    Route(
        "DELETE",
        _N,
        "remove_node",
        ADMIN_OF_ALL,
        "Remove a node that is drained and stopped",
        replies=(_json(administration.RemovedNode),),
    ),
    Route(
        "GET",
        _A,
        "describe_placement",
        ADMIN_OF_ALL,
        "Describe where a partition is and where it should be",
        replies=(_json(administration.PartitionPlacement),),
    ),
    Route(
        "PUT",
        _A + "/pin",
        "pin_partition",
        ADMIN_OF_ALL,
        "Pin a partition to nodes: its replicas move there, and stay",
        body=Body.JSON,
        document=administration.NewPin,
        replies=(_json(administration.PartitionPlacement),),
    ),
    Route(
        "DELETE",
        _A + "/pin",
        "unpin_partition",
        ADMIN_OF_ALL,
        "Unpin a partition: it is placed by rank again",
        replies=(_json(administration.PartitionPlacement),),
    ),
    Route(
        "POST",
        _A + "/leader",
        "prefer_leader",
        ADMIN_OF_ALL,
        "Choose the node that should lead a partition",
        body=Body.JSON,
        document=administration.NewLeader,
        replies=(_json(administration.PartitionPlacement, "Chosen; the leadership follows.", status=202),),
    ),
    Route(
        "GET",
        "/v1/admin/operations",
        "list_operations",
        ADMIN_OF_ALL,
        "List the changes that are under way: drains, growth, pins, moves, replicas that join or leave",
        LISTING,
        replies=(_json(administration.OperationPage),),
    ),
    Route(
        "GET",
        "/v1/admin/operations/{operation}",
        "describe_operation",
        ADMIN_OF_ALL,
        "Describe a change that is under way",
        replies=(_json(administration.Operation),),
    ),
    Route(
        "DELETE",
        "/v1/admin/operations/{operation}",
        "cancel_operation",
        ADMIN_OF_ALL,
        "Cancel a change that is under way: the wanted state is set back",
        replies=(_json(administration.CancelledOperation),),
    ),
    Route(
        "GET",
        "/v1/admin/balance",
        "describe_balance",
        ADMIN_OF_ALL,
        "Show the load and score of each node, and what the balance by load would do",
        replies=(_json(administration.Balance),),
    ),
    Route(
        "POST",
        "/v1/admin/balance",
        "balance",
        ADMIN_OF_ALL,
        "Let the balance by load make one move now, if one helps, at any hour",
        replies=(_json(administration.Balance),),
    ),
    Route(
        "GET",
        "/v1/admin/tokens",
        "list_tokens",
        ADMIN_OF_ALL,
        "List the tokens and certificates that clients may use, without their secrets",
        replies=(_json(access.Tokens),),
    ),
    Route(
        "POST",
        "/v1/admin/tokens",
        "create_token",
        ADMIN_OF_ALL,
        "Make a token, which this answer alone contains, or accept a client certificate",
        body=Body.JSON,
        document=access.NewToken,
        replies=(_json(access.CreatedToken, "Created.", status=201),),
    ),
    Route(
        "GET",
        "/v1/admin/tokens/{token}",
        "describe_token",
        ADMIN_OF_ALL,
        "Describe a token by its id",
        replies=(_json(access.Token),),
    ),
    Route(
        "DELETE",
        "/v1/admin/tokens/{token}",
        "revoke_token",
        ADMIN_OF_ALL,
        "Revoke a token by its id: requests with it are refused",
        replies=(_NO_CONTENT,),
    ),
    Route(
        "GET",
        "/v1/admin/limits",
        "list_principal_limits",
        ADMIN_OF_ALL,
        "List the limits of principals; those of `*` hold for each principal without some of its own",
        replies=(_json(access.AllLimits),),
    ),
    Route(
        "GET",
        "/v1/admin/limits/{principal}",
        "describe_principal_limits",
        ADMIN_OF_ALL,
        "Describe the limits of a principal, or of `*`",
        replies=(_json(access.PrincipalLimits),),
    ),
    Route(
        "PUT",
        "/v1/admin/limits/{principal}",
        "set_principal_limits",
        ADMIN_OF_ALL,
        "Set all limits of a principal, or of `*`; {} removes them",
        (needed(IF_MATCH),),
        body=Body.JSON,
        document=access.NewLimits,
        replies=(_json(access.PrincipalLimits),),
    ),
    Route(
        "GET",
        "/v1/whoami",
        "whoami",
        ANY,
        "Tell who asks, what that principal may do, and its limits",
        replies=(_json(access.WhoAmI),),
    ),
    Route(
        "GET",
        "/v1/trace",
        "trace",
        ANY,
        "Tell what happened to records and who did it, a step at a time",
        TRACE,
        replies=(_json(trace.TraceFound),),
    ),
    Route(
        "GET",
        "/v1/datagram-key",
        "datagram_key",
        ANY,
        "Tell the key with which the credential that asks appends by datagram",
        replies=(_json(access.DatagramKey),),
    ),
    Route(
        "GET", "/v1/version", "version", PUBLIC, "Tell the server's version", replies=(_json(server.Version),)
    ),
    Route(
        "GET",
        "/v1/limits",
        "limits",
        ANY,
        "Tell the limits of requests",
        replies=(_json(server.RequestLimits),),
    ),
    Route("GET", "/livez", "livez", PUBLIC, "Tell whether the node lives", replies=(_json(server.Alive),)),
    Route(
        "GET",
        "/readyz",
        "readyz",
        PUBLIC,
        "Tell whether the node serves",
        (READY_REPLICAS,),
        replies=(_json(server.Ready), _json(server.NotReady, "It does not serve yet.", status=503)),
    ),
    Route(
        "GET",
        "/metrics",
        "metrics",
        METRICS,
        "Metrics in Prometheus' text format, or as OpenMetrics",
        METRICS_DETAIL,
        replies=(_bytes("text/plain", "application/openmetrics-text"),),
    ),
    Route(
        "GET",
        "/openapi.json",
        "openapi",
        PUBLIC,
        "This API as an OpenAPI document",
        replies=(_bytes(JSON_TYPE),),
    ),
    Route(
        "GET",
        "/console",
        "console_moved",
        PUBLIC,
        "Go to the console",
        replies=(Reply(308, "To `/console/`."),),
    ),
    Route(
        "GET",
        "/console/",
        "console",
        PUBLIC,
        "The web console",
        (IF_NONE_MATCH,),
        replies=(_bytes("text/html"), _UNCHANGED),
    ),
    Route(
        "GET",
        "/console/{file}",
        "console_file",
        PUBLIC,
        "A file of the web console",
        (IF_NONE_MATCH,),
        replies=(
            _bytes("text/html", "text/javascript", "text/css", "image/svg+xml", "text/plain"),
            _UNCHANGED,
        ),
    ),
    Route("GET", "/docs", "docs", PUBLIC, "This API as a page", replies=(_bytes("text/html"),)),
    Route(
        "GET",
        "/docs/errors",
        "docs",
        PUBLIC,
        "This API as a page: where the types of problems lead",
        replies=(_bytes("text/html"),),
    ),
)


@dataclass(slots=True)
class _Step:
    """A node of the tree: literal segments first, else one parameter."""

    literals: dict[str, _Step] = field(default_factory=dict)
    parameter: str = ""
    below_parameter: _Step | None = None
    operations: dict[str, str] = field(default_factory=dict)


def _grow(routes: Iterable[Route]) -> _Step:
    root = _Step()
    for route in routes:
        step = root
        for segment in split_path(route.template):
            if not segment.startswith("{"):
                step = step.literals.setdefault(segment, _Step())
                continue
            name = segment[1:-1]
            assert step.parameter in ("", name), f"{route.template}: {step.parameter} and {name}"
            step.parameter = name
            step.below_parameter = step.below_parameter or _Step()
            step = step.below_parameter
        assert route.method not in step.operations, f"{route.method} {route.template} occurs twice"
        step.operations[route.method] = route.operation
    return root


_ROOT: Final = _grow(ROUTES)


def match(method: str, path: str) -> Match:
    """Return the operation for the path of a request target, with its parameters decoded.

    Raises:
        Problem: 404 `not_found`, 405 with `Allow`, or 422 for a topic or number that could never be one.
    """
    try:
        segments = split_path(path)
    except HttpError as error:
        raise problem_of(error) from error
    return match_segments(method, segments, path=path)


def match_segments(method: str, segments: tuple[str, ...], *, path: str) -> Match:
    """Return what `match` does, for segments already split and decoded (`Request.segments`)."""
    step: _Step | None = _ROOT
    params: dict[str, str] = {}
    for segment in segments:
        assert step is not None
        below = step.literals.get(segment)
        if below is None and step.parameter and segment:
            below = step.below_parameter
            params[step.parameter] = segment
        step = below
        if step is None:
            break
    if step is None or not step.operations:
        raise Problem("not_found", "there is no such path", field="path", value=path)
    operation = step.operations.get("GET" if method == "HEAD" else method)
    if operation is None:
        allowed = ", ".join(_allowed(step.operations))
        raise Problem(
            "method_not_allowed", field="method", value=method, limit=allowed, headers=[("Allow", allowed)]
        )
    _check(params)
    return Match(operation, params)


NEEDS: Final = {route.operation: route.needs for route in ROUTES}
BODIES: Final = {route.operation: route.body for route in ROUTES}
_QUERIES: Final = {route.operation: frozenset(route.query) for route in ROUTES}


def check_query(operation: str, query: Mapping[str, str]) -> None:
    """Refuse a parameter that the operation does not read: 422, as a typing error would go unnoticed."""
    for name in query:
        if name not in _QUERIES[operation]:
            known = ", ".join(sorted(_QUERIES[operation])) or "none"
            raise Problem(
                "invalid", "there is no such query parameter here", field=name, value=query[name], limit=known
            )


def _allowed(operations: Mapping[str, str]) -> list[str]:
    return sorted([*operations, "HEAD"] if "GET" in operations else operations)


def _check(params: Mapping[str, str]) -> None:
    for name, value in params.items():
        if name in ("topic", "cursor", "channel", "sink", "group", "member", "upload"):
            check_name(value, field=name)
        elif name in ("partition", "offset", "number", "part", "version"):
            if not _NUMBER.match(value):
                raise Problem("invalid", f"{name} is a decimal number", field=name, value=value)
            if name in ("number", "version") and int(value) > MAX_NUMBER:
                raise Problem("invalid", f"{name} is too large", field=name, value=value, limit=MAX_NUMBER)
