"""``docs/formats.md`` has every refused feature and every remedy, in the code's own words."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import adaptercache
from adaptercache.checkpoint import features, files

ROOT = Path(__file__).parent.parent
RAISE = [*sorted((ROOT / "adaptercache" / "checkpoint").glob("*.py"))]
RAISE.append(ROOT / "adaptercache" / "packing.py")
NOT_THE_OWNERS = {"it is made again"}
"""Remedies that no owner of an adapter is told."""


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join((ROOT / "docs" / "formats.md").read_text().replace("`", "").split())


def words_of(node: ast.expr) -> Iterator[str]:
    """The fixed parts of a string: of an f-string what stands between the braces."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = " ".join(part.value.split())
            if len(text) > 3 and not text.startswith("."):  # not a format, as in {x:.80}
                yield text


def said() -> Iterator[tuple[str, str]]:
    """All features and remedies that a `raise` spells out, with the place."""
    for path in RAISE:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            spoken = [word.value for word in node.keywords if word.arg == "remedy"]
            if node.func.id == "AdapterUnsupported":
                spoken += node.args[:1]
            if node.func.id in ("AdapterUnsupported", "AdapterInvalid"):
                for words in (words for each in spoken for words in words_of(each)):
                    yield f"{path.name}:{node.lineno}", words


def test_every_feature_of_the_tables_is_in_the_page_with_its_remedy(page: str) -> None:
    config = features._CONFIG_FEATURES.values()
    tensors = [(feature, remedy) for _, feature, remedy in features._TENSOR_FEATURES]
    missing = [row for row in (*config, *tensors) if not all(text in page for text in row)]
    layouts = files._OTHER_LAYOUTS.values()
    missing += [row for row in layouts if not all(text in page for text in row)]
    missing += [file for file in files._OTHER_LAYOUTS if file not in page]
    assert not missing


def test_every_feature_and_remedy_that_is_raised_is_in_the_page(page: str) -> None:
    spoken = list(said())
    assert len(spoken) > 30
    missing = [place for place in spoken if place[1] not in page and place[1] not in NOT_THE_OWNERS]
    assert not missing


def test_each_refused_feature_has_a_remedy_in_its_row() -> None:
    text = (ROOT / "docs" / "formats.md").read_text()
    table = text[text.index("| feature | shows in") : text.index("`AdapterInvalid` is for files")]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) > 35
    for row in rows:
        feature, where, remedy = re.split(r"\s+\|\s+", row.strip("| "))
        assert feature
        assert where
        assert len(remedy) > 10, feature


def test_no_refusal_of_an_adapter_is_without_a_remedy() -> None:
    for path in RAISE:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="AdapterUnsupported"), keywords=keywords):
                    assert "remedy" in {word.arg for word in keywords}, f"{path}:{node.lineno}"


def strings_of_the_package() -> Iterator[tuple[str, str]]:
    """Every string that is no docstring, with its file."""
    for path in sorted((ROOT / "adaptercache").rglob("*.py")):
        tree = ast.parse(path.read_text())
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if id(node) not in statements:
                    yield path.name, text


def test_every_class_that_a_message_names_is_a_public_name() -> None:
    ours = {
        node.name
        for path in (ROOT / "adaptercache").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    called = re.compile(r"\b([A-Z]\w+)(?:\.(\w+)|\((\w+)=)")
    named = {
        found.groups()
        for _, text in strings_of_the_package()
        for found in called.finditer(text)
        if found[1] in ours
    }
    assert ("ReadOptions", None, "allow_pickle") in named
    assert ("BaseModel", "from_model", None) in named
    for name, attribute, argument in named:
        assert name in adaptercache.__all__
        public = getattr(adaptercache, name)
        assert attribute is None or hasattr(public, attribute), f"{name}.{attribute}"
        assert argument is None or argument in inspect.signature(public).parameters


def test_every_module_that_a_message_names_can_be_imported() -> None:
    dotted = re.compile(r"\b(adaptercache(?:\.[a-z_]+)+)\.(\w+)")
    named = [found for _, text in strings_of_the_package() if (found := dotted.search(text))]
    assert named
    for found in named:
        assert hasattr(importlib.import_module(found[1]), found[2])
