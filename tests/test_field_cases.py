"""The table of the field's cases: complete, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "field_cases.md"
CASES = (*range(1, 228), 229, 230)
"""The numbers of the survey's sections A to H."""

TENSOR_PARALLEL = "tests/unit/test_tensor_parallel.py"
"""What the section of that name waits for."""


@dataclass(frozen=True)
class Row:
    section: str
    case: int
    what: str
    held_by: str

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`(tests/[^`]+)`", self.held_by)


def rows_of(text: str) -> list[Row]:
    rows, section = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if line.startswith("|") and not line.startswith(("| case", "|---")):
            case, _, what, held_by = (cell.strip() for cell in line.strip("|").split("|"))
            rows.append(Row(section, int(case), what, held_by))
    return rows


def left_out(text: str) -> list[int]:
    (numbers,) = re.findall(r"^The survey leaves out: ([\d, \n]+)\.", text, re.MULTILINE)
    return [int(number) for number in numbers.split(",")]


@cache
def named_in(path: Path) -> frozenset[str]:
    """The tests of a file: functions, and methods as ``Class::method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            members = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}::{each.name}" for each in members}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def why_wrong(row: Row, root: Path = ROOT) -> list[str]:
    """What is wrong with a row; nothing where it holds."""
    wrong = []
    if len(row.what) < 10:
        wrong.append(f"{row.case}: says nothing")
    if not row.tests and not re.match(r"can't arise here: .{20}", row.held_by):
        wrong.append(f"{row.case}: neither a test nor a reason")
    for test in row.tests:
        file, _, name = test.partition("::")
        name, _, parameter = name.removesuffix("]").partition("[")
        waits = file == TENSOR_PARALLEL and row.section == "Tensor parallelism"
        if not (root / file).is_file():
            wrong += [] if waits else [f"{row.case}: there is no {file}"]
        elif name not in named_in(root / file):
            wrong.append(f"{row.case}: {file} has no {name}")
        elif parameter and not (root / file).with_name("cases").joinpath(parameter).is_dir():
            wrong.append(f"{row.case}: there is no conformance case {parameter}")
    return wrong


def test_no_case_is_missing_and_none_is_there_twice() -> None:
    text = TABLE.read_text()
    numbers = sorted([*(row.case for row in rows_of(text)), *left_out(text)])
    assert numbers == list(CASES)


def test_every_case_has_a_test_that_exists_or_a_reason() -> None:
    rows = rows_of(TABLE.read_text())
    assert [row.section[:1] for row in rows[:1]] == ["A"]
    wrong = [line for row in rows for line in why_wrong(row)]
    assert not wrong, "\n".join(wrong)


def test_the_tests_of_the_field_cases_name_only_cases_of_the_table() -> None:
    """As in "Rows 9, 10, 33 to 38"."""
    cases = {row.case for row in rows_of(TABLE.read_text())}
    for path in sorted((ROOT / "tests" / "conformance").glob("test_field_cases_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            said = re.match(r"Rows? (\d+(?:(?:, | and | to )\d+)*)", ast.get_docstring(node) or "")
            assert said, f"{path.name}: {node.name} names no row"
            assert {int(number) for number in re.findall(r"\d+", said[1])} <= cases, node.name


@pytest.mark.parametrize(
    ("held_by", "word"),
    [
        ("", "neither"),
        ("can't arise here: no", "neither"),
        ("later", "neither"),
        ("`tests/test_nothing.py::test_x`", "no tests/test_nothing.py"),
        ("`tests/test_field_cases.py::test_x`", "has no test_x"),
        ("`tests/test_field_cases.py::rows_of`", "has no rows_of"),
        ("`tests/conformance/test_conformance.py::test_loads_exactly[none]`", "case none"),
        ("`tests/unit/test_tensor_parallel.py::...`", "no "),
    ],
)
def test_a_row_that_does_not_hold_is_seen(held_by: str, word: str) -> None:
    (said,) = why_wrong(Row("A. Something", 1, "what went wrong", held_by))
    assert word in said


def test_a_row_of_tensor_parallelism_waits_only_until_its_tests_are_there(tmp_path: Path) -> None:
    row = Row("Tensor parallelism", 1, "what went wrong", f"`{TENSOR_PARALLEL}::...`")
    assert why_wrong(row, tmp_path) == []
    (tmp_path / TENSOR_PARALLEL).parent.mkdir(parents=True)
    (tmp_path / TENSOR_PARALLEL).write_text("def test_x() -> None: ...")
    assert why_wrong(row, tmp_path) == [f"1: {TENSOR_PARALLEL} has no ..."]
