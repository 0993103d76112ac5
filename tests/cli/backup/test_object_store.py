"""Requests to an object store: what is repeated, what goes on, and how a refusal is named."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pytest

from laminar.client.backup import object_store as store_module
from laminar.client.backup.files import manifest_of
from laminar.client.backup.manifest import MANIFEST
from laminar.client.backup.object_store import ObjectStore
from laminar.client.errors import ConfigError, Error, Unavailable
from tests.cli.backup import object_store
from tests.cli.backup.object_store import Cutting, objects
from tests.cli.backup.s3 import BUCKET, place_of
from tests.cli.conftest import Command

pytestmark = pytest.mark.skipif(not object_store.can_be_had(), reason=object_store.WHY_NONE)


def test_a_put_whose_answer_is_lost_is_carried_out(s3: Any, prefix: str, cutting: Cutting) -> None:
    """So the tests of lost answers show what they say."""
    cuts = iter((0,))
    cutting.cut_answer = lambda request: next(cuts, None)
    with pytest.raises(store_module.Exists):
        place_of(prefix).store.put("1", b"1", only_new=True)
    assert 1 == cutting.cuts and {"1": b"1"} == objects(s3, BUCKET, prefix)


def test_a_read_that_gets_no_further_ends(s3: Any, prefix: str, cutting: Cutting) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{MANIFEST}", Body=b"x" * 10_000)
    left = iter((5_000,))
    cutting.cut_answer = lambda request: next(left, 400)  # its head, and no byte more
    with pytest.raises(Unavailable):
        place_of(prefix).read_manifest()
    assert cutting.cuts > 3


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(
    s3: Any, prefix: str, cutting: Cutting
) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{MANIFEST}", Body=b"x" * 100_000)
    cuts = iter((5_000,))
    cutting.cut_answer = lambda request: next(cuts, None)
    with place_of(prefix).store.open(MANIFEST) as reader:
        s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{MANIFEST}", Body=b"y" * 100_000)
        with pytest.raises(Error) as replaced:
            while reader.read(10_000):
                pass
    assert "damaged" == replaced.value.code


def test_more_objects_than_one_answer_lists_and_those_of_another_prefix(
    s3: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{number}/{0:020}.batches", Body=b"1")
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}-b/8/{0:020}.batches", Body=b"1")
    store = place_of(prefix).store
    lists = store._client.list_objects_v2
    asked = []

    def of_three(**given: Any) -> Any:
        asked.append(given)
        return lists(MaxKeys=3, **given)

    monkeypatch.setattr(store._client, "list_objects_v2", of_three)
    assert [f"{number}/{0:020}.batches" for number in range(7)] == sorted(store.listed())
    assert 3 == len(asked)


PARTS = bytes(range(256)) * 50_000  # 12.8 MB: three parts, of which S3 wants 5 MiB at least but for the last


def created(prefix: str, data: bytes) -> None:
    """Create an object of these bytes, in parts."""
    place_of(prefix).create("1", io.BytesIO(data), len(data), hashlib.sha256(data).digest())


@pytest.mark.parametrize("least", [0, 60, 200])
def test_an_upload_in_parts_whose_answers_are_lost_is_whole(
    least: int, s3: Any, prefix: str, cutting: Cutting, in_parts: None
) -> None:
    seen: set[str] = set()

    def first_time(request: str) -> int | None:
        is_new = request not in seen and not request.startswith("GET")
        seen.add(request)
        return least if is_new else None

    cutting.cut_answer = first_time
    created(prefix, PARTS)
    assert 5 <= cutting.cuts
    assert {"1": PARTS} == objects(s3, BUCKET, prefix)


@pytest.mark.parametrize("operation", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_an_upload_in_parts_that_a_gateway_refuses_is_whole(
    operation: str, s3: Any, prefix: str, in_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once by a page that is none of S3, which is repeated; or for good, and then nothing is there."""
    import botocore.exceptions

    monkeypatch.setattr(store_module, "RETRY_S", 0.001)
    answer: Any = {"Error": {"Code": "502"}, "ResponseMetadata": {"HTTPStatusCode": 502}}
    refusals = iter(range(1 + store_module.ATTEMPTS))
    connected = ObjectStore._connected

    def refusing(store: ObjectStore, text: str) -> Any:
        client = connected(store, text)
        carry_out = getattr(client, operation)

        def refused(**given: Any) -> Any:
            if next(refusals, None) is not None:
                raise botocore.exceptions.ClientError(answer, operation)
            return carry_out(**given)

        setattr(client, operation, refused)
        return client

    monkeypatch.setattr(ObjectStore, "_connected", refusing)
    with pytest.raises(Unavailable):
        created(prefix, PARTS)
    assert {} == objects(s3, BUCKET, prefix)
    created(prefix, PARTS)
    assert {"1": PARTS} == objects(s3, BUCKET, prefix)
    assert not s3.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/").get("Uploads")


