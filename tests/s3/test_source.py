"""Adapters in a bucket: which objects are an adapter's, and what is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from s3_proxy import Proxy
from s3_server import BUCKET, Server

from adaptercache import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    CapacityError,
    LoadFailed,
)
from adaptercache.s3.failures import S3Failure
from adaptercache.testing import TierContract
from adaptercache.tiers.remote import CONFIG, WEIGHTS, open_source


def whole(source: Any, adapter_id: str, name: str = WEIGHTS, piece: int = 1 << 20) -> bytes:
    """A file of an adapter, read in pieces, and checked."""
    revision = source.revision(adapter_id)
    size = source.files(adapter_id, revision)[name]
    data, buffer = b"", memoryview(bytearray(piece))
    while len(data) < size:
        count = source.read(adapter_id, revision, name, len(data), buffer)
        data += bytes(buffer[:count])
    source.check(adapter_id, revision, name, memoryview(data))
    return data


class Bucket:
    """An `S3Source` and who writes its bucket, as the contract wants them."""

    def __init__(self, client: Any, source: Any, prefix: str) -> None:
        self.capacity, self.unit = 8, 64
        self._client, self._source, self._prefix = client, source, prefix

    def store(self, name: str, data: bytes) -> None:
        if self.used() + -(-len(data) // self.unit) > self.capacity:
            raise CapacityError("as much as the contract asks for")
        for file, body in ((CONFIG, b"{}"), (WEIGHTS, data)):
            key = f"{self._prefix}/{name}/{file}"
            self._client.put_object(Bucket=BUCKET, Key=key, Body=body)

    def store_in_vain(self, name: str, data: bytes) -> None:
        raise OSError("a source is not written by us")

    def load(self, name: str) -> bytes:
        try:
            return whole(self._source, name)
        except AdapterNotFound as error:
            raise KeyError(name) from error

    def drop(self, name: str) -> None:
        for file in (CONFIG, WEIGHTS):
            self._client.delete_object(Bucket=BUCKET, Key=f"{self._prefix}/{name}/{file}")

    def used(self) -> int:
        """As the bucket lists it: one request, and the contract asks often."""
        listed = self._client.list_objects_v2(Bucket=BUCKET, Prefix=f"{self._prefix}/")
        entries = [entry for entry in listed.get("Contents", ()) if entry["Key"].endswith(WEIGHTS)]
        return sum(-(-entry["Size"] // self.unit) for entry in entries)


class TestBucket(TierContract):
    @pytest.fixture(autouse=True)
    def bucket(self, client: Any, source: Any, prefix: str) -> None:
        self._of_this_test = Bucket(client, source(), prefix)

    @contextmanager
    def tier(self) -> Iterator[Bucket]:
        yield self._of_this_test


IDS = [
    *("with space", "plus+plus", "per%cent", "%2e%2e", "a%2Fb", "ünï/😀", "x" * 200),
    *("c:d", "quo'te\"", "a&b=c?d#e", "semi;colon", "star*", "-x", "dots.in.it", "~tilde"),
    *("e\u0301", "\u00e9", "deep/er/and/deeper"),
]


def test_any_name_that_a_key_can_have_is_an_id(source: Any, publish: Any) -> None:
    source = source()
    for name in IDS:
        publish(name, name.encode())
    assert sorted(source.ids()) == sorted(IDS)
    for name in IDS:
        assert whole(source, name) == name.encode(), name


STRANGE = [
    *("..", ".", "", "/", "//a", "a/", "/a", "a//b", "../secret", "a/../../secret", "./a"),
    *("a\0", "\0", "a/\0/b", "unknown", "team", "a/b", "x" * 1100, "y/" * 5000 + "y", "\udc80"),
]


@pytest.mark.parametrize("adapter_id", STRANGE, ids=lambda text: ascii(text[:20]))
def test_an_id_that_names_no_adapter_is_not_found(
    source: Any, publish: Any, client: Any, prefix: str, adapter_id: str
) -> None:
    publish("a", b"weights")
    publish("team/b", b"weights")
    client.put_object(Bucket=BUCKET, Key=f"{prefix.rpartition('/')[0]}/secret/{CONFIG}", Body=b"{}")
    with pytest.raises(AdapterNotFound):
        source().revision(adapter_id)


def test_an_id_does_not_match_one_that_begins_with_it(source: Any, publish: Any) -> None:
    """Row 193 of the field's cases: ``a/1`` and ``a/10``."""
    for name in ("a/10", "a/19", "a/1x"):
        publish(name, b"other")
    with pytest.raises(AdapterNotFound):
        source().revision("a/1")
    publish("a/1", b"its own")
    assert whole(source(), "a/1") == b"its own"


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_slashes_at_the_end_of_the_url_mean_nothing(
    source: Any, publish: Any, prefix: str, end: str
) -> None:
    publish("a", b"weights")
    assert whole(source(f"s3://{BUCKET}/{prefix}{end}"), "a") == b"weights"


