"""GPU bytes of adapters, and how many 8 GiB hold: ours, and slots padded as the peers' are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from adaptercache import KVLayout, LoraLayout
from adaptercache.layout import ArenaShape
from load_world import ATTENTION, LLAMA_3_8B

GPU_BYTES = 8 << 30
RANKS = (1, 2, 4, 8, 16, 32, 64)
Modules: TypeAlias = "tuple[str, ...] | None"
KINDS: tuple[tuple[str, Modules, set[int] | None], ...] = (
    ("all-linear", None, None),
    ("q k v o", ATTENTION, None),
    ("q k v o of one layer", ATTENTION, {0}),
)
MIXES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None]] = {
    "rank 16, all-linear": ((16,), None),
    "rank 8, q and v": ((8,), ("q_proj", "v_proj")),
    "ranks 8 16 32 64 in equal numbers, all-linear": ((8, 16, 32, 64), None),
}


def footprint() -> Iterator[tuple[str, dict[str, object]]]:
    layout = LoraLayout.from_config(LLAMA_3_8B, max_rank=64)
    shared = ArenaShape.fit(layout, KVLayout(16, 8, 128), GPU_BYTES)
    alone = ArenaShape.fit(layout, None, GPU_BYTES)
    for rank in RANKS:
        for what, modules, layers in KINDS:
            elements, tensors = size_of(layout, rank, modules, layers)
            yield (
                f"bytes of rank {rank}, {what}",
                {
                    "tensors": tensors * layout.itemsize,
                    "vector": elements * layout.itemsize,
                    "pages_of_2_MiB": shared.pages_for(elements),
                    "bytes_in_2_MiB_pages": shared.pages_for(elements) * (2 << 20),
                    "bytes_in_64_KiB_pages": alone.pages_for(elements) * (64 << 10),
                },
            )
    for name, (ranks, modules) in MIXES.items():
        sizes = [size_of(layout, rank, modules)[0] for rank in ranks]
        own_max, top = (
            size_of(layout, rank, None)[1] * layout.itemsize for rank in (max(ranks), 64)
        )
        yield (
            f"8 GiB hold: {name}",
            {
                "ours_beside_kv": fit(shared, sizes),
                "ours_alone": fit(alone, sizes),
                "slots_of_this_mix_s_maximum_rank": GPU_BYTES // own_max,
                "slots_of_rank_64": GPU_BYTES // top,
            },
        )


def size_of(
    layout: LoraLayout,
    rank: int,
    modules: tuple[str, ...] | None,
    layers: set[int] | None = None,
) -> tuple[int, int]:
    """Elements of the flat vector, and of its tensors alone."""
    ranks = [
        rank
        if (modules is None or site.module in modules) and (layers is None or site.layer in layers)
        else 0
        for site in layout.sites
    ]
    tensors = sum(
        r * (site.in_features + site.out_features)
        for r, site in zip(ranks, layout.sites, strict=True)
    )
    return layout.starts(ranks)[1], tensors


def fit(shape: ArenaShape, sizes: list[int]) -> int:
    """Adapters of these sizes, in turn, that the pages hold."""
    count, left = 0, shape.num_pages
    while (pages := shape.pages_for(sizes[count % len(sizes)])) <= left:
        count, left = count + 1, left - pages
    return count
