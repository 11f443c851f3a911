"""From a tensor's name in the file to the module of the base model that it belongs to.

Trainers save from wrapped models, and one language model has several paths, depending on the
model class and the release that it was trained in. So the names of the file and those of the base
are both brought into one form, in which wrappers and the place of the language model are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.errors import AdapterInvalid

__all__ = ["BaseCopy", "BaseNames", "LoraName", "canonical", "parse_name"]

_LONGEST_NAME = 512
MOST_NAMES = 1 << 14  # kept: one base's adapters have the same ones; at worst some 20 MB
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ROOTS = frozenset({"model", "language_model", "text_model", "transformer", "thinker", "backbone"})
_LANGUAGE_PARTS = frozenset({"layers", "embed_tokens", "lm_head"})
_RENAMED = {"block_sparse_moe": "mlp"}  # Mixtral, before transformers 5
_MIXTRAL_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

Side: TypeAlias = Literal["A", "B"]

_SIDES: dict[str, Side] = {
    "lora_A": "A",
    "lora_B": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
}


@dataclass(frozen=True, slots=True)
class LoraName:
    """The name of a LoRA tensor, taken apart.

    Args:
        module: the path that PEFT knew the module by.
        side: which of the two matrices.
        is_embedding: it is one of ``lora_embedding_A`` and ``_B``.
        depth: how many ``base_layer`` stand between the module and the tensor. Where PEFT adapts
            several parameters of one module, the inner ones lie deeper.
        wrapped: the path with the wrappers that stand in it, if any: PEFT knew the module by that
            if it was wrapped before (a compiled base), and not if later (FSDP).
    """

    module: str
    side: Side
    is_embedding: bool
    depth: int
    wrapped: str = ""


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """The name of a copy of a base weight, as PEFT saves beside LoRA of embeddings."""

    module: str


@lru_cache(MOST_NAMES)
def parse_name(name: str) -> LoraName | BaseCopy | None:
    """A tensor's name without its wrappers and prefixes; None: not a name of LoRA.

    Raises:
        AdapterInvalid: longer than any path of a module.
    """
    if len(name) > _LONGEST_NAME:
        raise AdapterInvalid(
            "a tensor's name is too long",
            where=f"{name[:80]}...",
            found=f"{len(name)} characters",
            expected=f"at most {_LONGEST_NAME}",
        )
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts[:2] == ["base_model", "model"]:
        del parts[:2]
    if parts[-2:] == ["base_layer", "weight"]:
        return BaseCopy(".".join(parts[:-2]))
    is_embedding = any(part.startswith("lora_embedding_") for part in parts[-2:])
    if not is_embedding and (not parts or parts.pop() != "weight"):
        return None
    if parts and parts[-1] == "default":
        parts.pop()
    if len(parts) < 2 or parts[-1] not in _SIDES:
        return None
    side = _SIDES[parts.pop()]
    depth = 0
    while parts and parts[-1] == "base_layer":
        parts.pop()
        depth += 1
    module = ".".join(parts)
    return LoraName(module, side, is_embedding, depth, _with_wrappers(name, module))


def _with_wrappers(name: str, module: str) -> str:
    """The module's path as it stands in a name; "" where that is the same."""
    parts = name.split(".")
    if _WRAPPERS.isdisjoint(parts):
        return ""
    ends = [at + 2 for at in range(len(parts)) if parts[at : at + 2] == ["base_model", "model"]]
    parts = parts[ends[-1] if ends else 0 :]
    while sum(part not in _WRAPPERS for part in parts) > module.count(".") + 1:
        parts.pop()
    wrapped = ".".join(parts)
    return wrapped if wrapped != module else ""


@lru_cache(MOST_NAMES)
def canonical(path: str) -> str:
    """A module's path in the one form that all releases and wrappers share."""
    parts = [_RENAMED.get(part, part) for part in path.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _ROOTS:
        del parts[0]
    if parts[:2] == ["vision_tower", "vision_model"]:
        del parts[1]
    if parts[-1:] == ["linear"]:  # a clipped linear layer keeps its matrix one level down
        del parts[-1]
    if parts[-3:-2] == ["experts"]:
        parts[-1] = _MIXTRAL_EXPERTS.get(parts[-1], parts[-1])
    return ".".join(parts)


class BaseNames:
    """The base model's paths, found by any of their forms. Immutable."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._by_form: dict[str, list[str]] = {}
        self._stacked: dict[str, dict[str, BaseModule]] = {}
        self._bare_matrices: dict[str, list[str]] = {}
        self._experts: dict[str, dict[str, list[BaseModule]]] = {}
        for path, module in base.modules.items():
            form = canonical(path)
            parent, _, leaf = form.rpartition(".")
            owner, _, number = parent.rpartition(".")
            self._by_form.setdefault(form, []).append(path)
            if module.kind == "parameter" and len(module.shape) == 3:
                self._stacked.setdefault(parent, {})[path] = module
            elif number.isdecimal() and owner.endswith("experts"):
                self._experts.setdefault(owner, {}).setdefault(leaf, []).append(module)
            elif module.kind == "parameter" and len(module.shape) == 2:
                self._bare_matrices.setdefault(parent, []).append(path)
        self._language_parts = {form.partition(".")[0] for form in self._by_form} | _LANGUAGE_PARTS

    def module(self, path: str) -> BaseModule:
        """The base's module of one of its own paths."""
        return self._base.modules[path]

    def find(self, path: str) -> str | None:
        """The base's own path for a module.

        Raises:
            AdapterInvalid: the base has several modules that it could mean.
        """
        found = self._by_form.get(canonical(path), [])
        if len(found) > 1 and path in found:
            return path
        if len(found) > 1:
            raise AdapterInvalid(
                "the adapter's module could be several of the base's",
                where=path,
                found=", ".join(found[:3]),
                expected="one of them by its full path",
            )
        return found[0] if found else None

    def stacked(self, path: str) -> dict[str, BaseModule]:
        """The three-dimensional parameters that lie directly in a module, by their own paths."""
        return self._stacked.get(canonical(path), {})

    def bare_matrices(self, path: str) -> Sequence[str]:
        """The two-dimensional parameters in a module, such as biases of experts, by their own
        paths. (One that is called ``weight`` counts as a module itself.)"""
        return self._bare_matrices.get(canonical(path), ())

    def split_experts(self, path: str) -> dict[str, BaseModule]:
        """The parameters that a module's experts would be if they were stacked, by canonical path.

        Nothing where the base has no experts one by one there.
        """
        form = canonical(path)
        experts = self._experts.get(form, {})
        if not all(leaf in experts for leaf in ("gate_proj", "up_proj", "down_proj")):
            return {}
        inner, hidden = experts["gate_proj"][0].shape
        count = len(experts["gate_proj"])
        return {
            f"{form}.gate_up_proj": BaseModule("parameter", (count, 2 * inner, hidden)),
            f"{form}.down_proj": BaseModule("parameter", (count, hidden, inner)),
        }

    def is_language(self, path: str) -> bool:
        """Whether a module that the base lacks would belong to the part that the base has."""
        return canonical(path).partition(".")[0] in self._language_parts
