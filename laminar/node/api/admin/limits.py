"""Routes of the limits of principals (quotas of a client): list, describe, set by compare-and-set."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from laminar.http.api.documents import access as documents
from laminar.http.api.names import TOPIC_PATTERN
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import Principal
from laminar.node.api.common.etags import changed, etag, names, required
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.services import ShardServices
from laminar.node.catalog.messages.requests import LimitsRequest
from laminar.node.transport.transport import TransportError
from membership.limit_rules import owned_by
from membership.records import ANY_PRINCIPAL, LimitRecord

_PRINCIPAL: Final = re.compile(TOPIC_PATTERN, re.ASCII)
_COUNTED: Final = ("topics", "partitions", "channels", "connections")
TRIES: Final = 5


class LimitRoutes:
    """The handlers of the routes of limits."""

    def __init__(self, services: ShardServices, placement: PlacementCall) -> None:
        self._services = services
        self._placement = placement

    async def all(self, request: Request) -> Response:
        """Answer GET /v1/admin/limits with all principals that have limits of their own."""
        await self._placement.newest_view()
        records = sorted(self._services.view.limits.values(), key=lambda each: each.principal)
        return Response.json(documents.AllLimits([_described(each) for each in records]))

    async def describe(self, request: Request, principal: str) -> Response:
        """Answer GET /v1/admin/limits/{principal} with the limits that apply to the principal."""
        _check(principal)
        await self._placement.newest_view()
        return self._answer(principal)

    async def set(self, request: Request, principal: str) -> Response:
        """Answer PUT /v1/admin/limits/{principal}, once this shard applies the new limits.

        If-Match must name the current version of the limits.

        Raises:
            Problem: 422, 428, 412, 429 `quota`, 503 `not_enabled` or `no_leader`.
        """
        _check(principal)
        wanted = required(request.headers.get("if-match"), what="principal's limits")
        document = msgspec.structs.asdict(json_body(request, documents.NewLimits))
        limits = {name: limit for name, limit in document.items() if limit is not None}
        for _ in range(TRIES):
            version = self._record(principal).version
            if not names(wanted, version):
                await self._services.refresh_view()
                version = self._record(principal).version
            if not names(wanted, version):
                raise changed(wanted, version, what="principal's limits")
            if await self._set(LimitsRequest(principal, limits, version)):
                return self._answer(principal)
            await self._services.refresh_view()
        raise Problem(
            "in_progress",
            f"other changes came first, {TRIES} times in a row: send the request again",
            outcome="not_applied",
        )

    async def _set(self, wanted: LimitsRequest) -> bool:
        """Ask the catalog to set limits; return False if their version is no longer the expected one."""
        try:
            answer = await self._services.ask_catalog(wanted)
        except TransportError as error:
            raise Problem("no_leader", f"the catalog: {error}", outcome="unknown") from error
        if answer.error == "not_enabled":
            raise Problem("not_enabled", answer.detail)
        if answer.error == "quota":
            raise Problem(
                "quota",
                answer.detail,
                field="principals",
                value=answer.value,
                limit=answer.limit,
                outcome="not_applied",
                final=True,
            )
        if answer.error == "unknown":
            raise Problem("outcome_unknown", answer.detail)
        if answer.error:
            raise Problem("no_leader", answer.detail or "the catalog has no leader at the moment")
        result = answer.result
        assert result is not None
        if result.outcome in ("invalid", "failed"):
            raise Problem("invalid", result.detail)
        if result.outcome == "conflict":
            return False
        await self._placement.until_seen(result.version)
        return True

    def of(self, principal: Principal) -> tuple[documents.Limits, documents.Usage | None]:
        """Return the limits of a principal, and its usage (numbers of topics etc.) if that is limited."""
        view = self._services.view
        name = principal.name
        record = view.limits.get(name) or view.limits.get(ANY_PRINCIPAL)
        limits = {} if record is None else record.limits
        usage = None
        if view.message is not None and any(each in limits for each in _COUNTED):
            connections = 0 if principal.meter is None else principal.meter.flow.connections
            usage = documents.Usage(**owned_by(view.message.catalog, name), connections=connections)
        return msgspec.convert(limits, documents.Limits), usage

    def _record(self, principal: str) -> LimitRecord:
        return self._services.view.limits.get(principal) or LimitRecord(principal, {})

    def _answer(self, principal: str) -> Response:
        described = _described(self._record(principal))
        return Response.json(described, headers=[etag(described.version)])


def _described(record: LimitRecord) -> documents.PrincipalLimits:
    limits = msgspec.convert(record.limits, documents.Limits)
    return documents.PrincipalLimits(record.principal, limits, record.version)


def _check(principal: str) -> None:
    if principal != ANY_PRINCIPAL and _PRINCIPAL.fullmatch(principal) is None:
        raise Problem(
            "invalid",
            "a principal's name has 1 to 200 characters of A-Z a-z 0-9 . _ -; `*` stands for every principal "
            "without limits of its own",
            field="principal",
            value=principal,
            limit=200,
        )
