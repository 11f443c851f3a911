"""Ahead of the first step: kernels compiled, and the memory that a step's launches share made."""

from __future__ import annotations

from collections.abc import Sequence

from adaptercache.kernels.integers import integer
from adaptercache.kernels.segments import RANK_CLASSES, rank_class_of
from adaptercache.kernels.stack import LoraStack
from adaptercache.kernels.tuning import SGMV_RANKS, rows_alike
from adaptercache.kernels.work import LONG, SMALL

__all__ = ["SHARE_THEIR_INPUT", "warmup"]

SHARE_THEIR_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Modules of one parent that are given the same input, by the names that families give them."""


def warmup(
    stack: LoraStack, groups: Sequence[Sequence[str]] | None = None, num_rows: int = 8192
) -> None:
    """Compile all that `add_lora` may launch for these groups, and make its scratch.

    After it, no batch of up to ``num_rows`` rows compiles or allocates anything. It takes a minute
    or two on a machine's first time, and a second or two once Triton's cache on disk has it all. On
    a CPU there is nothing to do.

    Args:
        stack: whose arena the kernels will read.
        groups: the modules of each call of `add_lora`; None: those that share their input at once
            (q, k and v; gate and up), and every other module by itself.
        num_rows: of the largest batch.

    Raises:
        ValueError: a module that the layout has not, a group of none or whose inputs differ in
            width, or ``num_rows`` under 0.
        TypeError: ``groups`` that are strings, or ``num_rows`` that is no integer.
    """
    num_rows = integer(num_rows, f"num_rows is {num_rows!r:.80}")
    if num_rows < 0:
        raise ValueError(f"num_rows is {num_rows}: 0 at least")
    if isinstance(groups, str):
        raise TypeError(f"groups is one string: give [({groups!r},)]")
    widths = _widths(stack, _default(stack) if groups is None else groups)
    if stack.device.type != "cuda":
        return
    from adaptercache.kernels.variants import compile_group, scratch_of  # triton: only where used

    largest = rank_class_of(stack.layout.max_rank)
    wanted = []
    for k, outs in sorted(widths):
        for rank in [each for each in SGMV_RANKS if each <= largest]:
            rows = 0 if rank in RANK_CLASSES else SMALL
            while rows < num_rows:
                most = rows_alike(len(outs) * k + sum(outs), rank, rows + 1)
                rows = num_rows if most > LONG else min(most, num_rows)
                wanted.append((k, outs, rank, rows))
    sizes = [(*scratch_of(stack, *each), each[-1]) for each in wanted]
    # All of it at once: what is outgrown would be kept, for graphs that were captured with it.
    stack.scratch(
        max((rows * sums for sums, _, rows in sizes), default=0),
        max((rows * zeros for _, zeros, rows in sizes), default=0),
    )
    for each in wanted:
        compile_group(stack, *each)


def _default(stack: LoraStack) -> list[tuple[str, ...]]:
    modules = stack.layout.modules
    groups = [tuple(m for m in group if m in modules) for group in SHARE_THEIR_INPUT]
    grouped = {module for group in groups for module in group}
    return [g for g in groups if g] + [(m,) for m in modules if m not in grouped]


def _widths(stack: LoraStack, groups: Sequence[Sequence[str]]) -> set[tuple[int, tuple[int, ...]]]:
    """In and out of each group, in every layer that has it."""
    found = set()
    sites = {(site.layer, site.module) for site in stack.layout.sites}
    for modules in groups:
        for layer in range(stack.layout.num_layers):
            if (
                not modules
                or modules[0] not in stack.layout.modules
                or (layer, modules[0]) in sites
            ):
                group = stack.group(layer, modules)
                found.add((group.in_features, group.widths))
    return found
