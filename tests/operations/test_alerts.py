"""The rules, by promtool and by a real Prometheus over live caches in trouble."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from troubled_caches import CASES

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.timeout(300)  # a busy machine gets a slower pace

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
ALERTS = DEPLOY / "adaptercache.alerts.yml"
RULES = DEPLOY / "adaptercache.rules.yml"


def alert_names() -> set[str]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"] for rule in group["rules"]}


def run(promtool: str, *arguments: str, text: str = "") -> str:
    """Its output, where it found nothing wrong."""
    ended = subprocess.run(
        [promtool, *arguments],
        cwd=DEPLOY,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_promtool_takes_the_rules_and_the_configuration(promtool: str) -> None:
    said = run(promtool, "check", "rules", RULES.name, ALERTS.name)
    assert re.findall(r"SUCCESS: (\d+) rules found", said)[1] == str(len(alert_names()))
    said = run(promtool, "check", "config", "prometheus.yml")
    assert "SUCCESS: 2 rule files found" in said


def test_the_rules_do_what_promtools_tests_say(promtool: str) -> None:
    assert "SUCCESS" in run(promtool, "test", "rules", "adaptercache.tests.yml")


@pytest.mark.parametrize("case", [*CASES, "down"])
def test_a_cache_in_trouble_fires_its_alerts_and_no_others(case: str, watched: Any) -> None:
    expected = CASES[case].alerts if case in CASES else {"AdaptercacheDown"}
    assert watched.fired[case] == expected


def test_every_alert_has_been_fired(watched: Any) -> None:
    assert set().union(*watched.fired.values()) == alert_names()


def test_every_recording_rule_has_data(watched: Any) -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]:
        assert watched.server.data(rule["record"]), rule["record"]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthy") as answer:
        return str(answer.read().decode())


def test_series_that_only_gateways_read_are_not_stored(watched: Any) -> None:
    given = set(re.findall(r"^vllm:(\w+)", scrape(watched.port), re.MULTILINE))
    stored = {labels["__name__"] for labels, _ in watched.server.data('{__name__=~"vllm:.+"}')}
    assert given - {name.removeprefix("vllm:") for name in stored} == {
        "lora_requests_info",
        "lora_adapter_loaded",
    }


def test_promtool_finds_nothing_to_say_of_a_scrape(promtool: str, watched: Any) -> None:
    lines = scrape(watched.port).splitlines(keepends=True)
    ours = "".join(line for line in lines if "vllm:" not in line)  # whose names are not ours
    assert run(promtool, "check", "metrics", text=ours) == ""


def test_the_documentation_shows_the_configuration() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    block = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    shown, real = yaml.safe_load(block), yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert shown["rule_files"] == real["rule_files"]
    (job,) = real["scrape_configs"]
    del job["metrics_path"]  # the default
    assert shown["scrape_configs"] == [job]


def test_the_documentation_has_every_alert() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    headings = re.findall(r"^### (Adaptercache\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(alert_names())
