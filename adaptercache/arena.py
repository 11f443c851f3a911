"""Which adapter lies where: pages and slots on the GPU, blocks in CPU memory, bytes on disk.

Tables only: the memory itself belongs to the tiers. Plain Python. Not thread-safe: the cache's
lock guards them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from adaptercache.blocks import BlockAllocator, Run
from adaptercache.errors import CapacityError
from adaptercache.identity import Digest
from adaptercache.layout import ArenaShape, KVLayout, LoraLayout
from adaptercache.pages import Owner, PageAllocator
from adaptercache.peers import Peers
from adaptercache.placement import Placement
from adaptercache.policy import LRU, EvictionPolicy
from adaptercache.residency import Copy, Residency, State
from adaptercache.standing import Load
from adaptercache.step_room import KVRoom

__all__ = ["DiskShelf", "GpuArena", "GpuPlace", "HostArena", "HostPlace"]


class GpuPlace(NamedTuple):
    """Where an adapter lies on the GPU; ``spec`` says what its vector holds (`packing.VectorSpec`).

    ``after``: the last step that may use what was there before.
    """

    slot: int
    pages: tuple[int, ...]
    spec: Any
    after: int


class GpuArena(Residency[GpuPlace]):
    """The GPU's pages, shared with the KV cache, and its slots.

    Neither side can starve the other: KV never takes the last ``adapter_floor`` pages, and
    adapters never take the last ``kv_floor``. Adapters never evict KV.

    Args:
        shape: of the arena.
        num_slots: adapters at most.
        adapter_floor: pages of an adapter of maximum rank at every site; None where no KV cache
            shares the arena.
        kv_floor: None: as many as the largest waiting request asks for.
    """

    def __init__(
        self,
        shape: ArenaShape,
        num_slots: int,
        adapter_floor: int | None,
        kv_floor: int | None,
        new_policy: Callable[[], EvictionPolicy[Digest]],
    ) -> None:
        super().__init__(new_policy)
        self.shape = shape
        self.pages = PageAllocator(shape.num_pages)
        self.slots = PageAllocator(num_slots)
        self.kv_floor = kv_floor
        self.peers: Peers | None = None
        """The other ranks, where this one leads them."""
        self.follows = False
        """Whether rank 0 decides on what is here."""
        # The last step that may use what is, or was, in each page, and read each slot's row.
        self._last_steps = [0] * shape.num_pages
        self._last_steps_of_slots = [0] * num_slots
        self._kv_limit = 0
        if adapter_floor is not None:
            self._kv_limit = max(0, shape.num_pages - adapter_floor)

    @classmethod
    def shared(
        cls,
        shape: ArenaShape,
        num_slots: int,
        layout: LoraLayout,
        kv: KVLayout | None,
        new_policy: Callable[[], EvictionPolicy[Digest]],
    ) -> GpuArena:
        """With the floors that these layouts ask for; ``kv`` None: adapters alone."""
        if kv is None:
            return cls(shape, num_slots, None, 0, new_policy)
        adapter_floor = shape.pages_for(layout.max_elements)
        if adapter_floor >= shape.num_pages:
            raise CapacityError(
                "gpu_bytes leaves KV no page beside one adapter of max_rank "
                f"{layout.max_rank} at every site: raise it, or lower max_rank",
                needed=adapter_floor + 1,
                limit=shape.num_pages,
                unit="pages",
            )
        return cls(shape, num_slots, adapter_floor, kv.floor_pages, new_policy)

    def kv_room(self) -> KVRoom:
        """What the KV cache has, could get by eviction, and may have at most."""
        used = self.pages.count(Owner.KV)
        return KVRoom(used, self.pages.num_free + self.idle_size, self._kv_limit)

    @property
    def adapter_limit(self) -> int:
        """Pages that one adapter may take at most."""
        return self.shape.num_pages - min(self.kv_floor or 0, self._kv_limit)

    def adapter_room(self, largest_kv_pages: int) -> int:
        """Pages that adapters may take without eviction; negative where a floor is undercut.

        ``largest_kv_pages``: what the largest waiting request asks for.
        """
        floor = largest_kv_pages if self.kv_floor is None else self.kv_floor
        quota = self.shape.num_pages - min(floor, self._kv_limit)
        return min(self.pages.num_free, quota - self.pages.count(Owner.ADAPTER))

    def number(self, placement: Placement) -> tuple[Load, ...]:
        """The slots and pages that the loads get once the evictions are done; changes nothing."""
        if not placement.loads:
            return ()
        pages, slots = self.pages.preview(), self.slots.preview()
        for digest in placement.evictions:
            place = self[digest].place
            pages.free(place.pages)
            slots.free((place.slot,))
        loads = []
        for want in placement.loads:
            ids, slot = pages.allocate(want.size), slots.allocate(1)
            assert ids is not None and slot is not None, "placed within what is free"
            loads.append(Load(want.digest, slot[0], ids, want.hint))
        return tuple(loads)

    def take(self, load: Load, spec: Any) -> Copy[GpuPlace]:
        """Absent → LOADING, in the slot and pages that were decided on."""
        self.pages.take(load.pages, Owner.ADAPTER)
        self.slots.take((load.slot,), Owner.ADAPTER)
        place = GpuPlace(load.slot, load.pages, spec, self.free_after(load))
        copy = self.reserve(load.digest, len(load.pages), place, prefetched=load.hint)
        if self.peers is not None:
            self.peers.load(load)
            self.lease(copy)  # until every rank has it
        return copy

    def check_leads(self) -> None:
        """Raises RuntimeError where rank 0 decides."""
        if self.follows:
            raise RuntimeError("this rank follows: only rank 0 admits, acquires, and takes pages")

    @property
    def may_pipeline(self) -> bool:
        """Whether a step may wait for a copy that is under way: no other rank has to have it."""
        return self.peers is None and not self.follows

    def is_ready(self, copy: Copy[GpuPlace]) -> bool:
        """Whether it is whole, here and on every rank that follows."""
        is_here = copy.state is State.RESIDENT
        return is_here and (self.peers is None or not self.peers.are_loading(copy.digest))

    def free_after(self, load: Load) -> int:
        """The last step that may use what was in a load's pages and slot."""
        pages = (self._last_steps[page] for page in load.pages)
        return max(self._last_steps_of_slots[load.slot], *pages, 0)

    def was_in_use(self, load: Load, step: int) -> None:
        """Steps up to this one may use what was in a load's pages, whosever it was."""
        for page in load.pages:
            self._last_steps[page] = max(step, self._last_steps[page])

    def free_kv(self, pages: Iterable[int], step: int) -> None:
        """Take pages back from KV; ``step`` may be using them still.

        Raises:
            ValueError: one of them is not KV's, or comes twice; nothing has changed.
        """
        pages = tuple(pages)
        self.pages.free(pages, Owner.KV)
        for page in pages:
            self._last_steps[page] = step

    def used_in(self, copy: Copy[GpuPlace], step: int) -> None:
        """A step has listed the adapter."""
        slots = self._last_steps_of_slots  # a row's last step is that of its adapter's pages
        slots[copy.place.slot] = max(step, slots[copy.place.slot])

    def drop(self, copy: Copy[GpuPlace]) -> None:
        super().drop(copy)
        if self.peers is not None:
            self.peers.evict(copy.digest)
        step = self._last_steps_of_slots[copy.place.slot]
        for page in copy.place.pages:
            self._last_steps[page] = max(step, self._last_steps[page])
        self.pages.free(copy.place.pages, Owner.ADAPTER)
        self.slots.free((copy.place.slot,), Owner.ADAPTER)


