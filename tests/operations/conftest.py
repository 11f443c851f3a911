"""A real Prometheus that scrapes live caches in trouble, with our rules, 100 times as fast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_server import NO_PROMETHEUS, Prometheus, find_program, running_prometheus
from troubled_caches import CASES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
HASTE = 100  # a rule's 5 minutes are 3 s here
EVERY = "500ms"
LONGEST_S = 90
SECONDS = {"s": 1, "m": 60, "h": 3600}


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = {"watched", "promtool"}.intersection(getattr(item, "fixturenames", ()))
    if needed and None in (find_program("prometheus"), find_program("promtool")):
        pytest.skip(NO_PROMETHEUS)  # from here, so that the report has one line for them all


def hastened(rules: str) -> str:
    """The rules with all their durations divided; nothing else of them is changed."""

    def shorter(found: re.Match[str]) -> str:
        start, number, unit, end = found.groups()
        return f"{start}{int(number) * SECONDS[unit] * 1000 // HASTE}ms{end}"

    return re.sub(r"(\[|for: )(\d+)([smh])(\]|$)", shorter, rules, flags=re.MULTILINE)


def config_for(port: int) -> str:
    """Our configuration, with its own targets and a shorter interval. An address serves them all,
    each under its path."""
    import yaml

    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": EVERY, "evaluation_interval": EVERY}
    del config["alerting"]
    (job,) = config["scrape_configs"]
    targets = [(name, port) for name in CASES] + [("down", 1)]
    job["static_configs"] = [
        {
            "targets": [f"127.0.0.1:{where}"],
            "labels": {"instance": name, "__metrics_path__": f"/{name}"},
        }
        for name, where in targets
    ]
    return str(yaml.safe_dump(config))


@contextmanager
def troubled_caches() -> Iterator[int]:
    """The port of a process that has them all."""
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests/troubled_caches.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Watched(NamedTuple):
    server: Prometheus
    port: int
    fired: dict[str, set[str]]
    """The alerts that have fired, by instance."""


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """When every alert has fired, or should have."""
    pytest.importorskip("yaml")
    rules = {file.name: hastened(file.read_text()) for file in DEPLOY.glob("adaptercache.*.yml")}
    expected = {name: set(case.alerts) for name, case in CASES.items()}
    expected["down"] = {"AdaptercacheDown"}
    fired: dict[str, set[str]] = {name: set() for name in expected}
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        troubled_caches() as port,
        running_prometheus(folder, config_for(port), rules) as server,
    ):
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline and any(expected[n] - fired[n] for n in expected):
            time.sleep(0.25)
            for alert, instance in server.firing():
                # On a starved machine a scrape may come too late, which says nothing of the cache.
                if alert != "AdaptercacheDown" or instance == "down":
                    fired[instance].add(alert)
        yield Watched(server, port, fired)


@pytest.fixture(scope="session")
def promtool() -> str:
    found = find_program("promtool")
    assert found is not None
    return found
