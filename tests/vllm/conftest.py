"""The real vLLM on CPUs, and a real S3 server behind it: `make test-vllm`. Skipped elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_proxy import Proxy, running_proxy
from s3_server import BUCKET, Server, running_server
from vllm_adapters import Trainer, make_kind, save_base
from vllm_server import NO_VLLM, Vllm, has_vllm, running_vllm, tail

IS_REQUIRED = os.environ.get("ADAPTERCACHE_TEST_VLLM") == "required"
"""``make test-vllm`` sets it: then no vLLM is a failure, not a reason to skip."""

NUM_MANY = 50
BUDGET = 10
"""Adapters of `many` that the disk's budget holds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not has_vllm():
        (pytest.fail if IS_REQUIRED else pytest.skip)(NO_VLLM)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test shows the end of the servers' logs."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Vllm):
                report.sections.append((f"{name}: {value.log}", tail(value.log)))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The proxy's connections outlive a test: vLLM's process keeps them."""


class Bucket:
    """The adapters' bucket, and what lies there."""

    prefix = "lora"

    def __init__(self, client: Any) -> None:
        self._client = client
        self.folders: dict[str, Path] = {}
        """By name: what was published last."""

    def publish(self, name: str, folder: Path) -> None:
        """An adapter's files: the weights first."""
        self.folders[name] = folder
        files = sorted(folder.iterdir(), key=lambda file: file.name == "adapter_config.json")
        for file in files:
            if file.name.startswith("adapter_"):
                key = f"{self.prefix}/{name}/{file.name}"
                self._client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())

    def put(self, name: str, **files: bytes) -> None:
        """Files of any content, by the names without their ends."""
        ends = {"adapter_config": ".json", "adapter_model": ".safetensors", "pickle": ".bin"}
        for stem, content in files.items():
            file = ("adapter_model" if stem == "pickle" else stem) + ends[stem]
            key = f"{self.prefix}/{name}/{file}"
            self._client.put_object(Bucket=BUCKET, Key=key, Body=content)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def base(folder: Path) -> Path:
    save_base(folder / "base")
    return folder / "base"


@pytest.fixture(scope="session")
def trainer(base: Path) -> Trainer:
    return Trainer(base)


@pytest.fixture(scope="session")
def store(folder: Path) -> Iterator[Server]:
    (folder / "s3").mkdir()
    with running_server(folder / "s3") as server:
        yield server


@pytest.fixture(scope="session")
def bucket(store: Server) -> Iterator[Bucket]:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=store.url,
        region_name="us-east-1",
        aws_access_key_id="all-key",
        aws_secret_access_key="all-secret",
    )
    yield Bucket(client)
    client.close()


@pytest.fixture(scope="session")
def proxy(store: Server) -> Iterator[Proxy]:
    """Between vLLM and the store."""
    with running_proxy(store.url) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def many(trainer: Trainer, bucket: Bucket, folder: Path) -> list[str]:
    """Names of published adapters of one size, all different."""
    names = [f"team-{at % 7}/many-{at}" for at in range(NUM_MANY)]
    for seed, name in enumerate(names):
        made = make_kind(trainer, folder / "adapters" / f"many-{seed}", "all-r8", 1000 + seed)
        bucket.publish(name, made)
    return names


@pytest.fixture(scope="session")
def budget(many: list[str], bucket: Bucket) -> int:
    """Bytes on the disk for `BUDGET` of them, and less than for one more."""
    files = bucket.folders[many[0]].glob("adapter_*")
    return (BUDGET * 2 + 1) * (sum(file.stat().st_size for file in files) + 128) // 2


@pytest.fixture(scope="session")
def environment(store: Server, proxy: Proxy, folder: Path, budget: int) -> dict[str, str]:
    """What the server is told."""
    return {
        **store.environment("reads"),
        "AWS_ENDPOINT_URL_S3": proxy.url,
        "ADAPTERCACHE_SOURCE": f"s3://{BUCKET}/{Bucket.prefix}",
        "ADAPTERCACHE_DISK_DIR": str(folder / "disk"),
        "ADAPTERCACHE_DISK_BYTES": str(budget),
        "ADAPTERCACHE_REVISION_TTL_S": "0.5",
    }


@pytest.fixture(scope="session")
def disk(folder: Path) -> Path:
    return folder / "disk"


@pytest.fixture(scope="module")
def vllm(request: pytest.FixtureRequest, base: Path, environment: dict[str, str]) -> Iterator[Vllm]:
    """One a file of tests."""
    with running_vllm(base, environment, request.module.__name__.rpartition(".")[2]) as server:
        yield server


@pytest.fixture(scope="session")
def start(base: Path, environment: dict[str, str]) -> Callable[..., Any]:
    """Starts another: ``with start(log_name, *options):``."""
    return lambda log_name, *options, **more: running_vllm(
        base, environment | more, log_name, *options
    )
