"""Attention over paged KV: where a GPU decodes, a Triton kernel; else plain torch.

Decoding reads all KV of all sequences in each step, so it reads it in place. Chunks of prompts are
rarer and have more arithmetic a byte: there the blocks are gathered first. An engine that has
FlashInfer or another paged kernel calls it here, with the same view and the same tables.

A page that KV gets was an adapter's a moment ago. Where no token was written to yet, it may be NaN
when it is read as KV, and 0 · NaN is NaN: so what lies beyond a sequence's end is read as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend"]


def attend(q: Tensor, view: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """Causal attention of new tokens over their sequences' blocks.

    Args:
        q: ``[B·Q, heads, head_dim]``: Q new tokens of each of B sequences.
        view: ``[pages, 2, block_size, kv_heads, head_dim]``; their own keys and values are in it.
        tables: ``int64 [B, blocks]``: the pages of each sequence, then any.
        positions: ``int64 [B, Q]``, rising.

    Returns:
        ``[B·Q, heads · head_dim]``
    """
    if q.is_cuda and positions.shape[1] == 1:
        from serve_decode import attend_in_place  # triton: only where it is used

        return attend_in_place(q, view, tables, positions)
    (batch, queries), (_, heads, head_dim) = positions.shape, q.shape
    kv_heads, shared = view.shape[3], heads // view.shape[3]
    blocks = view[tables]  # [B, blocks, 2, block_size, kv_heads, head_dim]
    k, v = blocks.permute(2, 0, 4, 1, 3, 5).reshape(2, batch, kv_heads, -1, head_dim)
    at = torch.arange(k.shape[2], device=q.device)
    beyond = (at > positions[:, -1:])[:, None, :, None]
    # The heads that share a key/value head stand side by side, as more queries of it.
    q = q.view(batch, queries, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    y = scaled_dot_product_attention(
        q.reshape(batch, kv_heads, shared * queries, head_dim),
        k.masked_fill(beyond, 0),
        v.masked_fill(beyond, 0),
        attn_mask=(at <= positions[:, :, None])[:, None].repeat(1, 1, shared, 1),
    )
    y = y.view(batch, kv_heads, shared, queries, head_dim).permute(0, 3, 1, 2, 4)
    return y.reshape(batch * queries, heads * head_dim)
