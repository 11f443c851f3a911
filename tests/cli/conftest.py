"""The command line in this process: what it prints, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
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


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory with the config.json of DESIGN's example, Llama-3-8B."""
    folder = tmp_path / "llama-3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return folder
