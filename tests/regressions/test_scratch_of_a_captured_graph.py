"""A captured graph writes to the scratch that it was captured with, for as long as it is replayed.

A larger batch that came later made larger scratch and freed the old, whose memory went to others.
"""

from __future__ import annotations

import weakref

import torch

from adaptercache.kernels import LoraStack


def test_scratch_that_was_outgrown_lives_on() -> None:
    a, b = torch.randn(1, 4, 32), torch.randn(1, 16, 4)
    stack = LoraStack.from_dense({(0, "q_proj"): (a, b, [1.0])})
    captured = [weakref.ref(each) for each in stack.scratch(100, 4)]
    assert [each.numel() for each in stack.scratch(50, 2)] == [100, 4]
    for numel, counters in ((101, 4), (1000, 4), (10, 64)):
        sums, zeros = stack.scratch(numel, counters)
        assert sums.numel() >= numel
        assert zeros.numel() >= counters
        assert not zeros.any()
    assert all(each() is not None for each in captured)


def test_outgrown_scratch_is_no_more_than_the_largest() -> None:
    a, b = torch.randn(1, 4, 32), torch.randn(1, 16, 4)
    stack = LoraStack.from_dense({(0, "q_proj"): (a, b, [1.0])})
    seen = {}
    for numel in range(1, 3000, 7):
        for each in stack.scratch(numel, 1):
            seen[each.data_ptr()] = each.numel()
    assert sum(seen.values()) <= 3 * 3000
