"""``adaptercache plan``: how many adapters fit, and how long loads take."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from adaptercache.cli.bases import read_base
from adaptercache.cli.options import Dtype, Json, Targets, layout_for, size
from adaptercache.cli.output import write_json, write_table
from adaptercache.cli.planning import Bandwidths, Budgets, Hop, Plan, plan_for
from adaptercache.cli.refusal import refusing
from adaptercache.cli.sizes import format_size
from adaptercache.layout import ITEMSIZE, KVLayout, LoraLayout

__all__ = ["plan"]


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-9 <= value < 1e9:
        raise typer.BadParameter(
            f"{text!r} is no bandwidth: give 10⁹ bytes a second, 1e-9 at least"
        )
    return value


def _itemised(text: str) -> str:
    if text not in ITEMSIZE:
        raise typer.BadParameter(f"{text!r}: one of {', '.join(ITEMSIZE)}")
    return text


Config: TypeAlias = Annotated[
    Path, typer.Option(help="The base model: its config.json, or a JSON table of modules.")
]
Rank: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Of the adapters, at every target module.")
]
GpuBytes: TypeAlias = Annotated[
    int, typer.Option(metavar="SIZE", parser=size, help="Of the arena: 8GiB.")
]
HostBytes: TypeAlias = Annotated[
    int | None, typer.Option(metavar="SIZE", parser=size, help="Of pinned CPU memory: 64GiB.")
]
DiskBytes: TypeAlias = Annotated[
    int | None, typer.Option(metavar="SIZE", parser=size, help="Of the disk tier: 200GiB.")
]
FileDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        parser=_itemised,
        help="Of the published files (PEFT often writes float32). Default: the cache's.",
    ),
]
TPSize: TypeAlias = Annotated[
    int, typer.Option(min=1, help="GPUs that the model is cut among; the figures are one's.")
]
KVBlockSize: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Tokens a block, where the KV cache shares the arena.")
]
KVHeads: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Key/value heads of a layer, on one GPU.")
]
HeadDim: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Elements a head.")]
KVDtype: TypeAlias = Annotated[
    str, typer.Option(metavar="DTYPE", parser=_itemised, help="Of the KV cache.")
]
KVTokens: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Tokens of KV to keep room for in the arena.")
]
H2D: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--h2d-GBps", metavar="GBPS", parser=_bandwidth, help="CPU memory to GPU, 10⁹ bytes/s."
    ),
]
Disk: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--disk-GBps", metavar="GBPS", parser=_bandwidth, help="Disk to CPU memory, 10⁹ bytes/s."
    ),
]
Remote: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--remote-GBps", metavar="GBPS", parser=_bandwidth, help="Source to disk, 10⁹ bytes/s."
    ),
]


def plan(
    config: Config,
    rank: Rank,
    gpu_bytes: GpuBytes,
    host_bytes: HostBytes = None,
    disk_bytes: DiskBytes = None,
    targets: Targets = "all-linear",
    dtype: Dtype = None,
    file_dtype: FileDtype = None,
    tp_size: TPSize = 1,
    kv_block_size: KVBlockSize = None,
    kv_heads: KVHeads = None,
    head_dim: HeadDim = None,
    kv_dtype: KVDtype = "bfloat16",
    kv_tokens: KVTokens = 0,
    h2d_gbps: H2D = None,
    disk_gbps: Disk = None,
    remote_gbps: Remote = None,
    as_json: Json = False,
) -> None:
    """Show how many adapters each tier holds, and how long one takes to move.

    The exit code is 1 where a tier holds none, or the model is refused; 2 for a wrong option.
    """
    kv = _kv_layout(kv_block_size, kv_heads, head_dim, kv_dtype, kv_tokens)
    with refusing("base", as_json=as_json):
        base = read_base(config)
    with refusing("layout", as_json=as_json):
        layout = layout_for(base, targets, rank, dtype, tp_size=tp_size)
    with refusing("plan", as_json=as_json):
        found = plan_for(
            layout,
            kv,
            Budgets(gpu_bytes, host_bytes, disk_bytes, kv_tokens),
            Bandwidths(remote_gbps, disk_gbps, h2d_gbps),
            file_dtype=file_dtype or layout.dtype,
        )
    if as_json:
        write_json(_as_json(found, layout))
    else:
        _write(found, layout)


def _kv_layout(
    block_size: int | None, heads: int | None, head_dim: int | None, dtype: str, tokens: int
) -> KVLayout | None:
    sizes = (block_size, heads, head_dim)
    if block_size is not None and heads is not None and head_dim is not None:
        return KVLayout(block_size, heads, head_dim, dtype)
    if tokens or any(size is not None for size in sizes):
        raise typer.BadParameter(
            "a KV cache in the arena takes --kv-block-size, --kv-heads and --head-dim"
        )
    return None


def _total_seconds(hops: tuple[Hop, ...]) -> float | None:
    seconds = [hop.seconds for hop in hops if hop.seconds is not None]
    return sum(seconds) if len(seconds) == len(hops) else None


def _as_json(found: Plan, layout: LoraLayout) -> dict[str, object]:
    return {
        "status": "fits",
        "adapter": {
            "rank": layout.max_rank,
            "dtype": layout.dtype,
            "targets": list(layout.modules),
            "modules": len(layout.sites),
            "tensor_bytes": found.tensors,
            "pages": found.pages,
        },
        "arena": {
            "page_bytes": found.page_bytes,
            "pages": found.arena_pages,
            "kv_pages": found.kv_pages,
        },
        "tiers": {
            holding.tier: {
                "budget_bytes": holding.budget,
                "adapter_bytes": holding.adapter_bytes,
                "adapters": holding.adapters,
            }
            for holding in found.holdings
        },
        "loads": [asdict(hop) for hop in found.hops],
        "load_seconds": _total_seconds(found.hops),
    }


def _write(found: Plan, layout: LoraLayout) -> None:
    page = format_size(found.page_bytes)
    facts = [
        ("adapter", f"rank {layout.max_rank} on {', '.join(layout.modules)}"),
        ("modules", len(layout.sites)),
        ("tensors", f"{format_size(found.tensors)} in {layout.dtype}"),
        ("pages", f"{found.pages} of {page}"),
        ("arena", f"{found.arena_pages} pages, {found.kv_pages} of them kept for KV"),
    ]
    write_table((), facts)
    write_table(
        ("tier", "budget", "an adapter", "adapters"),
        [
            (h.tier.upper(), format_size(h.budget), format_size(h.adapter_bytes), h.adapters)
            for h in found.holdings
        ],
    )
    timed = [hop for hop in found.hops if hop.seconds is not None]
    rows = [
        (f"{hop.source.upper()} -> {hop.target.upper()}", format_size(hop.nbytes), hop.seconds)
        for hop in timed
    ]
    total = _total_seconds(found.hops)
    if total is not None:
        rows.append(("REMOTE -> GPU", "", total))
    if rows:
        write_table(("load", "bytes", "time"), [(a, b, _time(s or 0.0)) for a, b, s in rows])


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
