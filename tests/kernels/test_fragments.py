"""BGMV by fragments against float64, without a GPU: Triton compiles, and `ptx` runs what it made.

Worlds are laid out by hand: adapters of mixed ranks, absent modules, pages in no order. All that no
adapter owns is NaN, as is scratch at first. `ptx` says what its machine looks at besides.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ptx import Fault, Machine, Memory, Program, UnknownInstruction
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")  # Gluon, as the kernels need it

from adaptercache.base_model import BaseModel
from adaptercache.kernels import LoraStack
from adaptercache.kernels.work import WorkShape
from adaptercache.layout import ArenaShape, LoraLayout, align
from adaptercache.packing import VectorSpec

NAMES = ("q_proj", "k_proj", "v_proj")
LAYERS, LAYER = 2, 1
PAGE_ELEMS, ROWS = 1024, 4  # small, so that a matrix takes many cells and pages
ONE_ROUNDING = {"bfloat16": 1 / 256, "float16": 1 / 2048}
TOLERANCE, EXACT = 8, 1e-4
"""Of a product's root mean square, beyond what rounding y once allows: as h is rounded too, so many
times that. Up to rank 32 what that takes off is added."""

# In a process of its own: where the interpreter is on, there is nothing to compile. Nothing here
# asks for a GPU but its name.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from adaptercache.kernels import variants


class NoGpu:
    def get_current_device(self):
        return arch  # what was compiled is kept by device

    def get_current_target(self):
        return GPUTarget("cuda", arch, 32)

    def get_current_stream(self, device):
        return 0


driver.set_active(NoGpu())
folder, page_elems, rows, shapes = json.loads(sys.argv[1])
for number, (k, widths, rank_class, arch, dtype) in enumerate(shapes):
    variants.has_pdl = lambda device: arch >= 90
    variants._fragments_pair.cache_clear()
    arena = (torch.device("cuda"), getattr(torch, dtype), page_elems, rows)
    pair = variants._fragments_pair(*arena, k, tuple(widths), rank_class)
    found = [pair.scratch]
    for its, programs in (
        (pair.shrink, pair.shrink_programs), (pair.expand, pair.expand_programs)
    ):
        options = dict(num_warps=its.num_warps, maxnreg=its.max_words)
        options |= dict(launch_pdl=True) if arch >= 90 else {}
        kernel = its.function.warmup(*its.types, grid=(1, 1, 1), **its.constants, **options)
        found.append((kernel.asm["ptx"], kernel.metadata.shared, programs))
    (Path(folder) / str(number)).write_text(json.dumps(found))
    print(number, flush=True)
"""


@dataclass(frozen=True)
class Kernel:
    ptx: str
    shared_bytes: int
    programs: int
    """That a row can keep busy."""

    @cached_property
    def program(self) -> Program:
        return Program(self.ptx)


@dataclass(frozen=True)
class Pair:
    scratch: int
    """float32 elements a row."""
    shrink: Kernel
    expand: Kernel


@dataclass(frozen=True)
class Shape:
    """What binaries are compiled for."""

    k: int
    widths: tuple[int, ...]
    rank_class: int
    arch: int = 90
    dtype: str = "bfloat16"


