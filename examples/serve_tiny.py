"""A tiny random Llama, a tokenizer of bytes, and made-up adapters: all that a first run needs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from adaptercache import BaseModel
from adaptercache.testing import random_adapter

__all__ = ["ByteTokenizer", "make_adapter", "make_adapters", "tiny_model"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
RANKS = (1, 2, 3, 4, 8, 8, 16, 16, 24, 32, 32, 40, 48, 64, 64, 64)
END = 256


class ByteTokenizer:
    """A token a byte of UTF-8, and one for the end."""

    def __len__(self) -> int:
        return END + 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return bytes(token for token in token_ids if token < END).decode(errors="replace")


def tiny_model(seed: int = 0) -> Any:
    """Llama's shape, as small as two cores like it; weights large enough that tokens vary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=END + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def make_adapter(folder: Path, base: BaseModel, number: int, seed: int = 0) -> None:
    """One of many: ranks 1 to 64, attention or all modules, every fourth with rsLoRA's scaling,
    every fifth with patterns of rank and alpha."""
    rank = RANKS[number % len(RANKS)]
    targets = ATTENTION if number % 3 == 2 else ALL_LINEAR
    options: dict[str, Any] = {"targets": targets, "seed": seed * 1009 + number}
    options["dtype"] = torch.float32
    rng = random.Random(f"{seed} {number}")
    tensors, config = random_adapter(base, rank=rank, alpha=rank * rng.choice((0.5, 1)), **options)
    if number % 5 == 4:
        other = 1 + rank // 2
        tensors |= _only(random_adapter(base, rank=other, **options)[0], "q_proj")
        config |= {"rank_pattern": {"q_proj": other}, "alpha_pattern": {"q_proj": 1.5 * other}}
    config["use_rslora"] = number % 4 == 3
    if config["use_rslora"]:
        config["lora_alpha"] = rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def make_adapters(root: Path, base: BaseModel, count: int, seed: int = 0) -> list[str]:
    """``count`` adapters that all differ, in PEFT's format; returns their ids."""
    ids = [f"adapter-{number:02d}" for number in range(count)]
    for number, adapter_id in enumerate(ids):
        make_adapter(root / adapter_id, base, number, seed)
    return ids


def _only(tensors: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if f".{module}." in name}
