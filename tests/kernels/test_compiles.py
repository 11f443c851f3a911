"""Every kernel compiles for data-center GPUs, here, without one; and keeps to its registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from adaptercache.kernels.segments import RANK_CLASSES

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
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
import torch
from adaptercache.kernels import variants
from adaptercache.kernels.tuning import modules_at_once

arch, rank_class, k, widths, dtype = json.loads(sys.argv[1])
SHORT = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dtype]
POINTERS = dict.fromkeys(("x", "arena", "y0", "y1", "y2"), SHORT) | dict(
    pages="*i32", start="*i32", rank="*i32", scaling="*fp32", work="*i32", counters="*i32",
    partials="*fp32",
)
ALIGNED = {*("x", "arena", "y0", "y1", "y2", "partials"), *(
    ("x_stride", "y_stride0", "y_stride1", "y_stride2") if k % 16 == 0 else ()
)}
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
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=warps, num_stages=3)
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", text)[1])


variants.has_pdl = lambda device: arch >= 90
shape = (torch.device("cuda"), getattr(torch, dtype), 32768, 32)
shape += (k, tuple(widths[: modules_at_once(rank_class)]), rank_class)
few, many = variants._bgmv_pair(*shape, False, False), variants._sgmv_pair(*shape, False)
found = {}
if fragments := dtype == "bfloat16" and variants._fragments_pair(*shape):
    found = {
        "fragment_shrink": stack_bytes(fragments.shrink, arch),
        "fragment_expand": stack_bytes(fragments.expand, arch),
    }
print(json.dumps(found | {
    "bgmv_shrink": stack_bytes(few.shrink, arch),
    "bgmv_expand": stack_bytes(few.expand, arch),
    "sgmv_shrink": stack_bytes(many.shrink, arch),
    "sgmv_expand": stack_bytes(many.expand, arch),
}))
"""


LLAMA = (4096, [4096, 1024, 1024], "bfloat16")
CASES = [(arch, rank_class, *LLAMA) for arch in (80, 90) for rank_class in RANK_CLASSES]
CASES += [
    (90, rank_class, *shape)
    for rank_class in (16, 64)
    for shape in ((32, [32, 16, 16], "float32"), (97, [33], "bfloat16"), (768, [3072], "float16"))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_compiles_and_spills_nothing_to_speak_of(case: tuple[object, ...]) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(case)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    stack = json.loads(done.stdout.splitlines()[-1])
    _, rank_class, k, _, dtype = case
    kinds = ["bgmv", "sgmv", *["fragment"] * (dtype == "bfloat16" and rank_class <= 64 and k > 97)]
    assert set(stack) == {f"{kind}_{half}" for kind in kinds for half in ("shrink", "expand")}
    assert max(stack.values()) <= SPILL, stack
