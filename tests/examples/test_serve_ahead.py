"""The example engine runs one step ahead: what happens to a job whose next token is under way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache import CacheClosed, Tier
from adaptercache.testing import check_consistent

pytest.importorskip("peft")
pytest.importorskip("transformers")

import serving
from serving import World, ask, is_idle, outcome, random_prompt, settle

from serve_engine import Engine
from serve_job import Finished, Job, Sampling
from serve_runner import Runner

BLOCK = 16


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"), 16)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with serving.one_thread():
        yield


Stepped = Callable[..., Any]


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> Stepped:
    """An engine without a thread: the test makes its steps. At the end nothing may be held."""
    monkeypatch.setattr(Engine, "start", lambda engine: None)

    @contextmanager
    def build(world: World, ids: Sequence[str] = (), **options: Any) -> Iterator[Any]:
        with world.engine(**{"pages": 600} | options) as engine:
            for adapter_id in ids:
                engine.cache.acquire(adapter_id).result().release()
            yield engine
            if not engine._closed:
                engine.close()
                engine._run()
            assert is_idle(engine)
            check_consistent(engine.cache)

    return build


@torch.inference_mode()
def step(engine: Any) -> bool:
    return bool(engine.step())


def run(engine: Any) -> None:
    """Steps until there is nothing to do."""
    for _ in range(10_000):
        if not step(engine) and not engine._everybody():
            return
    raise AssertionError("it does not come to an end")


def events_of(job: Any) -> list[Any]:
    """What it was told so far."""
    return [job.events.get_nowait() for _ in range(job.events.qsize())]


class Noting:
    """A runner that notes launches and reads, in front of the engine's own."""

    def __init__(self, engine: Any) -> None:
        self._runner = engine._runner
        self.padded, self.close = self._runner.padded, self._runner.close
        self.check = self._runner.check
        self.noted: list[tuple[str, int]] = []
        self.launches = 0
        self.breaks_at: int | None = None
        engine._runner = self

    def __call__(self, work: Any, lora: Any) -> Any:
        if self.launches == self.breaks_at:
            raise OSError("broken")
        launched = self._runner(work, lora)
        number = self.launches
        self.noted.append(("launch", number))
        self.launches += 1
        return _Noted(launched, lambda: self.noted.append(("read", number)))


class _Noted:
    def __init__(self, launched: Any, note: Callable[[], None]) -> None:
        self._launched, self._note, self.rows = launched, note, launched.rows

    def read(self) -> Any:
        self._note()
        return self._launched.read()


def ahead(count: int) -> list[tuple[str, int]]:
    """So many steps, each but the last read only behind the next one's launch."""
    noted = [("launch", 0)]
    for number in range(1, count):
        noted += [("launch", number), ("read", number - 1)]
    return [*noted, ("read", count - 1)]


def run_ahead(world: World, stepped: Stepped) -> None:
    """With prompts in chunks, adapters, sampled requests, and some that end before others."""
    with stepped(world, world.ids[:2], max_step_tokens=32, max_running=8) as engine:
        runner = Noting(engine)
        jobs = [ask(engine, world.ids[n % 2], [n] * 40, 5 + n) for n in range(4)]
        sampled = Job(None, [3] * 20, 12, Sampling(1.0, seed=1))
        engine.submit(sampled)
        run(engine)
        assert runner.noted == ahead(runner.launches)
        assert runner.launches == engine.counts["steps"] > 15
        assert len(outcome(sampled)[0]) == 12
        for number, job in enumerate(jobs):
            expected = world.expected(world.ids[number % 2], [number] * 40, 5 + number)
            assert outcome(job)[0] == expected


def test_a_step_is_launched_before_the_one_before_is_read(world: World, stepped: Stepped) -> None:
    run_ahead(world, stepped)


@pytest.mark.gpu
def test_graphs_are_launched_before_the_one_before_is_read(
    tmp_path: Path, stepped: Stepped
) -> None:
    run_ahead(World(tmp_path, 2, device="cuda"), stepped)


def test_the_engines_own_thread_runs_ahead(world: World) -> None:
    with world.engine(pages=600) as engine:
        runner = Noting(engine)
        job = ask(engine, None, [9] * 4, 40)
        expected = world.expected(None, [9] * 4, 40)
        assert outcome(job)[0] == expected
        assert len(expected) == 40
        assert settle(lambda: len(runner.noted) == 80)
        assert runner.noted == ahead(40)


