"""Try block sizes around the rule's (`adaptercache/kernels/tuning.py`), one field at a time: in
decode those of `fragments`, in prefill those of `sgmv`.

Prints, for each case, the time of the rule's choice and of every change to it that is faster. The
rule is then changed by hand, where a change helps a kind of case and hurts none.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from dataclasses import asdict

import torch

from adaptercache.kernels import rank_class_of
from adaptercache.kernels.tuning import fragment_blocks, sgmv_blocks
from adaptercache.kernels.work import LONG
from kernel_cases import SHAPES, Case, all_cases
from kernel_compile import RULE, Blocks, compile_all
from kernel_world import World

# Programs of other sizes than these were never the faster ones.
FIELDS = {
    "decode": {
        "bk": (64, 128),
        "strips": (1, 2),
        "shrink_warps": (2, 4, 8),
        "expand_warps": (1, 2, 4),
        "shrink_words": (80, 96, 128),
        "expand_words": (80, 96, 128, 168),
    },
    "prefill": {
        "bk": (64, 128, 256),
        "splits": (1, 2, 4, 8),
        "bn": (64, 128, 256),
        "shrink_strip": (32, 64),
        "expand_strip": (16, 32, 64),
        "shrink_warps": (4, 8),
        "expand_warps": (4, 8),
        "shrink_stages": (2, 3, 4),
        "expand_stages": (2, 3, 4),
    },
}
USUAL = r"decode/\w+/r(16|64)/t(64|256)/(distinct|a8|zipf)|prefill/\w+/r(16|64)/t(2048|8192)/a4"


def changes(case: Case) -> Iterator[Blocks]:
    """The rule's choice, and each that differs from it in one field."""
    yield RULE
    shape = SHAPES[case.shape]
    key = (shape.k, shape.widths, rank_class_of(case.max_rank))
    blocks = (
        fragment_blocks(*key, page_elems=shape.page_bytes // 2)
        if case.phase == "decode"
        else sgmv_blocks(*key, itemsize=2, is_long=case.tokens > LONG)
    )
    if blocks is None:
        return
    chosen = asdict(blocks)
    for name, values in FIELDS[case.phase].items():
        for value in values:
            if value != chosen[name]:
                yield Blocks(((name, value),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default=USUAL, help="cases whose whole name matches this pattern")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune_kernels needs a CUDA device, and there is none here")
    cases = [case for case in all_cases() if re.fullmatch(options.only, case.name)]
    if not cases:
        raise SystemExit(f"no case's name matches {options.only!r}")
    print(*compile_all((case, blocks) for case in cases for blocks in changes(case)), sep="\n")

    def key(case: Case) -> tuple[str, str, str, int]:
        return (case.phase, case.shape, case.rank, case.slots)

    for _, group in itertools.groupby(sorted(cases, key=key), key):
        alike = list(group)
        world = World(alike)
        for case in alike:
            tune(world, case)
        del world
        torch.cuda.empty_cache()


def tune(world: World, case: Case) -> None:
    """Print what is faster than the rule for one case."""
    measured: list[tuple[float, Blocks]] = []
    for blocks in changes(case):
        blocks.choose(world.stack)
        try:
            measured.append((world.measure(case, milliseconds=5).us, blocks))
        except (AssertionError, RuntimeError) as e:  # wrong, or too large for the GPU
            print(f"{case.name} {blocks.changes}: {e}")
    ours = measured[0][0]
    print(f"{case.name}: {ours:.2f} us by the rule, target {case.limit_us:.2f}", flush=True)
    for us, blocks in sorted(measured, key=lambda pair: pair[0]):
        if us < 0.99 * ours:
            print(f"   {us:8.2f} us  {blocks.changes}", flush=True)


if __name__ == "__main__":
    main()
