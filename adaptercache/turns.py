"""Whose turn it is: waiting requests that others have been admitted past too often.

Passing is what keeps a batch full while one request waits for a load, for room, or for a cap; only
without a bound would it let that request starve. So it is counted, for the first of each line, and
kept for as long as the request waits: one whose adapter came, went again for KV pages, and comes
anew doesn't start from nothing.

Plain Python. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from adaptercache.request import Request

__all__ = ["MAX_BYPASSES", "Turns"]

MAX_BYPASSES = 100  # decisions that admitted somebody, or hits of leases, past the first in line


class Turns:
    """Counts how often the first of each line was passed, and how long each turn lasts.

    While it is somebody's turn, others are kept out who could run; so it doesn't last for ever:
    something else may be in the way that doesn't end. It lasts as many decisions as it took to
    come; after that others pass as often once more, and the next turn is twice as long.
    """

    def __init__(self) -> None:
        self._first: dict[str, Request] = {}
        self._passed: dict[str, int] = {}  # by request id: whoever was first once, while it waits
        self._lasts: dict[str, int] = {}  # the turns of those that have had one
        self._kept: dict[str, int] = {}  # decisions of the turn that is
        self.overdue: dict[str, Request] = {}
        """By request id, those that were passed too often: it is their turn."""

    def note(
        self,
        first: Mapping[str, Request],
        waiting: Collection[str],
        others_admitted: bool,
        kept: str | None = None,
    ) -> None:
        """What the last decision came to.

        Args:
            first: by line (what they wait for), the request that is first in it. Who was first in
                a line that nobody waits in now counts on: it only waits for a load in between.
            waiting: the ids of all requests that were deferred.
            others_admitted: whether anybody was admitted.
            kept: the id of the request for which things were kept.
        """
        self._first |= first
        self.forget_others(waiting)
        for request_id, request in {each.request_id: each for each in self._first.values()}.items():
            passed = self._passed[request_id] = self._passed.get(request_id, 0) + others_admitted
            if passed >= MAX_BYPASSES:
                self.overdue[request_id] = request
        if kept in self.overdue:
            self._kept[kept] = self._kept.get(kept, 0) + 1
            if self._kept[kept] >= self._lasts.get(kept, MAX_BYPASSES):
                self._end_turn(kept)

    def _end_turn(self, request_id: str) -> None:
        lasted = self._kept.pop(request_id)
        self._lasts[request_id] = 2 * lasted
        self._passed[request_id] = MAX_BYPASSES - lasted
        del self.overdue[request_id]

    def forget_others(self, waiting: Collection[str]) -> None:
        """Only requests of these ids wait now."""
        for line in [line for line, each in self._first.items() if each.request_id not in waiting]:
            del self._first[line]
        for gone in [each for each in self._passed if each not in waiting]:
            for table in (self._passed, self._lasts, self._kept, self.overdue):
                table.pop(gone, None)
