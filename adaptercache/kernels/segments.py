"""Which adapter each token of a step belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adaptercache.kernels.stack import LoraStack

__all__ = ["BASE_SLOT", "LoraBatch", "rank_class_of"]

BASE_SLOT = -1
"""The slot of tokens that run on the base model alone."""


def rank_class_of(rank: int) -> int:
    """The rank class of a batch whose largest rank is ``rank``: 16, 64, 128, 256 or 512."""
    for rank_class in (16, 64, 128, 256, 512):
        if rank <= rank_class:
            return rank_class
    raise ValueError(f"rank {rank} is over 512")


class LoraBatch:
    """The tokens of one step, in segments of one slot each.

    Args:
        stack: where the slots lie.
        segments: ``(slot, number of tokens)`` in the order of the tokens; slot −1 is the base
            model.
        pad_to: the number of rows of x and y, where it is larger than the number of tokens; rows
            beyond the tokens are left alone.
        rank_class: an upper bound of the ranks in the batch (see `rank_class_of`).
        wait: called with a layer before that layer's adapters are read.

    Raises:
        ValueError: a slot out of range, or more tokens than ``pad_to``.

    Immutable; threads may share it.
    """

    def __init__(
        self,
        stack: LoraStack,
        segments: Sequence[tuple[int, int]],
        *,
        pad_to: int | None = None,
        rank_class: int = 16,
        wait: Callable[[int], None] | None = None,
    ) -> None:
        token_slots: list[int] = []
        for slot, tokens in segments:
            if not BASE_SLOT <= slot < stack.num_slots or tokens < 0:
                raise ValueError(
                    f"segment {(slot, tokens)}: slots are {BASE_SLOT} to {stack.num_slots - 1}"
                )
            token_slots += [slot] * tokens
        self.num_tokens = len(token_slots)
        self.num_rows = self.num_tokens if pad_to is None else pad_to
        if self.num_tokens > self.num_rows:
            raise ValueError(f"{self.num_tokens} tokens, but pad_to is {pad_to}")
        token_slots += [BASE_SLOT] * (self.num_rows - self.num_tokens)
        self.stack = stack
        self.segments = tuple(segments)
        self.rank_class = rank_class
        slots = torch.tensor(token_slots, dtype=torch.int32)
        self.token_slots: Tensor = slots.to(stack.device, non_blocking=True)
        """``int32 [num_rows]``: each token's slot, −1 for the base model and for padding."""
        self._wait = wait

    def wait(self, layer: int) -> None:
        """Make the compute stream wait until this layer's adapters are in place."""
        if self._wait is not None:
            self._wait(layer)
