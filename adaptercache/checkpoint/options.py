"""What the reader is allowed, and what it cannot find out from the files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DEFAULT_OPTIONS", "ReadOptions"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read an adapter. The defaults refuse whatever is in doubt.

    Args:
        allow_pickle: read ``adapter_model.bin`` and ``.pt`` when there is no safetensors file,
            through ``torch.load(weights_only=True)``.
        text_only: the base is the text model of a multimodal one: take the language part of the
            adapter and list the rest in ``Checkpoint.skipped``.
        expert_columns: how a stacked ``lora_B`` of MoE experts orders its columns. Nothing in the
            file tells. PEFT writes the expert as the fastest index (``rank * experts + expert``),
            Unsloth and Megatron-Bridge as the slowest (``expert * rank + r``).
        ignored_config_keys: keys unknown to us, of the ``use_...`` or ``..._config`` kind, that you
            know not to change the maths. Features that we know to change it stay refused.
    """

    allow_pickle: bool = False
    text_only: bool = False
    expert_columns: Literal["expert_fastest", "expert_slowest"] = "expert_fastest"
    ignored_config_keys: frozenset[str] = frozenset()


DEFAULT_OPTIONS = ReadOptions()
