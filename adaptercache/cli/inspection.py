"""What can be said about an adapter: by its files alone, with its base model, and in a layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import Checkpoint, LoraWeights, ReadOptions, Weights, read_checkpoint
from adaptercache.checkpoint.config import LoraConfig
from adaptercache.checkpoint.files import open_tensors, read_config
from adaptercache.checkpoint.pairs import Pair, check_values, sort_tensors
from adaptercache.cli.bases import base_beside, read_base
from adaptercache.cli.footprint import Footprint
from adaptercache.cli.refusal import Part, Refusal
from adaptercache.errors import AdapterCacheError
from adaptercache.layout import ADAPTER_PAGE_BYTES, ArenaShape, LoraLayout
from adaptercache.packing import pack
from adaptercache.tiers.remote import DirectorySource

__all__ = ["Inspection", "ModuleFacts", "delta_norm", "examine"]

_CONFIG_FACTS = (
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path"),
    *("r", "lora_alpha", "use_rslora"),
)
_LONGEST_FACT = 200


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """One module that has LoRA. What only a base or a layout tells is None without it.

    Args:
        path: the base's own, or the file's without a base.
        kind: as in `BaseModule`.
        rank: None too where only the base tells whether the tensors are a stack of experts.
        a, b: shapes; of experts with the expert first.
        dtypes: of A and B, by torch's names.
        nbytes: of both, in the file's dtypes.
        norm: Frobenius norm of ΔW, scaling included; of experts over all of them. None too where
            it is too large for a float.
        is_served: whether the layout has a place for it.
    """

    path: str
    kind: str | None
    rank: int | None
    scaling: float | None
    a: tuple[int, ...]
    b: tuple[int, ...]
    dtypes: tuple[str, str]
    nbytes: int
    norm: float | None = None
    is_served: bool | None = None


@dataclass(slots=True)
class Inspection:
    """What was found out, as far as the adapter could be read.

    Args:
        path: the adapter's directory.
        base: where the base is read from; None: there is none.
        config: what the adapter's config says, in its own words.
        digest: of the content, in hex.
        published: bytes of the files that a source serves.
        layout: the one that it was tried in.
        footprint: bytes on every tier; None without a base, or where the layout refuses it.
        refusal: what was refused, and by which part; what later parts would say is unknown.
    """

    path: Path
    base: Path | None
    config: dict[str, object] = field(default_factory=dict)
    digest: str | None = None
    modules: list[ModuleFacts] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    published: int | None = None
    layout: dict[str, object] | None = None
    footprint: Footprint | None = None
    refusal: Refusal | None = None

    @property
    def status(self) -> str:
        """``"loads"``, ``"refused"``, or ``"unchecked"``: sound by itself, without a base."""
        if self.refusal is not None:
            return "refused"
        return "loads" if self.base is not None else "unchecked"

    def as_json(self) -> dict[str, object]:
        """The same as values that JSON has; every key is there in every case."""
        footprint = self.footprint
        return {
            "path": str(self.path),
            "status": self.status,
            "config": self.config,
            "base": None if self.base is None else str(self.base),
            "digest": self.digest,
            "modules": [asdict(module) for module in self.modules],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "layout": self.layout,
            "bytes": {
                "tensors": sum(module.nbytes for module in self.modules),
                "remote": self.published,
                "disk": footprint and footprint.disk,
                "host": footprint and footprint.host,
                "gpu": footprint and footprint.gpu,
            },
            "refusal": self.refusal and self.refusal.as_json(),
        }


def examine(
    path: Path,
    base: Path | None,
    options: ReadOptions,
    layout_for: Callable[[BaseModel, Checkpoint], LoraLayout],
) -> Inspection:
    """Reads an adapter as the cache would, and tells how far it got.

    Args:
        base: None: the config.json beside the adapter, if there is one.
        layout_for: the layout to try it in.
    """
    found = Inspection(path, base=base or base_beside(path))
    part: Part = "reader"
    try:
        content = read_config(path)
        found.config = _config_facts(content)
        config = LoraConfig.from_peft(content, ignored_keys=options.ignored_config_keys)
        if found.base is None:
            _read_alone(found, config, options)
            return found
        part = "base"
        model = read_base(found.base)
        part = "reader"
        checkpoint = read_checkpoint(path, model, options=options)
        _describe(found, checkpoint)
        part = "layout"
        _lay_out(found, checkpoint, layout_for(model, checkpoint))
    except AdapterCacheError as error:
        found.refusal = Refusal(part, error)
    return found


def delta_norm(weights: Weights) -> float | None:
    """Frobenius norm of ΔW, from the Gram matrices of A and B: ΔW itself is not formed.

    ‖BA‖² is the sum over (BᵀB) ∘ (AAᵀ), in float64. None where it is beyond a float.
    """
    a, a_size = _unit(weights.a)
    b, b_size = _unit(weights.b)
    square = ((a @ a.mT) * (b.mT @ b)).sum().item()
    norm = weights.scaling * a_size * b_size * math.sqrt(max(0.0, square))
    return norm if math.isfinite(norm) else None


def _unit(tensor: Tensor) -> tuple[Tensor, float]:
    """The tensor in float64 over its largest entry, and that entry."""
    exact = tensor.double()
    largest = float(exact.abs().max())
    return exact / (largest or 1.0), largest


def _config_facts(content: Mapping[str, Any]) -> dict[str, object]:
    """What a config says about itself: plain values as they are, others as bounded text."""
    facts: dict[str, object] = {}
    for key in _CONFIG_FACTS:
        value = content.get(key)
        is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if value is not None:
            facts[key] = value if is_number else str(value)[:_LONGEST_FACT]
    return facts


def _read_alone(found: Inspection, config: LoraConfig, options: ReadOptions) -> None:
    with open_tensors(found.path, options) as stored:
        contents = sort_tensors(stored.outlines)
        for pair in contents.pairs:
            check_values(pair.with_values(stored.read), 1.0)
    found.modules = [_facts_alone(pair, config) for pair in contents.pairs]
    found.skipped = [(name, "a copy of a base weight, not checked") for name in contents.copies]
    found.published = _published(found.path)


def _facts_alone(pair: Pair, config: LoraConfig) -> ModuleFacts:
    rank = pair.a.shape[0]
    is_plain = rank == pair.b.shape[1] == config.rank_of(pair.module)
    return ModuleFacts(
        path=pair.module + ".base_layer" * pair.depth,
        kind=None,
        rank=rank if is_plain else None,
        scaling=config.scaling_of(pair.module, rank) if is_plain else None,
        **_tensor_facts(pair),
    )


def _tensor_facts(holder: Pair | Weights) -> dict[str, Any]:
    a, b = holder.a, holder.b
    return {
        "a": tuple(a.shape),
        "b": tuple(b.shape),
        "dtypes": (_name(a.dtype), _name(b.dtype)),
        "nbytes": a.nbytes + b.nbytes,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(found: Inspection, checkpoint: Checkpoint) -> None:
    found.digest = checkpoint.digest.hex()
    found.modules = [
        ModuleFacts(
            path=path,
            kind=checkpoint.base.modules[path].kind,
            rank=weights.rank,
            scaling=weights.scaling,
            **_tensor_facts(weights),
            norm=delta_norm(weights),
        )
        for path, weights in checkpoint.modules.items()
    ]
    found.skipped = [(entry.name, entry.reason) for entry in checkpoint.skipped]
    found.published = _published(found.path)


def _published(path: Path) -> int:
    """Bytes of the files that a cache would fetch."""
    folder = path.resolve()
    return sum(DirectorySource(folder.parent).files(folder.name, "").values())


def _lay_out(found: Inspection, checkpoint: Checkpoint, layout: LoraLayout) -> None:
    found.layout = {
        "modules": list(layout.modules),
        "layers": layout.num_layers,
        "dtype": layout.dtype,
        "max_rank": layout.max_rank,
    }
    served = {
        path: path in layout.site_of and isinstance(weights, LoraWeights)
        for path, weights in checkpoint.modules.items()
    }
    found.modules = [replace(module, is_served=served[module.path]) for module in found.modules]
    spec, _ = pack(checkpoint, layout)
    arena = ArenaShape.fit(layout, None, ADAPTER_PAGE_BYTES)
    assert found.published is not None, "it was described before"
    found.footprint = Footprint.of(layout, spec, arena, found.published)
