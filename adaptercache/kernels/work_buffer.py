"""Where the GPU finds a step's work: one buffer, at one address, that batch after batch writes."""

from __future__ import annotations

from array import array
from collections import deque

import torch
from torch import Tensor

__all__ = ["WorkBuffer"]


class WorkBuffer:
    """``int32 [numel]`` on the device, and page-locked copies on their way there.

    A copy is used again once the GPU has read it, so that the host may be steps ahead.

    Not thread-safe: a step is launched by one thread.
    """

    @torch.inference_mode(False)  # else only that mode could write to what is made
    def __init__(self, numel: int, device: torch.device) -> None:
        self.tensor = torch.zeros(numel, dtype=torch.int32, device=device)
        self.owner: object = None
        """Whose work it holds."""
        self._sent: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # the oldest first

    def write(self, numbers: array[int], owner: object) -> None:
        """Write it, behind all launches so far on the current stream."""
        new = torch.frombuffer(numbers, dtype=torch.int32)
        self.owner = owner
        if not self.tensor.is_cuda:
            self.tensor.copy_(new)
            return
        if self._sent and self._sent[0][1].query():
            staged, read = self._sent.popleft()
        else:
            with torch.inference_mode(False):
                staged = torch.empty(len(numbers), dtype=torch.int32, pin_memory=True)
            read = torch.cuda.Event()
        staged.copy_(new)
        self.tensor.copy_(staged, non_blocking=True)
        read.record()
        self._sent.append((staged, read))
