"""Locks between processes, as seen by two holders in one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from adaptercache.disk.locks import claimed, exclusive, hold, remove_unclaimed, seize


class Busy(Exception):
    pass


def give_up() -> None:
    raise Busy


def test_a_name_is_claimed_by_one_and_leaves_nothing(tmp_path: Path) -> None:
    with claimed(tmp_path / "a", give_up):
        with pytest.raises(Busy), claimed(tmp_path / "a", give_up):
            pass
        with claimed(tmp_path / "b", give_up):
            pass
    assert list(tmp_path.iterdir()) == []


def test_many_who_claim_one_name_take_turns(tmp_path: Path) -> None:
    inside, most, done = 0, 0, 0
    counting = threading.Lock()

    def work() -> None:
        nonlocal inside, most, done
        for _ in range(40):
            with claimed(tmp_path / "a", lambda: None):
                with counting:
                    inside += 1
                    most = max(most, inside)
                with counting:
                    inside -= 1
                    done += 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, done) == (1, 240)
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import os, sys
from pathlib import Path
from adaptercache.disk.locks import claimed, exclusive, hold
root = Path(sys.argv[1])
with claimed(root / "flight", lambda: None), exclusive(root / "lock"):
    hold(root / "folder")
    print("held", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
"""


def test_all_locks_die_with_their_holder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Busy), claimed(tmp_path / "flight", give_up):
            pass
        assert seize(tmp_path / "folder") is None
        remove_unclaimed_in(tmp_path, expected=True)
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        holder.wait()
    with exclusive(tmp_path / "lock"):
        pass
    handle = seize(tmp_path / "folder")
    assert handle is not None
    os.close(handle)
    remove_unclaimed_in(tmp_path, expected=False)


def remove_unclaimed_in(root: Path, *, expected: bool) -> None:
    """Sweep a folder with the one flight; whether it is to stay."""
    flights = root / "flights"
    flights.mkdir(exist_ok=True)
    if not (flights / "flight").exists():
        os.link(root / "flight", flights / "flight")
    remove_unclaimed(flights)
    assert (flights / "flight").exists() is expected


def test_a_folder_is_held_by_many_or_seized_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    holds = [hold(folder), hold(folder)]
    for handle in holds:
        assert handle is not None
        assert seize(folder) is None
        os.close(handle)
    taken = seize(folder)
    assert taken is not None
    assert seize(folder) is None
    folder.rename(tmp_path / "gone")
    os.close(taken)
    assert hold(folder) is None
    assert seize(folder) is None
