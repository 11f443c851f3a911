"""Attention of a step's new tokens, with the KV read where it lies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_attention import TILE_TOKENS

__all__ = ["attend_in_place"]

LOG2_E = 1.4426950408889634
AT_ONCE = 64  # keys that a program reads at most
MANY = 128  # programs: about as many as a large GPU has multiprocessors


def attend_in_place(
    q: Tensor, view: Tensor, tables: Tensor, positions: Tensor, tiles: Tensor | None
) -> Tensor:
    """`attend`, by one program a tile and key/value head. A row's heads lie side by side; rows may
    be apart. Rows that are in no tile are not written."""
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
    # Many programs hide each other's waits, and run all at once where each has few registers; a
    # few look further ahead.
    num_stages = 2 if num_tiles * kv_heads > MANY else 3
    # As many scores as its registers hold; tensor cores take no float32, which needs more.
    is_wide = q.dtype is torch.float32
    at_once = max(16, min(AT_ONCE, (1024 if is_wide else 8192) // queries))
    _attend_kernel[(num_tiles, kv_heads)](
        *(q, view, tables, positions, tiles, out),
        *(q.stride(0), tables.stride(0), view.stride(0)),
        head_dim**-0.5 * LOG2_E,
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        SHARED=shared,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        HEAD_TILE=max(16, triton.next_power_of_2(head_dim)),
        AT_ONCE=at_once,
        num_stages=num_stages,
        num_warps=4 if queries <= (16 if is_wide else 64) else 8,
    )
    return out.view(rows, heads * head_dim)


# Where a step's numbers happen to lie, and how far apart, is no reason to compile again.
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=("table_stride",),
    do_not_specialize_on_alignment=("tables_ptr", "positions_ptr", "tiles_ptr"),
)
def _attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, KV_HEADS · SHARED, HEAD_DIM], rows strided
    kv_ptr,  # [pages, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM], pages strided
    tables_ptr,  # int64 [sequences, blocks], sequences strided
    positions_ptr,  # int64 [rows]
    tiles_ptr,  # int64 [tiles, 3], or None: row n is the only one of sequence n
    out_ptr,  # [rows, KV_HEADS · SHARED · HEAD_DIM]
    q_stride,
    table_stride,
    page_stride,
    scale,  # of the scores, in powers of two
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,  # room for a tile's rows, with the heads that share this one
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    query, column, key = tl.arange(0, QUERIES), tl.arange(0, HEAD_TILE), tl.arange(0, AT_ONCE)
    if tiles_ptr is None:
        sequence, first, count = tile, tile, 1
        token, member = 0, query
    else:
        sequence = tl.load(tiles_ptr + 3 * tile)
        first = tl.load(tiles_ptr + 3 * tile + 1)
        count = tl.load(tiles_ptr + 3 * tile + 2)
        if count == 0:
            return
        token, member = query // SHARED, query % SHARED
    position = tl.load(positions_ptr + first)
    length = position + count  # tokens that the last row sees
    row, head = first + token, kv_head * SHARED + member
    is_there = (query[:, None] < count * SHARED) & (column[None, :] < HEAD_DIM)
    q_at = row * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_at[:, None] + column[None, :], mask=is_there, other=0.0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    y = tl.zeros([QUERIES, HEAD_TILE], tl.float32)
    for start in range(0, length, AT_ONCE):
        here = start + key
        is_token = here < length
        page_ptr = tables_ptr + sequence * table_stride + here // BLOCK_SIZE
        page = tl.load(page_ptr, mask=is_token, other=0)
        cell = page * page_stride + ((here % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        k_ptr = kv_ptr + cell[:, None] + column[None, :]
        is_read = is_token[:, None] & (column[None, :] < HEAD_DIM)
        k = tl.load(k_ptr, mask=is_read, other=0.0)
        v = tl.load(k_ptr + BLOCK_SIZE * KV_HEADS * HEAD_DIM, mask=is_read, other=0.0)
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
    out_at = (row * (KV_HEADS * SHARED) + head) * HEAD_DIM
    out_ptr += out_at[:, None] + column[None, :]
    tl.store(out_ptr, (y / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_there)
