"""What adapters can have that we don't serve: each by its name, with what its owner can do.

A feature that changes the maths is never ignored: an adapter that is served without it is a wrong
adapter. It shows in the config, or in a tensor that plain LoRA doesn't have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptercache.errors import AdapterUnsupported

__all__ = ["CONVERT", "refuse_features", "unknown_tensor"]

_MERGE = "merge it into the base model, or train plain LoRA"
_RETRAIN = "train plain LoRA"
CONVERT = "convert it to PEFT's layout: adaptercache.convert.convert_to_peft"

_CONFIG_FEATURES = {
    "use_dora": ("DoRA (use_dora)", _MERGE),
    "use_qalora": ("QA-LoRA (use_qalora)", _MERGE),
    "use_bdlora": ("BD-LoRA (use_bdlora)", _MERGE),
    "kasa_config": ("KaSA (kasa_config)", _MERGE),
    "monteclora_config": ("MonteCLoRA (monteclora_config)", _MERGE),
    "velora_config": ("VeLoRA (velora_config)", _MERGE),
    "arrow_config": ("Arrow routing (arrow_config)", "serve the routed adapters one by one"),
    "alora_invocation_tokens": ("aLoRA (alora_invocation_tokens)", _RETRAIN),
    "layer_replication": ("layer replication (layer_replication)", _RETRAIN),
    "trainable_token_indices": ("trained tokens (trainable_token_indices)", _MERGE),
    "modules_to_save": ("trained base modules (modules_to_save)", _MERGE),
    "lora_bias": ("LoRA biases (lora_bias)", _MERGE),
    "enable_lora": ("merged linear layers of PEFT 0.2 (enable_lora)", _MERGE),
}

_PLAIN_INITS = (None, True, False, "gaussian", "eva", "mica", "orthogonal", "true", "false")
"""Ways to begin that leave the base's weights alone, in any case (as PEFT has it). PiSSA, OLoRA,
CorDA, LoRA-GA and LoftQ change them, so that their A and B are right on the changed base only."""

_PLAIN_CONFIGS = frozenset(
    {
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        "megatron_config",
        "runtime_config",
        "use_rslora",
    }
)
"""Keys that look like features, and say nothing about the maths once training is over."""

_TENSOR_FEATURES = (
    ("lora_magnitude_vector", "DoRA", _MERGE),
    ("weight_m_wdecomp", "DoRA", _MERGE),
    ("lora_B.bias", "LoRA biases (lora_bias)", _MERGE),
    ("lora_B.default.bias", "LoRA biases (lora_bias)", _MERGE),
    ("lora_E", "AdaLoRA", _RETRAIN),
    ("lora_diag", "KaSA", _MERGE),
    ("hada_", "LoHa", _MERGE),
    ("lokr_", "LoKr", _MERGE),
    ("ia3_l", "IA3", _MERGE),
    ("vera_", "VeRA", _MERGE),
    ("prompt_embeddings", "prompt tuning", _RETRAIN),
    ("token_adapter", "trained tokens (trainable_token_indices)", _MERGE),
    ("lora_a", "the layout of MLX-LM or torchtune", CONVERT),
    ("lora_b", "the layout of MLX-LM or torchtune", CONVERT),
    ("lora_down", "the layout of kohya", "convert it to PEFT's layout"),
    ("lora_up", "the layout of kohya", "convert it to PEFT's layout"),
    ("linear_in", "the layout of NeMo", "convert it to PEFT's layout"),
    ("linear_out", "the layout of NeMo", "convert it to PEFT's layout"),
    ("lora_A", "a LoRA tensor of another adapter name or form", "save one adapter with PEFT"),
    ("lora_B", "a LoRA tensor of another adapter name or form", "save one adapter with PEFT"),
)


def refuse_features(config: Mapping[str, Any], ignored: frozenset[str]) -> None:
    """Raises `AdapterUnsupported` for the first feature of a PEFT config that we don't serve."""
    _refuse_other_methods(config)
    for key, (feature, remedy) in _CONFIG_FEATURES.items():
        if config.get(key):
            raise AdapterUnsupported(feature, where=key, remedy=remedy)
    bias = config.get("bias")
    if bias not in (None, "none"):
        raise AdapterUnsupported(f"trained biases (bias={bias!r:.40})", where="bias", remedy=_MERGE)
    init = config.get("init_lora_weights")
    if (init.lower() if isinstance(init, str) else init) not in _PLAIN_INITS:
        raise AdapterUnsupported(
            f"an initialisation that changes the base (init_lora_weights={init!r:.40})",
            where="init_lora_weights",
            remedy="convert it on saving (path_initial_model_for_weight_conversion)",
        )
    for key, value in config.items():
        looks_like_feature = key.startswith("use_") or key.endswith("_config")
        known = key in _PLAIN_CONFIGS or key in ignored
        if value and looks_like_feature and not known:
            raise AdapterUnsupported(
                f"the unknown option {key!r:.80}",
                where=key[:200],
                remedy="if it doesn't change the maths, name it in ReadOptions.ignored_config_keys",
            )


def _refuse_other_methods(config: Mapping[str, Any]) -> None:
    method = config.get("peft_type")
    if method not in (None, "LORA"):
        raise AdapterUnsupported(f"peft_type {method!r:.40}", where="peft_type", remedy=_MERGE)
    if "r" not in config and ("lora_parameters" in config or "fine_tune_type" in config):
        raise AdapterUnsupported("the layout of MLX-LM", where="lora_parameters", remedy=CONVERT)


def unknown_tensor(name: str) -> AdapterUnsupported:
    """The error for a tensor that is no A or B and no copy of a base weight."""
    for marker, feature, remedy in _TENSOR_FEATURES:
        if marker in name:
            return AdapterUnsupported(feature, where=name[:200], remedy=remedy)
    if name.endswith((".weight", ".bias")):
        return AdapterUnsupported("a trained base tensor", where=name[:200], remedy=_MERGE)
    return AdapterUnsupported("a tensor of unknown meaning", where=name[:200], remedy=_RETRAIN)
