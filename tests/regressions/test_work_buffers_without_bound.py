"""A buffer for each number of rows that ever came: an eager engine makes a new one every step."""

from __future__ import annotations

import weakref

import torch

from adaptercache.kernels import LoraBatch, LoraStack


def stack() -> LoraStack:
    a, b = torch.randn(2, 4, 32), torch.randn(2, 16, 4)
    return LoraStack.from_dense({(0, "q_proj"): (a, b, [1.0, 2.0])})


def test_buffers_of_numbers_of_rows_that_came_once_are_let_go() -> None:
    of = stack()
    made = [weakref.ref(LoraBatch(of, [(0, rows)]).work()) for rows in range(1, 400)]
    assert sum(each() is not None for each in made) <= 64


def test_what_a_graph_was_captured_with_stays() -> None:
    of = stack()
    batch = LoraBatch(of, [(0, 7)])
    captured = weakref.ref(batch.work())
    of.keep_work(batch.shape)  # what a capture does
    for rows in range(8, 400):
        LoraBatch(of, [(1, rows)]).work()
    assert captured() is not None
    assert LoraBatch(of, [(1, 7)]).work() is captured()


def test_a_batch_whose_buffer_was_let_go_writes_its_work_again() -> None:
    of = stack()
    batch = LoraBatch(of, [(1, 3)])
    before = batch.work().clone()
    for rows in range(4, 200):
        LoraBatch(of, [(0, rows)]).work()
    assert batch.work().equal(before)
