"""Several ranks of one model: what the first decides and the others do, as small values.

Rank 0 decides for all. Its `Orders` carry what its decisions have changed on the GPU since the last
ones, in order, and the adapters that it wants next. Each other rank obeys, keeps what is wanted in
its CPU memory, and answers with a `Report`. An adapter goes up to the GPU only once every rank has
it in CPU memory and keeps it there, and its requests are admitted only once every rank has it on
the GPU. So no rank finds in the midst of a step that it lacks one.

Plain Python. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from adaptercache.identity import Digest
from adaptercache.standing import Load

__all__ = ["Act", "Evict", "Orders", "Peers", "Report"]


@dataclass(frozen=True, slots=True)
class Evict:
    """Forget the adapter's copy on the GPU."""

    digest: Digest


Act: TypeAlias = Evict | Load


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 has decided: a few kilobytes, to be pickled or sent by whatever the engine has.

    Args:
        number: 1, 2, …: each is obeyed once, in order.
        acts: changes of the GPU's pages and slots, by number, in order.
        admitted: ``(request_id, adapter_id, digest, num_tokens, kv_pages)`` of each new request.
        wanted: adapter ids to bring into CPU memory, and their digests where rank 0 knows them.
    """

    number: int
    acts: tuple[Act, ...] = ()
    admitted: tuple[tuple[str, str | None, Digest | None, int, int], ...] = ()
    wanted: tuple[tuple[str, Digest | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What another rank has, after it obeyed.

    Args:
        rank: its number.
        number: of the last orders that it obeyed.
        held: the wanted adapters that are in its CPU memory, and stay until the next orders.
        on_gpu: the adapters that are whole on its GPU.
        broken: those that were to be there, and whose copy has failed.
        failed: wanted adapter ids that it can't load, and why.
        other: wanted adapter ids that stand for other content there.
    """

    rank: int
    number: int
    held: frozenset[Digest] = frozenset()
    on_gpu: frozenset[Digest] = frozenset()
    broken: frozenset[Digest] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    other: Mapping[str, Digest] = field(default_factory=dict)


@dataclass(slots=True)
class _Ordered:
    """A load that not all have ended: ``number`` of its orders, None until they are given."""

    load: Load
    number: int | None
    ranks: set[int]


class Peers:
    """What rank 0 knows of the others.

    Args:
        ranks: the others' numbers.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._reports: dict[int, Report] = {}
        self._number = 0
        self._acts: list[Act] = []
        self._ordered: dict[Digest, _Ordered] = {}

    @property
    def ranks(self) -> Collection[int]:
        """The others' numbers."""
        return self._ranks

    def have(self, digest: Digest) -> bool:
        """Whether every other rank has it in CPU memory, and keeps it until it is told to load."""
        reports = [self._reports.get(rank) for rank in self._ranks]
        return all(
            report is not None and report.number == self._number and digest in report.held
            for report in reports
        )

    def are_loading(self, digest: Digest) -> bool:
        """Whether some rank has not got it on its GPU yet."""
        return digest in self._ordered

    def load(self, load: Load) -> None:
        """Rank 0 has begun to bring it up: the others are to, in the same slot and pages."""
        self._acts.append(load)
        self._ordered[load.digest] = _Ordered(load, None, set(self._ranks))

    def evict(self, digest: Digest) -> None:
        """Rank 0 has forgotten it."""
        self._acts.append(Evict(digest))
        self._ordered.pop(digest, None)

    def orders(
        self,
        admitted: Iterable[tuple[str, str | None, Digest | None, int, int]],
        wanted: Iterable[tuple[str, Digest | None]],
    ) -> Orders:
        """What there is to do since the last ones."""
        self._number += 1
        acts, self._acts = tuple(self._acts), []
        for ordered in self._ordered.values():
            if ordered.number is None:
                ordered.number = self._number
        return Orders(self._number, acts, tuple(admitted), tuple(wanted))

    def hear(self, report: Report) -> tuple[list[Digest], list[Digest]]:
        """Take note of a report.

        Returns:
            The adapters that are on the GPU of every rank from now on, and those whose copy has
            failed on one: rank 0 has to evict them.
        """
        before = self._reports.get(report.rank)
        if report.rank not in self._ranks:
            raise ValueError(f"there is no rank {report.rank}: the others are {set(self._ranks)}")
        if before is not None and report.number < before.number:
            return [], []  # late
        self._reports[report.rank] = report
        done, broken = [], []
        for digest, ordered in list(self._ordered.items()):
            if ordered.number is None or report.number < ordered.number:
                continue  # it can't have heard of it
            if digest in report.broken:
                broken.append(digest)
            if digest in report.on_gpu:
                ordered.ranks.discard(report.rank)
            if not ordered.ranks:
                del self._ordered[digest]
                done.append(digest)
        return done, broken
