"""Routes of tokens: create, list, revoke; describe the principal of a request.

A token's secret is generated here and sent in one answer; it is stored nowhere, the catalog has a digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from laminar.http.api.documents import access as documents
from laminar.http.api.problems import Problem
from laminar.http.api.roles import AnyGrant
from laminar.http.api.timestamps import format_time, parse_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import ANONYMOUS, principal_of
from laminar.node.access.tokens import new_token
from laminar.node.api.admin.limits import LimitRoutes
from laminar.node.api.admin.seen_views import SeenViews
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.services import ShardServices
from laminar.node.catalog.messages.requests import AccessRequest
from laminar.node.secret.keys import KEYS_SINCE
from laminar.node.transport.transport import TransportError
from membership.records import CredentialRecord, Grant
from membership.requests import AccessStep, CreateCredential, Result, RevokeCredential


class TokenRoutes:
    """The handlers of tokens' routes."""

    def __init__(
        self, services: ShardServices, placement: PlacementCall, limits: LimitRoutes, seen: SeenViews
    ) -> None:
        self._limits = limits
        self._seen = seen
        self._services = services
        self._placement = placement

    async def tokens(self, request: Request) -> Response:
        """Answer GET /v1/admin/tokens with all tokens and accepted certificates, without secrets."""
        await self._placement.newest_view()
        records = sorted(
            self._services.view.credentials.values(), key=lambda each: (each.name, each.created_ms, each.id)
        )
        return Response.json(documents.Tokens([_described(each) for each in records]))

    async def token(self, request: Request, token: str) -> Response:
        """Answer GET /v1/admin/tokens/{token} with one token, without its secret."""
        await self._placement.newest_view()
        record = self._services.view.credentials.get(token)
        if record is None:
            raise _no_such_token(token)
        return Response.json(_described(record))

    async def create(self, request: Request) -> Response:
        """Answer POST /v1/admin/tokens, once this shard accepts the token.

        It waits up to a second for the other shards to accept the token, too.
        """
        asked = json_body(request, documents.NewToken)
        now_ms = self._services.clock.wall_ms()
        expires_ms = 0
        if asked.name == ANONYMOUS:
            raise Problem(
                "invalid",
                "this name is reserved for clients that present no credential, and no limits apply to it",
                field="name",
                value=asked.name,
                outcome="not_applied",
            )
        if asked.expires is not None:
            expires_ms = parse_time(asked.expires, field="expires")
            if expires_ms <= now_ms:
                raise Problem(
                    "invalid",
                    "a token must expire after now",
                    field="expires",
                    value=asked.expires,
                    limit=format_time(now_ms),
                    outcome="not_applied",
                )
        for place, grant in enumerate(asked.grants):
            if grant.role == "metrics" and grant.prefix:
                raise Problem(
                    "invalid",
                    "metrics are of the whole node, so a grant of this role takes no prefix",
                    field=f"grants.{place}.prefix",
                    value=grant.prefix,
                    outcome="not_applied",
                )
        made = new_token(os.urandom)
        by_certificate = asked.certificate is not None
        step = CreateCredential(
            id=made.id,
            name=asked.name,
            grants=[Grant(each.role, each.prefix) for each in asked.grants],
            salt=b"" if by_certificate else made.salt,
            digest=b"" if by_certificate else made.digest,
            created_ms=now_ms,
            expires_ms=expires_ms,
            certificate=asked.certificate or "",
        )
        await self._change(step)
        answer = documents.CreatedToken(
            token=None if by_certificate else made.text,
            id=made.id,
            name=step.name,
            grants=_grants(step.grants),
            created=format_time(now_ms),
            expires=_time(expires_ms),
            certificate=asked.certificate,
        )
        headers = [("Location", f"/v1/admin/tokens/{made.id}"), ("Cache-Control", "no-store")]
        return Response.json(answer, status=201, headers=headers)

    async def revoke(self, request: Request, token: str) -> Response:
        """Answer DELETE /v1/admin/tokens/{token}, once this shard refuses the token.

        It waits up to a second for the other shards to refuse the token, too.
        """
        result = await self._change(RevokeCredential(token))
        if result.outcome == "absent":
            raise _no_such_token(token)
        return Response(204)

    async def whoami(self, request: Request) -> Response:
        """Answer GET /v1/whoami with the request's principal, its grants, limits and usage."""
        principal = principal_of(request)
        return Response.json(
            documents.WhoAmI(
                principal.name,
                _grants(principal.grants),
                _time(principal.expires_ms),
                *self._limits.of(principal),
            )
        )

    async def datagram_key(self, request: Request) -> Response:
        """Answer GET /v1/datagram-key: the key with which the client of a token signs its datagrams."""
        services = self._services
        credential, keys = principal_of(request).credential, services.secrets.first
        enabled = services.view.code_version
        if credential and enabled < KEYS_SINCE:
            raise Problem(
                "not_enabled",
                f"keys for datagrams need code version {KEYS_SINCE}; {enabled} is enabled until all nodes "
                "know it",
            )
        if credential and keys is None:
            raise Problem("not_enabled", "the nodes of this cluster have no secret, so there are no keys")
        key = keys.datagrams_of(credential).hex() if credential and keys is not None else None
        minute = services.clock.wall_ms() // 60_000
        return Response.json(
            documents.DatagramKey(credential, key, minute), headers=[("Cache-Control", "no-store")]
        )

    async def _change(self, step: AccessStep) -> Result:
        """Ask the catalog to change the credentials, and wait until the views show the change.

        Raises:
            Problem: 503 `not_enabled` or `no_leader`, 504, 422 `invalid`, 429 `quota`.
        """
        try:
            answer = await self._services.ask_catalog(AccessRequest(step))
        except TransportError as error:
            raise Problem("no_leader", f"the catalog: {error}", outcome="unknown") from error
        if answer.error == "not_enabled":
            raise Problem("not_enabled", answer.detail)
        if answer.error == "quota":
            raise Problem("quota", answer.detail, field="tokens", value=answer.value, limit=answer.limit)
        if answer.error == "unknown":
            raise Problem("outcome_unknown", answer.detail)
        if answer.error:
            raise Problem("no_leader", answer.detail or "the catalog has no leader at the moment")
        result = answer.result
        assert result is not None
        if result.outcome in ("invalid", "failed", "already_exists"):
            raise Problem("invalid", result.detail)
        await self._placement.until_seen(result.version)
        await self._seen.wait(result.version)
        return result


def _described(record: CredentialRecord) -> documents.Token:
    return documents.Token(
        id=record.id,
        name=record.name,
        grants=_grants(record.grants),
        created=format_time(record.created_ms),
        expires=_time(record.expires_ms),
        certificate=record.certificate or None,
    )


def _grants(grants: Iterable[AnyGrant]) -> list[documents.Grant]:
    return [documents.Grant(each.role, each.prefix) for each in grants]


def _time(time_ms: int) -> str | None:
    return format_time(time_ms) if time_ms else None


def _no_such_token(token: str) -> Problem:
    return Problem("no_such_token", f"there is no token of id {token!r}", field="token", value=token)
