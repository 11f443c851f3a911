"""MLX-LM's adapters: ``adapters.safetensors`` beside a config with ``lora_parameters``.

A linear layer computes ``y + scale · (x lora_a) lora_b``, so lora_a ``[in, r]`` is Aᵀ and lora_b
``[r, out]`` is Bᵀ; an embedding's lora_a ``[vocabulary, r]`` likewise. Stacked experts are not
transposed: lora_a ``[E, r, in]``, lora_b ``[E, out, r]``. The scale is used as it is, whatever the
rank. Module paths are transformers' own, but for the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from adaptercache.checkpoint.files import read_config
from adaptercache.checkpoint.names import Side
from adaptercache.checkpoint.pairs import Pair
from adaptercache.checkpoint.safetensors_file import open_safetensors
from adaptercache.convert.foreign import (
    ForeignAdapter,
    ForeignName,
    alpha_for,
    checked_pair,
    pair_up,
)
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["read_mlx"]

_SIDES: dict[str, Side] = {"lora_a": "A", "lora_b": "B"}
_LARGEST_FLOAT32 = 3.4e38
_MERGE = "fuse it into the base model (mlx_lm.fuse)"

# The places of stacked experts whose names in transformers are known.
_EXPERTS = re.compile(r"(.+\.(mlp|block_sparse_moe))\.switch_mlp\.(gate_proj|up_proj|down_proj)")
_MIXTRAL_LEAVES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

# Models that MLX-LM loads with constants multiplied into the weights: LoRA beside such a weight
# isn't LoRA beside the original.
_RESCALED = ("falcon_h1",)


def read_mlx(source: Path, base: Mapping[str, Any] | None) -> ForeignAdapter:
    """Reads the adapter in a directory; into memory.

    Args:
        base: the content of the base model's ``config.json``, where known.

    Raises:
        AdapterInvalid: a file is missing or broken.
        AdapterUnsupported: not plain LoRA, or not to be carried over.
    """
    config = read_config(source)
    scale = _scale(config)
    _refuse_rescaled(config, base)
    with open_safetensors(source / "adapters.safetensors") as stored:
        tensors = stored.read_all()
    names = pair_up((name, _parse(name)) for name in tensors)
    pairs = tuple(
        pair
        for module, (a, b) in names.items()
        for pair in _pairs(module, tensors[a], tensors[b], (a, b), base)
    )
    ranks = {pair.a.shape[0] for pair in pairs}
    return ForeignAdapter(pairs, {rank: alpha_for(scale, rank) for rank in ranks})


def _scale(config: Mapping[str, Any]) -> float:
    kind = config.get("fine_tune_type", "lora")
    if kind == "dora" or config.get("use_dora"):
        raise _dora("fine_tune_type")
    if kind != "lora":
        feature = "a full fine-tune" if kind == "full" else f"fine_tune_type {kind!r:.40}"
        raise AdapterUnsupported(
            feature, where="fine_tune_type", remedy="serve its weights as a model of their own"
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        raise _broken("lora_parameters", parameters, "an object with rank and scale")
    alpha, rank = parameters.get("alpha"), parameters.get("rank")
    if alpha is not None and alpha != rank:
        # Early releases multiplied by scale · alpha / rank, later ones ignore alpha.
        raise AdapterUnsupported(
            "lora_parameters with both scale and alpha, which releases read differently",
            where="lora_parameters.alpha",
            remedy="set scale to the factor that it was trained with, and remove alpha",
        )
    scale = parameters.get("scale")
    if isinstance(scale, (int, float)) and scale is not True and 0 < scale < _LARGEST_FLOAT32:
        return float(scale)
    raise _broken("lora_parameters.scale", scale, "a positive finite number")


def _refuse_rescaled(config: Mapping[str, Any], base: Mapping[str, Any] | None) -> None:
    # Without the base's config, its name is all there is to go by.
    known = str(base.get("model_type") if base else config.get("model")).lower()
    plain = re.sub(r"[-_ ]", "", known)
    for model in _RESCALED:
        if model.replace("_", "") in plain:
            raise AdapterUnsupported(
                f"MLX-LM's LoRA of {model}, whose weights it rescales", where=known, remedy=_MERGE
            )


def _parse(name: str) -> ForeignName:
    module, _, leaf = name.rpartition(".")
    if module and leaf in _SIDES:
        return ForeignName(module, _SIDES[leaf])
    if leaf == "m":
        raise _dora(name[:200])
    raise AdapterUnsupported("a tensor that is no LoRA", where=name[:200], remedy=_MERGE)


def _pairs(
    module: str,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    names: tuple[str, str],
    base: Mapping[str, Any] | None,
) -> Iterator[Pair]:
    if lora_b.dim() == 3:
        yield from _expert_pairs(module, lora_a, lora_b, names)
        return
    if lora_a.dim() != 2 or lora_b.dim() != 2:
        raise AdapterUnsupported(
            "LoRA tensors of this form",
            where=f"{names[0]} {tuple(lora_a.shape)}, {names[1]} {tuple(lora_b.shape)}",
            remedy=_MERGE,
        )
    is_embedding = module.rpartition(".")[2] == "embed_tokens"
    yield checked_pair(module, lora_a.T, lora_b.T, names, is_embedding=is_embedding)
    if is_embedding and _is_tied(base, module):
        # MLX-LM's output layer is then this same module; transformers' is one of its own, with
        # the transposed matrix.
        head = module.removesuffix("embed_tokens").removesuffix("model.") + "lm_head"
        yield checked_pair(head, lora_b, lora_a, (names[1], names[0]))


def _is_tied(base: Mapping[str, Any] | None, module: str) -> bool:
    content = base or {}
    text = content.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
    is_tied = content.get("tie_word_embeddings", inner)
    if not isinstance(is_tied, bool):
        raise AdapterUnsupported(
            "LoRA of embeddings, where the output layer may be tied to them",
            where=module,
            remedy="give the base's config.json (base_config), with tie_word_embeddings in it",
        )
    return is_tied


def _expert_pairs(
    module: str, lora_a: torch.Tensor, lora_b: torch.Tensor, names: tuple[str, str]
) -> Iterator[Pair]:
    place = _EXPERTS.fullmatch(module)
    if place is None:
        raise AdapterUnsupported(
            "LoRA of experts at a place that is not known in transformers",
            where=module,
            remedy=_MERGE,
        )
    parent, block, leaf = place.groups()
    leaf = _MIXTRAL_LEAVES[leaf] if block == "block_sparse_moe" else leaf
    experts, _, rank = lora_b.shape
    if lora_a.dim() == 2 and lora_a.shape[0] == experts * rank:  # until October 2025
        lora_a = lora_a.unflatten(0, (experts, rank))
    if lora_a.dim() != 3 or lora_a.shape[0] != experts:
        raise AdapterInvalid(
            "the experts' lora_a and lora_b don't fit each other",
            where=module,
            found=f"lora_a {tuple(lora_a.shape)}, lora_b {tuple(lora_b.shape)}",
            expected="lora_a [experts, rank, in], lora_b [experts, out, rank]",
        )
    for expert in range(experts):
        path = f"{parent}.experts.{expert}.{leaf}"
        yield checked_pair(path, lora_a[expert], lora_b[expert], names)


def _dora(where: str) -> AdapterUnsupported:
    return AdapterUnsupported("DoRA", where=where, remedy=_MERGE)


def _broken(where: str, found: object, expected: str) -> AdapterInvalid:
    return AdapterInvalid(
        "the adapter's config is broken", where=where, found=f"{found!r:.80}", expected=expected
    )
