"""What the end of a load leaves behind: counters, the failures to remember, and log lines."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial

from adaptercache.errors import AdapterCacheError, AdapterNotFound, CacheClosed
from adaptercache.identity import Digest
from adaptercache.ledger import Ledger
from adaptercache.movers import Hop

__all__ = ["Journal"]

log = logging.getLogger("adaptercache.loads")


class Journal:
    """Call with the cache's lock held: handlers of `logging` are a user's code, so lines go on the
    outbox. Each has the fields ``adapter_id``, ``digest``, ``tier`` and ``seconds``."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def ended(self, hop: Hop, seconds: float, nbytes: int, digest: Digest) -> None:
        """A load of ``nbytes`` has succeeded."""
        source, to = hop.value
        counters = self._ledger.counters
        counters.loads[source, to, "ok"] += 1
        counters.load_bytes[source, to] += nbytes
        counters.load_took(source, to, seconds)
        ids = self._ledger.catalog.ids_of(digest)
        text = f"{hop.label} in {seconds:.3f} s"
        self._write(logging.INFO, text, hop, seconds, ids, digest)

    def failed(
        self, hop: Hop, adapter_ids: Collection[str], error: AdapterCacheError, seconds: float
    ) -> None:
        """A load has failed for these ids: whoever waits for them is told."""
        if isinstance(error, CacheClosed):  # it was queued when the cache closed: no failure
            return
        source, to = hop.value
        self._ledger.counters.loads[source, to, "failed"] += 1
        self._ledger.load_failed(adapter_ids, error)
        ids = adapter_ids or [error.adapter_id or ""]
        # Unknown ids are the callers' affair: they must not flood the log.
        level = logging.INFO if isinstance(error, AdapterNotFound) else logging.WARNING
        self._write(level, f"{hop.label} failed: {error}", hop, seconds, ids, None)

    def warn(self, hop: Hop, seconds: float, text: str) -> None:
        """Something went wrong that nobody waits for."""
        self._write(logging.WARNING, text, hop, seconds, [], None)

    def _write(
        self,
        level: int,
        text: str,
        hop: Hop,
        seconds: float,
        adapter_ids: Iterable[str],
        digest: Digest | None,
    ) -> None:
        if not log.isEnabledFor(level):
            return
        fields = {
            "adapter_id": ",".join(sorted(adapter_ids)),
            "digest": digest.hex() if digest is not None else None,
            "tier": hop.value[1].value,
            "seconds": seconds,
        }
        self._ledger.outbox.append(partial(log.log, level, "%s", text, extra=fields))
