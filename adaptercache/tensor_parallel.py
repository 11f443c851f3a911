"""One rank's part of every site, where a model is cut among GPUs.

Modules whose outputs are cut (q, k, v; gate, up) share A and cut B by rows; modules whose inputs
are cut (o, down) cut A by columns and share B, so that the sum that the engine takes over the ranks
holds the LoRA term too. Attention is cut by heads; where there are fewer KV heads than ranks,
several ranks have the same one. After Megatron-LM (Shoeybi et al., 2019). Pure Python: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaptercache.base_model import BaseModel
from adaptercache.errors import AdapterUnsupported
from adaptercache.sites import Site

__all__ = ["part_of"]

_PARTS = {  # of fused modules, as they lie in the output
    "qkv_proj": ("q", "k", "v"),
    "W_pack": ("q", "k", "v"),
    "c_attn": ("q", "k", "v"),
    "gate_up_proj": ("gate", "up"),
    **{f"{name}_proj": (name,) for name in ("q", "k", "v", "gate", "up")},
    "c_fc": ("up",),
}
_CUT_BY_INPUT = ("o_proj", "down_proj", "c_proj")


def part_of(site: Site, base: BaseModel, rank: int, size: int) -> Site:
    """What rank ``rank`` of ``size`` has of a site.

    Raises:
        AdapterUnsupported: a module that we don't know how to cut, or sizes that don't divide.
    """
    if size == 1:
        return site
    leaf = site.module.rpartition(".")[2]
    if leaf in _CUT_BY_INPUT:
        is_attention = leaf == "o_proj" or ".attn." in site.path
        heads = base.heads[0] if base.heads and is_attention else None
        first, end = _share(site, "input", site.in_features, heads, rank, size)
        return replace(site, in_features=end - first, columns=(first, end))
    if leaf not in _PARTS:
        raise AdapterUnsupported(
            f"tensor parallelism of {leaf}",
            where=site.path,
            remedy=f"leave it out of targets; known are {', '.join([*_PARTS, *_CUT_BY_INPUT])}",
        )
    rows, first = [], 0
    for part, width in zip(_PARTS[leaf], _widths(site, _PARTS[leaf], base), strict=True):
        if part in ("k", "v"):
            begin, end = _kv_share(site, width, base, rank, size)
        else:
            heads = base.heads[0] if base.heads and part == "q" else None
            begin, end = _share(site, part, width, heads, rank, size)
        rows.append((first + begin, first + end))
        first += width
    return replace(site, out_features=sum(end - begin for begin, end in rows), rows=tuple(rows))


def _widths(site: Site, parts: Sequence[str], base: BaseModel) -> list[int]:
    """Rows of each part: all, halves, or q as wide as what ``o_proj`` takes in."""
    if len(parts) < 3:
        return [site.out_features // len(parts)] * len(parts)
    parent = site.path.rpartition(".")[0]
    output = base.modules.get(f"{parent}.o_proj") or base.modules.get(f"{parent}.c_proj")
    if output is None:
        raise AdapterUnsupported(
            "tensor parallelism of a fused q, k and v without o_proj",
            where=site.path,
            remedy="leave it out of targets",
        )
    q = output.shape[1]
    return [q, (site.out_features - q) // 2, (site.out_features - q) // 2]


def _share(
    site: Site, part: str, width: int, heads: int | None, rank: int, size: int
) -> tuple[int, int]:
    """An equal share, of whole heads where there are any."""
    if width % size or (heads or size) % size:
        raise AdapterUnsupported(
            f"{size} ranks for {part} of {width}" + (f" in {heads} heads" if heads else ""),
            where=site.path,
            remedy="choose a tp_size that divides it, as the base model needs too",
        )
    return rank * (width // size), (rank + 1) * (width // size)


def _kv_share(site: Site, width: int, base: BaseModel, rank: int, size: int) -> tuple[int, int]:
    """Whole heads; where ranks are more, ranks side by side have the same head."""
    if base.heads is None:
        raise AdapterUnsupported(
            "tensor parallelism without the number of KV heads",
            where=site.path,
            remedy="use LoraLayout.from_config, or BaseModel.from_table(table, heads=...)",
        )
    heads = base.heads[1]
    if heads % size == 0:
        return _share(site, "k or v", width, heads, rank, size)
    if size % heads or width % heads:
        raise AdapterUnsupported(
            f"{size} ranks for {heads} KV heads",
            where=site.path,
            remedy="choose a tp_size that divides them, or that they divide",
        )
    head = rank // (size // heads)
    return head * (width // heads), (head + 1) * (width // heads)
