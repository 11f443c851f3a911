"""A Triton kernel with all its constants chosen: compiled once, launched with little ado."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["INTERPRETED", "Binary", "has_pdl"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether it has programmatic dependent launch.

    A kernel may then start before the one ahead of it has ended. It waits for that before it reads
    x, y or partials, and before it writes; weights, tables and work it reads at once, since they
    were written before the batch's first kernel, which is launched without the attribute.
    """
    return not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


@dataclass(slots=True)
class Binary:
    """One kernel, its constants, and the types of its arguments.

    ``types``: a dtype for a pointer, a number for a number. ``is_persistent``: its programs stride
    over the work, so no more of them are launched than the GPU holds at once: a program that had to
    wait for another's end would do its share alone.
    """

    function: Any
    constants: dict[str, Any]
    types: tuple[Any, ...]
    num_warps: int
    is_persistent: bool = False
    _compiled: dict[tuple[torch.device, bool], tuple[Any, int]] = field(default_factory=dict)
    _in_order: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        names = self.function.arg_names
        self._in_order = tuple(self.constants[name] for name in names if name in self.constants)

    def launch(
        self,
        programs: int,
        args: tuple[Tensor | int, ...],
        device: torch.device,
        *,
        aligned: bool,
        pdl: bool,
    ) -> None:
        """Queue it. ``aligned``: all pointers and strides that Triton looks at are multiples of 16.

        Triton's own launch looks up the binary by the types and values of all arguments, and asks
        the driver about each pointer, which takes longer than all else here. Among aligned ones
        nothing is left to look at.
        """
        if aligned and not INTERPRETED:
            compiled, resident = self._compiled.get((device, pdl)) or self.compile(device, pdl=pdl)
            if self.is_persistent:
                programs = min(programs, resident)
            numbers = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
            compiled[programs, 1, 1](*numbers, *self._in_order)
            return
        if self.is_persistent:
            programs = min(programs, 16 if INTERPRETED else 8 * _multiprocessors(device))
        options = {} if INTERPRETED else self._options(pdl)
        self.function[programs,](*args, **self.constants, **options)

    def compile(self, device: torch.device, *, pdl: bool) -> tuple[Any, int]:
        """What Triton compiled, and how many programs of it the GPU holds at once."""
        compiled = self.function.warmup(
            *self.types, grid=(1, 1, 1), **self.constants, **self._options(pdl)
        )
        compiled.run  # noqa: B018  loads it, and so finds what it takes
        resident = _resident(device, compiled.n_regs, compiled.metadata.shared, self.num_warps)
        self._compiled[device, pdl] = found = (compiled, resident)
        return found

    def _options(self, pdl: bool) -> dict[str, Any]:
        return {"num_warps": self.num_warps, **({"launch_pdl": True} if pdl else {})}


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
