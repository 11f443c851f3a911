"""A Triton kernel with all its constants chosen: compiled once, launched with little ado."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

__all__ = ["INTERPRETED", "Address", "Binary", "address", "has_mma", "has_pdl"]

log = logging.getLogger(__name__)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Address = int | Tensor
"""What a launch takes for a pointer: the number; for the interpreter the tensor."""


def address(tensor: Tensor) -> Address:
    return tensor if INTERPRETED else tensor.data_ptr()


@cache
def has_mma(device: torch.device) -> bool:
    """Whether its tensor cores have ``mma.m16n8k16``, as NVIDIA's since Ampere."""
    return _generation(device) >= 8


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether it has programmatic dependent launch.

    A kernel may then start before the one ahead of it has ended. It waits for that before it reads
    x, y or partials, and before it writes; weights, tables and work it reads at once, since they
    were written before the batch's first kernel, which is launched without the attribute. One that
    finds nothing to do waits too, before it ends (`jit.end_in_turn`).
    """
    return _generation(device) >= 9


def _generation(device: torch.device) -> int:
    """Of NVIDIA's; 0: none. AMD's GPUs count otherwise."""
    if INTERPRETED or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


@dataclass(slots=True)
class Binary:
    """One kernel for one device, its constants, and the types of its arguments.

    ``types``: a dtype for a pointer, a number for a number. ``is_persistent``: its programs stride
    over the work, so no more of them are launched than the GPU holds at once: a program that had to
    wait for another's end would do its share alone. ``max_words`` of a thread: the assembler
    takes more than it needs where it doesn't know that occupancy is worth more.
    """

    function: Any
    device: torch.device
    constants: dict[str, Any]
    types: tuple[Any, ...]
    num_warps: int
    max_words: int | None = None
    is_persistent: bool = False
    _compiled: dict[tuple[bool, bool], tuple[Any, int]] = field(default_factory=dict)
    _in_order: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        names = self.function.arg_names
        self._in_order = tuple(self.constants[name] for name in names if name in self.constants)

    def launch(
        self, programs: int, args: tuple[Address | int, ...], *, aligned: bool, pdl: bool
    ) -> None:
        """Queue it. ``aligned``: all pointers and strides that Triton looks at are multiples of 16.

        Triton's own launch looks up the binary by the types and values of all arguments, and asks
        the driver about each pointer, which takes longer than all else here.
        """
        if INTERPRETED:
            self.function[min(programs, 16) if self.is_persistent else programs,](
                *args, **self.constants
            )
            return
        compiled, resident = self._compiled.get((aligned, pdl)) or self.compile(
            aligned=aligned, pdl=pdl
        )
        if self.is_persistent and programs > resident:
            programs = resident
        compiled[programs, 1, 1](*args, *self._in_order)

    def compile(self, *, aligned: bool, pdl: bool) -> tuple[Any, int]:
        """What Triton compiled, and how many programs of it the GPU holds at once."""
        types = self.types if aligned else tuple(_unaligned(type) for type in self.types)
        options: dict[str, Any] = {"num_warps": self.num_warps, "maxnreg": self.max_words}
        if pdl:
            options["launch_pdl"] = True
        constants = self.constants
        while True:
            compiled = self.function.warmup(*types, grid=(1, 1, 1), **constants, **options)
            try:
                # Loads it, and so finds what it takes; `run` says only once that it doesn't fit.
                compiled._init_handles()
                break
            except OutOfResources:  # stages are chosen for GPUs with more shared memory
                stages = constants.get("STAGES", 1) - 1
                if not stages:
                    raise
                name = self.function.__name__
                log.info(
                    "%s: shared memory is short, so it takes %d stages, and longer", name, stages
                )
                constants = {**constants, "STAGES": stages}
        words, shared = compiled.n_regs, compiled.metadata.shared
        resident = _resident(self.device, words, shared, self.num_warps)
        self._compiled[aligned, pdl] = found = (compiled, resident)
        return found


def _unaligned(type: Any) -> Any:
    """The same kind of argument, of a value that is no multiple of 16."""
    return 2 if isinstance(type, int) else torch.empty(2, dtype=type)[1:]


def _resident(device: torch.device, thread_words: int, shared_bytes: int, num_warps: int) -> int:
    """Programs that a GPU holds at once, by CUDA's rules of occupancy.

    ``thread_words``: of 4 bytes that a thread keeps on the multiprocessor.
    """
    properties = torch.cuda.get_device_properties(device)
    a_warp = -(-thread_words * 32 // 256) * 256
    # A multiprocessor has four parts, each with its own registers; 65,536 in all since Kepler, and
    # some releases of torch don't say so.
    warps = getattr(properties, "regs_per_multiprocessor", 65536) // 4 // a_warp * 4
    most = (
        warps // num_warps,
        properties.max_threads_per_multi_processor // (32 * num_warps),
        properties.shared_memory_per_multiprocessor // (shared_bytes + 1024),
        32,
    )
    return max(1, min(most)) * _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
