"""Compile the kernels of many cases at once, in processes of their own, into Triton's cache."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from adaptercache.kernels import LoraStack, rank_class_of, variants
from adaptercache.kernels.tuning import fragment_blocks, rows_alike, sgmv_blocks, sgmv_rank
from adaptercache.layout import ArenaShape
from kernel_cases import SHAPES, Case


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes that differ from the rule's: names of fields, and their values."""

    changes: tuple[tuple[str, int], ...] = ()

    def choose(self, stack: LoraStack | None = None) -> None:
        """Make every launch from now on use them, over ``stack`` too where it was used before."""

        def changed(rule: Callable[..., Any]) -> Callable[..., Any]:
            def blocks(*shape: Any, **kind: Any) -> Any:
                its = rule(*shape, **kind)
                names = {field.name for field in fields(its)} if its is not None else set()
                return (
                    replace(its, **{n: v for n, v in self.changes if n in names}) if its else None
                )

            return blocks

        vars(variants)["fragment_blocks"] = changed(fragment_blocks)
        vars(variants)["sgmv_blocks"] = changed(sgmv_blocks)
        variants._fragments_pair.cache_clear()
        variants._sgmv_pair.cache_clear()
        if stack is not None:
            stack._groups.clear()


RULE = Blocks()


@dataclass(frozen=True, slots=True)
class _Stack:
    """As much of a LoraStack as decides what is compiled."""

    shape: ArenaShape
    device: torch.device
    dtype: torch.dtype = torch.bfloat16


def kernels_rank(case: Case) -> int:
    """That its kernels are compiled for."""
    of_batch = rank_class_of if case.phase == "decode" else sgmv_rank
    return of_batch(case.max_rank)


def _compile(shape_name: str, rank: int, num_rows: int, blocks: Blocks, arena_rows: int) -> str:
    """What went wrong, or nothing."""
    shape = SHAPES[shape_name]
    stack: Any = _Stack(ArenaShape(arena_rows, 1, shape.page_bytes, 2), torch.device("cuda", 0))
    blocks.choose()
    try:
        variants.compile_group(stack, shape.k, shape.widths, rank, num_rows)
    except Exception as e:  # a choice that doesn't fit the GPU: told, and left out
        return f"{shape_name} {rank} {blocks.changes}: {e!r}"
    return ""


def _rows_alike(case: Case, rank: int) -> int:
    shape = SHAPES[case.shape]
    elements = len(shape.widths) * shape.k + sum(shape.widths)
    return rows_alike(elements, rank, case.tokens)


def compile_all(wanted: Iterable[tuple[Case, Blocks]], arena_rows: int | None = None) -> list[str]:
    """Compile what these cases launch with these blocks, or would in a capture. Returns what went
    wrong."""
    jobs = {
        (
            *(case.shape, rank, _rows_alike(case, rank), blocks),
            arena_rows or SHAPES[case.shape].rows,
        )
        for case, blocks in wanted
        for rank in (kernels_rank(case), rank_class_of(case.max_rank))
    }
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=spawn) as pool:
        return [error for error in pool.map(_compile, *zip(*jobs, strict=True)) if error]


def compile_ahead(rows: Sequence[int], arena_rows: Sequence[int] = (32,)) -> threading.Thread:
    """Compile what Llama-3-8B's groups need for so many rows and ranks up to 16, over arenas of
    these shapes, by all cores and meanwhile. What fails is compiled again by whoever needs it."""
    shapes = ("qkv", "o_proj", "gate_up", "down")
    cases = [Case("decode", shape, "16", each, "distinct") for shape in shapes for each in rows]

    def compile_them() -> None:
        for each in arena_rows:
            for wrong in compile_all([(case, RULE) for case in cases], each):
                print(f"not compiled ahead: {wrong}", flush=True)

    thread = threading.Thread(target=compile_them)
    thread.start()
    return thread
