"""The application that a shard's HTTP server serves: from a route's operation to its handler.

Handlers of the hot path (append to a partition led here) return a future and make no task; all others are
coroutines. The checks of a request's head, which precede the read of its body, are here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from laminar.http.api.append_body import NDJSON_TYPE, Append
from laminar.http.api.cross_site import Sites
from laminar.http.api.deadlines import COMMIT_CHECK_S, COMMIT_WAIT_S
from laminar.http.api.documents import server as documents
from laminar.http.api.documents.shared import MAX_PARTITIONS, MAX_REPLICAS
from laminar.http.api.documents.transactions import MAX_STAGES
from laminar.http.api.names import AUDIT_TOPIC, SYSTEM_TOPICS, TRACE_TOPIC
from laminar.http.api.parameters import (
    IMPORT,
    MAX_FETCH_BYTES,
    MAX_FETCH_RECORDS,
    MAX_UPLOAD_PARTS,
    MAX_WAIT_MS,
)
from laminar.http.api.problem_response import problem_response
from laminar.http.api.problems import Problem
from laminar.http.api.records import Limits
from laminar.http.api.routes import NEEDS, ROUTES
from laminar.http.protocol.flows import Flow
from laminar.http.protocol.messages import WAIT, Later, Request, Response
from laminar.http.protocol.request_head import (
    LONGEST_HEAD_BYTES,
    LONGEST_TARGET_BYTES,
    MOST_HEADERS,
    RequestHead,
)
from laminar.node.access.guard import Guard
from laminar.node.access.metering import metered
from laminar.node.access.principals import ANONYMOUS, UNPROVEN, Principal, principal_of
from laminar.node.api.admin.balance import BalanceRoutes
from laminar.node.api.admin.led_partitions import LedPartitions
from laminar.node.api.admin.limits import LimitRoutes
from laminar.node.api.admin.nodes import NodeRoutes
from laminar.node.api.admin.operation_routes import OperationRoutes
from laminar.node.api.admin.partitions import PlacementRoutes
from laminar.node.api.admin.seen_views import METHOD as VIEW_SEEN
from laminar.node.api.admin.seen_views import SeenViews
from laminar.node.api.admin.tokens import TokenRoutes
from laminar.node.api.audit.audit_log import REFUSED, Asked, AuditLog, Source, by_datagram
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
from laminar.node.api.cluster.route_changes import RouteChanges
from laminar.node.api.cluster.topic_sums import TopicSumsRoute
from laminar.node.api.cluster.topics import TopicRoutes
from laminar.node.api.common.forwarding import (
    FOR_PRINCIPAL,
    FORWARDED,
    IN_TURNS,
    Exchange,
    Forwarder,
    Step,
    answering,
    ask_for,
    asking,
    decode_for_principal,
    decode_passed,
    encode_response,
    requester_of,
)
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.passed_turns import PassedTurns
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
from laminar.node.api.records.append import AppendRoutes
from laminar.node.api.records.damaged_reads import LOCAL
from laminar.node.api.records.datagrams import Datagrams
from laminar.node.api.records.delete_records import DeleteRecordsRoute
from laminar.node.api.records.fetch import FetchRoutes, expected_bytes
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
from laminar.node.host.settings import TOKENS
from laminar.node.transactions.uploads import MAX_OPEN
from laminar.node.transport.transport import Peer

if TYPE_CHECKING:
    from laminar.node.runtime.process import Method


# Operations that only a partition's leader carries out, and for which a client may ask to be redirected to
# it.
_REDIRECTED_APPENDS = frozenset({"append_to_partition", "upload_part", "publish_upload"})

_IMPORT = IMPORT.name.lower()

# Operations of admins, which the audit records; of `_CHECKED_LATER` it records what their handlers refuse.
_OF_ADMINS = frozenset(operation for operation, needs in NEEDS.items() if needs.what == "admin")
_CHECKED_LATER = frozenset({"begin_producer", "prepare_stages", "commit_batch"})
_AUDITED = _OF_ADMINS | _CHECKED_LATER
# The internal topics that are written by requests of nodes.
_WRITTEN_BY_NODES = frozenset((AUDIT_TOPIC, TRACE_TOPIC))
_AUDIT_TARGET = f"/v1/topics/{AUDIT_TOPIC}/partitions/0/records"

# Operations whose bodies are records. A large one is parsed in a thread.
_PARSED = frozenset({"append_to_topic", "append_to_partition", "stage"})

NO_ROOM_MS = 1000
"""After how long a client that has too many waiting requests should ask again."""

Handler = Callable[..., Response | Awaitable[Response]]


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
        self._sites = Sites(
            [settings.host, settings.advertise_host, socket.gethostname(), *settings.hosts], settings.origins
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
        changes = OperationRoutes(host, nodes, places, placement)
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
        health = ClusterHealth(host, self._exchange, shard_health, led)
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
        sinks = SinkRoutes(
            host,
            leaders,
            topics,
            deliveries=host.deliveries,
            make_topic=topic_routes.make,
            limits=self.limits,
        )
        AbandonedStages(host, sinks)
        AbandonedPins(host, host.deliveries, sinks)
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
        self._passed = PassedTurns(lambda: host.turns, in_progress=lambda: host.transport.calls_in_progress)
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
            "limits": self._limits,
            "metrics": metrics.metrics,
            "console": console.index,
            "console_file": console.file,
            "console_moved": console.moved,
            "openapi": cluster.openapi,
            "docs": cluster.docs,
        }
        # Transport methods that clients' requests call at other shards.
        self._steps: dict[str, Step] = {
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
            "sinks": sinks.on_sinks,
            "look_up": to_topics.on_look_up,
        }
        assert self._steps.keys() == IN_TURNS, self._steps.keys() ^ IN_TURNS
        self.methods: dict[str, Method] = {
            "http": answering(self._on_http),
            FOR_PRINCIPAL: answering(self._on_for_principal),
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
        } | {name: answering(handler) for name, handler in self._steps.items()}
        unanswered = {route.operation for route in ROUTES} ^ self._handlers.keys()
        assert not unanswered, f"routes without a handler, or handlers without a route: {unanswered}"
        # An append that waits for the outcome of a partition's seal does not wake its quiesced group.
        self._appending = host.watched(
            lambda each: each.appends.waits or not each.state.succession.takes_records
        )
        host.every(COMMIT_CHECK_S, self._sweep, to_the_end=True)

    # -- the application -------------------------------------------------------------------

    def head(self, request: Request) -> Response | None:
        """Check a request's head before its body is read: access, the body's size, whether to redirect.

        Returns:
            The answer if the head settles it (a redirect or a refusal), or None to go on with the body.
        """
        try:
            # An equal head has been admitted.
            matched: Matched = request.head.memo or self._admit(request.head)
            refusal = None if self._guard is None else self._let_in(self._guard, request, matched)
        except Problem as problem:
            if problem.status in REFUSED:
                self._audit.failed(self._refused(request), problem, is_call=False)
            raise
        if refusal is not None:
            return refusal
        try:
            return self._check(request, matched)
        except Problem as problem:
            if matched.operation in _OF_ADMINS or matched.is_systems:
                self._audit.failed(_asked(request, matched), problem, is_call=True)
            raise

    def _admit(self, head: RequestHead) -> Matched:
        """Return the route of a head that is seen for the first time.

        Raises:
            Problem: the route does not exist, or a cross-site or reserved header is refused.
        """
        self._sites.check(head)
        if FORWARDED in head.headers:
            raise Problem(
                "invalid",
                "this header is reserved for requests between nodes",
                field=FORWARDED,
                value="1",
            )
        return matched_of(head)

    def _refused(self, request: Request) -> Asked:
        """Return the client and operation of a refused request for the audit, as far as they are known."""
        matched: Matched | None = request.head.memo
        if self._guard is None or matched is None:
            return Asked(request, UNPROVEN)
        certificate = getattr(request.connection, "certificate", None)
        principal = self._guard.who(request.head, matched.operation, certificate=certificate)
        return Asked(request, principal, matched.operation, matched.params)

    def _datagram_refused(
        self, topic: str, partition: int, credential: str, peer: str, problem: Problem
    ) -> None:
        """Note in the audit that a datagram of a known credential was refused, as for a request over HTTP."""
        record = self._host.view.credentials.get(credential)
        if record is not None:
            asked = by_datagram(topic, partition, Principal(record.name, credential=record.id), peer)
            self._audit.failed(asked, problem, is_call=topic in SYSTEM_TOPICS)

    def _check(self, request: Request, matched: Matched) -> Response | None:
        """Check a permitted request: its topic, the size of its body, and whether to redirect it."""
        if matched.is_systems:
            matched.check_system()
        operation, params = matched.operation, matched.params
        length = request.head.content_length  # 0 of a body that comes chunked
        if length:
            _check_document(matched, length)
            if length > self.limits.max_body_bytes:
                raise Problem(
                    "too_large",
                    "the request body is too large",
                    field="content-length",
                    value=length,
                    limit=self.limits.max_body_bytes,
                )
        if operation == "fetch":
            request.answer_bytes = expected_bytes(request.query)
        if operation == "append_to_partition" and matched.place not in self._host.partitions:
            if not self._known(matched):
                return None
            self._topics.partition_record(params["topic"], params["partition"])
        if "laminar-redirect" in request.headers:
            return self._redirect(request, matched)
        return None

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
                matched = self._permitted_again(self._guard, request, matched)
        answer: Response | Awaitable[Response]
        if matched.operation in _AUDITED:
            answer = self._audited(request, matched)
        else:
            answer = self._carry_out(request, matched)
        if type(answer) is Later or not asyncio.iscoroutine(answer):
            return answer
        return asking(requester_of(request, self._host.node), answer)

    def _permitted_again(self, guard: Guard, request: Request, matched: Matched) -> Matched:
        """Check access again: the view has changed since the check of the head, perhaps minutes ago.

        Raises:
            Problem: 401 `unauthorized`, 403 `forbidden`, 503 `not_ready`. Nothing was carried out.
        """
        try:
            self._permit(guard, request, matched)
        except Problem as problem:
            if problem.status in REFUSED:
                self._audit.failed(self._refused(request), problem, is_call=False)
            raise
        return matched_of(request.head)

    async def _audited(self, request: Request, matched: Matched) -> Response:
        """Answer a request and note in the audit how it ended. The answer does not wait for the audit."""
        is_call = matched.operation in _OF_ADMINS
        try:
            answer = self._carry_out(request, matched)
            response = answer if isinstance(answer, Response) else await answer
        except BaseException as error:
            self._audit.failed(_asked(request, matched), error, is_call=is_call)
            raise
        if is_call:
            self._audit.answered(_asked(request, matched), response)
        return response

    def _carry_out(self, request: Request, matched: Matched) -> Response | Awaitable[Response]:
        _check_document(matched, len(request.body))
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

    def _let_in(self, guard: Guard, request: Request, matched: Matched) -> Response | None:
        """Check a principal's access and limits; return None to go on, or else the answer of `head`.

        Raises:
            Problem: 401 `unauthorized`, 403 `forbidden`, 429 `quota`, 503 `not_ready`.
        """
        connection = request.connection
        try:
            principal = self._permit(guard, request, matched)
        except Problem:
            if connection.flow is None and guard.unproven.meter is not None:
                connection.join(guard.unproven.meter.flow)
            raise
        meter = principal.meter
        if meter is None:
            return None
        if connection.flow is not meter.flow:
            problem = meter.connection_refusal()
            if problem is not None:
                response = problem_response(problem)
                response.close = True
                return response
            connection.join(meter.flow)
            if meter.flow.is_spent:
                return WAIT
        if meter.is_limited and matched.is_counted:
            try:
                meter.admit(request.content_length or 0, self._host.clock.monotonic_ms())
            except Problem as problem:
                response = problem_response(problem)
                if not principal.may("admin", ""):  # an operator's next request may be one without a limit
                    response.mute_s = (problem.retry_after_ms or 0) / 1000
                return response
        return None

    @staticmethod
    def _permit(guard: Guard, request: Request, matched: Matched) -> Principal:
        """Return the principal of a request after checking that it may make the request.

        A principal by a token is remembered with the head, which contains the token. Any other (by a
        certificate or anonymous) is remembered with the connection, as connections share equal heads.

        Raises:
            Problem: 401 `unauthorized`, 403 `forbidden`, 503 `not_ready`.
        """
        if matched.principal is not None and guard.holds(matched.principal):
            return matched.principal
        head, connection, operation = request.head, request.connection, matched.operation
        certificate = getattr(connection, "certificate", None)  # only a connection with TLS has one
        needs = NEEDS[operation]
        if _IMPORT in head.headers and needs.what in ("read", "write"):
            needs = needs._replace(what="admin")  # else a writer could append to a topic under import
        principal = guard.permit(head, operation, needs, matched.params, certificate=certificate)
        if head.headers.get("authorization"):
            head.memo = matched._replace(principal=principal)
        else:
            connection.context = principal
        return principal

    def _redirect(self, request: Request, matched: Matched) -> Response | None:
        """Return a 307 to the shard that serves the request: that of the leader, or of any replica.

        Returns None if this shard serves the request, no such shard is known, or the operation has no
        redirects.
        """
        operation, params = matched.operation, matched.params
        appends = operation in _REDIRECTED_APPENDS
        if not appends and operation not in ("fetch", "fetch_one", "offsets"):
            return None
        topic = params["topic"]
        replica = None if matched.place is None else self._host.partitions.get(matched.place)
        needs_leader = appends or request.query.get("read") == "leader" or operation == "offsets"
        if replica is not None and (not needs_leader or replica.context.leads):
            return None
        if LOCAL in request.headers or FORWARDED in request.headers or not self._known(matched):
            return None
        try:
            number = self._topics.partition_record(topic, params["partition"]).number
        except Problem:
            return None  # the handler answers with the reason: the partition may be reclaimed
        if needs_leader:
            where = self._locator.known_leader(topic, number)
        else:
            where = next(iter(self._locator.replicas(topic, number)), None)
        if where is None or where.url == self._host.view.shard_url(self._host.node, self._host.number):
            return None
        return Response(307, [("Location", where.url + request.target), ("Laminar-Leader", where.url)])

    def _limits(self, request: Request) -> Response:
        """Answer GET /v1/limits."""
        return Response.json(
            documents.RequestLimits(
                **msgspec.structs.asdict(self.limits),
                max_head_bytes=LONGEST_HEAD_BYTES,
                max_head_fields=MOST_HEADERS,
                max_target_bytes=LONGEST_TARGET_BYTES,
                max_fetch_bytes=MAX_FETCH_BYTES,
                max_fetch_records=MAX_FETCH_RECORDS,
                max_wait_ms=MAX_WAIT_MS,
                max_partitions=MAX_PARTITIONS,
                max_replicas=MAX_REPLICAS,
                max_upload_parts=MAX_UPLOAD_PARTS,
                max_stages_of_partition=MAX_STAGES,
                max_uploads_of_partition=MAX_OPEN,
                max_upload_bytes_of_partition=self._host.settings.max_upload_bytes,
            )
        )

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

    # -- for other shards ------------------------------------------------------------------

    async def _on_http(self, peer: Peer, payload: bytes) -> Any:
        passed = decode_passed(payload)
        head = RequestHead(passed.method, passed.target, passed.headers)
        # The node that took the request has checked its principal's grants, and has recorded it in its audit.
        matched = matched_of(head)
        if matched.operation != "append_to_partition" or matched.params["topic"] not in _WRITTEN_BY_NODES:
            matched.check_system()
        if passed.principal or self._guard is not None:
            head.memo = matched = matched._replace(principal=Principal(passed.principal or ANONYMOUS))
        request = Request(head, passed.body, Forwarder(peer, passed.address))
        who = requester_of(request, self._host.node)
        ask_for(who, is_passed=True)
        flow = self._flow_of(who.principal)
        if flow is None:
            answer = self._carry_out(request, matched)
            return encode_response(answer if isinstance(answer, Response) else await answer)
        return encode_response(
            await self._passed.answer(flow, len(passed.body), lambda: self._carry_out(request, matched))
        )

    async def _on_for_principal(self, peer: Peer, payload: bytes) -> Any:
        asked = decode_for_principal(payload)
        step = self._steps.get(asked.method)
        if step is None:
            raise LookupError(f"{asked.method!r} is asked for no client")
        ask_for(asked.who(peer), is_passed=True)
        flow = self._flow_of(asked.principal)
        if flow is None:
            return await step(peer, asked.payload)
        return await self._passed.call(flow, len(payload), lambda: step(peer, asked.payload))

    def _flow_of(self, principal: str) -> Flow | None:
        """Return the flow (a principal's fair share) of a forwarded request; None without access control."""
        return None if self._guard is None else self._guard.meter_of(principal).flow

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


def _check_document(matched: Matched, size: int) -> None:
    """Refuse a JSON body that is too large to be decoded on the event loop.

    Raises:
        Problem: 413 `too_large`.
    """
    most = matched.most_document_bytes
    if most is not None and size > most:
        raise Problem("too_large", "the document is too large", field="body", value=size, limit=most)


def _asked(request: Request, matched: Matched) -> Asked:
    return Asked(request, principal_of(request), matched.operation, matched.params)