def test_a_row_is_free_as_soon_as_a_jobs_last_token_is_launched(
    world: World, stepped: Stepped
) -> None:
    with stepped(world, max_running=1) as engine:
        jobs = [ask(engine, None, [number], 3) for number in (1, 2)]
        run(engine)
        assert engine.counts["steps"] == 6  # none for nothing, and none too many
        for number, job in zip((1, 2), jobs, strict=True):
            assert outcome(job) == (world.expected(None, [number], 3), "length")


def stop_at(engine: Any, tokens: Sequence[int], first: int) -> int:
    """Let a token of these end jobs: one at ``first`` or behind it that wasn't there before. Its
    place."""
    at = next(n for n in range(first, len(tokens)) if tokens[n] not in tokens[:n])
    engine.settings = replace(engine.settings, end_tokens=frozenset([tokens[at]]))
    return at


def test_a_stop_token_is_read_while_a_next_one_is_under_way(world: World, stepped: Stepped) -> None:
    prompt = random_prompt(random.Random(4), 20, 21)
    long = world.expected("adapter-02", prompt, 60)
    with stepped(world, ["adapter-02"]) as engine:
        at = stop_at(engine, long, BLOCK)
        job = ask(engine, "adapter-02", prompt, 60)
        while job.events.qsize() != at:
            step(engine)
        assert job.lease is not None
        step(engine)  # launches the token behind the stop token, and reads that
        assert job in engine._under_way.rows
        assert events_of(job) == [*long[:at], Finished("stop")]
        assert engine.cache.stats().leases == 0
        assert engine.cache.stats().pages["kv"] == engine.blocks.num_idle + 1
        engine.settings = replace(engine.settings, end_tokens=frozenset())
        # Others take its pages before what is under way has been read, and its full blocks.
        other = ask(engine, "adapter-02", [*prompt, *long[:14]], 6)
        unlike = ask(engine, None, [7] * 30, 6)
        steps = engine.counts["steps"]
        run(engine)
        assert engine.counts["steps"] == steps + 6
        assert job.events.empty()
        assert other.cached == 2 * BLOCK
        assert outcome(other)[0] == world.expected("adapter-02", [*prompt, *long[:14]], 6)
        assert outcome(unlike)[0] == world.expected(None, [7] * 30, 6)


def test_the_last_token_may_be_a_stop_token(world: World, stepped: Stepped) -> None:
    with stepped(world) as engine:
        tokens = world.expected(None, [5], 20)
        at = stop_at(engine, tokens, 3)
        job = ask(engine, None, [5], at + 1)
        run(engine)
        assert events_of(job) == [*tokens[:at], Finished("stop")]
        assert engine.counts["steps"] == at + 1


@pytest.mark.parametrize("count", [5, 60], ids=["its last token", "a token"])
def test_an_abort_while_a_token_is_under_way(world: World, stepped: Stepped, count: int) -> None:
    expected = world.expected("adapter-03", [5] * 20, 60)
    with stepped(world, ["adapter-03"]) as engine:
        job = ask(engine, "adapter-03", [5] * 20, count)
        stays = ask(engine, "adapter-03", [6] * 20, 12)
        for _ in range(5):
            step(engine)
        assert job in engine._under_way.rows
        assert job in (engine._leaving if count == 5 else engine._running)
        engine.abort(job)
        later = ask(engine, None, [8] * 20, 8)  # it may get the pages
        step(engine)
        assert job.pages == []
        assert engine.counts["aborted"] == 1
        run(engine)
        assert events_of(job) == expected[:4]  # nobody is told of the fifth
        assert outcome(stays)[0] == world.expected("adapter-03", [6] * 20, 12)
        assert outcome(later)[0] == world.expected(None, [8] * 20, 8)


def test_who_makes_way_loses_no_token_and_gets_none_twice(world: World, stepped: Stepped) -> None:
    """The step under way is read before anybody makes way, and so before he comes back."""
    pages = world.pages_of_the_largest + 160 // BLOCK + 1
    limits = {"pages": pages, "max_adapters": 1, "max_context": 160}
    with stepped(world, ["adapter-07"], **limits) as engine:
        rng = random.Random(5)
        asked = [(rng.choice([None, "adapter-07"]), [n] * 40, 50 + n) for n in range(12)]
        jobs = [ask(engine, *each) for each in asked]
        sampled = Job(None, [1] * 40, 60, Sampling(0.8, seed=3))
        engine.submit(sampled)
        while step(engine) or engine._everybody():
            for job in engine._preempted:
                assert job.unread == 0
        assert engine.counts["preempted"] > 10
        got = outcome(sampled)[0]
        for each, job in zip(asked, jobs, strict=True):
            assert outcome(job)[0] == world.expected(*each)
    with stepped(world) as engine:
        alone = Job(None, [1] * 40, 60, Sampling(0.8, seed=3))
        engine.submit(alone)
        run(engine)
        assert outcome(alone)[0] == got


