"""Adapters that PEFT saved once for all tests here, and one thread for products this small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama_adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a0`` to ``a5`` for a Llama."""
    pytest.importorskip("peft", minversion="0.21")
    pytest.importorskip("transformers", minversion="5")
    from attached import save

    root = tmp_path_factory.mktemp("llama")
    save(root, "llama", range(6))
    return root
