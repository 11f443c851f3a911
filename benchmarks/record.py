"""How a benchmark writes its figures down: ``results/<card or cpu>/<bench>.json``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """The card, or the CPU, that the figures are of."""
    found: dict[str, object] = {"cores": os.cpu_count(), "cpu": _cpu_name()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if "model name" in line), "unknown")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "ray"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def options(doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark with this docstring, so that ``--help`` tells what it is and runs nothing."""
    return argparse.ArgumentParser(
        description=doc, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def write(bench: str, cases: Mapping[str, Mapping[str, object]], *, on_gpu: bool = False) -> Path:
    """Write ``cases`` with machine, versions and the command line; returns the file's path."""
    card = str(machine()["gpu"]) if on_gpu else "cpu"
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}.json"
    command = f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip()
    content = {
        "machine": machine(),
        "versions": versions(),
        "command": command,
        "cases": cases,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles of durations, in µs."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {
        name: round(s * 1e6, 2)
        for name, s in zip(("us", "p25", "p75"), (median, low, high), strict=True)
    }


def time_each(act: Callable[[], object], after: Callable[[], object], times: int) -> list[float]:
    """Durations of ``act``; ``after`` puts things back each time, unmeasured."""
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        durations.append(time.perf_counter() - start)
        after()
    return durations
