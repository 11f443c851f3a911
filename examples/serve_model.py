"""A Llama-family model over paged KV, with LoRA for every row's own adapter.

The weights, the activation and the rotary frequencies are those of the Hugging Face model. What is
written out here is what paging and LoRA change: where keys and values go, how attention finds them,
and a call of `add_lora` behind each group of projections. Projections of one input are one product,
and what lies between is few launches: a step that decodes is read from memory in milliseconds, and
each small kernel in it costs two microseconds more. So where a GPU runs, `_added_and_normed`,
`_rotate_and_store` and `_gated` are a kernel each (serve_fused.py) of what is here in torch.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from adaptercache import AdapterCache, KVLayout
from adaptercache.kernels import LoraBatch, add_lora
from serve_attention import attend
from serve_rows import Rows

__all__ = ["PagedLlama", "kv_layout"]

FAMILIES = ("llama", "mistral", "qwen2")
Sites = Set[tuple[int, str]]
"""Layer and module of the projections that adapters may touch."""


def kv_layout(config: Any, dtype: str) -> KVLayout:
    """Blocks of 16 tokens, or of as many as make a page that adapters can share.

    Raises:
        ValueError: a model whose layers are not those below.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r}: one of {', '.join(FAMILIES)}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError("sliding-window attention is not in this example")
    # transformers 5, and 4.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        raise ValueError("rotary frequencies that change with the length are not in this example")
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    block_size = 16
    while 2 * block_size * config.num_key_value_heads * head_dim % 512:  # see docs/layout.md
        block_size *= 2
    return KVLayout(block_size, config.num_key_value_heads, head_dim, dtype)


class PagedLlama:
    """Computes steps of one model over one cache's arena.

    Args:
        model: a ``transformers`` causal LM of one of `FAMILIES`, on the cache's device.
        cache: with the `kv_layout` of the model.
        max_context: tokens of a sequence at most.
    """

    def __init__(self, model: Any, cache: AdapterCache, max_context: int) -> None:
        self._embed = model.model.embed_tokens
        self._norm = model.model.norm
        self._lm_head = model.lm_head
        sites = {(site.layer, site.module) for site in cache.layout.sites}
        self._layers = [
            _Layer(layer, number, sites) for number, layer in enumerate(model.model.layers)
        ]
        self.device = model.lm_head.weight.device
        self.num_tokens = len(
            self._embed.weight
        )  # that a prompt may have; a tokenizer may know more
        self.vocab_size = len(model.lm_head.weight)
        # [pages, 2, block_size, kv_heads, head_dim], one a layer: views of the arena itself.
        self._kv = [cache.kv_view(layer) for layer in range(len(self._layers))]
        positions = torch.arange(max_context, device=self.device)[None]
        cos, sin = model.model.rotary_emb(self._embed.weight, positions)  # [1, positions, head_dim]
        # Rotating is x · cos + (x with its halves exchanged) · sin, the first half's sin negative.
        first, second = sin[0].chunk(2, dim=-1)
        self._rotary = torch.stack((cos[0], torch.cat((-first, second), dim=-1)), dim=1)

    def __call__(self, rows: Rows, lora: LoraBatch | None) -> Tensor:
        """Logits ``[jobs, vocab]`` of the ``last`` rows. ``lora`` None: nobody has an adapter."""
        x, y = self._embed(rows.tokens), None  # y: what the last part adds to x
        rotary = self._rotary[rows.positions]
        for layer, view in zip(self._layers, self._kv, strict=True):
            x, normed = _added_and_normed(x, y, layer.before_attention)
            y = _attention(layer, view, normed, rotary, rows, lora)
            x, normed = _added_and_normed(x, y, layer.before_mlp)
            y = layer.down(_gated(layer.gate_up(normed, lora), layer.activation), lora)
        _, normed = _added_and_normed(x, y, self._norm)
        return self._lm_head(normed[rows.last])  # type: ignore[no-any-return]


