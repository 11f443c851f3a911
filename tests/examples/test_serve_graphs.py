"""Steps padded to a CUDA graph's shape: what they compute, and that all of it is captured."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

import serving
from serving import World, ask, outcome, random_prompt

import serve_model
from serve_attention import TILE_TOKENS, attend_plainly
from serve_engine import Engine
from serve_job import Job, Sampling
from serve_rows import Rows, numbers_of
from serve_runner import OF_ATTENTION, Runner
from serve_shape import Limits, Shape

ALL_LINEAR = OF_ATTENTION | {"gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"), 16)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with serving.one_thread():
        yield


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too: all of a graph's steps but the graph."""
    monkeypatch.setattr(Runner, "_pads", True)


def some_work(rng: random.Random, limits: Limits) -> list[tuple[Job, int]]:
    """Any step within the limits: jobs that decode, then chunks."""
    work: list[tuple[Job, int]] = []
    left = rng.randint(1, limits.rows)
    for _ in range(rng.randint(1, min(limits.jobs, left))):
        count = 1 if rng.random() < 0.7 else rng.randint(1, 40)
        count = min(count, left, limits.blocks * limits.block_size)
        if not count:
            break
        computed = rng.randint(0, limits.blocks * limits.block_size - count)
        job = Job(None, [rng.randrange(1, 256) for _ in range(computed + count)], 1, Sampling())
        job.computed = computed
        job.pages = rng.sample(range(1, 1000), -(-(computed + count) // limits.block_size))
        work.append((job, count))
        left -= count
    return sorted(work, key=lambda each: each[1] > 1)


@pytest.mark.parametrize(
    "limits", [Limits(1024, 64, 8, 16), Limits(100, 100, 4, 32), Limits(3000, 7, 2, 16)]
)
def test_every_step_fits_a_shape_with_little_padding(limits: Limits) -> None:
    rng, shapes = random.Random(limits.rows), limits.shapes()
    assert len(shapes) == len(set(shapes)) < 32
    most = max(sum(shape.sizes) for shape in shapes)
    for _ in range(300):
        work = some_work(rng, limits)
        exact, padded = limits.exact(work), limits.padded(work)
        assert padded in shapes
        assert all(its <= most for its, most in zip(exact, padded, strict=True))
        assert (exact.tiles == 0) == (padded.tiles == 0)
        if padded.tiles:
            assert padded.rows - exact.rows < max(128, exact.rows / 4)
        else:
            assert padded.rows == padded.jobs < 2 * exact.rows
        assert sum(exact.sizes) <= most


def test_the_most_tiles_that_there_can_be_have_room() -> None:
    limits = Limits(256, 8, 8, 16)
    counts = [TILE_TOKENS + 1] * 7 + [256 - 7 * (TILE_TOKENS + 1)]  # a token too many, each
    work = []
    for count in counts:
        job = Job(None, [1] * count, 1, Sampling())
        job.pages = list(range(-(-count // 16)))
        work.append((job, count))
    assert limits.exact(work).tiles == 7 * 2 + 9 <= limits.padded(work).tiles
    assert limits.padded(work).rows == limits.exact(work).rows == 256


def test_padded_numbers_are_the_exact_ones_and_padding() -> None:
    limits, rng, spare = Limits(256, 16, 8, 16), random.Random(3), 5000
    for _ in range(100):
        work = some_work(rng, limits)
        if work[0][1] == 1:
            work[0][0].unread = 1
            work[0][0].tokens.pop()
        places = {work[0][0]: -7}
        shapes = limits.exact(work), limits.padded(work)
        exact, padded = (
            Rows.of(torch.tensor(numbers_of(work, shape, places, 16, spare)), shape)
            for shape in shapes
        )
        rows, jobs, blocks, tiles = shapes[0]
        for name in ("tokens", "positions", "pages", "offsets"):
            assert getattr(padded, name)[:rows].equal(getattr(exact, name))
        assert (padded.pages[rows:] == spare).all()
        assert (padded.tokens[rows:] == 0).all()
        assert padded.last[:jobs].equal(exact.last)
        assert padded.tables[:jobs, :blocks].equal(exact.tables)
        assert (padded.tables[jobs:] == spare).all()
        assert (padded.tables[:jobs, blocks:] == spare).all()
        if padded.tiles is None or exact.tiles is None:
            assert padded.tiles is exact.tiles is None
            continue
        assert padded.tiles[:tiles].equal(exact.tiles)
        assert (padded.tiles[tiles:, 2] == 0).all()
        # Every row is in one tile, at its place, and a tile in one sequence.
        found = [
            (job, first + at, exact.positions[first].item() + at)
            for job, first, count in exact.tiles.tolist()
            for at in range(count)
        ]
        owners = [n for n, (_, count) in enumerate(work) for _ in range(count)]
        assert found == list(zip(owners, range(rows), exact.positions.tolist(), strict=True))
        assert max(exact.tiles[:, 2]) <= TILE_TOKENS


def test_rows_that_pad_a_step_change_nothing(
    world: World, padding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, compute = set(), Runner._compute

    def noted(runner: Any, shape: Any, lora: Any) -> None:
        computed.add(runner._kind_of(shape, lora))
        compute(runner, shape, lora)

    monkeypatch.setattr(Runner, "_compute", noted)
    with world.engine(pages=600, max_step_tokens=300) as engine:
        ids = (None, "adapter-01", "adapter-13", "adapter-01", None)
        jobs = [ask(engine, adapter_id, [7] * 40, 12 + 8 * n) for n, adapter_id in enumerate(ids)]
        for job in jobs:
            expected = world.expected(job.adapter_id, [7] * 40, job.max_tokens)
            assert outcome(job)[0] == expected
        alone = ask(engine, None, [7] * 40, 4)
        assert outcome(alone)[0] == world.expected(None, [7] * 40, 4)
        kinds = set(engine._runner.kinds())
    decoding = {shape.rows for shape, _, _ in computed if not shape.tiles}
    assert {1} < decoding <= {1, 2, 4, 8}  # how many ran at once depends on how fast loads are
    mixed = {shape.rows for shape, _, _ in computed if shape.tiles}
    assert {128} <= mixed <= {128, 256}
    classes = {rank_class for _, rank_class, _ in computed}
    assert {0, 16, 64} >= classes > {0}
    # No step captures one: those of all kinds are there at the start.
    assert computed <= kinds
    sizes = [(1 << n, False) for n in range(7)] + [(n, True) for n in (128, 256, 300)]
    its_kinds = [(0, frozenset())]
    its_kinds += [(rank, names) for rank in (16, 64) for names in (OF_ATTENTION, ALL_LINEAR)]
    assert {((shape.rows, shape.tiles > 0), (rank, its)) for shape, rank, its in kinds} == {
        (size, its) for size in sizes for its in its_kinds
    }


def test_adapters_of_attention_alone_are_computed_with_nothing_else(
    world: World, padding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, compute = set(), Runner._compute

    def noted(runner: Any, shape: Any, lora: Any) -> None:
        computed.add(runner._kind_of(shape, lora).modules)
        compute(runner, shape, lora)

    monkeypatch.setattr(Runner, "_compute", noted)
    with world.engine(pages=600) as engine:
        for adapter_id, modules in (
            ("adapter-02", OF_ATTENTION),  # every third has attention alone
            ("adapter-01", ALL_LINEAR),
            (None, frozenset()),
        ):
            computed.clear()
            job = ask(engine, adapter_id, [9] * 20, 8)
            assert outcome(job)[0] == world.expected(adapter_id, [9] * 20, 8)
            assert computed == {modules}


def test_padded_steps_give_pefts_tokens_while_memory_is_short(world: World, padding: None) -> None:
    rng = random.Random(8)
    requests = [
        (rng.choice([None, *world.ids]), random_prompt(rng), rng.randrange(4, 60))
        for _ in range(40)
    ]
    pages = 2 * world.pages_of_the_largest + 160 // 16 + 1
    limits = {"max_adapters": 2, "max_context": 160, "max_step_tokens": 48, "max_running": 24}
    with world.engine(pages=pages, gpu_slots=6, **limits) as engine:
        jobs = [ask(engine, *request) for request in requests]
        got = [outcome(job)[0] for job in jobs]
    assert got == [world.expected(*request) for request in requests]


class Checking:
    """A runner that computes each step once more, as large as its work and by plain torch, in front
    of the engine's own."""

    def __init__(self, engine: Any) -> None:
        self._runner, self._cache = engine._runner, engine.cache
        self.padded, self.close = self._runner.padded, self._runner.close
        self.check = self._runner.check
        self.shapes: list[Shape] = []
        engine._runner = self

    def __call__(self, work: Any, lora: Any) -> Any:
        runner, jobs = self._runner, len(work)
        before, row_of = runner._last.clone(), runner._row_of
        launched = runner(work, lora)
        self.shapes.append(runner._shape_of(work))
        got, chosen = runner._logits[:jobs].clone(), runner._last.clone()
        its, mine = runner._row_of, runner._limits.exact(work)
        runner._last.copy_(before)
        runner._row_of = row_of
        runner._send(work, mine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve_model, "attend", attend_plainly)
            with self._cache.lora_batch([(job.lease, count) for job, count in work]) as exact:
                runner._compute(mine, exact)
        want = runner._logits[:jobs]
        assert (got - want).abs().max() < 1e-4 * want.abs().max()
        assert chosen[:jobs].equal(got.argmax(dim=1))
        runner._last.copy_(chosen)
        runner._row_of = its
        return launched


@torch.inference_mode()
def check_mixed_steps(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "start", lambda engine: None)  # the steps are made here
        limits = {"max_context": 160, "max_running": 12, "max_step_tokens": 140}
        with world.engine(pages=900, **limits) as engine:
            for adapter_id in world.ids:
                engine.cache.acquire(adapter_id).result().release()
            runner, rng = Checking(engine), random.Random(6)
            jobs = []
            for number in range(24):
                adapter_id = rng.choice([None, *world.ids])
                count = rng.randrange(2, 30)
                jobs.append(ask(engine, adapter_id, random_prompt(rng, 1, 100), count))
                for _ in range(number % 4):
                    engine.step()
            while engine.step() or engine._everybody():
                pass
            for job in jobs:
                prompt = job.tokens[: job.prompt_tokens]
                assert outcome(job)[0] == world.expected(job.adapter_id, prompt, job.max_tokens)
    shapes = set(runner.shapes)
    assert {shape.rows for shape in shapes if shape.tiles} == {128, 140}
    assert any(not shape.tiles for shape in shapes)


def test_mixed_steps_that_are_padded_give_the_logits_of_exact_ones(
    world: World, padding: None
) -> None:
    check_mixed_steps(world)


@pytest.mark.gpu
def test_graphs_of_mixed_steps_give_the_logits_of_plain_torch(tmp_path: Path) -> None:
    check_mixed_steps(World(tmp_path, 16, device="cuda"))


@pytest.mark.gpu
def test_graphs_on_a_gpu_give_pefts_tokens(tmp_path: Path) -> None:
    world = World(tmp_path, 16, device="cuda")
    rng = random.Random(11)
    requests = [(rng.choice([None, *world.ids]), random_prompt(rng), 24) for _ in range(48)]
    pages = 4 * world.pages_of_the_largest + 160 // 16 + 1
    with world.engine(pages=pages, max_adapters=4, max_context=160) as engine:
        jobs = [ask(engine, *request) for request in requests]
        got = [outcome(job, 300)[0] for job in jobs]
        assert set(engine._runner._graphs) == set(engine._runner.kinds())
        assert len(engine._runner._graphs) == (7 + 4) * 5
    assert got == [world.expected(*request) for request in requests]
