"""The layers, the sizes and the words of the package, held by a table."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import pytest

PACKAGE = Path(__file__).parent.parent / "adaptercache"

# The layers, lowest first. A module imports only from what stands before it, within its row too.
# A name stands for one file; the FOLDERS' stand for whatever is in them.
DECIDE = (
    *("policy", "pages", "blocks", "residency", "placement", "catalog"),
    *("rates", "advice", "caps", "step_room", "standing", "request", "decision"),
    *("batch", "peers"),
    *("turns", "waiting", "arena"),
    *("ledger", "fairness", "lifts", "routing", "prefix"),
)
PARTS_OF_GPU = (
    *("tiers.streams", "tiers.rows", "tiers.staging", "tiers.strided"),
    *("tiers.ways", "tiers.transfer"),
)
PARTS_OF_HOST = ("tiers.pinned",)
TIERS = (
    *("tiers.memory", *PARTS_OF_GPU, "tiers.gpu", *PARTS_OF_HOST, "tiers.host", "tiers.disk"),
    *("tiers.remote", "tiers"),
)
LAYERS = (
    (
        "errors",
        "identity",
        "regular_file",
        "base_module",
        "families",
        "base_model",
        "sites",
        "tensor_parallel",
        "layout",
        "stats",
    ),
    DECIDE,
    ("checkpoint", "packing", "convert", "merge", "kernels", "disk", "s3"),
    TIERS,
    (
        *("movers", "journal", "disk_room", "source_files", "download", "fetch"),
        *("held_folder", "open_counts", "adapter_files", "hops"),
        *("prefetch", "snapshot"),
    ),
    ("deciding", "lease", "given", "janitor", "leasing", "kv", "assembly", "sleep", "steps"),
    ("cache", "ranks"),
    ("gateways", "metrics", "testing", "cli", "integrations"),
    ("adaptercache",),  # the package's own __init__: the public names
)
ORDER = {name: place for place, name in enumerate(chain.from_iterable(LAYERS))}
FOLDERS = {
    *("checkpoint", "convert", "merge", "kernels", "disk", "s3", "testing", "cli", "integrations"),
}

# No torch, no I/O, no clock, no randomness, no lock, no log: all that deciding may import.
PURE = {
    *("__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses", "enum"),
    *("functools", "hashlib", "heapq", "itertools", "math", "operator", "struct", "sys"),
    *("types", "typing", "typing_extensions"),
}
BANNED_WORDS = {
    *("manager", "helper", "util", "common", "misc", "uid"),
    *("activate", "deactivate", "register", "swap"),
}
FILE_LINES, FUNCTION_LINES = 300, 60
KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES = 340, 110

Rule: TypeAlias = "Callable[[list[Module]], Iterable[str]]"


@dataclass(frozen=True)
class Module:
    name: str
    """Dotted, without the package: ``tiers.gpu``; ``adaptercache`` for the package itself."""
    text: str = field(repr=False)
    is_package: bool = False

    @classmethod
    def read(cls, path: Path) -> Module:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        return cls(name or "adaptercache", path.read_text(), is_package)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def is_kernel(self) -> bool:
        return entry(self.name) == "kernels"

    def imports(self) -> Iterator[str]:
        """All that it imports anywhere, in full: ``torch.nn``, ``adaptercache.pages.Owner``."""
        here = ["adaptercache", *(self.name.split(".") if self.name != "adaptercache" else [])]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = here[: len(here) + self.is_package - node.level] if node.level else []
                base += [node.module] if node.module else []
                yield from (".".join([*base, alias.name]) for alias in node.names)

    def ours(self, modules: list[Module]) -> set[str]:
        """The modules of ours that it imports, whether in ``modules`` or only in the table."""
        names = {module.name for module in modules} | set(ORDER)
        found = set()
        for full in self.imports():
            package, _, name = full.partition(".")
            while name and name not in names:  # down to the module that the name is in
                name = name.rpartition(".")[0]
            if package == "adaptercache":
                found.add(name or "adaptercache")
        return found


def entry(name: str) -> str:
    """The name in the table that stands for a module."""
    top = name.partition(".")[0]
    return top if top in FOLDERS else name


def words(identifier: str) -> set[str]:
    """The words of an identifier, lower case and singular: ``PageTables`` gives page, table."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    return {part.lower() for part in parts} | {part.lower().removesuffix("s") for part in parts}


def identifiers(module: Module) -> Iterator[str]:
    """The names that the module defines, its own included."""
    yield module.name
    for node in module.nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name) | ast.alias(asname=str(name)):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


# The rules. Each gives one line for whatever breaks it.