def test_nobody_makes_way_where_the_step_under_way_gives_enough_back(
    world: World, stepped: Stepped
) -> None:
    pages = world.pages_of_the_largest + 64 // BLOCK + 1
    tokens = world.expected(None, [1] * 5, 20)
    with stepped(world, pages=pages, max_adapters=1, max_context=64) as engine:
        at = stop_at(engine, tokens, 4)
        # This one needs a second block when the other's stop token is under way, not yet read.
        prompt = [2] * (BLOCK - at)
        grows, ends = ask(engine, None, prompt, at + 4), ask(engine, None, [1] * 5, 20)
        while ends.events.qsize() != at:
            step(engine)
        held = []
        while block := engine.blocks.allocate(1):
            held += block
        assert len(grows.pages) == len(ends.pages) == 1
        step(engine)
        assert outcome(ends) == (tokens[:at], "stop")
        assert list(engine._under_way.rows) == [grows]
        assert len(grows.pages) == 2
        engine.blocks.release(held)
        run(engine)
        assert outcome(grows)[0] == world.expected(None, prompt, at + 4)
        assert engine.counts["preempted"] == 0


def test_weights_republished_while_a_token_is_under_way(tmp_path: Path, stepped: Stepped) -> None:
    world = World(tmp_path, 2)
    prompt = random_prompt(random.Random(3), 40, 41)
    old = world.expected("adapter-01", prompt, 40)
    with stepped(world, ["adapter-01"]) as engine:
        running = ask(engine, "adapter-01", prompt, 40)
        for _ in range(6):
            step(engine)
        assert running in engine._under_way.rows
        world.publish("adapter-01", seed=5)
        engine.cache.refresh("adapter-01").result(30)
        new = world.expected("adapter-01", prompt, 20)
        later = ask(engine, "adapter-01", prompt, 20)
        run(engine)
        assert outcome(running)[0] == old
        assert outcome(later)[0] == new != old[:20]
        assert later.cached == 0


