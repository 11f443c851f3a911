"""From a step's jobs to tensors, through the model, to the tokens that it chooses.

A step is only launched here. What it chooses stays on the GPU, where the step behind it finds it;
a copy comes to the host, which `Launched.read` waits for. So the host can launch the next step
without knowing any token of this one.

On a GPU a step in which everybody decodes is a replay of a CUDA graph: launching a model's kernels
one by one takes the CPU longer than the GPU takes to run them. A graph is captured for each number
of rows and rank class, all of them at the start. Which adapters are in the step doesn't matter: the
kernels find that in the work list, which `lora_batch` writes to the same place each time.

All numbers of a step go to the GPU in one copy, from page-locked memory, so that the host need not
wait for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaptercache import AdapterCache
from adaptercache.kernels import LoraBatch, rank_class_of
from serve_job import Job, Sampling
from serve_model import Group, PagedLlama, Rows

__all__ = ["Launched", "Runner"]

Work = Sequence[tuple[Job, int]]
"""Who computes how many tokens: those that decode first."""


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # where the graph reads
    logits: Tensor  # and where it writes
    chosen: Tensor


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way.

    A job may end meanwhile, and give back what the step uses. No harm comes of it, for the step has
    made all its launches:

    - A block of its: keys and values of another sequence are written there by later launches, on
      the same stream. An adapter's bytes come from other streams, behind the fence of the last step
      that had begun when the block was freed, and this one had.
    - Its adapter: the batch held it until the last launch; what is loaded into its pages or its
      slot comes behind the fence that was recorded then (`adaptercache/tiers/streams.py`).
    - A block that others share: its tokens are all known, so none that is thrown away is in it.
    """

    rows: Mapping[Job, int]  # the jobs whose next token comes out of it, and where
    chosen: Tensor  # of each row, in CPU memory, once the event has come
    event: torch.cuda.Event | None  # None: it has

    def read(self) -> list[tuple[Job, int]]:
        """Each job's next token. Here the host waits for the GPU."""
        if self.event is not None:
            self.event.synchronize()
        chosen: list[int] = self.chosen.tolist()
        return [(job, chosen[row]) for job, row in self.rows.items()]


class Runner:
    """Launches steps. Not thread-safe.

    Args:
        model: over the cache's arena.
        cache: for one page of its own, into which the padding rows of graphs write.
        max_context: tokens of a sequence at most.
        max_running: jobs in a step at most.
    """

    def __init__(
        self, model: PagedLlama, cache: AdapterCache, max_context: int, max_running: int
    ) -> None:
        self.block_size = cache.kv_view(0).shape[2]
        self._max_running = max_running
        # What each row of the last step has chosen, or will, and whose token that is.
        self._last = torch.zeros(max_running, dtype=torch.int64, device=model.device)
        self._row_of: Mapping[Job, int] = {}
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
    def _on_gpu(self) -> bool:
        return bool(self._model.device.type == "cuda")

    @property
    def _has_graphs(self) -> bool:
        return self._on_gpu

    def capture(self) -> None:
        """Capture the graphs: call it once, before the first step."""
        if not self._has_graphs:
            return
        ranks = range(1, self._cache.layout.max_rank + 1)
        rank_classes = [0, *sorted({rank_class_of(rank) for rank in ranks})]  # 0: no adapters
        base, most = self._cache.acquire(None), _power_of_2(self._max_running)
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

    def __call__(self, work: Work, lora: LoraBatch) -> Launched:
        """Launch a step behind all before; nothing waits for the GPU. Call inside the batch's
        block. The step before may be under way, none before that."""
        has_adapters = any(slot >= 0 for slot, _ in lora.segments)
        padded = self.padded(work)
        if padded is None:
            numbers = self._send(self._numbers(work))
            logits = self._model(self._rows(numbers, work), lora if has_adapters else None)
            chosen = logits.argmax(dim=1)
        else:
            captured = self._graphs[padded, lora.rank_class if has_adapters else 0]
            captured.numbers.copy_(self._numbers(work, padded), non_blocking=True)
            self._replay(captured, lora)
            logits, chosen = captured.logits, captured.chosen
        self._row_of = {job: row for row, (job, n) in enumerate(work) if n == job.num_pending}
        self._sample(logits, chosen)
        # Behind this step's own look into it, and before the next step writes where this one did.
        self._last[: len(work)] = chosen[: len(work)]
        return self._launched(len(work))

    def _sample(self, logits: Tensor, chosen: Tensor) -> None:
        """Choose for the jobs that aren't greedy."""
        sampled = [
            (row, job.sampling.temperature, job.sampling.draw())
            for job, row in self._row_of.items()
            if job.sampling.temperature > 0
        ]
        if sampled:
            numbers = self._send(self._pinned(torch.tensor(sampled, dtype=torch.float64)))
            rows, temperatures, draws = numbers.unbind(dim=1)
            rows = rows.long()
            chosen[rows] = Sampling.choose(logits[rows], temperatures, draws)

    def _launched(self, rows: int) -> Launched:
        """The step that was launched last, its tokens on their way to the host."""
        chosen = torch.empty(rows, dtype=torch.int64, pin_memory=self._on_gpu)
        chosen.copy_(self._last[:rows], non_blocking=True)
        event = torch.cuda.Event() if self._on_gpu else None
        if event is not None:
            event.record()
        return Launched(self._row_of, chosen, event)

    def close(self) -> None:
        self._graphs.clear()
        self._cache.pages.free([self._spare])

    def _capture(self, rows: int, lora: LoraBatch | None) -> Captured:
        numbers = self._send(self._numbers((), rows))
        # Once as it is, which compiles and allocates what a capture must not.
        self._model(self._rows(numbers, (), rows), lora)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # All graphs share their memory: one runs at a time, and what of its logits and tokens is
        # wanted is taken by launches before the next one's.
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
            if job.unread:  # where the token is in `_last`, counted from its end
                tokens.append(self._row_of[job] - self._max_running)
            else:
                tokens.extend(job.tokens[job.computed : job.computed + count])
            for position in range(job.computed, job.computed + count):
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
        return self._pinned(torch.frombuffer(numbers, dtype=torch.int64))

    def _rows(self, numbers: Tensor, work: Work, padded: int | None = None) -> Rows:
        """Views of the numbers of a step."""
        jobs = padded or len(work)
        rows = padded or sum(count for _, count in work)
        sizes = [rows, rows, rows, rows, jobs, jobs * self._max_blocks]
        tokens, positions, pages, offsets, last, tables = numbers.split(sizes)
        tables = tables.view(jobs, self._max_blocks)
        tokens = torch.where(tokens < 0, self._last[tokens.clamp(max=-1)], tokens)
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

    def _pinned(self, numbers: Tensor) -> Tensor:
        """In page-locked memory, which PyTorch gives to nobody else before copies are over."""
        return numbers.pin_memory() if self._on_gpu else numbers

    def _send(self, numbers: Tensor) -> Tensor:
        return numbers.to(self._model.device, non_blocking=True)


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
