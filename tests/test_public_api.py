"""What a user sees of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def modules_after_import() -> set[str]:
    """What a fresh interpreter has loaded after ``import adaptercache``."""
    program = "import sys, adaptercache; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("name", ["boto3", "prometheus_client", "transformers", "triton"])
def test_importing_the_package_does_not_load(name: str, modules_after_import: set[str]) -> None:
    assert "adaptercache" in modules_after_import
    assert name not in modules_after_import
