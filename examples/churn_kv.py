"""KV pages out of the arena that adapters share: of running requests, and idle ones of finished
requests, kept as a prefix cache keeps them until somebody needs the room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from adaptercache import AdapterCache

__all__ = ["KVCache"]


class KVCache:
    """Each request's blocks hold its stamp, in one layer, until they are freed: were an adapter
    written over them, it would show.

    Args:
        cache: whose pages are shared.
        num_layers: of the base model.
        idle_limit: pages of finished requests to keep at most.

    Attributes:
        idle_pages: kept now.
        damaged: requests whose blocks were not as they had been written.
    """

    def __init__(self, cache: AdapterCache, num_layers: int, idle_limit: int) -> None:
        self._cache = cache
        self._num_layers = num_layers
        self._idle_limit = idle_limit
        self._idle: deque[tuple[int, tuple[int, ...]]] = deque()
        self.idle_pages = 0
        self.damaged = 0

    def allocate(self, number: int, n: int) -> tuple[int, ...] | None:
        """Pages for a request, for which idle ones are freed if need be; None where too few."""
        pages = self._cache.pages.allocate(n)
        if pages is None and self.give_back(n):
            pages = self._cache.pages.allocate(n)
        if pages is not None:
            view, stamp = self._stamped(number)
            view[torch.tensor(pages, device=view.device)] = stamp
        return pages

    def retire(self, number: int, pages: tuple[int, ...]) -> None:
        """Keep a finished request's pages; the oldest go where there are too many."""
        self._idle.append((number, pages))
        self.idle_pages += len(pages)
        self.give_back(self.idle_pages - self._idle_limit)

    def give_back(self, n: int) -> int:
        """Free at least ``n`` idle pages, the oldest first, or all; returns how many."""
        given = 0
        while given < n and self._idle:
            number, pages = self._idle.popleft()
            self.free(number, pages)
            given += len(pages)
        self.idle_pages -= given
        return given

    def free(self, number: int, pages: Sequence[int]) -> None:
        """Look at a request's blocks once more, and free them."""
        view, stamp = self._stamped(number)
        self.damaged += not bool((view[torch.tensor(pages, device=view.device)] == stamp).all())
        self._cache.pages.free(pages)

    def _stamped(self, number: int) -> tuple[Tensor, int]:
        """The layer that a request's stamp is in, and the stamp: exact in any float type."""
        return self._cache.kv_view(number % self._num_layers), 1 + number % 251
