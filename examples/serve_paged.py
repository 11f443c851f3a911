"""Attention of a step's new tokens, with the KV read where it lies.

A long sequence is read by several programs, each a part of it (flash decoding): one alone would be
a step's last by far. How many they are the kernel finds from the length, which is known on the GPU
only; a launch has as many as the longest may need, and those left over end at once. The last to
finish adds the parts up, in their order, whoever it is: equal inputs give equal bits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_attention import TILE_TOKENS

__all__ = ["attend_in_place"]

LOG2_E = 1.4426950408889634
AT_ONCE = 64  # keys that a program reads at most
PART, PART_OF_TILES = 256, 512  # tokens of a sequence that a program reads alone
PROGRAMS = 4096  # of a launch, from which on sequences are in fewer parts: also idle ones take time


def attend_in_place(
    q: Tensor, view: Tensor, tables: Tensor, positions: Tensor, tiles: Tensor | None
) -> Tensor:
    """`attend`, by one program a tile, key/value head and part of the sequence. A row's heads lie
    side by side; rows may be apart. Rows that are in no tile are not written.

    A GPU's launches come one behind the other: they share counters. The first is not in a graph.
    """
    rows, heads, head_dim = q.shape
    _, _, block_size, kv_heads, _ = view.shape
    assert q.stride()[1:] == (head_dim, 1)
    assert positions.is_contiguous()
    assert tables.stride(1) == 1
    assert tiles is None or tiles.is_contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_tiles, tokens = (rows, 1) if tiles is None else (len(tiles), TILE_TOKENS)
    shared = heads // kv_heads
    queries = max(16, triton.next_power_of_2(tokens * shared))
    # As many scores as its registers hold; tensor cores take no float32, which needs more.
    is_wide = q.dtype is torch.float32
    at_once = max(16, min(AT_ONCE, (512 if is_wide else 4096) // queries))
    longest = tables.shape[1] * block_size
    most = PROGRAMS // (num_tiles * kv_heads)
    part = PART if tiles is None else PART_OF_TILES
    num_parts = max(1, min(triton.cdiv(longest, part), most))
    parts = torch.empty((num_parts, rows, heads, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((num_parts, 2, rows, heads), dtype=torch.float32, device=q.device)
    _attend_kernel[(num_tiles, kv_heads, num_parts)](
        *(q, view, tables, positions, tiles, out),
        *(parts, sums, _counters(q.device)),
        *(q.stride(0), longest, tables.stride(0), view.stride(0), rows),
        head_dim**-0.5 * LOG2_E,
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        SHARED=shared,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        HEAD_TILE=max(16, triton.next_power_of_2(head_dim)),
        AT_ONCE=at_once,
        PART=part,
        num_stages=2,
        num_warps=4 if queries <= (16 if is_wide else 64) else 8,
    )
    return out.view(rows, heads * head_dim)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Of the parts that are done, of each tile and key/value head: 0 between launches."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


# Where a step's numbers happen to lie, and how far apart, is no reason to compile again.
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=("longest", "table_stride", "rows"),
    do_not_specialize_on_alignment=("tables_ptr", "positions_ptr", "tiles_ptr"),
)
def _attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, KV_HEADS · SHARED, HEAD_DIM], rows strided
    kv_ptr,  # [pages, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM], pages strided
    tables_ptr,  # int64 [sequences, blocks], sequences strided
    positions_ptr,  # int64 [rows]
    tiles_ptr,  # int64 [tiles, 3], or None: row n is the only one of sequence n
    out_ptr,  # [rows, KV_HEADS · SHARED · HEAD_DIM]
    parts_ptr,  # float32 [parts, rows, KV_HEADS · SHARED, HEAD_DIM]
    sums_ptr,  # float32 [parts, 2, rows, KV_HEADS · SHARED]: the largest score, the weights' sum
    counters_ptr,  # int32 [tiles, KV_HEADS], 0
    q_stride,
    longest,  # tokens of a table
    table_stride,
    page_stride,
    rows,
    scale,  # of the scores, in powers of two
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,  # room for a tile's rows, with the heads that share this one
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PART: tl.constexpr,
):
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query, column, key = tl.arange(0, QUERIES), tl.arange(0, HEAD_TILE), tl.arange(0, AT_ONCE)
    if tiles_ptr is None:
        sequence, first, count = tile, tile, 1
        token, member = 0, query
    else:
        sequence = tl.load(tiles_ptr + 3 * tile)
        first = tl.load(tiles_ptr + 3 * tile + 1)
        count = tl.load(tiles_ptr + 3 * tile + 2).to(tl.int32)
        token, member = query // SHARED, query % SHARED
    # What comes before keys and values is waited for once: the first pages are looked up before it
    # is known how many there are.
    position = tl.load(positions_ptr + first).to(tl.int32)
    here = part * AT_ONCE + key
    tables_ptr += sequence * table_stride
    page = tl.load(tables_ptr + here // BLOCK_SIZE, mask=here < longest, other=0)
    row, head = first + token, kv_head * SHARED + member
    is_row = query < count * SHARED
    is_there = is_row[:, None] & (column[None, :] < HEAD_DIM)
    q_at = row * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_at[:, None] + column[None, :], mask=is_there, other=0.0)
    length = position + count  # tokens that the last row sees
    num_parts = tl.minimum(tl.cdiv(length, PART), tl.num_programs(2))
    if (count == 0) | (part >= num_parts):
        return
    largest = tl.full([QUERIES], -1e30, tl.float32)  # a row may see nothing of a part
    total = tl.zeros([QUERIES], tl.float32)
    y = tl.zeros([QUERIES, HEAD_TILE], tl.float32)
    step = num_parts * AT_ONCE  # every so many'th block: parts are about as long as each other
    for start in range(part * AT_ONCE, length, step):
        here = start + key
        is_token = here < length
        cell = page * page_stride + ((here % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        k_ptr = kv_ptr + cell[:, None] + column[None, :]
        is_read = is_token[:, None] & (column[None, :] < HEAD_DIM)
        k = tl.load(k_ptr, mask=is_read, other=0.0)
        v = tl.load(k_ptr + BLOCK_SIZE * KV_HEADS * HEAD_DIM, mask=is_read, other=0.0)
        # The next ones are looked up meanwhile.
        page_ptr = tables_ptr + (here + step) // BLOCK_SIZE
        page = tl.load(page_ptr, mask=here + step < length, other=0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if tiles_ptr is None:
            is_seen = is_token[None, :]
        else:  # each row sees its own token, and those before
            is_seen = here[None, :] <= (position + token)[:, None]
        score = tl.where(is_seen, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp2(score - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(weight, axis=1)
        y = y * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        largest = new
    heads_at = row * (KV_HEADS * SHARED) + head
    out_at = heads_at[:, None] * HEAD_DIM + column[None, :]
    parts_ptr += out_at
    sums_ptr += heads_at
    num_heads = rows * (KV_HEADS * SHARED)
    if num_parts > 1:
        tl.store(sums_ptr + 2 * part * num_heads, largest, mask=is_row)
        tl.store(sums_ptr + (2 * part + 1) * num_heads, total, mask=is_row)
        tl.store(parts_ptr + part * num_heads * HEAD_DIM, y, mask=is_there)
        tl.debug_barrier()  # all threads' stores are before the one thread's count
        counter_ptr = counters_ptr + tile * KV_HEADS + kv_head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < num_parts - 1:
            return
        tl.store(counter_ptr, 0)  # for the next launch
        y, total = _added(
            *(parts_ptr, sums_ptr, num_parts, num_heads, is_row, is_there),
            *(HEAD_DIM, max(1, 64 // QUERIES)),
        )
    tl.store(out_ptr + out_at, (y / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _added(  # type: ignore[no-untyped-def]
    parts_ptr,  # [QUERIES, HEAD_TILE], of the first part; likewise
    sums_ptr,  # [QUERIES]
    num_parts,
    num_heads,
    is_row,
    is_there,
    HEAD_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,  # parts that are read
):
    """The weighted sum of all parts, and the weights'. They lie in the L2, past which other
    programs' stores don't come."""
    largest = tl.full(is_row.shape, -1e30, tl.float32)
    total = tl.where(is_row, 0.0, 1.0)  # which y is divided by
    y = tl.zeros(is_there.shape, tl.float32)
    for begin in range(0, num_parts, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            part = begin + ahead
            is_read = is_row & (part < num_parts)
            at = sums_ptr + 2 * part * num_heads
            its = tl.load(at, mask=is_read, other=-1e30, cache_modifier=".cg")
            its_total = tl.load(at + num_heads, mask=is_read, other=0.0, cache_modifier=".cg")
            at = parts_ptr + part * num_heads * HEAD_DIM
            is_read = is_there & (part < num_parts)
            its_y = tl.load(at, mask=is_read, other=0.0, cache_modifier=".cg")
            new = tl.maximum(largest, its)
            shrink, its_shrink = tl.exp2(largest - new), tl.exp2(its - new)
            total = total * shrink + its_total * its_shrink
            y = y * shrink[:, None] + its_y * its_shrink[:, None]
            largest = new
    return y, total
