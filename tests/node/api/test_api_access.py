"""Every route, asked by every kind of principal: who gets in, and who is told to stay out.

The expectation is not the code's: `OPERATIONS` says for each operation which kinds of principals may ask for
it, in words, and a route that it lacks fails. The node is a real one, with `access=tokens`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from laminar.client.backup.export import export_topic
from laminar.client.backup.folder import Folder
from laminar.client.backup.restore import import_topic, plan_import
from laminar.client.client import connect
from laminar.client.errors import Forbidden
from laminar.client.net.session import Session
from laminar.http.api.routes import ROUTES, Body, Route
from laminar.testing.cluster import LocalCluster
from tests.node.api import asking
from tests.node.api.described import Described

MINE, OTHER = "mine-1", "other-1"

_EVERYONE = frozenset(
    "none wrong revoked expired read write admin metrics read_other write_other admin_other all".split()
)
_NO_ONE_KNOWN = frozenset(("none", "wrong", "revoked", "expired"))
_ANY = _EVERYONE - _NO_ONE_KNOWN
WHO = {
    "everyone": _EVERYONE,
    "any principal": _ANY,
    "any role on it": frozenset(("read", "write", "admin", "all")),
    "readers": frozenset(("read", "admin", "all")),
    "writers": frozenset(("write", "admin", "all")),
    "its admins": frozenset(("admin", "all")),
    "admins of all": frozenset(("all",)),
    "monitors": frozenset(("metrics", "all")),
}
OPERATIONS = {
    "everyone": "livez readyz version openapi docs console console_file console_moved",
    "any principal": "cluster health list_nodes describe_node limits whoami trace datagram_key list_topics"
    " list_sinks begin_producer",
    "any role on it": "describe_topic list_partitions describe_partition list_routes describe_route"
    " list_channels describe_channel describe_delayed",
    "readers": "fetch fetch_one offsets digest list_cursors describe_cursor set_cursor delete_cursor"
    " describe_group renew_member leave_group receive_jobs settle_jobs seek_channel list_aside list_dead"
    " settle_dead list_delayed search record_history",
    "writers": "append_to_topic append_to_partition upload_part publish_upload drop_upload describe_producer"
    " fence_producer change_delayed cancel_delayed stage describe_sink begin_sink delete_sink prepare_stages"
    " commit_batch",
    "its admins": "create_topic update_topic delete_topic create_channel update_channel delete_channel"
    " begin_route cancel_route reclaim_partition delete_records recover_partition",
    "admins of all": "node_bundle admin_nodes admin_node update_node drain_node undrain_node remove_node"
    " describe_placement pin_partition unpin_partition prefer_leader list_operations describe_operation"
    " cancel_operation describe_balance balance list_tokens create_token describe_token revoke_token"
    " list_principal_limits describe_principal_limits set_principal_limits",
    "monitors": "metrics",
}
ALLOWED = {name: WHO[who] for who, names in OPERATIONS.items() for name in names.split()}
# What stands for the parameters in paths; "x" for all others.
_PARAMETERS = {
    "topic": MINE,
    "sink": MINE,
    "partition": "0",
    "offset": "0",
    "number": "1",
    "part": "0",
    "version": "1",
    "producer": "0" * 32,
    "delayed": "0.5.7",
    "token": "0" * 16,
}


@dataclass
class Guarded:
    """A node with tokens of all kinds."""

    cluster: LocalCluster
    http: httpx.Client
    tokens: dict[str, str | None] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    def ask(self, who: str, method: str, target: str, **more: Any) -> httpx.Response:
        """Ask as a principal of this kind."""
        token = self.tokens[who]
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        return self.http.request(method, target, headers=headers | more.pop("headers", {}), **more)

    def make(self, kind: str, *grants: tuple[str, str], expires: str | None = None) -> None:
        """Make a token of this kind."""
        document = {
            "name": kind,
            "grants": [{"role": role, "prefix": prefix} for role, prefix in grants],
            "expires": expires,
        }
        answer = self.ask("all", "POST", "/v1/admin/tokens", json=document)
        assert 201 == answer.status_code, answer.text
        self.tokens[kind], self.ids[kind] = answer.json()["token"], answer.json()["id"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """One node of one shard, so that each answer is by the view that the test has changed."""
    settings = {"access": "tokens"}
    with (
        LocalCluster(tmp_path_factory.mktemp("access"), nodes=1, shards=1, settings=settings) as cluster,
        httpx.Client(base_url=cluster.urls[0], timeout=60, trust_env=False) as http,
    ):
        node = Guarded(cluster, http, {"all": cluster.admin_token, "none": None, "wrong": "lam_wrong"})
        for role in ("read", "write", "admin"):
            node.make(role, (role, "mine"))
            node.make(f"{role}_other", (role, "other"))
        node.make("metrics", ("metrics", ""))
        node.make("revoked", ("admin", ""))
        assert 204 == node.ask("all", "DELETE", f"/v1/admin/tokens/{node.ids['revoked']}").status_code
        # On a slow machine a token may expire before it is used once, or is even made.
        for seconds in (1.5, 6.0, 24.0):
            until = datetime.now(UTC) + timedelta(seconds=seconds)
            with suppress(AssertionError):
                node.make("expired", ("admin", ""), expires=until.isoformat())
                if 200 == node.ask("expired", "GET", "/v1/whoami").status_code:
                    break
        else:
            pytest.fail("a token that does not expire yet is refused")
        for topic in (MINE, OTHER):
            assert 201 == node.ask("all", "PUT", f"/v1/topics/{topic}", json={}).status_code
        time.sleep(max(0.0, (until - datetime.now(UTC)).total_seconds()))
        yield node


def target_of(route: Route) -> str:
    """A path of the route, of the topic or sink `MINE`."""
    path = re.sub(r"\{(\w+)\}", lambda found: _PARAMETERS.get(found[1], "x"), route.template)
    return f"{path}?topic={MINE}&partition=0&stage=1&epoch=1" if route.operation == "stage" else path


def test_the_table_of_this_test_has_every_operation() -> None:
    """A new route needs a line here, by someone who has thought about who may ask for it."""
    assert ALLOWED.keys() == {route.operation for route in ROUTES}


def test_a_route_that_says_not_what_it_needs_can_not_be_made() -> None:
    """So it fails when the module is imported."""
    with pytest.raises(TypeError, match="summary"):
        Route("GET", "/v1/new", "new", "Do something new")  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("kind", sorted(_EVERYONE))
def test_every_route_lets_in_whom_it_should(guarded: Guarded, kind: str) -> None:
    """By the head alone: what is asked for mostly does not exist, and is never reached by the others."""
    wrong = {}
    described = Described(guarded.http)
    for route in ROUTES:
        # A body that no handler takes; for records one that every handler does.
        body = {} if route.body is Body.NONE else {"content": b"[1]"}
        answer = guarded.ask(
            kind,
            route.method,
            target_of(route),
            headers={"content-type": "application/json"} if body else {},
            **body,
        )
        described.judge(route.operation, answer)  # status, type and document are those of `/openapi.json`
        expected = 0
        if kind not in ALLOWED[route.operation]:
            expected = 401 if kind in _NO_ONE_KNOWN else 403
        said = answer.status_code if answer.status_code in (401, 403) else 0
        if said != expected or answer.status_code >= 500:
            wrong[f"{route.method} {route.template}"] = (expected, answer.status_code, answer.text[:200])
    assert {} == wrong


def test_a_refusal_says_what_is_missing_and_not_what_exists(guarded: Guarded) -> None:
    """The same for a topic that is there and for one that is not."""
    answers = [guarded.ask("read", "GET", f"/v1/topics/{name}") for name in (OTHER, "other-unknown")]
    documents = [answer.json() for answer in answers]

    assert [403, 403] == [answer.status_code for answer in answers]
    assert ["forbidden", "role", "read", OTHER] == [
        documents[0][name] for name in ("code", "field", "value", "limit")
    ]
    assert documents[0] | {"limit": "", "detail": ""} == documents[1] | {"limit": "", "detail": ""}
    stage = "/v1/sinks/mine-1/batches/1/stages?topic=other-1&partition=0&stage=1&epoch=1"
    missing = guarded.ask("write", "POST", stage, content=b"x").json()
    assert ("forbidden", "write", "other-1") == (missing["code"], missing["value"], missing["limit"])
    everything = guarded.ask("admin", "GET", "/v1/admin/nodes").json()
    assert ("forbidden", "admin", "") == (everything["code"], everything["value"], everything["limit"])


def test_lists_have_only_what_the_principal_may_see(guarded: Guarded) -> None:
    """Topics on which it has a role; sinks that it may write. The system's belong to an admin of all."""
    for sink in ("mine-sink", "other-sink"):
        assert 200 == guarded.ask("all", "POST", f"/v1/sinks/{sink}").status_code

    def listed(kind: str, path: str, field: str) -> set[str]:
        answer = guarded.ask(kind, "GET", path).json()
        return {each[field] for each in next(value for value in answer.values() if isinstance(value, list))}

    for kind in ("read", "write", "admin"):
        assert {MINE} == listed(kind, "/v1/topics", "topic")
        assert {OTHER} == listed(f"{kind}_other", "/v1/topics", "topic")
    assert set() == listed("metrics", "/v1/topics", "topic")
    assert {MINE, OTHER, "_transactions"} <= listed("all", "/v1/topics", "topic")
    assert set() == listed("read", "/v1/sinks", "sink")
    assert "mine-sink" in listed("write", "/v1/sinks", "sink")
    assert "other-sink" not in listed("write", "/v1/sinks?prefix=o", "sink")
    assert {"mine-sink", "other-sink"} <= listed("all", "/v1/sinks", "sink")


