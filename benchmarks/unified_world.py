"""A serving loop in simulated time, over the library's own deciding: arena, ledger, plan, policy.

Nothing here decides on memory: the same code serves one unified arena and static splits of it,
which differ in their floors only. What is simulated is time: how long a step and a copy take on an
H200 with Llama-3-8B, from figures that were measured there.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from adaptercache import AdapterKey, KVLayout, LoraLayout, Request, Tier
from adaptercache.arena import DiskShelf, GpuArena, HostArena
from adaptercache.batch import Batch, plan
from adaptercache.identity import Digest
from adaptercache.layout import ArenaShape
from adaptercache.ledger import Ledger
from adaptercache.lifts import Lifts
from adaptercache.packing import VectorSpec
from adaptercache.policy import new_policy
from adaptercache.waiting import Grant
from load_world import ATTENTION, LLAMA_3_8B

MAX_BATCH = 256
WINDOW = 512  # waiting requests that the scheduler looks at
BLOCK_TOKENS = 16
KV_TOKEN_BYTES = 2 * 8 * 128 * 2 * 32
BLOCK_BYTES = 2 << 20  # of CPU memory


@dataclass(frozen=True, slots=True)
class Costs:
    """Of an H200: bytes/s of its memory and of PCIe, FLOP/s of prefill, and a step's rest."""

    memory: float = 4.2e12
    link: float = 53e9
    flops: float = 6e14
    weights: float = 16e9
    per_step_s: float = 1e-3

    def step_s(self, prefill: int, decode: int, kv_tokens: int, adapter_bytes: int) -> float:
        """The larger of reading and computing, and what each step takes besides."""
        moved = self.weights + kv_tokens * KV_TOKEN_BYTES + adapter_bytes
        computed = 2 * 8e9 * (prefill + decode)
        return self.per_step_s + max(moved / self.memory, computed / self.flops)


@dataclass(frozen=True, slots=True)
class Job:
    """A request of the workload."""

    arrives_s: float
    adapter: int
    prompt: int
    output: int

    @property
    def kv_pages(self) -> int:
        return -(-(self.prompt + self.output) // BLOCK_TOKENS)


def slora_workload(
    seconds: float, rate: float, skew: float, adapters: int, lengths: tuple[int, int], seed: int
) -> list[Job]:
    """S-LoRA's synthetic traces: adapter ``floor(u n)`` with u of the power distribution (skew 1 is
    uniform, smaller is more skewed), arrivals of one Poisson process, uniform lengths."""
    rng = random.Random(seed)
    jobs, now = [], 0.0
    while now < seconds:
        now += rng.expovariate(rate)
        adapter = min(adapters - 1, int(rng.random() ** (1 / skew) * adapters))
        jobs.append(Job(now, adapter, rng.randint(*lengths), rng.randint(*lengths)))
    return jobs


@dataclass
class Running:
    """A request in the batch."""

    job: Job
    grant: Grant
    pages: tuple[int, ...]
    done: int = 0


@dataclass
class Outcome:
    """What became of a run."""

    served: int = 0
    steps: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    batch: float = 0.0
    adapter_pages: float = 0.0
    kv_pages: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)