def test_an_object_in_parts_is_not_replaced(s3: Any, prefix: str, in_parts: None) -> None:
    created(prefix, PARTS)
    created(prefix, PARTS)
    with pytest.raises(ConfigError) as refused:
        created(prefix, PARTS[1:])
    assert "in_use" == refused.value.code
    assert {"1": PARTS} == objects(s3, BUCKET, prefix)


def test_a_store_that_does_not_answer_and_credentials_that_are_missing_are_named(
    s3: Any, prefix: str, monkeypatch: pytest.MonkeyPatch, laminar: Command
) -> None:
    monkeypatch.setattr(store_module, "ATTEMPTS", 1)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        with pytest.raises(Unavailable) as away:
            manifest_of(place_of(prefix))
        assert "127.0.0.1:9" in str(away.value)
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(ConfigError) as nobody:
            manifest_of(place_of(prefix))
        assert "AWS_PROFILE" in str(nobody.value)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", "no url")
        with pytest.raises(ConfigError) as wrong:
            place_of(prefix)
        assert "no url" in str(wrong.value)


@pytest.mark.parametrize(
    ("status", "body", "raised", "said"),
    [
        ("200 OK", "<html>a console</html>", Unavailable, "none of S3's"),
        ("403 Forbidden", "<html>no</html>", Error, "HTTP 403"),
        ("404 Not Found", "<html>no</html>", Error, "HTTP 404"),
        ("502 Bad Gateway", "<html>no</html>", Unavailable, "HTTP 502"),
    ],
)
def test_an_endpoint_that_is_none_of_s3_is_named(
    status: str,
    body: str,
    raised: type[Error],
    said: str,
    s3: Any,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "ATTEMPTS", 2)
    monkeypatch.setattr(store_module, "RETRY_S", 0.001)
    page = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
    with object_store.answering(page) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        with pytest.raises(raised) as named:
            place_of(prefix).read_manifest()
    assert said in str(named.value) and "object_store" == named.value.code
    assert isinstance(named.value, Unavailable) == (raised is Unavailable)


def test_a_manifest_whose_bytes_changed_on_the_way_is_not_taken(
    s3: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{MANIFEST}", Body=b"x" * 100, ChecksumAlgorithm="CRC32")
    place = place_of(prefix)
    get = place.store._client.get_object

    def changed(**given: Any) -> Any:
        answer = get(**given)
        raw = answer["Body"]._raw_stream
        read = raw.read
        raw.read = lambda *amount: read(*amount).replace(b"xx", b"xy", 1)
        return answer

    monkeypatch.setattr(place.store._client, "get_object", changed)
    with pytest.raises(Unavailable) as other:
        place.read_manifest()
    assert "others" in str(other.value)


def test_a_conflict_at_the_store_is_repeated(s3: Any, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As S3 asks for it, when two writes of one name meet."""
    import botocore.exceptions

    monkeypatch.setattr(store_module, "RETRY_S", 0.001)
    store = place_of(prefix).store
    put, conflicts = store._client.put_object, iter((1, 2))
    answer: Any = {
        "Error": {"Code": "ConditionalRequestConflict"},
        "ResponseMetadata": {"HTTPStatusCode": 409},
    }

    def conflicting(**given: Any) -> Any:
        if next(conflicts, None):
            raise botocore.exceptions.ClientError(answer, "PutObject")
        return put(**given)

    monkeypatch.setattr(store._client, "put_object", conflicting)
    store.put("1", io.BytesIO(b"1"), only_new=True)
    assert {"1": b"1"} == objects(s3, BUCKET, prefix)