def test_topics_that_have_cursors_are_listed_for_readers_alone(guarded: Guarded) -> None:
    """Who may only append to a topic may not list its cursors, so the list of topics does not tell either."""
    path = f"/v1/topics/{MINE}/cursors/c"
    assert 200 == guarded.ask("read", "PUT", path, json={"begin": "earliest"}).status_code

    def listed(kind: str) -> list[str]:
        answer = guarded.ask(kind, "GET", "/v1/topics", params={"having": "cursors"}).json()
        return [each["topic"] for each in answer["topics"]]

    deadline = time.monotonic() + 60
    while [MINE] != listed("read"):  # it may be 10 s old
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [[], [MINE], []] == [listed(kind) for kind in ("write", "admin", "read_other")]
    assert 204 == guarded.ask("read", "DELETE", path).status_code


def test_a_list_of_sinks_has_the_systems_for_an_admin_of_all_only(guarded: Guarded) -> None:
    """Page by page, to its end; a page may be shorter, and names none of them as the next one's beginning."""
    for sink in ("A-sink", "_one", "_two", "z-sink"):
        assert 200 == guarded.ask("all", "POST", f"/v1/sinks/{sink}").status_code
    guarded.make("write_every", ("write", ""), ("write", "_"), ("admin", "_one"))

    def listed(kind: str, prefix: str) -> list[str]:
        found: list[str] = []
        query: dict[str, str] | None = {}
        while query is not None:
            asked = query | {"prefix": prefix, "limit": "1"}
            answer = guarded.ask(kind, "GET", "/v1/sinks", params=asked)
            if kind != "all":
                assert "_one" not in answer.text and "_two" not in answer.text
            found += [each["sink"] for each in answer.json()["sinks"]]
            query = {"after": answer.json()["next"]} if "next" in answer.json() else None
        return found

    assert ["_one", "_two"] == listed("all", "_")
    assert [] == listed("write_every", "_")
    assert ["A-sink", "z-sink"] == [
        each for each in listed("write_every", "") if not each.startswith(("mine", "other"))
    ]
    assert {"A-sink", "_one", "_two", "z-sink"} <= set(listed("all", ""))


