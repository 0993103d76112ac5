"""The check of a request's head: who asks, and whether that still holds."""

from __future__ import annotations

import os
from typing import Any

import pytest
from msgspec.structs import replace

from laminar.http.api.problems import Problem
from laminar.http.api.roles import ANY, PUBLIC, READ, WRITE_STAGE
from laminar.http.protocol.flows import Flow
from laminar.http.protocol.messages import Request
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access import guard as guards
from laminar.node.access.certificates import subject_of
from laminar.node.access.guard import Guard
from laminar.node.access.principals import principal_of
from laminar.node.access.tokens import NewToken, id_of, new_token, proves
from laminar.node.api.admission import permit
from laminar.node.api.matched import Matched
from laminar.node.runtime import join_proof
from laminar.node.runtime.cluster_view import View
from laminar.node.secret.keyring import Keyring
from laminar.node.secret.keys import Keys
from membership.records import CatalogState, CredentialRecord, Grant, LimitRecord
from tests.node.services import Stopped, message_of, unix_name

NOW_MS = 1_700_000_000_000
SECRET = "of the cluster's nodes"
KEYS = Keys(SECRET.encode())


def record_of(token: NewToken, *, grants: list[Grant], expires_ms: int = 0) -> CredentialRecord:
    """What the catalog keeps of a token."""
    return CredentialRecord(token.id, "billing", grants, token.salt, token.digest, 1, expires_ms)


class Guarded:
    """A guard over a view with one token."""

    def __init__(self, *grants: Grant, expires_ms: int = 0) -> None:
        """Make the token with these grants."""
        self.token = new_token(os.urandom)
        self.clock = Stopped(NOW_MS)
        self.view = View(node="here", unix_name=unix_name)
        self.view.message = message_of(["here"])
        record = record_of(self.token, grants=list(grants), expires_ms=expires_ms)
        self.show(self.catalog.credentials | {record.id: record})
        self.guard = Guard(self.view, self.clock, secrets=Keyring([SECRET]))

    @property
    def catalog(self) -> CatalogState:
        """The view's copy."""
        assert self.view.message is not None
        return self.view.message.catalog

    def show(self, credentials: Any) -> None:
        """Have the view show these credentials."""
        assert self.view.message is not None
        self.view.message.catalog = replace(self.catalog, credentials=credentials)

    def revoke(self) -> None:
        """Have the view show none."""
        self.show(self.catalog.credentials.changed({self.token.id: None}))

    def head(self, authorization: str | None = None, target: str = "/") -> RequestHead:
        """A head with this header, by default that of the token."""
        given = f"Bearer {self.token.text}" if authorization is None else authorization
        return RequestHead("GET", target, {"authorization": given} if given else {})


def refusal(guarded: Guarded, authorization: str | None = None) -> Problem:
    """The problem that a request gets which needs no more than a principal."""
    with pytest.raises(Problem) as raised:
        guarded.guard.permit(guarded.head(authorization), "limits", ANY, {})
    return raised.value


def test_a_token_is_its_principal() -> None:
    """However the scheme is written; the id alone proves nothing."""
    guarded = Guarded(Grant("read", "a"))
    for scheme in ("Bearer", "bearer", "BEARER"):
        head = guarded.head(f"{scheme} {guarded.token.text}")
        principal = guarded.guard.permit(head, "fetch", READ, {"topic": "abc"})
        assert ("billing", guarded.token.id) == (principal.name, principal.credential)
        assert guarded.guard.holds(principal)


def test_what_proves_nothing_is_refused() -> None:
    """Without a token, with no token at all, with another secret, and revoked: no answer tells which."""
    guarded = Guarded(Grant("read", "a"))
    other = new_token(os.urandom)
    forged = f"lam_{guarded.token.id}_{other.text.rpartition('_')[2]}"
    assert id_of(other.text) == other.id and "" == id_of("lam_x")
    for text in ("", "Basic dTpw", f"Token {guarded.token.text}"):
        problem = refusal(guarded, text)
        assert (401, "the request has no token") == (problem.status, problem.detail)
        assert [("WWW-Authenticate", "Bearer")] == problem.headers
    unknown = [refusal(guarded, f"Bearer {text}") for text in (other.text, forged, "lam", "x" * 4000)]
    guarded.revoke()
    details = {problem.detail for problem in [*unknown, refusal(guarded)]}
    assert {"the token is not known here, or was revoked"} == details


def test_a_revocation_holds_from_the_view_that_has_it() -> None:
    """Also for a principal that was found before; another change of the view costs no look-up."""
    guarded = Guarded(Grant("read", "a"))
    principal = guarded.guard.permit(guarded.head(), "limits", ANY, {})
    assert guarded.view.message is not None
    guarded.view.message.catalog = replace(guarded.catalog, version=2)
    assert guarded.guard.holds(principal)

    guarded.revoke()

    assert not guarded.guard.holds(principal)
    assert 401 == refusal(guarded).status


