"""Every kernel compiles for data-center GPUs, here, without one; and keeps to its registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SPILL = 16
"""Bytes a thread. That of the decode expand at rank class 64 lies outside its loop."""

# In a process of its own: where the interpreter is on, there is nothing to compile.
PROGRAM = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from adaptercache.kernels import bgmv, sgmv
from adaptercache.kernels.tuning import bgmv_blocks, modules_at_once, sgmv_blocks

POINTERS = dict(
    x="*bf16", arena="*bf16", pages="*i32", start="*i32", rank="*i32", scaling="*fp32",
    work="*i32", partials="*fp32", y0="*bf16", y1="*bf16", y2="*bf16",
)
STRIDES = ("x_stride", "y_stride0", "y_stride1", "y_stride2", "table_stride", "capacity", "tokens")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def stack_bytes(kernel, values, warps, arch):
    names = [parameter.name for parameter in kernel.params]
    signature, constants, attributes = {}, {}, {}
    for place, (name, parameter) in enumerate(zip(names, kernel.params)):
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constants[place,] = values[name]
            continue
        signature[name] = POINTERS.get(name, "i32")
        if name in POINTERS or name in STRIDES:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=warps, num_stages=3)
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", text)[1])


arch, rank_class = map(int, sys.argv[1:])
k, widths = 4096, [4096, 1024, 1024][: modules_at_once(rank_class)]
common = {f"N{m}": widths[m] if m < len(widths) else 0 for m in range(3)} | dict(
    K=k, M=len(widths), RANK=rank_class, PAGE_ELEMS=32768, ROWS=32, ALIGNED=True, PDL=arch >= 90,
    DOT_IN_FLOAT32=False,
)
few = bgmv_blocks(k, widths, rank_class)
splits = k // few.bk
common_few = common | dict(
    BK=few.bk, DOT_BK=few.dot_bk, BN=few.bn, DOT_BN=few.dot_bn, SPLITS=splits,
    SPLITS_POW2=triton.next_power_of_2(splits),
)
many = sgmv_blocks(k, widths, rank_class, 2048)
common_many = common | dict(
    BK=many.bk, BN=many.bn, SPLITS=many.splits, STRIP=many.strip, STAGES=many.stages, BM=sgmv.TILE
)
print(json.dumps({
    "bgmv_shrink": stack_bytes(bgmv.bgmv_shrink, common_few, few.shrink_warps, arch),
    "bgmv_expand": stack_bytes(bgmv.bgmv_expand, common_few, few.expand_warps, arch),
    "sgmv_shrink": stack_bytes(sgmv.sgmv_shrink, common_many, many.shrink_warps, arch),
    "sgmv_expand": stack_bytes(sgmv.sgmv_expand, common_many, many.expand_warps, arch),
}))
"""


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("rank_class", [16, 64, 128, 256, 512])
def test_every_kernel_compiles_and_spills_nothing_to_speak_of(arch: int, rank_class: int) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(arch), str(rank_class)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    stack = json.loads(done.stdout.splitlines()[-1])
    assert set(stack) == {"bgmv_shrink", "bgmv_expand", "sgmv_shrink", "sgmv_expand"}
    assert max(stack.values()) <= SPILL, stack
