"""A kernel's instructions, from its PTX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias


class UnknownInstruction(Exception):
    """The machine has no such instruction, or no such form of it: it is to be added here."""


@dataclass(frozen=True)
class Address:
    base: str
    offset: int


Operand: TypeAlias = "str | int | Address | tuple[str | int, ...]"


@dataclass(frozen=True)
class Instruction:
    text: str
    guard: str | None
    """Threads where this predicate is not ``runs_where`` leave it out."""
    runs_where: bool
    op: str
    operands: tuple[Operand, ...]


class Program:
    """A kernel's instructions, from its PTX."""

    def __init__(self, ptx: str) -> None:
        entry = ptx[ptx.index(".visible .entry") :]
        threads = re.search(r"\.reqntid (\d+)", entry)
        assert threads, "the PTX doesn't say how many threads"
        self.threads = int(threads[1])
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        for line in re.sub(r"//.*", "", entry[threads.end() :]).replace(";", "\n").splitlines():
            self._add(line.strip())

    def _add(self, line: str) -> None:
        label = re.match(r"(\$\w+):\s*", line)
        if label:
            self.labels[label[1]] = len(self.instructions)
            line = line[label.end() :]
        if not line or line[0] in "{}.":  # a scope, a directive, debug data
            return
        parts = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)", line)
        if not parts:
            raise UnknownInstruction(line)
        no, guard, op, operands = parts.groups()
        found = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)
        its = tuple(map(_operand, found))
        self.instructions.append(Instruction(line, guard, not no, op, its))


def _operand(text: str) -> Operand:
    if text[0] == "{":
        return tuple(_scalar(each.strip()) for each in text[1:-1].split(","))
    if text[0] == "[":
        base, _, offset = text[1:-1].partition("+")
        return Address(base.strip(), int(offset or 0))
    return _scalar(text)


def _scalar(text: str) -> str | int:
    if re.fullmatch(r"0[fx][0-9a-fA-F]+U?", text):  # 0f: the bits of a float32
        return int(text[2:].rstrip("U"), 16)
    return int(text) % (1 << 64) if re.fullmatch(r"-?\d+", text) else text
