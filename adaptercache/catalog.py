"""What each adapter id stands for now, and which ids failed a short while ago.

One small entry an id that has been loaded, so that a hit costs the same with a hundred ids and
with a million. Ids that fail are remembered for a time that grows with each failure, in a bounded
table: a flood of unknown ids neither reaches the source again and again nor fills the memory.

Plain Python; the time is passed in. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from adaptercache.errors import AdapterCacheError
from adaptercache.identity import Digest

__all__ = ["Catalog", "Failures", "Known"]

DOUBT_S = 10.0  # between questions about what is served unasked


@dataclass(frozen=True, slots=True)
class Known:
    """What an adapter id stands for: a revision, its content, and that content's size.

    ``elements`` is the length of its flat vector in the cache's layout; ``checked``: when the
    source was last asked; ``doubted``: it didn't answer, and what it had before is served.
    """

    revision: str
    digest: Digest
    elements: int
    checked: float = 0.0
    doubted: bool = False


class Catalog:
    """Adapter ids → `Known`, and back from a digest to the ids that share it."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._sharing: dict[Digest, set[str]] = {}
        self.ttl_s: float | None = None
        """After how long the source is asked again about an id that is in use; None: never."""

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __getitem__(self, adapter_id: str) -> Known:
        return self._known[adapter_id]

    def get(self, adapter_id: str) -> Known | None:
        return self._known.get(adapter_id)

    def ids_of(self, digest: Digest) -> frozenset[str]:
        """The ids that stand for this content now."""
        return frozenset(self._sharing.get(digest, ()))

    def few_ids_of(self, digest: Digest, most: int) -> Collection[str] | None:
        """The same without a copy, to be read at once; None: they are more than ``most``."""
        ids = self._sharing.get(digest, ())
        return ids if len(ids) <= most else None

    def is_named(self, digest: Digest) -> bool:
        """Whether any id stands for this content."""
        return digest in self._sharing

    def learn(self, adapter_id: str, known: Known) -> Digest | None:
        """``adapter_id`` stands for ``known`` from now on.

        Returns:
            The digest that no id stands for any more, if that came of it.
        """
        before = self._known.get(adapter_id)
        self._known[adapter_id] = known
        if before is not None and before.digest == known.digest:
            return None
        self._sharing.setdefault(known.digest, set()).add(adapter_id)
        return self._unshare(before.digest, adapter_id) if before is not None else None

    def check(self, adapter_id: str, now: float) -> None:
        """The source is being asked, or has been in vain."""
        if (known := self._known.get(adapter_id)) is not None:
            self._known[adapter_id] = replace(known, checked=now)

    def is_old(self, known: Known, clock: Callable[[], float]) -> bool:
        """Whether the source was last asked too long ago."""
        ttl_s = DOUBT_S if known.doubted else self.ttl_s
        return ttl_s is not None and clock() - known.checked > ttl_s

    def doubt(self, adapter_id: str) -> None:
        """The source could not be asked: it is, again and again."""
        if (known := self._known.get(adapter_id)) is not None:
            self._known[adapter_id] = replace(known, doubted=True)

    def forget(self, adapter_id: str) -> Digest | None:
        """``adapter_id`` stands for nothing. Returns what `learn` returns."""
        before = self._known.pop(adapter_id, None)
        return self._unshare(before.digest, adapter_id) if before is not None else None

    def _unshare(self, digest: Digest, adapter_id: str) -> Digest | None:
        sharing = self._sharing[digest]
        sharing.remove(adapter_id)
        if sharing:
            return None
        del self._sharing[digest]
        return digest


@dataclass(slots=True)
class _Failure:
    error: AdapterCacheError
    times: int
    until: float


class Failures:
    """Ids whose last load failed, each with its error and when it may be tried again.

    Args:
        first_s: how long the first failure is remembered; each further one twice as long.
        longest_s: the bound of that.
        capacity: ids remembered at most; the oldest go first.
    """

    def __init__(
        self, *, first_s: float = 1.0, longest_s: float = 60.0, capacity: int = 16384
    ) -> None:
        self._first_s, self._longest_s, self._capacity = first_s, longest_s, capacity
        self._failed: OrderedDict[str, _Failure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failed)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._failed

    def __iter__(self) -> Iterator[str]:
        return iter(self._failed)

    def get(self, adapter_id: str, now: float) -> AdapterCacheError | None:
        """The error, while it is too early to try again."""
        failure = self._failed.get(adapter_id) if self._failed else None
        return failure.error if failure is not None and now < failure.until else None

    def add(self, adapter_id: str, error: AdapterCacheError, now: float) -> None:
        """Remember one more failure of ``adapter_id``."""
        before = self._failed.pop(adapter_id, None)
        times = before.times + 1 if before is not None else 1
        wait = min(self._first_s * 2.0 ** min(times - 1, 64), self._longest_s)
        self._failed[adapter_id] = _Failure(error, times, now + wait)
        if len(self._failed) > self._capacity:
            self._failed.popitem(last=False)

    def clear(self, adapter_id: str) -> None:
        """It worked, or somebody asked for another try."""
        self._failed.pop(adapter_id, None)
