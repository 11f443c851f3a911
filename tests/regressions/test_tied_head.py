"""With ``ensure_weight_tying`` PEFT gives the head the embedding's tensors, whatever their rank,
and keeps the scaling of the head's own rank. The refusal of that did not say what was meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import Checkpoint, checkpoint_from_tensors
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

HEAD, Q = "lm_head", "model.layers.0.self_attn.q_proj"
BASE = BaseModel({Q: BaseModule("linear", (8, 8)), HEAD: BaseModule("linear", (9, 8))})


def read(ranks: dict[str, int], **config: Any) -> Checkpoint:
    tensors = {}
    for path, rank in ranks.items():
        outputs, inputs = BASE.modules[path].shape
        tensors[f"{path}.lora_A.weight"] = torch.ones(rank, inputs)
        tensors[f"{path}.lora_B.weight"] = torch.ones(outputs, rank)
    return checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 4, **config}, BASE)


def test_a_tied_head_of_another_rank_is_refused_by_name() -> None:
    with pytest.raises(AdapterUnsupported, match="ensure_weight_tying"):
        read({Q: 2, HEAD: 3}, ensure_weight_tying=True)


def test_any_other_wrong_rank_is_plainly_wrong() -> None:
    with pytest.raises(AdapterInvalid, match="rank 3 in the tensors"):
        read({Q: 2, HEAD: 3})
    with pytest.raises(AdapterInvalid, match="rank 3 in the tensors"):
        read({Q: 3, HEAD: 2}, ensure_weight_tying=True)
    assert read({Q: 2, HEAD: 2}, ensure_weight_tying=True).max_rank == 2
