"""The places of a base model that adapters may touch. Pure Python: no torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from adaptercache.base_model import BaseModel
from adaptercache.errors import AdapterUnsupported

__all__ = ["LAYER_PATH", "OTHER_TOWERS", "Site", "sites_of"]

# Forward order, so that modules that share an input (qkv; gate and up) lie side by side.
_FORWARD_ORDER = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "c_fc", "down_proj"),
)
LAYER_PATH = re.compile(r"(?P<stack>.*?(?:layers|h|blocks))\.(?P<layer>\d+)\.(?P<name>.+)")
OTHER_TOWERS = ("vision", "visual", "audio", "encoder")


@dataclass(frozen=True, slots=True)
class Site:
    """A place that may carry LoRA: one target module of one layer.

    ``path`` is the base model's name of it. A is ``[rank, in_features]``, B is
    ``[out_features, rank]``; under tensor parallelism, this rank's parts of them: ``columns`` of A
    (None: all) and ``rows`` of B, run after run (none: all).
    """

    layer: int
    module: str
    path: str
    in_features: int
    out_features: int
    columns: tuple[int, int] | None = None
    rows: tuple[tuple[int, int], ...] = ()


def sites_of(base: BaseModel, targets: Collection[str] | Literal["all-linear"]) -> tuple[Site, ...]:
    """Every dense linear module of the decoder that is a target, in forward order.

    Raises:
        AdapterUnsupported: there is none.
        ValueError: a target that the base doesn't have.
    """
    found: dict[str, list[tuple[int, str, str]]] = {}
    for path, module in base.modules.items():
        match = LAYER_PATH.fullmatch(path)
        if match and module.kind in ("linear", "conv1d") and ".experts." not in path:
            at = (int(match["layer"]), match["name"], path)
            found.setdefault(match["stack"], []).append(at)
    if not found:
        raise AdapterUnsupported(
            "a base model with no decoder layers of dense linear modules",
            where=base.model_type,
            remedy="give the table of a decoder-only transformer",
        )
    decoder = min(found, key=lambda stack: (any(t in stack for t in OTHER_TOWERS), len(stack)))
    places = found[decoder]
    leaves = {(layer, name.rpartition(".")[2]) for layer, name, _ in places}
    unique = len(leaves) == len(places)
    sites = [
        Site(layer, name.rpartition(".")[2] if unique else name, path, *_in_out(base, path))
        for layer, name, path in places
    ]
    if isinstance(targets, str) and targets != "all-linear":
        raise TypeError(f'targets {targets!r}: give a list of names, or "all-linear"')
    if targets != "all-linear":
        unknown = sorted(set(targets) - {site.module for site in sites})
        if unknown or not targets:
            known = sorted({site.module for site in sites})
            raise ValueError(f"targets {unknown or 'empty'}: the base has {known}")
        sites = [site for site in sites if site.module in targets]
    return tuple(sorted(sites, key=lambda site: (site.layer, _forward_rank(site.module))))


def _in_out(base: BaseModel, path: str) -> tuple[int, int]:
    out_features, in_features = base.modules[path].shape
    return in_features, out_features


def _forward_rank(module: str) -> tuple[int, str]:
    leaf = module.rpartition(".")[2]
    known = leaf in _FORWARD_ORDER
    return (_FORWARD_ORDER.index(leaf) if known else len(_FORWARD_ORDER), module)
