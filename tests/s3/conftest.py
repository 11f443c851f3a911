"""A real S3 server, a proxy before it that breaks things, and sources that read through it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from s3_proxy import Proxy, running_proxy
from s3_server import BUCKET, NO_SERVER, Server, find_server, running_server

IS_REQUIRED = os.environ.get("ADAPTERCACHE_TEST_S3") == "required"
"""``make test`` sets it: then no server is a failure, not a reason to skip."""

collect_ignore_glob = ["test_*.py"] if find_spec("boto3") is None and not IS_REQUIRED else []


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if find_server() is None and not IS_REQUIRED:
        pytest.skip(NO_SERVER)
    with running_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    """boto3's own, with all rights."""
    import boto3

    client = boto3.client("s3", endpoint_url=server.url)
    yield client
    client.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with running_proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One that no other test has."""
    return f"{tmp_path.parent.name}/{tmp_path.name}"


@pytest.fixture
def publish(client: Any, prefix: str) -> Callable[..., None]:
    """Put an adapter into the bucket: ``publish(id, weights, config={}, **put_object's)``."""

    def publish(
        adapter_id: str, weights: bytes | None, config: dict[str, Any] | None = None, **more: Any
    ) -> None:
        folder = f"{prefix}/{adapter_id}"
        body = json.dumps(config or {}).encode()
        client.put_object(Bucket=BUCKET, Key=f"{folder}/adapter_config.json", Body=body)
        if weights is not None:
            key = f"{folder}/adapter_model.safetensors"
            client.put_object(Bucket=BUCKET, Key=key, Body=weights, **more)

    return publish


@pytest.fixture
def source(proxy: Proxy, prefix: str) -> Iterator[Callable[..., Any]]:
    """Make a source that reads through the proxy: ``source(**options)``."""
    from adaptercache.s3 import S3Options, S3Source

    with ExitStack() as closing:

        def make(url: str = f"s3://{BUCKET}/{prefix}", session: Any = None, **options: Any) -> Any:
            options = {
                "endpoint_url": proxy.url,
                "addressing": "path",
                "stall_timeout_s": 0.5,
                "tries": 4,
            } | options
            made = S3Source(url, S3Options(**options), session=session)
            closing.callback(made.close)
            return made

        yield make
