"""The order of q's and k's rows: rotary embedding by neighbours, and by halves.

Rotary embedding turns the rows of a head in pairs. torchtune pairs row 2i with row 2i + 1 for the
models that came from Meta's code; transformers pairs row i with row i + head_dim / 2. With the
even rows first and then the odd ones, the same pairs turn by the same angles, so that all
attention scores are what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint.pairs import Pair
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["RotaryBase", "evens_then_odds"]

# torchtune's decoders, by transformers' name: whether they pair neighbours.
_PAIRS_NEIGHBOURS = {
    "llama": True,
    "mistral": True,
    "gemma": True,
    "gemma2": True,
    "qwen2": False,
    "qwen3": False,
    "phi3": False,
}
_FUSED = {"phi3": "llama"}
"""Models that transformers fuses: by the one that has the same sizes, apart."""


def evens_then_odds(rows: int, head_dim: int) -> torch.Tensor:
    """Which row, paired by neighbours, comes where when paired by halves.

    Args:
        rows: of all heads together.
        head_dim: rows of one head; even.

    Returns:
        int64 ``[rows]``: ``b[evens_then_odds(...)]`` is B by halves.
    """
    evens = torch.arange(0, head_dim, 2)
    heads = torch.arange(0, rows, head_dim)
    return (heads[:, None] + torch.cat((evens, evens + 1))).flatten()


@dataclass(frozen=True, slots=True)
class RotaryBase:
    """What a base's config tells of its projections. Immutable.

    Args:
        base: the modules as torchtune has them, q, k and v apart.
        fused: as transformers has them, where it has some in one matrix; None: as torchtune.
    """

    base: BaseModel
    head_dim: int
    pairs_neighbours: bool
    fused: BaseModel | None = None

    @classmethod
    def from_config(cls, content: Mapping[str, Any]) -> RotaryBase:
        """From the content of a ``config.json``.

        Raises:
            AdapterInvalid: a field is missing or makes no sense.
            AdapterUnsupported: a model that torchtune lays out in a way not known here.
        """
        model_type = str(content.get("model_type"))
        if model_type not in _PAIRS_NEIGHBOURS:
            raise AdapterUnsupported(
                f"torchtune's LoRA of {model_type:.40}",
                where="model_type of the base's config",
                remedy=f"merge it into the base; known are {', '.join(_PAIRS_NEIGHBOURS)}",
            )
        # torchtune's decoder always has its output layer, whatever the base is loaded as.
        decoder = {key: value for key, value in content.items() if key != "architectures"}
        fused = BaseModel.from_config(decoder) if model_type in _FUSED else None
        base = BaseModel.from_config(decoder | {"model_type": _FUSED.get(model_type, model_type)})
        rows = base.modules["model.layers.0.self_attn.o_proj"].shape[1]
        heads = int(content["num_attention_heads"])
        head_dim = rows // heads
        if head_dim % 2:
            raise AdapterInvalid(
                "the base's heads can't be rotated",
                where="head_dim of the base's config",
                found=head_dim,
                expected="an even number",
            )
        return cls(base, head_dim, _PAIRS_NEIGHBOURS[model_type], fused)

    def check_shape(self, pair: Pair) -> None:
        """Raises `AdapterInvalid` where the base has no such module, or one of another shape."""
        module = self.base.modules.get(pair.module)
        found = (pair.b.shape[0], pair.a.shape[1])
        if module is None or module.shape != found:
            raise AdapterInvalid(
                "the adapter doesn't fit the base's config",
                where=f"{pair.names[0]} ({pair.module})",
                found=f"{found[0]} outputs, {found[1]} inputs",
                expected=f"{module.shape} (out, in)" if module else "a module of the base",
                remedy="is it the config.json of the model that was trained?",
            )

    def in_halves(self, b: torch.Tensor) -> torch.Tensor:
        """B ``[heads · head_dim, rank]`` of q or k in transformers' order."""
        return b[evens_then_odds(b.shape[0], self.head_dim)] if self.pairs_neighbours else b
