"""The stacked A and B of all adapters on the GPU, as kernels read them: the arena and its tables.

Nothing here knows of a cache: these are tensors at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor

from adaptercache.base_model import BaseModel
from adaptercache.kernels.dense import read_dense
from adaptercache.kernels.work import WorkShape
from adaptercache.kernels.work_buffer import WorkBuffer
from adaptercache.layout import ADAPTER_PAGE_BYTES, ALIGN, ArenaShape, LoraLayout, align
from adaptercache.packing import VectorSpec

__all__ = ["Group", "LoraStack"]

_WORK_BUFFERS = 64  # numbers of rows: a graph's few, and an eager engine's latest


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Modules of one layer that share their input, as a call of `add_lora` names them."""

    layer: int
    modules: tuple[str, ...]
    sites: tuple[int, ...]
    """Their indices in the tables."""
    in_features: int
    widths: tuple[int, ...]
    """Their out_features."""
    elements: int
    """Of their A and B, a rank."""
    launches: dict[Any, Any] = field(default_factory=dict)
    """What was found out for launching them, kept for the next step (see `launch`)."""


class LoraStack:
    """An arena of flat adapters and the tables that say what lies where.

    Attributes:
        arena: ``[rows, num_pages, page_elems]`` of the layout's dtype.
        pages: ``int32 [slots, max_pages]``, the page list of each slot.
        start: ``int32 [slots, sites]``, in units of 512 elements; −1 = absent.
        rank: ``int32 [slots, sites]``; 0 = absent.
        scaling: ``float32 [slots, sites]``.
        known_ranks: of slots, the largest, where the host knows it: of `from_dense`.

    The four tables are views of one ``int32 [slots, row]`` tensor, ``table``, so that a slot is
    set by one copy of one row (see `row`). Their rows are therefore strided; the addresses never
    change. Sites are those of the layout, in its order.

    Thread-safe to read. Whoever writes the arena or the table orders that against the kernels
    that read them.
    """

    @torch.inference_mode(False)  # else only that mode could write to what is made
    def __init__(
        self,
        layout: LoraLayout,
        shape: ArenaShape,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        dtype = getattr(torch, layout.dtype)
        cells = (shape.rows, shape.num_pages, shape.page_elems)
        self.layout = layout
        self.shape = shape
        self.num_slots = num_slots
        self.arena = torch.empty(cells, dtype=dtype, device=device)
        self._max_pages = shape.pages_for(layout.max_elements)
        sites = len(layout.sites)
        self.table = torch.zeros(
            (num_slots, self._max_pages + 3 * sites), dtype=torch.int32, device=device
        )
        self.pages, self.start, self.rank, scaling = self.table.split(
            (self._max_pages, sites, sites, sites), dim=1
        )
        self.scaling = scaling.view(torch.float32)
        self.start.fill_(-1)
        self.known_ranks: dict[int, int] = {}
        self.device = self.arena.device
        self.dtype = dtype
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._index = {(s.layer, s.module): i for i, s in enumerate(layout.sites)}
        self._work: LRUCache[int, WorkBuffer] = LRUCache(_WORK_BUFFERS)
        self._captured_work: dict[int, WorkBuffer] = {}
        # Captured graphs write to what they were captured with, so what was outgrown stays. Each is
        # at least twice the one before, so all are no more than twice the last.
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        self._scratch = [(nothing, nothing.int())]

    @classmethod
    @torch.no_grad()  # A and B may be parameters
    def from_dense(
        cls,
        dense: Mapping[tuple[int, str], tuple[Tensor, Tensor, Sequence[float] | Tensor]],
        ranks: Sequence[int] | None = None,
    ) -> LoraStack:
        """A stack of your own tensors, for the kernels without the cache. They are copied.

        Args:
            dense: by layer and module (a name without dots): ``A [slots, r, in]``,
                ``B [slots, out, r]``, and a finite scaling for each slot. ``r`` is at most 512.
            ranks: of each slot, where ``r`` is padded: what is beyond it in A and B is left out.
                None: ``r`` for all.

        Raises:
            ValueError: nothing given; or keys, shapes, dtypes, devices, ranks or scalings that
                don't go together, or that can't be.
            TypeError: something of another type than it must be.
        """
        given = read_dense(dense, ranks)
        matrices = given.matrices
        a, _ = next(iter(matrices.values()))
        base = BaseModel.from_table(given.table)
        layout = LoraLayout(base, max_rank=given.max_rank, dtype=str(a.dtype))
        keys = [(site.layer, site.module) for site in layout.sites]
        specs = []
        for slot, most in enumerate(given.ranks):
            of_slot = [min(most, matrices[key][0].shape[1]) for key in keys]
            scalings = [given.scalings[key][slot] for key in keys]
            specs.append(VectorSpec.of(layout, of_slot, scalings))
        page_elems = ADAPTER_PAGE_BYTES // layout.itemsize
        pages = [-(-spec.elements // page_elems) for spec in specs]
        shape = ArenaShape(1, max(1, sum(pages)), ADAPTER_PAGE_BYTES, layout.itemsize)
        stack = cls(layout, shape, given.num_slots, a.device)
        first = 0
        for slot, spec in enumerate(specs):
            vector = stack.arena.view(-1)[first * page_elems :]  # its pages lie side by side
            for key, rank, start in zip(keys, spec.ranks, spec.starts, strict=True):
                if rank:
                    a, b = matrices[key][0][slot, :rank], matrices[key][1][slot, :, :rank]
                    vector[start : start + a.numel()] = a.flatten()
                    start += align(a.numel())
                    vector[start : start + b.numel()] = b.t().flatten()
            stack.table[slot].copy_(stack.row(spec, range(first, first + pages[slot])))
            stack.known_ranks[slot] = spec.max_rank
            first += pages[slot]
        return stack

    def site(self, layer: int, module: str) -> int:
        """The index of a site in the tables.

        Raises:
            ValueError: the layout has no such module in that layer.
        """
        try:
            return self._index[layer, module]
        except KeyError:
            its = [name for at, name in self._index if at == layer]
            if not its:
                raise ValueError(f"layer {layer!r} has no modules") from None
            raise ValueError(
                f"no module {module!r} in layer {layer!r}, there are {', '.join(its)}"
            ) from None

    def group(self, layer: int, modules: Sequence[str]) -> Group:
        """The modules that one call of `add_lora` serves; the same object each time.

        Raises:
            TypeError: one string instead of several.
            ValueError: no modules, an unknown one, or inputs that differ in width.
        """
        key = (layer, modules if isinstance(modules, tuple) else tuple(modules))
        return self._groups.get(key) or self._new_group(key, modules)

    def _new_group(self, key: tuple[int, tuple[str, ...]], modules: Sequence[str]) -> Group:
        if isinstance(modules, str):
            raise TypeError(f"modules is one string: give ({modules!r},)")
        layer, names = key
        indices = tuple(self.site(layer, name) for name in names)
        sites = [self.layout.sites[index] for index in indices]
        if not names:
            raise ValueError("no modules are named")
        if len({site.in_features for site in sites}) > 1:
            raise ValueError(f"{', '.join(names)}: their inputs differ in width")
        widths = tuple(site.out_features for site in sites)
        elements = sum(site.in_features + site.out_features for site in sites)
        group = Group(layer, names, indices, sites[0].in_features, widths, elements)
        return self._groups.setdefault(key, group)

    def work(self, shape: WorkShape) -> WorkBuffer:
        """The buffer for batches of as many rows, the same one each time: of the last 64 numbers of
        rows, and of all that `keep_work` was told."""
        buffer = self._captured_work.get(shape.num_rows) or self._work.get(shape.num_rows)
        if buffer is None:
            buffer = self._work[shape.num_rows] = WorkBuffer(shape.numel, self.device)
        return buffer

    def keep_work(self, shape: WorkShape) -> None:
        """A CUDA graph is captured with this buffer, and finds each batch's work there."""
        self._captured_work[shape.num_rows] = self.work(shape)

    def scratch(self, numel: int, counters: int) -> tuple[Tensor, Tensor]:
        """What all launches on the one compute stream share: ``float32 [numel]`` for partial sums,
        and ``int32 [counters]`` that are 0 between launches. They grow at their first use.

        Raises:
            RuntimeError: they would have to grow while a CUDA graph is captured.
        """
        sums, zeros = self._scratch[-1]
        if sums.numel() < numel or zeros.numel() < counters:
            self._grow_scratch(numel, counters)
        return self._scratch[-1]

    @torch.inference_mode(False)
    def _grow_scratch(self, numel: int, counters: int) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "LoRA scratch is too small: call warmup, or run this batch once, then capture"
            )
        sums, zeros = self._scratch[-1]
        if sums.numel() < numel:
            size = max(numel, 2 * sums.numel())
            sums = torch.empty(size, dtype=torch.float32, device=self.device)
        if zeros.numel() < counters:
            size = max(counters, 2 * zeros.numel())
            zeros = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._scratch.append((sums, zeros))

    def row(self, spec: VectorSpec, pages: Sequence[int]) -> Tensor:
        """The row of ``table`` for an adapter in these pages: ``int32 [row]`` in CPU memory."""
        row = torch.zeros(self.table.shape[1], dtype=torch.int32)
        sites = len(self.layout.sites)
        at_pages, start, rank, scaling = row.split((self._max_pages, sites, sites, sites))
        at_pages[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        start.copy_(torch.tensor([s // ALIGN if s >= 0 else -1 for s in spec.starts]))
        rank.copy_(torch.tensor(spec.ranks))
        scaling.view(torch.float32).copy_(torch.tensor(spec.scalings, dtype=torch.float32))
        return row

    def elements(self, slot: int, start: int, count: int) -> Tensor:
        """``count`` elements of a slot's flat vector from ``start`` on, gathered from its cells."""
        rows, elems = self.shape.rows, self.shape.page_elems
        first, last = start // elems, (start + count - 1) // elems
        cells = torch.arange(first, last + 1, device=self.device)
        pages = self.pages[slot, cells // rows].long()
        gathered = self.arena[cells % rows, pages].flatten()
        offset = start - first * elems
        return gathered[offset : offset + count]

    def dense(self, slot: int, layer: int, module: str) -> tuple[Tensor, Tensor, float] | None:
        """``(A [r, in], B [out, r], scaling)`` of one slot, gathered; None where absent.

        For other people's kernels and for checks: on a GPU it waits for the table.
        """
        index = self.site(layer, module)
        rank = int(self.rank[slot, index])
        if rank == 0:
            return None
        site = self.layout.sites[index]
        start = int(self.start[slot, index]) * ALIGN
        a = self.elements(slot, start, rank * site.in_features)
        start += align(rank * site.in_features)
        b = self.elements(slot, start, rank * site.out_features)
        return (
            a.view(rank, site.in_features),
            b.view(rank, site.out_features).t(),
            float(self.scaling[slot, index]),
        )
