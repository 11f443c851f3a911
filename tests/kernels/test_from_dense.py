"""A stack made of dense tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptercache.kernels import LoraBatch, LoraStack, add_lora
from adaptercache.testing import any_device

WIDTHS = {(0, "q_proj"): (48, 33), (0, "k_proj"): (48, 16), (3, "down_proj"): (70, 48)}


def dense_of(slots: int, rank: int, **options: Any) -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(slots)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, **options).to(any_device())

    return {
        key: (random(slots, rank, k), random(slots, n, rank), [0.5 + slot for slot in range(slots)])
        for key, (k, n) in WIDTHS.items()
    }


@pytest.mark.parametrize("ranks", [None, [5, 0, 1]], ids=str)
def test_what_went_in_comes_out_and_is_applied(ranks: list[int] | None) -> None:
    dense = dense_of(3, 5)
    stack = LoraStack.from_dense(dense, ranks)
    for (layer, module), (a, b, scalings) in dense.items():
        x = torch.randn(4, a.shape[2], device=stack.device)
        y = torch.zeros(4, b.shape[1], device=stack.device)
        batch = LoraBatch(stack, [(2, 1), (-1, 1), (0, 1), (1, 1)])
        add_lora(y, x, batch, [module], layer)
        for row, slot in ((0, 2), (2, 0), (3, 1)):
            r = 5 if ranks is None else ranks[slot]
            found = stack.dense(slot, layer, module)
            if r == 0:
                assert found is None
                assert not y[row].any()
                continue
            assert found is not None
            assert found[2] == scalings[slot]
            assert found[0].equal(a[slot, :r])
            assert found[1].equal(b[slot, :, :r])
            want = scalings[slot] * (b[slot, :, :r] @ (a[slot, :r] @ x[row]))
            torch.testing.assert_close(y[row], want, rtol=1e-4, atol=1e-4)
        assert not y[1].any()


def test_a_rank_larger_than_a_modules_own_is_that_modules() -> None:
    dense = dense_of(2, 4)
    a, b, scalings = dense[3, "down_proj"]
    dense[3, "down_proj"] = (a[:, :2], b[:, :, :2], scalings)
    stack = LoraStack.from_dense(dense, [4, 3])
    found = [stack.dense(1, layer, module) for layer, module in WIDTHS]
    assert [each[0].shape[0] for each in found if each is not None] == [3, 3, 2]


def broken(name: str) -> tuple[dict[Any, Any], list[int] | None]:
    dense = dense_of(3, 5)
    key = (0, "k_proj")
    a, b, scalings = dense[key]
    changed: dict[str, Any] = {
        "slots": (a[:2], b[:2], scalings[:2]),
        "rank": (a[:, :4], b, scalings),
        "scalings": (a, b, [1.0]),
        "dims": (a[0], b, scalings),
        "dtype": (a.double(), b.double(), scalings),
        "device": (a.to("meta"), b.to("meta"), scalings),
    }
    if name == "empty":
        return {}, None
    if name == "dots":
        return {(0, "self_attn.q_proj"): (a, b, scalings)}, None
    if name == "key":
        return {("k_proj", 0): (a, b, scalings)}, None
    if name.endswith(("ranks", "rank")) and name != "rank":
        return dense, {"too few ranks": [1], "negative rank": [1, -1, 2], "large rank": [1, 6, 2]}[
            name
        ]
    return dense | {key: changed[name]}, None


@pytest.mark.parametrize(
    "name",
    [
        *("empty", "dots", "key", "slots", "rank", "scalings", "dims", "dtype", "device"),
        *("too few ranks", "negative rank", "large rank"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str) -> None:
    dense, ranks = broken(name)
    with pytest.raises(ValueError, match=r"tensors|a key is|slots|A is|ranks|of rank"):
        LoraStack.from_dense(dense, ranks)


def test_a_batch_is_of_the_rank_class_that_its_adapters_need() -> None:
    stack = LoraStack.from_dense(dense_of(3, 40), [40, 7, 17])
    assert LoraBatch(stack, [(1, 2), (-1, 1)]).rank_class == 16
    assert LoraBatch(stack, [(1, 2), (2, 1)]).rank_class == 64
    assert LoraBatch(stack, [(1, 2)], rank_class=128).rank_class == 128
    assert LoraBatch(stack, []).rank_class == 64, "a graph captured with it may run any of them"
    for wrong in (16, 32, 0, -5, "64"):  # over it, a kernel would leave rows of A out
        with pytest.raises(ValueError, match="rank_class"):
            LoraBatch(stack, [(0, 1)], rank_class=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank_class"):
        LoraBatch(stack, [(1, 1)], rank_class=16, ranks={1: 17})