class Compiler:
    """Compiles the shapes, one after the other, while others run."""

    def __init__(self, shapes: Sequence[Shape], folder: Path) -> None:
        environment = {name: its for name, its in os.environ.items() if name != "TRITON_INTERPRET"}
        to_do = json.dumps([str(folder), PAGE_ELEMS, ROWS, [astuple(each) for each in shapes]])
        self._folder = folder
        self._to_come = list(enumerate(shapes))
        self._found: dict[Shape, Pair] = {}
        with (folder / "errors").open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, to_do],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def pair(self, shape: Shape) -> Pair:
        assert self._process.stdout is not None
        while shape not in self._found:
            number, its = self._to_come.pop(0)
            errors = self._folder / "errors"
            assert self._process.stdout.readline() == f"{number}\n", errors.read_text()
            scratch, *kernels = json.loads((self._folder / str(number)).read_text())
            self._found[its] = Pair(scratch, *(Kernel(*each) for each in kernels))
        return self._found[shape]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class World:
    """A stack with an adapter a slot; ``without``: slots and modules that have none."""

    def __init__(
        self, shape: Shape, ranks: Sequence[int], without: Sequence[tuple[int, int]] = ()
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.ranks = shape, ranks
        self.names = NAMES[: len(shape.widths)]
        table = {
            f"model.layers.{layer}.self_attn.{name}": {"kind": "linear", "out_in": [width, shape.k]}
            for layer in range(LAYERS)
            for name, width in zip(self.names, shape.widths, strict=True)
        }
        base = BaseModel.from_table(table)
        layout = LoraLayout(base, max_rank=max(ranks), dtype=shape.dtype)
        self.sites = layout.sites
        modules = [self.names.index(site.module) for site in layout.sites]
        specs = [
            VectorSpec.of(
                layout,
                [0 if (slot, module) in without else rank for module in modules],
                [0.5 + site % 3 for site in range(len(modules))],
            )
            for slot, rank in enumerate(ranks)
        ]
        pages_of = [-(-spec.elements // (PAGE_ELEMS * ROWS)) for spec in specs]
        shape_of = ArenaShape(ROWS, sum(pages_of) + 3, PAGE_ELEMS * 2, 2)
        self.stack = LoraStack(layout, shape_of, len(ranks), "cpu")
        self.stack.arena.fill_(float("nan"))
        pages = torch.randperm(shape_of.num_pages).tolist()
        for slot, spec in enumerate(specs):
            its, pages = pages[: pages_of[slot]], pages[pages_of[slot] :]
            self.stack.table[slot].copy_(self.stack.row(spec, its))
            self.stack.arena[:, its] = self._vector(spec, len(its)).transpose(0, 1)

    def _vector(self, spec: VectorSpec, pages: int) -> Tensor:
        """Of an adapter, in cells [page, row, element]: NaN where no matrix is."""
        vector = torch.full((pages * ROWS * PAGE_ELEMS,), float("nan"))
        for site, rank, start in zip(self.sites, spec.ranks, spec.starts, strict=True):
            if rank:
                its_b = start + align(rank * site.in_features)
                vector[start : start + rank * site.in_features].normal_(0, 0.05)
                vector[its_b : its_b + rank * site.out_features].normal_(0, 0.05)
        return vector.to(self.stack.dtype).view(pages, ROWS, PAGE_ELEMS)

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """x and y."""
        numbers = torch.randn(count, self.shape.k + sum(self.shape.widths)).to(self.stack.dtype)
        x, y = numbers.split([self.shape.k, sum(self.shape.widths)], dim=1)
        return x.contiguous(), y.contiguous()

    def check(self, got: Tensor, x: Tensor, y: Tensor, segments: Sequence[tuple[int, int]]) -> None:
        slots = [slot for slot, tokens in segments for _ in range(tokens)]
        once = ONE_ROUNDING[self.shape.dtype]
        new_ys, old_ys = got.split(self.shape.widths, 1), y.split(self.shape.widths, 1)
        for name, new_y, old_y in zip(self.names, new_ys, old_ys, strict=True):
            for token, slot in enumerate(slots):
                new, old = new_y[token], old_y[token]
                its = self.stack.dense(slot, LAYER, name) if slot >= 0 else None
                if its is None:
                    assert torch.equal(new, old), f"token {token}, {name}: y is not as it was"
                    continue
                a, b, scaling = its
                term = (x[token].double() @ a.double().t()) @ b.double().t() * scaling
                want = old.double() + term
                beyond = (new.double() - want).abs() - want.abs() * once
                error = float(beyond.max() / term.square().mean().sqrt())
                allowed = EXACT if len(a) <= 32 else TOLERANCE * once
                assert error < allowed, f"token {token}, {name}: {error} beyond"


def add_lora(
    world: World,
    pair: Pair,
    x: Tensor,
    y: Tensor,
    segments: Sequence[tuple[int, int]],
    programs: int | None = None,
    scratch: int | None = None,
) -> Tensor:
    """y, when both kernels have run. ``programs``: of each, if other than the product's; a GPU
    holds a part of them at once. ``scratch``: as `Pair`'s."""
    stack, tokens = world.stack, len(x)
    numbers = WorkShape(tokens, stack.num_slots).lay_out(
        segments, world.shape.rank_class, dict(enumerate(world.ranks))
    )
    memory = Memory()
    at_x = memory.place("x", x.view(torch.int16).numpy(), is_shared=True)
    at_y = memory.place("y", y.view(torch.int16).numpy(), is_output=True, is_shared=True)
    at_work = memory.place("work", np.array(numbers))
    at_arena = memory.place("arena", stack.arena.view(torch.int16).numpy())
    at_table = memory.place("table", stack.table.numpy())
    unwritten = np.full(tokens * (scratch or pair.scratch), np.nan, np.float32)
    at_partials = memory.place("partials", unwritten, is_output=True, is_shared=True)
    sites = [stack.site(LAYER, name) for name in world.names]
    pages, start, rank, scaling = (
        at_table + 4 * each.storage_offset()
        for each in (stack.pages, stack.start, stack.rank, stack.scaling)
    )
    tables = (at_arena, pages, start, rank)
    paging = (stack.table.stride(0), stack.shape.num_pages, *_three(sites))
    columns = np.cumsum([0, *world.shape.widths[:-1]])
    outputs = _three([at_y + 2 * int(column) for column in columns])
    to_shrink = (at_x, x.stride(0), *tables, *paging, at_work, at_partials, tokens)
    strides = [y.stride(0)] * 3
    of_tables = (*tables, scaling, *paging)
    to_expand = (*outputs, *strides, *of_tables, at_work, at_partials, tokens)
    for kernel, arguments in ((pair.shrink, to_shrink), (pair.expand, to_expand)):
        machine = Machine(
            kernel.program,
            memory,
            arguments,
            shared_bytes=kernel.shared_bytes,
            is_early=world.shape.arch >= 90,
        )
        machine.launch(tokens * kernel.programs if programs is None else programs)
    written = torch.from_numpy(memory.read("y")).view(stack.dtype)
    return written.reshape(y.shape)


def _three(values: Sequence[int]) -> list[int]:
    return [*values, *[values[-1]] * (3 - len(values))]


def in_turn(tokens: int, slots: int) -> list[tuple[int, int]]:
    return [(token % slots, 1) for token in range(tokens)]


@dataclass(frozen=True)
class Case:
    shape: Shape
    ranks: tuple[int, ...]
    segments: list[tuple[int, int]]
    programs: int | None = None
    without: tuple[tuple[int, int], ...] = ()


ONE = Shape(1024, (512,), 16)
THREE, THREE_64 = Shape(1024, (512, 256, 256), 16), Shape(1024, (512, 256, 256), 64)
TWO_64 = Shape(1024, (512, 256), 64)
NARROW_64 = Shape(1024, (128, 128, 64), 64)
UNEVEN, UNEVEN_64 = Shape(1088, (256,), 16), Shape(4736, (256, 256), 64)
RUNS, RUNS_64 = Shape(1024, (320,), 16), Shape(1024, (576, 64), 64)  # blocks of 64 columns
LONG, LONG_64 = Shape(8320, (128,), 16), Shape(8320, (128,), 64)
AMPERE, AMPERE_64 = replace(THREE, arch=80), replace(NARROW_64, arch=80)
HALF, HALF_64 = replace(RUNS, dtype="float16"), replace(NARROW_64, arch=80, dtype="float16")
MIXED = [(0, 1), (-1, 1), (1, 1), (2, 18), (3, 1), (0, 1), (4, 1)]

CASES = {
    "a group and a rest": Case(ONE, (16,), [(0, 20)]),
    "more units than programs": Case(ONE, (16, 8, 4), [*in_turn(24, 3), (-1, 2)], programs=7),
    "a module missing": Case(THREE, (16, 8), in_turn(16, 2), programs=5, without=((1, 1), (0, 2))),
    "singles, groups, base rows": Case(THREE, (16, 8, 4, 2, 1), MIXED, programs=5),
    "three ranks": Case(THREE_64, (64, 32, 20), in_turn(24, 3)),
    "a module missing, of three ranks": Case(
        THREE_64, (64, 32, 9), in_turn(9, 3), programs=4, without=((0, 0), (1, 1), (2, 2))
    ),
    "programs without work": Case(THREE_64, (30, 20), [*in_turn(6, 2), (0, 1)], programs=90),
    "ranks in classes, few programs": Case(TWO_64, (64, 8, 40, 20, 16), MIXED, programs=5),
    "all ranks and base rows": Case(
        TWO_64, (64, 8, 40, 20, 16, 4), [*in_turn(40, 6), (-1, 3)], programs=3
    ),
    "narrow": Case(NARROW_64, (64, 33), [*in_turn(20, 2), (0, 30)], programs=3),
    "runs of columns": Case(RUNS, (16, 3), [*in_turn(4, 2), (0, 1)], programs=2),
    "runs of columns, of three ranks": Case(RUNS_64, (64, 30, 7), in_turn(6, 3), programs=2),
    "an uneven last part": Case(UNEVEN, (16, 5), [(0, 3), (1, 1)], programs=4),
    "an uneven last part, in loops": Case(
        UNEVEN_64, (20, 64), [*in_turn(4, 2), (1, 9)], programs=4
    ),
    "groups of low ranks": Case(
        THREE, (8, 5, 9), [(0, 2), (1, 3), (0, 2), (2, 4), (1, 6), (-1, 1), (2, 1)], programs=3
    ),
    "large groups": Case(TWO_64, (64, 20, 7), [(0, 65), (1, 70), (2, 9)], programs=8),
    "over 8,192 columns": Case(LONG, (16, 1), [(0, 17), (1, 1)]),
    "over 8,192 columns, of three ranks": Case(LONG_64, (17, 48), [(0, 2), (1, 1)]),
    "nothing but base rows": Case(ONE, (16,), [(-1, 5)]),
    "a row": Case(TWO_64, (48,), [(0, 1)]),
    "arch 80": Case(AMPERE, (16, 8), [*in_turn(5, 2), (-1, 1)]),
    "float16": Case(HALF, (16, 3), [*in_turn(4, 2), (0, 1), (1, 3)], programs=2),
    "float16, of three ranks": Case(HALF_64, (64, 30, 7), [*in_turn(5, 3), (0, 9)], programs=5),
    "arch 80, of three ranks": Case(AMPERE_64, (64, 30, 7), in_turn(7, 3), programs=5),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    shapes = dict.fromkeys(case.shape for case in CASES.values())
    compiling = Compiler(list(shapes), tmp_path_factory.mktemp("ptx"))
    yield compiling
    compiling.close()


@pytest.mark.parametrize("name", CASES)
def test_by_fragments_is_as_in_float64(name: str, compiler: Compiler) -> None:
    case = CASES[name]
    world = World(case.shape, case.ranks, case.without)
    x, y = world.tokens(sum(tokens for _, tokens in case.segments))
    pair = compiler.pair(case.shape)
    got = add_lora(world, pair, x, y, case.segments, case.programs)
    world.check(got, x, y, case.segments)


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [(THREE, (16, 8, 5)), (NARROW_64, (64, 32, 9)), (NARROW_64, (24, 60, 64)), (LONG_64, (8, 40))],
    ids=str,
)
def test_equal_inputs_give_equal_bits_however_the_batch_is_grouped(
    shape: Shape, ranks: tuple[int, ...], compiler: Compiler
) -> None:
    world, pair = World(shape, ranks), compiler.pair(shape)
    x, y = world.tokens(3)  # three tokens of slot 0, in turn
    alone = torch.cat(
        [add_lora(world, pair, x[i : i + 1], y[i : i + 1], [(0, 1)]) for i in range(3)]
    )
    assert not torch.equal(alone, y)
    for segments, programs in (
        ([(0, 2)], None),
        ([(0, 16)], 3),
        ([(0, 17)], 2),
        ([(1, 3), (0, 5), (-1, 2), (1, 1), (0, 1)], 7),
        ([(slot % len(ranks), 1) for slot in range(8)], 1),
    ):
        slots = torch.tensor([slot for slot, tokens in segments for _ in range(tokens)])
        ours = (slots == 0).nonzero().flatten()
        which = torch.arange(len(ours)) % 3
        all_x, all_y = world.tokens(len(slots))
        all_x[ours], all_y[ours] = x[which], y[which]
        got = add_lora(world, pair, all_x, all_y, segments, programs)
        assert torch.equal(got[ours].view(torch.int16), alone[which].view(torch.int16)), segments
        world.check(got, all_x, all_y, segments)


@pytest.mark.parametrize("ranks", [(3,), (16,), (20,), (64,)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_an_infinite_x_makes_infinite_what_depends_on_it_and_nothing_else(
    ranks: tuple[int, ...], tokens: int, compiler: Compiler
) -> None:
    shape = ONE if max(ranks) <= 16 else NARROW_64
    world = World(shape, ranks)
    x, y = world.tokens(tokens)
    x[0, 5] = float("inf")
    got = add_lora(world, compiler.pair(shape), x, y, [(0, tokens)])
    assert got[1:].isfinite().all()
    names = zip(world.names, got[0].split(shape.widths), strict=True)
    for name, its in names:
        found = world.stack.dense(0, LAYER, name)
        assert found is not None
        a, b, scaling = found
        want = (x[0].double() @ a.double().t()) @ b.double().t() * scaling  # ±inf, or NaN
        assert torch.equal(its.double().nan_to_num(7), want.nan_to_num(7))


def test_a_sum_too_large_for_float16_is_infinite_and_not_nan(compiler: Compiler) -> None:
    """As where x Aᵀ is rounded once; what that takes off is infinite too."""
    world = World(HALF, (1,))
    x, y = world.tokens(1)
    found = world.stack.dense(0, LAYER, "q_proj")
    assert found is not None
    a, b, _ = found
    x[0] = 60_000 * a[0].sign()
    got = add_lora(world, compiler.pair(HALF), x, y, [(0, 1)])
    assert torch.equal(got[0], b[:, 0].sign() * float("inf"))


@pytest.mark.parametrize(("scaling", "size"), [(32, 1500), (-32, 1500), (1 / 32, 50_000)])
def test_float16_holds_what_a_scaling_would_make_too_large(
    scaling: float, size: int, compiler: Compiler
) -> None:
    """Before it or after it, x Aᵀ is over 65,504; and the term is not."""
    world = World(HALF, (3, 16))
    world.stack.scaling.fill_(scaling)
    x, y = world.tokens(3)
    found = world.stack.dense(0, LAYER, "q_proj")
    assert found is not None
    a, _, _ = found
    x = (size * x.sign()).half()
    x[0] = size / 20 * a[0].sign()
    segments = [(0, 1), (1, 2)]
    got = add_lora(world, compiler.pair(HALF), x, y, segments)
    world.check(got, x, y, segments)


# What is wrong is seen: the checks above can fail.


def test_a_wrong_page_is_seen(compiler: Compiler) -> None:
    world, wrong = World(ONE, (16, 16)), World(ONE, (16, 16))
    x, y = world.tokens(2)
    segments = [(0, 1), (1, 1)]
    first = int(wrong.stack.start[0, wrong.stack.site(LAYER, "q_proj")]) * 512
    its = first // (PAGE_ELEMS * ROWS)
    wrong.stack.pages[0, its] = wrong.stack.pages[1, its]
    got = add_lora(wrong, compiler.pair(ONE), x, y, segments)
    with pytest.raises(AssertionError, match=r"token 0, q_proj: .* beyond"):
        world.check(got, x, y, segments)


def test_scratch_that_is_too_small_is_seen(compiler: Compiler) -> None:
    world, pair = World(ONE, (16, 16)), compiler.pair(ONE)
    with pytest.raises(Fault, match="outside of all buffers, behind partials"):
        add_lora(world, pair, *world.tokens(2), [(0, 1), (1, 1)], scratch=pair.scratch - 8)


NOTHING = "griddepcontrol.launch_dependents; //"


@pytest.mark.parametrize(
    ("which", "old", "new", "fault"),
    [
        ("shrink", "griddepcontrol.wait", NOTHING, "x is used before griddepcontrol.wait"),
        ("expand", "griddepcontrol.wait", NOTHING, "y is used before griddepcontrol.wait"),
        ("shrink", "bar.sync", NOTHING, "since the last barrier|nobody has written"),
        ("expand", "bar.sync", NOTHING, "since the last barrier|nobody has written"),
        ("expand", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32", r"cvt\.rz\.bf16x2\.f32"),
        ("expand", "m16n8k16", "m16n8k8", r"mma\.sync\.aligned\.m16n8k8"),
        ("shrink", ".shared", ".shared::cluster", r"\.shared::cluster"),
    ],
)
def test_a_program_that_does_what_it_must_not_is_refused(
    which: str, old: str, new: str, fault: str, compiler: Compiler
) -> None:
    world, pair = World(THREE_64, (64,)), compiler.pair(THREE_64)
    kernel: Kernel = getattr(pair, which)
    assert old in kernel.ptx
    wrong = replace(kernel, ptx=kernel.ptx.replace(old, new))
    pair = replace(pair, shrink=wrong) if which == "shrink" else replace(pair, expand=wrong)
    with pytest.raises((Fault, UnknownInstruction), match=fault):
        add_lora(world, pair, *world.tokens(2), [(0, 2)])


def by_hand(body: str, numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """``out[i]`` of 64 threads, from ``in[i]`` in %r1. %rd2 is where in[i] lies, %rd4 out[i]."""
    start = """.visible .entry f( .param .u64 f_param_0, .param .u64 f_param_1 )
    .reqntid 64
    { mov.u32 %r0, %tid.x; ld.param.b64 %rd1, [f_param_0]; ld.param.b64 %rd3, [f_param_1];
    mad.wide.u32 %rd2, %r0, 4, %rd1; mad.wide.u32 %rd4, %r0, 4, %rd3;
    ld.global.b32 {%r1}, [%rd2+0];
    """
    memory = Memory()
    at_in = memory.place("in", numbers)
    at_out = memory.place("out", np.zeros(64, np.uint32), is_output=True)
    program = Program(start.replace("{ mov", "{\nmov") + body + "\nret;\n}")
    Machine(program, memory, [at_in, at_out], shared_bytes=256, is_early=False).launch(1)
    return memory.read("out").view(np.uint32)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("st.global.b32 [%rd2+0], {%r1};", "in is written, which is no output"),
        ("st.global.b32 [%rd4+4], {%r1};", "1 threads are outside of all buffers, behind out"),
        ("ld.global.b32 {%r2}, [%rd2+-4];", "1 threads are outside"),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd2+0];", "not aligned"),
        ("add.s32 %r2, %r1, %r9;", "%r9 has not been written"),
        ("shl.b32 %r5, %r0, 2; ld.shared.b32 %r2, [%r5];", "nobody has written"),
        ("shl.b32 %r5, %r0, 2; st.shared.b32 [%r5+4], %r1;", "256 bytes of shared memory"),
        (
            "shl.b32 %r5, %r0, 2; st.shared.b32 [%r5], %r1; xor.b32 %r5, %r5, 128;"
            "ld.shared.b32 %r2, [%r5];",
            "another warp has written this",
        ),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bra $L1; $L1: ", "threads part"),
        ("\n$L1:\nbra.uni $L1;", "doesn't end"),
    ],
)
def test_the_machine_refuses(body: str, fault: str) -> None:
    with pytest.raises(Fault, match=fault):
        by_hand(body, np.arange(64, dtype=np.uint32))


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("div.s32 %r2, %r1, 3;", lambda a: int(a / 3)),
        ("rem.s32 %r2, %r1, 3;", lambda a: math.fmod(a, 3)),
        ("shr.s32 %r2, %r1, 1;", lambda a: a >> 1),
        ("shr.u32 %r2, %r1, 1;", lambda a: a % 2**32 >> 1),
        ("bfe.s32 %r2, %r1, 1, 3;", lambda a: ((a >> 1) & 7) - 8 * ((a >> 3) & 1)),
        ("bfe.u32 %r2, %r1, 1, 3;", lambda a: (a >> 1) & 7),
        ("mul.hi.s32 %r2, %r1, 715827883;", lambda a: a * 715827883 >> 32),
        ("mul.hi.u32 %r2, %r1, 715827883;", lambda a: a % 2**32 * 715827883 >> 32),
        ("prmt.b32 %r2, %r1, 305419896, 0x7610U;", lambda a: 0x1234 << 16 | a & 0xFFFF),
        ("setp.gt.s32 %p1, %r1, -2; selp.b32 %r2, %r1, 7, %p1;", lambda a: a if a > -2 else 7),
        ("setp.gt.u32 %p1, %r1, -2; selp.b32 %r2, %r1, 7, %p1;", lambda a: -1 if a == -1 else 7),
        ("setp.ne.f32 %p1, %r1, 0f7F800000; selp.b32 %r2, 1, 0, %p1;", lambda a: a >= 0),  # NaN
        ("mov.b32 %r2, 9; setp.ge.s32 %p1, %r1, 0; @%p1 mov.b32 %r2, 8;", lambda a: 9 - (a >= 0)),
        (
            "cvt.s64.s32 %rd5, %r1; shr.s64 %rd6, %rd5, 32; cvt.u32.u64 %r2, %rd6;",
            lambda a: a >> 32,
        ),
        (
            "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r2, {%rs2, %rs1};",
            lambda a: a << 16 | a >> 16 & 0xFFFF,
        ),
    ],
)
def test_the_machine_calculates(body: str, want: Callable[[int], float]) -> None:
    numbers = np.arange(-32, 32, dtype=np.int32)
    got = by_hand(body + "\nst.global.b32 [%rd4+0], {%r2};", numbers.view(np.uint32))
    assert got.tolist() == [int(want(int(number))) % 2**32 for number in numbers]
