"""The Triton kernels against float64: interpreted where there is no GPU, compiled where there is.

Each world is laid out by hand: adapters of mixed ranks, absent modules and layers, pages in no
order; all that no adapter owns is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from adaptercache.base_model import BaseModel
from adaptercache.kernels import LoraBatch, LoraStack, add_lora, binary, launch, tuning, variants
from adaptercache.kernels.launch import add_lora_triton
from adaptercache.kernels.segments import rank_class_of
from adaptercache.layout import ArenaShape, LoraLayout
from adaptercache.packing import VectorSpec
from adaptercache.testing import any_device

# The interpreter's own.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

DEVICE = any_device()
# Of the sum of the terms' magnitudes, that rounding errors are in proportion to.
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
if DEVICE == "cpu":  # interpreted, bfloat16 is rounded toward zero
    TOLERANCE["bfloat16"] *= 2


def layout_of(k: int, widths: list[int], dtype: str) -> LoraLayout:
    table = {
        f"model.layers.{layer}.m{index}_proj": {"kind": "linear", "out_in": [width, k]}
        for layer in range(2)
        for index, width in enumerate(widths)
    }
    return LoraLayout(BaseModel.from_table(table), max_rank=512, dtype=dtype)


class World:
    """A stack with one adapter a slot, and the matrices of each."""

    def __init__(
        self, layout: LoraLayout, ranks: list[list[int]], rows: int, cell: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, layout.dtype)
        self.layout = layout
        lengths = [layout.starts(each)[1] for each in ranks]
        pages_of = [-(-length // (rows * cell)) for length in lengths]
        shape = ArenaShape(rows, sum(pages_of) + 3, cell * layout.itemsize, layout.itemsize)
        self.stack = LoraStack(layout, shape, len(ranks), DEVICE)
        self.stack.arena.fill_(float("nan"))
        free = torch.randperm(shape.num_pages, generator=generator).tolist()
        self.matrices: list[dict[int, tuple[Tensor, Tensor, float]]] = []
        for slot, each in enumerate(ranks):
            starts, length = layout.starts(each)
            vector = torch.full((length,), float("nan"), dtype=dtype)
            found, scalings = {}, []
            for index, (site, rank, start) in enumerate(
                zip(layout.sites, each, starts, strict=True)
            ):
                scalings.append(0.5 + float(torch.rand((), generator=generator)))
                if rank:
                    a = torch.randn(rank, site.in_features, generator=generator).to(dtype)
                    b = torch.randn(site.out_features, rank, generator=generator).to(dtype)
                    at = start + -(-a.numel() // 512) * 512
                    vector[start : start + a.numel()] = a.flatten()
                    vector[at : at + b.numel()] = b.t().flatten()
                    found[index] = (a, b, scalings[-1])
            self.matrices.append(found)
            pages = [free.pop() for _ in range(pages_of[slot])]
            for j in range(-(-length // cell)):
                piece = vector[j * cell : (j + 1) * cell].to(DEVICE)
                self.stack.arena[j % rows, pages[j // rows], : len(piece)] = piece
            row = self.stack.row(VectorSpec.of(layout, each, scalings), pages)
            self.stack.table[slot].copy_(row)

    def want(self, x: Tensor, slots: list[int], index: int) -> tuple[Tensor, Tensor]:
        """The terms of one site in float64, and the sums of their terms' magnitudes."""
        width = self.layout.sites[index].out_features
        want = torch.zeros(2, len(x), width, dtype=torch.float64)
        for slot in {slot for slot in slots if slot >= 0 and index in self.matrices[slot]}:
            rows = [row for row, its in enumerate(slots) if its == slot]
            a, b, scaling = self.matrices[slot][index]
            a, b, v = a.double().t(), b.double().t(), x[rows].double()
            want[0, rows] = scaling * (v @ a @ b)
            want[1, rows] = scaling * (v.abs() @ a.abs() @ b.abs())
        return want[0], want[1]


