"""The example server under load: clients that ask for what there is and isn't, and go away."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adaptercache import Tier

pytest.importorskip("peft")
pytest.importorskip("transformers")

import serving
from serving import World, random_prompt, settle
from serving_client import Client, served, tokens_of


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with serving.one_thread():
        yield


@dataclass
class Seen:
    """What the clients of a load test met."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left: int = 0
    cached: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Load:
    """Clients that ask for good adapters, bad ones and none, stream or not, and go away at times.

    The prompts are few, so that prefixes are hit, and so that the oracle has no more to compute.
    ``republished``: from some moment on its answers are the new ones; until then either.
    """

    def __init__(self, world: World, client: Client, seed: int, requests: int) -> None:
        self.world, self.client, self.requests = world, client, requests
        self.rng = random.Random(seed)
        common = random_prompt(self.rng, 40, 41)
        self.prompts = [common + random_prompt(self.rng, 2, 12) for _ in range(2)]
        self.good = [i for i in world.ids if i not in (world.broken, world.dora)]
        self.changing = self.good[0]
        self.may_be_new = self.is_new = False
        self.seen = Seen()
        self.count = 10
        self.want = {
            (adapter_id, number): world.expected(adapter_id, prompt, self.count)
            for adapter_id in (None, *self.good)
            for number, prompt in enumerate(self.prompts)
        }
        self.want_new: dict[int, list[int]] = {}

    def run(self, clients: int) -> None:
        threads = [
            threading.Thread(target=self._client, args=(number,), name=f"client-{number}")
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        assert settle(lambda: sum(self.seen.statuses.values()) > clients, 60)
        self._republish()
        for thread in threads:
            thread.join()

    def _republish(self) -> None:
        self.may_be_new = True
        self.world.publish(self.changing, seed=31)
        folder = self.world.root / self.changing
        with self.world.peft_lock:
            self.want_new = {
                number: self.world.peft.tokens(folder, prompt, self.count)
                for number, prompt in enumerate(self.prompts)
            }
        status, answer = self.client.post("/v1/refresh", {"model": self.changing})
        assert status == 200, answer
        self.is_new = True

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        for _ in range(self.requests):
            try:
                self._one(rng)
            except Exception as error:
                with self.seen.lock:
                    self.seen.wrong.append(repr(error))

    def _one(self, rng: random.Random) -> None:
        kind = rng.choices(
            ["good", "changing", "base", "stream", "leave", "unknown", "broken", "dora"],
            [8, 3, 3, 4, 3, 1, 1, 1],
        )[0]
        which = rng.randrange(len(self.prompts))
        prompt = self.prompts[which]
        adapter_id = {
            **{"base": None, "changing": self.changing, "broken": self.world.broken},
            **{"dora": self.world.dora, "unknown": f"unknown-{rng.randrange(5)}"},
        }.get(kind, rng.choice(self.good[1:]))
        model = adapter_id or "base"
        if kind == "leave":
            if rng.random() < 0.5:
                self.client.leave(model, prompt, 200)
            else:
                events = self.client.stream(model, prompt, 200)
                next(events)
                events.close()
            with self.seen.lock:
                self.seen.left += 1
            return
        was_new = self.is_new
        if kind == "stream":
            status, cached = 200, 0
            events = list(self.client.stream(model, prompt, self.count))
            tokens = [token for event in events for token in tokens_of(event)]
        else:
            status, answer = self.client.complete(model, prompt, self.count)
            tokens = tokens_of(answer) if status == 200 else []
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"] if tokens else 0
        with self.seen.lock:
            self.seen.statuses[kind, status] += 1
            self.seen.cached += cached
            if status == 200 and not self._is_right(adapter_id, which, tokens, was_new):
                self.seen.wrong.append(f"{model}, prompt {which}: {tokens}")

    def _is_right(
        self, adapter_id: str | None, which: int, tokens: list[int], was_new: bool
    ) -> bool:
        old = tokens == self.want[adapter_id, which]
        if adapter_id != self.changing or not self.may_be_new:
            return old
        is_new = settle(lambda: bool(self.want_new), 60) and tokens == self.want_new[which]
        return is_new or (old and not was_new)


def load(folder: Path, adapters: int, clients: int, requests: int) -> None:
    world = World(folder, adapters)
    world.broken, world.dora = world.ids[3], world.ids[4]
    world.break_weights(world.broken)
    world.make_dora(world.dora)
    pages = 3 * world.pages_of_the_largest + 128
    options = {"pages": pages, "max_adapters": 3, "max_context": 256, "max_running": 48}
    with served(world, gpu_slots=6, **options) as (client, engine):
        load = Load(world, client, seed=1, requests=requests)
        load.run(clients)
        seen, counts = load.seen, engine.counts
        assert not seen.wrong, seen.wrong[:5]
        good = ("good", "changing", "base", "stream")
        allowed = {
            ("unknown", 404),
            ("broken", 422),
            ("dora", 422),
            *((kind, 200) for kind in good),
        }
        assert set(seen.statuses) == allowed
        assert sum(seen.statuses.values()) + seen.left == clients * requests
        assert settle(lambda: engine.num_running == engine.num_waiting == 0, 30)
        assert counts["aborted"] > seen.left // 2
        assert seen.cached > 0
        stats = engine.cache.stats()
        assert stats.evictions[Tier.GPU, "room"] > 10
        _, answer = client.complete(load.changing, load.prompts[0], load.count)
        assert tokens_of(answer) == load.want_new[0] != load.want[load.changing, 0]


def test_load_of_20_clients(tmp_path: Path) -> None:
    load(tmp_path, adapters=12, clients=20, requests=12)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_load_of_200_clients_and_50_adapters(tmp_path: Path) -> None:
    load(tmp_path, adapters=50, clients=200, requests=12)
