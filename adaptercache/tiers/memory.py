"""How much memory a device has free."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["free_bytes"]


def free_bytes(device: torch.device) -> int:
    """Bytes that nobody has taken: on a GPU as its driver says (what torch keeps for reuse counts
    as taken), on the CPU what the system can give without paging out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    with suppress(OSError, ValueError):  # a container's limit; the root has none
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free
