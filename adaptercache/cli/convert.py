"""``adaptercache convert``: another tool's adapter as PEFT's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaptercache.cli.options import Json
from adaptercache.cli.output import write_json, write_line
from adaptercache.cli.refusal import refusing

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(help="The other tool's adapter.")],
    target: Annotated[Path, typer.Argument(help="The directory to write.")],
    base_model: Annotated[
        str | None, typer.Option(help="The base model's name, for the new config.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            help="The base model's config.json or its directory, where the conversion needs it. "
            "Default: the config.json beside the adapter."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write another tool's adapter as PEFT saves them: what the cache reads."""
    from adaptercache.convert import convert_to_peft

    with refusing("converter", as_json=as_json):
        given = {} if base is None else {"base_config": base}
        form = convert_to_peft(source, target, base_model=base_model, **given)
    if as_json:
        write_json(
            {"status": "written", "source": str(source), "target": str(target), "format": form}
        )
    else:
        write_line(f"read {form} from {source}, wrote PEFT's files to {target}")
