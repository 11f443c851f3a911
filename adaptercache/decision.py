"""What was decided about one batch: a value that names requests, slots, pages and evictions. It can
be logged, replayed, or applied by other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from adaptercache.errors import AdapterCacheError
from adaptercache.identity import Digest
from adaptercache.request import Request
from adaptercache.standing import Load, Need

__all__ = ["Decision", "Kept"]


@dataclass(frozen=True, slots=True)
class Kept:
    """For whom things are kept: what its adapter needs, and the adapters of who is ahead of it."""

    request: Request
    need: Need
    ahead: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do: first the evictions, then the loads, then the admissions.

    ``reasons`` says for each deferred request id why it waits: ``loading`` (its adapter is on its
    way), ``room`` (no pages or slot for it yet), ``kv_pages``, ``max_adapters`` or another of the
    batch's caps. ``pages_wanted``: how many idle KV pages freed would let cold adapters in: as
    many as may join the batch, and one at least.
    ``refused``: the adapter that is first in line for room and finds none. ``first``: who is first
    of those that wait for a cap on adapters (``"cap"``), for pages or a slot (``"room"``), and for
    tokens (``"tokens"``). ``kept``: for whom that was kept which others behind it could have had.
    ``cold``: the adapters of the deferred, in order, and with each the id of the first request.
    """

    admitted: tuple[tuple[Request, Digest | None], ...] = ()
    deferred: tuple[Request, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    failed: tuple[tuple[Request, AdapterCacheError], ...] = ()
    evictions: tuple[Digest, ...] = ()
    loads: tuple[Load, ...] = ()
    pages_wanted: int = 0
    refused: Digest | None = None
    first: dict[str, Request] = field(default_factory=dict)
    kept: Kept | None = None
    cold: dict[str, str] = field(default_factory=dict)
