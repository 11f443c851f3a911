"""torchtune's adapters: ``adapter_model.pt``, its own state dict of LoRA.

A ``[r, in]``, B ``[out, r]`` and alpha / r are as in PEFT; the names are not. Nor, for most models,
is the order of q's and k's rows in a head, which is the order that rotary embedding turns in pairs
(rotary.py). So B of q and k can only be read beside the base's config. What transformers has in one
matrix, and torchtune apart, is fused (fusing.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptercache.checkpoint.config import LoraConfig
from adaptercache.checkpoint.files import read_config
from adaptercache.checkpoint.names import Side
from adaptercache.checkpoint.pickle_file import read_pickle
from adaptercache.convert.foreign import (
    ForeignAdapter,
    ForeignName,
    alpha_for,
    checked_pair,
    pair_up,
)
from adaptercache.convert.fusing import fused_pairs
from adaptercache.convert.rotary import RotaryBase
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["read_torchtune"]

_NAME = re.compile(
    r"(?:layers\.(?P<layer>\d+)\.(?P<module>\w+\.\w+)|(?P<output>output))"
    r"\.lora_(?P<side>[ab])\.weight",
    re.ASCII,
)
_MODULES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
_SIDES: dict[str, Side] = {"a": "A", "b": "B"}
_MERGE = "merge it into the base model with torchtune"


def read_torchtune(source: Path, base: Mapping[str, Any] | None) -> ForeignAdapter:
    """Reads the adapter in a directory, into memory: a pickle can't be mapped safely.

    Args:
        base: the content of the base model's ``config.json``, where known.

    Raises:
        AdapterInvalid: a file is missing or broken, or doesn't fit the base.
        AdapterUnsupported: not plain LoRA, a model whose layout isn't known, or q and k without
            the base's config.
    """
    config, named_base = _config(source)
    rotary = RotaryBase.from_config(base) if base is not None else None
    tensors = read_pickle(source / "adapter_model.pt")
    names = pair_up((name, _parse(name)) for name in tensors)
    pairs = []
    for module, (name_a, name_b) in names.items():
        a, b = tensors.pop(name_a), tensors.pop(name_b)
        pair = checked_pair(module, a, b, (name_a, name_b))
        if a.shape[0] != config.rank:
            raise AdapterInvalid(
                "the tensors disagree with the config's rank",
                where=name_a,
                found=f"rank {a.shape[0]} in the tensors",
                expected=f"rank {config.rank} by r",
            )
        if rotary is not None:
            rotary.check_shape(pair)
        if module.endswith(_ROTATED):
            if rotary is None:
                raise _unknown_heads(name_b)
            b = rotary.in_halves(b)
        pairs.append(checked_pair(module, a, b, (name_a, name_b)))
    if rotary is None or rotary.fused is None:
        return ForeignAdapter(tuple(pairs), {config.rank: config.alpha}, named_base)
    fused = fused_pairs(pairs, rotary.fused)
    ranks = {pair.a.shape[0] for pair in fused}
    alphas = {rank: alpha_for(config.alpha / config.rank, rank) for rank in ranks}
    return ForeignAdapter(fused, alphas, named_base)


def _config(source: Path) -> tuple[LoraConfig, str | None]:
    if not (source / "adapter_config.json").is_file():
        raise AdapterInvalid(
            "the adapter has no config, so its alpha is not known",
            where=str(source),
            expected="adapter_config.json",
            remedy='write one: {"r": lora_rank, "lora_alpha": lora_alpha}, as in the recipe',
        )
    content = read_config(source)
    config = LoraConfig.from_peft(content)
    if config.is_rslora or config.rank_patterns or config.alpha_patterns:
        raise AdapterUnsupported(
            "rsLoRA or patterns in a config of torchtune, which has neither",
            where=str(source / "adapter_config.json"),
            remedy="leave r and lora_alpha as the recipe had them",
        )
    base_model = content.get("base_model_name_or_path")
    return config, base_model if isinstance(base_model, str) and base_model else None


def _parse(name: str) -> ForeignName:
    found = _NAME.fullmatch(name)
    if found and found["output"]:
        return ForeignName("lm_head", _SIDES[found["side"]])
    if found and found["module"] in _MODULES:
        path = f"model.layers.{found['layer']}.{_MODULES[found['module']]}"
        return ForeignName(path, _SIDES[found["side"]])
    if name.endswith(".magnitude"):
        raise AdapterUnsupported("DoRA", where=name[:200], remedy=_MERGE)
    raise AdapterUnsupported(
        "a tensor that is no LoRA of torchtune's decoders", where=name[:200], remedy=_MERGE
    )


def _unknown_heads(name: str) -> AdapterUnsupported:
    return AdapterUnsupported(
        "torchtune's q and k without the base's heads, by which their rows are ordered",
        where=name,
        remedy="give the base's config.json (base_config), or put it beside the weights",
    )
