"""Try block sizes around the rule's (`adaptercache/kernels/tuning.py`), one field at a time: in
decode those of `fragments`, in prefill those of `sgmv`. Or those that ``--try`` names.

Prints, for each case, the time of the rule's choice and of every change to it that is faster. The
rule is then changed by hand, where a change helps a kind of case and hurts none.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from adaptercache.kernels.tuning import fragment_blocks, sgmv_blocks
from adaptercache.kernels.work import LONG
from kernel_cases import SHAPES, Case, all_cases
from kernel_compile import RULE, Blocks, compile_all, kernels_rank
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
USUAL = r"decode/\w+/r(16|64)/t(64|256)/(distinct|a8|zipf)|prefill/\w+/r(16|32|64)/t(2048|8192)/a4"


def changes(case: Case, tried: Sequence[Blocks]) -> Iterator[Blocks]:
    """The rule's choice, and ``tried``; where there are none, each that differs in one field."""
    yield RULE
    yield from tried
    if tried:
        return
    shape = SHAPES[case.shape]
    key = (shape.k, shape.widths, kernels_rank(case))
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
    parser.add_argument(
        *("--try", "-t"),
        dest="tried",
        type=_blocks,
        action="append",
        default=[],
        help="these alone, as in bk=64,splits=4; may be given several times",
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune_kernels needs a CUDA device, and there is none here")
    cases = [case for case in all_cases() if re.fullmatch(options.only, case.name)]
    if not cases:
        raise SystemExit(f"no case's name matches {options.only!r}")
    each = ((case, blocks) for case in cases for blocks in changes(case, options.tried))
    print(*compile_all(each), sep="\n")

    def key(case: Case) -> tuple[str, str, str, int]:
        return (case.phase, case.shape, case.rank, case.slots)

    for _, group in itertools.groupby(sorted(cases, key=key), key):
        alike = list(group)
        world = World(alike)
        for case in alike:
            tune(world, case, options.tried)
        del world
        torch.cuda.empty_cache()


def _blocks(text: str) -> Blocks:
    known = {name for fields in FIELDS.values() for name in fields}
    pairs = [pair.partition("=") for pair in text.split(",")]
    if unknown := {name for name, _, _ in pairs} - known:
        raise argparse.ArgumentTypeError(f"no field is named {', '.join(sorted(unknown))}")
    return Blocks(tuple((name, int(value)) for name, _, value in pairs))


def tune(world: World, case: Case, tried: Sequence[Blocks]) -> None:
    """Print what is faster than the rule for one case; of those to be tried, all."""
    measured: list[tuple[float, Blocks]] = []
    for blocks in changes(case, tried):
        blocks.choose(world.stack)
        try:
            measured.append((world.measure(case, milliseconds=5).us, blocks))
        except (AssertionError, RuntimeError) as e:  # wrong, or too large for the GPU
            print(f"{case.name} {blocks.changes}: {e}")
    ours = measured[0][0]
    print(f"{case.name}: {ours:.2f} us by the rule, target {case.limit_us:.2f}", flush=True)
    for us, blocks in sorted(measured, key=lambda pair: pair[0]):
        if tried or us < 0.99 * ours:
            print(f"   {us:8.2f} us  {blocks.changes}", flush=True)


if __name__ == "__main__":
    main()
