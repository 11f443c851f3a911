"""Sizes of 2⁶² beside a 0 made a product of 0, passed for a shape and broke torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_files import BASE, COLUMN, A, B, write_adapter

from adaptercache import AdapterInvalid
from adaptercache.checkpoint import read_checkpoint

BIG = (1 << 63) - 1


@pytest.mark.parametrize("shape", [[0, BIG, BIG], [BIG, 0], [1 << 31, 1 << 31, 0, 1 << 31]])
def test_an_empty_shape_that_nobody_can_count_in_is_refused(
    tmp_path: Path, shape: list[int]
) -> None:
    with pytest.raises(AdapterInvalid, match="shape"):
        read_checkpoint(write_adapter(tmp_path, {A: ("F32", shape, b""), B: COLUMN}), BASE)


@pytest.mark.parametrize("shape", [[0, 4], [0], [1 << 40, 0, 1 << 10]])
def test_any_other_empty_tensor_is_called_empty(tmp_path: Path, shape: list[int]) -> None:
    with pytest.raises(AdapterInvalid, match="empty"):
        read_checkpoint(write_adapter(tmp_path, {A: ("F64", shape, b""), B: COLUMN}), BASE)
