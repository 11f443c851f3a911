"""Models from a directory, and the forward pass apart from the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from serving import World, ask, outcome

import serve
from serve_model import kv_layout

PROMPT = "once upon a time there was"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The tiny model in bfloat16 and a tokenizer of words, as `save_pretrained` leaves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from serve_tiny import tiny_model

    folder = tmp_path / "model"
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    words = {word: number for number, word in enumerate(["[UNK]", *PROMPT.split()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_a_model_from_a_directory_in_bfloat16(saved: Path, tmp_path: Path) -> None:
    model, tokenizer = serve.open_model(saved, torch.device("cpu"))
    assert model.dtype == torch.bfloat16
    prompt = tokenizer.encode(PROMPT)
    assert prompt == [1, 2, 3, 4, 5, 6]
    world = World(tmp_path / "adapters", 12)
    world.model = model
    seen = []
    with world.engine(pages=600) as engine:
        forward = engine._runner._model
        engine._runner._model = Keeping(forward, seen)
        for adapter_id in (None, *world.ids):
            outcome(ask(engine, adapter_id, prompt, 1))
    ours, pefts = [], []
    for adapter_id, logits in zip((None, *world.ids), seen, strict=True):
        exact, peft = (
            logits_of(saved, world.root / adapter_id if adapter_id else None, prompt, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
        ours.append(rms(logits[0] - exact) / rms(exact))
        pefts.append(rms(peft - exact) / rms(exact))
    # Rounding falls one way or the other for each; all together we are as near as PEFT.
    assert max(ours) < 0.1
    assert sum(ours) < 1.5 * sum(pefts)


def logits_of(
    folder: Path, adapter: Path | None, prompt: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """PEFT's, of the last token."""
    from peft import PeftModel

    model = serve.open_model(folder, torch.device("cpu"))[0].to(dtype)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).to(dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1].float()
    return logits


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


class Keeping:
    """A model that keeps its logits."""

    def __init__(self, model: Any, seen: list[Any]) -> None:
        self._model, self._seen, self.device = model, seen, model.device
        self.num_tokens = model.num_tokens

    def __call__(self, rows: Any, lora: Any) -> Any:
        logits = self._model(rows, lora)
        self._seen.append(logits.clone())
        return logits


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rotary"),
    ],
)
def test_models_that_it_would_compute_wrongly_are_refused(change: Any, says: str) -> None:
    from serve_tiny import tiny_model

    config = tiny_model().config
    assert kv_layout(config, "float32").block_size == 16
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=says):
        kv_layout(config, "float32")