def check(
    world: World,
    segments: list[tuple[int, int]],
    layer: int,
    *,
    pad: int = 0,
    rows: int | None = None,
) -> None:
    """One call for all modules of a layer, into views with a row stride of their own: on a GPU, one
    that is a multiple of 16 too, which other binaries, and other kernels, take."""
    layout = world.layout
    sites = [i for i, site in enumerate(layout.sites) if site.layer == layer]
    modules = [layout.sites[i].module for i in sites]
    slots = [slot for slot, tokens in segments for _ in range(tokens)]
    num_rows = (len(slots) if rows is None else rows) + pad
    slots += [-1] * (num_rows - len(slots))
    ranks = {
        slot: max((a.shape[0] for a, *_ in world.matrices[slot].values()), default=1)
        for slot in {slot for slot in slots if slot >= 0}
    }
    largest = max(ranks.values(), default=1)
    dtype = world.stack.dtype
    generator = torch.Generator().manual_seed(len(slots))
    x = torch.randn(num_rows, layout.sites[sites[0]].in_features, generator=generator).to(dtype)
    x[sum(tokens for _, tokens in segments) :] = float("nan")  # padding is not read
    wanted = [world.want(x, slots, index) for index in sites]
    widths = [layout.sites[i].out_features for i in sites]
    told = ranks if len(slots) % 3 else {}
    for apart in (8,) if DEVICE == "cpu" else (8, -sum(widths) % 16 or 16):
        whole = torch.zeros(num_rows, sum(widths) + apart, dtype=dtype, device=DEVICE)
        outputs = list(whole[:, : sum(widths)].split(widths, dim=1))
        batch = LoraBatch(
            world.stack, segments, pad_to=num_rows, rank_class=rank_class_of(largest), ranks=told
        )
        add_lora_triton(outputs, x.to(DEVICE), batch, world.stack.group(layer, modules))
        for (want, magnitude), got in zip(wanted, outputs, strict=True) if num_rows else ():
            error = ((got.double().cpu() - want).abs() / magnitude.clamp(min=1e-9)).max()
            assert error <= TOLERANCE[layout.dtype], (apart, float(error))
            untouched = [row for row, slot in enumerate(slots) if slot < 0]
            assert not got[untouched].any()
        assert not whole[:, sum(widths) :].any()


