"""A run of columns of y of an entry, by fragments (see `fragments`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from adaptercache.kernels.fragment_layouts import (
    b_layout,
    mma_layout,
    operand_layout,
    sums_layout,
    y_layout,
)
from adaptercache.kernels.fragment_reads import pages_of, sixteens, token_of, wait

__all__ = ["expand_run"]


@gluon.jit
def expand_run(
    of_entry,  # see below
    of_y,
    is_narrow,
    SPLITS: gl.constexpr,
    CLASS: gl.constexpr,
    RANK: gl.constexpr,
    STRIPS: gl.constexpr,  # blocks at once
    MOST: gl.constexpr,  # tokens
    WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,  # parts of K that are read at once
    PAGE_ELEMS: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """``y += scaling · (sum of the parts) · Bᵀ`` for an entry's tokens and blocks of columns side
    by side. The sum is rounded to what B is of; up to rank 32, where so few roundings might
    show in y, what was rounded off is multiplied too.

    A narrow entry, of up to 8 rows and 4 tokens, has twice as many blocks done at once: rows 8 to
    15 of B are its rows STRIPS blocks further, and of each two tokens the second is the first one
    there. A block's B and y are asked for as soon as registers of another are free: 16 rows of B
    when those of the block before are multiplied. The last blocks are code of their own, since they
    are often the only ones, and done sooner where nothing follows.
    """
    # begin: of the module's B in the slot's vector. r: at most RANK. parts: pointer to float32
    # [tokens, CLASS / 16, SPLITS, 16] of the module.
    work, which, tokens, arena, slot_pages, num_pages, begin, r, scale, parts = of_entry
    # y: the module's, and width; column: the first; blocks: how many, of 64 · WARPS columns each,
    # which divide 512 and width.
    y, y_stride, column, width, blocks = of_y
    B: gl.constexpr = b_layout(WARPS)
    Y: gl.constexpr = y_layout(MOST, WARPS)
    TYPE: gl.constexpr = y.dtype.element_ty
    CHUNKS: gl.constexpr = RANK // 16
    BLOCK: gl.constexpr = 64 * WARPS
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :]
    b_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    b_two = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    y_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, Y)))[:, None, None]
    y_two = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, Y)))[None, None, :]
    half = gl.where(is_narrow, i // 8, 0)
    row = i - half * 8
    begin += column + half * (STRIPS * BLOCK) + row * width  # of each row
    columns = _by_twos(arena) + (b_warp * 32 + b_two)
    its_blocks = blocks - half * STRIPS
    rows = _rows_at(
        slot_pages, num_pages, begin, row, r, its_blocks, width, STRIPS, CHUNKS, BLOCK, PAGE_ELEMS,
        ROWS,
    )  # fmt: skip
    b = ()
    for strip in gl.static_range(STRIPS):
        for chunk in gl.static_range(CHUNKS):
            there = _there(row, r, its_blocks, strip, chunk)
            b += (_load(columns, rows[strip * CHUNKS + chunk], there),)
    j = gl.arange(0, MOST, layout=gl.SliceLayout(0, gl.SliceLayout(2, Y)))
    y_half = gl.where(is_narrow, j % 2, 0)
    y_blocks = (blocks - y_half * STRIPS)[None, :, None]
    token = token_of(work, which, tokens, gl.where(is_narrow, j // 2, j))
    y_at = token.to(gl.int64) * y_stride + column + y_half * (STRIPS * BLOCK)
    y_at = _by_twos(y + gl.multiple_of(y_at, 16))[None, :, None] + (y_warp * 32 + y_two)
    live = (token >= 0)[None, :, None] & (y_warp >= 0)
    place, its_rows, those = _parts_of(
        work, which, tokens, is_narrow, r, SPLITS, CLASS, RANK, MOST, WARPS
    )  # fmt: skip
    before, after = _scales(scale, TYPE)
    if PDL:
        wait()
    old = ()
    for strip in gl.static_range(STRIPS):
        old += (gl.load(y_at + strip * (BLOCK // 2), mask=live & (strip < y_blocks), other=0),)
    high, low = _right(
        parts, place, those, its_rows, before, TYPE, SPLITS, AT_ONCE, RANK, MOST, WARPS
    )  # fmt: skip
    SPAN: gl.constexpr = STRIPS * BLOCK
    more = gl.where(is_narrow, 2, 1)
    while blocks > STRIPS * more:
        blocks -= STRIPS * more
        begin += SPAN * more
        its_blocks = blocks - half * STRIPS
        y_blocks = (blocks - y_half * STRIPS)[None, :, None]
        next_at = y_at + SPAN // 2 * more
        next_b = ()
        next_old = ()
        rows = _rows_at(  # now, since look-ups that follow a store wait for it
            slot_pages, num_pages, begin, row, r, its_blocks, width, STRIPS, CHUNKS, BLOCK,
            PAGE_ELEMS, ROWS,
        )  # fmt: skip
        for strip in gl.static_range(STRIPS):
            new = gl.full([WARPS, 64, MOST], 0.0, gl.float32, mma_layout(WARPS))
            for chunk in gl.static_range(CHUNKS):
                left = _left(b[strip * CHUNKS + chunk], TYPE, WARPS)
                new = _plus(new, left, high, low, chunk, CHUNKS)
                there = _there(row, r, its_blocks, strip, chunk)
                next_b += (_load(columns, rows[strip * CHUNKS + chunk], there),)
            new = _add(old[strip], new, after, TYPE, MOST, WARPS)
            gl.store(y_at + strip * (BLOCK // 2), new, mask=live)
            its_y = next_at + strip * (BLOCK // 2)
            next_old += (gl.load(its_y, mask=live & (strip < y_blocks), other=0),)
        b, old, y_at = next_b, next_old, next_at
    for strip in gl.static_range(STRIPS):
        if strip < blocks:
            last = gl.full([WARPS, 64, MOST], 0.0, gl.float32, mma_layout(WARPS))
            for chunk in gl.static_range(CHUNKS):
                left = _left(b[strip * CHUNKS + chunk], TYPE, WARPS)
                last = _plus(last, left, high, low, chunk, CHUNKS)
            last = _add(old[strip], last, after, TYPE, MOST, WARPS)
            gl.store(y_at + strip * (BLOCK // 2), last, mask=live & (strip < y_blocks))


@gluon.jit
def _by_twos(pointers):
    """Numbers of 32 bits, since of tensors that a loop carries each number takes a register."""
    return pointers.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _there(row, r, its_blocks, strip: gl.constexpr, chunk: gl.constexpr):
    """Which rows [1, row] there are in a block."""
    return (chunk * 16 + row < r) & (strip < its_blocks)


@gluon.jit
def _rows_at(
    slot_pages, num_pages, begin, row, r, its_blocks, width, STRIPS: gl.constexpr,
    CHUNKS: gl.constexpr, BLOCK: gl.constexpr, PAGE_ELEMS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """[1, row] of each block and 16 rows: where the block's columns of these rows of Bᵀ begin in
    the arena, by sixteens. None crosses a cell."""
    at = ()
    for strip in gl.static_range(STRIPS):
        for chunk in gl.static_range(CHUNKS):
            element = (begin + (strip * BLOCK + chunk * 16 * width)).to(gl.uint32)
            there = _there(row, r, its_blocks, strip, chunk)
            page = pages_of(slot_pages, element, there, PAGE_ELEMS, ROWS)
            at += (sixteens(page, num_pages, element, PAGE_ELEMS, ROWS),)
    return at


@gluon.jit
def _load(columns, at, there):
    """[warp, row, 32]: B's columns, by twos."""
    at = gl.multiple_of(at.to(gl.int64) * 8, (8, 8))
    return gl.load(columns + gl.expand_dims(at, 2), mask=gl.expand_dims(there, 2), other=0)


