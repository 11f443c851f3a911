"""Attention of one new token a sequence, with the KV read where it lies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["attend_in_place"]

LOG2_E = 1.4426950408889634
TILE = 64  # tokens that a program reads at once
MANY = 128  # programs: about as many as a large GPU has multiprocessors


def attend_in_place(q: Tensor, view: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """`attend` for Q = 1, by one program a sequence and key/value head. A row's heads lie side by
    side; rows may be apart."""
    rows, heads, head_dim = q.shape
    _, _, block_size, kv_heads, _ = view.shape
    assert q.stride()[1:] == (head_dim, 1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    shared = heads // kv_heads
    # Many programs hide each other's waits, and run all at once where each has few registers; a
    # few look further ahead.
    num_stages = 2 if rows * kv_heads > MANY else 3
    _attend_kernel[(rows, kv_heads)](
        *(q, view, tables, positions, out),
        *(q.stride(0), tables.stride(0), positions.stride(0), view.stride(0)),
        head_dim**-0.5 * LOG2_E,
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        SHARED=shared,
        SHARED_TILE=max(16, triton.next_power_of_2(shared)),
        HEAD_DIM=head_dim,
        HEAD_TILE=max(16, triton.next_power_of_2(head_dim)),
        TILE=TILE,
        num_stages=num_stages,
    )
    return out.view(rows, heads * head_dim)


# Where a step's numbers happen to lie, and how far apart, is no reason to compile again.
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=("position_stride",),
    do_not_specialize_on_alignment=("tables_ptr", "positions_ptr"),
)
def _attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    kv_ptr,
    tables_ptr,
    positions_ptr,
    out_ptr,
    q_stride,
    table_stride,
    position_stride,
    page_stride,
    scale,  # of the scores, in powers of two
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    row, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(positions_ptr + row * position_stride) + 1
    head, column, token = tl.arange(0, SHARED_TILE), tl.arange(0, HEAD_TILE), tl.arange(0, TILE)
    at = (kv_head * SHARED + head)[:, None] * HEAD_DIM + column[None, :]
    is_head = (head[:, None] < SHARED) & (column[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + row * q_stride + at, mask=is_head, other=0.0)
    largest = tl.full([SHARED_TILE], float("-inf"), tl.float32)
    total = tl.zeros([SHARED_TILE], tl.float32)
    y = tl.zeros([SHARED_TILE, HEAD_TILE], tl.float32)
    for start in range(0, length, TILE):
        here = start + token
        seen = here < length
        page = tl.load(tables_ptr + row * table_stride + here // BLOCK_SIZE, mask=seen, other=0)
        cell = page * page_stride + ((here % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        k_ptr = kv_ptr + cell[:, None] + column[None, :]
        is_there = seen[:, None] & (column[None, :] < HEAD_DIM)
        k = tl.load(k_ptr, mask=is_there, other=0.0)
        v = tl.load(k_ptr + BLOCK_SIZE * KV_HEADS * HEAD_DIM, mask=is_there, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp2(score - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(weight, axis=1)
        y = y * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        largest = new
    out_ptr += row * KV_HEADS * SHARED * HEAD_DIM
    tl.store(out_ptr + at, (y / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_head)
