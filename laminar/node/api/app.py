"""The application that a shard's HTTP server serves: from a route's operation to its handler.

Handlers of the hot path (append to a partition led here) return a future and make no task; all others are
coroutines. The checks of a request's head, which precede the read of its body, are in `admission`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from laminar.http.api.append_body import NDJSON_TYPE, Append, parses_long
from laminar.http.api.cross_site import Sites
from laminar.http.api.deadlines import COMMIT_CHECK_S, COMMIT_WAIT_S
from laminar.http.api.limits import Limits
from laminar.http.api.names import AUDIT_TOPIC, SYSTEM_TOPICS, TRACE_TOPIC
from laminar.http.api.parameters import IMPORT
from laminar.http.api.problems import Problem
from laminar.http.api.routes import ROUTES
from laminar.http.protocol.messages import Later, Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access.guard import Guard
from laminar.node.access.metering import metered
from laminar.node.access.principals import Principal
from laminar.node.api.admin.balance import BalanceRoutes
from laminar.node.api.admin.led_partitions import LedPartitions
from laminar.node.api.admin.limits import LimitRoutes
from laminar.node.api.admin.nodes import NodeRoutes
from laminar.node.api.admin.operation_routes import OperationRoutes
from laminar.node.api.admin.operations import UnderWay
from laminar.node.api.admin.partitions import PlacementRoutes
from laminar.node.api.admin.seen_views import METHOD as VIEW_SEEN
from laminar.node.api.admin.seen_views import SeenViews
from laminar.node.api.admin.tokens import TokenRoutes
from laminar.node.api.admission import OF_ADMINS, Admission, asked
from laminar.node.api.audit.audit_log import AuditLog, Source, by_datagram
from laminar.node.api.bundle.bundle import BundleRoute
from laminar.node.api.channels.channels import ChannelRoutes
from laminar.node.api.channels.gates import ChannelGates
from laminar.node.api.channels.jobs import JobRoutes
from laminar.node.api.channels.lookup import ChannelLookup
from laminar.node.api.channels.states import ChannelStates
from laminar.node.api.channels.steps import ChannelSteps
from laminar.node.api.cluster.accept_loss import AcceptLossRoutes
from laminar.node.api.cluster.cluster import ClusterRoutes
from laminar.node.api.cluster.console import ConsoleRoutes
from laminar.node.api.cluster.cut_points import CutPoints
from laminar.node.api.cluster.health import Watch
from laminar.node.api.cluster.key_routes import KeyRoutes
from laminar.node.api.cluster.replica_status import PartitionRoutes, ReplicaStatus
from laminar.node.api.cluster.request_limits import RequestLimitsRoute
from laminar.node.api.cluster.route_changes import RouteChanges
from laminar.node.api.cluster.topic_sums import TopicSumsRoute
from laminar.node.api.cluster.topics import TopicRoutes
from laminar.node.api.common.forwarding import (
    FOR_PRINCIPAL,
    IN_TURNS,
    Exchange,
    Step,
    answering,
    asking,
    requester_of,
)
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.consumers.cursor_places import CursorPlaces
from laminar.node.api.consumers.cursor_steps import CursorSteps
from laminar.node.api.consumers.cursors import CursorRoutes
from laminar.node.api.consumers.gates import Gates
from laminar.node.api.consumers.groups import GroupRoutes
from laminar.node.api.consumers.reclaim import Reclaims
from laminar.node.api.delayed.records import DelayedRoutes
from laminar.node.api.delayed.sends import DelayedSends
from laminar.node.api.delayed.steps import DelayedSteps
from laminar.node.api.find.history import HistoryRoutes
from laminar.node.api.find.search import SearchRoutes
from laminar.node.api.find.steps import SearchSteps
from laminar.node.api.health.cluster_health import ClusterHealth
from laminar.node.api.health.current import CurrentReplicas
from laminar.node.api.health.shard_health import ShardHealth
from laminar.node.api.matched import Matched, matched_of
from laminar.node.api.metrics.durations import Durations
from laminar.node.api.metrics.route import MetricsRoute
from laminar.node.api.metrics.shard_numbers import ShardNumbers
from laminar.node.api.passed_requests import PassedRequests
from laminar.node.api.records.append import AppendRoutes
from laminar.node.api.records.datagrams import Datagrams
from laminar.node.api.records.delete_records import DeleteRecordsRoute
from laminar.node.api.records.fetch import FetchRoutes
from laminar.node.api.records.new_ids import NewIds
from laminar.node.api.records.producer_progress import ProducerProgressRoutes
from laminar.node.api.records.record_value import RecordValueRoutes
from laminar.node.api.records.topic_append import TopicAppends
from laminar.node.api.records.uploads import UploadRoutes
from laminar.node.api.trace.trace_route import TraceRoute
from laminar.node.api.trace.trace_writer import TraceWriter
from laminar.node.api.transactions.abandoned_pins import AbandonedPins
from laminar.node.api.transactions.abandoned_stages import AbandonedStages
from laminar.node.api.transactions.producers import ProducerRoutes
from laminar.node.api.transactions.sinks import SinkRoutes
from laminar.node.api.transactions.steps import SinkSteps
from laminar.node.host.settings import TOKENS

if TYPE_CHECKING:
    from laminar.node.runtime.process import Method


_IMPORT = IMPORT.name.lower()

# The audit records operations of admins; of `_CHECKED_LATER` it records what their handlers refuse.
_CHECKED_LATER = frozenset({"begin_producer", "prepare_stages", "commit_batch"})
_AUDITED = OF_ADMINS | _CHECKED_LATER
_AUDIT_TARGET = f"/v1/topics/{AUDIT_TOPIC}/partitions/0/records"

# Operations whose bodies are records. One that takes long is parsed in a thread.
_PARSED = frozenset({"append_to_topic", "append_to_partition", "stage"})

NO_ROOM_MS = 1000
"""After how long a client that has too many waiting requests should ask again."""

Handler = Callable[..., Response | Awaitable[Response]]


def body_takes_long(request: Request) -> bool:
    """Return whether a large body is to be decoded in a thread: one of records that takes long.

    One for a topic always does: its records are divided among partitions.
    """
    operation = matched_of(request.head).operation
    return operation == "append_to_topic" or (operation in _PARSED and parses_long(request))


class Api:
    """The HTTP application of one shard.

    `methods` are the handlers of other shards' requests, by method name.
    """

    def __init__(self, host: HostServices) -> None:
        self._host = host
        self._exchange = Exchange(host.transport, code_version=lambda: host.view.code_version)
        self._locator = Locator(host, self._exchange)
        leaders = LeaderCall(host, self._locator)
        settings = host.settings
        most_bytes = settings.max_append_bytes
        self.limits = Limits(
            max_body_bytes=most_bytes, max_record_bytes=min(Limits().max_record_bytes, most_bytes)
        )
        self._guard: Guard | None = None
        if settings.access == TOKENS:
            self._guard = Guard(host.view, host.clock, secrets=host.secrets)
        states = ReplicaStatus(host, self._exchange, catch_up_progress=host.catch_up_progress)
        topics = TopicLookup(host.view)
        placement = PlacementCall(host)
        sums = TopicSumsRoute(host, self._exchange)
        topic_routes = TopicRoutes(host, topics, states, placement, sums)
        led = LedPartitions(host, self._exchange)
        nodes = NodeRoutes(host, led, placement)
        places = PlacementRoutes(host, topics, placement)
        under_way = UnderWay(host)
        changes = OperationRoutes(host, nodes, places, placement, under_way)
        balance = BalanceRoutes(host)
        limits = LimitRoutes(host, placement)
        seen = SeenViews(host, self._exchange)
        tokens = TokenRoutes(host, placement, limits, seen)
        gates = Gates(host, leaders)
        steps = CursorSteps(host, leaders, topics, gates)
        partitions = PartitionRoutes(host, topics, states, drains=steps.drains)
        cut_points = CutPoints(host, leaders)
        routes = RouteChanges(host, topics, placement, cut_points)
        watch = Watch(host)
        current = CurrentReplicas(host, self._exchange)
        cluster = ClusterRoutes(host, watch, lagging=current.reasons)
        shard_health = ShardHealth(host, watch)
        self._imports = shard_health.imports
        health = ClusterHealth(host, self._exchange, shard_health, led, under_way)
        console = ConsoleRoutes(is_on=settings.console == "on")
        cursor_places = CursorPlaces(host, leaders, topics, steps)
        cursors = CursorRoutes(topics, steps, cursor_places)
        reclaims = Reclaims(host, leaders, topics, steps)
        channel_states = ChannelStates(host, leaders)
        lookup = ChannelLookup(host, topics)
        channels = ChannelRoutes(host, lookup, channel_states, placement, steps)
        channel_steps = ChannelSteps(host.deliveries, leaders)
        jobs = JobRoutes(host, lookup, channel_steps)
        channel_gates = ChannelGates(host, leaders, gates, host.deliveries)
        delayed_steps = DelayedSteps(host.publishers, leaders)
        delayed_sends = DelayedSends(host.publishers, leaders)
        delayed = DelayedRoutes(host, topics, delayed_steps)
        search_steps = SearchSteps(host, leaders)
        search = SearchRoutes(host, topics, search_steps)
        groups = GroupRoutes(host, leaders, topics, cursors)
        fetch = FetchRoutes(host, self._exchange, leaders, topics)
        recover = AcceptLossRoutes(host, self._exchange, topics, states, release=host.release)
        new_ids = NewIds(host)
        progress = ProducerProgressRoutes(host, fetch, new_ids)
        sink_steps = SinkSteps(host, leaders, topics, host.deliveries)
        sinks = SinkRoutes(host, sink_steps, topics, make_topic=topic_routes.make, limits=self.limits)
        AbandonedStages(host, sink_steps)
        AbandonedPins(host, host.deliveries, sink_steps)
        self._datagrams = Datagrams(
            host,
            self._locator,
            topics,
            sock=host.datagram_socket,
            limits=self.limits,
            meter_of=None if self._guard is None else self._guard.meter_of,
            new_ids=new_ids,
            on_refused=self._datagram_refused,
        )
        self._audit = AuditLog(
            host, self._append_to_audit, topic_routes.make, makes_topic=settings.access == TOKENS
        )
        TraceWriter(host, host.traces, self._append_to_trace, topic_routes.make)
        durations = Durations()
        self.answered = durations.note  # directly, without a method around it: it is called for each answer
        numbers = ShardNumbers(
            host,
            watch,
            topics,
            parts={"datagrams": self._datagrams.statistics, "audit": self._audit.statistics},
            refused=lambda: {} if self._guard is None else self._guard.meters.refused,
            requests=durations.stored,
        )
        metrics = MetricsRoute(host, topics, numbers)
        bundle = BundleRoute(host, self._exchange, health, metrics)
        uploads = UploadRoutes(host, leaders, topics, fetch, limits=self.limits)
        self._append = AppendRoutes(
            host, self._exchange, leaders, topics, limits=self.limits, new_ids=new_ids
        )
        self._to_topics = to_topics = TopicAppends(
            host,
            self._exchange,
            leaders,
            topics,
            parse=self._append.parse,
            new_ids=new_ids,
        )
        self._topics = topics
        self._admission = Admission(
            host,
            self._guard,
            topics,
            self._locator,
            self._audit,
            sites=Sites(
                [settings.host, settings.advertise_host, socket.gethostname(), *settings.hosts],
                settings.origins,
            ),
            max_body_bytes=self.limits.max_body_bytes,
        )
        self.head = self._admission.head  # directly, as `answered` is
        request_limits = RequestLimitsRoute(self.limits, max_upload_bytes=settings.max_upload_bytes)
        self._handlers: dict[str, Handler] = {
            "list_topics": topic_routes.topics,
            "create_topic": topic_routes.create,
            "describe_topic": topic_routes.topic,
            "update_topic": topic_routes.update,
            "delete_topic": topic_routes.delete,
            "list_partitions": partitions.partitions,
            "describe_partition": partitions.partition,
            "reclaim_partition": reclaims.delete,
            "list_routes": KeyRoutes(topics).routes,
            "begin_route": routes.begin,
            "describe_route": routes.describe,
            "cancel_route": routes.cancel,
            "append_to_topic": to_topics.topic,
            "append_to_partition": self._append.partition,
            "fetch": fetch.records,
            "fetch_one": RecordValueRoutes(host, fetch, self._locator).value,
            "upload_part": uploads.part,
            "publish_upload": uploads.publish,
            "drop_upload": uploads.drop,
            "search": search.search,
            "record_history": HistoryRoutes(fetch, search_steps.pace).history,
            "list_delayed": delayed.listing,
            "describe_delayed": delayed.describe,
            "change_delayed": delayed.change,
            "cancel_delayed": delayed.cancel,
            "delete_records": DeleteRecordsRoute(host, fetch, trimmable_index=host.trimmable_index).records,
            "recover_partition": recover.recover,
            "offsets": fetch.offsets,
            "begin_producer": ProducerRoutes(host, sinks).begin,
            "describe_producer": progress.describe,
            "fence_producer": progress.fence,
            "digest": fetch.digest,
            "list_cursors": cursors.cursors,
            "describe_cursor": cursors.cursor,
            "set_cursor": cursors.set,
            "delete_cursor": cursors.delete,
            "list_channels": channels.channels,
            "describe_channel": channels.channel,
            "create_channel": channels.create,
            "update_channel": channels.update,
            "delete_channel": channels.delete,
            "receive_jobs": jobs.receive,
            "settle_jobs": jobs.settle,
            "seek_channel": jobs.seek,
            "list_aside": jobs.aside,
            "list_dead": jobs.dead,
            "settle_dead": jobs.settle_dead,
            "describe_group": groups.group,
            "renew_member": groups.renew,
            "leave_group": groups.leave,
            "describe_sink": sinks.describe,
            "begin_sink": sinks.begin,
            "list_sinks": sinks.sinks,
            "delete_sink": sinks.delete,
            "stage": sinks.stage,
            "prepare_stages": sinks.prepare_stages,
            "commit_batch": sinks.commit,
            "cluster": cluster.cluster,
            "health": health.health,
            "list_nodes": cluster.nodes,
            "describe_node": cluster.node,
            "node_bundle": bundle.bundle,
            "admin_nodes": nodes.nodes,
            "admin_node": nodes.node,
            "update_node": nodes.update,
            "drain_node": nodes.drain,
            "undrain_node": nodes.undrain,
            "remove_node": nodes.remove,
            "describe_placement": places.describe,
            "pin_partition": places.pin,
            "unpin_partition": places.unpin,
            "prefer_leader": places.leader,
            "list_operations": changes.operations,
            "describe_operation": changes.operation,
            "cancel_operation": changes.cancel,
            "describe_balance": balance.describe,
            "balance": balance.act,
            "list_tokens": tokens.tokens,
            "create_token": tokens.create,
            "describe_token": tokens.token,
            "revoke_token": tokens.revoke,
            "list_principal_limits": limits.all,
            "describe_principal_limits": limits.describe,
            "set_principal_limits": limits.set,
            "whoami": tokens.whoami,
            "trace": TraceRoute(host, topics, search).trace,
            "datagram_key": tokens.datagram_key,
            "livez": cluster.livez,
            "readyz": cluster.readyz,
            "version": cluster.version,
            "limits": request_limits.limits,
            "metrics": metrics.metrics,
            "console": console.index,
            "console_file": console.file,
            "console_moved": console.moved,
            "openapi": cluster.openapi,
            "docs": cluster.docs,
        }
        # Transport methods that clients' requests call at other shards.
        client_steps: dict[str, Step] = {
            "describe": states.on_describe,
            "cursor": steps.on_cursor,
            "take_cursor": cursor_places.on_take_cursor,
            "group": groups.on_group,
            "channel_states": channel_states.on_channel_states,
            "channel_receive": channel_steps.on_receive,
            "channel_settle": channel_steps.on_settle,
            "channel_ended": channel_steps.on_ended,
            "channel_seek": channel_steps.on_seek,
            "channel_aside": channel_steps.on_aside,
            "delayed": delayed_steps.on_delayed,
            "delayed_list": delayed_steps.on_delayed_list,
            "search_bounds": search_steps.on_bounds,
            "search_scan": search_steps.on_scan,
            "sinks": sink_steps.on_sinks,
            "look_up": to_topics.on_look_up,
        }
        assert client_steps.keys() == IN_TURNS, client_steps.keys() ^ IN_TURNS
        passed = PassedRequests(host, self._guard, client_steps, carry_out=self._carry_out)
        self.methods: dict[str, Method] = {
            "http": answering(passed.on_http),
            FOR_PRINCIPAL: answering(passed.on_for_principal),
            "leader": answering(self._locator.on_leader),
            "cuts": answering(cut_points.on_cuts),
            "drained": answering(gates.on_drained),
            "reclaim": answering(reclaims.on_reclaim),
            "channel_drained": answering(channel_gates.on_channel_drained),
            "delayed_batch": answering(delayed_sends.on_delayed_batch),
            "accept_loss": answering(recover.on_accept_loss),
            "led": answering(led.on_led),
            VIEW_SEEN: answering(seen.on_view_seen),
            "stats": metrics.on_stats,
            "partition_stats": metrics.on_partition_stats,
            "health": watch.on_health,
            "shard_sums": sums.on_shard_sums,
            "node_sums": answering(sums.on_node_sums),
            "shard_behind": current.on_shard_behind,
            "node_behind": answering(current.on_node_behind),
            "shard_health": shard_health.on_shard_health,
            "node_health": answering(health.on_node_health),
            "shard_bundle": bundle.on_shard_bundle,
            "node_bundle": answering(bundle.on_node_bundle),
        } | {name: answering(handler) for name, handler in client_steps.items()}
        unanswered = {route.operation for route in ROUTES} ^ self._handlers.keys()
        assert not unanswered, f"routes without a handler, or handlers without a route: {unanswered}"
        # An append that waits for the outcome of a partition's seal does not wake its quiesced group.
        self._appending = host.watched(
            lambda each: each.appends.waits or not each.state.succession.takes_records
        )
        host.every(COMMIT_CHECK_S, self._sweep, to_the_end=True)

    # -- the application -------------------------------------------------------------------

    def parses_long(self, request: Request) -> bool:
        """Return whether a body is to be decoded in a thread (see `body_takes_long`)."""
        return body_takes_long(request)

    def parse(self, request: Request) -> Append | None:
        """Return the decoded records of an append or stage; None for other requests. Called in a thread."""
        operation = matched_of(request.head).operation
        if operation == "append_to_topic":
            return self._to_topics.parse(request)
        return self._append.parse(request) if operation in _PARSED else None

    def handle(self, request: Request) -> Response | Awaitable[Response]:
        """Answer a request by its route's handler."""
        matched: Matched = request.head.memo or matched_of(request.head)
        if self._guard is not None:
            principal = matched.principal or request.connection.context
            if principal is None:
                raise AssertionError(f"{matched.operation} was not permitted to any principal")
            if principal.found_in is not None and not self._guard.holds(principal):
                matched = self._admission.permit_again(self._guard, request, matched)
        answer: Response | Awaitable[Response]
        if matched.operation in _AUDITED:
            answer = self._audited(request, matched)
        else:
            answer = self._carry_out(request, matched)
        if type(answer) is Later or not asyncio.iscoroutine(answer):
            return answer
        return asking(requester_of(request, self._host.node), answer)

    async def _audited(self, request: Request, matched: Matched) -> Response:
        """Answer a request and note in the audit how it ended. The answer does not wait for the audit."""
        is_call = matched.operation in OF_ADMINS
        try:
            answer = self._carry_out(request, matched)
            response = answer if isinstance(answer, Response) else await answer
        except BaseException as error:
            self._audit.failed(asked(request, matched), error, is_call=is_call)
            raise
        if is_call:
            self._audit.answered(asked(request, matched), response)
        return response

    def _carry_out(self, request: Request, matched: Matched) -> Response | Awaitable[Response]:
        if matched.most_document_bytes is not None:
            matched.check_document(len(request.body))
        if matched.may_wait:
            full = request.connection.read_refusal()
            if full is not None:
                raise _no_room(*full)
            request.answer_bytes = matched.answer_bytes or request.answer_bytes
        answer: Response | Awaitable[Response]
        if matched.is_of_topic and not self._known(matched):
            answer = self._handle_after_refresh(request, matched)
        else:
            self._check_import(request, matched)
            answer = self._handlers[matched.operation](request, **matched.params)
        if self._guard is not None and matched.is_counted:
            meter = (matched.principal or request.connection.context).meter
            if meter is not None and meter.is_limited:
                return metered(answer, request, meter, self._host.clock)
        return answer

    def _known(self, matched: Matched) -> bool:
        """Return whether this shard's view knows the topic and partition of a path.

        If not, the view may be old.
        """
        if matched.place in self._host.partitions:
            return True
        return self._topics.knows(matched.params["topic"], matched.params.get("partition"))

    async def _handle_after_refresh(self, request: Request, matched: Matched) -> Response:
        """Refresh the view, which may have been old, then handle a request for an unknown topic."""
        await self._host.refresh_view()
        self._check_import(request, matched)
        answer = self._handlers[matched.operation](request, **matched.params)
        return answer if isinstance(answer, Response) else await answer

    def _check_import(self, request: Request, matched: Matched) -> None:
        """Refuse a request that only the importer of a topic may make. Raises `Problem`."""
        if not matched.waits_for_import:
            return
        topic = matched.params.get("topic")
        if topic is None and matched.operation == "stage":
            topic = request.query.get("topic")
        if topic is not None:
            self._topics.check_import(topic, request.headers)
        if topic is not None and _IMPORT in request.headers:
            self._imports.note(topic, request.headers[_IMPORT])

    # -- life ------------------------------------------------------------------------------

    @property
    def max_body_bytes(self) -> int:
        """The maximum size of a request's body."""
        return self.limits.max_body_bytes

    async def start(self) -> None:
        """Begin to receive datagrams."""
        await self._datagrams.serve()

    def close(self) -> None:
        """Stop receiving datagrams; log the number of audit records that were not written."""
        self._datagrams.close()
        self._audit.close()

    # -- what its parts ask of it ----------------------------------------------------------

    def _datagram_refused(
        self, topic: str, partition: int, credential: str, peer: str, problem: Problem
    ) -> None:
        """Note in the audit that a datagram of a known credential was refused, as for a request over HTTP."""
        record = self._host.view.credentials.get(credential)
        if record is not None:
            sender = Principal(record.name, credential=record.id)
            self._audit.failed(
                by_datagram(topic, partition, sender, peer), problem, is_call=topic in SYSTEM_TOPICS
            )

    async def _append_to_audit(self, lines: bytes, key: str) -> None:
        """Append records to `_audit`, here or at its leader.

        Repeated with the same key, they are stored once.
        """
        head = RequestHead("POST", _AUDIT_TARGET, {"content-type": NDJSON_TYPE, "idempotency-key": key})
        params = {"topic": AUDIT_TOPIC, "partition": "0"}
        head.memo = Matched("append_to_partition", params, None, Principal("(audit)"))
        answer = self._append.partition(Request(head, lines, Source()), **params)
        if not isinstance(answer, Response):
            await answer

    async def _append_to_trace(self, append: Append) -> None:
        """Append events to `_trace`, here or at its leaders.

        It is not repeated: there is no idempotency key.
        """
        head = RequestHead("POST", f"/v1/topics/{TRACE_TOPIC}/records", {})
        params = {"topic": TRACE_TOPIC}
        head.memo = Matched("append_to_topic", params, None, Principal("(trace)"))
        request = Request(head, b"", Source("trace"))
        request.parsed = append
        await self._to_topics.topic(request, **params)

    def _sweep(self) -> None:
        """Fail all appends that have waited too long for a majority.

        One sweep saves a timer for each append.
        """
        for partition in self._appending():
            partition.appends.expire(older_than_s=COMMIT_WAIT_S)


def _no_room(under_way: int, most: int) -> Problem:
    return Problem(
        "overloaded",
        "too many requests of this client that may wait are under way at this shard",
        field="requests",
        value=under_way + 1,
        limit=most,
        retry_after_ms=NO_ROOM_MS,
        outcome="not_applied",
    )
