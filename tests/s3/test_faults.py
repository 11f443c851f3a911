"""Networks and stores that fail: every fault is survived, or ends in bounded time with its name.

The weights are large enough for several ranges side by side, and every byte of them differs from
its neighbours, so that a piece in the wrong place shows.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from s3_proxy import Fault, Proxy
from s3_server import BUCKET

from adaptercache import LoadFailed
from adaptercache.disk.transfer import Transfer, flush_file
from adaptercache.s3.failures import S3Failure
from adaptercache.tiers.remote import WEIGHTS

SIZE = (9 << 20) + 12345
WHOLE = random.Random(6).randbytes(SIZE)
OTHER = random.Random(7).randbytes(SIZE)


@pytest.fixture
def published(publish: Any) -> None:
    publish("a", WHOLE)


def download(source: Any, path: Path, adapter_id: str = "a") -> bytes:
    """The weights, as the cache brings them to the disk: in spans side by side, then checked."""
    transfer = Transfer()
    try:
        revision = source.revision(adapter_id)
        size = source.files(adapter_id, revision)[WEIGHTS]

        def stream(start: int, stop: int) -> Any:
            return source.stream(adapter_id, revision, WEIGHTS, start, stop)

        transfer.fill(path, size, stream, lambda: None)
        flush_file(path)
        data = path.read_bytes()
        source.check(adapter_id, revision, WEIGHTS, memoryview(data))
    finally:
        transfer.close()
    return data


PASSING = [
    Fault("reset", after=1_000_000),
    Fault("reset", after=0, times=3),
    Fault("truncate", after=2_000_000),
    Fault("truncate", after=0, times=2),
    Fault("stall", after=3_000_000),
    Fault("stall", after=0),
    Fault("short", after=500_000),
    Fault("short", after=0),
    Fault("html"),
    Fault("error", status=500, times=2),
    Fault("error", status=503, code="SlowDown", times=3),
    Fault("error", status=429, code="TooManyRequests"),
    Fault("error", status=400, code="RequestTimeout"),
    Fault("error", method="HEAD", status=500),
    Fault("error", where="list-type", status=503, code="SlowDown", times=2),
]


def name_of(fault: Fault) -> str:
    return f"{fault.method}-{fault.kind}-{fault.code}-{fault.after}-x{fault.times}"


@pytest.mark.parametrize("fault", PASSING, ids=name_of)
def test_a_fault_that_passes_is_survived(
    source: Any, published: None, proxy: Proxy, tmp_path: Path, fault: Fault
) -> None:
    """Rows 208 and 209: a body that is shorter, or another's, is never taken for the file."""
    proxy.inject(Fault(**{**vars(fault)}))
    assert download(source(), tmp_path / "out") == WHOLE


