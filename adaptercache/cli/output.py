"""How a report is written: tables by rich on a terminal, plain columns elsewhere, or JSON.

Names in a report come from strangers' files, so nothing of them reaches a terminal but characters
that can be printed, and no markup is read in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["printable", "write_json", "write_line", "write_table"]


def printable(value: object) -> str:
    """As text, with what can't be printed escaped: line ends, escape sequences, lone surrogates."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(value)
    )


def write_json(report: Mapping[str, object]) -> None:
    """One object on stdout."""
    typer.echo(json.dumps(report, indent=2, allow_nan=False))


def write_line(text: str = "", *, to_stderr: bool = False) -> None:
    """One line as it is."""
    typer.echo(printable(text), err=to_stderr)


def write_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout, and an empty line after it. ``header`` may be empty: none is shown."""
    cells = [[printable(cell) for cell in row] for row in rows]
    console = Console()
    if console.is_terminal:
        table = Table(*header, show_header=bool(header), header_style="bold")
        for row in cells:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        console.print(table)
        return
    lines = [list(header), *cells] if header else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())
    typer.echo()
