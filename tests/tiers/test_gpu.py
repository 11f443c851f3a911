"""The GPU tier on the CPU device: pages, slots, tables, and steps that are under way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import BASE_CONFIG

from adaptercache import CapacityError, KVLayout, LoraLayout
from adaptercache.layout import ArenaShape
from adaptercache.packing import VectorSpec
from adaptercache.pages import Owner, PageAllocator
from adaptercache.testing import TierContract, any_device
from adaptercache.tiers import ways
from adaptercache.tiers.gpu import GpuTier

LAYOUT = LoraLayout.from_config(
    BASE_CONFIG,
    max_rank=16,
    dtype="float32",
)
KV = KVLayout(block_size=16, kv_heads=1, head_dim=16, dtype="float32")
NUM_PAGES, SLOTS = 17, 12


def gpu_tier(rows: int = 2) -> GpuTier:
    """With pages of as many cells: 1 as where there is no KV, 2 as with KV in two layers."""
    shape = ArenaShape(rows, NUM_PAGES, KV.block_bytes * 2 // rows, LAYOUT.itemsize)
    return GpuTier(LAYOUT, shape, SLOTS, torch.device(any_device()))


def spec_of_length(elements: int) -> VectorSpec:
    """Of a vector whose content nobody looks into."""
    sites = len(LAYOUT.sites)
    return VectorSpec((0,) * sites, (0.0,) * sites, (-1,) * sites, elements, frozenset())


def write(
    tier: GpuTier,
    slot: int,
    pages: tuple[int, ...],
    elements: int,
    pieces: Iterable[torch.Tensor],
    after: int = 0,
) -> None:
    """A vector into these pages, from start to end."""
    tier.write(slot, tier.expect(slot, pages, spec_of_length(elements), lambda: pieces, after))


def to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(torch.uint8).tolist())


class Pieces:
    """A vector's bytes in pieces of uneven lengths, as blocks of CPU memory lie; the last may
    fail."""

    def __init__(self, data: bytes, fails: bool = False) -> None:
        self._data, self._fails = data, fails

    def __iter__(self) -> Iterator[torch.Tensor]:
        at, step = 0, 1000
        while at < len(self._data):
            if self._fails and at + step >= len(self._data):
                raise OSError("injected")
            yield torch.frombuffer(bytearray(self._data[at : at + step]), dtype=torch.uint8)
            at, step = at + step, step * 2


class Pages:
    """`GpuTier` with a `PageAllocator`, as the contract wants it."""

    def __init__(self, tier: GpuTier) -> None:
        self.tier = tier
        self.capacity = NUM_PAGES
        self.unit = tier.shape.rows * tier.shape.page_bytes
        self._pages, self._slots = PageAllocator(NUM_PAGES), PageAllocator(SLOTS + NUM_PAGES)
        self._held: dict[str, tuple[int, tuple[int, ...], int]] = {}

    def store(self, name: str, data: bytes) -> None:
        self._write(name, data, Pieces(data))

    def store_in_vain(self, name: str, data: bytes) -> None:
        self._write(name, data, Pieces(data, fails=True))

    def _write(self, name: str, data: bytes, pieces: Pieces) -> None:
        pages = self._pages.allocate(-(-len(data) // self.unit), Owner.ADAPTER)
        if pages is None:
            raise CapacityError("no page is free")
        slot = len(self._held) % SLOTS
        try:
            write(self.tier, slot, pages, len(data) // 4, pieces)
        except OSError:
            self._pages.free(pages, Owner.ADAPTER)
            raise
        self._held[name] = (slot, pages, len(data))

    def load(self, name: str) -> bytes:
        slot, pages, nbytes = self._held[name]
        stack = self.tier.stack
        stack.table[slot] = stack.row(spec_of_length(nbytes // 4), pages)  # slots are fewer
        return to_bytes(stack.elements(slot, 0, nbytes // 4))

    def drop(self, name: str) -> None:
        self._pages.free(self._held.pop(name)[1], Owner.ADAPTER)

    def used(self) -> int:
        return NUM_PAGES - self._pages.num_free


class TestPagesOfOneCell(TierContract):
    @contextmanager
    def tier(self) -> Iterator[Pages]:
        yield Pages(gpu_tier(rows=1))


class TestPagesOfACellALayer(TierContract):
    @contextmanager
    def tier(self) -> Iterator[Pages]:
        yield Pages(gpu_tier(rows=2))


class TestSmallStaging(TierContract):
    """An adapter that goes through the staging buffer in several turns."""

    @contextmanager
    def tier(self) -> Iterator[Pages]:
        before, ways.STAGED_BYTES = ways.STAGED_BYTES, 2 * 2 * KV.block_bytes
        try:
            yield Pages(gpu_tier())
        finally:
            ways.STAGED_BYTES = before


class TestStridedCopies(TierContract):
    """Pages that are copied one by one, each into all of its rows at once."""

    @contextmanager
    def tier(self) -> Iterator[Pages]:
        tier = gpu_tier()
        way = ways.Strided(tier.streams, tier.stack)
        tier._memory = tier.stack, ways.Ways(way, way, way)
        yield Pages(tier)


def test_cell_j_of_a_vector_lies_at_row_j_mod_rows_of_its_page() -> None:
    tier = gpu_tier()
    elements = tier.shape.page_elems
    vector = torch.arange(5 * elements, dtype=torch.float32)
    pages = (7, 2, 9)
    data = to_bytes(vector)
    write(tier, 0, pages, len(vector), Pieces(data))
    for cell in range(5):
        at = tier.stack.arena[cell % 2, pages[cell // 2]]
        assert at.cpu().equal(vector[cell * elements : (cell + 1) * elements])


def test_an_empty_slot_has_no_site() -> None:
    tier = gpu_tier()
    assert all(tier.stack.dense(3, s.layer, s.module) is None for s in LAYOUT.sites)


def test_addresses_stay_where_they_are_when_adapters_come_and_go() -> None:
    tier = gpu_tier()
    stack = tier.stack
    before = [t.data_ptr() for t in (stack.arena, stack.pages, stack.start, stack.scaling)]
    for slot in range(3):
        write(tier, slot, (slot,), 8, Pieces(bytes(32)))
    after = [t.data_ptr() for t in (stack.arena, stack.pages, stack.start, stack.scaling)]
    assert before == after


def test_a_kv_block_is_a_page_of_its_layers_row() -> None:
    tier = gpu_tier()
    view = tier.kv_view(KV, 1)
    assert view.shape == (NUM_PAGES, 2, 16, 1, 16)
    view[4] = 3.0
    assert (tier.stack.arena[1, 4] == 3.0).all()


def test_a_kv_block_may_have_any_shape_and_dtype_of_its_bytes() -> None:
    tier = gpu_tier()
    assert tier.kv_view(KV, 0, (16, 64), torch.bfloat16).shape == (NUM_PAGES, 16, 64)


@pytest.mark.parametrize(
    ("layer", "shape"), [(2, None), (-1, None), (0, (16, 65)), (0, (1,))], ids=str
)
def test_a_kv_view_that_cannot_be_is_refused(layer: int, shape: Any) -> None:
    with pytest.raises(ValueError, match=r"layer|bytes"):
        gpu_tier().kv_view(KV, layer, shape, torch.bfloat16 if shape else None)


def test_pages_given_up_in_a_step_are_written_only_after_it() -> None:
    tier = gpu_tier()
    written = threading.Event()

    def write_it() -> None:
        write(tier, 0, (0,), 8, Pieces(bytes(32)), tier.streams.last_opened)
        written.set()

    with tier.streams.step():
        mover = threading.Thread(target=write_it)
        mover.start()
        assert not written.wait(0.05)
    assert written.wait(5)
    mover.join()


def test_a_step_that_began_after_pages_were_given_up_is_not_waited_for() -> None:
    tier = gpu_tier()
    with tier.streams.step():
        given_up_in = tier.streams.last_opened
    with tier.streams.step():
        mover = threading.Thread(
            target=write, args=(tier, 0, (0,), 8, Pieces(bytes(32)), given_up_in), daemon=True
        )
        mover.start()
        mover.join(5)
        assert not mover.is_alive()


def test_after_drop_and_restore_the_tier_is_empty_and_usable() -> None:
    tier = gpu_tier()
    tier.drop()
    tier.drop()
    assert not tier.is_up
    tier.restore()
    data = bytes(range(32))
    write(tier, 0, (3,), 8, Pieces(data))
    assert to_bytes(tier.stack.elements(0, 0, 8)) == data
