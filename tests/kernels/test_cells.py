"""Chunks laid into cells: by the kernel (interpreted where there is no GPU) and by torch."""

from __future__ import annotations

import pytest
import torch

from adaptercache.kernels.cells import lay_into_cells
from adaptercache.testing import any_device

DEVICE = any_device()


def want(arena: torch.Tensor, chunk: torch.Tensor, pages: list[int]) -> torch.Tensor:
    want = arena.clone()
    for i, page in enumerate(pages):
        for row in range(len(arena)):
            want[row, page] = chunk[i, row]
    return want


def case(rows: int, words: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    torch.manual_seed(rows * words)
    arena = torch.randint(-(1 << 62), 1 << 62, (rows, 9, words), device=DEVICE)
    chunk = torch.randint(-(1 << 62), 1 << 62, (3, rows, words), device=DEVICE)
    return arena, chunk, [7, 0, 4]


@pytest.mark.parametrize(("rows", "words"), [(1, 8192), (2, 128), (3, 384), (5, 2944)])
def test_page_i_of_a_chunk_goes_to_its_page_and_nothing_else_changes(rows: int, words: int) -> None:
    arena, chunk, pages = case(rows, words)
    expected = want(arena, chunk, pages)
    lay_into_cells(arena, chunk, torch.tensor(pages, dtype=torch.int32, device=DEVICE))
    assert torch.equal(arena, expected)


@pytest.mark.parametrize(("rows", "words"), [(1, 256), (2, 128), (3, 384), (2, 2176)])
def test_the_kernel_does_the_same(rows: int, words: int) -> None:
    pytest.importorskip("triton")
    from adaptercache.kernels.lay import lay

    arena, chunk, pages = case(rows, words)
    expected = want(arena, chunk, pages)
    table = torch.tensor([0, *pages], dtype=torch.int32, device=DEVICE)
    lay(arena, chunk, table[1:])  # from the middle of a row, as pages of later chunks are
    assert torch.equal(arena, expected)
