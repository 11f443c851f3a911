"""The example engine, token for token against PEFT, in an arena too small for its requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache import AdapterInvalid, AdapterNotFound, AdapterUnsupported, CacheClosed, Tier
from adaptercache.testing import check_consistent

pytest.importorskip("peft")
pytest.importorskip("transformers")

import serving
from serving import World, ask, is_idle, outcome, random_prompt, settle

BLOCK = 16


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"), 16)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with serving.one_thread():
        yield


def test_64_mixed_requests_give_pefts_tokens_while_memory_is_short(world: World) -> None:
    rng = random.Random(7)
    requests = [  # those of the base model grow long: KV needs more and more pages
        (None, random_prompt(rng), rng.randrange(60, 100))
        if number % 3 == 0
        else (world.ids[number % 16], random_prompt(rng), rng.randrange(4, 40))
        for number in range(48)
    ]
    shared = random_prompt(rng, 40, 41)  # some begin alike, on one adapter and on others
    requests += [
        (adapter_id, shared + random_prompt(rng, 1, 6), 6)
        for adapter_id in (None, *world.ids[:7])
        for _ in range(2)
    ]
    assert len(requests) == 64
    assert {adapter_id for adapter_id, _, _ in requests} == {None, *world.ids}
    pages = 2 * world.pages_of_the_largest + 160 // BLOCK + 1
    limits = {"max_adapters": 2, "max_context": 160, "max_step_tokens": 48, "max_running": 24}
    with world.engine(pages=pages, gpu_slots=6, **limits) as engine:
        jobs = [ask(engine, *request) for request in requests]
        got = [outcome(job) for job in jobs]
        stats, counts = engine.cache.stats(), engine.counts
        assert settle(lambda: is_idle(engine))
        check_consistent(engine.cache)
    for request, job, (tokens, reason) in zip(requests, jobs, got, strict=True):
        expected = world.expected(*request)
        assert tokens == expected, (job.name, request[0])
        assert reason == ("length" if len(expected) == request[2] else "stop")
    # The memory was short on every side, and all of it was used.
    assert sum(n for (tier, _), n in stats.evictions.items() if tier is Tier.GPU) > 5
    assert counts["preempted"] > 0
    assert counts["deferred_loading"] > 0
    assert counts["deferred_max_adapters"] + counts["deferred_room"] > 0
    assert counts["prefix_hit_tokens"] > 0


def test_kv_takes_the_room_of_adapters_that_nobody_uses(world: World) -> None:
    pages = 2 * world.pages_of_the_largest + 160 // BLOCK + 1
    with world.engine(pages=pages, max_adapters=2, max_context=160) as engine:
        for adapter_id in ("adapter-13", "adapter-15"):  # of rank 64: they fill the arena
            assert outcome(ask(engine, adapter_id, [1], 2))[0] == world.expected(adapter_id, [1], 2)
        prompts = [[number] * 40 for number in range(10)]
        jobs = [ask(engine, None, prompt, 60) for prompt in prompts]
        for job, prompt in zip(jobs, prompts, strict=True):
            assert outcome(job)[0] == world.expected(None, prompt, 60)
        assert engine.cache.stats().evictions[Tier.GPU, "kv"] > 0
        assert outcome(ask(engine, "adapter-13", [1], 2))[0] == world.expected("adapter-13", [1], 2)


def test_a_preempted_request_goes_on_with_the_weights_that_it_began_with(tmp_path: Path) -> None:
    world = World(tmp_path, 16)
    pages = world.pages_of_the_largest + 160 // BLOCK + 1
    prompts = [[number] * 40 for number in range(12)]
    old = [world.expected("adapter-07", prompt, 60) for prompt in prompts]
    with world.engine(pages=pages, max_adapters=1, max_context=160) as engine:
        jobs = [ask(engine, "adapter-07", prompt, 60) for prompt in prompts]
        assert settle(lambda: engine.counts["preempted"] > 0)
        began = [job.num_generated > 0 for job in jobs]
        world.publish("adapter-07", seed=9)
        engine.cache.refresh("adapter-07").result(30)
        got = [outcome(job)[0] for job in jobs]
    new = [world.expected("adapter-07", prompt, 60) for prompt in prompts]
    assert any(began)
    for was_running, tokens, before, after in zip(began, got, old, new, strict=True):
        assert tokens == before or (tokens == after and not was_running)


def test_a_prefix_is_hit_on_the_same_adapter_and_never_on_another(world: World) -> None:
    prompt = random_prompt(random.Random(1), 3 * BLOCK + 5, 3 * BLOCK + 6)
    with world.engine(pages=600) as engine:
        cached: dict[str | None, list[int]] = {}
        for adapter_id in (None, "adapter-04", None, "adapter-05", "adapter-04", "adapter-05"):
            job = ask(engine, adapter_id, prompt, 5)
            assert outcome(job)[0] == world.expected(adapter_id, prompt, 5)
            cached.setdefault(adapter_id, []).append(job.cached)
    assert cached == {key: [0, 3 * BLOCK] for key in (None, "adapter-04", "adapter-05")}


def test_generated_tokens_are_cached_too(world: World) -> None:
    prompt = random_prompt(random.Random(2), BLOCK, BLOCK + 1)
    with world.engine(pages=600) as engine:
        first, reason = outcome(ask(engine, None, prompt, 2 * BLOCK))
        assert reason == "length"
        job = ask(engine, None, [*prompt, *first, 65], 3)
        assert outcome(job)[0] == world.expected(None, [*prompt, *first, 65], 3)
        assert job.cached == 2 * BLOCK  # the last generated token was never an input


def test_an_error_is_its_own_requests_alone(tmp_path: Path) -> None:
    world = World(tmp_path, 6)
    world.break_weights("adapter-01")
    world.make_dora("adapter-02")
    with world.engine(pages=600) as engine:
        ids = ["adapter-00", "adapter-01", "adapter-02", "none/such", None]
        jobs = [ask(engine, adapter_id, [1, 2, 3], 4) for adapter_id in ids]
        kinds = (AdapterInvalid, AdapterUnsupported, AdapterNotFound)
        for job, kind in zip(jobs[1:4], kinds, strict=True):
            with pytest.raises(kind):
                outcome(job)
        for job in (jobs[0], jobs[4]):
            assert outcome(job)[0] == world.expected(job.adapter_id, [1, 2, 3], 4)
        assert settle(lambda: is_idle(engine))


def test_a_republished_adapter_is_new_for_new_requests_and_old_for_running_ones(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, 2)
    prompt = random_prompt(random.Random(3), 40, 41)
    with world.engine(pages=600) as engine:
        old = world.expected("adapter-01", prompt, 80)
        running = ask(engine, "adapter-01", prompt, 80)
        got = [running.events.get(timeout=60)]
        world.publish("adapter-01", seed=5)
        engine.cache.refresh("adapter-01").result(30)
        assert engine.num_running == 1, "too short to see anything"
        later = ask(engine, "adapter-01", prompt, 20)
        new = world.expected("adapter-01", prompt, 20)
        assert outcome(later)[0] == new != old[:20]
        assert later.cached == 0
        assert got + outcome(running)[0] == old
        # Nothing of the old content can be hit again, so nothing of it is kept for that.
        assert settle(lambda: is_idle(engine))
        again = ask(engine, "adapter-01", prompt, 20)
        assert outcome(again)[0] == new
        assert again.cached == 2 * BLOCK


def test_what_old_weights_computed_is_dropped_when_they_are_superseded(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    with world.engine(pages=600) as engine:
        outcome(ask(engine, "adapter-00", [3] * 40, 2))
        outcome(ask(engine, None, [3] * 40, 2))
        assert settle(lambda: engine.blocks.num_idle == 4)
        world.publish("adapter-00", seed=5)
        engine.cache.refresh("adapter-00").result(30)
        assert settle(lambda: engine.blocks.num_idle == 2)
        assert settle(lambda: is_idle(engine))


@pytest.mark.parametrize("after", ["admission", "submission"])
def test_an_aborted_job_gives_everything_back(world: World, after: str) -> None:
    with world.engine(pages=600) as engine:
        job = ask(engine, "adapter-07", [5] * 100, 300)
        if after == "admission":
            job.events.get(timeout=60)
        engine.abort(job)
        assert settle(lambda: engine.counts["aborted"] == 1 and is_idle(engine))
        check_consistent(engine.cache)


def test_a_seed_gives_the_same_tokens_in_any_company(world: World) -> None:
    from serve_job import Job, Sampling

    def sampled(engine: Any, company: int) -> list[int]:
        others = [ask(engine, adapter_id, [9], 8) for adapter_id in world.ids[:company]]
        job = Job("adapter-03", [1, 2, 3], 12, Sampling(0.9, seed=4))
        engine.submit(job)
        found = outcome(job)[0]
        for other in others:
            outcome(other)
        return found

    with world.engine(pages=900) as engine:
        first = sampled(engine, 0)
        assert sampled(engine, 6) == first
        assert first != world.expected("adapter-03", [1, 2, 3], 12)


def test_what_can_never_run_is_refused_at_once(world: World) -> None:
    from serve_job import Overloaded, Settings

    with pytest.raises(ValueError, match="the arena has 100 pages"), world.engine(pages=100):
        pass
    with pytest.raises(ValueError, match="max_running 64: 1 to 32"):
        Settings(max_step_tokens=32)
    with world.engine(pages=600, max_context=64, max_waiting=2) as engine:
        for prompt, count in (([], 4), ([1] * 61, 4), ([1], 0)):
            with pytest.raises(ValueError, match="at most 64"):
                ask(engine, None, prompt, count)
        overloaded = 0
        for _ in range(100):
            try:
                ask(engine, None, [1], 60)
            except Overloaded:
                overloaded += 1
        assert 0 < overloaded < 100
    with pytest.raises(CacheClosed):
        ask(engine, None, [1], 4)


def test_no_more_are_admitted_than_a_step_has_rows(world: World) -> None:
    with world.engine(pages=600, max_running=3) as engine:
        jobs = [ask(engine, adapter_id, [1, 2, 3], 6) for adapter_id in [None] * 9 + world.ids[:3]]
        most = 0
        while not all(job.events.qsize() for job in jobs):
            most = max(most, engine.num_running)
        for job in jobs:
            assert outcome(job)[0] == world.expected(job.adapter_id, [1, 2, 3], 6)
        assert most == 3
        assert engine.counts["deferred_max_tokens"] > 0


def test_the_model_is_as_good_as_before_for_others(world: World) -> None:
    """The engine computes projections of one input as one; the modules keep their weights."""
    from serve_tiny import tiny_model

    ids = torch.arange(20)[None]
    with world.engine(pages=600) as engine:
        outcome(ask(engine, None, [1], 2))
    with torch.no_grad():
        assert world.model(ids).logits.equal(tiny_model()(ids).logits)


def test_closing_tells_who_still_waits(world: World) -> None:
    with world.engine(pages=600) as engine:
        jobs = [ask(engine, adapter_id, [1, 2], 200) for adapter_id in world.ids]
        jobs[0].events.get(timeout=60)
    told = 0
    for job in jobs:
        try:
            outcome(job, timeout_s=5)
        except CacheClosed:
            told += 1
    assert told > 0
