"""Limits of principals, at a real node: what is refused, what is said, and that others don't notice."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

import laminar
import laminar.aio
from laminar.testing.cluster import LocalCluster
from tests.http.serving import read_answer
from tests.node.api.asking import fresh_metrics, until


@dataclass
class Limited:
    """A node, an admin, and principals whose limits a test sets."""

    cluster: LocalCluster
    http: httpx.Client
    tokens: dict[str, str | None] = field(default_factory=dict)

    def ask(self, who: str, method: str, target: str, **more: Any) -> httpx.Response:
        """Ask as a principal; one that is new gets a token with all roles on its names."""
        if who not in self.tokens:
            grants = [{"role": "admin", "prefix": who}]
            made = self.ask("all", "POST", "/v1/admin/tokens", json={"name": who, "grants": grants})
            self.tokens[who] = made.json()["token"]
        headers = {"authorization": f"Bearer {self.tokens[who]}"} | more.pop("headers", {})
        return self.http.request(method, target, headers=headers, **more)

    def limit(self, who: str, **limits: int) -> httpx.Response:
        """Set the limits of a principal, whatever they were."""
        headers = {"if-match": "*"}
        answer = self.ask("all", "PUT", f"/v1/admin/limits/{who}", json=limits, headers=headers)
        assert 200 == answer.status_code, answer.text
        return answer

    def refusals(self, who: str) -> float:
        """Return how many requests of a principal were refused for a limit."""
        text = self.metrics()
        found = re.search(rf'laminar_principal_refused_total{{principal="{who}"}} (\S+)', text)
        return 0.0 if found is None else float(found[1])

    def metrics(self) -> str:
        """Return the metrics as they are now."""
        headers = {"authorization": f"Bearer {self.tokens['all']}"}
        url = self.cluster.urls[0]
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            return fresh_metrics(http)

    def create(self, who: str, name: str, **more: Any) -> httpx.Response:
        """Create a topic."""
        return self.ask(who, "PUT", f"/v1/topics/{name}", json=more)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    """One node of one shard, so that each answer is by the view that the test has changed."""
    settings = {"access": "tokens"}
    with (
        LocalCluster(tmp_path_factory.mktemp("quotas"), nodes=1, shards=1, settings=settings) as cluster,
        httpx.Client(base_url=cluster.urls[0], timeout=60, trust_env=False) as http,
    ):
        yield Limited(cluster, http, {"all": cluster.admin_token})


def refused(answer: httpx.Response, what: str, value: int, limit: int) -> dict[str, Any]:
    """Return the document of a refusal of this limit."""
    said: dict[str, Any] = answer.json()
    got = (answer.status_code, said["code"], said["field"], said["value"], said["limit"], said["outcome"])
    assert (429, "quota", what, value, limit, "not_applied") == got
    return said


def test_limits_are_compared_and_set(limited: Limited) -> None:
    """Each change names the version before it."""
    path = "/v1/admin/limits/cas"
    first = limited.ask("all", "GET", path)
    assert ({"principal": "cas", "limits": {}, "version": 0}, '"0"') == (first.json(), first.headers["etag"])
    blind = limited.ask("all", "PUT", path, json={"topics": 1})
    made = limited.ask("all", "PUT", path, json={"topics": 1}, headers={"if-match": '"0"'})
    late = limited.ask("all", "PUT", path, json={"topics": 2}, headers={"if-match": '"0"'})
    changed = limited.ask("all", "PUT", path, json={"sinks": 2}, headers={"if-match": made.headers["etag"]})

    assert [428, 200, 412, 200] == [each.status_code for each in (blind, made, late, changed)]
    assert {"sinks": 2} == changed.json()["limits"]
    listed = limited.ask("all", "GET", "/v1/admin/limits").json()["principals"]
    assert changed.json() in listed
    assert {} == limited.limit("cas").json()["limits"]
    for wrong in ({"topics": 0}, {"topics": "1"}, {"topics": 2**53}, {"topic": 1}):
        answer = limited.ask("all", "PUT", path, json=wrong, headers={"if-match": "*"})
        assert 422 == answer.status_code and answer.json()["field"] == next(iter(wrong)), answer.text
    assert 422 == limited.ask("all", "GET", "/v1/admin/limits/a b").status_code


def test_topics_partitions_and_channels_are_counted(limited: Limited) -> None:
    """For who created the topic; the refusal has no Retry-After, as no time helps. Whoami says how many."""
    limited.limit("maker", topics=2, partitions=3, channels=1)
    assert 201 == limited.create("maker", "maker-1").status_code
    said = refused(limited.create("maker", "maker-2", partitions=3), "partitions", 4, 3)
    assert "retry_after_ms" not in said and "whoami" in said["hint"]
    assert 201 == limited.create("maker", "maker-2", partitions=2).status_code
    assert "retry-after" not in limited.create("maker", "maker-3").headers
    refused(limited.create("maker", "maker-3"), "topics", 3, 2)
    assert 200 == limited.create("maker", "maker-2", partitions=2).status_code
    assert 201 == limited.create("all", "maker-3").status_code
    assert 201 == limited.ask("maker", "PUT", "/v1/topics/maker-1/channels/c", json={}).status_code
    refused(limited.ask("all", "PUT", "/v1/topics/maker-2/channels/c", json={}), "channels", 2, 1)
    wanted = {"after": 0, "inputs": [0], "cuts": [32768]}
    split = limited.ask("maker", "POST", "/v1/topics/maker-1/routes", json=wanted)
    refused(split, "partitions", 5, 3)
    who = limited.ask("maker", "GET", "/v1/whoami").json()
    assert {"topics": 2, "partitions": 3, "channels": 1} == who["limits"]
    assert who["limits"] | {"connections": 1} == who["usage"]
    assert None is limited.ask("all", "GET", "/v1/whoami").json()["usage"]

    etag = limited.ask("maker", "GET", "/v1/topics/maker-1").headers["etag"]
    deleted = limited.ask("maker", "DELETE", "/v1/topics/maker-1", headers={"if-match": etag})
    assert 202 == deleted.status_code
    assert 201 == limited.create("maker", "maker-4").status_code


def test_requests_are_refused_from_their_head(limited: Limited) -> None:
    """With the time until one is let in. Those that need an admin of all are not, nor are others'."""
    limited.ask("eager", "GET", "/v1/topics")
    limited.limit("eager", requests_per_s=2)
    begun_s, taken = time.monotonic(), 0
    while (first := limited.ask("eager", "GET", "/v1/topics")).status_code == 200:
        taken += 1
    assert 2 <= taken <= 2 + 2 * (time.monotonic() - begun_s)
    said = first.json()
    assert (429, "quota", "requests_per_s", 2) == (
        first.status_code,
        *map(said.get, ("code", "field", "limit")),
    )
    assert 0 < said["retry_after_ms"] <= 500 and "1" == first.headers["retry-after"]
    while (second := limited.ask("eager", "GET", "/v1/topics")).status_code == 200:
        pass
    assert 0 < second.json()["retry_after_ms"] <= 1500
    assert "principal 'eager' has used up its requests_per_s at this shard" == said["detail"]
    assert 200 == limited.ask("calm", "GET", "/v1/topics").status_code
    assert 200 == limited.http.get("/livez").status_code
    limited.limit("all", requests_per_s=1)
    assert [200] * 5 == [limited.ask("all", "GET", "/v1/admin/limits").status_code for _ in range(5)]
    limited.limit("all")
    assert limited.refusals("eager") >= 2
    limited.limit("eager")
    assert [200] * 9 == [limited.ask("eager", "GET", "/v1/topics").status_code for _ in range(9)]


