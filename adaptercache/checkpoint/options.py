"""What the reader is allowed, and what it cannot find out from the files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

__all__ = ["DEFAULT_OPTIONS", "ReadOptions"]

_Columns: TypeAlias = Literal["expert_fastest", "expert_slowest"]


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

    Raises:
        TypeError, ValueError: a value that is none of these; a misspelt one would mean another.
    """

    allow_pickle: bool = False
    text_only: bool = False
    expert_columns: _Columns = "expert_fastest"
    ignored_config_keys: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("allow_pickle", "text_only"):
            if type(value := getattr(self, name)) is not bool:
                raise TypeError(f"{name} is {value!r:.80}: True or False")
        if self.expert_columns not in get_args(_Columns):
            known = " or ".join(map(repr, get_args(_Columns)))
            raise ValueError(f"expert_columns is {self.expert_columns!r:.80}: {known}")
        keys: object = self.ignored_config_keys
        is_set = isinstance(keys, (frozenset, set)) and all(isinstance(key, str) for key in keys)
        if not is_set:
            raise TypeError(f"ignored_config_keys is {keys!r:.80}: a frozenset of keys")
        object.__setattr__(self, "ignored_config_keys", frozenset(self.ignored_config_keys))


DEFAULT_OPTIONS = ReadOptions()
