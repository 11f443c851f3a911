"""Attention over paged KV: on a GPU one Triton kernel a layer, elsewhere plain torch.

All rows of a step are computed at once, those that decode and chunks of prompts, in tiles of a few
tokens of one sequence. An engine that has FlashInfer or another paged kernel calls it here, with
the same view and the same tables.

A page that KV gets was an adapter's a moment ago. Where no token was written to yet, it may be NaN
when it is read as KV, and 0 · NaN is NaN: so what lies beyond a sequence's end is read as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["TILE_TOKENS", "attend", "attend_plainly"]

TILE_TOKENS = 16  # at most: with the heads that share a key/value head, a tile of tensor cores


def attend(
    q: Tensor, view: Tensor, tables: Tensor, positions: Tensor, tiles: Tensor | None
) -> Tensor:
    """Causal attention of new tokens over their sequences' blocks.

    Args:
        q: ``[rows, heads, head_dim]``, a new token each; those of a sequence lie one behind the
            other, in its order.
        view: ``[pages, 2, block_size, kv_heads, head_dim]``; their own keys and values are in it.
        tables: ``int64 [sequences, blocks]``: the pages of each, then any.
        positions: ``int64 [rows]``, in the sequences.
        tiles: ``int64 [tiles, 3]``: a sequence, the first of its rows and how many, up to
            ``TILE_TOKENS``; 0 pads. None: one row a sequence, in their order.

    Returns:
        ``[rows, heads · head_dim]``; rows in no tile are padding, and anything.
    """
    if q.is_cuda:
        from serve_paged import attend_in_place  # triton: only where it is used

        return attend_in_place(q, view, tables, positions, tiles)
    return attend_plainly(q, view, tables, positions, tiles)


def attend_plainly(
    q: Tensor, view: Tensor, tables: Tensor, positions: Tensor, tiles: Tensor | None
) -> Tensor:
    """`attend`, to be read, and for CPUs."""
    (rows, heads, head_dim), kv_heads = q.shape, view.shape[3]
    if tiles is None:
        each = torch.arange(rows, device=q.device)
        tiles = torch.stack((each, each, torch.ones_like(each)), dim=1)
    sequences, first, count = tiles.unbind(1)
    token = torch.arange(int(count.max()), device=q.device)
    is_row = token < count[:, None]  # [tiles, tokens]
    row = torch.where(is_row, first[:, None] + token, first[:, None])
    blocks = view[tables[sequences]]  # [tiles, blocks, 2, block_size, kv_heads, head_dim]
    k, v = blocks.permute(2, 0, 4, 1, 3, 5).reshape(2, len(tiles), kv_heads, -1, head_dim)
    at = torch.arange(k.shape[2], device=q.device)
    beyond = (at >= (positions[first] + count)[:, None])[:, None, :, None]
    is_seen = at <= positions[row][:, :, None]  # [tiles, tokens, keys]
    # The heads that share a key/value head stand side by side, as more queries of it.
    shared = heads // kv_heads
    queries = q[row].view(*row.shape, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    y = scaled_dot_product_attention(
        queries.reshape(len(tiles), kv_heads, -1, head_dim),
        k.masked_fill(beyond, 0),
        v.masked_fill(beyond, 0),
        attn_mask=is_seen[:, None].repeat(1, 1, shared, 1),
    )
    y = y.view(len(tiles), kv_heads, shared, -1, head_dim).permute(0, 3, 1, 2, 4)
    out = q.new_zeros(rows, heads * head_dim)
    out[row[is_row]] = y.reshape(*row.shape, -1)[is_row]
    return out
