"""How a transfer is cut, which way it takes, and where strided copies lay bytes."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import Tiny

from adaptercache.kernels import LoraStack
from adaptercache.layout import ArenaShape
from adaptercache.packing import VectorSpec
from adaptercache.tiers import ways
from adaptercache.tiers.rows import TableRows
from adaptercache.tiers.streams import Streams
from adaptercache.tiers.strided import Bytes, copy_rows_of, lay_page

CPU = torch.device("cpu")


def stack(rows: int = 2, num_pages: int = 9, page_bytes: int = 1024) -> LoraStack:
    return LoraStack(Tiny.layout, ArenaShape(rows, num_pages, page_bytes, 4), 3)


@given(num_pages=st.integers(0, 400), way=st.sampled_from([ways.Strided, ways.Staged]))
def test_chunks_are_all_pages_in_order_the_first_one_short(
    num_pages: int, way: type[ways.Way]
) -> None:
    one = way(Streams(CPU), stack(page_bytes=512 << 10, num_pages=2))  # pages of a MiB
    chunks = one.chunks(num_pages)
    pages = [page for first, count in chunks for page in range(first, first + count)]
    assert pages == list(range(num_pages))
    sizes = [count for _, count in chunks]
    assert sizes[:1] == [min(4, num_pages)][: len(sizes)]
    assert all(size == one.chunk_bytes >> 20 for size in sizes[1:-1])


@pytest.mark.parametrize(
    ("shape", "strided"),
    [
        (ArenaShape(32, 4096, 64 << 10, 2), True),  # Llama-3-8B, 8 GiB
        (ArenaShape(32, 32767, 64 << 10, 2), True),
        (ArenaShape(32, 32768, 64 << 10, 2), False),  # over CUDA's pitch
        (ArenaShape(1, 4096, 64 << 10, 2), False),
        (ArenaShape(80, 4096, 8 << 10, 2), False),
    ],
    ids=str,
)
def test_large_cells_are_copied_by_the_copy_engine(shape: ArenaShape, strided: bool) -> None:
    assert ways.is_strided(shape) == strided


def test_who_waits_is_staged_and_hints_and_what_steps_lead_are_strided_where_that_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = ways.Ways.of(Streams(CPU), stack())
    assert isinstance(small.demand, ways.Staged)
    assert small.hint is small.led is small.demand
    monkeypatch.setattr(ways, "MIN_CELL_BYTES", 1024)
    large = ways.Ways.of(Streams(CPU), stack())
    assert isinstance(large.demand, ways.Staged)
    assert isinstance(large.hint, ways.Strided)
    assert isinstance(large.led, ways.Strided)
    assert large.led._lane is not large.hint._lane, "what a step waits for stands behind no hint"


@given(
    seed=st.integers(0, 1 << 30),
    nbytes=st.integers(1, 3 * 1024),
    page=st.integers(0, 8),
)
def test_a_page_is_laid_out_whatever_pieces_it_comes_in(seed: int, nbytes: int, page: int) -> None:
    rng = random.Random(seed)
    arena = torch.full((3, 9, 1024), 7, dtype=torch.uint8)
    vector = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    cuts = sorted(rng.sample(range(nbytes + 1), min(nbytes, rng.randint(0, 6))))
    pieces = [vector[a:b].clone() for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True)]
    shape = ArenaShape(3, 9, 1024, 4)
    lay_page(copy_rows_of(CPU), arena.data_ptr(), shape, page, Bytes(iter(pieces)).take(nbytes))
    got = arena[:, page].flatten()
    assert torch.equal(got[:nbytes], vector)
    assert (got[nbytes:] == 7).all()
    assert (arena[:, [p for p in range(9) if p != page]] == 7).all()


def test_a_row_made_of_bytes_is_the_tables_row() -> None:
    whole = stack()
    ranks = [rank % 5 for rank in range(len(Tiny.layout.sites))]
    spec = VectorSpec.of(Tiny.layout, ranks, [0.5 + rank for rank in ranks])
    rows = TableRows(whole)
    rows.write(1, spec, range(40, 40 + whole.pages.shape[1]))
    for _ in range(2):  # the second time out of what was kept, over a longer list of pages
        assert torch.equal(rows.write(1, spec, (7, 0, 3)), whole.row(spec, (7, 0, 3)))


def test_the_drivers_structure_has_the_size_that_the_driver_reads() -> None:
    from adaptercache.tiers.strided import _Copy2D

    assert ctypes.sizeof(_Copy2D) == 128
    assert _Copy2D.dstXInBytes.offset == 56
    assert _Copy2D.WidthInBytes.offset == 112