async def test_a_client_that_does_not_wait_is_muted(limited: Limited) -> None:
    """So its refusals cost the shard no more than what is let in. An operator is never muted."""
    limited.ask("pushy", "GET", "/v1/topics")

    def muted() -> float:
        found = re.findall(r"laminar_http_muted_total\{.*\} (\S+)", limited.metrics())
        return sum(map(float, found))

    at = httpx.URL(limited.http.base_url)
    for who, name, times in (("all", "admin", 0), ("pushy", "pushy", 5)):
        limited.limit(name, requests_per_s=50)
        before = muted()
        reader, writer = await asyncio.open_connection(at.host, at.port)
        proof = f"Authorization: Bearer {limited.tokens[who]}"
        request = f"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n{proof}\r\n\r\n".encode()
        statuses: list[int] = []
        begun_s = time.monotonic()
        while not 5 <= statuses.count(429):  # 60 at once, but on a machine that stands still meanwhile
            writer.write(request * 70)
            for _ in range(70):
                statuses.append((await read_answer(reader))[0])
        took_s = time.monotonic() - begun_s
        writer.close()
        limited.limit(name)
        assert {200, 429} == set(statuses), who
        assert statuses.count(200) <= 50 + 50 * took_s + 1, who
        assert muted() - before >= times and (times or muted() == before)


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "in chunks"])
def test_bytes_are_counted_both_ways(limited: Limited, chunked: bool) -> None:
    """A body that is larger than the rate passes, and the next one waits; so it is with answers."""
    who = f"bytes{int(chunked)}"
    assert 201 == limited.create(who, f"{who}-t").status_code
    records, body = f"/v1/topics/{who}-t/partitions/0/records", b"x" * 50_000
    headers = {"content-type": "application/octet-stream"}
    limited.limit(who, bytes_in_per_s=2_000)
    sent = [
        limited.ask(who, "POST", records, content=iter([body]) if chunked else body, headers=headers)
        for _ in range(2)
    ]
    assert [201, 429] == [each.status_code for each in sent]
    assert "bytes_in_per_s" == sent[1].json()["field"] and 1000 < sent[1].json()["retry_after_ms"] < 60_000
    limited.limit(who, bytes_out_per_s=2_000)
    read = [limited.ask(who, "GET", f"{records}?offset=0") for _ in range(2)]
    assert [200, 429] == [each.status_code for each in read]
    assert "bytes_out_per_s" == read[1].json()["field"] and len(read[0].content) > 50_000


