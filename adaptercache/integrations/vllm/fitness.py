"""What vLLM would refuse, apply otherwise than PEFT, or silently leave out: refused before it.

vLLM takes an adapter's tensors by name. Where one finds no module it serves the base model, with a
debug line at most. So every name has to be the very path of a module that vLLM gives LoRA.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from adaptercache.checkpoint import Checkpoint, LoraWeights
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["Fitness"]

_PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_LANGUAGE_PARTS = frozenset({"layers", "embed_tokens", "lm_head"})
_ROOTS = frozenset({"model", "language_model", "text_model"})


class Fitness:
    """Asked by `AdapterFiles` about every adapter, before vLLM is told of it. Thread-safe.

    Args:
        lora: vLLM's ``LoRAConfig``.
        model: vLLM's ``ModelConfig``.
    """

    def __init__(self, lora: Any, model: Any) -> None:
        self._lora = lora
        text = model.hf_config.get_text_config()
        self._longest = getattr(text, "max_position_embeddings", None)
        sees = text is not model.hf_config
        self._language_only = sees and not getattr(lora, "enable_tower_connector_lora", False)
        self._targets = self._target_names(getattr(lora, "target_modules", None))

    @staticmethod
    def _target_names(targets: list[str] | None) -> frozenset[str] | None:
        if targets is None:
            return None
        parts = [part for target in targets for part in _PACKED.get(target, ())]
        return frozenset([*targets, *parts])

    def __call__(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Raises AdapterUnsupported."""
        self._check_rank(checkpoint)
        peft = self._config(folder)
        for name in checkpoint.consumed:
            self._check_tensor(name, checkpoint, peft)

    def _config(self, folder: Path) -> PEFTHelper:
        """The adapter's config as vLLM reads it."""
        try:
            peft = PEFTHelper.from_local_dir(str(folder), self._longest)
            peft.validate_legal(self._lora)
        except (ValueError, TypeError) as error:
            raise AdapterUnsupported(f"by vLLM: {error}", where="adapter_config.json") from error
        return peft

    def _check_rank(self, checkpoint: Checkpoint) -> None:
        if checkpoint.max_rank > self._lora.max_lora_rank:
            raise AdapterUnsupported(
                f"rank {checkpoint.max_rank}, above vLLM's {self._lora.max_lora_rank}",
                remedy=f"start vLLM with --max-lora-rank {checkpoint.max_rank} or more",
            )

    def _check_tensor(self, name: str, checkpoint: Checkpoint, peft: PEFTHelper) -> None:
        try:
            path, _ = parse_fine_tuned_lora_name(name)
        except ValueError as error:
            raise _names(name) from error
        modules = checkpoint.base.modules
        plain = path.removesuffix(".base_layer")
        if plain not in modules and not any(own.startswith(f"{plain}.") for own in modules):
            raise _names(name)
        self._check_place(path)
        weights = checkpoint.modules.get(path)
        if isinstance(weights, LoraWeights):
            rank, scaling = peft.get_rank_and_scaling(path)
            if rank != weights.rank or not math.isclose(scaling, weights.scaling, rel_tol=1e-5):
                raise AdapterUnsupported(
                    "patterns that vLLM reads otherwise than PEFT did",
                    where=path,
                    remedy="write patterns that fit the end of a path and nothing else",
                )

    def _check_place(self, path: str) -> None:
        """Whether vLLM gives that module LoRA."""
        leaf = path.rpartition(".")[2]
        if self._targets is not None and self._targets.isdisjoint((leaf, path)):
            raise AdapterUnsupported(
                f"LoRA of {leaf}, which vLLM was told to leave out",
                where=path,
                remedy="start vLLM with it in --lora-target-modules, or without that option",
            )
        parts = path.split(".")
        while len(parts) > 1 and parts[0] in _ROOTS:
            del parts[0]
        if self._language_only and parts[0] not in _LANGUAGE_PARTS:
            raise AdapterUnsupported(
                "LoRA beside the language model",
                where=path,
                remedy="start vLLM with --enable-tower-connector-lora, if it can for this model",
            )


def _names(name: str) -> AdapterInvalid:
    return AdapterInvalid(
        "a tensor's name is not one that vLLM finds the module by",
        where=name,
        expected="base_model.model.<path in the base model>.lora_A.weight, or lora_B",
        remedy="save it again with PEFT, from this base model without wrappers",
    )
