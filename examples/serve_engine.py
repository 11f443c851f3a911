"""The engine: continuous batching over one `AdapterCache`. Read `Engine.step` first.

One thread has the model, the KV blocks and the queue to itself, and makes one step after the
other. A step never waits for an adapter: who can't run yet stays in the queue, and the cache brings
up what it needs meanwhile. Other threads only `submit` jobs, and abort them.

The host is one step ahead: it launches a step before it reads what the one before has chosen, for
where the rows go is known without that. A token that ends its job is read while the next is under
way, which is thrown away. `serve_runner.Launched` says why what the job held can go at once.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping

import torch

from adaptercache import AdapterCache, CacheClosed, Caps, Digest, Lease, Request
from serve_job import Finished, Job, Overloaded, Settings
from serve_kv import Blocks, check_room
from serve_runner import Launched, Runner
from serve_shape import Work

__all__ = ["Engine"]

log = logging.getLogger(__name__)


class Engine:
    """Runs jobs until it is closed. `submit` and `close` may be called from any thread.

    Args:
        cache: with a KV layout; made with ``on_revision=`` `republished` of the engine, or without.
        runner: launches steps.
        settings: the limits.

    Raises:
        ValueError: the arena can't hold one context beside a full set of adapters.
    """

    def __init__(self, cache: AdapterCache, runner: Runner, settings: Settings) -> None:
        self.cache = cache
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self.blocks = Blocks(cache)
        self._runner = runner
        # Every request of the batch brings a token into a step, at the least.
        self._caps = Caps(adapters=settings.max_adapters, tokens=settings.max_running)
        check_room(cache, settings.max_adapters, settings.max_context)
        self._arrived: deque[Job] = deque()  # other threads append
        self._aborted: deque[Job] = deque()  # likewise
        self._superseded: deque[Digest] = deque()  # likewise
        self._waiting: dict[str, Job] = {}  # in order of arrival
        self._preempted: deque[Job] = deque()  # in order of admission, before all who wait
        self._running: list[Job] = []  # in order of admission
        self._leaving: list[Job] = []  # whose last token is under way
        self._under_way: Launched | None = None
        self._names = itertools.count()
        self._news = threading.Event()
        self._door = threading.Lock()  # nobody comes in behind the last look
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="serve-engine", daemon=True)

    # -- what other threads call

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Let a job wait for its turn; what becomes of it is told to ``job.events``.

        Raises:
            ValueError: it can never run; or has a token that the model hasn't, which fails a step.
            Overloaded: too many wait.
            CacheClosed: the engine is closed, or has failed.
        """
        self.settings.check_length(len(job.tokens), job.max_tokens)
        self._runner.check(job.tokens)
        with self._door:
            if self._closed:
                raise CacheClosed("the engine is closed")
            if len(self._waiting) + len(self._arrived) >= self.settings.max_waiting:
                raise Overloaded(f"{self.settings.max_waiting} requests wait")
            job.name = f"r{next(self._names)}"
            # It takes its whole prompt's blocks when it is admitted; fewer after a prefix hit, but
            # that isn't known before its adapter's digest is.
            job.request = Request(job.name, job.adapter_id, 1, self.blocks.pages_of(job))
            self._arrived.append(job)
        self._news.set()

    def abort(self, job: Job) -> None:
        """Nobody waits for it any more. What it holds is given back before the next step."""
        job.aborted = True
        self._aborted.append(job)
        self._news.set()

    def republished(self, adapter_id: str, old: Digest, new: Digest) -> None:
        """The hook for ``AdapterCache(on_revision=…)``."""
        self._superseded.append(old)
        self._news.set()

    def close(self) -> None:
        """Stop after the step under way; whoever is not done gets CacheClosed."""
        self._closed = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return not self._closed and self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._arrived) + len(self._preempted)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # -- the engine's thread

    def step(self) -> bool:
        """Launch one step, then read what the one before has chosen. False: there was neither."""
        launched = None
        try:
            self._take_in()
            self._admit()
            if work := self._schedule():
                launched = self._launch(work)
        finally:  # whatever has become of this one, the tokens of the one before are good
            has_read = self._read()
            self._under_way = launched
        return has_read or launched is not None

    def _take_in(self) -> None:
        while self._arrived:
            job = self._arrived.popleft()
            if job.aborted:  # perhaps looked for below before it was here
                self.counts["aborted"] += 1
            else:
                self._waiting[job.name] = job
        while self._superseded:
            self.blocks.forget(self._superseded.popleft())
        while self._aborted:
            job = self._aborted.popleft()
            if job.name in self._waiting or job.lease is not None:  # it hasn't ended
                self.counts["aborted"] += 1
                self._remove(job)

    def _admit(self) -> None:
        """Preempted jobs come back first; then the cache says who of those that wait can join."""
        while self._preempted and self._begin(self._preempted[0]):
            self._running.append(self._preempted.popleft())
        if self._preempted or len(self._running) == self.settings.max_running:
            # Nobody is admitted, but loads go on: a hint, for those who come next.
            soon = itertools.islice(self._waiting.values(), self.settings.max_running)
            self.cache.prefetch(job.adapter_id for job in soon)
            return
        admission = self.cache.admit(
            [job.request for job in self._waiting.values()],  # all: who is missing is gone
            running=[(job.request, job.lease) for job in self._running if job.lease],
            caps=self._caps,
        )
        for request, error in admission.failed:  # that request's own error, nobody else's
            self._waiting.pop(request.request_id).events.put(error)
        for request, lease in admission.admitted:  # all, before one fails to begin
            self._waiting[request.request_id].lease = lease
        for request, lease in admission.admitted:
            self._start(self._waiting[request.request_id], lease)
        self._make_room(admission.pages_wanted, admission.reasons)

    def _make_room(self, pages_wanted: int, reasons: Mapping[str, str]) -> None:
        """Idle KV goes for cold adapters, and for the first request that lacks pages."""
        first = next((name for name, why in reasons.items() if why == "kv_pages"), None)
        if first is not None:
            pages_wanted = max(pages_wanted, self.blocks.pages_of(self._waiting[first]))
        self.blocks.give_back(pages_wanted)
        self.counts.update(f"deferred_{why}" for why in reasons.values())

    def _start(self, job: Job, lease: Lease) -> None:
        if self._begin(job):
            self._running.append(self._waiting.pop(job.name))
        else:  # it goes on waiting, at its old place
            job.lease = None
            lease.release()

    def _begin(self, job: Job) -> bool:
        has_begun = self.blocks.begin(job)
        self.counts["prefix_hit_tokens"] += job.computed  # 0 where it has not
        return has_begun

    def _schedule(self) -> list[tuple[Job, int]]:
        """Who computes how many tokens: one for each that decodes, then chunks of prompts, until
        the step is full. So a long prompt holds nobody up."""
        decoding = [job for job in self._running if job.num_pending == 1]
        work = [(job, 1) for job in decoding if self._grow(job)]
        work = [(job, count) for job, count in work if job.pages]  # not preempted since
        left = self.settings.max_step_tokens - len(work)
        for job in self._running:
            if job.num_pending > 1 and left > 0:
                work.append((job, min(job.num_pending, left)))
                left -= work[-1][1]
        return work

    def _grow(self, job: Job) -> bool:
        """A block for the next token; the youngest make way. False: it has none any more."""
        while job.pages and len(job.pages) < self.blocks.pages_of(job):
            block = self.blocks.allocate(1)
            if block is not None:
                job.pages += block
            elif not self._read():  # first see who has ended: this job, perhaps
                self._preempt(self._running[-1])
        return bool(job.pages)

    def _preempt(self, job: Job) -> None:
        """It keeps its lease: tokens of it are out, and the rest must come from the same weights,
        whatever is published meanwhile. Its full blocks stay in the prefix cache while they can."""
        self._running.remove(job)
        self._preempted.appendleft(job)
        self.blocks.release(job.pages)
        job.pages, job.computed = [], 0
        self.counts["preempted"] += 1

    def _launch(self, work: Work) -> Launched:
        pairs = [(job.lease, count) for job, count in work if job.lease is not None]
        with self.cache.lora_batch(pairs, pad_to=self._runner.padded(work)) as lora:
            launched = self._runner(work, lora)
        for job, count in work:
            job.computed += count
            job.unread += job in launched.rows  # else it is in the midst of its prompt
            self.blocks.publish(job)
            if job.is_complete:
                self._running.remove(job)  # the next step has room for another
                self._leaving.append(job)
        self.counts["steps"] += 1
        return launched

    def _read(self) -> bool:
        """What the step under way has chosen. False: there is none."""
        step, self._under_way = self._under_way, None
        for job, token in step.read() if step is not None else ():
            if job.lease is not None:  # else it has ended meanwhile
                self._advance(job, token)
        return step is not None

    def _advance(self, job: Job, token: int) -> None:
        """``token`` is the next of the job's."""
        job.unread -= 1
        job.tokens.append(token)
        self.blocks.publish(job)  # it may have filled one, in the step that was launched since
        reason = "stop" if token in self.settings.end_tokens else None
        if reason is None:
            job.events.put(token)
            self.counts["generated_tokens"] += 1
            reason = "length" if job.num_generated == job.max_tokens else None
        if reason is not None:
            self._remove(job)
            job.events.put(Finished(reason))

    def _remove(self, job: Job) -> None:
        """From wherever it is; all that it holds is given back."""
        self._waiting.pop(job.name, None)
        for place in (self._running, self._leaving, self._preempted):
            if job in place:
                place.remove(job)
        self.blocks.release(job.pages)
        job.pages = []
        if job.lease is not None:
            job.lease.release()
            job.lease = None

    def _everybody(self) -> list[Job]:
        return [*self._running, *self._leaving, *self._preempted, *self._waiting.values()]

    @torch.inference_mode()
    def _run(self) -> None:
        error: Exception = CacheClosed("the engine is closed")
        try:
            while not self._closed:
                self._news.clear()
                if not self.step():
                    # A load that ends tells nobody; while somebody waits for one, look again.
                    self._news.wait(0.001 if self._everybody() else None)
            self._read()
        except Exception as failure:
            log.exception("the engine has failed")
            error = failure
        finally:  # all that is held is given back
            with self._door:
                self._closed = True
            for job in [*self._everybody(), *self._arrived]:
                self._remove(job)
                job.events.put(error)
            self.blocks.give_back(self.blocks.num_idle)
            self._runner.close()