def test_the_systems_topics_belong_to_an_admin_of_all(guarded: Guarded) -> None:
    """A role on every name is none on these."""
    for role in ("read", "write"):
        guarded.make(f"{role}_all", (role, ""))
        answer = guarded.ask(f"{role}_all", "GET", "/v1/topics/_transactions")
        said = answer.json()
        assert (403, "admin", "") == (answer.status_code, said["value"], said["limit"])
        assert 200 == guarded.ask(f"{role}_all", "GET", f"/v1/topics/{OTHER}").status_code


def test_a_named_producer_needs_the_role_write_on_its_name(guarded: Guarded) -> None:
    """Its name stands for no topic; without a name nothing is kept, and nothing is needed."""
    document = {"name": "mine-producer"}
    assert 201 == guarded.ask("write", "POST", "/v1/producers", json=document).status_code
    assert 403 == guarded.ask("read", "POST", "/v1/producers", json=document).status_code
    assert 403 == guarded.ask("write_other", "POST", "/v1/producers", json=document).status_code
    assert 201 == guarded.ask("read", "POST", "/v1/producers", json={}).status_code


def test_a_commit_acknowledges_jobs_only_of_topics_that_the_principal_reads(guarded: Guarded) -> None:
    """The topics are in the body."""
    guarded.make("driver", ("write", "mine"))
    part = {"topic": OTHER, "partition": 0, "acks": [{"channel": "c", "tokens": ["x"]}]}
    commit = {"epoch": 1, "parts": [part]}
    answer = guarded.ask("driver", "PUT", "/v1/sinks/mine-sink/batches/0", json=commit)
    assert (403, "read", OTHER) == (
        answer.status_code,
        answer.json().get("value"),
        answer.json().get("limit"),
    ), answer.text
    assert 403 != guarded.ask("all", "PUT", "/v1/sinks/mine-sink/batches/0", json=commit).status_code


