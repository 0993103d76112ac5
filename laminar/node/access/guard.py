"""Authentication and authorisation of requests by their heads, for a node with the setting `access=tokens`.

Invariants:

1. *A principal is valid as long as the credentials among which it was found are those of the view.* These are
   one immutable table, shared between views while no credential changes. So one comparison of identities says
   whether an earlier check is still valid, and a revocation applies to the first request after the view has
   it.
2. *A secret is hashed once for each token and table*, not for each request: recognised tokens are cached.
   Unknown ones are not cached, so no client can fill the memory.
3. *No answer tells an unknown token from a revoked one*, nor an existing name from another.
4. *No one is refused for good by a view that may be older than the node's start*: clients take 401 for final.
   So a credential that such a view does not have is answered with 503.
5. *All credentials of a name have one meter*, which applies the limits of the view from the next request on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from laminar.http.api.problems import Problem
from laminar.http.api.roles import Needs
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access.certificates import subject_of
from laminar.node.access.meters import Meter, Meters
from laminar.node.access.principals import UNPROVEN, Principal, unauthorized
from laminar.node.access.tokens import id_of, proves
from laminar.node.host.clock import Clock
from laminar.node.runtime import join_proof
from laminar.node.runtime.cluster_view import View
from laminar.node.secret.keyring import Keyring
from membership.records import CatalogState, CredentialRecord

JOIN_OPERATION: Final = "cluster"
"""The operation that a joining node may request with only a proof of the cluster's secret."""

_SCHEME: Final = "bearer "


