"""`examples/ray_fleet.py` as a user starts it, on the real Ray Serve: two replicas, a tiny model.

The tests are one story in order, for a start takes a third of the time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None or find_spec("starlette") is None:
    pytest.skip(
        "Ray Serve isn't installed (the extra `ray`): make test-ray", allow_module_level=True
    )
pytest.importorskip("peft")

from serving import World

from adaptercache.routing import AffinityRouter

ROOT = Path(__file__).parents[2]
KEYS = [f"key-{number}" for number in range(20_000)]
PROMPT, TOKENS = list(range(60, 75)), 6

pytestmark = pytest.mark.timeout(300)


class Fleet:
    """The program, and a client."""

    def __init__(self, adapters: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "examples/ray_fleet.py", "--port", str(self.port)]
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with log.open("w") as out:
            self.program = subprocess.Popen(
                [*command, "--adapters", str(adapters)], cwd=ROOT, env=env, stdout=out, stderr=out
            )

    def request(self, path: str, body: object = None) -> tuple[int, str | None, Any]:
        """Status, replica and body of the answer."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.headers["x-replica"], json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None, json.load(error)

    def ask(self, adapter_id: str | None) -> tuple[int, str | None, Any]:
        body = {"model": adapter_id or "base", "prompt": PROMPT, "max_tokens": TOKENS}
        return self.request("/v1/completions", body | {"return_token_ids": True})

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.request("/fleet")[2]}

    def wait(self, number: int, without: str = "") -> dict[str, dict[str, Any]]:
        """Until so many replicas answer."""
        end = time.monotonic() + 90
        while time.monotonic() < end:
            assert self.program.poll() is None
            try:
                found = self.replicas()
            except (OSError, ValueError, TypeError):  # it is starting
                found = {}
            if len(found) == number and without not in found:
                return found
            time.sleep(0.25)
        raise TimeoutError(f"not {number} replicas")

    def close(self) -> None:
        self.program.terminate()
        try:
            self.program.wait(60)
        finally:
            self.program.kill()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("adapters"), 24)
    world.break_weights(world.ids.pop())
    return world


@pytest.fixture(scope="module")
def fleet(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    log = tmp_path_factory.mktemp("fleet") / "log"
    fleet = Fleet(world.root, log)
    try:
        fleet.wait(2)
        yield fleet
    except BaseException:
        print(log.read_text()[-4000:])
        raise
    finally:
        fleet.close()


placed: dict[str, str] = {}
"""Where each adapter was served last."""


def serve_all(fleet: Fleet, world: World, clients: int = 1) -> dict[str, str]:
    """One request for each adapter, all with PEFT's tokens; who served it."""

    def one(adapter_id: str) -> str:
        status, replica, answer = fleet.ask(adapter_id)
        assert (status, replica is not None) == (200, True), answer
        tokens = answer["choices"][0]["token_ids"]
        assert tokens == world.expected(adapter_id, PROMPT, TOKENS), adapter_id
        return str(replica)

    with ThreadPoolExecutor(clients) as pool:
        return dict(zip(world.ids, pool.map(one, world.ids), strict=True))


def moved(before: set[str], after: set[str]) -> float:
    """Keys whose home changes, over K / n of the larger fleet."""
    one, other = AffinityRouter(sorted(before)), AffinityRouter(sorted(after))
    number = sum(one.homes(key) != other.homes(key) for key in KEYS)
    return number / (len(KEYS) / max(len(before), len(after)))


def loads(fleet: Fleet, tier: str) -> int:
    return sum(one["loads"].get(tier, 0) for one in fleet.replicas().values())


def test_adapters_are_served_at_their_homes_alone(fleet: Fleet, world: World) -> None:
    router = AffinityRouter(fleet.replicas())
    placed.update(serve_all(fleet, world))
    assert placed == {adapter_id: router.homes(adapter_id)[0] for adapter_id in world.ids}
    assert len(set(placed.values())) == 2
    # Many at once, too, while the queue at home is shorter than a load is long.
    for _ in range(3):
        assert serve_all(fleet, world, clients=4) == placed
    assert loads(fleet, "host") == len(world.ids)


def test_the_base_model_needs_no_adapter(fleet: Fleet, world: World) -> None:
    before = loads(fleet, "host")
    for _ in range(4):
        status, _, answer = fleet.ask(None)
        assert status == 200
        assert answer["choices"][0]["token_ids"] == world.expected(None, PROMPT, TOKENS)
    assert loads(fleet, "host") == before


def test_a_hint_goes_to_where_the_adapter_will_be_asked_for(fleet: Fleet, world: World) -> None:
    world.publish("soon", 3)
    assert fleet.request("/v1/prefetch", {"model": "soon"})[0] == 200
    home = AffinityRouter(fleet.replicas()).homes("soon")[0]
    end = time.monotonic() + 10
    while "soon" not in fleet.replicas()[home]["adapters"]["gpu"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    loaded = loads(fleet, "gpu")
    assert fleet.ask("soon")[:2] == (200, home)
    assert loads(fleet, "gpu") == loaded
    assert fleet.request("/v1/prefetch", {"model": "base"})[0] == 400


def test_an_unknown_and_a_broken_adapter_fail_with_their_own_errors(fleet: Fleet) -> None:
    status, _, answer = fleet.ask("nobody")
    assert (status, answer["error"]["type"]) == (404, "model_not_found")
    assert "nobody" in answer["error"]["message"]
    status, _, answer = fleet.ask("adapter-23")
    assert (status, answer["error"]["type"]) == (422, "AdapterInvalid")
    status, _, answer = fleet.request("/v1/completions", {"model": "base", "prompt": 7})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_replica_is_killed_and_requests_go_on(fleet: Fleet, world: World) -> None:
    before = fleet.replicas()
    victim = placed[world.ids[0]]
    (survivor,) = before.keys() - {victim}
    with ThreadPoolExecutor(1) as pool:
        running = [pool.submit(serve_all, fleet, world, clients=6) for _ in range(4)]
        time.sleep(0.3)
        os.kill(before[victim]["pid"], signal.SIGKILL)
        rounds = [one.result() for one in running]  # right tokens, every one
    after = fleet.wait(2, without=victim)
    assert moved(before.keys(), {survivor}) <= 1.2
    assert moved({survivor}, after.keys()) <= 1.2
    # Who is at home with the survivor, before and after, has never left it.
    router = AffinityRouter(after)
    stay = [a for a in world.ids if {placed[a], router.homes(a)[0]} == {survivor}]
    for served in rounds:
        assert all(served[adapter_id] == survivor for adapter_id in stay)
    placed.update(serve_all(fleet, world))
    assert set(placed.values()) <= set(after)


def test_one_is_added_and_takes_only_its_share(fleet: Fleet, world: World) -> None:
    before = fleet.replicas()
    assert fleet.request("/fleet", {"replicas": 3})[0] == 200
    after = fleet.wait(3)
    assert before.keys() < after.keys()
    assert moved(before.keys(), after.keys()) <= 1.2
    router = AffinityRouter(after)
    for adapter_id, name in serve_all(fleet, world).items():  # where it was, or home, or next to it
        assert name in {placed[adapter_id], *router.rank(adapter_id, 0.0)[:2]}
    for name in after:  # what nobody has yet is loaded at home: of each, two adapters
        late = (f"late-{number}" for number in range(1000))
        for adapter_id in islice((a for a in late if router.homes(a)[0] == name), 2):
            world.publish(adapter_id, 5)
            assert fleet.ask(adapter_id)[:2] == (200, name)