def in_the_table(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if entry(module.name) not in ORDER:
            yield f"{module.name} is in no layer of the table"


def downward(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        here = entry(module.name)
        for other in sorted(module.ours(modules)):
            there = entry(other)
            if here == there and here in FOLDERS:
                continue
            if ORDER.get(there, len(ORDER)) >= ORDER.get(here, len(ORDER)):
                yield f"{module.name} imports {other}, which is not below it"


def acyclic(modules: list[Module]) -> Iterator[str]:
    try:
        TopologicalSorter({module.name: module.ours(modules) for module in modules}).prepare()
    except CycleError as error:
        yield " imports ".join(reversed(error.args[1]))


def tiers_apart(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if module.name in TIERS and module.name != "tiers":
            is_gpu = module.name in (*PARTS_OF_GPU, "tiers.gpu")
            allowed = {"tiers.memory", *(PARTS_OF_GPU if is_gpu else ())}
            if module.name == "tiers.host":
                allowed |= set(PARTS_OF_HOST)
            for other in sorted((module.ours(modules) & set(TIERS)) - allowed):
                yield f"{module.name} imports {other}: no tier imports another"


def pure(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if module.name not in DECIDE:
            continue
        for full in module.imports():
            if full.partition(".")[0] not in PURE | {"adaptercache"}:
                yield f"{module.name} imports {full}: deciding is apart from moving"
        for node in module.nodes:
            match node:
                case ast.Call(func=ast.Name(id="open" | "input" as name)):
                    yield f"{module.name}:{node.lineno} calls {name}()"


def short(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        most = KERNEL_FILE_LINES if module.is_kernel else FILE_LINES
        lines = len(module.text.splitlines())
        if lines > most:
            yield f"{module.name} has {lines} lines, over {most}: split the idea, not the text"
        most = KERNEL_FUNCTION_LINES if module.is_kernel else FUNCTION_LINES
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > most:
                    yield f"{module.name}:{node.lineno} {node.name} has {lines} lines, over {most}"


def our_words(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for identifier in sorted(set(identifiers(module))):
            for word in sorted(words(identifier) & BANNED_WORDS):
                yield f"{module.name}: {identifier} says {word!r}"


def finished(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for number, line in enumerate(module.text.splitlines(), start=1):
            if re.search(r"\b(TODO|FIXME)\b", line):
                yield f"{module.name}:{number} {line.strip()}"
        for node in module.nodes:
            match node:
                case ast.ExceptHandler(type=None):
                    yield f"{module.name}:{node.lineno} bare except"
                case ast.Call(func=ast.Name(id="print")) if module.name != "cli":
                    yield f"{module.name}:{node.lineno} print()"


RULES: list[Rule] = [
    *(in_the_table, downward, acyclic, tiers_apart),
    *(pure, short, our_words, finished),
]


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return [Module.read(path) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: Rule, package: list[Module]) -> None:
    assert package, "no package to look at"
    broken = list(rule(package))
    assert not broken, "\n".join(broken)


def planted(**texts: str) -> list[Module]:
    """Modules from their texts; ``__`` in a name stands for the dot."""
    names = [name.replace("__", ".") for name in texts]
    packages = {name.rpartition(".")[0] for name in names}
    return [
        Module(name, text, name in packages)
        for name, text in zip(names, texts.values(), strict=True)
    ]


@pytest.mark.parametrize(
    ("rule", "modules"),
    [
        (in_the_table, planted(extras="")),
        (in_the_table, planted(tiers__tape="")),
        (downward, planted(pages="from adaptercache.cache import AdapterCache", cache="")),
        (downward, planted(pages="from .cache import AdapterCache", cache="")),
        (downward, planted(pages="def f():\n import adaptercache.batch", batch="")),
        (downward, planted(policy="from adaptercache import pages", pages="")),
        (downward, planted(kernels__sgmv="from ..cache import AdapterCache", cache="")),
        (downward, planted(lease="from adaptercache import AdapterCache")),
        (downward, planted(policy="import adaptercache.policy")),
        (acyclic, planted(kernels__a="from . import b", kernels__b="from .a import x")),
        (acyclic, planted(kernels="from .a import x", kernels__a="from . import x")),
        (acyclic, planted(pages="from . import lease", lease="from .pages import x")),
        (tiers_apart, planted(tiers__disk="from adaptercache.tiers.host import x", tiers__host="")),
        (tiers_apart, planted(tiers__host="from . import streams", tiers__streams="")),
        (pure, planted(pages="import torch")),
        (pure, planted(batch="def f():\n from threading import Lock")),
        (pure, planted(prefix="open('x')")),
        (short, planted(errors="x = 1\n" * 301)),
        (short, planted(kernels__sgmv="x = 1\n" * 341)),
        (short, planted(errors="def f():\n" + " x = 1\n" * 60)),
        (our_words, planted(page_utils="")),
        (our_words, planted(pages="class PageManager: ...")),
        (our_words, planted(pages="def swap_out(): ...")),
        (our_words, planted(pages="async def activate(): ...")),
        (our_words, planted(pages="def f(helper): ...")),
        (our_words, planted(pages="self.adapter_uid = 1")),
        (our_words, planted(pages="import numpy as common")),
        (finished, planted(pages="x = 1  # TODO")),
        (finished, planted(pages="try: ...\nexcept: ...")),
        (finished, planted(pages="def f():\n print(1)")),
    ],
)
def test_the_rule_sees_what_breaks_it(rule: Rule, modules: list[Module]) -> None:
    assert list(rule(modules))


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_lets_the_rest_pass(rule: Rule) -> None:
    modules = planted(
        errors="class NotFound(Exception): ...",
        pages="from collections import deque\nfrom . import errors\nREGISTRY.register(1)",
        tiers__streams="import torch",
        tiers__gpu="from adaptercache.tiers import streams\nfrom adaptercache.pages import Pages",
        kernels="from .sgmv import f",
        kernels__reference="from ..errors import NotFound",
        kernels__sgmv="from adaptercache.kernels.reference import f",
        cli="print('hello')",
    )
    assert list(rule(modules)) == []


@pytest.mark.parametrize(
    "path",
    [
        path
        for folder in ("benchmarks", "examples")
        for path in sorted((PACKAGE.parent / folder).glob("*.py"))
    ],
    ids=lambda path: path.name,
)
def test_a_command_answers_help(path: Path) -> None:
    """And doesn't take the word for its work, and write figures."""
    text = path.read_text()
    if "__main__" in text:
        assert "parse_args(" in text or "churn_options" in text
