"""``adaptercache merge``: an adapter into its base model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaptercache.cli.options import Json
from adaptercache.cli.output import write_json, write_line
from adaptercache.cli.refusal import refusing

__all__ = ["merge"]


def merge(
    adapter: Annotated[Path, typer.Argument(help="The adapter's directory.")],
    base: Annotated[Path, typer.Argument(help="The base model: its directory, with config.json.")],
    output: Annotated[Path, typer.Argument(help="The directory to write; must not exist.")],
    untie: Annotated[
        bool,
        typer.Option(
            help="Where embedding and head share a weight that the adapter changes, give the head "
            "one of its own."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the base model with the adapter in its weights: float32, rounded once."""
    from adaptercache.checkpoint import read_checkpoint
    from adaptercache.errors import LoadFailed
    from adaptercache.merge import base_of_files
    from adaptercache.merge import merge as merge_files

    with refusing("base", as_json=as_json):
        table = base_of_files(base)
    with refusing("reader", as_json=as_json):
        checkpoint = read_checkpoint(adapter, table)
    with refusing("merger", as_json=as_json):
        try:
            merge_files(checkpoint, base, output, untie=untie)
        except FileExistsError as error:
            raise typer.BadParameter(str(error)) from error
        except OSError as error:  # no such parent, no right to write there, no room
            raise LoadFailed(f"{output} can't be written: {error}") from error
    if as_json:
        changed = sorted(checkpoint.modules)
        write_json({"status": "written", "target": str(output), "changed": changed})
    else:
        write_line(f"wrote {output}: {len(checkpoint.modules)} weights changed")
