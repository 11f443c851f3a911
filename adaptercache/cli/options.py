"""Options that several commands have, and how their values are read."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from adaptercache.base_model import BaseModel
from adaptercache.cli.sizes import parse_size
from adaptercache.layout import LoraLayout

__all__ = ["Dtype", "Json", "Targets", "layout_for", "size"]

_DTYPES = ("bfloat16", "float16", "float32")
_ALL = "all-linear"

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]
Targets: TypeAlias = Annotated[
    str,
    typer.Option(help=f"Modules that the cache serves: names with commas between, or {_ALL}."),
]
Dtype: TypeAlias = Annotated[
    str | None,
    typer.Option(help=f"Of the cache: {', '.join(_DTYPES)}. Default: the base's, or bfloat16."),
]


def size(text: str) -> int:
    """A size in bytes, for ``typer.Option(parser=...)``."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def layout_for(
    base: BaseModel, targets: str, max_rank: int, dtype: str | None, *, tp_size: int = 1
) -> LoraLayout:
    """The layout that these options ask for; where a model is cut, that of its first rank.

    Raises:
        typer.BadParameter: targets that the base doesn't have, or another wrong value.
        AdapterUnsupported: as `LoraLayout`.
    """
    names = [name.strip() for name in targets.split(",") if name.strip()]
    if dtype is None:
        dtype = base.dtype if base.dtype in _DTYPES else _DTYPES[0]
    try:
        return LoraLayout(
            base,
            targets=_ALL if names == [_ALL] else names,
            max_rank=max_rank,
            dtype=dtype,
            tp_size=tp_size,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
