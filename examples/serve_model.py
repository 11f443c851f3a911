"""A Llama-family model over paged KV, with LoRA for every row's own adapter.

The weights and the small modules (norms, activation, rotary frequencies) are those of the Hugging
Face model. What is written out here is what paging and LoRA change: where keys and values go, how
attention finds them, and a call of `add_lora` behind each group of projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaptercache import AdapterCache, KVLayout
from adaptercache.kernels import LoraBatch, add_lora
from serve_attention import attend

__all__ = ["Group", "PagedLlama", "Rows", "kv_layout"]

FAMILIES = ("llama", "mistral", "qwen2")


def kv_layout(config: Any, dtype: str) -> KVLayout:
    """Blocks of 16 tokens, or of as many as make a page that adapters can share.

    Raises:
        ValueError: a model whose layers are not those below.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r}: one of {', '.join(FAMILIES)}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError("sliding-window attention is not in this example")
    if config.rope_parameters["rope_type"] not in ("default", "linear", "llama3"):
        raise ValueError("rotary frequencies that change with the length are not in this example")
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    block_size = 16
    while 2 * block_size * config.num_key_value_heads * head_dim % 512:  # see docs/layout.md
        block_size *= 2
    return KVLayout(block_size, config.num_key_value_heads, head_dim, dtype)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose attention is computed at once: ``B`` sequences of ``Q`` new tokens each. All
    that decode are one group with Q = 1; every chunk of a prompt is one with B = 1.

    ``tables [B, blocks]``: the sequences' pages, in order, and any page beyond their end.
    ``positions [B, Q]``: a view of the rows' own.
    """

    tables: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """One step's tokens, flat: ``int64 [rows]`` each, on the device, in the order of ``groups``.

    ``positions`` are those in the sequences; ``pages`` and ``offsets`` say into which block, and
    where in it, each token's keys and values go. ``last [n]``: the rows whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    pages: Tensor
    offsets: Tensor
    last: Tensor
    groups: tuple[Group, ...]


class PagedLlama:
    """Computes steps of one model over one cache's arena.

    Args:
        model: a ``transformers`` causal LM of one of `FAMILIES`, on the cache's device.
        cache: with the `kv_layout` of the model.
        max_context: tokens of a sequence at most.
    """

    def __init__(self, model: Any, cache: AdapterCache, max_context: int) -> None:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        self._rotate = apply_rotary_pos_emb
        self._model = model.model
        self._lm_head = model.lm_head
        self._layers: Sequence[Any] = list(model.model.layers)
        self._sites = {(site.layer, site.module) for site in cache.layout.sites}
        self.device = model.lm_head.weight.device
        # [pages, 2, block_size, kv_heads, head_dim], one a layer: views of the arena itself.
        self._kv = [cache.kv_view(layer) for layer in range(len(self._layers))]
        positions = torch.arange(max_context, device=self.device)[None]
        weight = model.model.embed_tokens.weight
        self._cos, self._sin = (table[0] for table in self._model.rotary_emb(weight, positions))

    def __call__(self, rows: Rows, lora: LoraBatch | None) -> Tensor:
        """Logits ``[n, vocab]`` of the ``last`` rows. ``lora`` None: nobody has an adapter."""
        x = self._model.embed_tokens(rows.tokens)
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        for number, layer in enumerate(self._layers):
            normed = layer.input_layernorm(x)
            x = x + self._attention(number, layer.self_attn, normed, (cos, sin), rows, lora)
            x = x + self._mlp(number, layer.mlp, layer.post_attention_layernorm(x), lora)
        return self._lm_head(self._model.norm(x[rows.last])).float()  # type: ignore[no-any-return]

    def _attention(
        self,
        number: int,
        attn: Any,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        rows: Rows,
        lora: LoraBatch | None,
    ) -> Tensor:
        q, k, v = self._project(
            number, x, lora, q_proj=attn.q_proj, k_proj=attn.k_proj, v_proj=attn.v_proj
        )
        view = self._kv[number]
        q, k, v = (y.view(len(x), -1, view.shape[4]) for y in (q, k, v))
        q, k = self._rotate(q, k, *rotary)
        # First all new keys and values go to their blocks: a chunk attends to itself, too.
        view[rows.pages, 0, rows.offsets] = k
        view[rows.pages, 1, rows.offsets] = v
        sizes = [group.positions.numel() for group in rows.groups]
        outputs = [
            attend(part, view, group.tables, group.positions)
            for part, group in zip(q.split(sizes), rows.groups, strict=True)
        ]
        (y,) = self._project(number, torch.cat(outputs), lora, o_proj=attn.o_proj)
        return y

    def _mlp(self, number: int, mlp: Any, x: Tensor, lora: LoraBatch | None) -> Tensor:
        gate, up = self._project(number, x, lora, gate_proj=mlp.gate_proj, up_proj=mlp.up_proj)
        (y,) = self._project(number, mlp.act_fn(gate) * up, lora, down_proj=mlp.down_proj)
        return y

    def _project(
        self, number: int, x: Tensor, lora: LoraBatch | None, **modules: Any
    ) -> tuple[Tensor, ...]:
        """The base's projections of one input, and LoRA on top: one call for all that share it."""
        outputs = {name: module(x) for name, module in modules.items()}
        names = tuple(name for name in outputs if (number, name) in self._sites)
        if lora is not None and names:
            add_lora([outputs[name] for name in names], x, lora, names, layer=number)
        return tuple(outputs.values())
