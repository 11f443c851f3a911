"""``adaptercache verify``: it finds every way in which a disk tier's bytes can have changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import BASE_CONFIG

Damage = Callable[[Path, Path, Path], None]


@pytest.fixture
def disk(tiny: Any, tmp_path: Path) -> Path:
    """The disk tier that a cache of two adapters has left."""
    with tiny.cache(tiny.source("a", "b"), disk_dir=tmp_path / "disk", device="cpu") as cache:
        tiny.load(cache, "a", "b")
    return tmp_path / "disk"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG))
    return tmp_path / "config.json"


def files_of(disk: Path, tiny: Any) -> tuple[Path, Path, Path]:
    """Config, weights and packed file of the first content."""
    folder = min((disk / "objects").iterdir())
    packed = folder / f"{tiny.layout.digest.hex()}.safetensors"
    return folder / "adapter_config.json", folder / "adapter_model.safetensors", packed


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_what_was_written_is_sound(run: Any, disk: Path, base: Path) -> None:
    for arguments in ((), ("--base", base)):
        done = run("verify", disk, *arguments)
        assert done.code == 0, done.out
        assert "2 contents, 6 files" in done.out
        assert "all sound" in done.out
    report = run("verify", disk, "--json").json
    assert (report["status"], report["contents"], report["broken"]) == ("sound", 2, [])


DAMAGE: dict[str, Damage] = {
    "adapter_config.json: the checksum": lambda config, weights, packed: flip(config, 3),
    "adapter_model.safetensors: the checksum": lambda config, weights, packed: flip(weights, -1),
    "adapter_model.safetensors: missing": lambda config, weights, packed: weights.unlink(),
    "checksum is wrong": lambda config, weights, packed: flip(packed, -1),
    "header has changed": lambda config, weights, packed: flip(packed, 60),
    "cut short": lambda config, weights, packed: packed.write_bytes(packed.read_bytes()[:-1]),
    "other content": lambda config, weights, packed: packed.write_bytes(
        max(weights.parent.parent.glob(f"*/{packed.name}")).read_bytes()
    ),
    "another layout": lambda config, weights, packed: (
        packed.rename(packed.with_name(f"{'0' * 64}.safetensors")),
        None,
    )[1],
    "has changed": lambda config, weights, packed: packed.write_bytes(b"\2" + bytes(7) + b"[]"),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_every_damage_is_found(run: Any, tiny: Any, disk: Path, says: str) -> None:
    DAMAGE[says](*files_of(disk, tiny))
    done = run("verify", disk)
    assert done.code == 1
    assert says in done.out
    (broken,) = run("verify", disk, "--json").json["broken"]
    assert broken["digest"] == files_of(disk, tiny)[0].parent.name


def test_with_the_base_the_digest_is_computed_again(
    run: Any, tiny: Any, disk: Path, base: Path
) -> None:
    """Files that were exchanged together with their sums."""
    one, other = sorted((disk / "objects").iterdir())
    for name in ("adapter_config.json", "adapter_model.safetensors", "files.json"):
        (one / name).write_bytes((other / name).read_bytes())
    assert run("verify", disk).code == 0
    done = run("verify", disk, "--base", base)
    assert done.code == 1
    assert f"digest is {other.name}" in done.out


def test_files_without_sums_are_told(run: Any, tiny: Any, disk: Path) -> None:
    (files_of(disk, tiny)[0].parent / "files.json").unlink()
    done = run("verify", disk)
    assert done.code == 0
    assert "2 files have no checksum" in done.out


def test_a_directory_of_something_else_is_refused(run: Any, tmp_path: Path) -> None:
    done = run("verify", tmp_path)
    assert done.code == 2
    assert "no directory of a disk tier" in done.err


def test_it_changes_nothing(run: Any, tiny: Any, disk: Path) -> None:
    flip(files_of(disk, tiny)[2], -1)
    before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    run("verify", disk)
    assert before == {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sums", [b"[1]", b"\xff", b'{"a": "xyz"}', b"[" * 100_000, b"{"])
def test_spoilt_sums_hide_nothing(run: Any, disk: Path, sums: bytes) -> None:
    folder = min((disk / "objects").iterdir())
    (folder / "files.json").write_bytes(sums)
    done = run("verify", disk, "--json")
    assert (done.code, done.json["status"]) == (1, "broken")
    assert "files.json: these are no sums" in done.json["broken"][0]["wrong"][0]


@pytest.mark.parametrize("name", ["files.json", "adapter_model.safetensors"])
def test_what_is_no_file_is_not_waited_for(run: Any, disk: Path, name: str) -> None:
    folder = min((disk / "objects").iterdir())
    (folder / name).unlink()
    os.mkfifo(folder / name)
    done = run("verify", disk, "--json")
    assert (done.code, done.json["status"]) == (1, "broken")
