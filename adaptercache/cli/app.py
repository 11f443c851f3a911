"""The commands under one name."""

from __future__ import annotations

import typer

from adaptercache.cli.convert import convert
from adaptercache.cli.inspect import inspect
from adaptercache.cli.merge import merge
from adaptercache.cli.plan import plan
from adaptercache.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="adaptercache",
    help="Look into LoRA adapters, size a cache, check its disk, convert files, and merge.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help has square brackets of its own
    pretty_exceptions_enable=False,
)
for command in (inspect, plan, convert, merge, verify):
    app.command()(command)
