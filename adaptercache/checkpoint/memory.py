"""Memory for an adapter's tensors: the system's own pages, given back whole."""

from __future__ import annotations

import mmap
from contextlib import suppress

__all__ = ["anonymous_memory"]

_LARGE = 4 << 20


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Zeros, as many bytes. None is taken before it is written to; where the system has large
    pages, those: touching 80 MiB for the first time then takes 40 faults and not 20,000."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE)
    if nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
