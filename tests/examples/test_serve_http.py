"""The example server: its answers, its statuses, and many clients that do what clients do."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

import serving
from serving import World, settle
from serving_client import Client, served, tokens_of

import serve
from serve_tiny import END, ByteTokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with serving.one_thread():
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("adapters"), 6)
    world.break_weights("adapter-04")
    world.make_dora("adapter-05")
    return world


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
        b"[" * 100_000,
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
        {"model": "base", "prompt": "x", "temperature": []},
        {"model": "base", "prompt": "x", "temperature": True},
        {"model": "base", "prompt": "x", "stream": "false"},
        {"model": "base", "prompt": "x", "return_token_ids": 1},
        {"model": "base", "prompt": "x", "n": 2},
        {"model": "base", "prompt": "x", "stop": ["y"]},
        {"model": "base", "prompt": "x", "no_such_field": 1},
    ],
)
def test_a_bad_request_is_400(world: World, shared: tuple[Client, Any], content: Any) -> None:
    status, answer = shared[0].post("/v1/completions", content)
    assert status == 400, answer
    assert answer["error"]["message"]


def test_a_token_that_the_tokenizer_knows_and_the_model_does_not_is_400(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step it would be everybody's failure; on a GPU the process could not go on."""

    class Larger(ByteTokenizer):
        def __len__(self) -> int:
            return END + 3

        def encode(self, text: str) -> list[int]:
            return [END + 1 if letter == "!" else ord(letter) for letter in text]

    monkeypatch.setattr(world, "tokenizer", Larger())
    with served(world, pages=600) as (client, _):
        for prompt in ("oh!", [1, END + 2], [-1]):
            status, answer = client.complete("adapter-00", prompt, 4)
            assert status == 400, answer
            assert f"0 to {END}" in answer["error"]["message"]
        status, answer = client.complete("adapter-00", "oh", 4)
        expected = world.expected("adapter-00", [*b"oh"], 4)
        assert (status, tokens_of(answer)) == (200, expected)


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


def test_clients_beyond_the_1024th_file_are_served(world: World) -> None:
    """`select.select` knows no file of a higher number."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if -1 < before[1] < 2048:
        pytest.skip("the system allows no more files")
    with served(world, pages=600) as (client, _), ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        while (number := os.dup(0)) < 1100:
            stack.callback(os.close, number)
        stack.callback(os.close, number)
        status, answer = client.complete("base", [1], 2)
        assert (status, tokens_of(answer)) == (200, world.expected(None, [1], 2))


def test_a_closed_engine_is_503(world: World) -> None:
    with served(world, pages=600) as (client, engine):
        engine.close()
        assert client.complete("base", "x", 1)[0] == 503
        assert client.get("/health")[0] == 503


# -- the command


def test_the_server_ends_though_a_client_is_still_sending(world: World) -> None:
    with ExitStack() as stack:
        with served(world, pages=600) as (client, _):
            slow = stack.enter_context(socket.create_connection((client.host, client.port)))
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
            assert client.complete("base", [1], 2)[0] == 200
            started = time.monotonic()
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("error", [OSError, ConnectionResetError, TimeoutError, ValueError])
def test_what_breaks_a_step_is_not_taken_for_the_client(
    world: World, error: type[Exception]
) -> None:
    """Nor for its request: whatever it is, all are told, and nobody by half an answer."""
    with served(world, pages=600) as (client, engine):
        runner, go_on = engine._runner, threading.Event()

        class Breaks:
            padded, check, close = runner.padded, runner.check, runner.close

            def __call__(self, work: Any, lora: Any) -> Any:
                if go_on.is_set():
                    raise error("no space left")
                return runner(work, lora)

        engine._runner = Breaks()
        answers: list[Any] = []
        whole = threading.Thread(target=lambda: answers.append(client.complete("base", [2], 250)))
        whole.start()
        events = client.stream("base", [1], 250)
        next(events)
        assert settle(lambda: engine.num_running == 2)
        go_on.set()
        *_, last = events
        assert last == {"error": {"message": "no space left", "type": "server_error"}}
        whole.join()
        ((status, answer),) = answers
        assert (status, answer["error"]["type"]) == (500, "server_error")


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
