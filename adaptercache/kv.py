"""The arena's pages as the KV manager sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from adaptercache.deciding import Deciding
from adaptercache.errors import CapacityError
from adaptercache.lifts import Lifts
from adaptercache.pages import Owner, PageAllocator

__all__ = ["KVPages"]


class KVPages:
    """Pages for KV blocks, out of the arena that adapters share.

    Taking pages evicts cold adapters, never leased ones; giving pages back lets adapters in that
    wait for room. Thread-safe; takes microseconds; touches no CUDA.
    """

    def __init__(
        self,
        lifts: Lifts,
        pages: PageAllocator,
        deciding: Deciding,
        last_step: Callable[[], int],
    ) -> None:
        self._lifts = lifts
        self._pages = pages
        self._deciding = deciding
        self._last_step = last_step

    def allocate(self, n: int) -> tuple[int, ...] | None:
        """``n`` page ids, or None while there are not enough: all or nothing.

        Raises:
            CapacityError: there can never be so many; an adapter of maximum rank always has room.
            CacheClosed: the cache is closed.
        """
        with self._deciding.freeing():
            self._deciding.check_open()
            limit = self._lifts.kv_room().limit
            if n > limit:
                unit = "pages" if limit else "pages (the cache has no KVLayout)"
                raise CapacityError(
                    "the arena never has so many pages for KV", needed=n, limit=limit, unit=unit
                )
            return self._lifts.allocate_kv(n)

    def free(self, ids: Iterable[int]) -> None:
        """Give pages back; later launches of a step that is open may still read them.

        Raises:
            ValueError: one of them is not allocated to KV, or comes twice; nothing has changed.
        """
        ids = tuple(ids)
        with self._deciding.freeing():
            self._lifts.free_kv(ids, self._last_step())

    @property
    def num_used(self) -> int:
        """Pages that KV has now."""
        return self._pages.count(Owner.KV)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give now, by evicting what is cold."""
        room = self._lifts.kv_room()
        return min(room.limit - room.used, room.reclaimable)
