"""The families of models that are laid out from their config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from adaptercache.base_module import LARGEST_SIZE, MOST_LAYERS, BaseModule, broken_base

__all__ = ["modules_by_config"]


def modules_by_config(model_type: str, content: Mapping[str, Any]) -> dict[str, BaseModule] | None:
    """The weight matrices by path; None: a family, or a head, that isn't built in.

    Raises:
        AdapterInvalid: a field is missing or makes no sense.
    """
    family, head = _FAMILIES.get(model_type), _head_of(content)
    if family is None or head is None:
        return None
    return dict(_decoder(_Fields(content), family, head))


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model class assumes where its config is silent; None: the field is required."""

    head_dim: int | None = None
    defaults_to_full_heads: bool = False
    fused: bool = False


_FAMILIES = {
    "llama": _Family(defaults_to_full_heads=True),
    "mistral": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(head_dim=128),
    "gemma": _Family(head_dim=256),
    "gemma2": _Family(head_dim=256),
    "gemma3_text": _Family(head_dim=256),
    "phi3": _Family(defaults_to_full_heads=True, fused=True),
}

_Head: TypeAlias = Literal["lm_head", "score", "none"]


def _head_of(content: Mapping[str, Any]) -> _Head | None:
    """What the architecture puts on top of the decoder; None: something that isn't built in."""
    names = content.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "ForCausalLM"
    heads: dict[str, _Head] = {
        "ForCausalLM": "lm_head",
        "ForSequenceClassification": "score",
        "Model": "none",
    }
    return next((head for ending, head in heads.items() if name.endswith(ending)), None)


class _Fields:
    """The numbers of a config, checked as they are read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def number(self, key: str, default: int | None = None, most: int = LARGEST_SIZE) -> int:
        value = self._content.get(key)
        if value is None:
            value = default
        if type(value) is not int or not 0 < value <= most:
            raise broken_base(key, value, f"a positive integer up to {most}")
        return value

    def labels(self) -> int:
        names = self._content.get("id2label")
        return len(names) if isinstance(names, Mapping) and names else self.number("num_labels", 2)


def _decoder(fields: _Fields, family: _Family, head: _Head) -> Iterator[tuple[str, BaseModule]]:
    hidden, vocabulary = fields.number("hidden_size"), fields.number("vocab_size")
    body = "" if head == "none" else "model."
    yield f"{body}embed_tokens", BaseModule("embedding", (vocabulary, hidden))
    layer = _decoder_layer(fields, family)
    for index in range(fields.number("num_hidden_layers", most=MOST_LAYERS)):
        for name, shape in layer.items():
            yield f"{body}layers.{index}.{name}", BaseModule("linear", shape)
    # lm_head is a module of its own even where its weight is tied to embed_tokens.
    if head == "lm_head":
        yield "lm_head", BaseModule("linear", (vocabulary, hidden))
    elif head == "score":
        yield "score", BaseModule("linear", (fields.labels(), hidden))


def _decoder_layer(fields: _Fields, family: _Family) -> dict[str, tuple[int, int]]:
    hidden, inner = fields.number("hidden_size"), fields.number("intermediate_size")
    heads = fields.number("num_attention_heads")
    kv_heads = fields.number(
        "num_key_value_heads", heads if family.defaults_to_full_heads else None
    )
    head_dim = fields.number("head_dim", family.head_dim or hidden // heads)
    q, kv = heads * head_dim, kv_heads * head_dim
    if family.fused:
        return {
            "self_attn.qkv_proj": (q + 2 * kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_up_proj": (2 * inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
