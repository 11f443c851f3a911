"""From a step's jobs to tensors, through the model, to the tokens that were chosen.

On a GPU a step in which everybody decodes is a replay of a CUDA graph: launching a model's kernels
one by one takes the CPU longer than the GPU takes to run them. A graph is captured for each shape
of a step. Which adapters are in the step is no part of its shape: the kernels find that in the work
list, which `lora_batch` writes to the same place each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptercache import AdapterCache
from adaptercache.kernels import LoraBatch
from serve_job import Job
from serve_model import Group, PagedLlama, Rows

__all__ = ["Runner"]

Work = Sequence[tuple[Job, int]]
"""Who computes how many tokens: those that decode first."""


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    rows: Rows  # where the graph reads
    logits: Tensor  # and where it writes


class Runner:
    """Computes steps. Not thread-safe.

    Args:
        model: over the cache's arena.
        cache: for one page of its own, into which the padding rows of graphs write.
    """

    def __init__(self, model: PagedLlama, cache: AdapterCache) -> None:
        self.block_size = cache.kv_view(0).shape[2]
        self._model = model
        self._pages = cache.pages
        self._has_graphs = model.device.type == "cuda"
        self._graphs: dict[tuple[int, int, int], Captured] = {}
        # All graphs share their memory: one runs at a time, and its logits are read at once.
        self._pool = torch.cuda.graph_pool_handle() if self._has_graphs else None
        pages = cache.pages.allocate(1)
        assert pages is not None, "nothing else has pages yet"
        self._spare = pages[0]

    def padded(self, work: Work) -> int | None:
        """The number of rows of a step's graph; None where it has none."""
        if not self._has_graphs or any(job.num_pending > 1 for job, _ in work):
            return None
        return 1 << (len(work) - 1).bit_length()

    def __call__(self, work: Work, lora: LoraBatch) -> list[int]:
        """The token that comes out behind each job's last row. Call inside the batch's block."""
        has_adapters = any(slot >= 0 for slot, _ in lora.segments)
        padded = self.padded(work)
        rows = self._rows(work, padded)
        if padded is None:
            logits = self._model(rows, lora if has_adapters else None)
        else:
            logits = self._replay(rows, lora, lora.rank_class if has_adapters else 0)
        chosen: list[int] = logits[: len(work)].argmax(dim=1).tolist()
        for index, (job, _) in enumerate(work):
            if job.sampling.temperature > 0:
                chosen[index] = job.sampling.choose(logits[index])
        return chosen

    def close(self) -> None:
        self._graphs.clear()
        self._pages.free([self._spare])

    def _replay(self, rows: Rows, lora: LoraBatch, rank_class: int) -> Tensor:
        key = (len(rows.tokens), rows.groups[0].tables.shape[1], rank_class)
        captured = self._graphs.get(key)
        if captured is None:
            # The first step of a shape runs as it is, which also compiles and allocates what a
            # capture must not. To have no slow step later, run one of each shape at the start.
            logits = self._model(rows, lora if rank_class else None)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": the cache's threads go on allocating and copying meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                written = self._model(rows, lora if rank_class else None)
            self._graphs[key] = Captured(graph, rows, written)
            return logits
        for mine, new in zip(_tensors(captured.rows), _tensors(rows), strict=True):
            mine.copy_(new)
        captured.graph.replay()
        return captured.logits

    def _rows(self, work: Work, padded: int | None) -> Rows:
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        last: list[int] = []
        for job, count in work:
            span = range(job.computed, job.computed + count)
            tokens += job.tokens[span.start : span.stop]
            positions += span
            pages += (job.pages[position // self.block_size] for position in span)
            last.append(len(tokens) - 1)
        decoding = [job.pages for job, _ in work if job.num_pending == 1]
        if padded is not None:
            missing = padded - len(work)
            tokens += [0] * missing
            positions += [0] * missing
            pages += [self._spare] * missing
            last += range(len(work), padded)
            decoding += [[self._spare]] * missing
        at = self._tensor(positions)
        groups = []
        if decoding:
            groups.append(
                Group(self._tables(decoding, padded is not None), at[: len(decoding), None])
            )
        for (job, count), end in zip(work, last, strict=False):
            if job.num_pending > 1:
                blocks = -(-(job.computed + count) // self.block_size)
                tables = self._tables([job.pages[:blocks]])
                groups.append(Group(tables, at[None, end + 1 - count : end + 1]))
        return Rows(
            self._tensor(tokens),
            at,
            self._tensor(pages),
            self._tensor([position % self.block_size for position in positions]),
            self._tensor(last),
            tuple(groups),
        )

    def _tables(self, tables: list[list[int]], is_graph: bool = False) -> Tensor:
        """Of one width. A graph's is a power of two, so that there are few graphs."""
        width = max(map(len, tables))
        if is_graph:
            width = max(8, 1 << (width - 1).bit_length())
        return self._tensor([table + [table[0]] * (width - len(table)) for table in tables])

    def _tensor(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._model.device)


def _tensors(rows: Rows) -> tuple[Tensor, ...]:
    (group,) = rows.groups
    return rows.tokens, rows.positions, rows.pages, rows.offsets, rows.last, group.tables
