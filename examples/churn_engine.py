"""The scheduler loop of a serving engine, with everything of a model but the model."""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptercache import AdapterCache, Admission, Lease, Request, Tier
from adaptercache.kernels import LoraBatch, add_lora
from churn_check import Checker
from churn_kv import KVCache
from churn_record import Frame, Record, Seen
from churn_workload import Arrival, Pace

__all__ = ["Engine"]

GROUPS = (  # modules that share their input
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
STUCK_S = 60.0
TIERS = (Tier.GPU, Tier.HOST, Tier.DISK)


@dataclass(slots=True)
class Job:
    """A request on its way through the engine; ``found``: the tier that had its adapter."""

    arrival: Arrival
    request: Request
    found: str
    seen_at: float
    lease: Lease | None = None
    pages: tuple[int, ...] = ()
    steps_done: int = 0

    @property
    def tokens(self) -> int:
        """The prompt in the first step, then one token a step."""
        return 1 if self.steps_done else self.arrival.prompt_tokens


class Engine:
    """Drives a cache until all requests are served. Not thread-safe.

    Args:
        cache: with a KV layout.
        arrivals: in order.
        pace: how time passes; its clock is the cache's.
        checker: of sampled rows.
        block_size: tokens of a KV block.
        idle_kv: pages of finished requests to keep at most.
        max_adapters: in one batch.
        device: of the arena.
        seed: of the sampling and of the inputs.

    Attributes:
        record: what has happened.
        decisions: a hash of all that was decided.
    """

    def __init__(
        self,
        cache: AdapterCache,
        arrivals: Iterable[Arrival],
        pace: Pace,
        checker: Checker,
        *,
        block_size: int,
        idle_kv: int,
        max_adapters: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.cache = cache
        self.arrivals = tuple(arrivals)
        self.record = Record()
        self.checker = checker
        self.decisions = hashlib.sha256()
        self._arrivals = deque(self.arrivals)
        self._pace = pace
        self._kv = KVCache(cache, cache.layout.num_layers, idle_kv)
        self._block_size = block_size
        self._max_adapters = max_adapters
        self._device = device
        self._rng = random.Random(seed)
        self._noise = torch.Generator().manual_seed(seed)
        self._jobs: dict[str, Job] = {}
        self._waiting: list[Request] = []
        self._running: list[Job] = []
        self._moved_at = time.monotonic()

    def steps(self) -> Iterator[Frame]:
        """One step after another.

        Raises:
            RuntimeError: nothing moves any more.
        """
        start = time.monotonic()
        while self._arrivals or self._waiting or self._running:
            step_start = time.monotonic()
            self._take_arrivals()
            admission = self._admit()
            self._start(admission)
            self._give_back_idle_kv(admission)
            self._apply_lora()
            self._finish()
            now = time.monotonic()
            self.record.step_s.append(now - step_start)
            self.record.wall_s = now - start
            yield self._frame()
            next_at = self._arrivals[0].at_s if self._arrivals else None
            self._pace.pass_step(next_at, bool(self._waiting or self._running))
        self.close()

    def close(self) -> None:
        """Release what is held, also after an interruption."""
        for job in self._running:
            assert job.lease is not None
            job.lease.release()
            self._kv.free(job.arrival.number, job.pages)
        self._running.clear()
        self._kv.give_back(self._kv.idle_pages)
        self.record.kv_blocks_damaged = self._kv.damaged

    def _take_arrivals(self) -> None:
        """What has come by now waits, and its adapters are on their way to CPU memory. `admit`
        lifts to the GPU what there is room for."""
        now, new = self._pace.now(), []
        while self._arrivals and self._arrivals[0].at_s <= now:
            new.append(self._arrivals.popleft())
        resident = {tier.value: self.cache.resident(tier) for tier in TIERS} if new else {}
        for arrival in new:
            adapter_id = arrival.adapter_id
            found = next((tier for tier, ids in resident.items() if adapter_id in ids), "remote")
            tokens = arrival.prompt_tokens + arrival.output_tokens
            kv_pages = -(-tokens // self._block_size)
            name = f"request-{arrival.number}"
            request = Request(name, adapter_id, arrival.prompt_tokens, kv_pages)
            self._jobs[name] = Job(arrival, request, found, time.monotonic())
            self._waiting.append(request)
            if adapter_id is not None:
                self.record.seen.append(Seen(arrival.at_s, found))
        for adapter_id in dict.fromkeys(arrival.adapter_id for arrival in new):
            self.cache.prefetch([adapter_id], to=Tier.HOST)
            self._settle()

    def _admit(self) -> Admission:
        start = time.perf_counter()
        admission = self.cache.admit(
            self._waiting,
            running=[(job.request, job.lease) for job in self._running if job.lease is not None],
            max_adapters=self._max_adapters,
        )
        self.record.admit_s.append(time.perf_counter() - start)
        self._settle()
        self._waiting = admission.deferred
        for request, error in admission.failed:
            del self._jobs[request.request_id]
            self.record.requests_failed += 1
            name = request.adapter_id or request.request_id
            text = str(error).removeprefix(f"adapter {name!r}: ")
            self.record.failed[name] = f"{type(error).__name__}: {text}"
        return admission

    def _start(self, admission: Admission) -> None:
        """Admitted requests get their KV pages; one that can't waits again, ahead of the rest."""
        turned_away = []
        for request, lease in admission.admitted:
            job = self._jobs[request.request_id]
            pages = self._kv.allocate(job.arrival.number, request.kv_pages)
            if pages is None:
                lease.release()
                turned_away.append(request)
            else:
                job.lease, job.pages = lease, pages
                self._running.append(job)
                found = "base model" if request.adapter_id is None else job.found
                waited = time.monotonic() - job.seen_at
                self.record.ready_s.setdefault(found, []).append(waited)
            self._settle()
            self._note(request.request_id, lease.slot if pages else None, pages)
        self._waiting[:0] = turned_away
        self._note(admission.reasons, [r.request_id for r, _ in admission.failed])
        self._check_moving(bool(admission.admitted or admission.failed))

    def _give_back_idle_kv(self, admission: Admission) -> None:
        """Idle KV makes room for cold adapters, and for the first request that lacks pages."""
        wanted = admission.pages_wanted
        for request in admission.deferred:
            if admission.reasons[request.request_id] == "kv_pages":
                wanted = max(wanted, request.kv_pages)
                break
        self.record.kv_pages_returned += self._kv.give_back(wanted)
        self._note(wanted)
        self._settle()

    def _apply_lora(self) -> None:
        """The LoRA of one layer for the whole batch; one request's last row of it is checked."""
        pairs = [(job.lease, job.tokens) for job in self._running if job.lease is not None]
        if not pairs:
            return
        picked = self._rng.randrange(len(pairs))
        row = sum(tokens for _, tokens in pairs[: picked + 1]) - 1
        layer = self._rng.randrange(self.cache.layout.num_layers)
        with self.cache.lora_batch(pairs) as lora:
            terms = [self._term(lora, layer, modules) for modules in self._groups(layer)]
        for paths, x, outputs in terms:
            got = {path: y[row].cpu() for path, y in zip(paths, outputs, strict=True)}
            self.checker.check(self._running[picked].request.adapter_id, x[row].cpu(), got)
        self.record.tokens += sum(tokens for _, tokens in pairs)
        self._settle()

    def _groups(self, layer: int) -> list[dict[str, tuple[str, int, int]]]:
        """The modules of a layer that share their input: path and widths by name."""
        sites = {
            site.module: (site.path, site.in_features, site.out_features)
            for site in self.cache.layout.sites
            if site.layer == layer
        }
        grouped = [{name: sites.pop(name) for name in g if name in sites} for g in GROUPS]
        return [group for group in grouped if group] + [{n: s} for n, s in sites.items()]

    def _term(
        self, lora: LoraBatch, layer: int, modules: dict[str, tuple[str, int, int]]
    ) -> tuple[list[str], Tensor, tuple[Tensor, ...]]:
        """The LoRA term of a group of modules on random x: y starts at 0."""
        paths = [path for path, _, _ in modules.values()]
        width = next(iter(modules.values()))[1]
        outs = [out for _, _, out in modules.values()]
        dtype = lora.stack.dtype
        x = torch.randn(lora.num_rows, width, generator=self._noise).to(self._device, dtype)
        y = torch.zeros(lora.num_rows, sum(outs), dtype=dtype, device=self._device)
        add_lora(y, x, lora, tuple(modules), layer)
        return paths, x, y.split(outs, dim=1)

    def _finish(self) -> None:
        """Requests that are done give back their leases; their KV pages stay, idle."""
        for job in self._running:
            job.steps_done += 1
            if job.steps_done >= job.arrival.output_tokens and job.lease is not None:
                self._kv.retire(job.arrival.number, job.pages)
                job.lease.release()
                self._settle()
                del self._jobs[job.request.request_id]
                self.record.served += 1
        self._running = [job for job in self._running if job.request.request_id in self._jobs]

    def _frame(self) -> Frame:
        counts = (self._kv.idle_pages, len(self._running), len(self._waiting))
        frame = Frame.of(self._pace.now(), self.cache.stats(), *counts)
        self.record.frames.append(frame)
        return frame

    def _settle(self) -> None:
        self._pace.settle(self.cache)

    def _note(self, *decided: object) -> None:
        self.decisions.update(repr(decided).encode())

    def _check_moving(self, has_moved: bool) -> None:
        now = time.monotonic()
        if has_moved or self._running or not self._waiting:
            self._moved_at = now
        elif now - self._moved_at > STUCK_S:
            raise RuntimeError(f"stuck: nothing runs, and {len(self._waiting)} requests wait")
