"""Weights that were finite in the file and infinite where they are used: as ΔW, or as bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_files import BASE, COLUMN, ROW, A, B, Entry, floats, write_adapter

from adaptercache import AdapterInvalid
from adaptercache.checkpoint import read_checkpoint

DOUBLES = torch.tensor([1e300, 0, 0, 0], dtype=torch.float64).numpy().tobytes()


@pytest.mark.parametrize(
    ("a", "b", "alpha"),
    [
        (("F64", [1, 4], DOUBLES), COLUMN, 1),
        (("F32", [1, 4], floats(3.4e38, 0, 0, 0)), COLUMN, 1),  # rounds to infinity in bfloat16
        (("F32", [1, 4], floats(1e20, 0, 0, 0)), ("F32", [4, 1], floats(-1e20, 0, 0, 0)), 1),
        (ROW, COLUMN, 3e38),
    ],
)
def test_a_delta_beyond_float32_is_refused(
    tmp_path: Path, a: Entry, b: Entry, alpha: float
) -> None:
    folder = write_adapter(tmp_path, {A: a, B: b}, {"r": 1, "lora_alpha": alpha})
    with pytest.raises(AdapterInvalid, match=r"too large|not finite"):
        read_checkpoint(folder, BASE)


def test_a_large_delta_is_served(tmp_path: Path) -> None:
    large: Entry = ("F32", [1, 4], floats(1e18, -1e18, 1, 0))
    folder = write_adapter(tmp_path, {A: large, B: COLUMN})
    assert read_checkpoint(folder, BASE).delta("q_proj").isfinite().all()
