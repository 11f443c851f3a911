"""Every kernel compiles for data-center GPUs, here, without one; and keeps to its registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from adaptercache.kernels.segments import RANK_CLASSES
from adaptercache.kernels.tuning import SGMV_RANKS

triton = pytest.importorskip("triton")

NEW = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
SPILL = 16
"""Bytes a thread. That of the decode expand at rank class 64 lies outside its loop."""
SPILL_OF_FRAGMENTS = {16: (0, 0), 64: (24, 160 if NEW else 184)}
"""Likewise, of their shrink and expand, by rank class: more programs to a multiprocessor outweigh
it. Triton 3.6 has more numbers ready ahead of all entries, which are read again once an entry."""

# In a process of its own: where the interpreter is on, there is nothing to compile.
PROGRAM = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import torch
from adaptercache.kernels import variants
from adaptercache.kernels.segments import RANK_CLASSES
from adaptercache.kernels.tuning import modules_at_once

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def stack_bytes(found, arch):
    kernel, values, warps = found.function, found.constants, found.num_warps
    names = [parameter.name for parameter in kernel.params]
    # Triton's own launch refuses one more, which neither the interpreter nor what follows notices.
    wanted = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    assert set(values) == wanted, set(values) ^ wanted
    signature, constants, attributes = {}, {}, {}
    for place, (name, parameter) in enumerate(zip(names, kernel.params)):
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constants[place,] = values[name]
            continue
        signature[name] = POINTERS.get(name, "i32")
        if name in ALIGNED:
            attributes[place,] = [["tt.divisibility", 16]]
    make, options = ASTSource, dict(num_warps=warps, num_stages=3)
    if by_fragments:
        from triton.experimental.gluon._runtime import GluonASTSource as make
        options["maxnreg"] = found.max_words
    source = make(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", text)[1])


for arch, rank, k, widths, dtype, by_fragments in json.loads(sys.argv[1]):
    short = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dtype]
    POINTERS = dict.fromkeys(("x", "arena", "y0", "y1", "y2"), short) | dict(
        pages="*i32", start="*i32", rank="*i32", scaling="*fp32", work="*i32", counters="*i32",
        partials="*fp32",
    )
    ALIGNED = {*("x", "arena", "y0", "y1", "y2", "partials"), *(
        ("x_stride", "y_stride0", "y_stride1", "y_stride2") if k % 16 == 0 else ()
    )}
    variants.has_pdl = lambda device: arch >= 90
    shape = (torch.device("cuda"), getattr(torch, dtype), 32768, 32)
    shape += (k, tuple(widths[: modules_at_once(rank)]), rank)
    if by_fragments:
        pairs = {"fragment": variants._fragments_pair(*shape)}
    else:
        pairs = {"sgmv": variants._sgmv_pair(*shape, False)}
        if rank in RANK_CLASSES:
            pairs["bgmv"] = variants._bgmv_pair(*shape, False, False)
    print(json.dumps({
        f"{name}_{which}": stack_bytes(getattr(pair, which), arch)
        for name, pair in pairs.items()
        for which in ("shrink", "expand")
    }))
"""


LLAMA = (4096, [4096, 1024, 1024], "bfloat16")
CASES = [(arch, rank, *LLAMA) for arch in (80, 90) for rank in SGMV_RANKS]
CASES += [
    (90, rank, *shape)
    for rank in (16, 32, 64)
    for shape in ((32, [32, 16, 16], "float32"), (97, [33], "bfloat16"), (768, [3072], "float16"))
]