@pytest.mark.parametrize("topic", [OTHER, "other-unknown", "_transactions"])
@pytest.mark.parametrize(
    ("method", "path", "document"),
    [
        ("POST", "prepared", {"epoch": 1, "stages": [1]}),
        ("PUT", "", {"epoch": 1, "parts": [{"stages": [1]}]}),
        ("PUT", "", {"epoch": 1, "parts": [{"prepared": 1}]}),
        ("PUT", "", {"epoch": 1, "parts": [{}]}),
    ],
    ids=["prepare", "commit stages", "commit what is prepared", "commit nothing"],
)
def test_a_batch_changes_only_topics_that_the_principal_writes(
    guarded: Guarded, topic: str, method: str, path: str, document: dict[str, Any]
) -> None:
    """The topics are in the body; the answer does not tell whether they exist."""
    place = {"topic": topic, "partition": 0}
    if "parts" in document:
        document = document | {"parts": [place | each for each in document["parts"]]}
    else:
        document = document | place
    answer = guarded.ask("write", method, f"/v1/sinks/mine-sink/batches/0/{path}".rstrip("/"), json=document)

    said = answer.json()
    missing = ("admin", "") if topic.startswith("_") else ("write", topic)
    assert (403, *missing) == (answer.status_code, said.get("value"), said.get("limit")), said


def test_tokens_are_made_listed_and_revoked(guarded: Guarded) -> None:
    """The text is in one answer only; two of one name hold beside each other."""
    grants = [{"role": "write", "prefix": "orders"}]
    asked = {"name": "billing", "grants": grants, "expires": "2101-01-01T00:00:00Z"}
    made = [guarded.ask("all", "POST", "/v1/admin/tokens", json=asked) for _ in range(2)]
    documents = [answer.json() for answer in made]
    text, number = documents[0]["token"], documents[0]["id"]

    assert [201, 201] == [answer.status_code for answer in made]
    assert re.fullmatch(rf"lam_{number}_[A-Za-z0-9_-]{{43}}", text)
    assert "no-store" == made[0].headers["cache-control"]
    assert "2101-01-01T00:00:00.000Z" == documents[0]["expires"]
    guarded.tokens["billing"] = text
    me = guarded.ask("billing", "GET", "/v1/whoami").json()
    expected = {"principal": "billing", "grants": grants, "expires": documents[0]["expires"]}
    assert expected | {"limits": {}, "usage": None} == me
    known = guarded.ask("all", "GET", "/v1/admin/tokens")
    assert text.split("_", 2)[2] not in known.text and "digest" not in known.text
    assert {number, documents[1]["id"]} <= {each["id"] for each in known.json()["tokens"]}
    path = f"/v1/admin/tokens/{number}"
    assert {name: documents[0][name] for name in documents[0] if name != "token"} == guarded.ask(
        "all", "GET", path
    ).json()
    assert 204 == guarded.ask("all", "DELETE", path).status_code
    assert 401 == guarded.ask("billing", "GET", "/v1/whoami").status_code
    gone = [guarded.ask("all", method, path) for method in ("GET", "DELETE")]
    assert [(404, "no_such_token")] * 2 == [(each.status_code, each.json()["code"]) for each in gone]
    guarded.tokens["billing"] = documents[1]["token"]
    assert 200 == guarded.ask("billing", "GET", "/v1/whoami").status_code


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"name": "a b"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "anonymous"}, "name"),
        ({"grants": []}, "grants"),
        ({"grants": [{"role": "root", "prefix": ""}]}, "grants"),
        ({"grants": [{"role": "read", "prefix": "a/b"}]}, "grants"),
        ({"grants": [{"role": "read", "prefix": "", "deny": True}]}, "grants"),
        ({"grants": [{"role": "metrics", "prefix": "a"}]}, "grants.0.prefix"),
        ({"expires": "2020-01-01T00:00:00Z"}, "expires"),
        ({"expires": "tomorrow"}, "expires"),
        ({"certificate": ""}, "certificate"),
        ({"scope": "all"}, "scope"),
    ],
    ids=str,
)
def test_what_is_no_token_is_refused_by_its_field(
    guarded: Guarded, changed: dict[str, Any], named: str
) -> None:
    """With 422, and nothing is made."""
    asked = {"name": "n", "grants": [{"role": "read", "prefix": ""}]} | changed
    answer = guarded.ask("all", "POST", "/v1/admin/tokens", json=asked)

    assert 422 == answer.status_code, answer.text
    assert answer.json()["field"].startswith(named)


