"""Tiny models of transformers, adapters that the real PEFT saves for them, and what PEFT itself
makes of the files: the other side of the round trips in ``conformance/``.

The truth is always what PEFT does with the *saved* adapter. (It sorts the keys of ``rank_pattern``
and ``alpha_pattern`` as it saves, and the first that fits wins, so that the live model can differ.)
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

__all__ = [
    "FAMILIES",
    "LINEAR",
    "MORE_FAMILIES",
    "Linear",
    "SIZES",
    "NotLoadable",
    "base_model",
    "forwards",
    "merged",
    "quiet",
    "save",
]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    text = transformers.LlamaConfig(**SIZES)
    return transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=5, tie_word_embeddings=False
    )


def _gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 67}
    return transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)


def _of(name: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Config")(**(SIZES | more))


LINEAR = (nn.Linear, Conv1D)

FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": _of("Llama"),
    "mistral": _of("Mistral", head_dim=12),
    "qwen2": _of("Qwen2", tie_word_embeddings=True),
    "qwen3": _of("Qwen3", head_dim=12),
    "gemma": _of("Gemma", head_dim=12),
    "gemma2": _of("Gemma2", head_dim=12),
    "gemma3_text": _of("Gemma3Text", head_dim=12),
    "phi3": _of("Phi3"),
    "gpt2": _gpt2,
    "mixtral": _of("Mixtral", num_local_experts=3, num_experts_per_tok=2),
    "qwen3_moe": _of(  # layer 0 is dense; no two sizes of its experts agree
        "Qwen3Moe",
        head_dim=12,
        moe_intermediate_size=20,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
    ),
    "qwen3_moe_square": _of(  # all sizes of its experts agree
        "Qwen3Moe",
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
    ),
    "gpt_oss": _of("GptOss", head_dim=12, num_local_experts=3, num_experts_per_tok=2),
    "llava": _llava,
}
"""The config of each tiny model, by name."""

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MORE_FAMILIES: Mapping[str, Callable[[], Any]] = {
    "deepseek_v3": _of(
        "DeepseekV3",
        **MLA,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "llama4_text": _of(  # its experts are [E, in, out], and nothing says so
        "Llama4Text",
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=1,
        intermediate_size_mlp=40,
    ),
    "granitemoe": _of("GraniteMoe", num_local_experts=3, num_experts_per_tok=2),
    "phimoe": _of("Phimoe", num_local_experts=3, num_experts_per_tok=2),
    "qwen3_next": _of(  # linear attention
        "Qwen3Next",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "gpt_neox": _of("GPTNeoX"),
    "falcon": _of("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "opt": _of("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "gemma3n_text": _of(
        "Gemma3nText",
        head_dim=8,
        vocab_size_per_layer_input=67,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=None,
    ),
}
"""Of other shapes; for round trips of one adapter each."""


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT warns of much that is meant here: tied weights, embeddings that are saved too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _made(family: str) -> nn.Module:
    config = (FAMILIES.get(family) or MORE_FAMILIES[family])()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family == "llava":
            model = transformers.LlavaForConditionalGeneration(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.requires_grad_(False).parameters():  # exact in bfloat16 and float16
        parameter.copy_((parameter * 128).round().clamp(-255, 255) / 128)
    return model.eval()


def base_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of its own, always with the same weights."""
    return copy.deepcopy(_made(family)).to(dtype)


def save(
    path: Path,
    family: str,
    options: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    autocast: bool = True,
    seed: int = 0,
) -> None:
    """An adapter of random weights, as PEFT makes and saves it.

    Args:
        path: an empty directory.
        options: of ``LoraConfig``.
        dtype: of the base; the adapter's too, unless ``autocast``, PEFT's default, makes that
            float32.

    Raises:
        ValueError: PEFT doesn't take the options.
    """
    with quiet():
        config = peft.LoraConfig(**copy.deepcopy(dict(options)))
        base = base_model(family, dtype)
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=autocast)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                drawn = 0.25 * torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(drawn)
        model.save_pretrained(path)


class NotLoadable(Exception):
    """PEFT can't load what it saved: in the file's order, patterns give other ranks."""


def _load(path: Path, family: str, dtype: torch.dtype) -> Any:
    """The saved adapter on its base, by PEFT. The casts to ``dtype`` are exact."""
    base = base_model(family, dtype)
    for module in base.modules():  # tied weights would take each other's update
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    try:
        with quiet():
            model = peft.PeftModel.from_pretrained(base, path)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise NotLoadable from error
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.to(dtype)
    return model.eval()


def merged(path: Path, family: str) -> dict[str, Tensor]:
    """What PEFT's merge adds to each weight of the base, in float64, by the base's own path.

    All the matrices are there, those that it leaves alone as zeros. Of a linear layer
    ``[out, in]``, whichever way the model stores it.

    Raises:
        NotLoadable: as it says.
    """
    model = _load(path, family, torch.float64)
    before = _weights(base_model(family, torch.float64))
    with quiet():
        after = _weights(model.merge_and_unload())
    assert after.keys() == before.keys(), "merged and unloaded, it is the base again"
    return {name: after[name] - weight for name, weight in before.items()}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                path = prefix if name == "weight" else f"{prefix}.{name}"
                weight = parameter.detach().clone()
                found[path] = weight.T if isinstance(module, Conv1D) else weight
    return found


@dataclass(frozen=True)
class Linear:
    """One pass through a linear layer: rows ``[tokens, width]`` of float32.

    ``base`` is the layer's output without the adapter, ``adapted`` with it, unmerged.
    """

    path: str
    x: Tensor
    base: Tensor
    adapted: Tensor


def forwards(path: Path, family: str, tokens: int = 7) -> list[Linear]:
    """A forward of PEFT's unmerged model, as seen by each of its adapted linear layers.

    Raises:
        NotLoadable: as it says.
    """
    model = _load(path, family, torch.float32)
    seen: list[Linear] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            rows = [inputs[0], module.base_layer(inputs[0]), output]
            seen.append(Linear(name, *(row.detach().reshape(-1, row.shape[-1]) for row in rows)))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), LINEAR):
            module.register_forward_hook(look(name.removeprefix("base_model.model.")))
    ids = torch.randint(6, 67, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode(), quiet():
        model(input_ids=ids)
    return seen


def config_of(family: str) -> dict[str, Any]:
    """The content of its ``config.json``."""
    content: dict[str, Any] = base_model(family).config.to_dict()
    return content
