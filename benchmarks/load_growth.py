"""Ways of page-locking memory; each locks so many bytes, and gives them back."""

from __future__ import annotations

import ctypes
import mmap
import time

import torch

from load_world import ON_GPU


def in_slabs(nbytes: int, slab: int) -> None:
    """As torch does: the driver takes and locks them."""
    held = []
    for _ in range(nbytes // slab):
        held.append(torch.empty(slab, dtype=torch.uint8, pin_memory=ON_GPU))
        time.sleep(0.0005)
    held.clear()
    if ON_GPU:
        torch._C._host_emptyCache()


def through_register(nbytes: int, step: int) -> None:
    """Taken from the system and touched first, and then registered with the driver."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    runtime = torch.cuda.cudart() if ON_GPU else None
    for at in range(0, nbytes, step):
        ctypes.memset(address + at, 0, step)
        if runtime is not None:
            error = runtime.cudaHostRegister(address + at, step, 0)
            if int(error):
                raise RuntimeError(f"cudaHostRegister gives {error}")
        time.sleep(0.0005)
    for at in range(0, nbytes, step):
        if runtime is not None:
            runtime.cudaHostUnregister(address + at)