def test_a_token_ends_by_the_nodes_clock() -> None:
    """At its time, and not before."""
    guarded = Guarded(Grant("read", "a"), expires_ms=NOW_MS + 1)
    principal = guarded.guard.permit(guarded.head(), "limits", ANY, {})
    assert guarded.guard.holds(principal)

    guarded.clock._wall_ms += 1

    assert not guarded.guard.holds(principal)
    assert "the token has expired" == refusal(guarded).detail


def test_a_secret_is_hashed_once_and_what_is_unknown_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path compares; a client that invents tokens fills no memory."""
    guarded = Guarded(Grant("read", "a"))
    hashed: list[str] = []

    def counting(text: str, record: CredentialRecord) -> bool:
        hashed.append(text)
        return proves(text, record)

    monkeypatch.setattr(guards, "proves", counting)
    for _ in range(100):
        guarded.guard.permit(guarded.head(), "fetch", READ, {"topic": "a"})
        refusal(guarded, f"Bearer {new_token(os.urandom).text}")

    assert [guarded.token.text] == hashed
    assert [guarded.token.text] == list(guarded.guard._known)


def test_a_route_that_names_two_needs_the_role_on_both() -> None:
    """A stage is of a sink, and of the topic in its query."""
    guarded = Guarded(Grant("write", "a"))

    def permit(sink: str, topic: str) -> None:
        head = guarded.head(target=f"/v1/sinks/{sink}/batches/1/stages?topic={topic}")
        guarded.guard.permit(head, "stage", WRITE_STAGE, {"sink": sink})

    permit("a-sink", "a-topic")
    for sink, topic in (("a-sink", "b"), ("b", "a-topic")):
        with pytest.raises(Problem) as raised:
            permit(sink, topic)
        assert (403, "role", "write", "b") == (
            raised.value.status,
            raised.value.field,
            raised.value.value,
            raised.value.limit,
        )


def test_a_public_route_looks_at_no_token() -> None:
    """A probe of a load balancer has none, and one that is wrong does no harm."""
    guarded = Guarded()
    for text in ("", "Bearer wrong"):
        assert 0 == len(guarded.guard.permit(guarded.head(text), "livez", PUBLIC, {}).grants)


def test_a_node_that_joins_shows_the_secret_and_learns_the_nodes_alone() -> None:
    """For some minutes of its clock, and for one operation."""
    guarded = Guarded()
    proof = join_proof.authorization(KEYS, now_ms=NOW_MS)
    principal = guarded.guard.permit(guarded.head(proof), "cluster", ANY, {})
    assert guarded.guard.holds(principal) and 0 == len(principal.grants)
    assert 401 == refusal(guarded, proof).status
    wrong = (
        join_proof.authorization(Keys(b"another secret"), now_ms=NOW_MS),
        join_proof.authorization(KEYS, now_ms=NOW_MS - join_proof.VALID_MS),
        join_proof.authorization(KEYS, now_ms=NOW_MS + join_proof.VALID_MS),
        proof.replace(str(NOW_MS), str(NOW_MS + 1)),
    )
    for text in wrong:
        with pytest.raises(Problem):
            guarded.guard.permit(guarded.head(text), "cluster", ANY, {})

    guarded.clock._wall_ms += join_proof.VALID_MS

    assert not guarded.guard.holds(principal)


CERTIFICATE = {"subject": ((("organizationName", "Example, Inc."),), (("commonName", "billing"),))}


def test_a_certificate_is_a_principal_by_its_subject() -> None:
    """Unless there is a token; until its credential is revoked."""
    guarded = Guarded(Grant("read", "a"))
    grants = [Grant("write", "b")]
    record = CredentialRecord(
        "c" * 16, "svc", grants, b"", b"", 1, certificate="O=Example\\, Inc.,CN=billing"
    )
    guarded.show({record.id: record})

    def permit(authorization: str, certificate: Any) -> str:
        head = guarded.head(authorization)
        return guarded.guard.permit(head, "limits", ANY, {}, certificate=certificate).name

    assert "svc" == permit("", CERTIFICATE)
    for given in (("Bearer wrong", CERTIFICATE), ("", {"subject": ()}), ("", {}), ("", None)):
        with pytest.raises(Problem) as raised:
            permit(*given)
        assert 401 == raised.value.status
    guarded.show({})
    with pytest.raises(Problem):
        permit("", CERTIFICATE)


def test_no_subject_looks_like_another() -> None:
    """What separates the parts of a name is escaped in its values."""
    forged = {"subject": ((("commonName", "billing,O=Example"),),)}
    real = {"subject": ((("commonName", "billing"),), (("organizationName", "Example"),))}

    joined = {"subject": ((("commonName", "billing"), ("organizationName", "Example")),)}

    assert ("CN=billing\\,O\\=Example", "CN=billing,O=Example") == (subject_of(forged), subject_of(real))
    assert "CN=billing+O=Example" == subject_of(joined)


class Connection:
    """A connection, with the certificate that its client has shown."""

    def __init__(self, certificate: Any = None) -> None:
        """Take the certificate."""
        self.certificate = certificate
        self.context: Any = None
        self.flow: Flow | None = None
        self.peer = "test"

    def join(self, flow: Flow) -> None:
        """Belong to it."""
        self.flow = flow

    def read_refusal(self) -> None:
        """Return that there is room."""


def test_a_principal_by_certificate_stays_with_its_connection() -> None:
    """Two clients that send the same bytes share the parsed head, and nothing of who they are."""
    guarded = Guarded(Grant("read", "a"))
    record = CredentialRecord(
        "c" * 16, "svc", [Grant("read", "a")], b"", b"", 1, certificate="O=Example\\, Inc.,CN=billing"
    )
    guarded.show({record.id: record})
    head = guarded.head("")
    matched = Matched("limits", {}, None)
    head.memo = matched
    known, unknown = Connection(CERTIFICATE), Connection()
    request = Request(head, b"", known)
    permit(guarded.guard, request, matched)

    assert "svc" == principal_of(request).name
    assert head.memo is matched
    permit(guarded.guard, Request(guarded.head(""), b"", known), Matched("livez", {}, None))
    assert "svc" == principal_of(request).name  # the first of two pipelined requests may be handled later
    with pytest.raises(Problem):
        permit(guarded.guard, Request(head, b"", unknown), matched)
    assert unknown.context is None


@pytest.mark.parametrize("empty", [{}, {"authorization": ""}], ids=["no header", "an empty one"])
def test_only_a_token_is_kept_with_the_head(empty: dict[str, str]) -> None:
    """An empty header proves nothing, so that who showed a certificate is not known by these bytes.

    Nor does a probe that proved nothing take what a certificate proves on a public route.
    """
    guarded = Guarded(Grant("read", "a"))
    record = CredentialRecord(
        "c" * 16, "svc", [Grant("admin", "")], b"", b"", 1, certificate="O=Example\\, Inc.,CN=billing"
    )
    guarded.show({record.id: record})

    def ask(head: RequestHead, connection: Connection, operation: str) -> str:
        head.memo = head.memo or Matched(operation, {}, None)
        permit(guarded.guard, Request(head, b"", connection), head.memo)
        return principal_of(Request(head, b"", connection)).name

    shared, probe = RequestHead("GET", "/", empty), RequestHead("GET", "/readyz", empty)

    assert "svc" == ask(shared, Connection(CERTIFICATE), "limits")
    with pytest.raises(Problem):
        ask(shared, Connection(), "limits")
    assert ["anonymous", "svc"] == [ask(probe, Connection(shown), "readyz") for shown in (None, CERTIFICATE)]


@pytest.mark.parametrize("unconfirmed", [False, True], ids=["no view", "a view of before its start"])
def test_a_node_that_has_just_started_refuses_no_one_for_good(unconfirmed: bool) -> None:
    """A client takes 401 for final, and may give records up for that; a token that is known holds."""
    guarded = Guarded(Grant("read", "a"))
    other = new_token(os.urandom)
    if unconfirmed:
        assert guarded.view.message is not None
        guarded.view.message.confirmed = False
        assert "billing" == guarded.guard.permit(guarded.head(), "limits", ANY, {}).name
    else:
        guarded.view.message = None

    problem = refusal(guarded, f"Bearer {other.text}")
    assert (503, "not_ready", True) == (problem.status, problem.code, problem.retriable)
    with pytest.raises(Problem, match="since its start"):
        guarded.guard.permit(guarded.head(""), "limits", ANY, {}, certificate=CERTIFICATE)
    for text in ("", "Bearer lam_wrong"):
        assert 401 == refusal(guarded, text).status
    assert () == guarded.guard.permit(guarded.head(f"Bearer {other.text}"), "livez", PUBLIC, {}).grants


def test_limits_hold_from_the_view_that_has_them() -> None:
    """For a principal that was found before as well, and for each of its tokens together."""
    guarded = Guarded(Grant("read", "a"))
    principal = guarded.guard.permit(guarded.head(), "fetch", READ, {"topic": "a"})
    second = new_token(os.urandom)
    record = record_of(second, grants=[Grant("read", "a")])
    meter = principal.meter
    assert meter is not None and guarded.guard.holds(principal)
    assert [False] == [meter.is_limited]
    assert guarded.view.message is not None
    limits = guarded.catalog.limits.changed({"billing": LimitRecord("billing", {"requests_per_s": 5})})
    guarded.view.message.catalog = replace(guarded.catalog, limits=limits)

    assert guarded.guard.holds(principal) and meter.is_limited
    guarded.show(guarded.catalog.credentials | {record.id: record})
    again = guarded.guard.permit(guarded.head(f"Bearer {second.text}"), "fetch", READ, {"topic": "a"})
    assert meter is again.meter and not guarded.guard.holds(principal)
