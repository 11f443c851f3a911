"""``adaptercache inspect``: what an adapter is, what it takes, or why it is refused."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from adaptercache.checkpoint import ReadOptions
from adaptercache.cli.inspection import Inspection, ModuleFacts, examine
from adaptercache.cli.options import Dtype, Json, Targets, layout_for
from adaptercache.cli.output import write_json, write_line, write_table
from adaptercache.cli.refusal import REFUSED
from adaptercache.cli.sizes import format_size

__all__ = ["inspect"]

_HEADER = ("module", "kind", "rank", "scaling", "A", "B", "dtype", "bytes", "norm", "GPU")
_STATES = {
    "loads": "loads, and the layout takes it",
    "refused": "refused",
    "unchecked": "sound by itself; whether it fits its base is not known",
}
_WITHOUT_BASE = (
    "There is no config.json of the base model beside the adapter. Give --base CONFIG for the "
    "check against the base, the norms of ΔW, the digest, and the bytes on each tier."
)
_OTHER_RANK = (
    "{} of {} modules have tensors of another rank than the config says: a stack of experts, or a "
    "broken adapter. Only the base model tells: give --base CONFIG."
)


class ExpertColumns(str, Enum):
    """The values of `ReadOptions.expert_columns`."""

    expert_fastest = "expert_fastest"
    expert_slowest = "expert_slowest"


def inspect(
    path: Annotated[Path, typer.Argument(help="The adapter's directory.")],
    base: Annotated[
        Path | None,
        typer.Option(
            help="The base model: its config.json or that file's directory, or a JSON table "
            "{path: {kind, shape}}. Default: the config.json beside the adapter.",
        ),
    ] = None,
    targets: Targets = "all-linear",
    max_rank: Annotated[
        int | None,
        typer.Option(min=1, help="The cache's largest rank. Default: what the adapter has."),
    ] = None,
    dtype: Dtype = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read adapter_model.bin or .pt, weights only.")
    ] = False,
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="The base is the text model of a multimodal adapter's."),
    ] = False,
    expert_columns: Annotated[
        ExpertColumns,
        typer.Option(help="How a stacked lora_B of MoE experts orders its columns."),
    ] = ExpertColumns.expert_fastest,
    ignore_config_key: Annotated[
        list[str] | None,
        typer.Option(help="An unknown config key that doesn't change the maths; many times."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what an adapter is and what it takes on each tier, or why it is refused.

    The exit code is 0 where nothing was refused, 1 where something was, 2 for a wrong option.
    """
    options = ReadOptions(
        allow_pickle=allow_pickle,
        text_only=text_only,
        expert_columns=expert_columns.value,
        ignored_config_keys=frozenset(ignore_config_key or ()),
    )
    found = examine(
        path,
        base,
        options,
        lambda model, checkpoint: layout_for(
            model, targets, max_rank or checkpoint.max_rank, dtype
        ),
    )
    if as_json:
        write_json(found.as_json())
    else:
        _write(found)
    if found.refusal is not None:
        raise typer.Exit(REFUSED)


def _write(found: Inspection) -> None:
    facts = {
        "adapter": found.path,
        **found.config,
        "base": found.base or "none",
        "state": _STATES[found.status],
        "digest": found.digest or "unknown",
    }
    write_table((), list(facts.items()))
    if found.base is None and (unclear := [m for m in found.modules if m.rank is None]):
        write_line(_OTHER_RANK.format(len(unclear), len(found.modules)))
    if found.modules:
        write_table(_HEADER, [_row(module) for module in found.modules])
    if found.skipped:
        write_table(("skipped", "why"), found.skipped)
    sizes = _sizes(found)
    if sizes:
        write_table(("bytes", "", "what"), sizes)
    if found.refusal is not None:
        found.refusal.write()
    elif found.base is None:
        write_line(_WITHOUT_BASE)


def _row(module: ModuleFacts) -> tuple[object, ...]:
    return (
        module.path,
        module.kind or "?",
        module.rank or "?",
        "?" if module.scaling is None else f"{module.scaling:g}",
        list(module.a),
        list(module.b),
        " ".join(dict.fromkeys(module.dtypes)),
        format_size(module.nbytes),
        "?" if module.norm is None else f"{module.norm:.4g}",
        {None: "?", True: "yes", False: "no"}[module.is_served],
    )


def _sizes(found: Inspection) -> list[tuple[str, str, str]]:
    sizes: list[tuple[str, int | None, str]] = [
        ("tensors", sum(module.nbytes for module in found.modules), "A and B, as in the file"),
        ("REMOTE", found.published, "config and weights, as published"),
    ]
    if found.footprint is not None and found.layout is not None:
        sizes += [
            ("DISK", found.footprint.disk, "these files, and the packed one"),
            ("HOST", found.footprint.host, "blocks of 2 MiB"),
            ("GPU", found.footprint.gpu, f"pages of 64 KiB, {found.layout['dtype']}; no KV beside"),
        ]
    return [(name, format_size(size), what) for name, size, what in sizes if size]
