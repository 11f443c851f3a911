"""Which pages of the GPU's arena are free, and whether adapters or the KV cache own the others.

A page is the unit for both owners, and any page is as good as another: nothing fragments, and a
request for n pages can be served whenever n are free.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from operator import index

__all__ = ["Owner", "PageAllocator", "PagePreview"]


class Owner(IntEnum):
    """Whose pages they are."""

    ADAPTER = 1
    KV = 2


_NOBODY = 0


class PageAllocator:
    """The free pages, and the owner of every other page.

    Not thread-safe: the cache's lock guards it. Nothing blocks. It deals in numbers: the memory
    is the arena's, and from when on a page may be written again is not decided here.

    The free pages are a stack, so what was freed last is used first. A page given to one owner
    may thus be the one that the other has just freed: that is the normal case, not a rare one.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages must be >= 0, not {num_pages}")
        self._stack = list(range(num_pages - 1, -1, -1))  # the last is the next to go
        self._owners = bytearray(num_pages)
        self._counts = dict.fromkeys(Owner, 0)

    @property
    def num_pages(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._stack)

    def count(self, owner: Owner) -> int:
        """How many pages ``owner`` has."""
        return self._counts[owner]

    def owner_of(self, page: int) -> Owner | None:
        """Who has ``page``; None where it is free, or there is no such page."""
        code = self._owners[page] if 0 <= page < len(self._owners) else _NOBODY
        return Owner(code) if code != _NOBODY else None

    def allocate(self, n: int, owner: Owner) -> tuple[int, ...] | None:
        """``n`` pages, or None where fewer are free."""
        if n > len(self._stack):
            return None
        ids = _pop(self._stack, n)
        owners, code = self._owners, owner.value
        for page in ids:
            owners[page] = code
        self._counts[owner] += n
        return ids

    def take(self, ids: Iterable[int], owner: Owner) -> None:
        """Allocates these very pages, as a `PagePreview` has planned.

        O(n) while they are the next to go, as they are right after the plan; else O(free pages).

        Raises:
            ValueError: one of them is not free, or comes twice; nothing has changed.
        """
        ids = _integers(ids)
        self._pass_on(ids, _NOBODY, owner.value)
        self._counts[owner] += len(ids)
        base = len(self._stack) - len(ids)
        if ids == tuple(reversed(self._stack[base:])):
            del self._stack[base:]
        else:
            self._stack = [page for page in self._stack if self._owners[page] == _NOBODY]

    def free(self, ids: Iterable[int], owner: Owner) -> None:
        """Takes pages back from ``owner``. The next `allocate` gives them in the same order.

        Raises:
            ValueError: one of them is not ``owner``'s, or comes twice; nothing has changed.
        """
        ids = _integers(ids)
        self._pass_on(ids, owner.value, _NOBODY)
        self._counts[owner] -= len(ids)
        self._stack.extend(reversed(ids))

    def preview(self) -> PagePreview:
        """A view on which to try out calls. It is valid until the next change here."""
        return PagePreview(self)

    def _pass_on(self, ids: tuple[int, ...], old: int, new: int) -> None:
        """Every page goes from ``old`` to ``new``, or, with a ValueError, none does.

        (They are plain ints here, for comparing with an `Owner` would take twice as long.)
        """
        owners, size = self._owners, len(self._owners)
        for done, page in enumerate(ids):
            if page < 0 or page >= size or owners[page] != old:
                for passed in ids[:done]:
                    owners[passed] = old
                whose = Owner(old).name if old else "free"
                raise ValueError(f"page {page} is not {whose}, or comes twice in {ids}")
            owners[page] = new


class PagePreview:
    """What a `PageAllocator` would answer to a sequence of calls, while it stays as it is.

    It costs what the calls cost, however many pages there are: it reads the allocator's stack
    where it is, and keeps aside what is pushed on it here. Not thread-safe.
    """

    def __init__(self, real: PageAllocator) -> None:
        self._real = real
        self._depth = real.num_free  # how much of the real stack is left; _pushed lies on top
        self._pushed: list[int] = []
        self._owned: dict[int, bool] = {}  # whether somebody owns it, for pages that moved here

    @property
    def num_free(self) -> int:
        return self._depth + len(self._pushed)

    def allocate(self, n: int) -> tuple[int, ...] | None:
        """The pages that the allocator would give, or None."""
        if n > self.num_free:
            return None
        ids = _pop(self._pushed, min(n, len(self._pushed)))
        rest = n - len(ids)
        ids += tuple(reversed(self._real._stack[self._depth - rest : self._depth]))
        self._depth -= rest
        self._owned.update(dict.fromkeys(ids, True))
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Takes back pages that were allocated there or here.

        Raises:
            ValueError: one of them is free, foreign, or comes twice; nothing has changed.
        """
        ids = _integers(ids)
        if len(set(ids)) != len(ids) or not all(map(self._is_owned, ids)):
            raise ValueError(f"not all of the pages {ids} are allocated, or one comes twice")
        self._owned.update(dict.fromkeys(ids, False))
        self._pushed.extend(reversed(ids))

    def _is_owned(self, page: int) -> bool:
        owned = self._owned.get(page)
        return self._real.owner_of(page) is not None if owned is None else owned


def _pop(stack: list[int], n: int) -> tuple[int, ...]:
    """Takes the last ``n`` off the stack, the very last first."""
    if n < 0:
        raise ValueError(f"the number of pages must be >= 0, not {n}")
    base = len(stack) - n
    ids = tuple(reversed(stack[base:]))
    del stack[base:]
    return ids


def _integers(ids: Iterable[int]) -> tuple[int, ...]:
    """The ids as ints proper: whatever is equal to one (NumPy's, 1.0) would end on the stack."""
    return tuple(map(index, ids))
