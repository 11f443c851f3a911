"""The Grafana dashboard: every query of it is run by a real Prometheus over live caches."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # a busy machine gets a slower pace

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "adaptercache.json"
CONTENT = json.loads(DASHBOARD.read_text())
PANELS = [panel for panel in CONTENT["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
VALUES = {"$__rate_interval": "4s", "$job": "adaptercache", "$instance": ".+"}


def filled_in(expression: str) -> str:
    """As Grafana sends it."""
    for name, value in VALUES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@pytest.mark.parametrize(("expression", "legend"), QUERIES)
def test_a_query_returns_data_with_the_labels_of_its_legend(
    expression: str, legend: str, watched: Any
) -> None:
    found = watched.server.data(filled_in(expression))
    assert found
    for name in re.findall(r"\{\{(\w+)\}\}", legend):
        assert all(name in labels for labels, _ in found)


@pytest.mark.parametrize("variable", CONTENT["templating"]["list"][1:], ids=lambda v: v["name"])
def test_a_variable_has_values_to_choose_from(variable: Any, watched: Any) -> None:
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
    assert found
    series = watched.server.get("series", **{"match[]": filled_in(found[1])})
    assert {labels[found[2]] for labels in series} >= (
        {"adaptercache"} if found[2] == "job" else {"healthy", "small_gpu"}
    )


def test_a_choice_of_instances_narrows_every_query(watched: Any) -> None:
    """What the test above fills in matches them all, so here is one that nobody has."""
    for panel in PANELS:
        for target in panel["targets"]:
            nobody = filled_in(target["expr"].replace("$instance", "nobody"))
            for labels, value in watched.server.query(nobody):
                assert (labels, value) == ({}, 0), panel["title"]


def test_panels_are_whole_and_lie_beside_each_other() -> None:
    ids = [panel["id"] for panel in CONTENT["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    cells = [panel["gridPos"] for panel in CONTENT["panels"]]
    assert all(cell["x"] + cell["w"] <= 24 for cell in cells)
    for one, other in combinations(cells, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above


def test_every_counted_thing_is_in_the_dashboard() -> None:
    """But for the few that only alerts need."""
    from adaptercache.metrics import METRICS

    text = DASHBOARD.read_text()
    assert {each.field for each in METRICS if f"adaptercache_{each.field}" not in text} == set()
