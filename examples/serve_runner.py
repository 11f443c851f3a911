"""From a step's jobs to tensors, through the model, to the tokens that it chooses.

A step is only launched here. What it chooses stays on the GPU, where the step behind it finds it;
a copy comes to the host, which `Launched.read` waits for. So the host can launch the next step
without knowing any token of this one.

On a GPU every step is a replay of a CUDA graph: launching a model's kernels one by one takes the
CPU longer than the GPU takes to run them. A graph is captured for each padded shape of a step,
each rank class, and adapters of attention alone or of any modules (a pair of LoRA kernels takes
some 4 µs, even if nobody has anything for it), all of them at the start. Which adapters are in the
step doesn't matter: the kernels find that in the work list, which `lora_batch` writes to the same
place each time.

All numbers of a step go to the GPU in one copy, from page-locked memory, so that the host need not
wait for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaptercache import AdapterCache
from adaptercache.kernels import LoraBatch, rank_class_of
from serve_job import Job, Sampling, Settings
from serve_model import PagedLlama
from serve_rows import Rows, numbers_of
from serve_shape import Limits, Shape, Work

__all__ = ["Kind", "Launched", "Runner"]

OF_ATTENTION = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))


class Kind(NamedTuple):
    """What a graph computes: steps of a padded shape whose adapters are up to a rank class, 0 where
    there are none, and have nothing outside of some modules."""

    shape: Shape
    rank_class: int
    modules: frozenset[str]


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
        cache: for one page of its own, into which padding rows write.
        settings: what a step and a sequence hold at most.
    """

    def __init__(self, model: PagedLlama, cache: AdapterCache, settings: Settings) -> None:
        self.block_size: int = cache.kv_view(0).shape[2]
        self._max_running = settings.max_running
        blocks = -(-settings.max_context // self.block_size)
        self._limits = Limits(
            settings.max_step_tokens, settings.max_running, blocks, self.block_size
        )
        self._model = model
        self._cache = cache
        # Where each step finds its numbers, and leaves its logits and tokens: one place for all,
        # for one step runs at a time, and what of them is wanted is taken before the next one's.
        most = max(sum(shape.sizes) for shape in self._limits.shapes())
        self._numbers = torch.zeros(most, dtype=torch.int64, device=model.device)
        self._logits = torch.zeros(
            self._max_running, model.vocab_size, dtype=torch.float32, device=model.device
        )
        # What each job of the last step has chosen, or will, and whose token that is.
        self._last = torch.zeros(self._max_running, dtype=torch.int64, device=model.device)
        self._row_of: Mapping[Job, int] = {}
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        pages = cache.pages.allocate(1)
        assert pages is not None, "nothing else has pages yet"
        self._spare = pages[0]

    @property
    def _on_gpu(self) -> bool:
        return bool(self._model.device.type == "cuda")

    @property
    def _pads(self) -> bool:
        return self._on_gpu

    def kinds(self) -> list[Kind]:
        """Of all steps, once they are padded."""
        layout, nothing = self._cache.layout, frozenset[str]()
        ranks = range(1, layout.max_rank + 1)
        rank_classes = sorted({rank_class_of(rank) for rank in ranks})
        modules = {OF_ATTENTION.intersection(layout.modules), frozenset(layout.modules)} - {nothing}
        found = [(0, nothing), *itertools.product(rank_classes, modules)]
        return [Kind(shape, *each) for shape in self._limits.shapes() for each in found]

    def capture(self) -> None:
        """Capture the graphs: call it once, before the first step."""
        if not self._on_gpu:
            return
        base = self._cache.acquire(None)
        for kind in self.kinds():
            pairs, rank_to = [(base, kind.shape.rows)], kind.rank_class or None
            with self._cache.lora_batch(pairs, rank_to=rank_to, modules_to=kind.modules) as lora:
                self._graphs[kind] = self._capture(kind.shape, lora if rank_to else None)

    def check(self, tokens: Sequence[int]) -> None:
        """Raises ValueError where the model hasn't one of them: a step with it fails."""
        if min(tokens) < 0 or max(tokens) >= self._model.num_tokens:
            raise ValueError(f"prompt: token ids are 0 to {self._model.num_tokens - 1}")

    def padded(self, work: Work) -> int:
        """The number of rows that a step is computed with."""
        return self._shape_of(work).rows

    def __call__(self, work: Work, lora: LoraBatch) -> Launched:
        """Launch a step behind all before; nothing waits for the GPU. Call inside the batch's
        block. The step before may be under way, none before that."""
        has_adapters = any(slot >= 0 for slot, _ in lora.segments)
        shape = self._shape_of(work)
        self._send(work, shape)
        if self._graphs:
            self._graphs[self._kind_of(shape, lora if has_adapters else None)].replay()
        else:
            self._compute(shape, lora if has_adapters else None)
        self._row_of = {job: row for row, (job, n) in enumerate(work) if n == job.num_pending}
        self._sample()
        return self._launched(len(work))

    def close(self) -> None:
        self._graphs.clear()
        self._cache.pages.free([self._spare])

    def _kind_of(self, shape: Shape, lora: LoraBatch | None) -> Kind:
        if lora is None:
            return Kind(shape, 0, frozenset())
        every = frozenset(self._cache.layout.modules)
        of_attention = OF_ATTENTION & every
        modules = of_attention if lora.modules <= of_attention else every
        return Kind(shape, lora.rank_class, modules)

    def _shape_of(self, work: Work) -> Shape:
        return self._limits.padded(work) if self._pads else self._limits.exact(work)

    def _send(self, work: Work, shape: Shape) -> None:
        """A step's numbers to where it finds them."""
        places = {job: row - self._max_running for job, row in self._row_of.items()}  # from the end
        numbers = numbers_of(work, shape, places, self.block_size, self._spare)
        pinned = self._pinned(torch.frombuffer(numbers, dtype=torch.int64))
        self._numbers[: len(pinned)].copy_(pinned, non_blocking=True)

    def _compute(self, shape: Shape, lora: LoraBatch | None) -> None:
        """From the numbers to each job's logits and its greedy token."""
        rows = Rows.of(self._numbers, shape)
        chosen = self._last[rows.tokens.clamp(max=-1)]  # by the step before
        rows = replace(rows, tokens=torch.where(rows.tokens < 0, chosen, rows.tokens))
        logits = self._logits[: shape.jobs]
        logits.copy_(self._model(rows, lora))
        torch.argmax(logits, dim=1, out=self._last[: shape.jobs])

    def _capture(self, shape: Shape, lora: LoraBatch | None) -> torch.cuda.CUDAGraph:
        self._send((), shape)
        # Once as it is, which compiles and allocates what a capture must not.
        self._compute(shape, lora)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()  # of all: one runs at a time
        # "thread_local": the cache's threads go on allocating and copying meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._compute(shape, lora)
        return graph

    def _sample(self) -> None:
        """Choose for the jobs that aren't greedy."""
        sampled = [
            (row, job.sampling.temperature, job.sampling.draw())
            for job, row in self._row_of.items()
            if job.sampling.temperature > 0
        ]
        if sampled:
            numbers = self._pinned(torch.tensor(sampled, dtype=torch.float64))
            numbers = numbers.to(self._model.device, non_blocking=True)
            rows, temperatures, draws = numbers.unbind(dim=1)
            rows = rows.long()
            self._last[rows] = Sampling.choose(self._logits[rows], temperatures, draws)

    def _launched(self, jobs: int) -> Launched:
        """The step that was launched last, its tokens on their way to the host."""
        chosen = torch.empty(jobs, dtype=torch.int64, pin_memory=self._on_gpu)
        chosen.copy_(self._last[:jobs], non_blocking=True)
        event = torch.cuda.Event() if self._on_gpu else None
        if event is not None:
            event.record()
        return Launched(self._row_of, chosen, event)

    def _pinned(self, numbers: Tensor) -> Tensor:
        """In page-locked memory, which PyTorch gives to nobody else before copies are over."""
        return numbers.pin_memory() if self._on_gpu else numbers