@pytest.fixture(params=["singles", "groups"], autouse=True)
def shared_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Tokens that share an adapter, over 16 rows: as small as widths are here, the L2 would serve
    all of them as singles."""
    if request.param == "groups":
        monkeypatch.setattr(tuning, "FROM_L2", 0)
    variants._bgmv_pair.cache_clear()
    yield request.param
    variants._bgmv_pair.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_each_token_gets_its_own_adapter(dtype: str, rows: int) -> None:
    layout = layout_of(256, [512, 128, 128], dtype)
    ranks = [[16] * 6, [3, 0, 5, 0, 0, 0], [64, 1, 17, 8, 40, 64]]
    world = World(layout, ranks, rows, 1024, seed=rows)
    for layer in (0, 1):
        check(world, [(0, 1), (2, 1), (-1, 1), (1, 1)], layer, pad=2)


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [(-1, 5)],
        [(0, 20), (1, 1), (0, 3)],  # tokens of one adapter, apart: two tiles, the second of 7
        [(1, 1)],
    ],
    ids=["none", "base only", "shared", "one"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_popularities(dtype: str, segments: list[tuple[int, int]]) -> None:
    world = World(layout_of(128, [256], dtype), [[16, 16], [40, 4]], 2, 512, seed=3)
    check(world, segments, 0, pad=3)


@pytest.mark.parametrize("rank", [128, 300])
def test_large_ranks(rank: int) -> None:
    world = World(layout_of(64, [64, 32], "float32"), [[rank, 8, 0, 0], [1, rank, 2, 2]], 2, 512, 5)
    check(world, [(0, 1), (1, 2)], 0)


@settings(
    max_examples=12 if DEVICE == "cpu" else 100,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink would take minutes
)
@given(
    st.sampled_from([(97, [33]), (48, [80, 16]), (7, [5, 3, 11]), (64, [64, 64, 64, 64])]),
    st.lists(st.sampled_from([0, 1, 2, 16, 33]), min_size=16, max_size=16),
    st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 18)), max_size=4),
    st.integers(0, 2),
    st.integers(0, 1 << 20),
)
def test_odd_widths_and_any_segments(
    shape: tuple[int, list[int]],
    ranks: list[int],
    segments: list[tuple[int, int]],
    pad: int,
    seed: int,
) -> None:
    k, widths = shape
    sites = 2 * len(widths)
    world = World(
        layout_of(k, widths, "float32"), [ranks[:sites], ranks[-sites:]], 1 + seed % 3, 512, seed
    )
    check(world, segments, seed % 2, pad=pad)


@pytest.fixture
def for_fragments(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoraStack]:
    """A stack on a GPU that has what they need."""
    stack = World(layout_of(64, [64], "bfloat16"), [[1, 1]], 1, 512, seed=0).stack
    monkeypatch.setattr(variants, "_HAS_GLUON", True)
    monkeypatch.setattr(binary, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    binary.has_mma.cache_clear()
    monkeypatch.setattr(stack, "device", torch.device("cuda", 7))
    assert variants._takes_fragments(stack)
    yield stack
    binary.has_mma.cache_clear()


def test_an_arena_that_32_bits_cannot_count_is_not_for_fragments(
    for_fragments: LoraStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(for_fragments, "shape", ArenaShape(32, 1 << 16, 64 << 10, 2))  # 128 GiB
    assert variants._takes_fragments(for_fragments)
    monkeypatch.setattr(for_fragments, "shape", ArenaShape(32, (1 << 16) + 1, 64 << 10, 2))
    assert not variants._takes_fragments(for_fragments)


@pytest.mark.parametrize(
    ("dtype", "takes"), [(torch.float16, True), (torch.float32, False)], ids=str
)
def test_numbers_of_16_bits_are_for_fragments(
    dtype: torch.dtype, takes: bool, for_fragments: LoraStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(for_fragments, "dtype", dtype)
    assert variants._takes_fragments(for_fragments) == takes


def test_a_gpu_of_before_ampere_is_not_for_fragments(
    for_fragments: LoraStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    binary.has_mma.cache_clear()
    assert not variants._takes_fragments(for_fragments)


def test_another_makers_gpu_is_asked_for_nothing_of_nvidias(
    for_fragments: LoraStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for has in (binary.has_mma, binary.has_pdl):
        has.cache_clear()
        assert not has(for_fragments.device)
    binary.has_pdl.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        *((128, [64]), (192, [64, 128, 64]), (1024, [512, 256, 256]), (14336, [1024])),
        (3584, [3584, 512, 512]),
    ],
    ids=lambda shape: str(shape[0]),
)
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.lists(st.sampled_from([0, 1, 2, 16, 17, 33, 64]), min_size=18, max_size=18),
    st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 34)), max_size=6),
    st.integers(0, 2),
    st.integers(0, 1 << 20),
)
def test_multiples_of_64_and_any_segments(
    dtype: str,
    shape: tuple[int, list[int]],
    ranks: list[int],
    segments: list[tuple[int, int]],
    pad: int,
    seed: int,
) -> None:
    k, widths = shape
    sites = 2 * len(widths)
    each = [ranks[at : at + sites] for at in (0, 6, 12)]
    world = World(layout_of(k, widths, dtype), each, 1 + seed % 3, 2048, seed)
    check(world, segments, seed % 2, pad=pad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill(dtype: str) -> None:
    layout = layout_of(256, [256, 64], dtype)
    world = World(layout, [[16, 16, 4, 4], [64, 8, 0, 8], [0, 0, 16, 0]], 2, 1024, seed=1)
    for layer in (0, 1):
        check(world, [(0, 300), (-1, 7), (1, 200), (2, 33), (0, 5)], layer, rows=560)


@pytest.mark.parametrize(("dtype", "layer"), [("float32", 0), ("bfloat16", 1)])
def test_prefill_of_ranks_up_to_32(dtype: str, layer: int) -> None:
    """Of 24 and 32, with lower ones, and a module that an adapter lacks."""
    layout = layout_of(256, [256, 64, 64], dtype)
    ranks = [[24, 32, 8, 1, 1, 1], [8, 0, 8, 32, 17, 24], [32, 32, 0, 0, 0, 16]]
    world = World(layout, ranks, 2, 1024, seed=1)
    check(world, [(0, 300), (-1, 7), (1, 200), (2, 33), (0, 5)], layer, rows=560)


PREFILL = [(0, 500), (1, 20)]


@pytest.mark.parametrize(
    ("segments", "told", "captured", "rank"),
    [
        (PREFILL, {0: 24, 1: 8}, False, 32),
        ([(2, 500), (1, 20)], {2: 16, 1: 8}, False, 16),
        (PREFILL, {0: 24, 1: 33}, False, 64),
        (PREFILL, {0: 24}, False, 64),  # nobody knows the other's
        (PREFILL, {0: 24, 1: 8}, True, 64),  # replays may bring higher ones
        ([(-1, 520)], {}, False, 64),
        ([(0, 5), (1, 2)], {0: 24, 1: 8}, False, 64),  # decode's kernels are of classes
    ],
    ids=str,
)
def test_prefill_takes_kernels_of_its_own_ranks(
    segments: list[tuple[int, int]],
    told: dict[int, int],
    captured: bool,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def pair_for(stack: LoraStack, k: int, widths: Any, its: int, rows: int, **how: Any) -> Any:
        taken.append(its)
        return variants.pair_for(stack, k, widths, its, rows, **how)

    monkeypatch.setattr(launch, "pair_for", pair_for)
    monkeypatch.setattr(launch, "_is_captured", lambda x: captured)
    world = World(layout_of(32, [32], "float32"), [[24, 1], [8, 1], [16, 1]], 1, 512, seed=4)
    x = torch.randn(520, 32)
    batch = LoraBatch(world.stack, segments, rank_class=64, ranks=told)
    x, y = x[: batch.num_rows], torch.zeros(batch.num_rows, 32, device=DEVICE)
    add_lora_triton([y], x.to(DEVICE), batch, world.stack.group(0, ("m0_proj",)))
    assert taken == [rank]
    want, magnitude = world.want(x, batch.token_slots.tolist(), 0)
    assert ((y.cpu() - want).abs() <= 2e-6 * magnitude).all()


def test_equal_inputs_give_equal_bits() -> None:
    world = World(layout_of(128, [128], "float32"), [[16, 16], [33, 1]], 2, 512, seed=9)
    x = torch.randn(24, 128).to(DEVICE)
    results: list[Any] = []
    for _ in range(3):
        y = torch.zeros(24, 128, device=DEVICE)
        batch = LoraBatch(world.stack, [(0, 17), (1, 1), (0, 6)], rank_class=64)
        add_lora_triton([y], x, batch, world.stack.group(0, ("m0_proj",)))
        results.append(y.cpu())
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rank_class", "ranks", "dtype"),
    [
        (16, [16] * 6, torch.bfloat16),
        (16, [7] * 6, torch.bfloat16),
        (64, [64] * 6, torch.bfloat16),
        (64, [8, 64, 16] * 2, torch.bfloat16),
        (64, [20, 5, 16] * 2, torch.bfloat16),
        (64, [8, 64, 32] * 2, torch.float16),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_in_whatever_company(
    rank_class: int, ranks: list[int], dtype: torch.dtype
) -> None:
    """Of 16 bits a number, up to rank 64 and 512 rows: see `fragments`."""
    layout = layout_of(4096, [4096, 1024, 1024], str(dtype).removeprefix("torch."))
    others_ranks = [[rank_class // 4] * 6, [rank_class // 2 + 1] * 6]
    world = World(layout, [ranks, *others_ranks], 4, 32768, seed=2)
    x = torch.randn(1, 4096, dtype=dtype, device=DEVICE)
    group, results = world.stack.group(0, ("m0_proj", "m1_proj", "m2_proj")), []
    for segments in (
        *([(0, 1)], [(1, 1), (0, 2)], [(0, 5)], [(0, 40)], [(2, 30), (1, 100), (0, 17)]),
        [(1, 3), (0, 90)],
    ):
        rows = sum(tokens for _, tokens in segments)
        batch = LoraBatch(world.stack, segments, pad_to=rows + len(results), rank_class=rank_class)
        y = torch.zeros(batch.num_rows, 6144, dtype=dtype, device=DEVICE)
        others = torch.randn(batch.num_rows, 4096, dtype=dtype, device=DEVICE)
        others[rows - 1] = x[0]
        add_lora_triton(y, others, batch, group)
        results.append(y[rows - 1].cpu())
    assert results[0].any()
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 600], ids=["few", "many"])
def test_rows_that_an_adapter_has_not_make_no_nan_of_an_infinite_x(rows: int) -> None:
    world = World(layout_of(64, [64], "bfloat16"), [[1, 1]], 1, 512, seed=0)
    x = torch.ones(rows, 64, dtype=torch.bfloat16, device=DEVICE)
    x[0, 5] = float("inf")
    y = torch.zeros(rows, 64, dtype=torch.bfloat16, device=DEVICE)
    batch = LoraBatch(world.stack, [(0, rows)], rank_class=16)
    add_lora_triton(y, x, batch, world.stack.group(0, ("m0_proj",)))
    assert y[0].isinf().all()
    assert y[1:].isfinite().all()


@pytest.mark.parametrize("tokens", [3, 600], ids=["few", "many"])
def test_a_stack_without_slots_has_nothing_to_add(tokens: int) -> None:
    dtype = {"dtype": torch.bfloat16, "device": DEVICE}
    a, b = torch.zeros(0, 16, 64, **dtype), torch.zeros(0, 128, 16, **dtype)
    stack = LoraStack.from_dense({(0, "o_proj"): (a, b, [])})
    batch = LoraBatch(stack, [(-1, tokens)])
    x, y = torch.ones(tokens, 64, **dtype), torch.zeros(tokens, 128, **dtype)
    add_lora_triton(y, x, batch, stack.group(0, ("o_proj",)))
    assert not y.any()


def test_batches_that_are_open_at_once_keep_their_own_adapters() -> None:
    world = World(layout_of(64, [32], "float32"), [[16, 8], [4, 16]], 1, 512, seed=4)
    x = torch.randn(3, 64)
    orders = ([(0, 1), (1, 2)], [(1, 1), (-1, 1), (0, 1)])
    batches = [LoraBatch(world.stack, order) for order in orders]
    for layer in (0, 1):
        for order, batch in zip(orders, batches, strict=True):
            y = torch.zeros(3, 32, device=DEVICE)
            add_lora_triton([y], x.to(DEVICE), batch, world.stack.group(layer, ("m0_proj",)))
            slots = [slot for slot, tokens in order for _ in range(tokens)]
            want, magnitude = world.want(x, slots, layer)
            assert ((y.cpu() - want).abs() <= 2e-6 * magnitude).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [20, 600], ids=["bgmv", "sgmv"])
def test_kernels_of_a_higher_rank_class_serve_the_work_of_a_lower(tokens: int, dtype: str) -> None:
    """As where a graph is replayed: its launches are those of its capture, the work is of now."""
    world = World(layout_of(64, [64], dtype), [[16, 8], [4, 16], [40, 3]], 1, 512, seed=4)
    captured = LoraBatch(world.stack, [], pad_to=tokens, rank_class=64)
    segments = [(0, 1), (1, tokens // 2), (-1, 1), (0, 2)]
    told = {0: 16, 1: 16}
    now = LoraBatch(world.stack, segments, pad_to=tokens, rank_class=16, ranks=told)
    captured.work()
    now.work()
    world.stack.work(now.shape).owner = captured._name
    captured.num_groups = now.num_groups
    x = torch.randn(tokens, 64).to(world.stack.dtype)
    y = torch.zeros(tokens, 64, dtype=x.dtype, device=DEVICE)
    add_lora_triton([y], x.to(DEVICE), captured, world.stack.group(0, ("m0_proj",)))
    want, magnitude = world.want(x, now.token_slots.tolist(), 0)
    assert ((y.double().cpu() - want).abs() <= TOLERANCE[dtype] * magnitude).all()


@pytest.mark.parametrize("tokens", [40, 600], ids=["bgmv", "sgmv"])
def test_the_error_is_little_more_than_that_of_rounding_once(tokens: int) -> None:
    """In float16 where the kernels are interpreted, which rounds bfloat16 toward zero."""
    dtype = "float16" if DEVICE == "cpu" else "bfloat16"
    world = World(layout_of(512, [128], dtype), [[16, 8], [64, 33]], 2, 1024, seed=6)
    slots = [0, 1] * 10 + [0] * (tokens - 20)
    x = torch.randn(tokens, 512).to(world.stack.dtype) / 16
    want, _ = world.want(x, slots, 0)
    y = torch.zeros(tokens, 128, dtype=world.stack.dtype, device=DEVICE)
    batch = LoraBatch(world.stack, [(slot, 1) for slot in slots], rank_class=64)
    add_lora_triton([y], x.to(DEVICE), batch, world.stack.group(0, ("m0_proj",)))
    error = (y.double().cpu() - want).square().mean().sqrt()
    least = (want.to(y.dtype).double() - want).square().mean().sqrt()
    assert error <= 1.5 * least


@pytest.mark.gpu
def test_a_batch_cannot_be_made_while_a_graph_is_captured() -> None:
    world = World(layout_of(64, [32], "float32"), [[16, 16]], 1, 512, seed=4)
    x, y = torch.randn(4, 64, device=DEVICE), torch.zeros(4, 32, device=DEVICE)
    add_lora(y, x, LoraBatch(world.stack, [(0, 4)]), ["m0_proj"], 0)
    stale = LoraBatch(world.stack, [(0, 4)])
    LoraBatch(world.stack, [(0, 1)], pad_to=4)
    refusal = pytest.raises(RuntimeError, match="before a CUDA graph is captured")
    with refusal, torch.cuda.graph(torch.cuda.CUDAGraph()):
        y.zero_()
        add_lora(y, x, stale, ["m0_proj"], 0)


@pytest.mark.gpu
def test_a_graph_captured_once_serves_other_batches() -> None:
    layout = layout_of(4096, [4096, 1024, 1024], "bfloat16")
    world = World(layout, [[16] * 6, [8] * 6, [4, 0, 2, 1, 1, 1], [16] * 6], 4, 32768, seed=2)
    x = torch.randn(64, 4096, dtype=torch.bfloat16, device=DEVICE)
    y = torch.zeros(64, 6144, dtype=torch.bfloat16, device=DEVICE)
    modules = ["m0_proj", "m1_proj", "m2_proj"]

    def batch_of(segments: list[tuple[int, int]]) -> LoraBatch:
        return LoraBatch(world.stack, segments, pad_to=64, rank_class=16)

    add_lora(y, x, batch_of([(0, 64)]), modules, 0)
    empty, graph = batch_of([]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora(y, x, empty, modules, 0)
    each_its_own = [(token % 4, 1) for token in range(64)]
    for segments in ([(0, 1), (1, 1), (2, 60)], [(-1, 64)], [(3, 64)], each_its_own):
        batch_of(segments)
        y.zero_()
        graph.replay()
        slots = [slot for slot, tokens in segments for _ in range(tokens)]
        slots += [-1] * (64 - len(slots))
        wanted = [world.want(x.cpu(), slots, index) for index in range(3)]
        want, magnitude = (torch.cat(each, dim=1) for each in zip(*wanted, strict=True))
        error = ((y.double().cpu() - want).abs() / magnitude.clamp(min=1e-9)).max()
        assert error <= TOLERANCE["bfloat16"]


@pytest.mark.gpu
def test_a_prefill_that_was_made_once_may_be_captured_for_higher_ranks() -> None:
    """Without a warm-up: its own kernels are of rank 32, those of the graph of the rank class."""
    layout = layout_of(256, [256, 64, 64], "bfloat16")
    world = World(layout, [[24] * 6, [64] * 6], 2, 1024, seed=2)
    x = torch.randn(600, 256, dtype=torch.bfloat16, device=DEVICE)
    y = torch.zeros(600, 384, dtype=torch.bfloat16, device=DEVICE)
    modules = ["m0_proj", "m1_proj", "m2_proj"]
    batch = LoraBatch(world.stack, [(0, 600)], rank_class=64, ranks={0: 24})
    add_lora(y, x, batch, modules, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora(y, x, batch, modules, 0)
    LoraBatch(world.stack, [(1, 300), (0, 300)], rank_class=64)
    y.zero_()
    graph.replay()
    wanted = [world.want(x.cpu(), [1] * 300 + [0] * 300, index) for index in range(3)]
    want, magnitude = (torch.cat(each, dim=1) for each in zip(*wanted, strict=True))
    error = ((y.double().cpu() - want).abs() / magnitude.clamp(min=1e-9)).max()
    assert error <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("sums_up_to", [40 * 17, 40 * 17 - 1], ids=["singles", "groups"])
def test_ranks_decide_and_not_their_class_whether_tokens_that_share_are_grouped(
    shared_by: str, sums_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 tokens of rank 17, in rank class 64: the L2 has 17 rows to serve, not 64."""
    elements = 128 + 256
    monkeypatch.setattr(tuning, "FROM_L2", sums_up_to * elements)
    assert not tuning.all_singles(elements, 64, 40)
    world = World(layout_of(128, [256], "float32"), [[17, 17]], 2, 512, seed=3)
    numbers = LoraBatch(world.stack, [(0, 40)], ranks={0: 17}, rank_class=64).shape.lay_out(
        [(0, 40)], 64, {0: 17}
    )
    assert (numbers[7] <= sums_up_to) == (sums_up_to == 40 * 17)
    check(world, [(0, 40)], 0)