def test_connections_are_counted_while_they_are_open(limited: Limited) -> None:
    """The one that is too many is closed after its answer; the place of one that ends is free."""
    limited.ask("two", "GET", "/v1/topics")
    limited.limit("two", connections=3)
    headers = {"authorization": f"Bearer {limited.tokens['two']}"}
    clients = [
        httpx.Client(base_url=limited.cluster.urls[0], headers=headers, trust_env=False) for _ in range(4)
    ]
    try:
        # The shared client is of an admin by now, so none of these is its own.
        limited.ask("all", "GET", "/v1/topics")
        answers = [client.get("/v1/topics") for client in clients]
        assert [200, 200, 200, 429] == [each.status_code for each in answers]
        said = refused(answers[3], "connections", 4, 3)
        assert said["retry_after_ms"] == 1000 and "close" == answers[3].headers["connection"]
        assert 3 == clients[0].get("/v1/whoami").json()["usage"]["connections"]
        clients.pop(0).close()
        until(lambda: clients[-1].get("/v1/topics").status_code == 200)  # its place is free
        assert 200 == limited.http.get("/livez").status_code
    finally:
        for client in clients:
            client.close()


def test_clients_wait_and_go_on(limited: Limited) -> None:
    """Both faces: an append beyond the rate is done once, later. A count that is reached fails at once."""
    assert 201 == limited.create("patient", "patient-t").status_code
    limited.limit("patient", requests_per_s=20, topics=1)
    url, token = limited.cluster.urls[0], limited.tokens["patient"]
    with laminar.connect(url, token=token) as client:
        topic = client.topic("patient-t")
        offsets = [topic.append(b"%d" % number).offset for number in range(30)]
        with pytest.raises(laminar.Overloaded, match="would have 2 topics, and may have 1") as raised:
            client.create_topic("patient-2")
    assert list(range(30)) == offsets
    error = raised.value
    assert ("quota", "topics", 2, 1) == (error.code, error.field, error.value, error.limit)
    assert not error.retriable and "whoami" in str(error)

    async def more(first: int) -> list[int]:
        async with laminar.aio.connect(url, token=token) as client:
            topic = client.topic("patient-t")
            appended = await asyncio.gather(*(topic.append(b"%d" % number) for number in range(30)))
            return sorted(receipt.offset - first for receipt in appended)

    for first in range(30, 30 * 11, 30):  # all at once: only a machine that stands still refuses none of them
        assert list(range(30)) == asyncio.run(more(first))
        if limited.refusals("patient") > 0:
            break
    else:
        pytest.fail("no client was ever refused")


