"""The application of docs/ray.md, by the command that is written there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_docs import library, save_base  # noqa: F401

pytestmark = pytest.mark.timeout(240)
PAGE = Path(__file__).parents[2] / "docs/ray.md"


def free_ports(count: int) -> list[int]:
    """That nobody listens on now."""
    with ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in found:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in found]


def loads_at(port: int) -> float:
    """The loads into GPU memory that a replica has counted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "adaptercache_loads_total" and sample.labels["to"] == "gpu"
        )


def test_each_adapter_is_answered_by_one_replica(library: Path) -> None:  # noqa: F811
    save_base(library / "base")
    block, _, metrics = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    scraped = free_ports(3)
    assert "range(9400, 9416)" in metrics
    metrics = metrics.strip().replace("range(9400, 9416)", f"{scraped}, host='127.0.0.1'")
    for on_a_gpu, here in {
        "4 << 30": "4 << 20",
        "16 << 30": "16 << 20",
        '{"num_gpus": 1}': '{"num_cpus": 0.1}',
        '"base", "adapters"': f"{str(library / 'base')!r}, {str(library / 'adapters')!r}, 'cpu'",
        "attach(self.model, self.cache)": f"attach(self.model, self.cache)\n        {metrics}",
    }.items():
        assert on_a_gpu in block
        block = block.replace(on_a_gpu, here)
    (library / "app.py").write_text(block)
    (port,) = free_ports(1)
    (library / "run.yaml").write_text(
        f"http_options: {{port: {port}}}\n"
        "applications: [{name: app, route_prefix: /, import_path: 'app:app'}]\n"
    )
    command = "from ray.serve.scripts import cli; cli()"
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(PAGE.parents[1])}
    with (library / "log").open("w") as log:
        program = subprocess.Popen(
            [sys.executable, "-c", command, "run", "run.yaml"], env=env, stdout=log, stderr=log
        )

    def ask(adapter_id: str | None) -> dict[str, str]:
        headers = {"serve_multiplexed_model_id": adapter_id} if adapter_id else {}
        data = json.dumps("list the users").encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{port}", data, headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found: dict[str, str] = json.load(answer)
        return found

    def refused(adapter_id: str) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(adapter_id)
        return raised.value.code, json.load(raised.value)["error"]

    def is_up() -> bool:
        assert program.poll() is None
        try:
            return len({ask(None)["replica"] for _ in range(8)}) == 2
        except (OSError, ValueError):
            return False

    try:
        end = time.monotonic() + 120
        while not is_up():
            assert time.monotonic() < end
            time.sleep(0.25)
        placed = {f"acme/sql-v{n}": ask(f"acme/sql-v{n}")["replica"] for n in range(6)}
        for adapter_id in [*placed] * 3:
            assert ask(adapter_id)["replica"] == placed[adapter_id]
        assert ask(None)["text"]
        at_one = sum(place == placed["acme/sql-v0"] for place in placed.values())
        loads = sorted(loads_at(port) for port in scraped[:2])
        assert loads == sorted([at_one, len(placed) - at_one])
        with pytest.raises(urllib.error.URLError):  # a spare one
            loads_at(scraped[2])
        status, error = refused("acme/nobody")
        assert (status, "acme/nobody" in error) == (404, True)
        (library / "adapters/acme/broken").mkdir()
        (library / "adapters/acme/broken/adapter_config.json").write_text("{")
        status, error = refused("acme/broken")
        assert (status, "acme/broken" in error) == (422, True)
    except BaseException:
        print((library / "log").read_text()[-4000:])
        raise
    finally:
        program.terminate()
        program.wait(60)
