"""`add_lora` on the CPU against plain products in float64, over layouts that nobody would choose.

The test lays the vectors into the arena by itself, by DESIGN's words: nothing of the package's
packing is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptercache import LoraLayout
from adaptercache.kernels import LoraBatch, LoraStack, add_lora
from adaptercache.kernels.segments import rank_class_of
from adaptercache.layout import ArenaShape
from adaptercache.packing import VectorSpec

QKV = ("q_proj", "k_proj", "v_proj")
GROUPS = (QKV, ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # of the largest value


def layout_of(hidden: int, intermediate: int, head_dim: int, dtype: str) -> LoraLayout:
    return LoraLayout.from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": head_dim,
            "vocab_size": 64,
        },
        max_rank=64,
        dtype=dtype,
    )


@dataclass
class World:
    """A stack, and what was laid into it: for each slot and site (A, B, scaling)."""

    layout: LoraLayout
    stack: LoraStack
    adapters: list[dict[tuple[int, str], tuple[Tensor, Tensor, float]]]

    def want(self, x: Tensor, slots: list[int], module: str, layer: int) -> Tensor:
        """The LoRA term of each row, in float64."""
        site = self.layout.sites[self.stack.site(layer, module)]
        want = torch.zeros(len(x), site.out_features, dtype=torch.float64)
        for row, slot in enumerate(slots):
            found = self.adapters[slot].get((layer, module)) if slot >= 0 else None
            if found is not None:
                a, b, scaling = found
                want[row] = scaling * (b.double() @ (a.double() @ x[row].double()))
        return want


def make_world(
    layout: LoraLayout, ranks: list[list[int]], rows: int, cell: int, generator: torch.Generator
) -> World:
    """One adapter a slot, each with its own rank at each site, in pages in no order."""
    dtype = getattr(torch, layout.dtype)
    needed = [flat_length(layout, each) for each in ranks]
    num_pages = sum(-(-length // (rows * cell)) for length in needed) + 3
    shape = ArenaShape(rows, num_pages, cell * layout.itemsize, layout.itemsize)
    stack = LoraStack(layout, shape, len(ranks) + 1)
    stack.arena.fill_(float("nan"))
    free = torch.randperm(num_pages, generator=generator).tolist()
    adapters = []
    for slot, each in enumerate(ranks):
        vector = torch.full((needed[slot],), float("nan"), dtype=dtype)
        adapter, at, scalings = {}, 0, []
        for site, rank in zip(layout.sites, each, strict=True):
            scalings.append(float(torch.rand((), generator=generator)) + 0.5 if rank else 0.0)
            if not rank:
                continue
            a = torch.randn(rank, site.in_features, generator=generator).to(dtype)
            b = torch.randn(site.out_features, rank, generator=generator).to(dtype)
            for matrix in (a, b.t()):
                vector[at : at + matrix.numel()] = matrix.reshape(-1)
                at += -(-matrix.numel() // 512) * 512
            adapter[site.layer, site.module] = (a, b, scalings[-1])
        pages = [free.pop() for _ in range(-(-len(vector) // (rows * cell)))]
        for j in range(-(-len(vector) // cell)):
            piece = vector[j * cell : (j + 1) * cell]
            stack.arena[j % rows, pages[j // rows], : len(piece)] = piece
        stack.table[slot] = stack.row(VectorSpec.of(layout, each, scalings), pages)
        adapters.append(adapter)
    return World(layout, stack, adapters)


def flat_length(layout: LoraLayout, ranks: list[int]) -> int:
    return sum(
        -(-rank * width // 512) * 512
        for site, rank in zip(layout.sites, ranks, strict=True)
        for width in (site.in_features, site.out_features)
    )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(24, 40, 8), (33, 17, 11), (64, 96, 16), (7, 5, 3)]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([512, 1024, 4096]),
    st.lists(st.sampled_from([0, 1, 3, 8, 16, 37, 64]), min_size=7, max_size=21),
    st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 5)), max_size=6),
    st.integers(0, 3),
    st.integers(0, 1 << 30),
)
def test_the_lora_term_is_that_of_each_rows_own_adapter(
    widths: tuple[int, int, int],
    dtype: str,
    rows: int,
    cell: int,
    some_ranks: list[int],
    segments: list[tuple[int, int]],
    padding: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = layout_of(*widths, dtype)
    ranks = [
        [some_ranks[(slot * 5 + site) % len(some_ranks)] for site in range(len(layout.sites))]
        for slot in range(3)
    ]
    world = make_world(layout, ranks, rows, cell, generator)
    slots = [slot for slot, tokens in segments for _ in range(tokens)]
    batch = LoraBatch(
        world.stack, segments, pad_to=len(slots) + padding, rank_class=rank_class_of(64)
    )
    for layer in range(2):
        for modules in GROUPS:
            check(world, batch, slots, modules, layer, generator)


def check(
    world: World,
    batch: LoraBatch,
    slots: list[int],
    modules: tuple[str, ...],
    layer: int,
    generator: torch.Generator,
) -> None:
    site = world.layout.sites[world.stack.site(layer, modules[0])]
    x = torch.randn(batch.num_rows, site.in_features, generator=generator).to(world.stack.dtype)
    x[len(slots) :] = float("nan")  # padding is neither read nor written
    widths = [world.layout.sites[world.stack.site(layer, m)].out_features for m in modules]
    y = torch.randn(batch.num_rows, sum(widths), generator=generator).to(world.stack.dtype)
    y[len(slots) :] = 7.0
    before = y.clone()
    add_lora(y, x, batch, modules, layer)
    wants = [world.want(x[: len(slots)], slots, module, layer) for module in modules]
    want = before[: len(slots)].double() + torch.cat(wants, dim=1)
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    got = y[: len(slots)].double()
    assert torch.allclose(got, want, rtol=0, atol=scale * TOLERANCE[world.layout.dtype])
    untouched = [row for row in range(batch.num_rows) if row >= len(slots) or slots[row] < 0]
    assert y[untouched].equal(before[untouched])


@pytest.fixture
def world() -> World:
    """Slot 0 has all; slot 1 lacks the whole of layer 1, and k and v; slot 2 is empty."""
    layout = layout_of(24, 40, 8, "float32")
    full = [5] * len(layout.sites)
    part = [3 if s.layer == 0 and s.module not in ("k_proj", "v_proj") else 0 for s in layout.sites]
    return make_world(layout, [full, part], 2, 512, torch.Generator().manual_seed(1))


SEGMENTS = [(1, 2), (-1, 1), (0, 3)]
SLOTS = [1, 1, -1, 0, 0, 0]


def inputs(world: World, modules: tuple[str, ...] = QKV) -> tuple[LoraBatch, Tensor, list[Tensor]]:
    """A batch, x, and one zero output a module."""
    batch = LoraBatch(world.stack, SEGMENTS)
    sites = [world.layout.sites[world.stack.site(0, module)] for module in modules]
    x = torch.randn(6, sites[0].in_features, generator=torch.Generator().manual_seed(2))
    return batch, x, [torch.zeros(6, site.out_features) for site in sites]


def test_outputs_side_by_side_and_apart_are_the_same(world: World) -> None:
    batch, x, apart = inputs(world)
    together = torch.cat(apart, dim=1)
    add_lora(apart, x, batch, QKV, 0)
    add_lora(together, x, batch, QKV, 0)
    assert together.equal(torch.cat(apart, dim=1))


def test_an_output_whose_rows_are_strided_is_changed_in_place(world: World) -> None:
    batch, x, (want,) = inputs(world, ("q_proj",))
    add_lora(want, x, batch, ("q_proj",), 0)
    wide = torch.full((6, 100), 5.0)
    view = wide[:, 10 : 10 + want.shape[1]]
    view.zero_()
    add_lora(view, x, batch, ("q_proj",), 0)
    assert view.equal(want)
    assert (wide[:, :10] == 5.0).all()
    assert (wide[:, 10 + want.shape[1] :] == 5.0).all()


def test_an_input_that_is_strided_is_read_as_it_is(world: World) -> None:
    batch, x, (want,) = inputs(world, ("q_proj",))
    add_lora(want, x, batch, ("q_proj",), 0)
    got = torch.zeros_like(want)
    add_lora(got, torch.cat([x, x], dim=1)[:, : x.shape[1]], batch, ("q_proj",), 0)
    assert got.equal(want)


def test_modules_and_layers_that_an_adapter_lacks_get_nothing(world: World) -> None:
    batch, x, outputs = inputs(world)
    add_lora(outputs, x, batch, QKV, 0)
    assert outputs[0][:2].abs().sum() > 0
    assert not outputs[1][:2].any()
    add_lora([y.zero_() for y in outputs], x, batch, QKV, 1)
    assert not outputs[0][:2].any()


def test_the_term_is_added_to_what_is_there(world: World) -> None:
    batch, x, (y,) = inputs(world, ("q_proj",))
    add_lora(y, x, batch, ("q_proj",), 0)
    twice = y.clone()
    add_lora(twice, x, batch, ("q_proj",), 0)
    assert torch.allclose(twice, 2 * y)


@pytest.mark.parametrize("order", [[(0, 2), (1, 1), (0, 3)], [(0, 3), (0, 3)], [(-1, 6)], []])
def test_segments_may_come_back_to_an_adapter_or_be_of_none(
    world: World, order: list[tuple[int, int]]
) -> None:
    slots = [slot for slot, tokens in order for _ in range(tokens)]
    batch = LoraBatch(world.stack, order)
    check(world, batch, slots, ("q_proj",), 0, torch.Generator().manual_seed(3))


def bad_y(batch: LoraBatch, x: Tensor, ys: list[Tensor]) -> list[Any]:
    together = torch.cat(ys, dim=1)
    return [
        together[:, :-1],
        together[:-1],
        together[0],
        ys[:2],
        [*ys, ys[0]],
        [ys[1], ys[0], ys[2]],
        [],
        [y[:5] for y in ys],
    ]


@pytest.mark.parametrize("index", range(8))
def test_an_output_of_another_shape_is_refused(world: World, index: int) -> None:
    batch, x, ys = inputs(world)
    with pytest.raises(ValueError, match=r"y|argument"):
        add_lora(bad_y(batch, x, ys)[index], x, batch, QKV, 0)


@pytest.mark.parametrize("cut", [(slice(0, 5), slice(None)), (slice(None), slice(0, 23))], ids=str)
def test_an_input_of_another_shape_is_refused(world: World, cut: Any) -> None:
    batch, x, ys = inputs(world)
    with pytest.raises(ValueError, match="x is"):
        add_lora(ys, x[cut], batch, QKV, 0)


@pytest.mark.parametrize("which", ["x", "y"])
def test_columns_that_are_apart_are_refused(world: World, which: str) -> None:
    batch, x, ys = inputs(world)
    if which == "x":
        x = torch.cat([x, x], dim=1)[:, ::2]
    else:
        ys[0] = torch.cat([ys[0], ys[0]], dim=1)[:, ::2]
    with pytest.raises(ValueError, match=f"{which} has strides"):
        add_lora(ys, x, batch, QKV, 0)


def test_modules_that_do_not_share_their_input_are_refused(world: World) -> None:
    batch, x, ys = inputs(world, ("q_proj", "down_proj"))
    with pytest.raises(ValueError, match="differ in width"):
        add_lora(ys, x, batch, ("q_proj", "down_proj"), 0)


@pytest.mark.parametrize("which", ["x", "y"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_another_dtype_is_refused(world: World, which: str, dtype: torch.dtype) -> None:
    batch, x, ys = inputs(world)
    if which == "x":
        x = x.to(dtype)
    else:
        ys[1] = ys[1].to(dtype)
    with pytest.raises(TypeError, match=f"{which} is"):
        add_lora(ys, x, batch, QKV, 0)


def test_a_tensor_of_another_device_is_refused(world: World) -> None:
    batch, x, ys = inputs(world)
    with pytest.raises(TypeError, match="meta"):
        add_lora(ys, x.to("meta"), batch, QKV, 0)


@pytest.mark.parametrize(
    ("modules", "layer"),
    [(("nothing",), 0), (("q_proj",), 2), (("q_proj",), -1)],
    ids=str,
)
def test_a_site_that_there_is_not_is_refused(world: World, modules: Any, layer: int) -> None:
    batch, x, ys = inputs(world)
    with pytest.raises(ValueError, match="no module"):
        add_lora(ys[0], x, batch, modules, layer)


def test_one_string_is_no_list_of_modules(world: World) -> None:
    batch, x, ys = inputs(world)
    with pytest.raises(TypeError, match="one string"):
        add_lora(ys[0], x, batch, "q_proj", 0)


def test_a_batch_is_of_no_use_after_its_block(world: World) -> None:
    batch, x, ys = inputs(world)
    with batch:
        add_lora(ys, x, batch, QKV, 0)
    with pytest.raises(RuntimeError, match="has ended"):
        add_lora(ys, x, batch, QKV, 0)


def test_what_is_refused_changes_nothing(world: World) -> None:
    batch, x, ys = inputs(world)
    with pytest.raises(TypeError):
        add_lora([ys[0], ys[1], ys[2].double()], x, batch, QKV, 0)
    assert not any(y.any() for y in ys)


@pytest.mark.parametrize("segment", [(3, 1), (-2, 1), (0, -1), (99, 1)], ids=str)
def test_a_segment_that_cannot_be_is_refused(world: World, segment: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="slot"):
        LoraBatch(world.stack, [segment])


def test_more_tokens_than_rows_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="pad_to"):
        LoraBatch(world.stack, [(0, 3)], pad_to=2)


def test_the_slot_of_every_row_is_told_and_padding_is_of_none(world: World) -> None:
    batch = LoraBatch(world.stack, SEGMENTS, pad_to=8)
    assert batch.token_slots.tolist() == [*SLOTS, -1, -1]
    assert batch.token_slots.dtype is torch.int32


@pytest.mark.parametrize(
    ("rank", "rank_class"), [(0, 16), (1, 16), (16, 16), (17, 64), (64, 64), (65, 128), (512, 512)]
)
def test_ranks_fall_into_classes(rank: int, rank_class: int) -> None:
    assert rank_class_of(rank) == rank_class


def test_a_rank_over_all_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="513"):
        rank_class_of(513)


def test_dense_gives_what_was_laid_into_the_arena(world: World) -> None:
    for slot, adapter in enumerate(world.adapters):
        for site in world.layout.sites:
            got = world.stack.dense(slot, site.layer, site.module)
            want = adapter.get((site.layer, site.module))
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                assert got[0].equal(want[0])
                assert got[1].equal(want[1])
                assert got[2] == pytest.approx(want[2], rel=1e-6)


def test_a_layer_is_waited_for_before_it_is_read(world: World) -> None:
    waited: list[int] = []
    batch = LoraBatch(world.stack, SEGMENTS, wait=waited.append)
    _, x, ys = inputs(world)
    add_lora(ys, x, batch, QKV, 1)
    assert waited == [1]
