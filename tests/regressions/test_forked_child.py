"""A forked child that ended in the usual way removed its parent's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, tiny
cache = tiny.Tiny.cache(tiny.Tiny.source("a"))
tiny.Tiny.load(cache, "a")
root = cache._parts.disk.root
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
kept = any((root / "objects").glob("*/*"))
cache.close()
sys.exit(0 if kept else 3)
"""


def test_the_end_of_a_forked_child_leaves_the_parents_files_alone(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": f"{here.parent}:{here.parents[1]}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, timeout=60)
    assert done.returncode == 0


ASKING = """
import os, sys, tiny
cache = tiny.Tiny.cache(tiny.Tiny.source("a", "b"))
tiny.Tiny.load(cache, "a")
pid = os.fork()
if pid == 0:
    try:
        cache.acquire("b")
    except RuntimeError as error:
        os._exit(0 if "before the fork" in str(error) else 3)
    os._exit(4)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
tiny.Tiny.load(cache, "b")
cache.close()
sys.exit(status)
"""


def test_a_forked_child_is_told_to_make_its_own_cache(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": f"{here.parent}:{here.parents[1]}"}
    done = subprocess.run([sys.executable, "-c", ASKING], env=environment, timeout=60)
    assert done.returncode == 0
