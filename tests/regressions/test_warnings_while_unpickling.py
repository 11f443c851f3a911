"""torch warns while it unpickles some tensors (once a process, of sparse ones). Where a process
turns warnings into errors, the warning's text stood for the reason of the refusal, and a sound
pickle that torch warned of was refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import BASE, A, B, write_adapter

from adaptercache import AdapterInvalid
from adaptercache.checkpoint import ReadOptions, read_checkpoint

ALLOW = ReadOptions(allow_pickle=True)


@pytest.fixture(autouse=True)
def torch_that_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.load

    def warn_and_load(*args: Any, **options: Any) -> Any:
        warnings.warn("Sparse invariant checks are implicitly disabled.", stacklevel=1)
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", warn_and_load)


def pickled(folder: Path, content: object) -> Path:
    (write_adapter(folder) / "adapter_model.safetensors").unlink()
    torch.save(content, folder / "adapter_model.bin")
    return folder


@pytest.mark.parametrize("action", ["error", "default", "ignore"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch.Tensor.to_sparse, "a tensor of layout sparse_coo"),
        (torch.Tensor.to_sparse_csr, "a tensor of layout sparse_csr"),
        (lambda tensor: tensor.to("meta"), "a tensor on meta"),
        (lambda tensor: 7, "int"),
    ],
    ids=["coo", "csr", "meta", "int"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_the_refusal_names_the_tensor_and_its_kind(
    tmp_path: Path, make: Callable[[torch.Tensor], Any], kind: str, action: Any
) -> None:
    folder = pickled(tmp_path, {A: make(torch.ones(1, 4)), B: torch.ones(4, 1)})
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with pytest.raises(AdapterInvalid) as raised:
            read_checkpoint(folder, BASE, options=ALLOW)
    assert raised.value.what == "the pickle holds something else"
    assert str(raised.value.found) == f"{A}: {kind}"
    assert "dense tensors" in str(raised.value.expected)


@pytest.mark.parametrize("action", ["error", "default"])
def test_a_sound_pickle_is_read(tmp_path: Path, action: Any) -> None:
    folder = pickled(tmp_path, {A: torch.ones(1, 4), B: torch.ones(4, 1)})
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        before = list(warnings.filters)
        assert read_checkpoint(folder, BASE, options=ALLOW).max_rank == 1
        assert warnings.filters == before


def test_reading_by_several_threads_leaves_the_filters_as_they_were(tmp_path: Path) -> None:
    folder = pickled(tmp_path, {A: torch.ones(1, 4), B: torch.ones(4, 1)})
    before = list(warnings.filters)
    readers = [
        threading.Thread(
            target=lambda: [read_checkpoint(folder, BASE, options=ALLOW) for _ in range(20)]
        )
        for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert warnings.filters == before
