"""``adapter_config.json`` of PEFT 0.2 to 0.21: the rank and the scaling of every module.

Unknown keys are normal, each release adds some, so what isn't needed isn't looked at; but a key
that may change the maths is refused (features.py). ``target_modules`` is not used at all: it
over-states, and the tensors say exactly which modules have LoRA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptercache.checkpoint.features import refuse_features
from adaptercache.checkpoint.patterns import Pattern, StepBudget
from adaptercache.checkpoint.releases import AlphaRule, older_rules
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["LoraConfig"]

_LARGEST_FLOAT32 = 3.4e38
_MOST_PATTERNS = 100_000


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What the reader takes from an adapter's config. Not thread-safe: patterns share a budget."""

    rank: int
    alpha: float
    is_rslora: bool
    rank_patterns: tuple[tuple[Pattern, int], ...]
    alpha_patterns: tuple[tuple[Pattern, float], ...]
    target_parameters: tuple[str, ...]
    ties_weights: bool
    peft_version: tuple[int, ...]
    older_rules: tuple[AlphaRule, ...]
    is_older: bool

    @classmethod
    def from_peft(
        cls, config: Mapping[str, Any], *, ignored_keys: frozenset[str] = frozenset()
    ) -> LoraConfig:
        """Checks a PEFT config, whatever release wrote it.

        Raises:
            AdapterUnsupported: it has a feature that changes the maths and isn't served.
            AdapterInvalid: a field is missing or makes no sense.
        """
        refuse_features(config, ignored_keys)
        budget = StepBudget()
        version = _version(config.get("peft_version"))
        ranks = {
            key: _rank(value, f"rank_pattern[{key!r:.80}]")
            for key, value in _patterns(config, "rank_pattern").items()
        }
        alphas = {
            key: _alpha(value, f"alpha_pattern[{key!r:.80}]")
            for key, value in _patterns(config, "alpha_pattern").items()
        }
        rank_patterns = tuple(
            (Pattern(key, "rank_pattern", budget), rank) for key, rank in ranks.items()
        )
        alpha_patterns = tuple(
            (Pattern(key, "alpha_pattern", budget), alpha) for key, alpha in alphas.items()
        )
        older, is_older = older_rules(config, version, ranks, alphas, budget)
        return cls(
            rank=_rank(config.get("r"), "r"),
            alpha=_alpha(config.get("lora_alpha"), "lora_alpha"),
            is_rslora=_flag(config.get("use_rslora"), "use_rslora"),
            rank_patterns=rank_patterns,
            alpha_patterns=alpha_patterns,
            target_parameters=_names(config.get("target_parameters"), "target_parameters"),
            ties_weights=_flag(config.get("ensure_weight_tying"), "ensure_weight_tying"),
            peft_version=version,
            older_rules=older,
            is_older=is_older,
        )

    def targets_parameter(self, path: str) -> bool:
        """Whether ``target_parameters`` names this parameter, whole or by the end of its path."""
        return any(path == name or path.endswith(f".{name}") for name in self.target_parameters)

    def rank_of(self, path: str) -> int:
        """The rank of a module, by the path that PEFT knew it by: the first pattern that fits."""
        fits = (rank for pattern, rank in self.rank_patterns if pattern.matches(path))
        return next(fits, self.rank)

    def scaling_of(self, path: str, rank: int, wrapped: str = "") -> float:
        """alpha / rank, or alpha / √rank for rsLoRA, alpha by the same path and rule.

        Args:
            wrapped: the path that PEFT may also have known the module by.

        Raises:
            AdapterInvalid: it is no positive float32.
            AdapterUnsupported: releases that it may have been trained with have other alphas, or
                the two paths have.
        """
        alpha = self._alpha_of(path)
        if wrapped and self._alpha_of(wrapped) != alpha:
            raise AdapterUnsupported(
                "a pattern that fits a path with its wrappers, or without, and not both",
                where=f"alpha_pattern, {wrapped}",
                remedy="write patterns that fit the end of the path",
            )
        scaling = alpha / (math.sqrt(rank) if self.is_rslora else rank)
        if not 1 / _LARGEST_FLOAT32 < scaling < _LARGEST_FLOAT32:
            raise AdapterInvalid(
                "the scaling is no positive float32",
                where=path,
                found=scaling,
                expected="alpha / rank within float32",
            )
        return scaling

    def _alpha_of(self, path: str) -> float:
        fits = (alpha for pattern, alpha in self.alpha_patterns if pattern.matches(path))
        found = [] if self.is_older else [next(fits, None)]
        found += [rule(path) for rule in self.older_rules]
        alphas = {self.alpha if alpha is None else alpha for alpha in found}
        if len(alphas) > 1:
            raise AdapterUnsupported(
                "patterns that releases of PEFT read differently, in a config that names none",
                where=f"{path}: alpha {' or '.join(map(str, sorted(alphas)))}",
                remedy="set peft_version to the release that it was trained with",
            )
        return alphas.pop()


def _rank(value: object, where: str) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _broken(where, value, "a rank: a positive integer")
    return value


def _alpha(value: object, where: str) -> float:
    if isinstance(value, (int, float)) and value is not True and 0 < value < _LARGEST_FLOAT32:
        return float(value)
    # Nothing that 0 could mean is the adapter as it was trained.
    is_zero = type(value) in (int, float) and value == 0
    remedy = "write the alpha that it was trained with; verl exports 0" if is_zero else ""
    raise _broken(where, value, "an alpha: a positive finite number", remedy)


def _flag(value: object, where: str) -> bool:
    if value is not None and type(value) is not bool:
        raise _broken(where, value, "true or false")
    return bool(value)


def _patterns(config: Mapping[str, Any], key: str) -> Mapping[str, object]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping) or len(patterns) > _MOST_PATTERNS:
        raise _broken(key, patterns, "an object of patterns")
    return patterns


def _names(value: object, where: str) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _broken(where, value, "a list of names")
    return tuple(names)


def _version(value: object) -> tuple[int, ...]:
    """``"0.19.1.dev0"`` as (0, 19, 1). Releases before 0.18 didn't write theirs: ()."""
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", str(value))
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else ()


def _broken(where: str, found: object, expected: str, remedy: str = "") -> AdapterInvalid:
    return AdapterInvalid(
        "the adapter's config is broken",
        where=where,
        found=f"{found!r:.80}",
        expected=expected,
        remedy=remedy,
    )