def test_a_bucket_without_a_prefix(source: Any, publish: Any, prefix: str) -> None:
    publish("a", b"weights")
    assert whole(source(f"s3://{BUCKET}"), f"{prefix}/a") == b"weights"


@pytest.mark.parametrize("url", ["s3://", "s3:///a", "s3://b c/d", "http://b/c", "b/c", "s3://u@b"])
def test_a_url_that_names_no_bucket_is_refused(source: Any, url: str) -> None:
    with pytest.raises(ValueError, match="s3://bucket/prefix"):
        source(url)


def test_a_url_is_a_source(publish: Any, prefix: str) -> None:
    publish("a", b"weights")
    opened = open_source(f"s3://{BUCKET}/{prefix}")  # endpoint and keys from the environment
    try:
        assert whole(opened, "a") == b"weights"
    finally:
        opened.close()  # type: ignore[attr-defined]


def test_only_config_and_weights_are_fetched(
    source: Any, publish: Any, client: Any, proxy: Proxy, prefix: str
) -> None:
    publish("a", b"weights")
    for name in ("optimizer.pt", "README.md", "checkpoint-100/adapter_model.safetensors"):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/a/{name}", Body=bytes(1000))
    source = source()
    assert dict(source.files("a", source.revision("a"))) == {CONFIG: 2, WEIGHTS: 7}
    whole(source, "a")
    assert proxy.count("GET", "optimizer") == 0


def test_a_folder_without_config_is_invalid(source: Any, client: Any, prefix: str) -> None:
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/a/{WEIGHTS}", Body=b"weights")
    with pytest.raises(AdapterInvalid, match=CONFIG):
        source().revision("a")


@pytest.mark.parametrize("name", ["adapters.safetensors", "new_embeddings.safetensors"])
def test_what_is_not_served_is_refused_by_name(
    source: Any, publish: Any, client: Any, prefix: str, name: str
) -> None:
    publish("a", b"weights" if name.startswith("new") else None)
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/a/{name}", Body=b"more")
    with pytest.raises(AdapterUnsupported):
        source().revision("a")


# Revisions


def test_the_revision_is_of_config_and_weights_together(source: Any, publish: Any) -> None:
    source, seen = source(), []
    for weights, config in ((b"w", {}), (b"v", {}), (b"v", {"r": 4}), (b"w", {"r": 4})):
        publish("a", weights, config)
        seen.append(source.revision("a"))
        assert source.revision("a") == seen[-1]
    assert len(set(seen)) == 4


