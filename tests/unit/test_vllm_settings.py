"""The environment variables of the vLLM plugin, and its table of names. Needs no vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from adaptercache.integrations.vllm.names import Names
from adaptercache.integrations.vllm.settings import PREFIX, Settings

LEAST = {
    "ADAPTERCACHE_SOURCE": "s3://bucket/prefix",
    "ADAPTERCACHE_DISK_DIR": "/var/cache/lora",
    "ADAPTERCACHE_DISK_BYTES": "2GiB",
}
PAGE = Path(__file__).parent.parent.parent / "docs/vllm.md"


def test_the_least_and_the_most() -> None:
    found = Settings.from_environment(LEAST | {"HOME": "/root", "ADAPTERCACHE_TEST_S3": "required"})
    assert found == Settings("s3://bucket/prefix", "/var/cache/lora", 2 << 30)
    more = {"REVISION_TTL_S": "0", "WAIT_S": "1.5", "THREADS": "3"}
    found = Settings.from_environment(LEAST | {PREFIX + name: more[name] for name in more})
    assert found == Settings("s3://bucket/prefix", "/var/cache/lora", 2 << 30, 0.0, 1.5, 3)


def test_a_service_of_that_name_in_kubernetes_stops_nothing() -> None:
    """Its address and ports are put into the environment of every container of its namespace."""
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP"]
    names += [f"PORT_80_TCP_{part}" for part in ("ADDR", "PORT", "PROTO")]
    given = {f"ADAPTERCACHE_{of}{name}": "10.0.0.1" for of in ("", "STORE_") for name in names}
    assert Settings.from_environment(LEAST | given) == Settings.from_environment(LEAST)


@pytest.mark.parametrize("environment", [{}, {"ADAPTERCACHE_SOURCE": " "}])
def test_without_a_source_there_is_nothing_to_do(environment: dict[str, str]) -> None:
    assert Settings.from_environment(environment) is None


def places(source: object, disk: object) -> Settings:
    return Settings(str(source), str(disk), 2 << 30)


def test_places_that_can_be_used_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    for source in (tmp_path / "adapters", f"file://{tmp_path}/adapters", "s3://bucket/prefix"):
        places(source, tmp_path / "disk" / "lora").check()
        places(source, tmp_path).check()
    assert [path.name for path in tmp_path.iterdir()] == ["adapters"]


@pytest.mark.parametrize(
    "source",
    ["nowhere", "file", "ftp://store/adapters", "file://nowhere", "file://", "loop", "loop/x"],
)
def test_a_source_that_cannot_be_used_is_named(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    with pytest.raises(ValueError, match=r"ADAPTERCACHE_SOURCE: .*(directory|ftp)"):
        places(source, tmp_path).check()


@pytest.mark.parametrize("source", ["s3://", "s3:///prefix", "s3://two words/x", "s3://a@b"])
def test_a_bucket_that_is_none_is_named(source: str, tmp_path: Path) -> None:
    """Here, where vLLM starts, and not where a worker asks for its first adapter."""
    with pytest.raises(ValueError, match=r"ADAPTERCACHE_SOURCE: .*give s3://bucket/prefix"):
        places(source, tmp_path).check()


def test_a_bucket_without_boto3_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("adaptercache.s3")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("boto3", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="ADAPTERCACHE_SOURCE: s3:// needs boto3"):
        places("s3://bucket/prefix", tmp_path).check()


@pytest.mark.parametrize("disk", ["file", "file/lora", "link"])
def test_a_disk_that_is_no_directory_is_named(disk: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"ADAPTERCACHE_DISK_DIR: .*Not a directory"):
        places(tmp_path, tmp_path / disk).check()


def test_a_disk_that_can_only_be_read_may_have_something(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir(mode=0o555)
    places(tmp_path, tmp_path / "others").check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_disk_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir(mode=0o555)
    with pytest.raises(ValueError, match=r"ADAPTERCACHE_DISK_DIR: .*Permission denied"):
        places(tmp_path, tmp_path / "others" / "lora").check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DISK_DIR", ""),
        ("DISK_BYTES", ""),
        ("DISK_BYTES", "lots"),
        ("REVISION_TTL_S", "-1"),
        ("REVISION_TTL_S", "nan"),
        ("WAIT_S", "soon"),
        ("THREADS", "0"),
        ("THREADS", "1.5"),
        ("DISKBYTES", "1"),
    ],
)
def test_what_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=PREFIX + name):
        Settings.from_environment(LEAST | {PREFIX + name: value})


def test_the_page_has_every_variable_with_its_default() -> None:
    told = dict(re.findall(rf"^\| `{PREFIX}(\w+)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE))
    fields = {field.name.upper(): field.default for field in dataclasses.fields(Settings)}
    assert told.keys() == fields.keys()
    for name, default in fields.items():
        if default is not dataclasses.MISSING:
            assert float(told[name]) == default


class Request:
    """Stands for vLLM's: what a name stands for is of no concern to `Names`."""


def test_a_task_that_has_seen_a_name_keeps_it_until_it_ends() -> None:
    async def run() -> None:
        used: list[str] = []
        names: Any = Names({}, used.append)
        names["a"], names["b"] = Request(), Request()
        seen, leave = asyncio.Event(), asyncio.Event()
        kept = names.peek("a")

        async def request() -> Any:
            assert "a" in names
            seen.set()
            await leave.wait()
            assert "a" in names
            return names["a"]

        async def another() -> bool:
            return "a" in names or names.get("a") is not None

        async def unload() -> None:
            del names["a"]

        running = asyncio.create_task(request())
        await seen.wait()
        await asyncio.create_task(unload())
        assert not await asyncio.create_task(another())
        assert names.in_use() >= {id(kept)}
        assert names.coldest() == ["b"]
        leave.set()
        assert await running is kept
        assert "a" in used

    asyncio.run(run())


def test_what_ended_tasks_have_seen_is_let_go_of() -> None:
    async def run() -> None:
        names: Any = Names({})
        request = Request()

        async def look() -> None:
            names["a"] = request
            assert names["a"] is request
            del names["a"]
            assert "a" in names

        await asyncio.create_task(look())
        await asyncio.sleep(0)  # the step of the loop that woke us has held the task
        gc.collect()
        assert id(request) not in names.in_use()
        assert "a" not in names
        with pytest.raises(KeyError):
            names["a"]

    asyncio.run(run())


def test_the_coldest_is_the_one_that_was_not_asked_for() -> None:
    names: Any = Names({"old": Request()})
    names["a"] = Request()
    names["b"] = Request()
    assert "a" in names
    assert names.peek("b") is not None
    assert names.coldest() == ["old", "b", "a"]
