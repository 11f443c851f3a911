"""The main job, small: its exit code, what it prints and writes, and that its check can fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptercache.base_model import BaseModel
from adaptercache.testing import random_adapter

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONFORMANCE = ROOT / "tests" / "conformance"
TINY_LLAMA = CONFORMANCE / "configs" / "tiny-llama.tf5.24.json"
SAVED_BY_PEFT = [
    *("plain_p0.20.0", "rank1_p0.20.0", "rank3_p0.20.0", "rslora_p0.20.0", "patterns_p0.20.0"),
    *("rslora_patterns_p0.20.0", "patterns_caret_p0.20.0", "all_linear_p0.20.0"),
    *("float_alpha_p0.20.0", "bf16_p0.20.0", "mixed_dtype_p0.20.0", "layers_to_transform_p0.20.0"),
]
SMALL = ["--device", "cpu", "--count", "10", "--requests", "50", "--gpu-mib", "30"]
SMALL += ["--host-mib", "14", "--drift-every", "15"]


def command(*options: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "adapter_churn.py"), *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}


def churn(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command(*options, "--json", "run.json"),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    numbers = folder / "run.json"
    return done, json.loads(numbers.read_text()) if numbers.exists() else {}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module of that name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import churn_check

    return churn_check


def test_a_small_run_evicts_checks_and_reports(tmp_path: Path) -> None:
    done, numbers = churn(tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("device: cpu")
    for label in ("adapter found in", "evictions from gpu", "deferrals", "time to ready, all"):
        assert re.search(rf"^{label} +\S", done.stdout, re.MULTILINE)
    assert numbers["requests"] == {"served": 50, "failed": 0}
    assert numbers["complaints"] == []
    assert sum(numbers["evictions"]["gpu"].values()) > 0
    assert sum(numbers["evictions"]["host"].values()) > 0
    assert sum(numbers["hit_rate"].values()) == pytest.approx(1)
    assert numbers["loads"]["host -> gpu"]["bytes"] > 0
    assert numbers["check"]["rows"] > 100
    assert 0 < numbers["check"]["rms"] <= 5e-3
    assert numbers["kv"]["damaged"] == 0
    report = (tmp_path / "report.html").read_text()
    assert report.count("<svg") == 6
    assert not re.findall(r"https?://|src=|href=|<script|<link|@import|url\(|nan", report)


def test_equal_seeds_give_equal_requests_and_decisions(tmp_path: Path) -> None:
    runs = [churn(tmp_path / str(n), *SMALL, "--requests", "30")[1] for n in range(2)]
    for name in ("workload", "decisions", "evictions", "loads", "found_in", "deferrals", "check"):
        assert runs[0][name] == runs[1][name], name


def test_requests_follow_the_seed_and_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from churn_workload import Workload, changes, draw, fingerprint

    ids = [f"a{n}" for n in range(200)]
    hashes = {fingerprint(draw(Workload(seed=seed), ids)) for seed in (1, 1, 2)}
    assert len(hashes) == 2
    drawn = draw(Workload("slora", requests=20_000, alpha=0.3, rate=50, cv=3, base_share=0), ids)
    # PEERS c.1: with alpha 0.3 and 200 adapters the first has a share of 20.4 %.
    share = sum(arrival.adapter_id == "a0" for arrival in drawn) / len(drawn)
    assert share == pytest.approx(0.204, abs=0.015)
    gaps = torch.tensor([arrival.at_s for arrival in drawn], dtype=torch.float64).diff()
    assert float(gaps.mean()) == pytest.approx(1 / 50, rel=0.1)
    assert float(gaps.std() / gaps.mean()) == pytest.approx(3, rel=0.1)
    drifting = Workload("zipf", requests=1000, drift_every=500, zipf=1.5, base_share=0)
    drawn = draw(drifting, ids)
    first, second = (
        max(ids, key=[arrival.adapter_id for arrival in half].count)
        for half in (drawn[:500], drawn[500:])
    )
    assert first != second
    assert changes(drifting, drawn) == [(drawn[500].at_s, "popularity is dealt out anew")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adapters_saved_by_peft_are_served_and_others_refused(tmp_path: Path, dtype: str) -> None:
    adapters = tmp_path / "adapters"
    for name in (*SAVED_BY_PEFT, "dora_p0.20.0", "d_truncated"):
        shutil.copytree(CONFORMANCE / "cases" / name, adapters / name)
    (adapters / "not-an-adapter").mkdir()
    (adapters / "README.md").write_text("skipped")
    own = ("--adapters", str(adapters), "--config", str(TINY_LLAMA))
    done, numbers = churn(
        *(tmp_path, "--device", "cpu", *own, "--requests", "100", "--workload", "slora"),
        *("--alpha", "1", "--dtype", dtype),
    )
    assert done.returncode == 0, done.stderr
    refused = numbers["failed_adapters"]
    assert refused.keys() == {"dora_p0.20.0", "d_truncated"}
    assert refused["dora_p0.20.0"].startswith("AdapterUnsupported: ")
    assert refused["d_truncated"].startswith("AdapterInvalid: ")
    assert "refused d_truncated" in done.stdout
    served, failed = numbers["requests"]["served"], numbers["requests"]["failed"]
    assert served + failed == 100
    assert served > failed > 0
    assert numbers["check"]["unchecked"] == []
    assert numbers["check"]["rows"] > 200


def test_metrics_are_served_and_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    pytest.importorskip("adaptercache.metrics")
    with subprocess.Popen(
        command(*SMALL, "--requests", "100000", "--metrics-port", "0", "--real-time"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = next(
            int(found[1])
            for line in process.stdout
            if (found := re.match(r"metrics: http on port (\d+)", line))
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert b"adaptercache_requests_total" in answer.read()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert re.search(r"^requests +\d+ served", stdout, re.MULTILINE)
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--adapters", "."], "go together"),
        (["--adapters", ".", "--config", str(TINY_LLAMA)], "no folder under"),
        (["--adapters", ".", "--config", "absent.json"], "absent.json"),
    ],
)
def test_options_that_make_no_sense_are_said_in_one_line(
    tmp_path: Path, options: list[str], complaint: str
) -> None:
    done, _ = churn(tmp_path, *options)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


# The check itself: it agrees with PEFT, and finds what is wrong.


@pytest.mark.parametrize("name", SAVED_BY_PEFT)
def test_the_check_computes_what_peft_computes(check: Any, name: str) -> None:
    folder = CONFORMANCE / "cases" / name
    golden = load_file(folder / "golden.safetensors")
    own = check.OwnFile(folder, BaseModel.from_config(TINY_LLAMA).modules)
    assert own.is_plain
    assert len(golden) > 0
    for path, delta in golden.items():
        a, b = own.pair(path)
        torch.testing.assert_close(own.scaling(path) * b @ a, delta.double(), rtol=1e-5, atol=1e-5)


PATH = "model.layers.1.self_attn.q_proj"
OTHER = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def rows(tmp_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """An adapter in ``tmp_path / "a"``, an input, and the term of `PATH` for it."""
    base = BaseModel.from_config(TINY_LLAMA)
    tensors, config = random_adapter(base, rank=4, targets=["q_proj"], seed=3)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    a = tensors[f"base_model.model.{PATH}.lora_A.weight"].double()
    b = tensors[f"base_model.model.{PATH}.lora_B.weight"].double()
    x = torch.randn(32, generator=torch.Generator().manual_seed(5)).bfloat16()
    return x, (2 * b @ (a @ x.double())).bfloat16()


def test_a_right_row_passes_the_check(check: Any, tmp_path: Path, rows: Any) -> None:
    x, right = rows
    checker = check.Checker(tmp_path, BaseModel.from_config(TINY_LLAMA).modules, "bfloat16")
    checker.check("a", x, {PATH: right, OTHER: torch.zeros(16)})
    checker.check(None, x, {PATH: torch.zeros(32)})
    assert checker.is_within_limits
    assert checker.rows == 2
    assert 0 < checker.rms < 5e-3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda row: torch.zeros_like(row),
        lambda row: row.roll(1),
        lambda row: torch.full_like(row, float("nan")),
        lambda row: torch.where(torch.arange(len(row)) == 7, row + 1, row),
    ],
    ids=["missing", "rolled", "nan", "one element"],
)
def test_one_wrong_row_among_many_right_ones_fails_the_check(
    check: Any, tmp_path: Path, rows: Any, wrong: Any
) -> None:
    x, right = rows
    checker = check.Checker(tmp_path, BaseModel.from_config(TINY_LLAMA).modules, "bfloat16")
    for _ in range(200):
        checker.check("a", x, {PATH: right})
    assert checker.is_within_limits
    checker.check("a", x, {PATH: wrong(right)})
    assert not checker.is_within_limits


def test_a_wrong_scaling_fails_the_check(check: Any, tmp_path: Path, rows: Any) -> None:
    x, right = rows
    checker = check.Checker(tmp_path, BaseModel.from_config(TINY_LLAMA).modules, "bfloat16")
    checker.check("a", x, {PATH: right * 1.02})
    assert not checker.is_within_limits


@pytest.mark.parametrize("adapter_id", ["a", None])
def test_a_term_where_there_is_no_adapter_fails_the_check(
    check: Any, tmp_path: Path, rows: Any, adapter_id: str | None
) -> None:
    x, _ = rows
    checker = check.Checker(tmp_path, BaseModel.from_config(TINY_LLAMA).modules, "bfloat16")
    checker.check(adapter_id, x, {OTHER: torch.full((16,), 1e-6)})
    assert not checker.is_within_limits
