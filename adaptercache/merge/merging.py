"""W + ΔW for every weight that an adapter changes, in float32, rounded once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import overload

from torch import Tensor

from adaptercache.checkpoint import Checkpoint
from adaptercache.merge.files import merge_files
from adaptercache.merge.places import is_one_change, plan_of, tied
from adaptercache.merge.weights import added, check_dtype, weight_of_head

__all__ = ["merge"]


@overload
def merge(
    checkpoint: Checkpoint, base: Mapping[str, Tensor], *, untie: bool = False
) -> dict[str, Tensor]: ...
@overload
def merge(
    checkpoint: Checkpoint,
    base: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    untie: bool = False,
) -> Path: ...
def merge(
    checkpoint: Checkpoint,
    base: Mapping[str, Tensor] | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    untie: bool = False,
) -> dict[str, Tensor] | Path:
    """The base model with the adapter in its weights.

    Each changed weight is computed in float32 (float64 where the base is) and rounded once to the
    base's dtype. Nothing is written to the base.

    Args:
        checkpoint: the adapter, read for this base (`base_of_files` where ``base`` is a path).
        base: a state dict by the model's own names; or its safetensors files, as a directory or
            one file.
        output: where ``base`` is a path: the directory to write, whole or not at all. Shards and
            index keep their names; one tensor at a time is in memory. Configs and tokenizers come
            along.
        untie: where the adapter changes an embedding or the head that shares its weight, give the
            head a weight of its own, and say so in the config.

    Returns:
        A new state dict that shares the unchanged tensors; or ``output``.

    Raises:
        AdapterInvalid: the base lacks a weight of the adapter, or has another shape there.
        AdapterUnsupported: a quantised weight, or one that embedding and head share without
            ``untie`` (PEFT's own merge changes both).
        FileExistsError: ``output`` exists.
    """
    if isinstance(base, Mapping):
        return _merge_state_dict(checkpoint, base, untie)
    if output is None:
        raise TypeError("merge(checkpoint, path) needs output: the directory to write")
    return merge_files(checkpoint, Path(base), Path(output), untie)


def _merge_state_dict(
    checkpoint: Checkpoint, base: Mapping[str, Tensor], untie: bool
) -> dict[str, Tensor]:
    plan = plan_of(checkpoint, {name: tensor.shape for name, tensor in base.items()}, untie)
    for name in plan.names.values():
        dtype = base[name].dtype
        check_dtype(name, str(dtype), dtype.is_floating_point and dtype.itemsize >= 2)
    if not untie:
        _check_sharing(checkpoint, plan.names, base)
    merged = dict(base)
    for name, (head, head_name) in plan.heads.items():
        merged[head_name] = weight_of_head(checkpoint, head, base[name])
    for path, name in plan.names.items():
        merged[name] = added(checkpoint, path, base[name])
    return merged


def _check_sharing(
    checkpoint: Checkpoint, names: Mapping[str, str], base: Mapping[str, Tensor]
) -> None:
    """No weight that is changed has a second name under which it stays, or becomes another."""
    places: dict[tuple[int, int], list[str]] = {}
    for name, tensor in base.items():
        if tensor.numel() and tensor.device.type != "meta":
            places.setdefault((tensor.data_ptr(), tensor.numel()), []).append(name)
    paths = {name: path for path, name in names.items()}
    for shared in places.values():
        changed = [paths[name] for name in shared if name in paths]
        if len(shared) > 1 and changed and not is_one_change(checkpoint, changed, len(shared)):
            raise tied(changed[0], shared)
