"""An adapter's tensors were views of its mapped file: who saved over it in place killed the
process that looked at them (SIGBUS), or changed weights that had been checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from adapter_files import BASE, write_adapter

from adaptercache import LoadFailed
from adaptercache.checkpoint import read_checkpoint, safetensors_file

PROGRAM = """
import os, sys
from adapter_files import BASE
from adaptercache.checkpoint import read_checkpoint
checkpoint = read_checkpoint(sys.argv[1], BASE)
os.truncate(sys.argv[1] + "/adapter_model.safetensors", 0)
print(checkpoint.delta("q_proj").sum().item())
"""


def test_an_adapter_that_was_read_outlives_its_file(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{PROGRAM}", tmp_path],
        check=False,
        capture_output=True,
        text=True,
        cwd=write_adapter(tmp_path),
    )
    assert (done.returncode, done.stdout) == (0, "100.0\n"), done.stderr


@pytest.mark.parametrize("content", [b"", b"x" * 50, b"x" * 5000])
def test_a_file_that_is_changed_while_it_is_read_is_a_failed_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    check, weights = safetensors_file._check, write_adapter(tmp_path) / "adapter_model.safetensors"

    def rewrite_and_check(*args: Any) -> Any:
        weights.write_bytes(content)
        return check(*args)

    monkeypatch.setattr(safetensors_file, "_check", rewrite_and_check)
    with pytest.raises(LoadFailed, match="changed while it was read"):
        read_checkpoint(tmp_path, BASE)
