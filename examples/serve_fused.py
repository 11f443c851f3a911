"""What lies between a layer's products, in one kernel each: a launch takes longer than its work.

The forms in torch are in serve_model.py, each in the function that calls it from here, and say what
it computes. Inside, all is float32; it is rounded to the tensors' dtype where torch rounds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_and_norm", "rotate_and_store", "silu_and_multiply"]

COLUMNS = 1024  # that a program multiplies
TURNED = 16  # heads that a program rotates: one alone would take as long to start as to run


def add_and_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """``x + delta`` (None: ``x`` itself), and its RMS norm. By one program a row."""
    rows, width = x.shape
    assert x.stride(1) == 1
    assert delta is None or delta.stride(1) == 1
    normed = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(normed)
    tile = triton.next_power_of_2(width)
    _add_and_norm_kernel[(rows,)](
        *(x, delta, weight, total, normed, x.stride(0)),
        *(0 if delta is None else delta.stride(0), epsilon),
        WIDTH=width,
        TILE=tile,
        num_warps=_warps(tile, 16),
    )
    return total, normed


def rotate_and_store(
    qkv: Tensor, rotary: Tensor, view: Tensor, pages: Tensor, offsets: Tensor
) -> Tensor:
    """The queries, rotated, ``[rows, heads, head_dim]``; keys and values go into the view. By one
    program a row and up to `TURNED` heads."""
    rows, width = qkv.shape
    _, _, block_size, kv_heads, head_dim = view.shape
    assert qkv.stride(1) == 1
    assert rotary.is_contiguous()
    assert pages.stride(0) == offsets.stride(0) == 1
    assert view.stride()[1:] == (block_size * kv_heads * head_dim, kv_heads * head_dim, head_dim, 1)
    heads = width // head_dim - 2 * kv_heads
    q = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    half_tile = triton.next_power_of_2(head_dim // 2)
    _rotate_and_store_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, TURNED))](
        *(qkv, rotary, view, pages, offsets, q, qkv.stride(0), view.stride(0)),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HALF_TILE=half_tile,
        BLOCK_SIZE=block_size,
        AT_ONCE=TURNED,
        num_warps=_warps(TURNED * half_tile, 8),
    )
    return q


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that have gate and up side by side."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    y = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    tile = min(COLUMNS, triton.next_power_of_2(width))
    _silu_and_multiply_kernel[(rows, triton.cdiv(width, tile))](
        *(gate_up, y, gate_up.stride(0)),
        WIDTH=width,
        TILE=tile,
        num_warps=_warps(tile, 8),
    )
    return y


def _warps(columns: int, of_a_thread: int) -> int:
    return min(16, max(1, columns // (32 * of_a_thread)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_and_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, WIDTH], rows strided
    delta_ptr,  # likewise, or None
    weight_ptr,  # [WIDTH]
    total_ptr,  # [rows, WIDTH]
    normed_ptr,  # [rows, WIDTH]
    x_stride,
    delta_stride,
    epsilon,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    is_there = column < WIDTH
    # All reads come before the sum, which waits for them.
    weight = tl.load(weight_ptr + column, mask=is_there, other=0.0).to(tl.float32)
    total = tl.load(x_ptr + row * x_stride + column, mask=is_there, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_stride + column, mask=is_there, other=0.0)
        total = (total.to(tl.float32) + delta.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + column, total, mask=is_there)
    x = total.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + epsilon) * weight
    tl.store(normed_ptr + row * WIDTH + column, y.to(normed_ptr.dtype.element_ty), mask=is_there)


# Where a step's numbers happen to lie is no reason to compile again.
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize_on_alignment=("pages_ptr", "offsets_ptr")
)
def _rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,  # [rows, HEADS + 2 · KV_HEADS, 2 · HALF], rows strided
    rotary_ptr,  # [rows, 2, 2 · HALF]: the cosines, then the signed sines
    kv_ptr,  # [pages, 2, BLOCK_SIZE, KV_HEADS, 2 · HALF], pages strided
    pages_ptr,  # int64 [rows]
    offsets_ptr,  # int64 [rows]
    q_ptr,  # [rows, HEADS, 2 · HALF]
    row_stride,
    page_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, HALF_TILE)[None, :]
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    is_there = column < HALF
    is_read = is_there & (head < HEADS + 2 * KV_HEADS)
    # A program waits for memory once: also those of values read what only the others need.
    page, offset = tl.load(pages_ptr + row), tl.load(offsets_ptr + row)
    x_ptr = qkv_ptr + row * row_stride + head * (2 * HALF) + column
    first, second = tl.load(x_ptr, mask=is_read), tl.load(x_ptr + HALF, mask=is_read)
    cos_ptr = rotary_ptr + row * (4 * HALF) + column
    sin_ptr = cos_ptr + 2 * HALF
    is_turned = head < HEADS + KV_HEADS
    first_out = tl.where(is_turned, _rotated(first, second, cos_ptr, sin_ptr, is_there), first)
    cos_ptr += HALF
    sin_ptr += HALF
    second_out = tl.where(is_turned, _rotated(second, first, cos_ptr, sin_ptr, is_there), second)
    out_ptr = q_ptr + (row * HEADS + head) * (2 * HALF) + column
    is_query = is_there & (head < HEADS)
    tl.store(out_ptr, first_out, mask=is_query)
    tl.store(out_ptr + HALF, second_out, mask=is_query)
    part, kv_head = (head - HEADS) // KV_HEADS, (head - HEADS) % KV_HEADS
    cell = (part * BLOCK_SIZE + offset) * KV_HEADS + kv_head
    out_ptr = kv_ptr + page * page_stride + cell * (2 * HALF) + column
    is_kept = is_read & (head >= HEADS)
    tl.store(out_ptr, first_out, mask=is_kept)
    tl.store(out_ptr + HALF, second_out, mask=is_kept)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotated(x, other, cos_ptr, sin_ptr, is_there):  # type: ignore[no-untyped-def]
    """Halves of heads: ``x · cos + other · sin``."""
    cos = tl.load(cos_ptr, mask=is_there).to(tl.float32)
    sin = tl.load(sin_ptr, mask=is_there).to(tl.float32)
    scaled = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    return (scaled + other.to(tl.float32) * sin).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _silu_and_multiply_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,  # [rows, 2 · WIDTH], rows strided
    out_ptr,  # [rows, WIDTH]
    row_stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = column < WIDTH
    gate_up_ptr += row * row_stride + column
    gate = tl.load(gate_up_ptr, mask=is_there).to(tl.float32)
    up = tl.load(gate_up_ptr + WIDTH, mask=is_there).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    y = (activated * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, y, mask=is_there)