def test_the_etag_is_opaque(source: Any, client: Any, publish: Any, prefix: str) -> None:
    """Row 206: of an upload in parts it isn't the MD5 of the bytes."""
    publish("a", b"first")
    source = source()
    before = source.revision("a")
    key, body = f"{prefix}/a/{WEIGHTS}", bytes(range(256)) * (24 << 10)
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    parts = []
    for number, at in enumerate(range(0, len(body), 5 << 20), start=1):
        piece = body[at : at + (5 << 20)]
        which = {"Bucket": BUCKET, "Key": key, "UploadId": upload, "PartNumber": number}
        parts.append(
            {"ETag": client.upload_part(**which, Body=piece)["ETag"], "PartNumber": number}
        )
    client.complete_multipart_upload(
        Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert "-" in client.head_object(Bucket=BUCKET, Key=key)["ETag"]
    assert source.revision("a") != before
    assert whole(source, "a") == body


# Missing, forbidden, and refused


def test_who_may_only_get_objects_reads_adapters_by_their_names(
    source: Any, publish: Any, server: Server, monkeypatch: pytest.MonkeyPatch, proxy: Proxy
) -> None:
    publish("a", b"weights")
    for name, value in server.environment("gets").items():
        monkeypatch.setenv(name, value)
    source = source()
    assert whole(source, "a") == b"weights"
    assert whole(source, "a") == b"weights"
    assert proxy.count("GET", "list-type=2") == 1, "asked once, and told"


def test_forbidden_says_so(source: Any, publish: Any) -> None:
    """Row 205: without the right to list, a missing object is forbidden."""
    publish("a", b"weights")
    with pytest.raises(AdapterNotFound, match=r"forbidden, or not there.*s3:ListBucket"):
        source(anonymous=True).revision("a")


@pytest.mark.parametrize(
    ("key", "secret", "says"),
    [
        ("nobody", "all-secret", "InvalidAccessKeyId"),
        ("all-key", "wrong", "SignatureDoesNotMatch"),
    ],
)
def test_credentials_that_are_wrong_are_no_missing_adapter(
    source: Any, monkeypatch: pytest.MonkeyPatch, proxy: Proxy, key: str, secret: str, says: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(S3Failure, match=says):
        source().revision("a")
    assert len(proxy.requests) == 1, "not tried again"


def test_no_credentials_at_all_is_told(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(S3Failure, match="Unable to locate credentials"):
        source().revision("a")


def test_a_bucket_that_is_not_there_is_our_failure(source: Any) -> None:
    with pytest.raises(S3Failure, match=r"NoSuchBucket.*check source"):
        source("s3://no-such-bucket/x").revision("a")


def test_an_object_that_went_meanwhile(source: Any, publish: Any, client: Any, prefix: str) -> None:
    publish("a", b"weights")
    source = source()
    revision = source.revision("a")
    client.delete_object(Bucket=BUCKET, Key=f"{prefix}/a/{WEIGHTS}")
    with pytest.raises(LoadFailed, match="replaced"):
        source.read("a", revision, WEIGHTS, 0, memoryview(bytearray(7)))


# How it is spoken to


def test_requester_pays_goes_with_every_request(source: Any, publish: Any, proxy: Proxy) -> None:
    """Row 202."""
    publish("a", b"weights")
    assert whole(source(requester_pays=True), "a") == b"weights"
    assert {method for method, _, _ in proxy.requests} == {"GET", "HEAD"}
    for _, _, headers in proxy.requests:
        assert headers.get("X-Amz-Request-Payer") == "requester"


def test_virtual_addressing(
    source: Any, publish: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 197: the bucket in the host's name, or in the path."""
    import socket

    find = socket.getaddrinfo

    def find_here(host: Any, *rest: Any, **options: Any) -> Any:
        is_ours = isinstance(host, str) and host.endswith("localhost")
        return find("127.0.0.1" if is_ours else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find_here)
    publish("a", b"weights")
    url = proxy.url.replace("127.0.0.1", "localhost")
    assert whole(source(addressing="virtual", endpoint_url=url), "a") == b"weights"
    assert {headers["Host"].split(":")[0] for _, _, headers in proxy.requests} == {
        f"{BUCKET}.localhost"
    }
    assert not any(path.startswith(f"/{BUCKET}/") for _, path, _ in proxy.requests)


def test_a_profile(
    source: Any, publish: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    publish("a", b"weights")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "aws-credentials").write_text(
        "[lora]\naws_access_key_id = all-key\naws_secret_access_key = all-secret\n"
    )
    assert whole(source(profile="lora"), "a") == b"weights"
    with pytest.raises(S3Failure, match="nobody"):
        source(profile="nobody").revision("a")


def test_a_session_of_ones_own(source: Any, publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    publish("a", b"weights")
    session = boto3.Session("all-key", "all-secret", region_name="us-east-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert whole(source(session=session), "a") == b"weights"


def test_wrong_options_are_refused() -> None:
    from adaptercache.s3 import S3Options

    for wrong in ({"addressing": "dns"}, {"tries": 0}, {"stall_timeout_s": 0}, {"connections": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            S3Options(**wrong)  # type: ignore[arg-type]