class Serving:
    """One engine over one arena.

    Args:
        adapter_share: None: unified; else the share of the pages that adapters have, and KV has
            the rest.
    """

    def __init__(
        self,
        gpu_bytes: int,
        num_adapters: int,
        ranks: Sequence[int],
        adapter_share: float | None,
        costs: Costs,
    ) -> None:
        self.now = 0.0
        self.costs = costs
        layout = LoraLayout.from_config(LLAMA_3_8B, max_rank=max(ranks))
        kv = KVLayout(BLOCK_TOKENS, 8, 128)
        shape = ArenaShape.fit(layout, kv, gpu_bytes)
        self.specs = [_spec(layout, ranks[i % len(ranks)]) for i in range(num_adapters)]
        largest = max(shape.pages_for(spec.elements) for spec in self.specs)
        floors: tuple[int, int | None] = (largest, None)
        if adapter_share is not None:
            adapter_pages = max(largest, round(shape.num_pages * adapter_share))
            floors = (adapter_pages, shape.num_pages - adapter_pages)
        gpu = GpuArena(shape, MAX_BATCH * 4, *floors, lambda: new_policy("lru"))
        nbytes = [spec.elements * layout.itemsize for spec in self.specs]
        blocks = sum(-(-n // BLOCK_BYTES) for n in nbytes)
        host = HostArena(blocks, BLOCK_BYTES, lambda: new_policy("lru"))
        self.ledger = Ledger(
            gpu, host, DiskShelf(2 * sum(nbytes)), itemsize=2, clock=lambda: self.now
        )
        self.lifts = Lifts(self.ledger)
        for index, spec in enumerate(self.specs):
            self._put_into_host(index, spec, nbytes[index])
        self._coming: list[tuple[float, Digest]] = []  # copies on the link
        self._link_free = 0.0
        self.out = Outcome()

    def _put_into_host(self, index: int, spec: VectorSpec, nbytes: int) -> None:
        digest = index.to_bytes(32, "big")
        ledger = self.ledger
        ledger.disk.published(digest, nbytes)
        ledger.learn(AdapterKey(str(index), "1"), digest, spec.elements)
        ledger.disk.lease(ledger.disk[digest])
        ledger.host.take(digest, ledger.host.blocks_for(nbytes), hint=False)
        ledger.host.begin(digest, spec)
        ledger.host_loaded(digest)

    def run(self, jobs: Sequence[Job], seconds: float) -> Outcome:
        """Serve for so long; the requests come when they come."""
        arrivals = iter(enumerate(jobs))
        upcoming = next(arrivals, None)
        waiting: list[tuple[Request, Job]] = []
        running: list[Running] = []
        while self.now < seconds:
            while upcoming is not None and upcoming[1].arrives_s <= self.now:
                number, job = upcoming
                request = Request(str(number), str(job.adapter), job.prompt, job.kv_pages)
                waiting.append((request, job))
                upcoming = next(arrivals, None)
            self._land()
            admitted, waiting = self._admit(waiting, running)
            running += admitted
            if not running:
                later = [self._coming[0][0]] if self._coming else []
                later += [upcoming[1].arrives_s] if upcoming is not None else []
                if not later:
                    break
                self.now = max(self.now, min(later))
                continue
            running = self._step(admitted, running)
        return self.out

    def _land(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            _, digest = heapq.heappop(self._coming)
            self.ledger.gpu_loaded(digest)

    def _admit(
        self, waiting: list[tuple[Request, Job]], running: Sequence[Running]
    ) -> tuple[list[Running], list[tuple[Request, Job]]]:
        """As `Leasing.admit` does, with copies that take simulated time."""
        ledger = self.ledger
        window = waiting[:WINDOW]
        room = MAX_BATCH - len(running)
        jobs = {request.request_id: job for request, job in window}
        decision = plan(
            [request for request, _ in window],
            self.lifts,
            Batch([r.grant.digest for r in running], overdue=ledger.waiting.turns.overdue),
        )
        admitted = []
        for request, digest in decision.admitted[:room]:
            assert request.adapter_id is not None
            grant = Grant(request.adapter_id, self.now, "gpu")
            served = ledger.lease(grant)
            assert served and grant.digest == digest
            admitted.append((request, grant))
        self.lifts.apply(decision)
        for load in decision.loads:
            spec = self.specs[int.from_bytes(load.digest, "big")]
            self._link_free = max(self._link_free, self.now) + spec.elements * 2 / self.costs.link
            heapq.heappush(self._coming, (self._link_free, load.digest))
            self.out.loads += 1
            self.out.loaded_bytes += spec.elements * 2
        ledger.waiting.replace_requests(
            decision.deferred,
            decision.reasons.keys(),
            decision.cold,
            self.now,
            ledger.found_in,
        )
        ledger.waiting.kv_promised = sum(request.kv_pages for request, _ in admitted)
        whose = decision.kept.request.request_id if decision.kept is not None else None
        ledger.waiting.turns.note(decision.first, decision.reasons.keys(), bool(admitted), whose)
        if admitted:
            ledger.waiting.passed_by()
        ledger.waiting.kept = decision.kept
        self.lifts.fairness.look(decision.refused)
        ledger.outbox.clear()
        self.out.waits.update(decision.reasons.values())
        found = []
        for request, grant in admitted:
            pages = self.lifts.allocate_kv(request.kv_pages)
            assert pages is not None, "promised"
            found.append(Running(jobs[request.request_id], grant, pages))
        gone = {request.request_id for request, _ in admitted}
        return found, [pair for pair in waiting if pair[0].request_id not in gone]

    def _step(self, admitted: Sequence[Running], running: list[Running]) -> list[Running]:
        gpu = self.ledger.gpu
        distinct = {each.grant.digest for each in running}
        cell = gpu.shape.rows * gpu.shape.page_bytes
        kv_tokens = sum(each.job.prompt + each.done for each in running)
        seconds = self.costs.step_s(
            sum(each.job.prompt for each in admitted),
            len(running),
            kv_tokens,
            sum(gpu[digest].size for digest in distinct) * cell,
        )
        self.now += seconds
        out = self.out
        out.steps += 1
        out.batch += len(running)
        out.adapter_pages += gpu.used
        out.kv_pages += gpu.kv_room().used
        left = []
        for each in running:
            each.done += 1
            if each.done < each.job.output:
                left.append(each)
                continue
            out.served += 1
            self.ledger.release(each.grant)
            self.lifts.free_kv(each.pages, 0)
        return left

    def check(self) -> None:
        """No page is lost, and none has two owners."""
        gpu = self.ledger.gpu
        pages = [page for copy in gpu for page in copy.place.pages]
        assert len(pages) == len(set(pages)) == gpu.used
        assert gpu.used + gpu.kv_room().used + gpu.pages.num_free == gpu.pages.num_pages
        assert self.ledger.counters.evictions[Tier.GPU, "superseded"] == 0


def _spec(layout: LoraLayout, rank: int) -> VectorSpec:
    ranks = [rank if site.module in ATTENTION else 0 for site in layout.sites]
    return VectorSpec.of(layout, ranks, [1.0] * len(ranks))


def means(out: Outcome) -> Iterator[tuple[str, float]]:
    """Of a step: its batch, and the pages that adapters and KV had."""
    steps = max(1, out.steps)
    yield "mean_batch", round(out.batch / steps, 1)
    yield "mean_adapter_pages", round(out.adapter_pages / steps)
    yield "mean_kv_pages", round(out.kv_pages / steps)
