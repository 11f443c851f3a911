"""How much memory a device has free."""

from __future__ import annotations

import os

import torch

__all__ = ["free_bytes"]


def free_bytes(device: torch.device) -> int:
    """Bytes that nobody has taken: on a GPU as its driver says (what torch keeps for reuse counts
    as taken), on the CPU what the system can give without paging out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
