"""Which adapters go up a tier next, and what makes room for them.

Reads the ledger and everyone who waits, in order of arrival. What the GPU takes up is decided on
apart from its being done (`place_on_gpu`, then `apply`), so that a step's whole `Decision` can be
logged, replayed, or applied by other ranks.

Plain Python. Not thread-safe: the cache's lock guards it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from adaptercache.arena import HostPlace
from adaptercache.caps import Footprint
from adaptercache.catalog import Known
from adaptercache.decision import Decision
from adaptercache.fairness import Fairness
from adaptercache.identity import Digest
from adaptercache.ledger import Ledger
from adaptercache.pages import Owner
from adaptercache.placement import HintBounds, Placement, Want, place
from adaptercache.residency import Copy
from adaptercache.standing import Load, Need, Standing
from adaptercache.stats import Tier
from adaptercache.step_room import KVRoom

__all__ = ["Lifts"]

MANY_NAMES = 256  # of one content
MANY_BEHIND = 64  # who find no room and are looked at closely
HINTED_BYTES = 256 << 20  # on their way into a tier for hints, at one time: some 5 ms of PCIe
HINTED_SHARE = 0.5  # of a tier: what hints may fill by eviction with what nobody has used yet
NOTHING = Placement((), (), (), 0)


def hint_bounds(units: int, unit_bytes: int) -> HintBounds:
    """What hints may take of a tier of so many units."""
    return HintBounds(HINTED_BYTES // unit_bytes, int(units * HINTED_SHARE))


class Lifts:
    """What moves up next. It is the `standing.State` that `plan` reads."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.fairness = Fairness(ledger, self.need_of)

    def standing(self, adapter_id: str) -> Standing:
        return self._ledger.standing(adapter_id)

    def settled(self) -> Collection[str] | None:
        ledger = self._ledger
        ids = {*ledger.waiting.failed, *ledger.failures}
        for copy in ledger.gpu:
            names = ledger.catalog.few_ids_of(copy.digest, MANY_NAMES)
            if names is None:
                return None
            ids.update(names)
        return ids

    def names_of(self, digests: Collection[Digest]) -> Collection[str]:
        ids_of = self._ledger.catalog.ids_of
        return {name for digest in digests for name in ids_of(digest)}

    def footprint(self, digest: Digest) -> Footprint:
        gpu, host = self._ledger.gpu, self._ledger.host
        spec = (gpu if gpu.get(digest) is not None else host)[digest].place.spec
        return Footprint(spec.max_rank, gpu.shape.pages_for(spec.elements))

    def kv_room(self) -> KVRoom:
        return self._ledger.gpu.kv_room()

    def can_pipeline(self, load: Load) -> bool:
        ledger = self._ledger
        may = ledger.gpu_up and ledger.may_pipeline(load.digest)
        return may and ledger.have_ended(ledger.gpu.free_after(load))

    def idle_pages(self, digest: Digest) -> int:
        copy = self._ledger.gpu.get(digest)
        return copy.size if copy is not None and copy.idle else 0

    def need_of(self, adapter_id: str | None) -> Need | None:
        if adapter_id is None:
            return Need(None, 0)
        known = self._ledger.catalog.get(adapter_id)
        if known is None:
            return None
        if self._ledger.gpu.get(known.digest) is not None:
            return Need(known.digest, self.idle_pages(known.digest))
        host = self._ledger.host  # whether all ranks have it changes with each report
        if host.resident(known.digest) is None and not host.is_coming(known.digest):
            return None
        return Need(known.digest, self._ledger.gpu.shape.pages_for(known.elements))

    def _can_go_up(self, digest: Digest) -> bool:
        """Whether its copy to the GPU could start now, as far as the tier below is asked."""
        host, peers = self._ledger.host, self._ledger.gpu.peers
        if peers is not None:
            return host.resident(digest) is not None and peers.have(digest)
        return host.resident(digest) is not None or host.is_coming(digest)

    def number(self, placement: Placement) -> tuple[Load, ...]:
        return self._ledger.gpu.number(placement)

    def place_on_gpu(
        self,
        admitted: Collection[Digest] = (),
        waiting: Mapping[str, str] | None = None,
        kv_promised: int | None = None,
    ) -> Placement:
        """Which adapters are copied to the GPU next; only reads.

        Args:
            admitted: adapters about to be leased: not to be evicted.
            waiting: the adapters of the requests that go on waiting, and the first request for
                each; None: of the last `admit`.
            kv_promised: pages that admitted requests are about to take; None: of the last `admit`.
        """
        ledger, gpu = self._ledger, self._ledger.gpu
        line = self._line(Tier.GPU, waiting)
        cold = [(known, hint) for known, hint in line if gpu.get(known.digest) is None]
        if not cold or not ledger.gpu_up or gpu.follows:
            return NOTHING
        promised = ledger.waiting.kv_promised if kv_promised is None else kv_promised
        free = gpu.adapter_room(ledger.waiting.kv_pages) - promised
        if not gpu.num_idle and (free < 1 or not gpu.slots.num_free):  # full of what is in use
            short = gpu.shape.pages_for(cold[0][0].elements) - free if free < 1 else 0
            refused = tuple(known for known, hint in cold if not hint)
            behind = tuple(gpu.shape.pages_for(each.elements) for each in refused[1:MANY_BEHIND])
            digests = tuple(each.digest for each in refused)
            return Placement((), (), digests, max(0, short) if refused else 0, behind)
        wants = {digest: Want(digest, 0, False) for digest in admitted}
        for known, hint in line:
            pages = gpu.shape.pages_for(known.elements)
            if known.digest not in wants:  # others of its requests may go on waiting
                ready = self._can_go_up(known.digest)
                wants[known.digest] = Want(known.digest, pages, ready, hint)
        page_bytes = gpu.shape.rows * gpu.shape.page_bytes
        hints = hint_bounds(gpu.shape.num_pages, page_bytes)
        free_slots = gpu.slots.num_free
        return place([*wants.values()], gpu, free=free, free_slots=free_slots, hints=hints)

    def kv_pages_wanted(self, placement: Placement, most: int) -> int:
        """KV pages that, given back, would let the first ``most`` in who were refused room: as far
        as free pages are what they lack, and not slots or the adapters' own share."""
        gpu = self._ledger.gpu
        missing_share = gpu.pages.num_free - gpu.adapter_room(self._ledger.waiting.kv_pages)
        if missing_share > 0 or not placement.short:
            return 0
        slots = gpu.slots.num_free + gpu.num_idle - len(placement.loads)
        behind = placement.behind[: max(1, min(most, slots)) - 1]
        return min(placement.short + sum(behind), gpu.kv_room().used)

    def apply(self, decision: Decision) -> None:
        """Carry out evictions and loads: the pages are the new adapters' from now on.

        The copy in HOST that a load reads is held until the load has ended.
        """
        ledger = self._ledger
        for digest in decision.evictions:
            ledger.evict(Tier.GPU, digest, "room")
        for load in decision.loads:
            below = ledger.host[load.digest]
            ledger.host.lease(below)
            ledger.gpu.take(load, below.place.spec)

    def take_host_loads(self) -> list[Copy[HostPlace]]:
        """Decide which adapters are read into CPU memory next, and reserve their blocks.

        The copy on DISK that a load reads is held until the load has ended.
        """
        ledger, gpu, host = self._ledger, self._ledger.gpu, self._ledger.host
        line = [pair for pair in self._line(Tier.HOST) if gpu.get(pair[0].digest) is None]
        if all(host.get(known.digest) is not None for known, _ in line):
            return []
        wants = []
        for known, hint in line:
            ready = ledger.disk.resident(known.digest) is not None
            blocks = host.blocks_for(known.elements * ledger.itemsize)
            wants.append(Want(known.digest, blocks, ready, hint))
        hints = hint_bounds(host.blocks.num_blocks, host.block_bytes)
        placement = place(wants, host, free=host.blocks.num_free, hints=hints)
        for digest in placement.evictions:
            ledger.evict(Tier.HOST, digest, "room")
        copies = []
        for want in placement.loads:
            ledger.disk.lease(ledger.disk[want.digest])
            copies.append(host.take(want.digest, want.size, hint=want.hint))
        return copies

    def absent(self) -> list[tuple[str, bool]]:
        """The ids that somebody waits for and no local tier has; for each, whether it is only
        hinted at."""
        ledger, now = self._ledger, self._ledger.clock()
        hinted = (key for key, _ in ledger.waiting.hints(now))
        line = {key: True for key in hinted if ledger.waiting.may_fetch(key, now)}
        line |= dict.fromkeys(ledger.waiting.order(), False)
        return [(adapter_id, hint) for adapter_id, hint in line.items() if ledger.lacks(adapter_id)]

    def wanted(self) -> list[tuple[str, Digest | None]]:
        """The adapters that are looked at, in order of arrival, and their content where known."""
        ledger = self._ledger
        ids = dict.fromkeys(ledger.waiting.order())
        ids |= dict.fromkeys(key for key, _ in ledger.waiting.hints(ledger.clock()))
        known = ((key, ledger.catalog.get(key)) for key in ids)
        return [(key, found.digest if found is not None else None) for key, found in known]

    def allocate_kv(self, n: int) -> tuple[int, ...] | None:
        """Pages for the KV cache, evicting cold adapters; None where there are not enough.

        Adapters that somebody waits for go last.
        """
        ledger, gpu = self._ledger, self._ledger.gpu
        gpu.check_leads()
        room = gpu.kv_room()
        if n > min(room.limit - room.used, room.reclaimable):
            return None
        if n > gpu.pages.num_free:
            wanted = {known.digest for known, _ in self._line(Tier.GPU)}
            for copy in sorted(gpu.coldest(), key=lambda copy: copy.digest in wanted):
                if n <= gpu.pages.num_free:
                    break
                ledger.evict(Tier.GPU, copy.digest, "kv")
        pages = gpu.pages.allocate(n, Owner.KV)
        self.end_promise(n)
        return pages

    def end_promise(self, kv_pages: int | None = None) -> None:
        """So many pages that were promised to KV have been taken; None: the rest isn't any more.
        Leases that yielded to the promise are served."""
        ledger, waiting = self._ledger, self._ledger.waiting
        waiting.kv_promised = max(0, waiting.kv_promised - kv_pages) if kv_pages is not None else 0
        yielding, waiting.yielding = waiting.yielding, set()
        for adapter_id in yielding:
            ledger.settle(adapter_id)

    def free_kv(self, pages: Iterable[int], step: int) -> None:
        """Pages that KV gives back; ``step`` may still use them. Raises as `GpuArena.free_kv`."""
        self._ledger.gpu.free_kv(pages, step)

    def _line(
        self, tier: Tier, waiting: Mapping[str, str] | None = None
    ) -> list[tuple[Known, bool]]:
        """The distinct contents that are wanted in ``tier``, in order of arrival, hints last; for
        each, whether it is only a hint."""
        ledger, now = self._ledger, self._ledger.clock()
        line: dict[Digest, tuple[Known, bool]] = {}
        for adapter_id in ledger.waiting.order(waiting):
            known = ledger.catalog.get(adapter_id)
            if known is not None and ledger.failures.get(adapter_id, now) is None:
                line.setdefault(known.digest, (known, False))
        for adapter_id, to in ledger.waiting.hints(now):
            known = ledger.catalog.get(adapter_id)
            if known is None or ledger.failures.get(adapter_id, now) is not None:
                continue
            if to is Tier.GPU or to is tier:
                line.setdefault(known.digest, (known, True))
        return list(line.values())