def test_a_certificate_gets_no_token(guarded: Guarded) -> None:
    """Its subject name is kept, for clients that show it."""
    asked = {"name": "svc", "grants": [{"role": "read"}], "certificate": "CN=svc,O=example"}
    answer = guarded.ask("all", "POST", "/v1/admin/tokens", json=asked)

    assert (201, None, "CN=svc,O=example") == (
        answer.status_code,
        answer.json()["token"],
        answer.json()["certificate"],
    )


def test_a_stream_of_jobs_ends_with_its_token(guarded: Guarded) -> None:
    """It would last for days otherwise; its last event says why."""
    assert 201 == guarded.ask("all", "PUT", f"/v1/topics/{MINE}/channels/stream", json={}).status_code
    guarded.make("streaming", ("read", "mine"))
    headers = {
        "authorization": f"Bearer {guarded.tokens['streaming']}",
        "accept": "text/event-stream",
    }
    path = f"/v1/topics/{MINE}/channels/stream/receive"
    with guarded.http.stream("POST", path, headers=headers, json={"credit": 1}) as answer:
        assert 200 == answer.status_code
        assert 204 == guarded.ask("all", "DELETE", f"/v1/admin/tokens/{guarded.ids['streaming']}").status_code
        said = answer.read().decode()  # to its end

    assert "event: problem" in said and '"unauthorized"' in said and "was revoked" in said


@pytest.mark.parametrize("framing", ["Content-Length: 5", "Transfer-Encoding: chunked"])
def test_a_token_that_ends_before_the_body_is_there_proves_nothing(guarded: Guarded, framing: str) -> None:
    """Else a client could keep requests that are let in, for minutes, and use them when its token is gone."""
    guarded.make("slow", ("write", "mine"))
    member = guarded.cluster.members[0]
    path = f"/v1/topics/{MINE}/partitions/0/records"
    before = guarded.ask("all", "GET", f"{path[: -len('/records')]}").json()["end_offset"]
    body = [b"hel", b"lo"] if "Length" in framing else [b"5\r\nhel", b"lo\r\n0\r\n\r\n"]
    with socket.create_connection((member.host, member.port + 1), timeout=60) as client:
        head = f"Host: localhost\r\nAuthorization: Bearer {guarded.tokens['slow']}\r\n{framing}\r\n\r\n"
        client.sendall(f"POST {path} HTTP/1.1\r\n{head}".encode() + body[0])
        assert 200 == guarded.ask("slow", "GET", "/v1/whoami").status_code  # so the shard has read the head
        assert 204 == guarded.ask("all", "DELETE", f"/v1/admin/tokens/{guarded.ids['slow']}").status_code
        client.sendall(body[1])
        answer = b""
        while b'"unauthorized"' not in answer and (more := client.recv(65536)):
            answer += more
    assert answer.startswith(b"HTTP/1.1 401 ") and b'"unauthorized"' in answer
    assert before == guarded.ask("all", "GET", f"{path[: -len('/records')]}").json()["end_offset"]


def test_what_a_probe_is_told_has_names_for_an_admin_only(guarded: Guarded) -> None:
    """It needs no token; topics that have too few replicas are named to who may see all."""
    asked = {"replicas": 2, "allow_fewer_replicas": True}
    assert 201 == guarded.ask("all", "PUT", "/v1/topics/mine-secret", json=asked).status_code
    for kind in sorted(_EVERYONE):
        warnings = guarded.ask(kind, "GET", "/readyz").json()["warnings"]
        assert [each for each in warnings if "fewer replicas" in each], warnings
        assert ("mine-secret" in str(warnings)) == (kind == "all")


