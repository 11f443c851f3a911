"""An adapter's files on this host, and the hold on them."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

from adaptercache.identity import AdapterKey, Digest

__all__ = ["HeldFolder"]


class HeldFolder:
    """An adapter's files, which stay as they are until `release`. A context manager. Thread-safe.

    Attributes:
        adapter_id: what was asked for.
        revision: the source's token for what is here; the latest that is known to be this content.
        digest: of the content.
        path: the folder, absolute. Its name comes from the digest: other content, another path.
    """

    def __init__(self, key: AdapterKey, digest: Digest, path: Path, holding: ExitStack) -> None:
        self.adapter_id, self.revision = key.adapter_id, key.revision
        self.digest, self.path = digest, path
        self._holding = holding
        self._lock = threading.Lock()

    def release(self) -> None:
        """Don't read the files any more: they may go. Calling it again does nothing."""
        with self._lock:
            self._holding.close()

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
