"""What BGMV and SGMV share: the expand of tokens that share an adapter, on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from adaptercache.kernels.dots import dot_rounded
from adaptercache.kernels.jit import pick
from adaptercache.kernels.paging import load_part, part_pages, prefetch_part

__all__ = ["block_of", "expand_group"]


@triton.jit
def block_of(block, B0: tl.constexpr, B1: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr):
    """Which module a block of columns is of, and its first column there."""
    m = 0
    if M > 1:
        m += tl.where(block >= B0, 1, 0)
    if M > 2:
        m += tl.where(block >= B0 + B1, 1, 0)
    return m, (block - pick(m, 0, B0, B0 + B1, M)) * WIDTH


@triton.jit
def expand_group(
    y,
    y_stride,
    arena,
    slot_pages,
    num_pages,
    begin,  # of the module's B in the slot's vector
    r,
    scale,
    column,  # the first
    blocks,  # how many, of BN columns each; at most a page's length
    width,
    its_tokens,  # int32 [TILE], −1 after the last
    partials,  # float32 [rows, SPLITS, RANK]
    first_row,  # of the module in partials
    SPLITS: tl.constexpr,  # that there is room for
    SUMMED: tl.constexpr,  # that were written
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    BN: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Semantics: ``y[t, n] += scale · Σ_i (Σ_s partials[first_row + t, s, i]) · Bᵀ[i, n]``, rounded
    once, for the tokens t of a group, over a run of blocks of columns n."""
    # [TILE], [RANK]
    token = tl.load(its_tokens + tl.arange(0, TILE))
    live = token >= 0
    i = tl.arange(0, RANK)
    first, page, next_page = part_pages(
        slot_pages, begin, i, i < r, column, width, PAGE_ELEMS, PAGE_ELEMS, ROWS
    )
    if PDL:
        if ALIGNED and 4 * BN <= PAGE_ELEMS:
            prefetch_part(
                arena, num_pages, i < r, first, page, next_page, blocks * BN, 4 * BN,
                PAGE_ELEMS, ROWS,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
    # [AT_ONCE, TILE, RANK]: so the sum is what needs a layout of its own, and not each load
    AT_ONCE: tl.constexpr = max(1, 2048 // (TILE * RANK))
    s = tl.arange(0, AT_ONCE)[:, None, None]
    h_at = ((first_row + token) * SPLITS).to(tl.int64)[None, :, None] * RANK + i[None, None, :]
    h_mask = live[None, :, None] & (i < r)[None, None, :]
    # [TILE, RANK]
    h = tl.zeros([TILE, RANK], tl.float32)
    for first_split in tl.static_range(0, SUMMED, AT_ONCE):
        split = first_split + s
        some = tl.load(partials + h_at + split * RANK, mask=h_mask & (split < SUMMED), other=0.0)
        h += tl.sum(some, 0)
    h *= scale
    for block in tl.range(0, blocks, num_stages=STAGES):
        # [RANK, BN]
        b = load_part(
            arena, slot_pages, num_pages, begin, i, i < r, column, width, first, page, next_page,
            block * BN, PAGE_ELEMS, BN, PAGE_ELEMS, ROWS, ALIGNED,
        )  # fmt: skip
        n = column + block * BN + tl.arange(0, BN)
        to = y + token.to(tl.int64)[:, None] * y_stride + n[None, :]
        mask = live[:, None] & (n < width)[None, :]
        # [TILE, BN]
        old = tl.load(to, mask=mask, other=0.0)
        new = old.to(tl.float32) + dot_rounded(h, b, DOT_IN_FLOAT32)
        tl.store(to, new.to(y.dtype.element_ty), mask=mask)
