"""A pickle, where it is allowed: a view of one number passed for a matrix of any size, a zip
archive might inflate, and parameters took their gradients' flag with them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from adapter_files import BASE, A, B, write_adapter

from adaptercache import AdapterInvalid
from adaptercache.checkpoint import Checkpoint, ReadOptions, read_checkpoint

ALLOW = ReadOptions(allow_pickle=True)


def read_pickled(folder: Path, content: object) -> Checkpoint:
    (write_adapter(folder) / "adapter_model.safetensors").unlink()
    torch.save(content, folder / "adapter_model.bin")
    return read_checkpoint(folder, BASE, options=ALLOW)


def test_a_view_that_claims_more_than_the_file_is_refused(tmp_path: Path) -> None:
    huge = torch.ones(1).expand(1 << 20, 1 << 20)
    with pytest.raises(AdapterInvalid, match="larger than its file"):
        read_pickled(tmp_path, {A: huge, B: torch.ones(4, 1)})


def test_an_archive_that_inflates_is_refused(tmp_path: Path) -> None:
    read_pickled(tmp_path, {A: torch.zeros(1, 4), B: torch.ones(4, 1)})
    plain, packed = tmp_path / "adapter_model.bin", tmp_path / "packed"
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(packed, "w") as again:
        for entry in archive.infolist():
            again.writestr(entry.filename, archive.read(entry), zipfile.ZIP_DEFLATED)
        again.writestr("archive/data/9", bytes(1 << 24), zipfile.ZIP_DEFLATED)
    packed.replace(plain)
    with pytest.raises(AdapterInvalid, match="compressed"):
        read_checkpoint(tmp_path, BASE, options=ALLOW)


@pytest.mark.parametrize(
    "tensor", [torch.ones(1, 4).to_sparse(), torch.ones(1, 4, device="meta")], ids=str
)
def test_what_is_no_dense_tensor_in_memory_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(AdapterInvalid, match="dense"):
        read_pickled(tmp_path, {A: tensor, B: torch.ones(4, 1)})


def test_parameters_are_read_as_tensors(tmp_path: Path) -> None:
    a, b = torch.nn.Parameter(torch.ones(1, 4)), torch.nn.Parameter(torch.ones(4, 1))
    weights = read_pickled(tmp_path, {A: a, B: b}).modules["q_proj"]
    assert not weights.a.requires_grad
    assert not weights.b.requires_grad
