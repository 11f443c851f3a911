"""How kernels read a matrix of a flat vector out of the paged arena."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_part", "load_tile", "part_pages"]


@triton.jit
def load_tile(
    arena,  # [ROWS, num_pages, PAGE_ELEMS]
    pages,  # the slot's row of the page table
    num_pages,
    begin,  # where the matrix begins in the slot's vector, elements
    rows,  # [R] which rows
    row_mask,  # [R]
    column,  # the first column
    width,  # of the whole matrix
    COLUMNS: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr = 8,
):
    """Semantics: ``tile[i, k] = vector[begin + rows[i] * width + column + k]``, 0 where masked.

    Element ``e`` of the vector is ``arena[j % ROWS, pages[j // ROWS], e % PAGE_ELEMS]`` with
    ``j = e // PAGE_ELEMS``. ALIGNED: COLUMNS divides width and 512, so no row of the tile crosses
    a cell, and one look-up a row will do; else every element looks up its own, and columns beyond
    width read 0. Vectors are shorter than 2^32 elements.
    """
    # [COLUMNS]
    k = tl.arange(0, COLUMNS)
    if ALIGNED:
        if VECTOR < 8:
            k = tl.max_contiguous(k, VECTOR)
        # [R]
        first = (begin + rows * width + column).to(tl.uint32)
        cell = first // PAGE_ELEMS
        page = tl.load(pages + cell // ROWS, mask=row_mask, other=0)
        at = ((cell % ROWS).to(tl.int32) * num_pages + page).to(tl.int64) * PAGE_ELEMS
        at = tl.multiple_of(at + (first % PAGE_ELEMS).to(tl.int64), 16)
        return tl.load(arena + at[:, None] + k[None, :], mask=row_mask[:, None], other=0.0)
    # [R, COLUMNS]
    mask = row_mask[:, None] & (column + k < width)[None, :]
    element = (begin + rows[:, None] * width + column + k[None, :]).to(tl.uint32)
    cells = element // PAGE_ELEMS
    its_page = tl.load(pages + cells // ROWS, mask=mask, other=0)
    where = ((cells % ROWS).to(tl.int32) * num_pages + its_page).to(tl.int64) * PAGE_ELEMS
    return tl.load(arena + where + (element % PAGE_ELEMS).to(tl.int64), mask=mask, other=0.0)


@triton.jit
def part_pages(
    pages,
    begin,
    rows,  # [R]
    row_mask,  # [R]
    column,  # the part's first
    width,
    PART: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Where rows' parts of PART columns begin, and the pages of the two cells each may lie in.

    Looked up ahead of a loop over the part (`load_part`), because a look-up inside takes a stage of
    the loop's software pipeline.
    """
    # [R]
    first = (begin + rows * width + column).to(tl.uint32)
    cell = first // PAGE_ELEMS
    crosses = row_mask & ((first + (PART - 1)) // PAGE_ELEMS > cell)
    page = tl.load(pages + cell // ROWS, mask=row_mask, other=0)
    next_page = tl.load(pages + (cell + 1) // ROWS, mask=crosses, other=0)
    return first, page, next_page


@triton.jit
def load_part(
    arena,
    pages,
    num_pages,
    begin,
    rows,
    row_mask,
    column,
    width,
    first,  # of the part, as from part_pages; page and next_page likewise
    page,
    next_page,
    step,  # columns from the part's first
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Semantics: `load_tile` at ``column + step``. Parts longer than a cell look their pages up
    here."""
    if not ALIGNED or PART > PAGE_ELEMS:
        return load_tile(
            arena, pages, num_pages, begin, rows, row_mask, column + step, width, COLUMNS,
            PAGE_ELEMS, ROWS, ALIGNED,
        )  # fmt: skip
    # [R]
    element = first + step
    cell = element // PAGE_ELEMS
    its_page = tl.where(cell == first // PAGE_ELEMS, page, next_page)
    at = ((cell % ROWS).to(tl.int32) * num_pages + its_page).to(tl.int64) * PAGE_ELEMS
    at = tl.multiple_of(at + (element % PAGE_ELEMS).to(tl.int64), 16)
    mask = (row_mask & (column + step < width))[:, None]
    return tl.load(arena + at[:, None] + tl.arange(0, COLUMNS)[None, :], mask=mask, other=0.0)
