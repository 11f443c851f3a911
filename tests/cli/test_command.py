"""The command itself: its entry point, its output on a terminal, and what it says without typer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_entry_point_is_declared_and_there() -> None:
    import adaptercache.cli

    declared = re.search(
        r'^\[project\.scripts\]\nadaptercache = "(.+):(.+)"$',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert declared is not None
    assert declared[1] == "adaptercache.cli"
    assert callable(getattr(adaptercache.cli, declared[2]))


def test_it_runs_as_a_program(case: Any, table: Any) -> None:
    pytest.importorskip("typer")
    name = "d_nan"
    command = [sys.executable, "-m", "adaptercache.cli", "inspect", str(case(name))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("refused by the reader: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_how_to_get_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import adaptercache.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "adaptercache's command line needs typer and rich: pip install typer rich\n"
    )


def test_what_else_is_missing_is_not_blamed_on_the_extra() -> None:
    program = (
        "import sys, adaptercache; sys.modules['adaptercache.cli.plan'] = None;"
        "import adaptercache.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "ModuleNotFoundError" in done.stderr


def test_help_names_every_command_and_option(run: Any) -> None:
    assert all(name in run("--help").out for name in ("inspect", "plan", "convert", "verify"))
    options = {
        "inspect": (
            *("--base", "--targets", "--max-rank", "--dtype", "--allow-pickle", "--text-only"),
            *("--expert-columns", "--ignore-config-key", "--json"),
        ),
        "plan": (
            *("--config", "--rank", "--gpu-bytes", "--host-bytes", "--disk-bytes", "--targets"),
            *("--dtype", "--file-dtype", "--tp-size", "--kv-block-size", "--kv-heads"),
            *("--head-dim", "--kv-dtype", "--kv-tokens", "--h2d-GBps", "--disk-GBps"),
            *("--remote-GBps", "--json"),
        ),
        "convert": ("--base-model", "--base", "--json"),
        "verify": ("--base", "--json"),
    }
    page = (ROOT / "docs/cli.md").read_text()
    for command, names in options.items():
        done = run(command, "--help")
        assert done.code == 0
        found = set(re.findall(r"--[A-Za-z0-9-]+", done.out)) - {"--help"}
        assert found == set(names), command
        assert found <= set(re.findall(r"--[A-Za-z0-9-]+", page)), "docs/cli.md lacks one"


def test_the_plan_of_the_docs_is_what_it_prints(
    run: Any, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/cli.md").read_text()
    found = re.search(r"^\$ adaptercache (plan .+)\n((?:.*\n)+?)```$", page, re.MULTILINE)
    assert found is not None
    monkeypatch.chdir(llama.parent)
    done = run(*found[1].replace("llama-3-8b", llama.name).split())
    assert done.out.rstrip() == found[2].rstrip()


def test_rich_tables_on_a_terminal_and_plain_columns_elsewhere(
    run: Any, case: Any, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "plain_p0.20.0"
    arguments = ("inspect", case(name), "--base", table(name))
    plain = run(*arguments).out
    assert "┃" not in plain
    assert "\x1b" not in plain
    assert re.search(r"^model\.layers\.0\.self_attn\.q_proj +linear +4 +2 ", plain, re.MULTILINE)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    rich = run(*arguments).out
    assert "┃" in rich
    assert "model.layers.0.self_attn.q_proj" in rich


def test_square_brackets_are_no_markup(
    run: Any, case: Any, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "[4, 32]" in run("inspect", case("plain_p0.20.0")).out
    refused = run("inspect", case("d_shape_in"), "--base", table("d_shape_in"))
    assert "expected: A [rank, 32]" in refused.err