def test_health_names_topics_to_those_who_may_describe_them(guarded: Guarded) -> None:
    """To the others it says that there is something, and how many."""
    asked = {"replicas": 2, "allow_fewer_replicas": True}
    assert guarded.ask("all", "PUT", "/v1/topics/mine-thin", json=asked).status_code in (200, 201)
    assert 401 == guarded.ask("none", "GET", "/v1/health").status_code
    asking.until(lambda: "mine-thin" in guarded.ask("all", "GET", "/v1/health").text)
    for kind in sorted(_ANY):
        told = guarded.ask(kind, "GET", "/v1/health").json()
        is_theirs = kind in ("read", "write", "admin", "all")
        assert ("warning", is_theirs) == (told["status"], "mine-thin" in str(told))
        assert is_theirs or told["left_out"]["under_replicated"]


@pytest.mark.parametrize("name", ["laminar-principal", "principal", "x-forwarded-user", "laminar-local"])
def test_no_header_makes_a_principal(guarded: Guarded, name: str) -> None:
    """A principal travels between nodes beside the headers; the header that marks these is refused."""
    assert 401 == guarded.ask("none", "GET", "/v1/whoami", headers={name: "admin"}).status_code
    mine = guarded.ask("read", "GET", "/v1/whoami", headers={name: "admin"})
    assert "read" == mine.json()["principal"]
    answer = guarded.ask("read", "GET", f"/v1/topics/{OTHER}", headers={name: "1"})
    assert 403 == answer.status_code
    forwarded = guarded.ask("none", "GET", f"/v1/topics/{OTHER}", headers={"laminar-forwarded": "1"})
    assert "invalid" == forwarded.json()["code"]


def test_readers_export_a_topic_and_its_admins_import_it(guarded: Guarded, tmp_path: Path) -> None:
    """Who may only write has no part in an import, though the topic's settings say its id."""
    assert 200 == guarded.ask("all", "POST", f"/v1/topics/{MINE}/records", content=b"v").status_code

    async def run(kind: str, work: Callable[[Session], Coroutine[Any, Any, Any]]) -> Any:
        async with connect(guarded.cluster.urls, token=guarded.tokens[kind]) as client:
            return await work(client.session)

    def export(session: Session) -> Coroutine[Any, Any, Any]:
        return export_topic(session, MINE, Folder(tmp_path))

    for kind in ("write", "read_other", "admin_other", "metrics"):
        with pytest.raises(Forbidden):
            asyncio.run(run(kind, export))
    manifest, _ = asyncio.run(run("read", export))
    assert 1 <= manifest.records
    _, topic, import_id = plan_import(Folder(tmp_path), "mine-back")

    def restore(session: Session) -> Coroutine[Any, Any, Any]:
        return import_topic(session, Folder(tmp_path), manifest, topic, import_id)

    for kind in ("write", "read", "admin_other", "metrics"):
        with pytest.raises(Forbidden):
            asyncio.run(run(kind, restore))
    body = {"settings": {"importing": "0" * 32}}
    assert 201 == guarded.ask("admin", "PUT", "/v1/topics/mine-half", json=body).status_code
    path, own = "/v1/topics/mine-half/partitions/0/records", {"laminar-import": "0" * 32}
    assert 503 == guarded.ask("write", "POST", path, content=b"v").status_code
    assert 403 == guarded.ask("write", "POST", path, content=b"v", headers=own).status_code
    assert 403 == guarded.ask("read", "GET", path, headers=own).status_code
    assert 201 == guarded.ask("admin", "POST", path, content=b"v", headers=own).status_code
    asyncio.run(run("admin", restore))
    assert 200 == guarded.ask("read", "GET", "/v1/topics/mine-back/partitions/0/records?offset=0").status_code


def test_the_files_of_a_first_start_are_private_and_stay(guarded: Guarded) -> None:
    """Written once, 0600; a restart keeps token and secret."""
    data = guarded.cluster.members[0].data
    before = {name: (data / name).read_text() for name in ("admin-token", "secret")}
    modes = {name: (data / name).stat().st_mode & 0o777 for name in before}
    guarded.cluster.kill(0)
    guarded.cluster.restart(0)

    assert {"admin-token": 0o600, "secret": 0o600} == modes
    assert before == {name: (data / name).read_text() for name in before}
    assert 200 == guarded.ask("all", "GET", "/v1/whoami").status_code
    log = Path(guarded.cluster.members[0].log).read_text()
    assert str(data / "admin-token") in log
    assert guarded.tokens["all"] is not None
    assert guarded.tokens["all"].split("_", 2)[2] not in log and before["secret"].strip() not in log
