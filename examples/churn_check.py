"""The check: rows that came out of the cache against the adapter's own file.

Shares no code with adaptercache: it opens the safetensors file and the config itself, follows
PEFT's rules, and computes scaling · (x Aᵀ) Bᵀ in float64.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

__all__ = ["LIMITS", "Checker", "OwnFile"]

LIMITS = {"bfloat16": (5e-3, 1e-1), "float16": (5e-3, 1e-1), "float32": (1e-5, 1e-4)}
"""RMS(got − want) ÷ RMS(want), and max |got − want| ÷ RMS(want), by the arena's dtype."""


class OwnFile:
    """One adapter, read from its folder.

    Args:
        folder: as PEFT saved it.
        paths: of the base model's modules (``model.layers.0.self_attn.q_proj``).
    """

    def __init__(self, folder: Path, paths: Iterable[str]) -> None:
        self._weights = folder / "adapter_model.safetensors"
        self._config = json.loads((folder / "adapter_config.json").read_text())
        known = set(paths)
        self._names: dict[str, str] = {}
        self.is_plain = True
        """Whether every A belongs to a module by PEFT's names; else this class can't tell."""
        with safe_open(self._weights, "pt") as file:
            names = [name for name in file.keys() if ".lora_A." in name]  # noqa: SIM118
        for name in names:
            parts = name.split(".lora_A.")[0].split(".")
            path = next((p for i in range(len(parts)) if (p := ".".join(parts[i:])) in known), None)
            self.is_plain &= path is not None
            if path is not None:
                self._names[path] = name

    def pair(self, path: str) -> tuple[Tensor, Tensor] | None:
        """A ``[r, in]`` and B ``[out, r]`` of a module in float64; None where it has none."""
        name = self._names.get(path)
        if name is None:
            return None
        with safe_open(self._weights, "pt") as file:
            a = file.get_tensor(name)
            b = file.get_tensor(name.replace(".lora_A.", ".lora_B."))
        return a.double(), b.double()

    def scaling(self, path: str) -> float:
        """alpha / r, or alpha / √r for rsLoRA, with the patterns that match the module."""
        config = self._config
        rank = _by_pattern(config.get("rank_pattern"), path, config["r"])
        alpha = _by_pattern(config.get("alpha_pattern"), path, config.get("lora_alpha", 8))
        return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(patterns: Mapping[str, float] | None, path: str, default: float) -> float:
    """PEFT's rule: the first key that matches the end of the path, from a dot on."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default


class Checker:
    """Collects the errors of sampled rows.

    Errors are relative to the size that each adapter's term has for unit-normal x, which is
    scaling · ‖BA‖ / √out, so that small adapters count as much as large ones.

    Args:
        root: the directory of adapters.
        paths: of the modules that the base model has.
        dtype: the arena's.
    """

    def __init__(self, root: Path, paths: Iterable[str], dtype: str) -> None:
        known = tuple(paths)
        self._own = cache(lambda adapter_id: OwnFile(root / adapter_id, known))
        self.limits = LIMITS[dtype]
        self.rows = 0
        self.unchecked: set[str] = set()
        self._errors = self._wants = self._max = 0.0
        self._terms = 0

    def check(self, adapter_id: str | None, x: Tensor, got: Mapping[str, Tensor]) -> None:
        """Compare one token's row.

        Args:
            adapter_id: its adapter; None: the base model, whose term is nothing.
            x: the modules' input, ``[in]``.
            got: the LoRA term by the module's path, each ``[out]``.
        """
        own = self._own(adapter_id) if adapter_id is not None else None
        if own is not None and not own.is_plain:
            self.unchecked.add(str(adapter_id))
            return
        self.rows += 1
        for path, row in got.items():
            pair = own.pair(path) if own is not None else None
            if own is None or pair is None:
                self._note_absent(row)
            else:
                self._note(x, row, *pair, own.scaling(path))

    def _note_absent(self, got: Tensor) -> None:
        if bool((got != 0).any()):  # also where it is NaN
            self._max = math.inf

    def _note(self, x: Tensor, got: Tensor, a: Tensor, b: Tensor, scaling: float) -> None:
        want = scaling * (b @ (a @ x.double()))
        size = abs(scaling) * float(((b.t() @ b) * (a @ a.t())).sum().clamp(min=0) / len(b)) ** 0.5
        if size == 0.0:
            self._note_absent(got)
            return
        error = (got.double() - want) / size
        largest = float(error.abs().max())
        self._max = max(self._max, largest) if math.isfinite(largest) else math.inf
        self._errors += float(error.square().mean())
        self._wants += float((want / size).square().mean())
        self._terms += 1

    @property
    def rms(self) -> float:
        """RMS(got − want) ÷ RMS(want)."""
        return math.sqrt(self._errors / self._wants) if self._terms else 0.0

    @property
    def largest(self) -> float:
        """max |got − want| ÷ RMS(want)."""
        return self._max / math.sqrt(self._wants / self._terms) if self._terms else self._max

    @property
    def is_within_limits(self) -> bool:
        """Whether no error is too large."""
        return self.rms <= self.limits[0] and self.largest <= self.limits[1]
