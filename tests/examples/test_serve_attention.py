"""Attention over paged KV, against softmax written out, with NaN wherever no token is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from adaptercache.testing import any_device
from serve_attention import attend
from serve_decode import attend_in_place

DEVICE = any_device()


def expected(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """Of one token: ``q [heads, d]``, ``k`` and ``v [tokens, kv_heads, d]``, in float64."""
    shared = len(q) // k.shape[1]
    k, v = (x[: position + 1].double().repeat_interleave(shared, dim=1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) / q.shape[1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(dim=1), v).flatten()


@pytest.mark.parametrize(("kv_heads", "shared"), [(2, 2), (1, 7), (4, 1)])
@pytest.mark.parametrize("head_dim", [16, 48, 128])
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_is_exact_and_reads_nothing_beyond(
    kv_heads: int, shared: int, head_dim: int, queries: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim + shared)
    block, ends = 16, [queries - 1, 15, 16, 100]
    width = 8
    view = torch.full((40, 2, block, kv_heads, head_dim), float("nan"))
    order = torch.randperm(40, generator=generator)[: 4 * width].view(4, width)
    kv = torch.randn(4, 2, width * block, kv_heads, head_dim, generator=generator)
    for row, end in enumerate(ends):
        for position in range(end + 1):
            page = order[row, position // block]
            view[page, :, position % block] = kv[row, :, position]
    positions = torch.tensor([[end + 1 - queries + n for n in range(queries)] for end in ends])
    q = torch.randn(4 * queries, kv_heads * shared, head_dim, generator=generator)
    want = torch.stack(
        [
            expected(q[row * queries + n], *kv[row], int(positions[row, n]))
            for row in range(4)
            for n in range(queries)
        ]
    )
    # A view of a step's numbers: its rows may be apart.
    apart = torch.full((4, 3 * queries), -1)
    apart[:, queries : 2 * queries] = positions
    positions = apart.to(DEVICE)[:, queries : 2 * queries]
    inputs = [*(x.to(DEVICE) for x in (q, view, order)), positions]
    ways = [attend, attend_in_place] if queries == 1 else [attend]
    for way in ways:
        got = way(*inputs).cpu()
        assert (got - want).abs().max() < 1e-5, way.__name__
