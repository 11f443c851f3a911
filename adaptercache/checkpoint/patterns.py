"""The regular expressions in an adapter's config, matched in bounded time.

PEFT matches each key K of ``rank_pattern`` and ``alpha_pattern`` as ``(.*\\.)?(K)$`` against a
module's path. K comes from a stranger, and Python's ``re`` backtracks: ``(a|a)*`` takes for ever.
So a K without groups, alternatives or counts, and with at most one ``*`` or ``+``, goes to ``re``,
which can't go far astray on a short path; any other is matched by walking the set of positions
that it can have reached. All of it, compiling included, has one budget of steps for the whole
adapter. K is ASCII and spells no others: ``re`` takes milliseconds to compile a class of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["OLD_FORM", "Pattern", "StepBudget"]

_FORM = r"(.*\.)?({key})$"
OLD_FORM = r".*\.{key}$"
"""Of releases before 0.15 (see releases.py)."""

_LONGEST_PATTERN = 1024
_DEEPEST_GROUP = 32
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_ESCAPES_AND_CLASSES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]?", re.DOTALL)
_SET_OPERATION = re.compile(r"\[\^?\[|--|&&|~~|\|\|")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_FLAGS = re.compile(r"\(\?[^:]")
_ESCAPES = frozenset("dDsSwWbBAZnrtfv")


class StepBudget:
    """Steps that all the patterns of one adapter may take together. Not thread-safe.

    A step is a tenth of a microsecond, so all of them are half a second.
    """

    def __init__(self, steps: int = 5_000_000) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _TooManySteps


class _TooManySteps(Exception):
    pass


class Pattern:
    """One key of ``rank_pattern`` or ``alpha_pattern``.

    Args:
        key: the regular expression as the config has it.
        where: the name of the config's field, for errors.
        budget: shared by the patterns of an adapter.
        form: of the expression that the key stands in.

    Raises:
        AdapterInvalid: too long, or not a regular expression.
        AdapterUnsupported: look-around, back-references, flags or possessive repetition.
    """

    def __init__(self, key: str, where: str, budget: StepBudget, *, form: str = _FORM) -> None:
        self._where = f"{where}[{key[:80]!r}]"
        self._key = key
        self._budget = budget
        self._check_length()
        self._spend(300 + 12 * len(key))
        self._check_syntax()
        source = form.replace("{key}", key)
        try:
            self._compiled = re.compile(source)
            self._repeats = key.count("*") + key.count("+")
            is_simple = not set(key) & set("(|{?") and self._repeats <= 1
            self._walk = None if is_simple else self._parsed(source)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise AdapterInvalid(
                "not a regular expression", where=self._where, found=error
            ) from error

    def matches(self, path: str) -> bool:
        """What ``re.match(rf"(.*\\.)?({key})$", path)`` says of a path.

        Raises:
            AdapterInvalid: the budget is spent.
        """
        if self._walk is None:
            self._spend(self._most_steps(path))
            return self._compiled.match(path) is not None
        try:
            return bool(self._walk(path, frozenset((0,)), self._budget))
        except _TooManySteps:
            raise self._too_long() from None

    def _check_length(self) -> None:
        if len(self._key) > _LONGEST_PATTERN:
            raise AdapterInvalid(
                "not a regular expression",
                where=self._where,
                found=f"{len(self._key)} characters",
                expected=f"at most {_LONGEST_PATTERN}",
            )

    def _check_syntax(self) -> None:
        """Refuses what ``re`` is slow to compile, or warns of: in a later Python it means sets."""
        if not self._key.isascii():
            raise _unsupported("characters outside of ASCII", self._where)
        if flags := _FLAGS.search(self._key):
            raise _unsupported(flags[0], self._where)
        for token in _ESCAPES_AND_CLASSES.findall(self._key):
            for escaped in _ESCAPED.findall(token):
                if escaped.isalnum() and escaped not in _ESCAPES:
                    raise _unsupported(f"\\{escaped}", self._where)
            if token[0] == "[" and (operation := _SET_OPERATION.search(token)):
                raise _unsupported(f"{operation[0]} in a class", self._where)

    def _parsed(self, source: str) -> _Walk:
        self._spend(100 * len(source))
        return _Parser(source, self._where).parse()

    def _most_steps(self, path: str) -> int:
        """What ``re`` takes at worst: the key is tried after every dot, and from there with every
        length of what it repeats."""
        tries = path.count(".") * (len(path) if self._repeats else 2)
        return 5 + tries * min(len(self._key), len(path)) // 256

    def _spend(self, steps: int) -> None:
        try:
            self._budget.spend(steps)
        except _TooManySteps:
            raise self._too_long() from None

    def _too_long(self) -> AdapterInvalid:
        return AdapterInvalid(
            "the config's patterns take too long to match",
            where=self._where,
            remedy="write fewer of them, without nested repetition",
        )


def _unsupported(what: str, where: str) -> AdapterUnsupported:
    return AdapterUnsupported(
        f"{what} in a pattern", where=where, remedy="write the pattern without it"
    )


_Positions: TypeAlias = frozenset[int]
_Walk: TypeAlias = Callable[[str, _Positions, StepBudget], _Positions]
"""From the positions where a part may begin to all the positions where it may end."""


def _atom(source: str) -> _Walk:
    """One character, class or anchor: ``re`` itself says what it matches."""
    match = re.compile(source).match

    def walk(text: str, starts: _Positions, budget: StepBudget) -> _Positions:
        budget.spend(3 + 2 * len(starts))
        return frozenset(found.end() for start in starts if (found := match(text, start)))

    return walk


def _sequence(parts: list[_Walk]) -> _Walk:
    def walk(text: str, starts: _Positions, budget: StepBudget) -> _Positions:
        budget.spend(2)
        for part in parts:
            if not starts:
                break
            starts = part(text, starts, budget)
        return starts

    return walk


def _choice(branches: list[_Walk]) -> _Walk:
    def walk(text: str, starts: _Positions, budget: StepBudget) -> _Positions:
        budget.spend(3 + len(starts))
        return frozenset().union(*(branch(text, starts, budget) for branch in branches))

    return walk


def _repeat(part: _Walk, least: int, most: int | None) -> _Walk:
    def walk(text: str, starts: _Positions, budget: StepBudget) -> _Positions:
        times = 0
        while starts and times < least:
            budget.spend(5)
            starts, times = part(text, starts, budget), times + 1
        fresh, reached = starts, set(starts)
        while fresh and (most is None or times < most):
            budget.spend(5 + len(fresh))
            fresh, times = part(text, fresh, budget) - reached, times + 1
            reached |= fresh
        return frozenset(reached)

    return walk


@dataclass(slots=True)
class _Parser:
    """Reads an expression that ``re`` has accepted; refuses what the walk can't do."""

    source: str
    where: str
    at: int = 0
    depth: int = 0

    def parse(self) -> _Walk:
        branches = [self._parse_sequence()]
        while self._take("|"):
            branches.append(self._parse_sequence())
        return branches[0] if len(branches) == 1 else _choice(branches)

    def _parse_sequence(self) -> _Walk:
        parts = []
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            parts.append(self._parse_repeat(self._parse_atom()))
        return _sequence(parts)

    def _parse_repeat(self, part: _Walk) -> _Walk:
        bounds: tuple[int, int | None]
        if self._take("*"):
            bounds = (0, None)
        elif self._take("+"):
            bounds = (1, None)
        elif self._take("?"):
            bounds = (0, 1)
        elif (count := _COUNT.match(self.source, self.at)) and count[0] != "{}":
            self.at = count.end()
            least, comma, most = count.groups()
            upper = most if comma else least
            bounds = (int(least or 0), int(upper) if upper else None)
        else:
            return part
        if self._take("+"):
            self._refuse("possessive repetition")
        self._take("?")  # lazy or greedy is the same to the question whether it matches
        return _repeat(part, *bounds)

    def _parse_atom(self) -> _Walk:
        if self._take("("):
            return self._parse_group()
        start = self.at
        if self._take("["):
            self._skip_class()
            return _atom(self.source[start : self.at])
        if self._take("\\"):
            self.at += 1
            return _atom(self.source[start : self.at])
        self.at += 1
        character = self.source[start]
        return _atom(character if character in ".^$" else re.escape(character))

    def _parse_group(self) -> _Walk:
        if self._take("?") and not self._take(":"):
            self._refuse(f"(?{self.source[self.at]}")
        self.depth += 1
        if self.depth > _DEEPEST_GROUP:
            raise ValueError(f"groups more than {_DEEPEST_GROUP} deep")
        part = self.parse()
        self.depth -= 1
        self._take(")")
        return part

    def _skip_class(self) -> None:
        self._take("^")
        self._take("]")  # first in a class, it is a member
        while not self._take("]"):
            self.at += 2 if self.source[self.at] == "\\" else 1

    def _take(self, text: str) -> bool:
        found = self.source.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _refuse(self, what: str) -> None:
        raise _unsupported(what, self.where)
