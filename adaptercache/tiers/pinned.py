"""Page-locked CPU memory, taken so that the driver is busy for moments only.

Where the driver itself takes the memory (``cudaHostAlloc``), launches of other threads stand for as
long as all its pages take to be found and cleared: 100 ms were seen. So the system gives the pages
first, and they are registered with the driver once they are there.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from adaptercache.tiers.memory import free_bytes

__all__ = ["give_back", "take_pinned"]

_SPARE_BYTES = 64 << 20  # for others


def take_pinned(nbytes: int) -> Tensor:
    """``uint8 [nbytes]``, page-locked until `give_back`.

    Raises:
        OSError, MemoryError: the system has no such memory.
        RuntimeError: it locks no more of it. No CUDA error is left behind.
    """
    if free_bytes(torch.device("cpu")) < nbytes + _SPARE_BYTES:  # else the system kills somebody
        raise MemoryError(f"the system has no {nbytes} bytes free")
    memory = mmap.mmap(-1, nbytes)  # shared: a fork must not move pages away from the GPU
    with suppress(OSError, AttributeError):  # it is faster, where the system has it
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
    ctypes.memset(tensor.data_ptr(), 0, nbytes)  # the system gives the pages now
    error = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0))
    if error:
        _forget_error()
        raise RuntimeError(f"page-locking {nbytes} bytes failed: cudaError {error}")
    return tensor


def give_back(tensor: Tensor) -> None:
    """Unlock it; the memory itself goes with the last view of it."""
    if int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())):
        _forget_error()


def _forget_error() -> None:
    """CUDA keeps a thread's last error for whoever asks next: here, a launch that is in vain."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
