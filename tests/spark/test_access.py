"""The source and the sink on a node that asks for tokens and speaks TLS; where a token must not be seen."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import laminar
from laminar.client.net.endpoints import Endpoints
from laminar.spark.read.cluster import resolve_endpoints
from laminar.spark.read.options import parse
from tests.cluster.guarded import Guarded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded(tmp_path_factory.mktemp("guarded"), tls=True, nodes=1) as cluster:
        yield cluster


@pytest.fixture
def topics(guarded: Guarded, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Two topics named after the test; the first has 500 records."""
    test = re.sub(r"[^A-Za-z0-9_]+", "-", request.node.name)
    names = f"{test}-from", f"{test}-to"
    with guarded.connect() as client:
        for name in names:
            client.create_topic(name, partitions=3)
        with client.topic(names[0]).producer() as producer:
            for number in range(500):
                producer.send(b"%d" % number, key=str(number % 7))
    return names


def token_of(guarded: Guarded, *grants: str) -> str:
    """Make a token with these grants, written ROLE:PREFIX."""
    asked = [dict(zip(("role", "prefix"), each.split(":"), strict=True)) for each in grants]
    with guarded.connect() as client:
        made = client.request_json("POST", "/v1/admin/tokens", {"name": "spark", "grants": asked})
    return str(made["token"])


def copied(guarded: Guarded, topic: str) -> list[int]:
    with guarded.connect() as client:
        return sorted(int(record.text) for record in client.topic(topic).read())


@pytest.mark.parametrize(
    "by_file", [pytest.param(False, id="token", marks=pytest.mark.long), pytest.param(True, id="file")]
)
@pytest.mark.usefixtures("compiled")
def test_source_and_sink_go_over_tls_with_a_token(
    guarded: Guarded, topics: tuple[str, str], spark: SparkSession, tmp_path: Path, by_file: bool
) -> None:
    """In a batch and in a stream, in the driver and in tasks; no plan and no option shows the token."""
    source, target = topics
    token = token_of(guarded, f"read:{source}", f"write:{target}", "write:spark-")
    (tmp_path / "token").write_text(token)
    cluster = {"laminar.endpoints": guarded.urls[0], "laminar.ca": str(guarded.ca)}
    cluster |= {"laminar.tokenFile": str(tmp_path / "token")} if by_file else {"laminar.token": token}

    rows = spark.read.format("laminar").options(**cluster).option("subscribe", source).load()
    assert 500 == rows.count()
    plan = rows._jdf.queryExecution().toString()  # type: ignore[operator]
    rows.select("key", "value").write.format("laminar").options(**cluster).option("topic", target).mode(
        "append"
    ).save()
    query = (
        spark.readStream.format("laminar")
        .options(**cluster)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .load()
        .select("key", "value")
        .writeStream.format("laminar")
        .options(**cluster)
        .option("topic", target)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(240)

    assert sorted([*range(500), *range(500)]) == copied(guarded, target)
    stored = [file.read_bytes() for file in (tmp_path / "checkpoint").rglob("*") if file.is_file()]
    for text in (plan, str(query.lastProgress), *map(str, stored)):
        assert token not in text and token.split("_", 2)[2] not in text


@pytest.mark.parametrize("fault", ["token", "role", "ca"])
def test_what_is_refused_is_said_without_the_token(
    guarded: Guarded, topics: tuple[str, str], spark: SparkSession, fault: str
) -> None:
    """And soon: it is no outage."""
    source, target = topics
    token = f"lam_{16 * '0'}_{43 * 'A'}" if fault == "token" else token_of(guarded, f"read:{target}")
    options = {"laminar.endpoints": guarded.urls[0], "laminar.token": token, "subscribe": source}
    if fault != "ca":
        options["laminar.ca"] = str(guarded.ca)
    said = {"token": "Unauthorized", "role": "Forbidden", "ca": "is not accepted"}[fault]

    with pytest.raises(Exception, match=said) as failed:
        spark.read.format("laminar").options(**options).load().collect()

    assert token not in str(failed.value)


def test_tasks_need_no_files(guarded: Guarded, tmp_path: Path) -> None:
    """They are given what the driver read; where the token's file is there as well, it holds."""
    assert guarded.ca is not None
    file, ca = tmp_path / "token", tmp_path / "ca.pem"
    file.write_text(guarded.admin_token)
    ca.write_text("# the cluster's CA\n" + guarded.ca.read_text())
    given = {"subscribe": "t", "laminar.endpoints": guarded.urls[0]}
    options = parse(given | {"laminar.tokenFile": str(file), "laminar.ca": str(ca)})
    endpoints: Endpoints = pickle.loads(pickle.dumps(resolve_endpoints(options)))
    file.unlink()
    ca.unlink()

    from laminar.client.sync.client import Client as SyncClient

    def principal() -> Any:
        from laminar.client.client import Client

        with SyncClient(Client(endpoints, timeout=60)) as client:
            return client.request_json("GET", "/v1/whoami")["principal"]

    assert "admin" == principal()
    assert guarded.admin_token not in repr(endpoints) + repr(options)
    file.write_text(token_of(guarded, "read:t"))
    assert "spark" == principal()
    with pytest.raises(laminar.ConfigError, match="No such file"):
        resolve_endpoints(parse(given | {"laminar.ca": str(ca)}))
