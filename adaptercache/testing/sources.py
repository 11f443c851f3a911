"""Sources that you control."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from adaptercache.tiers.remote import Source, TensorSource

__all__ = ["FakeSource", "FaultySource"]


class FakeSource(TensorSource):
    """A source in memory that counts what is asked of it. Thread-safe.

    Attributes:
        calls: how often each method was called for each id: ``calls["read", "a"]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self._counting = threading.Lock()

    def put_files(self, adapter_id: str, files: Mapping[str, bytes]) -> None:
        """Put an adapter here as files, sound or not."""
        revision = str(hash((adapter_id, *sorted(files.items()))))
        with self._lock:
            self._adapters[adapter_id] = (revision, dict(files))

    def revision(self, adapter_id: str) -> str:
        self._count("revision", adapter_id)
        return super().revision(adapter_id)

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        self._count("files", adapter_id)
        return super().files(adapter_id, revision)

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        self._count("read", adapter_id)
        return super().read(adapter_id, revision, name, offset, into)

    def _count(self, method: str, adapter_id: str) -> None:
        with self._counting:
            self.calls[method, adapter_id] += 1


class FaultySource:
    """A source in front of another that is slow, stands still, or fails, as told. Thread-safe.

    Attributes:
        delay_s: before each call.
        failing: ids whose calls raise OSError, until they are taken out.
        gate: calls wait while it is cleared.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.delay_s = 0.0
        self.failing: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def revision(self, adapter_id: str) -> str:
        self._suffer(adapter_id)
        return self._source.revision(adapter_id)

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        self._suffer(adapter_id)
        return self._source.files(adapter_id, revision)

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        self._suffer(adapter_id)
        return self._source.read(adapter_id, revision, name, offset, into)

    def ids(self) -> Iterable[str]:
        return self._source.ids()

    def _suffer(self, adapter_id: str) -> None:
        self.gate.wait()
        if self.delay_s:
            time.sleep(self.delay_s)
        if adapter_id in self.failing:
            raise OSError(f"injected: {adapter_id} can't be read")
