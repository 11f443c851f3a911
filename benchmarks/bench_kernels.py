"""How long add_lora's kernels take on a GPU, beside the byte floor and the best peer.

Every case is checked against float64 before it is timed. Decode: one CUDA graph, captured from an
empty batch, is replayed over layers whose weights, inputs and outputs exceed the L2. Prefill:
launches queued behind a sleeping GPU, over the same kind of rotation. The floor is the bytes of A
and B of the batch's adapters, of x, and of y twice, over 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator

import torch
import triton

import record
from kernel_cases import Case, all_cases
from kernel_compile import RULE, compile_all
from kernel_host import host_times
from kernel_report import Row, summary
from kernel_world import World

QUICK = re.compile(
    r"decode/\w+/(r16|rmix)/t(1|64|256)/(distinct|a8)|prefill/[a-z_]+/r16/t2048/a4|.*/slots.*"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a few cases of each kind")
    parser.add_argument("--only", default="", help="cases whose name matches this pattern")
    parser.add_argument("--peer", choices=("vllm", "sglang"), help="its kernels on the same cases")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels needs a CUDA device, and there is none here")
    cases = [case for case in all_cases() if re.search(options.only, case.name)]
    if options.quick:
        cases = [case for case in cases if QUICK.fullmatch(case.name)]
    # Of cases that were picked by name nothing is written: a file has all, or all quick ones.
    bench = "" if options.only else "kernels_quick" if options.quick else "kernels"
    if options.peer:
        from kernel_peers import measure_peer  # the peer: only where it is asked for

        measure_peer(options.peer, cases, bench)
        return
    print(*compile_all((case, RULE) for case in cases), sep="\n")
    rows = []
    for row in measure(cases):
        print(row.line(), flush=True)
        rows.append(row)
    host = host_times()
    print("\n".join(summary(rows)))
    print(*(f"{name}: {figures['us']} us" for name, figures in host.items()), sep="\n")
    found = {row.case.name: row.figures() for row in rows}
    if bench:
        print("written:", record.write(bench, {**found, **host}, on_gpu=True))
    if len(rows) < len(cases):
        raise SystemExit(f"{len(cases) - len(rows)} cases were wrong: see above")


def measure(cases: list[Case]) -> Iterator[Row]:
    """One row a case; cases of one shape, rank and number of slots share their adapters."""

    def key(case: Case) -> tuple[str, str, str, int]:
        return (case.phase, case.shape, case.rank, case.slots)

    for _, group in itertools.groupby(sorted(cases, key=key), key):
        alike = list(group)
        world = World(alike)
        for case in alike:
            try:
                yield Row(case, world.measure(case))
            except AssertionError as e:
                print(f"WRONG, and so not timed: {e}", flush=True)
        del world
        torch.cuda.empty_cache()


if __name__ == "__main__":
    print("triton", triton.__version__)
    main()