class Guard:
    """Finds the principals of a shard's requests by the credentials of its view, and checks their grants."""

    def __init__(self, view: View, clock: Clock, *, secrets: Keyring) -> None:
        """Use the credentials of `view`.

        A joining node that proves to know one of the `secrets` may read the list of the cluster's nodes.
        """
        self._view = view
        self._clock = clock
        self._secrets = secrets
        # By token the principals that were found in `_credentials`.
        self._known: dict[str, Principal] = {}
        self._subjects: dict[str, CredentialRecord] | None = None
        self._credentials: Mapping[str, CredentialRecord] = view.credentials
        self._catalog: CatalogState | None = None
        self.meters = Meters()
        # It has no limits: else probes would be refused because of other clients without credentials.
        self.unproven = Principal(UNPROVEN.name, meter=Meter(UNPROVEN.name, {}, {}, of_strangers=True))

    def holds(self, principal: Principal) -> bool:
        """Return whether a principal that was found earlier is still valid."""
        message = self._view.message
        if message is not None and message.catalog is not self._catalog:
            self._follow(message.catalog)
        return principal.found_in is self._credentials and (
            not principal.expires_ms or self._clock.wall_ms() < principal.expires_ms
        )

    def permit(
        self,
        head: RequestHead,
        operation: str,
        needs: Needs,
        params: Mapping[str, str],
        *,
        certificate: Mapping[str, Any] | None = None,
    ) -> Principal:
        """Return the principal of a request, after checking that it has the roles that the route needs.

        `certificate` is the client's, in the form of `getpeercert`; a token in the request takes precedence.

        Raises:
            Problem: 401 `unauthorized`, 403 `forbidden`, 503 `not_ready`.
        """
        try:
            principal = self._principal(head.headers.get("authorization", ""), operation, certificate)
        except Problem:
            if needs.what != "public":
                raise
            principal = self.unproven
        if needs.what in ("public", "any"):
            return principal  # a proven principal may see more on a public route
        if not needs.named_by:
            principal.require(needs.what, "")
        for parameter in needs.named_by:
            # The handler refuses a missing parameter; there are no roles on an empty name.
            name = params.get(parameter) or head.query.get(parameter)
            if name:
                principal.require(needs.what, name)
        return principal

    def who(
        self, head: RequestHead, operation: str, *, certificate: Mapping[str, Any] | None = None
    ) -> Principal:
        """Return the principal of a request that was refused; `UNPROVEN` if nothing proves one."""
        try:
            return self._principal(head.headers.get("authorization", ""), operation, certificate)
        except Problem:
            return UNPROVEN

    def _principal(
        self, authorization: str, operation: str, certificate: Mapping[str, Any] | None
    ) -> Principal:
        if certificate is not None and not authorization:
            return self.of_certificate(certificate)
        if operation == JOIN_OPERATION and self._secrets:
            until_ms = join_proof.valid_until_ms(
                authorization, self._secrets.current, now_ms=self._clock.wall_ms()
            )
            if until_ms:
                return Principal("(node)", expires_ms=until_ms, found_in=self._newest())
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise unauthorized("the request has no token")
        return self.of_token(authorization[len(_SCHEME) :].strip())

    def of_token(self, text: str) -> Principal:
        """Return the principal that a token proves.

        Raises:
            Problem: 401 `unauthorized`; 503 `not_ready` while the view may be too old to know that.
        """
        credentials = self._newest()
        principal = self._known.get(text)
        if principal is None:
            number = id_of(text)
            record = credentials.get(number)
            if record is None and number:
                self._check_certain()
            if record is None or not proves(text, record):
                raise unauthorized("the token is not known here, or was revoked")
            principal = self._known[text] = self._principal_of(record, credentials)
        if principal.expires_ms and self._clock.wall_ms() >= principal.expires_ms:
            raise unauthorized("the token has expired")
        return principal

    def of_certificate(self, certificate: Mapping[str, Any]) -> Principal:
        """Return the principal that a client's certificate proves, by its subject name.

        Raises:
            Problem: 401 `unauthorized`; 503 `not_ready` while the view may be too old to know that.
        """
        credentials = self._newest()
        if self._subjects is None:
            # Of several credentials with one subject the newest counts.
            records = sorted(credentials.values(), key=lambda each: each.version)
            self._subjects = {each.certificate: each for each in records if each.certificate}
        record = self._subjects.get(subject_of(certificate))
        if record is None:
            self._check_certain()
            raise unauthorized("the request has no token, and its certificate is not known here")
        if record.expires_ms and self._clock.wall_ms() >= record.expires_ms:
            raise unauthorized("the certificate's credential has expired")
        return self._principal_of(record, credentials)

    def _check_certain(self) -> None:
        """Raise 503 `not_ready` while this node has not heard from the catalog since its start."""
        if not self._view.is_confirmed:
            raise Problem(
                "not_ready",
                "this node does not know who asks, and has not heard from the catalog since its start",
                outcome="not_applied",
            )

    def _newest(self) -> Mapping[str, CredentialRecord]:
        """Return the view's credentials; if they have changed, drop the principals found in earlier ones."""
        message = self._view.message
        if message is not None and message.catalog is not self._catalog:
            self._follow(message.catalog)
        return self._credentials

    def _follow(self, catalog: CatalogState) -> None:
        """Use the limits and credentials of a newer copy of the catalog."""
        self._catalog = catalog
        self.meters.follow(catalog.limits)
        if catalog.credentials is not self._credentials:
            self._credentials = catalog.credentials
            self._known.clear()
            self._subjects = None
            self.meters.keep_only({each.name for each in catalog.credentials.values()})

    def meter_of(self, name: str) -> Meter:
        """Return the meter of a principal, with its present limits."""
        self._newest()
        return self.meters.of(name)

    def _principal_of(
        self, record: CredentialRecord, credentials: Mapping[str, CredentialRecord]
    ) -> Principal:
        return principal_of_record(record, credentials, self.meters.of(record.name))


def principal_of_record(
    record: CredentialRecord, credentials: Mapping[str, CredentialRecord], meter: Meter | None = None
) -> Principal:
    """Return the principal that a credential proves; `credentials` is the table in which it was found."""
    return Principal(record.name, tuple(record.grants), record.expires_ms, record.id, credentials, meter)
