"""The adapters of a run, on disk in PEFT's own format: made up, or the user's."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from adaptercache import DirectorySource, KVLayout, LoraLayout
from adaptercache.base_model import BaseModel
from adaptercache.testing import random_adapter

__all__ = ["Library", "make_library", "open_library"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
RANKS = (4, 8, 16, 32, 64)

BASE_CONFIG: Mapping[str, Any] = {  # Llama's shape, small enough for two cores
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Library:
    """A directory with a folder an adapter, and the config of the base model that they are for."""

    root: Path
    config: Mapping[str, Any]
    ids: tuple[str, ...]
    max_rank: int
    weight_bytes: int

    def layout(self, dtype: str | None) -> LoraLayout:
        """For all linear modules; ``dtype`` None: the base model's."""
        return LoraLayout.from_config(self.config, max_rank=self.max_rank, dtype=dtype)

    def kv_layout(self, layout: LoraLayout) -> KVLayout:
        """KV blocks of 16 tokens, or of as many as adapters can share pages with."""
        text = self.config.get("text_config") or self.config
        heads = text["num_attention_heads"]
        kv_heads = text.get("num_key_value_heads") or heads
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        block_size = 16
        while (2 * block_size * kv_heads * head_dim) % 512:
            block_size += 16
        return KVLayout(block_size, kv_heads, head_dim, layout.dtype)


def make_library(root: Path, count: int, seed: int) -> Library:
    """Make up ``count`` adapters: ranks 4 to 64, half attention-only and half all-linear, with
    random A and B, every fourth with rsLoRA's scaling."""
    base = BaseModel.from_config(BASE_CONFIG)
    order = random.Random(seed)
    for number in range(count):
        rank = RANKS[number % len(RANKS)]
        tensors, config = random_adapter(
            base,
            rank=rank,
            alpha=rank * order.choice((0.5, 1.0, 2.0)),
            targets=order.choice((ATTENTION, ALL_LINEAR)),
            seed=seed * 1_000_003 + number,
        )
        config["use_rslora"] = number % 4 == 3
        folder = root / f"adapter-{number:04d}"
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(json.dumps(config, indent=2))
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return _library(root, BASE_CONFIG)


def open_library(root: Path, config: Path) -> Library:
    """The user's own: every folder under ``root`` with an ``adapter_config.json`` is one.

    Raises:
        ValueError: there are none, or ``config`` is not a model's config.json.
    """
    content = json.loads((config / "config.json" if config.is_dir() else config).read_text())
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f"{config} is not the config.json of a base model")
    library = _library(root, content)
    if not library.ids:
        raise ValueError(f"no folder under {root} has an {CONFIG}")
    return library


def _library(root: Path, config: Mapping[str, Any]) -> Library:
    ids = tuple(sorted(DirectorySource(root).ids()))
    weights = [root / adapter_id / WEIGHTS for adapter_id in ids]
    return Library(
        root,
        config,
        ids,
        max_rank=max((_max_rank(root / adapter_id / CONFIG) for adapter_id in ids), default=1),
        weight_bytes=sum(path.stat().st_size for path in weights if path.is_file()),
    )


def _max_rank(config: Path) -> int:
    """The largest rank that an adapter declares; 1 where the cache will refuse it anyway."""
    try:
        content = json.loads(config.read_text())
        return max(1, int(content["r"]), *map(int, (content.get("rank_pattern") or {}).values()))
    except (ValueError, TypeError, KeyError, AttributeError):
        return 1