class _Projections:
    """Linear modules that share their input, computed at once, with LoRA on top.

    The modules keep their weights: as views of the one that is read here.
    """

    def __init__(self, parent: Any, names: Sequence[str], layer: int, sites: Sites) -> None:
        modules = [getattr(parent, name) for name in names]
        self.widths = [len(module.weight) for module in modules]
        self._weight, self._bias = modules[0].weight, modules[0].bias
        if len(modules) > 1:
            with torch.inference_mode(False), torch.no_grad():  # others may use the model, too
                self._weight = torch.cat([module.weight for module in modules])
                if self._bias is not None:
                    self._bias = torch.cat([module.bias for module in modules])
            parts = self._weight.split(self.widths)
            for module, part in zip(modules, parts, strict=True):
                module.weight.data = part
        self._layer = layer
        self._is_adapted = [(layer, name) in sites for name in names]
        self._names = tuple(name for name in names if (layer, name) in sites)

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """``[rows, sum of widths]``, the modules side by side."""
        y = linear(x, self._weight, self._bias)
        if lora is not None and self._names:
            parts: Tensor | list[Tensor] = y
            if not all(self._is_adapted):
                parts = list(compress(y.split(self.widths, dim=1), self._is_adapted))
            add_lora(parts, x, lora, self._names, layer=self._layer)
        return y


class _Layer:
    """A decoder layer's modules, by what they are given."""

    def __init__(self, layer: Any, number: int, sites: Sites) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention = layer.input_layernorm
        self.before_mlp = layer.post_attention_layernorm
        self.qkv = _Projections(attention, ("q_proj", "k_proj", "v_proj"), number, sites)
        self.o = _Projections(attention, ("o_proj",), number, sites)
        self.gate_up = _Projections(mlp, ("gate_proj", "up_proj"), number, sites)
        self.down = _Projections(mlp, ("down_proj",), number, sites)
        # By name: transformers has had two classes of it.
        is_silu = mlp.config.hidden_act in ("silu", "swish")
        self.activation = silu if is_silu else mlp.act_fn


def _attention(
    layer: _Layer, view: Tensor, x: Tensor, rotary: Tensor, rows: Rows, lora: LoraBatch | None
) -> Tensor:
    # First all new keys and values go to their blocks: a chunk attends to itself, too.
    q = _rotate_and_store(layer.qkv(x, lora), rotary, view, rows.pages, rows.offsets)
    return layer.o(attend(q, view, rows.tables, rows.positions, rows.tiles), lora)


def _added_and_normed(x: Tensor, y: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """``x + y``, and that normed: ``[rows, width]`` each."""
    if x.is_cuda:
        from serve_fused import add_and_norm  # triton: only where it is used

        return add_and_norm(x, y, norm.weight, norm.variance_epsilon)
    if y is not None:
        x = x + y
    return x, rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotate_and_store(
    qkv: Tensor, rotary: Tensor, view: Tensor, pages: Tensor, offsets: Tensor
) -> Tensor:
    """The queries ``[rows, heads, head_dim]``, rotated to their positions; the keys, rotated, and
    the values are stored at their pages and offsets.

    ``qkv``: of each row, q's heads, then k's, then v's. ``rotary [rows, 2, head_dim]``.
    """
    if qkv.is_cuda:
        from serve_fused import rotate_and_store

        return rotate_and_store(qkv, rotary, view, pages, offsets)
    kv_heads, head_dim = view.shape[3:]
    x = qkv.view(len(qkv), -1, head_dim)
    q, k, v = x[:, : -2 * kv_heads], x[:, -2 * kv_heads : -kv_heads], x[:, -kv_heads:]
    cos, sin = rotary[:, :, None].unbind(1)
    view[pages, 0, offsets] = torch.addcmul(k * cos, k.roll(head_dim // 2, dims=-1), sin)
    view[pages, 1, offsets] = v
    return torch.addcmul(q * cos, q.roll(head_dim // 2, dims=-1), sin)


def _gated(gate_up: Tensor, activation: Any) -> Tensor:
    """``activation(gate) * up``, which stand side by side."""
    if gate_up.is_cuda and activation is silu:
        from serve_fused import silu_and_multiply

        return silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return activation(gate) * up  # type: ignore[no-any-return]
