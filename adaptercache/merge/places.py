"""Where an adapter's weights lie in a base model, by the names and shapes of its weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import Checkpoint
from adaptercache.checkpoint.names import BaseNames
from adaptercache.errors import AdapterInvalid, AdapterUnsupported
from adaptercache.merge.shards import FLOATS, open_shards

__all__ = ["Plan", "base_of_files", "is_one_change", "plan_of", "tied"]


def base_of_files(path: str | os.PathLike[str], base: BaseModel | None = None) -> BaseModel:
    """The weights that a model's files hold, by the files' own names.

    Files may keep apart what the model class of a newer release fuses (experts one by one): an
    adapter read for this table fits them either way.

    Args:
        path: safetensors files, as a directory or one file.
        base: what the model class says of kinds (a conv1d is stored transposed); None: the
            ``config.json`` beside them.

    Raises:
        AdapterInvalid: the files are broken, or don't fit ``base``.
        AdapterUnsupported: as `BaseModel.from_config`.
    """
    path = Path(path)
    shards, _ = open_shards(path)
    base = base or BaseModel.from_config(path if path.is_dir() else path.parent)
    names = BaseNames(base)
    modules: dict[str, BaseModule] = {}
    seen: set[str] = set()
    for stored in (stored for shard in shards for stored in shard.tensors):
        module_path = stored.name.removesuffix(".weight")
        known = names.find(module_path)
        if known is not None and stored.dtype in FLOATS:
            _check_shape(stored.name, stored.shape, base.modules[known])
        if known is not None:
            seen.add(known)
            modules[module_path] = base.modules[known]
        elif stored.name.endswith(".weight") and len(stored.shape) == 2:
            modules[module_path] = BaseModule("linear", stored.shape)
        elif len(stored.shape) == 3:
            modules[stored.name] = BaseModule("parameter", stored.shape)
    for head in _heads(base.modules):
        if head not in seen:  # it has no weight of its own: it shares the embedding's
            modules[head] = base.modules[head]
    return BaseModel(modules, base.model_type, base.dtype, base.heads)


def _heads(modules: Mapping[str, BaseModule]) -> dict[str, str]:
    """Modules that may share the weight of an embedding, which has their shape; and that one."""
    embeddings = {
        module.shape: path for path, module in modules.items() if module.kind == "embedding"
    }
    return {
        path: embeddings[module.shape]
        for path, module in modules.items()
        if module.kind == "linear" and module.shape in embeddings
    }


def _check_shape(name: str, shape: Iterable[int], module: BaseModule) -> None:
    stored = tuple(reversed(module.shape)) if module.kind == "conv1d" else module.shape
    if tuple(shape) != stored:
        raise AdapterInvalid(
            "the base model's weights are not of the model that the adapter was read for",
            where=name,
            found=tuple(shape),
            expected=stored,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What changes where.

    ``names``: the base's name of each changed weight, by the adapter's path. ``heads``: of an
    embedding's name, the head that has had no weight of its own, and gets one: its path, and name.
    ``apart``: a head and its embedding have weights of their own, and differ from now on at least.
    """

    names: dict[str, str]
    heads: dict[str, tuple[str, str]]
    apart: bool


def plan_of(checkpoint: Checkpoint, shapes: Mapping[str, Sequence[int]], untie: bool) -> Plan:
    """Everything is found and fits, or raises; before anything is written."""
    modules = checkpoint.base.modules
    every = _by_path(checkpoint.base, shapes)
    names = {path: every[path] for path in checkpoint.modules if path in every}
    for path, name in names.items():
        _check_shape(name, shapes[name], modules[path])
    heads: dict[str, tuple[str, str]] = {}
    pairs = {head: each for head, each in _heads(modules).items() if each in every}
    tied_heads = {head: embedding for head, embedding in pairs.items() if head not in every}
    apart = False
    for head, embedding in pairs.items():
        changed = [path for path in (head, embedding) if path in checkpoint.modules]
        if not changed or is_one_change(checkpoint, changed, sharing=2):
            continue
        apart = True
        if head in every:
            continue
        if not untie:
            raise tied(changed[0], (head, embedding))
        heads[every[embedding]] = (head, f"{head}.weight")
    missing = [path for path in checkpoint.modules if path not in names | tied_heads]
    if missing:
        raise AdapterInvalid(
            "the base model has no weight for what the adapter changes",
            where=", ".join(missing[:3]),
            found=", ".join(list(shapes)[:3]),
            expected="the names of the model that the adapter was read for",
            remedy="read the adapter for base_of_files(path)",
        )
    return Plan(names, heads, apart)


def _by_path(base: BaseModel, names: Iterable[str]) -> dict[str, str]:
    """The name of each weight by its module's path in the base.

    Raises:
        AdapterInvalid: two names are of one module.
    """
    known, found = BaseNames(base), dict[str, str]()
    for name in names:
        path: str | None = name.removesuffix(".weight")
        if path not in base.modules:
            path = known.find(path) if path and not name.endswith(".bias") else None
        if path is None:
            continue
        if path in found:
            raise AdapterInvalid("two weights of one module", where=path, found=[found[path], name])
        found[path] = name
    return found


def is_one_change(checkpoint: Checkpoint, paths: Sequence[str], sharing: int) -> bool:
    """Whether all that share a weight are changed alike (PEFT's ``ensure_weight_tying``)."""
    first = checkpoint.delta(paths[0])
    alike = (torch.equal(checkpoint.delta(path), first) for path in paths[1:])
    return len(paths) == sharing and all(alike)


def tied(path: str, shared: Iterable[str]) -> AdapterUnsupported:
    return AdapterUnsupported(
        f"merging into {path}, which shares its weight",
        where=", ".join(shared),
        remedy="untie=True gives the head a weight of its own (PEFT's merge changes both)",
    )