@gluon.jit
def _parts_of(
    work, which, tokens, is_narrow, r, SPLITS: gl.constexpr, CLASS: gl.constexpr,
    RANK: gl.constexpr, MOST: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Where the first of K's parts are that `_right` adds up; which rows there are, and which parts
    are read: of rows that there are not too, in fours, since they are read so."""
    at = gl.arange(0, MOST * RANK, layout=sums_layout(MOST * RANK, WARPS))
    row, j = at % RANK, at // RANK
    its_rows = row < r
    is_read = row // 16 * 16 < r
    if RANK == 16 and MOST == 8:  # elsewhere none is narrow
        is_read &= (row // 8 == j % 2) | (not is_narrow)
        row = gl.where(is_narrow, row % 8, row)
        j = gl.where(is_narrow, j // 2, j)
        its_rows = row < r
    token = token_of(work, which, tokens, j)
    place = (token * (CLASS // 16) + row // 16) * (SPLITS * 16) + row % 16
    place = gl.max_contiguous(gl.multiple_of(place, [4]), [4])
    return place, its_rows, gl.max_constancy(is_read & (token >= 0), [4])


@gluon.jit
def _scales(scale, TYPE: gl.constexpr):
    """Of the sums and of the products. float16 must hold the sums when they are scaled: a scaling
    over 1 is for the products, as in PEFT."""
    if TYPE.is_fp16():
        is_large = gl.abs(scale) > 1
        return gl.where(is_large, 1.0, scale), gl.where(is_large, scale, 1.0)
    else:
        return scale, 1.0


@gluon.jit
def _right(
    parts, place, is_read, its_rows, scale, TYPE: gl.constexpr, SPLITS: gl.constexpr,
    AT_ONCE: gl.constexpr, RANK: gl.constexpr, MOST: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Right operands [warp, 16 rows, token] of every warp, for each 16 rows: the sum of the parts,
    always in the same order, in float32, and rounded; 0 of rows that there are not, whatever x is.
    And what was rounded off, where it is multiplied. What other programs have stored is read past
    the L1."""
    RIGHT: gl.constexpr = operand_layout(1, WARPS, 2)
    sums = gl.full([MOST * RANK], 0.0, gl.float32, sums_layout(MOST * RANK, WARPS))
    for first in gl.static_range(0, SPLITS, AT_ONCE):
        some = ()
        for s in gl.static_range(first, min(first + AT_ONCE, SPLITS)):
            at = parts + place + s * 16
            some += (gl.load(at, mask=is_read, other=0.0, cache_modifier=".cg"),)
        for s in gl.static_range(min(AT_ONCE, SPLITS - first)):
            sums += some[s]
    h = gl.where(its_rows, sums * scale, 0.0).reshape([MOST, RANK]).permute([1, 0])
    h = gl.expand_dims(gl.convert_layout(h, gl.SliceLayout(0, RIGHT)), 0)
    h = _split(h.broadcast_to([WARPS, RANK, MOST]), RANK // 16, MOST, WARPS)
    high = ()
    low = ()
    for chunk in gl.static_range(RANK // 16):
        high += (h[chunk].to(TYPE),)
        if RANK <= 32:
            off = h[chunk] - high[chunk].to(gl.float32)
            # NaN where h is infinite, and infinite where only rounding made it so.
            low += (gl.where(gl.abs(off) < float("inf"), off, 0.0).to(TYPE),)
    return high, low


@gluon.jit
def _split(h, CHUNKS: gl.constexpr, MOST: gl.constexpr, WARPS: gl.constexpr):
    if CHUNKS == 1:
        return (gl.convert_layout(h, operand_layout(1, WARPS, 2)),)
    else:
        low, high = gl.split(h.reshape([WARPS, 2, CHUNKS * 8, MOST]).permute([0, 2, 3, 1]))
        return _split(low, CHUNKS // 2, MOST, WARPS) + _split(high, CHUNKS // 2, MOST, WARPS)


@gluon.jit
def _left(b, TYPE: gl.constexpr, WARPS: gl.constexpr):
    """The left operand [warp, 64 columns, 16 rows]. Column ``8 · g + 2 · j + e`` is the mma's
    ``16 · j + 8 · e + g``."""
    tile = gl.join(b.to(gl.int16), (b >> 16).to(gl.int16)).to(TYPE, bitcast=True)
    tile = tile.reshape([WARPS, 16, 8, 4, 2]).permute([0, 3, 4, 2, 1])
    return gl.convert_layout(tile.reshape([WARPS, 64, 16]), operand_layout(0, WARPS, 2))


@gluon.jit
def _plus(new, left, high, low, chunk: gl.constexpr, CHUNKS: gl.constexpr):
    """What 16 rows add to [warp, 64 columns, token]."""
    # CHUNKS: else Triton 3.6 takes four of high and none of low for two of each.
    if chunk < len(low):
        new = mma_v2(left, low[chunk], new)
    return mma_v2(left, high[chunk], new)


@gluon.jit
def _add(old, new, scale, TYPE: gl.constexpr, MOST: gl.constexpr, WARPS: gl.constexpr):
    """Products, scaled, and y, by twos; rounded once."""
    Y: gl.constexpr = y_layout(MOST, WARPS)
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32" if TYPE.is_bf16() else "cvt.rn.f16x2.f32"
    new = new.reshape([WARPS, 4, 2, 8, MOST]).permute([0, 4, 3, 1, 2])
    even, odd = gl.split(new.reshape([WARPS, MOST, 32, 2]))
    low, high = _two(old, TYPE)
    even = gl.convert_layout(even, Y) * scale + low
    odd = gl.convert_layout(odd, Y) * scale + high
    return gl.inline_asm_elementwise(
        CONVERT + " $0, $1, $2;", "=r,r,r", [odd, even], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _two(bits, TYPE: gl.constexpr):
    """The lower and the upper 16 bits, as float32."""
    if TYPE.is_bf16():  # they are its upper ones
        return (
            (bits << 16).to(gl.float32, bitcast=True),
            (bits & -65536).to(gl.float32, bitcast=True),
        )
    else:
        return (
            bits.to(gl.int16).to(TYPE, bitcast=True).to(gl.float32),
            (bits >> 16).to(gl.int16).to(TYPE, bitcast=True).to(gl.float32),
        )
