"""The admission of requests by their heads, before the bodies are read: who asks, may it, is it served here?

What is found out of a head is stored with it, for all requests with an equal one. Refusals are noted in the
audit.
"""

from __future__ import annotations

from laminar.http.api.cross_site import Sites
from laminar.http.api.parameters import IMPORT
from laminar.http.api.problem_response import problem_response
from laminar.http.api.problems import Problem
from laminar.http.api.routes import NEEDS
from laminar.http.protocol.messages import WAIT, Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access.guard import Guard
from laminar.node.access.principals import UNPROVEN, Principal, principal_of
from laminar.node.api.audit.audit_log import REFUSED, Asked, AuditLog
from laminar.node.api.common.forwarding import FORWARDED
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.matched import Matched, matched_of
from laminar.node.api.records.damaged_reads import LOCAL
from laminar.node.api.records.fetch import expected_bytes

# Operations that only a partition's leader carries out, and for which a client may ask to be redirected to
# it.
_REDIRECTED_APPENDS = frozenset({"append_to_partition", "upload_part", "publish_upload"})

_IMPORT = IMPORT.name.lower()

OF_ADMINS = frozenset(operation for operation, needs in NEEDS.items() if needs.what == "admin")
"""Operations of admins, which the audit records."""


class Admission:
    """Checks the heads of a shard's requests; without a guard every client may make every request."""

    def __init__(
        self,
        host: HostServices,
        guard: Guard | None,
        topics: TopicLookup,
        locator: Locator,
        audit: AuditLog,
        *,
        sites: Sites,
        max_body_bytes: int,
    ) -> None:
        self._host = host
        self._guard = guard
        self._topics = topics
        self._locator = locator
        self._audit = audit
        self._sites = sites
        self._max_body_bytes = max_body_bytes

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
            if matched.operation in OF_ADMINS or matched.is_systems:
                self._audit.failed(asked(request, matched), problem, is_call=True)
            raise

    def permit_again(self, guard: Guard, request: Request, matched: Matched) -> Matched:
        """Check access again: the view has changed since the check of the head, perhaps minutes ago.

        Raises:
            Problem: 401 `unauthorized`, 403 `forbidden`, 503 `not_ready`. Nothing was carried out.
        """
        try:
            permit(guard, request, matched)
        except Problem as problem:
            if problem.status in REFUSED:
                self._audit.failed(self._refused(request), problem, is_call=False)
            raise
        return matched_of(request.head)

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

    def _check(self, request: Request, matched: Matched) -> Response | None:
        """Check a permitted request: its topic, the size of its body, and whether to redirect it."""
        if matched.is_systems:
            matched.check_system()
        operation, params = matched.operation, matched.params
        length = request.head.content_length  # 0 of a body that comes chunked
        if length:
            if matched.most_document_bytes is not None:
                matched.check_document(length)
            if length > self._max_body_bytes:
                raise Problem(
                    "too_large",
                    "the request body is too large",
                    field="content-length",
                    value=length,
                    limit=self._max_body_bytes,
                )
        if operation == "fetch":
            request.answer_bytes = expected_bytes(request.query)
        if operation == "append_to_partition" and matched.place not in self._host.partitions:
            if not self._topics.knows(params["topic"], params["partition"]):
                return None
            self._topics.partition_record(params["topic"], params["partition"])
        if "laminar-redirect" in request.headers:
            return self._redirect(request, matched)
        return None

    def _let_in(self, guard: Guard, request: Request, matched: Matched) -> Response | None:
        """Check a principal's access and limits; return None to go on, or else the answer of `head`.

        Raises:
            Problem: 401 `unauthorized`, 403 `forbidden`, 429 `quota`, 503 `not_ready`.
        """
        connection = request.connection
        try:
            principal = permit(guard, request, matched)
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
        if LOCAL in request.headers or FORWARDED in request.headers:
            return None
        if replica is None and not self._topics.knows(topic, params["partition"]):
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


def permit(guard: Guard, request: Request, matched: Matched) -> Principal:
    """Return the principal of a request after checking that it may make the request.

    A principal by a token is remembered with the head, which contains the token. Any other (by a certificate
    or anonymous) is remembered with the connection, as connections share equal heads.

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


def asked(request: Request, matched: Matched) -> Asked:
    """Return a matched request as the audit sees it."""
    return Asked(request, principal_of(request), matched.operation, matched.params)