def test_cursors_count_for_who_made_them(limited: Limited) -> None:
    """In each partition; also those that begin at a place, or are rewound; until they are deleted."""
    assert 201 == limited.create("reader", "reader-t", partitions=2).status_code
    limited.limit("reader", cursors=2)

    def put(who: str, name: str, document: dict[str, Any]) -> httpx.Response:
        return limited.ask(who, "PUT", f"/v1/topics/reader-t/cursors/{name}", json=document)

    def positions(number: int) -> dict[str, Any]:
        return {"positions": {str(number): 0}}

    assert 200 == put("reader", "a", positions(0)).status_code
    assert 200 == put("all", "admins", positions(0)).status_code
    assert 200 == put("reader", "b", {"begin": "earliest"}).status_code
    refused(put("reader", "c", positions(0)), "cursors", 3, 2)
    refused(put("reader", "c", {"begin": "latest"}), "cursors", 3, 2)
    refused(put("reader", "d", {"rewind": "earliest"}), "cursors", 3, 2)
    assert 200 == put("reader", "a", positions(0)).status_code
    assert 200 == put("all", "more", positions(0)).status_code
    for taken in ("c", "d"):  # what was refused in one partition may be there in the other
        assert 204 == limited.ask("reader", "DELETE", f"/v1/topics/reader-t/cursors/{taken}").status_code
    assert 200 == put("reader", "e", positions(1)).status_code
    assert 200 == put("all", "a", positions(0)).status_code  # of the reader all the same
    refused(put("reader", "f", positions(0)), "cursors", 3, 2)
    assert 204 == limited.ask("all", "DELETE", "/v1/topics/reader-t/cursors/a").status_code
    assert 200 == put("reader", "f", positions(0)).status_code


def test_sinks_and_names_of_producers_are_counted(limited: Limited) -> None:
    """At one coordinator of eight: so at the ninth at the latest the second one is refused."""
    limited.limit("driver", sinks=1, producers=1)

    def of_sinks(path: str) -> list[httpx.Response]:
        return [limited.ask("driver", "POST", f"/v1/sinks/driver-{path}{number}") for number in range(9)]

    begun = of_sinks("s")
    assert {200, 429} == {each.status_code for each in begun}
    last = next(each for each in begun if each.status_code == 429)
    refused(last, "sinks", 2, 1)
    assert [each.status_code for each in begun] == [each.status_code for each in of_sinks("s")]
    named = [
        limited.ask("driver", "POST", "/v1/producers", json={"name": f"driver-{number}"})
        for number in range(9)
    ]
    assert {201, 429} == {each.status_code for each in named}
    refused(next(each for each in named if each.status_code == 429), "producers", 2, 1)
    for number, each in enumerate(begun):
        if each.status_code == 200:
            assert 204 == limited.ask("driver", "DELETE", f"/v1/sinks/driver-s{number}").status_code
    assert 200 in {each.status_code for each in of_sinks("t")}


