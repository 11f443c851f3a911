"""A real Prometheus that scrapes live caches in trouble, with our rules, many times as fast."""

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
PACES = ((100, 500, 40.0), (25, 2000, 120.0))
"""How much faster than the rules say, milliseconds between scrapes, and how long at most. With the
first a rule's 5 minutes are 3 s; a machine so busy that it doesn't follow gets the second."""
RULE_FILES = ("adaptercache.rules.yml", "adaptercache.alerts.yml")
SECONDS = {"s": 1, "m": 60, "h": 3600}


EXPECTED = {name: set(case.alerts) for name, case in CASES.items()}
EXPECTED["down"] = {"AdaptercacheDown"}


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = {"watched", "promtool"}.intersection(getattr(item, "fixturenames", ()))
    if needed and None in (find_program("prometheus"), find_program("promtool")):
        pytest.skip(NO_PROMETHEUS)  # from here, so that the report has one line for them all


def hastened(rules: str, haste: int) -> str:
    """The rules with all their durations divided; nothing else of them is changed."""

    def shorter(found: re.Match[str]) -> str:
        start, number, unit, end = found.groups()
        return f"{start}{int(number) * SECONDS[unit] * 1000 // haste}ms{end}"

    return re.sub(r"(\[|for: )(\d+)([smh])(\]|$)", shorter, rules, flags=re.MULTILINE)


def config_for(port: int, every_ms: int) -> str:
    """Our configuration, with its own targets and a shorter interval. An address serves them all,
    each under its path."""
    import yaml

    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    every = f"{every_ms}ms"
    config["global"] = {"scrape_interval": every, "evaluation_interval": every}
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
    with troubled_caches() as port:
        for haste, every_ms, longest_s in PACES:
            folder = tmp_path_factory.mktemp("prometheus")
            rules = {name: hastened((DEPLOY / name).read_text(), haste) for name in RULE_FILES}
            with running_prometheus(folder, config_for(port, every_ms), rules) as server:
                fired = watch(server, longest_s)
                if fired == EXPECTED or haste == PACES[-1][0]:
                    yield Watched(server, port, fired)
                    return


def watch(server: Prometheus, longest_s: float) -> dict[str, set[str]]:
    """The alerts that fire until all that should have, by instance."""
    fired: dict[str, set[str]] = {name: set() for name in EXPECTED}
    deadline = time.monotonic() + longest_s
    while time.monotonic() < deadline and any(EXPECTED[name] - fired[name] for name in EXPECTED):
        time.sleep(0.25)
        for alert, instance in server.firing():
            # On a busy machine a scrape may come too late, which says nothing of the cache.
            if alert != "AdaptercacheDown" or instance == "down":
                fired[instance].add(alert)
    return fired


@pytest.fixture(scope="session")
def promtool() -> str:
    found = find_program("promtool")
    assert found is not None
    return found
