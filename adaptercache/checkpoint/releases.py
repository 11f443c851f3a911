"""Which releases of PEFT a config may be of, and how they matched ``alpha_pattern``.

- From 0.15 on, the first key K of ``alpha_pattern`` counts whose ``(.*\\.)?(K)$`` fits the path.
- 0.14 looked for ``.*\\.K$``, and else for the whole path letter by letter.
- Before, so did one search over the keys of ``rank_pattern`` and then of ``alpha_pattern``: if one
  of the former fitted, alpha was from that very key, or the config's ``lora_alpha``.

Only from 0.18 on does a config name its release. Before that its keys tell, or nothing does; then
an adapter is read if all the rules that it may have been trained by give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from adaptercache.checkpoint.patterns import OLD_FORM, Pattern, StepBudget
from adaptercache.errors import AdapterInvalid

__all__ = ["AlphaRule", "older_rules"]

AlphaRule: TypeAlias = Callable[[str], float | None]
"""The alpha of a path by the patterns; None: no pattern fits, so it is ``lora_alpha``."""

_SINCE_0_14 = frozenset({"eva_config", "exclude_modules", "lora_bias"})
_SINCE_0_15 = frozenset(
    {
        *("alora_invocation_tokens", "arrow_config", "corda_config", "ensure_weight_tying"),
        *("kasa_config", "lora_ga_config", "monteclora_config", "peft_version"),
        *("qalora_group_size", "target_parameters", "trainable_token_indices", "use_bdlora"),
        *("use_qalora", "velora_config"),
    }
)


def older_rules(
    config: Mapping[str, Any],
    version: tuple[int, ...],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    budget: StepBudget,
) -> tuple[tuple[AlphaRule, ...], bool]:
    """The rules of releases before 0.15 that the adapter may have been trained by.

    Args:
        version: as the config names it; (): not at all.
        ranks, alphas: its two patterns, in order.

    Returns:
        The rules, and whether that of 0.15 and later is out of the question.
    """
    # A key that begins with ^ fitted nothing before.
    is_of_0_15 = _SINCE_0_15 & config.keys() or any(key.startswith("^") for key in alphas)
    if not alphas or version >= (0, 15) or (is_of_0_15 and not version):
        return (), False
    is_of_0_14 = version >= (0, 14) or (not version and bool(_SINCE_0_14 & config.keys()))
    try:
        rules = [_apart(alphas, budget)] if not version or is_of_0_14 else []
        if not is_of_0_14:
            rules.append(_together(ranks, alphas, budget))
    except AdapterInvalid:
        if version:
            raise
        return (), False  # no expression by the old form: no such release has written it
    return tuple(rules), bool(version)


def _apart(alphas: Mapping[str, float], budget: StepBudget) -> AlphaRule:
    fits = _search(alphas, "alpha_pattern", budget)
    return lambda path: alphas.get(fits(path) or path)


def _together(
    ranks: Mapping[str, int], alphas: Mapping[str, float], budget: StepBudget
) -> AlphaRule:
    fits_rank = _search(ranks, "rank_pattern", budget)
    fits_alpha = _search(alphas, "alpha_pattern", budget)

    return lambda path: alphas.get(fits_rank(path) or fits_alpha(path) or path)


def _search(
    keys: Mapping[str, object], where: str, budget: StepBudget
) -> Callable[[str], str | None]:
    """The first key that fits a path."""
    patterns = [(key, Pattern(key, where, budget, form=OLD_FORM)) for key in keys]
    return lambda path: next((key for key, pattern in patterns if pattern.matches(path)), None)