def test_what_has_come_is_not_asked_for_again(
    source: Any, published: None, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.inject(*(Fault("truncate", after=at) for at in (100_000, 900_000, 1_500_000)))
    assert download(source(), tmp_path / "out") == WHOLE
    assert proxy.sent < SIZE + 20_000


def test_a_connection_that_breaks_all_the_time_but_gets_on_is_followed_to_the_end(
    source: Any, published: None, proxy: Proxy, tmp_path: Path
) -> None:
    """More failures than tries, each after some bytes."""
    proxy.inject(Fault("truncate", after=400_000, times=15))
    assert download(source(), tmp_path / "out") == WHOLE


def test_a_connection_that_breaks_after_a_little_all_the_time_is_given_up(
    source: Any, published: None, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.inject(Fault("truncate", after=1000, times=999))
    with pytest.raises(S3Failure):
        download(source(), tmp_path / "out")
    assert proxy.count("GET", "adapter_model") <= 4 * 3


LASTING = [
    (Fault("reset", times=99), S3Failure, "reading s3://"),
    (Fault("stall", times=99), S3Failure, "reading s3://"),
    (Fault("short", after=0, times=99), S3Failure, "reading s3://"),
    (Fault("html", times=99), S3Failure, "reading s3://"),
    (Fault("error", status=503, code="SlowDown", times=99), S3Failure, "SlowDown"),
    (Fault("error", status=403, code="AccessDenied", times=99), S3Failure, "AccessDenied"),
    (Fault("error", status=400, code="ExpiredToken", times=99), S3Failure, "have expired"),
    (Fault("error", status=302, code="Found", times=99), S3Failure, "Found"),
    (Fault("error", status=301, code="PermanentRedirect", times=99), S3Failure, "its region"),
    (Fault("flip", after=77, times=99), LoadFailed, "checksum"),
]


@pytest.mark.parametrize(
    ("fault", "error", "says"), LASTING, ids=lambda x: getattr(x, "kind", None)
)
def test_a_fault_that_stays_ends_in_bounded_time_with_its_name(
    source: Any,
    published: None,
    proxy: Proxy,
    tmp_path: Path,
    fault: Fault,
    error: type[Exception],
    says: str,
) -> None:
    proxy.inject(Fault(**{**vars(fault)}))
    began = time.monotonic()
    with pytest.raises(error, match=says):
        download(source(), tmp_path / "out")
    assert time.monotonic() - began < 10
    spans = 3
    assert proxy.count("GET", "adapter_model") <= 4 * spans


def test_bytes_that_drip_are_a_stall(
    source: Any, published: None, proxy: Proxy, tmp_path: Path
) -> None:
    """Each comes before the time-out of a read."""
    proxy.inject(Fault("drip", after=1000))
    began = time.monotonic()
    data = download(source(slowest_bytes_per_s=16 << 20), tmp_path / "out")
    assert data == WHOLE
    assert time.monotonic() - began < 5


def test_no_server_at_all(source: Any) -> None:
    with pytest.raises(S3Failure, match="EndpointConnectionError"):
        source(endpoint_url="http://127.0.0.1:9", tries=2).revision("a")


def test_an_object_replaced_while_it_is_read_is_never_mixed(
    source: Any, published: None, publish: Any, proxy: Proxy, tmp_path: Path
) -> None:
    """Row 207: the ranges read later ask for the object that was found first."""
    replace = lambda: publish("a", OTHER)  # noqa: E731
    proxy.inject(Fault("truncate", after=1000), Fault("call", act=replace))
    source = source()
    with pytest.raises(LoadFailed, match="replaced meanwhile"):
        download(source, tmp_path / "out")
    assert download(source, tmp_path / "again") == OTHER


def test_a_store_that_ignores_if_match_is_seen_through(
    source: Any, published: None, client: Any, publish: Any, proxy: Proxy
) -> None:
    source = source()
    revision = source.revision("a")
    publish("a", OTHER)
    found = source._objects("a", revision)[WEIGHTS]
    etag = client.head_object(Bucket=BUCKET, Key=found.key)["ETag"]
    lenient = found.__class__(found.bucket, found.key, found.size, etag)
    connection = source._connection

    class Lenient:
        """A client that asks without the condition, as if the store ignored it."""

        def get_object(self, **asked: Any) -> Any:
            return connection.client().get_object(**{**asked, "IfMatch": etag})

    from adaptercache.s3.ranges import _range

    with pytest.raises(LoadFailed, match="replaced"):
        list(_range(Lenient(), connection, found, 0, SIZE, {}))
    assert b"".join(_range(Lenient(), connection, lenient, 0, SIZE, {})) == OTHER


# Checksums


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_every_checksum_that_a_store_keeps_is_compared(
    source: Any, publish: Any, proxy: Proxy, tmp_path: Path, algorithm: str
) -> None:
    publish("a", WHOLE, ChecksumAlgorithm=algorithm)
    source = source()
    assert download(source, tmp_path / "out") == WHOLE
    proxy.inject(Fault("flip", after=1_234_567, times=99))
    with pytest.raises(LoadFailed, match="checksum"):
        download(source, tmp_path / "again")


@pytest.mark.parametrize("algorithm", ["CRC32", "SHA256"])
def test_a_checksum_of_checksums_is_compared(
    source: Any,
    publish: Any,
    client: Any,
    proxy: Proxy,
    prefix: str,
    tmp_path: Path,
    algorithm: str,
) -> None:
    publish("a", b"")
    key, step = f"{prefix}/a/{WEIGHTS}", 5 << 20
    which = {"Bucket": BUCKET, "Key": key}
    upload = client.create_multipart_upload(**which, ChecksumAlgorithm=algorithm)["UploadId"]
    parts = []
    for number, at in enumerate(range(0, SIZE, step), start=1):
        sent = client.upload_part(
            **which,
            UploadId=upload,
            PartNumber=number,
            Body=WHOLE[at : at + step],
            ChecksumAlgorithm=algorithm,
        )
        name = f"Checksum{algorithm}"
        parts.append({"ETag": sent["ETag"], "PartNumber": number, name: sent[name]})
    client.complete_multipart_upload(**which, UploadId=upload, MultipartUpload={"Parts": parts})
    kept = client.head_object(**which, ChecksumMode="ENABLED")[f"Checksum{algorithm}"]
    assert kept.endswith("-2")
    source = source()
    assert download(source, tmp_path / "out") == WHOLE
    proxy.inject(Fault("flip", after=2_000_000, times=99))
    with pytest.raises(LoadFailed, match="checksum"):
        download(source, tmp_path / "again")


def test_an_empty_file(source: Any, publish: Any, tmp_path: Path) -> None:
    publish("a", b"")
    assert download(source(), tmp_path / "out") == b""


# Credentials that run out


def test_credentials_that_were_renewed_in_their_file_are_read_again(
    source: Any,
    published: None,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "aws-credentials"
    template = "[default]\naws_access_key_id = all-key\naws_secret_access_key = {}\n"
    file.write_text(template.format("expires-soon"))
    source = source()
    source._connection.client()  # has read them

    def renew() -> None:
        file.write_text(template.format("all-secret"))

    renew()
    expired = Fault("error", where="list-type", status=400, code="ExpiredToken")
    proxy.inject(expired)
    assert download(source, tmp_path / "out") == WHOLE


def test_a_role_is_taken_on_and_renewed_before_it_runs_out(
    source: Any,
    published: None,
    server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 203: temporary credentials with their token, and newer ones in time."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    asked: list[str] = []
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 5))  # "refresh now"
    granted = (
        "<AssumeRoleResponse xmlns='https://sts.amazonaws.com/doc/2011-06-15/'><AssumeRoleResult>"
        "<Credentials><AccessKeyId>all-key</AccessKeyId><SecretAccessKey>all-secret"
        f"</SecretAccessKey><SessionToken>token-1</SessionToken><Expiration>{soon}</Expiration>"
        "</Credentials></AssumeRoleResult></AssumeRoleResponse>"
    ).encode()

    class TokenService(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.send_header("Content-Length", str(len(granted)))
            self.end_headers()
            self.wfile.write(granted)

        def log_message(self, *args: Any) -> None:
            pass

    (tmp_path / "aws-config").write_text(
        "[profile lora]\nrole_arn = arn:aws:iam::123456789012:role/lora\n"
        "source_profile = default\nregion = us-east-1\n"
    )
    (tmp_path / "aws-credentials").write_text(
        "[default]\naws_access_key_id = k\naws_secret_access_key = s\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with ThreadingHTTPServer(("127.0.0.1", 0), TokenService) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{service.server_port}")
        source = source(profile="lora")
        source._connection.client()
        sent = source._connection.client()._request_signer._credentials.get_frozen_credentials()
        assert (sent.access_key, sent.token) == ("all-key", "token-1")
        first = len(asked)
        assert first >= 1
        assert "role%2Flora" in asked[0]
        source._connection.client()._request_signer._credentials.get_frozen_credentials()
        assert len(asked) > first, "asked again, as they run out soon"
        service.shutdown()
        thread.join()


def test_a_certificate_of_ones_own(
    source: Any, published: None, proxy: Proxy, tmp_path: Path
) -> None:
    import ssl

    import trustme
    from s3_proxy import running_proxy

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with running_proxy(proxy.url, context) as secure:
        trusting = source(endpoint_url=secure.url, ca_bundle=tmp_path / "ca.pem")
        assert download(trusting, tmp_path / "out") == WHOLE
        trusting.close()
        with pytest.raises(S3Failure, match="SSL"):
            source(endpoint_url=secure.url, tries=1).revision("a")


def test_a_bucket_of_another_region_is_followed_there_once(
    source: Any, published: None, proxy: Proxy, tmp_path: Path
) -> None:
    """Row 201."""
    elsewhere = {"x-amz-bucket-region": "eu-west-1"}
    moved = Fault(
        "error", where="list-type", status=301, code="PermanentRedirect", headers=elsewhere
    )
    proxy.inject(moved)
    assert download(source(), tmp_path / "out") == WHOLE
    regions = [headers["Authorization"].split("/")[2] for _, _, headers in proxy.requests[:2]]
    assert regions == ["us-east-1", "eu-west-1"]
