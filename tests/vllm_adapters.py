"""A base model small enough for vLLM on two cores, adapters of PEFT's own making, and what PEFT
generates with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

MAX_RANK = 16
HIDDEN, VOCABULARY = 64, 512
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KINDS: dict[str, dict[str, Any]] = {
    "all-r8": {"r": 8, "lora_alpha": 16},
    "rslora-r16": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"v_proj": 2, "layers.1.mlp.down_proj": 16},
        "alpha_pattern": {"v_proj": 64, "o_proj": 4},
    },
    "attention-r3": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]},
    "mlp-r4": {"r": 4, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "only-o": {"r": 8, "lora_alpha": 32, "target_modules": ["o_proj"]},
    "layer-0": {"r": 8, "lora_alpha": 32, "layers_to_transform": [0]},
    "rank-1": {"r": 1, "lora_alpha": 2},
    "regex": {"r": 8, "lora_alpha": 16, "target_modules": r".*layers\.1\..*(q|up)_proj"},
    "bfloat16": {"r": 8, "lora_alpha": 16},
    "float16": {"r": 8, "lora_alpha": 16},
    "lm-head": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "lm_head"]},
    "embedding": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "embed_tokens"]},
}
"""Adapters that vLLM has to serve as PEFT does, by name: ``LoraConfig``'s arguments."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def save_base(folder: Path) -> None:
    """A Llama of random weights with a tokenizer of its own. vLLM's attention on CPUs needs a head
    of 32."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = ["<s>", "</s>", "<pad>", *sorted(alphabet)]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HIDDEN // 32,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


class Trainer:
    """Makes adapters of a base model, and says what PEFT generates with each."""

    def __init__(self, base: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._base = base
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._tuned: dict[Path, Any] = {}
        self._truths: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def make(
        self,
        folder: Path,
        seed: int,
        change: Callable[[Any], None] = lambda model: None,
        **kind: Any,
    ) -> Path:
        """A PEFT adapter with weights of chance, saved in ``folder``."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        options = {"target_modules": ALL, "task_type": "CAUSAL_LM"} | kind
        base = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(**options))
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.15)
        change(model)
        model.save_pretrained(folder, save_embedding_layers=False)
        return folder

    def truth(self, folder: Path | None, prompt: Sequence[int], length: int = 8) -> list[int]:
        """The tokens that follow, greedily; None: of the base model."""
        key = (str(folder), tuple(prompt), length)
        if key not in self._truths:
            self._truths[key] = self._generate(folder, prompt, length)
        return self._truths[key]

    def _generate(self, folder: Path | None, prompt: Sequence[int], length: int) -> list[int]:
        model = self._model if folder is None else self._with(folder)
        tokens = torch.tensor([list(prompt)])
        with torch.no_grad():
            for _ in range(length):
                following = model(input_ids=tokens).logits[0, -1].argmax()
                tokens = torch.cat([tokens, following.reshape(1, 1)], 1)
        return tokens[0, len(prompt) :].tolist()

    def _with(self, folder: Path) -> Any:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        if folder not in self._tuned:
            base = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
            self._tuned[folder] = PeftModel.from_pretrained(base, folder).eval()
        return self._tuned[folder]


def make_kind(trainer: Trainer, folder: Path, name: str, seed: int) -> Path:
    """One of `KINDS`."""
    dtype = _DTYPES.get(name)

    def cast(model: Any) -> None:
        if dtype is not None:
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.data = parameter.data.to(dtype)

    return trainer.make(folder, seed, cast, **KINDS[name])


def changed_config(folder: Path, **changed: Any) -> Path:
    """Rewrite an adapter's config with some keys changed."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return folder
