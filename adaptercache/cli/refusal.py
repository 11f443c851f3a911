"""A refusal on the command line: what was refused, by which part, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import typer

from adaptercache.cli.output import write_json, write_line
from adaptercache.errors import AdapterCacheError

__all__ = ["REFUSED", "Part", "Refusal", "refusing"]

REFUSED = 1  # the exit code; a wrong use of a command is 2
Part: TypeAlias = Literal["reader", "base", "layout", "plan", "converter"]

_FACTS = ("feature", "where", "found", "expected", "needed", "limit", "unit", "remedy")
_OPTIONS = {
    "convert_to_peft": "adaptercache convert",
    "allow_pickle": "--allow-pickle",
    "text_only": "--text-only",
    "ignored_config_keys": "--ignore-config-key",
    "max_rank": "--max-rank",
    "from_table": "give a JSON table of its modules",
    "base_config": "--base",
}
"""What the library's remedies speak of, and what it is on the command line."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of the library, and the part of it that raised it."""

    by: Part
    error: AdapterCacheError

    def as_json(self) -> dict[str, object]:
        """``by``, ``error`` (the class), ``what``, ``message``, and whatever facts it has."""
        named = {name: getattr(self.error, name, "") for name in _FACTS}
        facts = {
            name: value if isinstance(value, int) else str(value)
            for name, value in named.items()
            if value != ""
        }
        option = {"option": self._option} if self._option else {}
        return {
            "by": self.by,
            "error": type(self.error).__name__,
            "what": self.error.what,
            "message": str(self.error),
            **facts,
            **option,
        }

    def write(self) -> None:
        """In words, on stderr."""
        write_line(f"refused by the {self.by}: {self.error}", to_stderr=True)
        if self._option:
            write_line(f"here: {self._option}", to_stderr=True)

    @property
    def _option(self) -> str:
        remedy = str(getattr(self.error, "remedy", ""))
        names = (option for name, option in _OPTIONS.items() if name in remedy)
        return next(names, "") if self.by != "plan" else ""


@contextmanager
def refusing(by: Part, *, as_json: bool) -> Iterator[None]:
    """Ends the command where its body raises an error of the library."""
    try:
        yield
    except AdapterCacheError as error:
        refusal = Refusal(by, error)
        if as_json:
            write_json({"status": "refused", "refusal": refusal.as_json()})
        else:
            refusal.write()
        raise typer.Exit(REFUSED) from None