def stack_bytes(*cases: tuple[object, ...], by_fragments: bool) -> list[dict[str, int]]:
    """Of each case's kernels."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([(*case, by_fragments) for case in cases])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(cases) :]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_compiles_and_spills_nothing_to_speak_of(case: tuple[object, ...]) -> None:
    (stack,) = stack_bytes(case, by_fragments=False)
    names = {"sgmv", "bgmv"} if case[1] in RANK_CLASSES else {"sgmv"}
    assert set(stack) == {f"{name}_{which}" for name in names for which in ("shrink", "expand")}
    assert max(stack.values()) <= SPILL, stack


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("rank_class", [16, 64])
def test_kernels_by_fragments_compile_and_spill_no_more_than_is_chosen(
    arch: int, rank_class: int
) -> None:
    pytest.importorskip("triton", minversion="3.6")  # Gluon, as they need it
    shapes = (LLAMA[:2], (14336, [4096]), (4096, [128, 128, 64]))
    cases = [(arch, rank_class, *shape, "bfloat16") for shape in shapes]
    found = stack_bytes(*cases, by_fragments=True)
    shrink, expand = SPILL_OF_FRAGMENTS[rank_class]
    for case, stack in zip(cases, found, strict=True):
        assert set(stack) == {"fragment_shrink", "fragment_expand"}
        assert stack["fragment_shrink"] <= shrink, (case, stack)
        assert stack["fragment_expand"] <= expand, (case, stack)


@pytest.mark.parametrize("arch", [89, 100, 120])
def test_kernels_compile_for_other_gpus_too(arch: int) -> None:
    both, of_rank_32 = stack_bytes((arch, 64, *LLAMA), (arch, 32, *LLAMA), by_fragments=False)
    assert set(both) == {"bgmv_shrink", "bgmv_expand", "sgmv_shrink", "sgmv_expand"}
    assert set(of_rank_32) == {"sgmv_shrink", "sgmv_expand"}
    pytest.importorskip("triton", minversion="3.6")
    (stack,) = stack_bytes((arch, 64, *LLAMA), by_fragments=True)
    assert set(stack) == {"fragment_shrink", "fragment_expand"}


# A GPU of 99 KiB of shared memory a program, as A10, L4 and L40S have. What a driver would load is
# looked at instead.
LITTLE_SHARED_MEMORY = """
import json, logging, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 99 << 10}

    def load_binary(self, name, kernel, shared, device):
        return 0, 0, 64, 0, 1024


class Driver:
    utils = Utils()
    launcher_cls = lambda self, source, metadata: None

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 89, 32)

    def get_current_stream(self, device):
        return 0


driver.set_active(Driver())
logging.basicConfig(level=logging.INFO)
from adaptercache.kernels import binary, variants
from adaptercache.kernels.segments import RANK_CLASSES
from adaptercache.kernels.tuning import modules_at_once

variants.has_pdl = lambda device: False
binary._resident = lambda *args: 1
for dtype, rank, widths in json.loads(sys.argv[1]):
    shape = (torch.device("cuda"), getattr(torch, dtype), 32768, 32, 4096)
    shape += (tuple(widths[: modules_at_once(rank)]), rank)
    pairs = [variants._sgmv_pair(*shape, False)]
    if rank in RANK_CLASSES:
        pairs.append(variants._bgmv_pair(*shape, False, False))
    for pair in pairs:
        for its in (pair.shrink, pair.expand):
            its.compile(aligned=True, pdl=False)
            compiled, _ = its.compile(aligned=True, pdl=False)  # Triton remembers what didn't fit
            name = its.function.fn.__name__
            print(dtype, rank, len(widths), name, compiled.metadata.shared, flush=True)
"""


def test_what_needs_more_shared_memory_than_there_is_does_with_less() -> None:
    ranks = (64, 512)
    cases = [(dtype, rank, [4096]) for dtype in ("float32", "float16") for rank in ranks]
    qkv_at_32 = ("float32", 32, [4096, 1024, 1024])
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_SHARED_MEMORY, json.dumps([*cases, qkv_at_32])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    shared = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(shared) == 4 * len(cases) + 2
    assert max(shared) <= 99 << 10
    assert "sgmv_shrink: shared memory is short, so it takes" in done.stderr
