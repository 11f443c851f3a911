"""The exceptions of adaptercache.

    AdapterCacheError
    ├── AdapterNotFound      the source has no adapter of that id
    ├── AdapterInvalid       the adapter's files are broken, or don't fit the base model
    ├── AdapterUnsupported   the adapter is sound, but uses a feature we don't serve
    ├── LoadFailed           the files could not be read or moved, after retries
    ├── CapacityError        it can never fit the memory that was configured
    └── CacheClosed          the cache was closed

"Not now" is never an exception: a deferred request and a lease that is not ready are values.
Every error says what, where, what was found and what was expected; the failure underneath, if
there is one, is its ``__cause__``. Errors can be copied and pickled: each waiter of one failed
load gets its own copy, so that no traceback is shared between threads.
"""

from __future__ import annotations

import inspect
import traceback
from types import FrameType

__all__ = [
    "AdapterCacheError",
    "AdapterInvalid",
    "AdapterNotFound",
    "AdapterUnsupported",
    "CacheClosed",
    "CapacityError",
    "LoadFailed",
    "as_load_error",
    "forget_locals",
]


_LONGEST_DETAIL = 500


def _shown(text: str) -> str:
    """Text from an adapter's files, fit for a terminal and a log: short, and in one line."""
    if len(text) > _LONGEST_DETAIL:
        text = f"{text[:_LONGEST_DETAIL]}..."
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


class AdapterCacheError(Exception):
    """The root. ``adapter_id`` is the adapter concerned, or None where no id is known."""

    def __init__(self, what: str, *, adapter_id: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.adapter_id = adapter_id

    def __str__(self) -> str:
        details = "; ".join(_shown(detail) for detail in self._details())
        text = f"{_shown(self.what)} ({details})" if details else _shown(self.what)
        return f"adapter {self.adapter_id!r}: {text}" if self.adapter_id is not None else text

    def _details(self) -> list[str]:
        return []

    def copy_for(self, adapter_id: str | None) -> AdapterCacheError:
        """This error again, told of ``adapter_id``: for one more waiter. Keeps the cause."""
        again = self.__class__.__new__(self.__class__)  # a subclass may have any signature
        again.args = self.args
        again.__dict__.update(self.__dict__)
        again.__cause__ = self.__cause__
        again.adapter_id = adapter_id if adapter_id is not None else self.adapter_id
        return again


class AdapterNotFound(AdapterCacheError):
    """The source has no adapter of that id (or forbids us to see it)."""


class AdapterInvalid(AdapterCacheError):
    """The adapter's files are broken or don't fit the base model.

    Args:
        what: one sentence.
        where: the file, tensor, module or configuration key.
        found: what is there.
        expected: what should be there.
        remedy: what the owner of the adapter can do.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        found: object = "",
        expected: object = "",
        remedy: str = "",
        adapter_id: str | None = None,
    ) -> None:
        super().__init__(what, adapter_id=adapter_id)
        self.where = where
        self.found = found
        self.expected = expected
        self.remedy = remedy

    def _details(self) -> list[str]:
        named = {
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "remedy": self.remedy,
        }
        return [f"{name}: {value}" for name, value in named.items() if value != ""]


class AdapterUnsupported(AdapterCacheError):
    """The adapter uses a feature that adaptercache does not serve.

    Args:
        feature: its name, e.g. ``"DoRA"``.
        where: the configuration key, tensor or module that shows it.
        remedy: what the owner of the adapter can do.
    """

    def __init__(
        self,
        feature: str,
        *,
        where: str = "",
        remedy: str = "",
        adapter_id: str | None = None,
    ) -> None:
        super().__init__(f"unsupported: {feature}", adapter_id=adapter_id)
        self.feature = feature
        self.where = where
        self.remedy = remedy
        self.args = (feature,)

    def _details(self) -> list[str]:
        named = {"where": self.where, "remedy": self.remedy}
        return [f"{name}: {value}" for name, value in named.items() if value]


class LoadFailed(AdapterCacheError):
    """Reading or moving the adapter failed after retries; the cause is ``__cause__``."""

    def _details(self) -> list[str]:
        cause = self.__cause__
        if cause is None:
            return []
        if isinstance(cause, OSError) and cause.filename is not None:  # its repr leaves that out
            return [f"cause: {type(cause).__name__}: {cause}"]
        return [f"cause: {cause!r}"]


def as_load_error(error: BaseException, adapter_id: str | None = None) -> AdapterCacheError:
    """A failed load as an error of ours: its own, or LoadFailed with it as the cause."""
    if isinstance(error, AdapterCacheError):
        return error.copy_for(adapter_id)
    failed = LoadFailed("loading failed", adapter_id=adapter_id)
    failed.__cause__ = error
    return failed


_MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def forget_locals(error: BaseException) -> None:
    """Let go of what the frames of a failure hold (buffers, tensors): errors are remembered. Also
    of what frames of ours hold that called those, where it was caught on its way."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            before: FrameType | None = None
            for frame, _ in traceback.walk_tb(link.__traceback__):
                if frame.f_back is not before:
                    _clear_callers(frame)
                before = frame
            chain += [link.__cause__, link.__context__]


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == __name__.partition(".")[0]


def _clear_callers(frame: FrameType) -> None:
    while frame.f_back is not None and _is_ours(frame.f_back):
        frame = frame.f_back
        if frame.f_code.co_flags & _MAY_GO_ON:
            continue
        try:
            frame.clear()
        except RuntimeError:  # it runs, and so do those that called it
            return


class CapacityError(AdapterCacheError):
    """It can never fit: a bound that was configured is smaller than this one thing.

    Args:
        needed: what it takes, in ``unit``.
        limit: what there is at most, in ``unit``.
        unit: ``"pages"``, ``"bytes"``, …
    """

    def __init__(
        self,
        what: str,
        *,
        needed: int = 0,
        limit: int = 0,
        unit: str = "bytes",
        adapter_id: str | None = None,
    ) -> None:
        super().__init__(what, adapter_id=adapter_id)
        self.needed = needed
        self.limit = limit
        self.unit = unit

    def _details(self) -> list[str]:
        return [f"needed: {self.needed} {self.unit}; there are at most {self.limit}"]


class CacheClosed(AdapterCacheError):
    """The cache was closed, or is closing."""

    def __init__(self, what: str = "the cache is closed", *, adapter_id: str | None = None) -> None:
        super().__init__(what, adapter_id=adapter_id)
