"""A Triton kernel with all its constants chosen: compiled once, launched with little ado."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

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
    """One kernel and its constants.

    ``is_persistent``: its programs stride over the work, so no more of them are launched than the
    GPU holds at once: a program that had to wait for another's end would do its share alone.
    """

    function: Any
    constants: dict[str, Any]
    num_warps: int
    is_persistent: bool = False
    _compiled: dict[tuple[torch.device, bool], tuple[Any, int]] = field(default_factory=dict)
    _in_order: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        names = self.function.arg_names
        self._in_order = tuple(self.constants[name] for name in names if name in self.constants)

    def launch(
        self,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        device: torch.device,
        *,
        aligned: bool,
        pdl: bool,
    ) -> None:
        """Queue it. ``aligned``: all pointers and strides that Triton looks at are multiples of 16.

        Triton's own launch looks up the binary by the types and values of all arguments, which
        takes longer than all else here. Among aligned ones nothing is left to look at.
        """
        if INTERPRETED:
            if self.is_persistent:
                grid = (min(grid[0], 16), 1, 1)
            self.function[grid](*args, **self.constants)
            return
        found = self._compiled.get((device, pdl)) if aligned else None
        if found is None:
            found = self.compile(args, device, pdl=pdl)
            if aligned:
                self._compiled[device, pdl] = found
        compiled, resident = found
        if self.is_persistent:
            grid = (min(grid[0], resident), 1, 1)
        compiled[grid](*args, *self._in_order)

    def compile(self, args: Sequence[Any], device: torch.device, *, pdl: bool) -> tuple[Any, int]:
        """What Triton compiled for arguments like these, where a dtype stands for a tensor of it;
        and how many programs of it the GPU holds at once."""
        options = {"num_warps": self.num_warps, **({"launch_pdl": True} if pdl else {})}
        compiled = self.function.warmup(*args, grid=(1, 1, 1), **self.constants, **options)
        if not self.is_persistent:
            return compiled, 0
        compiled.run  # noqa: B018  loads it, and so finds what it takes
        return compiled, _resident(
            device, compiled.n_regs, compiled.metadata.shared, self.num_warps
        )


def _resident(device: torch.device, thread_words: int, shared_bytes: int, num_warps: int) -> int:
    """Programs that a GPU holds at once, by CUDA's rules of occupancy.

    ``thread_words``: of 4 bytes that a thread keeps on the multiprocessor.
    """
    properties = torch.cuda.get_device_properties(device)
    a_warp = -(-thread_words * 32 // 256) * 256
    # A multiprocessor has four parts, each with its own registers.
    warps = getattr(properties, "regs_per_multiprocessor", 65536) // 4 // a_warp * 4
    most = (
        warps // num_warps,
        properties.max_threads_per_multi_processor // (32 * num_warps),
        properties.shared_memory_per_multiprocessor // (shared_bytes + 1024),
        32,
    )
    return int(max(1, min(most)) * properties.multi_processor_count)
