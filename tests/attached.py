"""Adapters of a tiny model as PEFT saves them, a cache of them, and PEFT's own answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import trips
from torch import Tensor

from adaptercache import AdapterCache, LoraLayout
from adaptercache.integrations.transformers import attach

__all__ = [
    "Peft",
    "attached",
    "cache_of",
    "logits_by_row",
    "options_of",
    "padded",
    "prompts",
    "save",
]

RANKS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 31, 32, 40, 48, 64)


def options_of(family: str, index: int) -> dict[str, Any]:
    """LoRA options of the adapter with that number: all ranks, a third rsLoRA, a third patterns."""
    names = sorted({path.rpartition(".")[2] for path in _linear(family)})
    rank = RANKS[index % len(RANKS)]
    options: dict[str, Any] = {
        "r": rank,
        "lora_alpha": 2 * rank if index % 3 != 1 else 6,
        "use_rslora": index % 3 == 1,
        "target_modules": "all-linear" if index % 2 else names[index % len(names) :][:2],
        "fan_in_fan_out": family == "gpt2",
    }
    if index % 3 == 2:
        options["target_modules"] = names
        options["rank_pattern"] = {names[0]: 1 + rank // 2, rf".*\.1\..*{names[-1]}": 3}
        options["alpha_pattern"] = {names[-1]: 5.0}
        options["layers_to_transform"] = [0, 1] if index % 4 else [1]
    return options


def _linear(family: str) -> list[str]:
    model = trips.base_model(family)
    found = [name for name, module in model.named_modules() if isinstance(module, trips.LINEAR)]
    return [name for name in found if name != "lm_head"]


def save(root: Path, family: str, indices: Iterable[int], **more: Any) -> list[str]:
    """Adapters ``a0``, ``a1``, … in folders of ``root``."""
    names = []
    for index in indices:
        trips.save(root / f"a{index}", family, options_of(family, index), seed=index, **more)
        names.append(f"a{index}")
    return names


def cache_of(model: Any, root: Path, **options: Any) -> AdapterCache:
    layout = LoraLayout.from_model(model, max_rank=64)
    options = {
        "gpu_bytes": 16 << 20,
        "gpu_slots": 16,
        "host_bytes": 16 << 20,
        "host_block_bytes": 4096,
        "device": "cpu",
    } | options
    return AdapterCache(layout, root, **options)


@contextmanager
def attached(family: str, root: Path, **options: Any) -> Iterator[tuple[Any, AdapterCache]]:
    """A model of its own with the adapters of ``root``."""
    model = trips.base_model(family)
    with cache_of(model, root, **options) as cache, attach(model, cache):
        yield model, cache


class Peft:
    """What PEFT computes, for one request at a time."""

    def __init__(
        self, family: str, root: Path, names: Iterable[str], dtype: torch.dtype = torch.float32
    ) -> None:
        first, *others = names
        base = trips.base_model(family, dtype)
        with trips.quiet():
            options = {"autocast_adapter_dtype": False}
            self.model = peft.PeftModel.from_pretrained(base, root / first, first, **options)
            for name in others:
                self.model.load_adapter(root / name, name, **options)
            self.model.eval()

    @contextmanager
    def of(self, name: str | None) -> Iterator[Any]:
        if name is None:
            with self.model.disable_adapter():
                yield self.model
        else:
            self.model.set_adapter(name)
            yield self.model

    def generate(self, prompt: Tensor, name: str | None, **options: Any) -> Tensor:
        """``prompt [tokens]``; returns the tokens after it, a row a returned sequence."""
        with self.of(name) as model:
            mask = torch.ones_like(prompt[None])
            tokens = model.generate(input_ids=prompt[None], attention_mask=mask, **options)
        return tokens[:, len(prompt) :]

    def logits(self, ids: Tensor, name: str | None) -> Tensor:
        with self.of(name) as model, torch.no_grad():
            return model(input_ids=ids[None]).logits[0]


def logits_by_row(reference: Peft, ids: Tensor, names: Iterable[str | None]) -> Tensor:
    return torch.stack([reference.logits(*pair) for pair in zip(ids, names, strict=True)])


def prompts(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    return [torch.randint(6, 67, (length,), generator=generator) for length in lengths]


def padded(rows: Iterable[Tensor]) -> Mapping[str, Tensor]:
    """On the left, as `generate` wants it."""
    rows = list(rows)
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, longest - len(tokens) :] = tokens
        mask[row, longest - len(tokens) :] = 1
    return {"input_ids": ids, "attention_mask": mask}
