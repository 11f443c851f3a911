"""From a step's jobs to tensors, through the model, to the tokens that were chosen.

On a GPU a step in which everybody decodes is a replay of a CUDA graph: launching a model's kernels
one by one takes the CPU longer than the GPU takes to run them. A graph is captured for each number
of rows and rank class, all of them at the start. Which adapters are in the step doesn't matter: the
kernels find that in the work list, which `lora_batch` writes to the same place each time.

All numbers of a step go to the GPU in one copy, from page-locked memory, so that the host need not
wait for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaptercache import AdapterCache
from adaptercache.kernels import LoraBatch, rank_class_of
from serve_job import Job
from serve_model import Group, PagedLlama, Rows

__all__ = ["Runner"]

Work = Sequence[tuple[Job, int]]
"""Who computes how many tokens: those that decode first."""


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # where the graph reads
    logits: Tensor  # and where it writes
    chosen: Tensor


class Runner:
    """Computes steps. Not thread-safe.

    Args:
        model: over the cache's arena.
        cache: for one page of its own, into which the padding rows of graphs write.
        max_context: tokens of a sequence at most.
    """

    def __init__(self, model: PagedLlama, cache: AdapterCache, max_context: int) -> None:
        self.block_size = cache.kv_view(0).shape[2]
        self._model = model
        self._cache = cache
        self._max_blocks = -(-max_context // self.block_size)
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._pool: Any = None
        pages = cache.pages.allocate(1)
        assert pages is not None, "nothing else has pages yet"
        self._spare = pages[0]
        self._spares = array("q", pages * self._max_blocks)

    @property
    def _has_graphs(self) -> bool:
        return bool(self._model.device.type == "cuda")

    def capture(self, max_running: int) -> None:
        """Capture the graphs of up to so many rows: call it once, before the first step."""
        if not self._has_graphs:
            return
        ranks = range(1, self._cache.layout.max_rank + 1)
        rank_classes = [0, *sorted({rank_class_of(rank) for rank in ranks})]  # 0: no adapters
        base, most = self._cache.acquire(None), _power_of_2(max_running)
        for rows in (most >> halvings for halvings in range(most.bit_length())):
            for rank_class in rank_classes:
                with self._cache.lora_batch([(base, rows)], rank_to=rank_class or None) as lora:
                    captured = self._capture(rows, lora if rank_class else None)
                self._graphs[rows, rank_class] = captured

    def padded(self, work: Work) -> int | None:
        """The number of rows of a step's graph; None where it has none."""
        if not self._has_graphs or any(job.num_pending > 1 for job, _ in work):
            return None
        return _power_of_2(len(work))

    def __call__(self, work: Work, lora: LoraBatch) -> list[int]:
        """The token that comes out behind each job's last row. Call inside the batch's block."""
        has_adapters = any(slot >= 0 for slot, _ in lora.segments)
        padded = self.padded(work)
        if padded is None:
            numbers = self._send(self._numbers(work))
            logits = self._model(self._rows(numbers, work), lora if has_adapters else None)
            tokens = logits.argmax(dim=1)
        else:
            captured = self._graphs[padded, lora.rank_class if has_adapters else 0]
            captured.numbers.copy_(self._numbers(work, padded), non_blocking=True)
            self._replay(captured, lora)
            logits, tokens = captured.logits, captured.chosen
        chosen: list[int] = tokens[: len(work)].tolist()  # here the host waits
        for index, (job, _) in enumerate(work):
            if job.sampling.temperature > 0:
                chosen[index] = job.sampling.choose(logits[index])
        return chosen

    def close(self) -> None:
        self._graphs.clear()
        self._cache.pages.free([self._spare])

    def _capture(self, rows: int, lora: LoraBatch | None) -> Captured:
        numbers = self._send(self._numbers((), rows))
        # Once as it is, which compiles and allocates what a capture must not.
        self._model(self._rows(numbers, (), rows), lora)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # All graphs share their memory: one runs at a time, and its logits are read at once.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # "thread_local": the cache's threads go on allocating and copying meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._model(self._rows(numbers, (), rows), lora)
            chosen = logits.argmax(dim=1)
        return Captured(graph, numbers, logits, chosen)

    def _replay(self, captured: Captured, lora: LoraBatch) -> None:
        captured.graph.replay()

    def _numbers(self, work: Work, padded: int | None = None) -> Tensor:
        """All of a step's numbers, one part behind the other, in CPU memory: see `_rows`. Those of
        a graph have ``padded`` rows; what is missing goes to the spare page."""
        tokens, positions, pages, offsets, last, tables = (array("q") for _ in range(6))
        for job, count in work:
            for position in range(job.computed, job.computed + count):
                tokens.append(job.tokens[position])
                positions.append(position)
                pages.append(job.pages[position // self.block_size])
                offsets.append(position % self.block_size)
            last.append(len(tokens) - 1)
            tables.extend(array("q", job.pages))
            tables.extend(self._spares[len(job.pages) :])
        for row in range(len(work), padded or 0):
            for part in (tokens, positions, offsets):
                part.append(0)
            pages.append(self._spare)
            last.append(row)
            tables.extend(self._spares)
        numbers = tokens + positions + pages + offsets + last + tables
        found = torch.frombuffer(numbers, dtype=torch.int64)
        return found.pin_memory() if self._model.device.type == "cuda" else found

    def _rows(self, numbers: Tensor, work: Work, padded: int | None = None) -> Rows:
        """Views of the numbers of a step."""
        jobs = padded or len(work)
        rows = padded or sum(count for _, count in work)
        sizes = [rows, rows, rows, rows, jobs, jobs * self._max_blocks]
        tokens, positions, pages, offsets, last, tables = numbers.split(sizes)
        tables = tables.view(jobs, self._max_blocks)
        if padded:
            groups = [Group(tables, positions[:, None])]
        else:
            groups = list(self._groups_of(work, tables, positions))
        return Rows(tokens, positions, pages, offsets, last, tuple(groups))

    def _groups_of(self, work: Work, tables: Tensor, positions: Tensor) -> Iterator[Group]:
        blocks = [-(-(job.computed + count) // self.block_size) for job, count in work]
        first = sum(job.num_pending == 1 for job, _ in work)
        if first:
            yield Group(tables[:first, : max(blocks[:first])], positions[:first, None])
        row = first
        for number, (_, count) in enumerate(work[first:], start=first):
            its = tables[number : number + 1, : blocks[number]]
            yield Group(its, positions[None, row : row + count])
            row += count

    def _send(self, numbers: Tensor) -> Tensor:
        return numbers.to(self._model.device, non_blocking=True)


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
