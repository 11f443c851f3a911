"""The kernels between a layer's products, against the model's own forms in torch on a CPU."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import serve_fused
import serve_paged
from adaptercache.testing import any_device
from serve_fused import add_and_norm, rotate_and_store, silu_and_multiply
from serve_model import _added_and_normed, _gated, _rotate_and_store
from serve_rows import Rows

DEVICE = any_device()
NAN = float("nan")
# The interpreter cuts bfloat16 off where it should round; the kernels don't care which it is.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def rows_apart(random: torch.Generator, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """``[rows, width]`` with NaN between the rows."""
    x = torch.full((rows, width + 5), NAN, dtype=dtype)
    x[:, :width] = torch.randn(rows, width, generator=random)
    return x[:, :width]


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, but for what float32's own rounding turns: now and then one of the last bits;
    in float32, of the terms (a GPU rounds a product and a sum once), which may cancel."""
    step = torch.finfo(want.dtype).eps
    off = (got.cpu().double() - want.double()).abs()
    if want.dtype is torch.float32:
        return bool((off <= 8 * step * want.double().abs() + 2e-6).all())
    is_off = off > 0
    return bool((off <= 2 * step * want.double().abs()).all() and is_off.double().mean() < 0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 64, 100, 4096])
def test_adding_and_norming(random: torch.Generator, width: int, dtype: torch.dtype) -> None:
    x, delta = (rows_apart(random, 5, width, dtype) for _ in range(2))
    x[3], delta[3] = 0, 0  # as a padding row may be
    weight = torch.randn(width, generator=random).to(dtype)
    norm = SimpleNamespace(weight=weight, variance_epsilon=1e-5)
    for its in (delta, delta.contiguous(), None):
        want = _added_and_normed(x, its, norm)
        on_device = None if its is None else its.to(DEVICE)
        before = x.clone()
        got = add_and_norm(x.to(DEVICE), on_device, weight.to(DEVICE), 1e-5)
        assert torch.equal(got[0].cpu(), want[0])
        assert same(got[1], want[1])
        assert torch.equal(x, before)  # nobody's but ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "shared"), [(2, 2), (1, 7), (3, 1)])
@pytest.mark.parametrize("head_dim", [2, 16, 48, 128])
def test_rotating_and_storing(
    random: torch.Generator, kv_heads: int, shared: int, head_dim: int, dtype: torch.dtype
) -> None:
    rows, pages, block = 9, 12, 4
    heads = (shared + 2) * kv_heads
    qkv = rows_apart(random, rows, heads * head_dim, dtype)
    rotary = torch.randn(rows, 2, head_dim, generator=random).to(dtype)
    # In no order, at any offset; the last three pad: all at the first token of a page of their own.
    where = torch.randperm((pages - 1) * block, generator=random)[: rows - 3]
    page = torch.cat((where // block, torch.full((3,), pages - 1)))
    offset = torch.cat((where % block, torch.zeros(3, dtype=torch.int64)))
    # As a layer's part of the arena: pages apart, and never written to.
    arena = torch.full((pages, 2, 2, block, kv_heads, head_dim), NAN, dtype=dtype)
    ours = arena.clone().to(DEVICE)
    want = _rotate_and_store(qkv, rotary, arena[:, 1], page, offset)
    numbers = torch.cat((page[:1], page, offset)).to(DEVICE)[1:].split(rows)  # 8 bytes off
    got = rotate_and_store(qkv.to(DEVICE), rotary.to(DEVICE), ours[:, 1], *numbers)
    assert got.shape == (rows, shared * kv_heads, head_dim)
    assert same(got, want)
    of_padding = (slice(pages - 1, None), slice(1, None), slice(None), 0)
    for each in (arena, ours):  # which of the three rows is there is nobody's business
        assert not each[of_padding].isnan().any()
        each[of_padding] = 0
    assert torch.equal(ours.isnan().cpu(), arena.isnan())
    assert same(ours.nan_to_num(), arena.nan_to_num())
    values = (page[: rows - 3], 1, 1, offset[: rows - 3])
    assert torch.equal(ours.cpu()[values], arena[values])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 128, 1025, 2500])
