"""The command line, ``adaptercache``: inspect, plan, convert, verify. Needs the extra ``cli``."""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = ("typer", "rich")


def main() -> None:
    """What the command ``adaptercache`` runs."""
    try:
        from adaptercache.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.exit("adaptercache's command line needs typer and rich: pip install typer rich")
    app()
