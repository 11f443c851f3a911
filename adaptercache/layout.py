"""How an adapter becomes one flat vector, and how the GPU arena is cut.

An adapter is one vector of the arena's dtype: layer after layer, target module after target
module, for each its ``A [r, in]`` and then its ``Bᵀ [r, out]``, row-major, each matrix at a
multiple of 512 elements. The vector is cut into cells of ``page_elems``; cell ``j`` lies at row
``j mod rows`` of page ``pages[j // rows]``. There is no padding to a maximum rank, none for
modules or layers that the adapter lacks: S-LoRA's unified paging (Sheng et al., MLSys 2024) at
the exact size. Pure Python: no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from adaptercache.base_model import BaseModel
from adaptercache.errors import AdapterUnsupported, CapacityError
from adaptercache.sites import LAYER_PATH, OTHER_TOWERS, Site, sites_of
from adaptercache.tensor_parallel import part_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ALIGN", "MAX_RANK", "ArenaShape", "KVLayout", "LoraLayout", "Site"]

ALIGN = 512
"""Elements: every matrix starts at a multiple of it, and a cell is a multiple of it."""

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}
"""Bytes an element, by torch's name of the dtype."""

# What makes keys and values, alone or beside the queries.
_KV_MODULES = {
    *("k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "kv_a_proj_with_mqa"),
}
ADAPTER_PAGE_BYTES = 64 << 10  # a page where no KV cache shares the arena
MAX_RANK = 512  # the largest that the kernels compute


def align(elements: int) -> int:
    """``elements`` rounded up to the next multiple of `ALIGN`."""
    return -(-elements // ALIGN) * ALIGN


class LoraLayout:
    """The sites of one base model, in the order in which a flat vector holds them.

    Immutable and thread-safe.

    Args:
        base: the base's weights as a table.
        targets: names of the target modules (``"q_proj"``), or ``"all-linear"``. An adapter that
            touches others is refused.
        max_rank: the largest rank that is served (up to 512); a larger one is refused by name.
        dtype: of the flat vectors and of the arena, by torch's name.
        tp_rank, tp_size: this rank's, where the model is cut among GPUs: sites, and what is packed,
            are this rank's part. An adapter has the same digest on all ranks.

    Raises:
        AdapterUnsupported: the base has no decoder layers with dense linear modules, or one that
            can't be cut into so many.
        ValueError: a target that the base lacks, a dtype or a maximum rank that we can't hold, or a
            rank that there is not.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        targets: Collection[str] | Literal["all-linear"] = "all-linear",
        max_rank: int = 64,
        dtype: str = "bfloat16",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        dtype = str(dtype).removeprefix("torch.")  # torch.bfloat16 is as good
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype {dtype!r}: weights are bfloat16, float16 or float32")
        if not 1 <= max_rank <= MAX_RANK:
            raise ValueError(f"max_rank {max_rank}: 1 to {MAX_RANK}")
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank {tp_rank} of tp_size {tp_size}: there is no such rank")
        self.base = base
        self.max_rank = max_rank
        self.dtype = dtype
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.sites: tuple[Site, ...] = tuple(
            part_of(site, base, tp_rank, tp_size) for site in sites_of(base, targets)
        )
        self.modules: tuple[str, ...] = tuple(dict.fromkeys(site.module for site in self.sites))
        self.num_layers = 1 + max(site.layer for site in self.sites)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object] | str | os.PathLike[str],
        *,
        targets: Collection[str] | Literal["all-linear"] = "all-linear",
        max_rank: int = 64,
        dtype: str | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> LoraLayout:
        """From a Hugging Face ``config.json``: a path, its directory, or the dict.

        ``dtype`` None takes the config's own where it names one that we hold, else bfloat16.
        """
        base = BaseModel.from_config(config)
        if dtype is None:
            named = base.dtype.removeprefix("torch.")
            dtype = named if named in ("bfloat16", "float16", "float32") else "bfloat16"
        cut = {"tp_rank": tp_rank, "tp_size": tp_size}
        return cls(base, targets=targets, max_rank=max_rank, dtype=dtype, **cut)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        targets: Collection[str] | Literal["all-linear"] = "all-linear",
        max_rank: int = 64,
        dtype: str | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> LoraLayout:
        """From a live model; ``dtype`` None takes that of its first parameter."""
        if dtype is None:
            dtype = str(next(iter(model.parameters())).dtype).removeprefix("torch.")
        base = BaseModel.from_model(model)
        cut = {"tp_rank": tp_rank, "tp_size": tp_size}
        return cls(base, targets=targets, max_rank=max_rank, dtype=dtype, **cut)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return ITEMSIZE[self.dtype]

    @cached_property
    def site_of(self) -> Mapping[str, int]:
        """Index into `sites` by the base model's path."""
        return {site.path: index for index, site in enumerate(self.sites)}

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the layout: which vectors of one adapter are the same."""
        rows = [
            [s.layer, s.module, s.path, s.in_features, s.out_features, *s.rows, *(s.columns or ())]
            for s in self.sites
        ]
        text = json.dumps(["adaptercache layout v1", self.dtype, ALIGN, rows])
        return hashlib.sha256(text.encode()).digest()

    def starts(self, ranks: Sequence[int]) -> tuple[list[int], int]:
        """Where each site's A begins in a flat vector, and the vector's length.

        Args:
            ranks: one a site, 0 where the adapter has nothing there.

        Returns:
            ``(starts, elements)``; −1 for an absent site. B begins at
            ``start + align(rank * in_features)``.
        """
        starts, at = [], 0
        for site, rank in zip(self.sites, ranks, strict=True):
            starts.append(at if rank else -1)
            if rank:
                at += align(rank * site.in_features) + align(rank * site.out_features)
        return starts, at

    @cached_property
    def max_elements(self) -> int:
        """The length of the longest vector: `max_rank` at every site."""
        return self.starts([self.max_rank] * len(self.sites))[1]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV cache that shares the arena: a block is one page.

    Args:
        block_size: tokens a block.
        kv_heads: key/value heads of this rank, in one layer.
        head_dim: elements a head.
        dtype: of keys and values, by torch's name; bfloat16 whatever the model's is.
        floor_pages: pages that adapters never take from the KV cache; None: the largest
            ``kv_pages`` of a waiting request.
    """

    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    floor_pages: int | None = None

    def __post_init__(self) -> None:
        named = str(self.dtype).removeprefix("torch.")  # torch.bfloat16 is as good
        object.__setattr__(self, "dtype", named)
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype {self.dtype!r}: one of {', '.join(ITEMSIZE)}")
        if min(self.block_size, self.kv_heads, self.head_dim) < 1 or (self.floor_pages or 0) < 0:
            raise ValueError(f"{self}: sizes are positive")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of one block in one layer: keys and values, tokens, heads, elements a head."""
        return (2, self.block_size, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return 2 * self.block_size * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """The GPU's one paged allocation: ``[rows, num_pages, page_bytes]``.

    A page is a column of ``rows`` cells with one id. ``itemsize`` is that of the adapters' dtype.
    """

    rows: int
    num_pages: int
    page_bytes: int
    itemsize: int

    @classmethod
    def fit(cls, layout: LoraLayout, kv: KVLayout | None, gpu_bytes: int) -> ArenaShape:
        """The most pages that ``gpu_bytes`` hold.

        Raises:
            AdapterUnsupported: a KV block that adapters' matrices can't be laid into, or a model
                whose layers have KV of different sizes.
            CapacityError: not even one page.
        """
        if kv is not None:
            _check_kv_is_even(layout.base)
        rows = layout.num_layers if kv else 1
        page_bytes = kv.block_bytes if kv else ADAPTER_PAGE_BYTES
        if page_bytes % (ALIGN * layout.itemsize):
            raise AdapterUnsupported(
                f"a KV block of {page_bytes} bytes a layer",
                where="KVLayout",
                remedy=f"choose block_size so that it is a multiple of {ALIGN * layout.itemsize}",
            )
        num_pages = gpu_bytes // (rows * page_bytes)
        if num_pages < 1:
            raise CapacityError(
                "gpu_bytes holds no page", needed=rows * page_bytes, limit=gpu_bytes
            )
        return cls(rows, num_pages, page_bytes, layout.itemsize)

    @property
    def page_elems(self) -> int:
        """Elements a cell."""
        return self.page_bytes // self.itemsize

    def pages_for(self, elements: int) -> int:
        """Pages that a flat vector of ``elements`` takes."""
        return -(-elements // (self.rows * self.page_elems))


def _check_kv_is_even(base: BaseModel) -> None:
    """A page is one KV block in every layer, so all layers must have blocks of one size."""
    of_layers: dict[str, set[tuple[str, int]]] = {}
    for path, module in base.modules.items():
        match = LAYER_PATH.fullmatch(path)
        if match is None or any(tower in path for tower in OTHER_TOWERS):
            continue
        name = match["name"].rpartition(".")[2]
        layer = of_layers.setdefault(match["layer"], set())
        if name in _KV_MODULES:
            layer.add((name, module.shape[1 if module.kind == "conv1d" else 0]))
    kinds = set(map(frozenset, of_layers.values()))
    if len(kinds) > 1:
        raise AdapterUnsupported(
            "an arena shared with the KV cache of a model whose layers have KV of different sizes",
            where=base.model_type,
            remedy="give no KVLayout: adapters then have an arena of their own, of any model",
        )
