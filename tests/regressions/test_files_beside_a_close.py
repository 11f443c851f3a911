"""`close` removed the temporary folder while something was being published out of it: the folder
was renamed under the removal, which went on in the published content."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterFiles, CacheClosed
from adaptercache.checkpoint import Checkpoint
from adaptercache.disk.place import Place


@pytest.mark.parametrize("turn", range(40))
def test_what_is_published_while_it_closes_is_whole_or_not_there(
    tiny: Any, tmp_path: Path, turn: int
) -> None:
    source = tiny.source("a")

    def close_soon(checkpoint: Checkpoint, folder: Path) -> None:
        closing.start()
        time.sleep(turn % 20 * 5e-5)

    files = AdapterFiles(
        source, tiny.layout.base, disk_dir=tmp_path, disk_bytes=None, check=close_soon
    )
    closing = threading.Thread(target=files.close)
    opened = None
    with suppress(CacheClosed):
        opened = files.open("a").path
    closing.join()
    wanted = set(source.files("a", source.revision("a")))
    for content in (tmp_path / "objects").iterdir():
        assert wanted <= set(os.listdir(content))
    assert opened is None or wanted <= set(os.listdir(opened))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("gone", ["tmp/*", "tmp", "index", "flights", "objects", "."])
def test_folders_that_somebody_has_removed_are_made_again(
    tiny: Any, tmp_path: Path, gone: str
) -> None:
    """A cleaner of temporary directories, say: all loads failed until the restart."""
    root = tmp_path / "disk"
    with tiny.cache(tiny.source("a", "b"), disk_dir=root) as cache:
        tiny.load(cache, "a")
        for folder in [root] if gone == "." else list(root.glob(gone)):
            os.rename(folder, tmp_path / f"gone-{folder.name}")
        tiny.load(cache, "b")
        assert tiny.idle(cache) or tiny.wait_until(lambda: tiny.idle(cache))
    with tiny.cache(tiny.source("a", "b"), disk_dir=root) as cache:
        tiny.load(cache, "a", "b")


def test_what_is_being_written_stays_ours_when_others_folders_are_made_again(
    tmp_path: Path,
) -> None:
    """The lock that says that we live is never let go of, so no other process tidies us up."""
    ours = Place(tmp_path)
    ours.open()
    (ours.own / "download").mkdir()
    (tmp_path / "index").rmdir()
    alive = ours._alive
    ours.open()
    assert (tmp_path / "index").is_dir()
    assert ours._alive == alive
    theirs = Place(tmp_path)
    theirs.open()
    assert (ours.own / "download").is_dir()
    theirs.close()
    ours.close()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("root", ["disk", None])
def test_a_place_that_is_closed_while_somebody_looks_at_it_stays_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str | None
) -> None:
    """`close` amid `open`'s look made the folder again, with a lock that nobody ended."""
    place = Place(tmp_path / root if root else None)
    place.open()
    closing = threading.Thread(target=place.close)
    is_dir = Path.is_dir

    def closed_meanwhile(path: Path) -> bool:
        if not closing.ident:
            closing.start()
            closing.join(0.3)
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", closed_meanwhile)
    place.open()
    closing.join()
    assert not place.own.exists()
    assert len(handles_below(place.root)) == 0
    assert root or not place.root.exists()


def test_a_place_that_was_closed_before_it_was_opened_stays_closed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.close()
    place.open()
    assert not place.own.exists()
    assert len(handles_below(place.root)) == 0


def handles_below(root: Path) -> list[str]:
    """Of this process."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(handle))
    return [each for each in found if each.startswith(str(root))]
