"""``adaptercache verify``: whether a disk tier has the bytes that were written to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaptercache.cli.bases import read_base
from adaptercache.cli.options import Json
from adaptercache.cli.output import write_json, write_line, write_table
from adaptercache.cli.refusal import REFUSED, refusing
from adaptercache.cli.sizes import format_size
from adaptercache.disk.verify import Finding
from adaptercache.disk.verify import verify as look_at

__all__ = ["verify"]


def verify(
    path: Annotated[Path, typer.Argument(help="The directory of a disk tier: a cache's disk_dir.")],
    base: Annotated[
        Path | None,
        typer.Option(help="The base model, as for inspect: every digest is computed again."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare everything on a disk tier with its checksums and digests. Changes nothing, and may
    run beside the caches that use it.

    The exit code is 0 where all is sound, 1 where something is broken, 2 for a wrong option. A
    cache that meets what is broken makes it anew.
    """
    with refusing("base", as_json=as_json):
        model = read_base(base) if base is not None else None
    try:
        found = list(look_at(path, model))
    except NotADirectoryError as error:
        raise typer.BadParameter(str(error)) from error
    broken = [finding for finding in found if finding.wrong]
    if as_json:
        write_json(_report(found, broken))
    else:
        _write(found, broken)
    if broken:
        raise typer.Exit(REFUSED)


def _report(found: list[Finding], broken: list[Finding]) -> dict[str, object]:
    return {
        "status": "broken" if broken else "sound",
        "contents": len(found),
        "files": sum(finding.files for finding in found),
        "bytes": sum(finding.nbytes for finding in found),
        "unsummed": sum(len(finding.unsummed) for finding in found),
        "broken": [{"digest": each.digest, "wrong": list(each.wrong)} for each in broken],
    }


def _write(found: list[Finding], broken: list[Finding]) -> None:
    rows = [(finding.digest, wrong) for finding in broken for wrong in finding.wrong]
    if rows:
        write_table(("digest", "what is wrong"), rows)
    nbytes = sum(finding.nbytes for finding in found)
    write_line(
        f"{len(found)} contents, {sum(finding.files for finding in found)} files, "
        f"{format_size(nbytes)}: {f'{len(broken)} broken' if broken else 'all sound'}"
    )
    unsummed = sum(len(finding.unsummed) for finding in found)
    if unsummed:
        write_line(f"{unsummed} files have no checksum: an earlier version wrote them")
