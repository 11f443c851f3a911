"""The tokens and KV pages that a step has left, handed out strictly in order of arrival.

Once a request's tokens, or its KV pages, don't fit, nobody behind it gets any: what is handed out
to the small ones would keep the large one waiting for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KVRoom", "StepRoom"]


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Pages that the KV cache has, can get by eviction, and may ever have."""

    used: int
    reclaimable: int
    limit: int


class StepRoom:
    """What is left of one step while requests are admitted to it.

    Args:
        kv: what the KV cache can still take.
        max_tokens: of the step; None: no bound.
        tokens: that running requests bring into it.
    """

    def __init__(self, kv: KVRoom, max_tokens: int | None, tokens: int) -> None:
        self._kv = kv
        self._kv_left = kv.reclaimable
        self._max_tokens = max_tokens
        self._tokens_left = None if max_tokens is None else max_tokens - tokens
        self._is_out_of_tokens = self._is_out_of_kv = False
        self._kv_kept = 0
        self.kv_promised = 0
        """KV pages of those that were let in."""

    def never_fits(self, num_tokens: int, kv_pages: int) -> tuple[str, int, int] | None:
        """The bound that a request is over by itself: its unit, what is needed, the limit."""
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            return "tokens", num_tokens, self._max_tokens
        if kv_pages > self._kv.limit:
            unit = "KV pages" if self._kv.limit else "KV pages (the cache has no KVLayout)"
            return unit, kv_pages, self._kv.limit
        return None

    def hold_back(self, pages: int) -> None:
        """Pages that the KV cache can't get any more: loads take them."""
        self._kv_left -= pages

    def keep(self, num_tokens: int, kv_pages: int, adapter_pages: int) -> None:
        """What is somebody's who isn't let in yet: nobody behind it gets that."""
        self._kv_left -= kv_pages + adapter_pages
        self._kv_kept += kv_pages
        if self._tokens_left is not None:
            self._tokens_left -= num_tokens

    @property
    def is_overdrawn(self) -> bool:
        """Whether there are fewer pages than are kept and held back."""
        return self._kv_left < 0

    def refuses_kept(self, num_tokens: int, kv_pages: int, adapter_pages: int) -> str | None:
        """The same as `refuses`, for whom these were kept."""
        self.keep(-num_tokens, -kv_pages, -adapter_pages)
        were_out = self._is_out_of_tokens, self._is_out_of_kv
        self._is_out_of_tokens = self._is_out_of_kv = False
        reason = self.refuses(num_tokens, kv_pages, 0)
        if reason is not None:
            self.keep(num_tokens, kv_pages, adapter_pages)
        self._is_out_of_tokens |= were_out[0]
        self._is_out_of_kv |= were_out[1]
        return reason

    def refuses(self, num_tokens: int, kv_pages: int, idle_pages: int) -> str | None:
        """Why a request has to wait; None: it is let in, and what it takes is gone.

        ``idle_pages``: of its adapter, which eviction can't reclaim any more once it is in.
        """
        if self._tokens_left is not None:
            self._is_out_of_tokens = self._is_out_of_tokens or num_tokens > self._tokens_left
            if self._is_out_of_tokens:
                return "max_tokens"
        if kv_pages:
            quota = self._kv.limit - self._kv.used - self.kv_promised - self._kv_kept
            room = min(self._kv_left - idle_pages, quota)
            self._is_out_of_kv = self._is_out_of_kv or kv_pages > room
            if self._is_out_of_kv:
                return "kv_pages"
        if idle_pages and idle_pages > self._kv_left:  # KV is to get them, by eviction
            return "kv_pages"
        self._kv_left -= idle_pages + kv_pages
        self.kv_promised += kv_pages
        if self._tokens_left is not None:
            self._tokens_left -= num_tokens
        return None