def test_open_uploads_are_counted(limited: Limited) -> None:
    """One that is there goes on; one that is dropped makes room."""
    assert 201 == limited.create("large", "large-t").status_code
    limited.limit("large", uploads=2)

    def part(name: str, number: int) -> httpx.Response:
        path = f"/v1/topics/large-t/partitions/0/uploads/{name}/parts/{number}"
        return limited.ask("large", "PUT", path, content=b"x")

    assert [201, 201, 201] == [part(*each).status_code for each in (("a", 0), ("b", 0), ("a", 1))]
    refused(part("c", 0), "uploads", 3, 2)
    assert 201 == part("b", 1).status_code
    drop = limited.ask("large", "DELETE", "/v1/topics/large-t/partitions/0/uploads/a")
    assert (204, 201) == (drop.status_code, part("c", 0).status_code)


def test_new_producers_and_keys_are_counted(limited: Limited) -> None:
    """On both routes; those that are known go on, and other principals bring theirs."""
    assert 201 == limited.create("fresh", "fresh-t").status_code
    limited.limit("fresh", producers=3)

    def append(who: str, key: str, where: str = "/partitions/0") -> httpx.Response:
        headers = {"idempotency-key": key, "content-type": "application/octet-stream"}
        return limited.ask(who, "POST", f"/v1/topics/fresh-t{where}/records", content=b"x", headers=headers)

    assert [201, 201] == [append("fresh", key).status_code for key in ("a", "b")]
    headers = {"idempotency-key": "c", "content-type": "application/x-ndjson"}
    to_topic = limited.ask("fresh", "POST", "/v1/topics/fresh-t/records", content=b"{}\n", headers=headers)
    assert 200 == to_topic.status_code
    said = append("fresh", "d").json()
    assert ("quota", "producers", 4, 3) == (said["code"], said["field"], said["value"], said["limit"])
    assert 60_000 == said["retry_after_ms"]
    again = append("fresh", "a")
    assert (201, "1") == (again.status_code, again.headers["laminar-replayed"])
    assert 201 == append("all", "d").status_code


def test_a_fenced_or_accepted_producer_that_is_new_counts(limited: Limited) -> None:
    """It takes a place in the partition's table as one that appends does; one that is known goes on."""
    assert 201 == limited.create("fencing", "fencing-t").status_code
    limited.limit("fencing", producers=2)
    path = "/v1/topics/fencing-t/partitions/0"

    def fence(producer: str, epoch: int = 1) -> httpx.Response:
        return limited.ask("fencing", "PUT", f"{path}/producers/{producer}?epoch={epoch}")

    assert 200 == fence("1" * 32).status_code
    headers = {"content-type": "application/octet-stream", "laminar-sequence": "0"}
    first, second = ({"laminar-producer": each * 32} for each in "23")
    target = f"{path}/records?ack=accepted"
    accepted = limited.ask("fencing", "POST", target, content=b"x", headers=headers | first)
    assert 202 == accepted.status_code, accepted.text
    refused(fence("4" * 32), "producers", 3, 2)
    refused(limited.ask("fencing", "POST", target, content=b"x", headers=headers | second), "producers", 3, 2)
    assert [200, 200] == [fence(each * 32, epoch=2).status_code for each in "12"]
    assert 404 == limited.ask("all", "GET", f"{path}/producers/{'4' * 32}").status_code


def test_a_producer_at_its_limit_keeps_order_and_doubles_nothing(limited: Limited) -> None:
    """Several batches are on their way at once, and any of them may be refused."""
    assert 201 == limited.create("steady", "steady-t").status_code
    limited.limit("steady", requests_per_s=50, bytes_in_per_s=40_000)
    url, token = limited.cluster.urls[0], limited.tokens["steady"]
    before = limited.refusals("steady")
    with laminar.connect(url, token=token) as client:
        with client.topic("steady-t").producer(batch_bytes=500) as producer:
            for number in range(150):
                producer.send(b"%d " % number + b"x" * 400, key="k")
    assert limited.refusals("steady") > before, "no batch was ever refused"
    limited.limit("steady")
    with laminar.connect(url, token=token) as client:
        values = [int(bytes(record.value).split()[0]) for record in client.topic("steady-t").read()]
    assert list(range(150)) == values
