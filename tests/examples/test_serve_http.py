"""The example server: its answers, its statuses, and many clients that do what clients do."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from adaptercache import Tier
from adaptercache.testing import check_consistent

pytest.importorskip("peft")
pytest.importorskip("transformers")

import serving
from serving import World, random_prompt, settle

import serve

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with serving.one_thread():
        yield


@dataclass
class Client:
    """Speaks to a server; each call is a connection of its own."""

    host: str
    port: int

    def post(self, path: str, content: Any) -> tuple[int, Any]:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self._call("POST", path, body)

    def get(self, path: str) -> tuple[int, Any]:
        return self._call("GET", path, None)

    def complete(self, model: str, prompt: Any, count: int, **fields: Any) -> tuple[int, Any]:
        content = {"model": model, "prompt": prompt, "max_tokens": count, **fields}
        return self.post("/v1/completions", {"return_token_ids": True, **content})

    def stream(self, model: str, prompt: Any, count: int) -> Iterator[Any]:
        """The events of a completion; closing it goes away in the middle."""
        content = {"model": model, "prompt": prompt, "max_tokens": count, "stream": True}
        body = json.dumps({**content, "return_token_ids": True}).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", body)
            with connection.getresponse() as response:
                assert response.status == 200, response.read()
                for line in response:
                    if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                        yield json.loads(line[6:])
        finally:
            connection.close()

    def leave(self, model: str, prompt: Any, count: int) -> None:
        """Ask for an answer, and go away without it."""
        content = {"model": model, "prompt": prompt, "max_tokens": count}
        body = json.dumps(content).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((self.host, self.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(0.01)

    def _call(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            text = response.read()
            if response.headers["Content-Type"] != "application/json":
                return response.status, text.decode()
            return response.status, json.loads(text)
        finally:
            connection.close()


@contextmanager
def served(world: World, **options: Any) -> Iterator[tuple[Client, Any]]:
    """A server on a free port, and its engine. At the end nothing may be left of it."""
    before = {thread.name for thread in threading.enumerate()}
    with ExitStack() as stack:
        engine = stack.enter_context(world.engine(**options))
        service = serve.service_of(engine, world.source, world.tokenizer, "base")
        server = stack.enter_context(serve.serving(service, "127.0.0.1", 0))
        host, port = server.server_address[:2]
        yield Client(str(host), port), engine
        assert settle(lambda: serving.is_idle(engine)), engine.cache.stats()
        check_consistent(engine.cache)
    assert engine.cache.stats().pages["kv"] == 0
    left = {thread.name for thread in threading.enumerate()} - before
    assert not left, "threads left running"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("adapters"), 6)
    world.break_weights("adapter-04")
    world.make_dora("adapter-05")
    return world


def tokens_of(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def test_an_answer_whole_and_streamed(world: World) -> None:
    prompt = "Once upon a time"
    expected = world.expected("adapter-01", list(prompt.encode()), 12)
    with served(world, pages=600) as (client, _):
        status, answer = client.complete("adapter-01", prompt, 12)
        assert status == 200
        assert answer["object"] == "text_completion"
        assert answer["model"] == "adapter-01"
        assert tokens_of(answer) == expected
        text = bytes(expected).decode(errors="replace")
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == 16
        assert answer["usage"]["completion_tokens"] == len(expected) == 12
        events = list(client.stream("adapter-01", list(prompt.encode()), 12))
        assert [token for event in events for token in tokens_of(event)] == expected
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
        status, again = client.complete("base", prompt, 12)
        assert status == 200
        assert tokens_of(again) == world.expected(None, list(prompt.encode()), 12) != expected


def test_models_health_and_metrics(world: World) -> None:
    with served(world, pages=600) as (client, _):
        status, models = client.get("/v1/models")
        assert status == 200
        assert [row["id"] for row in models["data"]] == ["base", *world.ids]
        client.complete("adapter-00", [1, 2, 3], 5)
        status, text = client.get("/metrics")
        assert status == 200
        assert re.search(r"^serve_generated_tokens_total 5\.0$", text, re.MULTILINE)
        assert re.search(r'^adaptercache_loads_total\{from="host",.*\} 1\.0$', text, re.MULTILINE)
        assert client.get("/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("model", "status", "says"),
    [
        ("nobody/published-this", 404, "nobody/published-this"),
        ("../../etc", 404, "../../etc"),
        ("adapter-04", 422, "adapter_model.safetensors"),
        ("adapter-05", 422, "DoRA"),
    ],
)
def test_an_adapter_that_cannot_be_served_has_its_status(
    world: World, model: str, status: int, says: str
) -> None:
    with served(world, pages=600) as (client, _):
        for stream in (False, True):
            got, answer = client.complete(model, [1, 2, 3], 4, stream=stream)
            assert got == status
            assert answer["error"]["code"] == status
            assert says in answer["error"]["message"]
        assert client.complete("base", [1, 2, 3], 4)[0] == 200


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        {"prompt": "x"},
        {"model": "base"},
        {"model": 3, "prompt": "x"},
        {"model": "base", "prompt": ["x", "y"]},
        {"model": "base", "prompt": ""},
        {"model": "base", "prompt": [1, 257]},
        {"model": "base", "prompt": [1, True]},
        {"model": "base", "prompt": "x", "max_tokens": 0},
        {"model": "base", "prompt": "x", "max_tokens": 10_000},
        {"model": "base", "prompt": "x", "temperature": 3},
        {"model": "base", "prompt": "x", "temperature": "hot"},
        {"model": "base", "prompt": "x", "n": 2},
        {"model": "base", "prompt": "x", "stop": ["y"]},
        {"model": "base", "prompt": "x", "no_such_field": 1},
    ],
)
def test_a_bad_request_is_400(world: World, shared: tuple[Client, Any], content: Any) -> None:
    status, answer = shared[0].post("/v1/completions", content)
    assert status == 400, answer
    assert answer["error"]["message"]


@pytest.fixture
def shared(world: World) -> Iterator[tuple[Client, Any]]:
    with served(world, pages=600) as both:
        yield both


def test_other_paths_are_404(shared: tuple[Client, Any]) -> None:
    assert shared[0].get("/v2")[0] == shared[0].post("/v1/models", {})[0] == 404


def test_neutral_fields_of_openai_are_taken(shared: tuple[Client, Any]) -> None:
    fields = {"n": 1, "top_p": 1.0, "stop": None, "user": "somebody", "echo": False}
    assert shared[0].complete("base", "x", 2, **fields)[0] == 200


def test_refresh_tells_what_became_of_it(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    with served(world, pages=600) as (client, _):
        old = tokens_of(client.complete("adapter-00", [1, 2], 8)[1])
        world.publish("adapter-00", seed=3)
        status, answer = client.post("/v1/refresh", {"model": "adapter-00"})
        assert (status, answer["model"]) == (200, "adapter-00")
        new = tokens_of(client.complete("adapter-00", [1, 2], 8)[1])
        assert new == world.expected("adapter-00", [1, 2], 8) != old
        world.break_weights("adapter-00")  # what is served stays, and its owner is told
        assert client.post("/v1/refresh", {"model": "adapter-00"})[0] == 422
        assert tokens_of(client.complete("adapter-00", [1, 2], 8)[1]) == new
        assert client.post("/v1/refresh", {"model": "nobody"})[0] == 404
        assert client.post("/v1/refresh", {})[0] == 400


def test_overload_is_429(world: World) -> None:
    with served(world, pages=600, max_waiting=1, max_running=1, max_context=256) as (
        client,
        engine,
    ):
        events = client.stream("base", [1], 250)
        next(events)
        waits = threading.Thread(target=client.complete, args=("base", [1], 2))
        waits.start()
        assert settle(lambda: engine.num_waiting == 1)
        status, answer = client.complete("base", [1], 2)
        assert status == 429
        assert answer["error"]["type"] == "overloaded"
        events.close()  # the one that runs goes away, and the one that waits is served
        waits.join()


def test_a_client_that_goes_away_ends_its_request(world: World) -> None:
    with served(world, pages=600) as (client, engine):
        events = client.stream("adapter-00", [1], 400)
        next(events)
        events.close()
        client.leave("adapter-01", [1], 400)
        assert settle(lambda: engine.counts["aborted"] == 2), engine.counts


def test_a_closed_engine_is_503(world: World) -> None:
    with served(world, pages=600) as (client, engine):
        engine.close()
        assert client.complete("base", "x", 1)[0] == 503
        assert client.get("/health")[0] == 503


# -- load


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


# -- the command


def test_the_command_serves_and_ends_at_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--port", "0", "--count", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [*command, "--device", "cpu"], env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.fullmatch(r"serving on (http://127\.0\.0\.1:\d+), cpu\n", line)
            assert found, line
            content = {"model": "adapter-03", "prompt": "Once", "max_tokens": 8}
            request = urllib.request.Request(
                f"{found[1]}/v1/completions", json.dumps(content).encode()
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 8
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert list(tmp_path.iterdir()) == [], "temporary files are left"


def test_the_command_names_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--device", "cpu", "--count", "1", "--port", str(port)]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_the_command_names_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--device", "cpu", "--gpu-mib", "1", "--count", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: the arena has 128 pages, and ")