def test_silu_and_multiplying(random: torch.Generator, width: int, dtype: torch.dtype) -> None:
    gate_up = rows_apart(random, 4, 2 * width, dtype)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 80, -80, 0
    got = silu_and_multiply(gate_up.to(DEVICE))
    assert same(got, _gated(gate_up, torch.nn.functional.silu))


Part = tuple[int, range]
"""Whose tokens, and their positions."""


def step(tables: Tensor, spare: int, block: int, *parts: Part, padding: int = 0) -> Rows:
    """One model step of these parts, and rows beyond them that pad; the tokens are made up of
    their places. A part is a tile."""
    places = [(owner, position) for owner, its in parts for position in its]
    owners, positions = torch.tensor(places).unbind(1)
    counts = [len(its) for _, its in parts]
    firsts = itertools.accumulate(counts, initial=0)
    tiles = [[n, first, its] for n, (first, its) in enumerate(zip(firsts, counts, strict=False))]
    none = torch.zeros(padding, dtype=torch.int64)
    return Rows(
        tokens=torch.cat(((7 * positions + 50 * owners) % 256, none)),
        positions=torch.cat((positions, none)),
        pages=torch.cat((tables[owners, positions // block], none + spare)),
        offsets=torch.cat((positions % block, none)),
        last=torch.arange(0, len(places), 2),
        tables=tables[[owner for owner, _ in parts]],
        tiles=torch.tensor(tiles + [[0, 0, 0]] * padding) if len(places) > len(parts) else None,
    )


@pytest.mark.skipif(DEVICE == "cuda", reason="there the engine's own tests run the kernels")
@torch.inference_mode()
def test_the_model_is_one_by_torch_or_by_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from serving import World

    with World(tmp_path / "adapters", 1).engine(pages=600) as engine:
        model, cache = engine._runner._model, engine.cache
        views = [cache.kv_view(layer) for layer in range(2)]
        *pages, spare = cache.pages.allocate(7)
        tables = torch.tensor(pages)[torch.tensor([[3, 0], [5, 2], [1, 4]])]
        steps = [
            step(tables, spare, views[0].shape[2], *parts, padding=padding)
            for padding, parts in (
                (0, [(1, range(16)), (1, range(16, 20))]),  # a prompt
                (
                    3,
                    [(0, range(1)), (1, range(20, 21)), (2, range(5))],
                ),  # two decode beside another
                (0, [(owner, range(at, at + 1)) for owner, at in ((0, 1), (1, 21), (2, 5))]),
            )
        ]
        want = [model(rows, None) for rows in steps]
        kv = [view[pages] for view in views]
        for view in views:
            view[pages] = NAN
        calls = Counter[str]()

        def counted(name: str, kernel: Any) -> Any:
            def call(*inputs: Any) -> Any:
                calls[name] += 1
                return kernel(*inputs)

            return call

        with monkeypatch.context() as patch:
            for module in (serve_fused, serve_paged):
                for name in module.__all__:
                    patch.setattr(module, name, counted(name, vars(module)[name]))
            patch.setattr(torch.Tensor, "is_cuda", True)  # as the model asks before each kernel
            got = [model(rows, None) for rows in steps]
        its = [view[pages] for view in views]
        cache.pages.free([*pages, spare])
    of_steps = {"add_and_norm": 5, "rotate_and_store": 2, "silu_and_multiply": 2}
    of_steps["attend_in_place"] = 2
    assert calls == {name: 3 * count for name, count in of_steps.items()}
    for ours, theirs in zip([*got, *its], [*want, *kv], strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert (ours - theirs).nan_to_num().abs().max() < 1e-5 * theirs.nan_to_num().abs().max()