@dataclass(slots=True)
class HostPlace:
    """Where an adapter lies in CPU memory; ``spec`` says what its vector holds, once its bytes
    come."""

    runs: tuple[Run, ...]
    spec: Any = None


class HostArena(Residency[HostPlace]):
    """The blocks of CPU memory. Adapters that are on the GPU too are shielded: evicted last."""

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        new_policy: Callable[[], EvictionPolicy[Digest]],
    ) -> None:
        super().__init__(new_policy)
        self.blocks = BlockAllocator(num_blocks)
        self.block_bytes = block_bytes

    def blocks_for(self, nbytes: int) -> int:
        """Blocks that a vector of ``nbytes`` takes."""
        return -(-nbytes // self.block_bytes)

    def is_coming(self, digest: Digest) -> bool:
        """Whether its bytes are being read: copies to the GPU may go ahead of the last ones."""
        copy = self.get(digest)
        return copy is not None and copy.state is State.LOADING and copy.place.spec is not None

    def take(self, digest: Digest, size: int, *, hint: bool) -> Copy[HostPlace]:
        """Absent → LOADING, in ``size`` blocks, which must be free."""
        runs = self.blocks.allocate(size)
        assert runs is not None, "placed within what is free"
        return self.reserve(digest, size, HostPlace(runs), prefetched=hint)

    def begin(self, digest: Digest, spec: object) -> None:
        """Its bytes come now; ``spec`` says what its vector holds."""
        self[digest].place.spec = spec

    def drop(self, copy: Copy[HostPlace]) -> None:
        assert not copy.leases, "a copy to the GPU reads these blocks"
        super().drop(copy)
        self.blocks.free(copy.place.runs)


class DiskShelf(Residency[None]):
    """The content on disk that this cache knows of.

    Its bytes and its order of eviction are the directory's, which other processes change too: see
    `DiskRoom`. So more may be known than is there; what has gone is found out by reading it.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(LRU)
        self.num_bytes = num_bytes

    def evictable(self, digest: Digest) -> bool:
        """Whether nobody here holds it."""
        copy = self.get(digest)
        return copy is None or copy.idle

    def published(self, digest: Digest, nbytes: int) -> None:
        """Content is on disk, whole, in files of ``nbytes``."""
        copy = self.get(digest)
        if copy is None:
            self.loaded(self.reserve(digest, nbytes, None))
        else:
            self.resize(copy, nbytes)
