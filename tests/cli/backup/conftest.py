"""A node for all tests of backups, a client of it, topics that have all that a record can have, a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import laminar as library
from laminar.client.backup import bucket as bucket_module
from laminar.client.backup import object_store as store_module
from laminar.client.sync.client import Client
from laminar.testing import nodes
from tests.cli.backup import object_store
from tests.cli.backup.backups import filled
from tests.cli.backup.object_store import Cutting
from tests.cli.backup.s3 import BUCKET

numbers = count()


@pytest.fixture(scope="package")
def node_url() -> Iterator[str]:
    """A node of two shards, for this folder's tests."""
    with nodes.serve(shards=2) as url:
        yield url


@pytest.fixture(scope="package")
def client(node_url: str) -> Iterator[Client]:
    with library.connect(node_url) as client:
        yield client


@pytest.fixture
def topic(client: Client, on_node: str) -> str:
    return filled(client, on_node)


@pytest.fixture(scope="package")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with object_store.object_store(tmp_path_factory.mktemp("store")) as url:
        yield url


@pytest.fixture(scope="module")
def descriptions() -> Any:
    """boto's descriptions of S3's requests, read once and not for each client: 70 ms."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


@pytest.fixture
def as_configured(store_url: str, descriptions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a person sets for all tools of AWS, and nothing of whoever runs the tests."""
    import boto3.session
    import botocore.session

    def session(real: Any = boto3.session.Session) -> Any:
        below = botocore.session.Session()
        below.register_component("data_loader", descriptions)
        return real(botocore_session=below)

    monkeypatch.setattr(boto3.session, "Session", session)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", object_store.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", object_store.SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def s3(as_configured: None) -> Any:
    """A client of the store, with a bucket in it."""
    import boto3

    client = boto3.client("s3")
    try:
        client.create_bucket(Bucket=BUCKET)
    except (client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        pass
    return client


@pytest.fixture
def prefix(s3: Any) -> str:
    return f"test-{next(numbers)}"


@pytest.fixture(scope="module")
def kept(client: Client, node_url: str) -> str:
    """A topic for the tests that change nothing of it."""
    return filled(client, node_url)


@pytest.fixture
def cutting(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cutting]:
    """A proxy before the store, for all clients made from now on."""
    monkeypatch.setattr(store_module, "RETRY_S", 0.001)
    proxy = Cutting(store_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    yield proxy
    proxy.close()


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "MOST_PUT_BYTES", 1)
    monkeypatch.setattr(store_module, "PART_BYTES", 5 << 20)