def test_greedy_and_sampled_ones_in_one_step(world: World, stepped: Stepped) -> None:
    """The sampled ones against the model's own probabilities, one at a time."""

    def sampled(prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
        tokens, draws = list(prompt), Sampling(temperature, seed)
        with torch.inference_mode():
            for _ in range(count):
                logits = world.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                shares = torch.softmax(logits.double() / temperature, dim=0).tolist()
                draw = draws.draw()
                below = itertools.accumulate(shares)
                tokens.append(next(n for n, share in enumerate(below) if draw < share))
        return tokens[len(prompt) :]

    with stepped(world, world.ids[:4]) as engine:
        engine.settings = replace(engine.settings, end_tokens=frozenset())
        greedy = [ask(engine, world.ids[n], [n] * 20, 10 + n) for n in range(4)]
        wanted = [([n] * (5 + n), 12 + n, 0.5 + n / 4, n) for n in range(4)]
        others = [Job(None, list(prompt), n, Sampling(t, seed)) for prompt, n, t, seed in wanted]
        for job in others:
            engine.submit(job)
        run(engine)
        for number, job in enumerate(greedy):
            tokens = world.expected(world.ids[number], [number] * 20, 10 + number)
            assert outcome(job)[0][: len(tokens)] == tokens
        got = [outcome(job)[0] for job in others]
    assert got == [sampled(prompt, n, t, seed) for prompt, n, t, seed in wanted]


def test_draws_hit_tokens_by_their_probability() -> None:
    logits = torch.tensor([0.5, 0.25, 0.0, 0.25]).log().repeat(1000, 1)
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for temperature, counts in ((1.0, [500, 250, 0, 250]), (0.5, [667, 166, 0, 167])):
        temperatures = torch.full((1000,), temperature, dtype=torch.float64)
        tokens = Sampling.choose(logits, temperatures, draws)
        assert tokens.bincount(minlength=4).tolist() == counts


@pytest.mark.parametrize("temperature", [1e-30, 1e-300])
def test_a_temperature_next_to_0_is_greedy(world: World, temperature: float) -> None:
    with world.engine(pages=600) as engine:
        job = Job(None, [1, 2, 3], 8, Sampling(temperature, seed=4))
        engine.submit(job)
        assert outcome(job)[0] == world.expected(None, [1, 2, 3], 8)


def test_blocks_under_way_are_hit(world: World, stepped: Stepped) -> None:
    """Whoever comes one step later begins with them: it is launched behind what computes them."""
    prompt = random_prompt(random.Random(6), 40, 41)
    with stepped(world, ["adapter-04"]) as engine:
        jobs = []
        for _ in range(3):
            jobs.append(ask(engine, "adapter-04", prompt, 30))
            step(engine)
        run(engine)
        assert [job.cached for job in jobs] == [0, 2 * BLOCK, 2 * BLOCK]
        for job in jobs:
            assert outcome(job)[0] == world.expected("adapter-04", prompt, 30)


def test_a_step_that_fails_loses_no_token_of_the_one_before(world: World, stepped: Stepped) -> None:
    with stepped(world) as engine:
        runner = Noting(engine)
        done, cut = ask(engine, None, [1], 4), ask(engine, None, [2], 9)
        runner.breaks_at = 4  # when the fourth token of both is under way
        engine._run()
        assert events_of(done) == [*world.expected(None, [1], 4), Finished("length")]
        *tokens, error = events_of(cut)
        assert tokens == world.expected(None, [2], 4)
        assert isinstance(error, OSError)
        with pytest.raises(CacheClosed):
            ask(engine, None, [1], 4)


@pytest.mark.parametrize("call", range(3))
def test_an_admission_that_fails_half_way_gives_all_leases_back(
    world: World, stepped: Stepped, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clients are told keeps the frames that it came through."""
    with stepped(world, world.ids[:3]) as engine:
        begin, calls = engine.blocks.begin, itertools.count()

        def breaks(job: Job) -> bool:
            if next(calls) == call:
                raise MemoryError("broken")
            return bool(begin(job))

        monkeypatch.setattr(engine.blocks, "begin", breaks)
        jobs = [ask(engine, adapter_id, [1], 4) for adapter_id in world.ids[:3]]
        engine._run()
        told = [events_of(job) for job in jobs]
        assert all(isinstance(events[-1], MemoryError) for events in told)
        assert engine.cache.stats().leases == 0


def test_closing_reads_the_step_under_way(world: World, stepped: Stepped) -> None:
    with stepped(world) as engine:
        done, cut = ask(engine, None, [1], 3), ask(engine, None, [2], 9)
        for _ in range(3):
            step(engine)
        engine.close()
        engine._run()
        assert events_of(done) == [*world.expected(None, [1], 3), Finished("length")]
        *tokens, error = events_of(cut)
        assert tokens == world.expected(None, [2], 3)
        assert isinstance(error, CacheClosed)


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_while_steps_are_under_way(
    world: World, stepped: Stepped, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come, stop and are aborted at random, while memory is short; in every other
    run, steps are padded as for a GPU's graphs."""
    rng = random.Random(seed)
    monkeypatch.setattr(Runner, "_pads", seed % 2 == 1)
    pages = world.pages_of_the_largest + 160 // BLOCK + 1
    limits = {"max_adapters": 1, "max_context": 160, "max_step_tokens": 64, "max_running": 24}
    shared = random_prompt(rng, 40, 41)
    asked: list[tuple[Any, ...]] = []
    aborted = set()
    with stepped(world, pages=pages, gpu_slots=6, **limits) as engine:
        engine.settings = replace(engine.settings, end_tokens=frozenset([0, 100, 200]))
        while len(asked) < 40 or engine._everybody():
            if len(asked) < 40 and rng.random() < 0.5:
                adapter_id = rng.choice([*4 * [None], *world.ids[11:]])  # large ones
                prompt = shared[: rng.randrange(41)] + random_prompt(rng, 1, 20)
                asked.append((ask(engine, adapter_id, prompt, rng.randrange(1, 100)), prompt))
            if asked and rng.random() < 0.04:
                job, _ = rng.choice(asked)
                aborted.add(job)
                engine.abort(job)
            step(engine)
        stats, ends = engine.cache.stats(), engine.settings.end_tokens
        assert engine.counts["preempted"] > 0
        assert sum(n for (tier, _), n in stats.evictions.items() if tier is Tier.GPU) > 0
    reasons = set()
    for job, prompt in asked:
        events = events_of(job)
        full = world.expected(job.adapter_id, prompt, job.max_tokens)
        at = next((n for n, token in enumerate(full) if token in ends), None)
        # The tiny model's own end token is none of these: PEFT's tokens end there, ours go on.
        if len(full) < job.max_tokens and at is None:
            events = events[: len(full)]
        elif isinstance(events[-1] if events else None, Finished):
            reasons.add(events[-1].reason)
            assert events.pop().reason == ("length" if at is None else "stop")
            assert events == full[:at]
        else:
            assert job in aborted
        assert events == full[:at][: len(events)]
    assert reasons == {"length", "stop"}
