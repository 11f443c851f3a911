"""``target_parameters`` adapts a weight as it is stored: a conv1d's ``[in, out]``, an embedding's
``[vocabulary, hidden]``. A square conv1d came out transposed, and the others were refused."""

from __future__ import annotations

import pytest
import torch

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import Checkpoint, checkpoint_from_tensors
from adaptercache.errors import AdapterUnsupported

BASE = BaseModel(
    {
        "transformer.wte": BaseModule("embedding", (9, 8)),
        "transformer.h.0.attn.c_attn": BaseModule("conv1d", (24, 8)),
        "transformer.h.0.attn.c_proj": BaseModule("conv1d", (8, 8)),
    }
)
STORED = {  # the shapes of the weights in the model
    "transformer.wte": (9, 8),
    "transformer.h.0.attn.c_attn": (8, 24),
    "transformer.h.0.attn.c_proj": (8, 8),
}


def read(path: str, *targets: str) -> tuple[Checkpoint, torch.Tensor]:
    rows, columns = STORED[path]
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, columns, generator=draw), torch.randn(rows, 2, generator=draw)
    tensors = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    config = {"r": 2, "lora_alpha": 4, "target_parameters": list(targets)}
    return checkpoint_from_tensors(tensors, config, BASE), 2 * (b @ a)


@pytest.mark.parametrize("path", STORED)
def test_a_weight_that_is_stored_the_other_way_round(path: str) -> None:
    checkpoint, stored = read(path, f"{path}.weight")
    is_conv1d = BASE.modules[path].kind == "conv1d"
    torch.testing.assert_close(checkpoint.delta(path), stored.T if is_conv1d else stored)


def test_without_target_parameters_it_is_the_module_that_is_adapted() -> None:
    path = "transformer.h.0.attn.c_proj"
    checkpoint, delta = read(path)
    torch.testing.assert_close(checkpoint.delta(path), delta)
    with pytest.raises(AdapterUnsupported, match="on a embedding"):
        read("transformer.wte")
