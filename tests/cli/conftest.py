"""The command line in this process: what it prints, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CONFORMANCE = Path(__file__).parent.parent / "conformance"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout, which must be one JSON object and nothing else."""
        report = json.loads(self.out)
        assert isinstance(report, dict)
        return report


@pytest.fixture
def run() -> Callable[..., Outcome]:
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from adaptercache.cli.app import app

    def run(*arguments: object) -> Outcome:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Outcome(done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def case() -> Callable[[str], Path]:
    """The directory of a conformance case."""
    return lambda name: CONFORMANCE / "cases" / name


@pytest.fixture
def table() -> Callable[[str], Path]:
    """The modules table of the base of a conformance case."""

    def path(name: str) -> Path:
        described = json.loads((CONFORMANCE / "cases" / name / "case.json").read_text())
        config: str = described["base_config"]
        return CONFORMANCE / "configs" / config.replace(".json", ".modules.json")

    return path
