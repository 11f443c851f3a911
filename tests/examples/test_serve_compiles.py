"""The engine's kernels compile for data-center GPUs, here, without one, and spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

EXAMPLES = Path(__file__).parents[2] / "examples"

# In a process of its own: where the interpreter is on, there is nothing to compile. What would be
# launched is compiled instead, as the launches' own arguments say.
PROGRAM = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, sys.argv[1])
from serve_paged import attend_in_place
from serve_fused import add_and_norm, rotate_and_store, silu_and_multiply

arch, name, rows, heads, kv_heads, head_dim, width, inner = json.loads(sys.argv[2])
dtype = getattr(torch, name)
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
found = {}


def compile_it(kernel, *arguments, grid, warmup, **others):
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = (*arguments, *[None] * len(kernel.params))[place]
        value = others.pop(parameter.name, value)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[place,] = "constexpr", value
            continue
        is_number = isinstance(value, int)
        number = "i32" if is_number else "fp32"
        signature[parameter.name] = TYPES[value.dtype] if torch.is_tensor(value) else number
        is_aligned = value % 16 == 0 if is_number else torch.is_tensor(value)
        if is_aligned and not (parameter.do_not_specialize_on_alignment
                               or parameter.do_not_specialize):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=others)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(f"{what}:(\\\\d+)", text)[1]) for what in ("REG", "STACK"))
    warps = others.get("num_warps", 4)
    case = f"{kernel.fn.__name__} {len(found)}"
    found[case] = [registers * 32 * warps, compiled.metadata.shared, stack]


JITFunction.run = compile_it
x, numbers = torch.empty(rows, width, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
view = torch.empty(4, 2, 16, kv_heads, head_dim, dtype=dtype)
add_and_norm(x, None, x[0], 1e-5)
add_and_norm(x, x, x[0], 1e-5)
silu_and_multiply(torch.empty(rows, 2 * inner, dtype=dtype))
qkv = torch.empty(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
q = rotate_and_store(qkv, torch.empty(rows, 2, head_dim, dtype=dtype), view, numbers, numbers)
tables, tiles = numbers.view(rows, 1).repeat(1, 32), numbers.view(rows, 1).repeat(1, 3)
attend_in_place(q, view, tables, numbers, None)
attend_in_place(q, view, tables, numbers, tiles)
print(json.dumps(found))
"""

LLAMA_8B = (32, 8, 128, 4096, 14336)  # heads, kv_heads, head_dim, width, inner
LLAMA_70B = (64, 8, 128, 8192, 28672)
ODD = (7, 1, 48, 97, 33)
CASES = [
    (90, "bfloat16", 64, *LLAMA_8B),
    (90, "bfloat16", 1, *LLAMA_8B),
    (80, "float16", 64, *LLAMA_70B),
    (90, "float32", 64, *LLAMA_8B),
    (90, "float16", 3, *ODD),
]
AT_ONCE = {"_attend_kernel 4": 4, "_attend_kernel 5": 2}
"""Programs of attention on a multiprocessor: of rows that decode, which hide each other's waits,
and of tiles."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_of_the_engine_compiles_and_spills_nothing(case: tuple[object, ...]) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLES), json.dumps(case)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    for kernel, (_, _, stack) in found.items():
        assert stack == 0, kernel
    if case[1:3] == ("bfloat16", 64):
        for kernel, programs in AT_ONCE.items():
            registers, shared, _ = found[kernel]
            assert programs * registers <= 1 << 16
            assert programs * shared <= 220 << 10
