"""Adapters made up, in PEFT's format."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from adaptercache.base_model import BaseModel

__all__ = ["random_adapter"]


def random_adapter(
    base: BaseModel,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: Collection[str] = ("q_proj", "v_proj"),
    layers: Collection[int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """An adapter in PEFT's format with random non-zero A and B, as a training run would leave it.

    Args:
        alpha: None: twice the rank.
        targets: leaf names of linear modules.
        layers: decoder layers that carry it; None: all.

    Returns:
        ``(tensors, config)``: what `AdapterCache.put` takes, and what goes into
        ``adapter_model.safetensors`` and ``adapter_config.json``.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, module in base.modules.items():
        parts = path.split(".")
        layer = next((int(part) for part in parts if part.isdigit()), None)
        if module.kind != "linear" or parts[-1] not in targets or layer is None:
            continue
        if layers is not None and layer not in layers:
            continue
        out_features, in_features = module.shape
        a = torch.randn(rank, in_features, generator=generator) / in_features**0.5
        b = torch.randn(out_features, rank, generator=generator) / rank**0.5
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.to(dtype)
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
    }
    return tensors, config
