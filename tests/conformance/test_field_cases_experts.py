"""The experts of section D of ``tests/field_cases.md``, against PEFT as it is installed. Each test
names its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adaptercache import AdapterInvalid, AdapterUnsupported, BaseModel, LoraLayout
from adaptercache.checkpoint import Checkpoint, checkpoint_from_tensors, read_checkpoint
from adaptercache.packing import spec_of

HERE = Path(__file__).parent
HIDDEN, INNER = 6, 5


class Experts(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def model_of(**shapes: tuple[int, ...]) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": Experts(**shapes)})])})


def read_from_peft(model: nn.Module, names: list[str], rank: int) -> tuple[Checkpoint, Any]:
    """What we read of an adapter that PEFT makes, and PEFT's own ΔW of each parameter."""
    peft = pytest.importorskip("peft", minversion="0.17")
    base = BaseModel.from_model(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    targets = [f"experts.{name}" for name in names]
    config = peft.LoraConfig(r=rank, lora_alpha=3, target_modules=[], target_parameters=targets)
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    tensors = {name: t.clone() for name, t in peft.get_peft_model_state_dict(wrapped).items()}
    said = {
        "r": rank,
        "lora_alpha": 3,
        "target_parameters": targets,
        "peft_version": peft.__version__,
    }
    checkpoint = checkpoint_from_tensors(tensors, said, base)
    merged = dict(wrapped.merge_and_unload().named_parameters())
    return checkpoint, {name: merged[name].detach() - before[name] for name in before}


def check(model: nn.Module, names: list[str], rank: int = 2) -> None:
    checkpoint, deltas = read_from_peft(model, names, rank)
    assert set(checkpoint.modules) == {name for name in deltas if name.rpartition(".")[2] in names}
    for name in checkpoint.modules:
        assert torch.allclose(checkpoint.delta(name), deltas[name], atol=1e-5), name


@pytest.mark.filterwarnings("ignore")  # of PEFT, about parameters that are no modules
class TestAgainstPeft:
    @pytest.mark.parametrize("rank", [1, 2])
    @pytest.mark.parametrize("experts", [1, 3, 128])
    def test_any_number_of_experts_and_ranks(self, experts: int, rank: int) -> None:
        """Rows 69, 70, 77: one expert, an odd number, many; rank 1."""
        torch.manual_seed(experts)
        shapes = {
            "gate_up_proj": (experts, 2 * INNER, HIDDEN),
            "down_proj": (experts, HIDDEN, INNER),
        }
        check(model_of(**shapes), ["gate_up_proj", "down_proj"], rank)

    @pytest.mark.parametrize("inner", [INNER, HIDDEN])
    def test_experts_without_a_gate(self, inner: int) -> None:
        """Row 71: NemotronH's experts have up_proj and down_proj, of shapes that are each other's
        transposes, or equal."""
        torch.manual_seed(1)
        shapes = {"up_proj": (3, inner, HIDDEN), "down_proj": (3, HIDDEN, inner)}
        check(model_of(**shapes), ["up_proj", "down_proj"])

    @pytest.mark.parametrize("names", [["gate_up_proj"], ["down_proj"]])
    def test_one_parameter_alone(self, names: list[str]) -> None:
        """Rows 69, 73: with one target there is no inner layer."""
        torch.manual_seed(2)
        check(model_of(gate_up_proj=(4, 10, HIDDEN), down_proj=(4, HIDDEN, INNER)), names)

    def test_a_base_that_is_input_first_without_saying_so(self) -> None:
        """Row 79: Llama 4's parameters are [experts, in, out]; the sizes tell."""
        torch.manual_seed(3)
        shapes = {"gate_up_proj": (3, HIDDEN, 2 * INNER), "down_proj": (3, INNER, HIDDEN)}
        check(model_of(**shapes), ["gate_up_proj", "down_proj"])


def test_a_stack_of_another_number_of_experts_is_refused() -> None:
    """Row 73: the number of experts is the base's, and rank · experts must be the stack's."""
    base = BaseModel.from_model(model_of(down_proj=(4, HIDDEN, INNER)))
    tensors = {
        "layers.0.experts.lora_A.weight": torch.ones(6, INNER),
        "layers.0.experts.lora_B.weight": torch.ones(HIDDEN, 6),
    }
    with pytest.raises(AdapterInvalid, match="4 experts of rank 2: 8") as raised:
        checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 2}, base)
    assert "6 rows" in str(raised.value.found)


@pytest.mark.parametrize(
    ("case", "served"),
    [
        ("moe_qwen3_both_p0.20.0", "experts"),
        ("moe_qwen3_per_expert_some_tf4.57_p0.18.1", "experts"),
        ("moe_qwen3_router_p0.20.0", "mlp.gate"),
    ],
)
def test_experts_and_routers_are_read_exactly_and_refused_by_name_on_serving(
    case: str, served: str
) -> None:
    """Rows 39, 74: a cache serves the dense modules of the layers; for the others it says which,
    and nothing of the adapter is served without them."""
    table = json.loads((HERE / "cases" / case / "case.json").read_text())["base_config"]
    content = (HERE / "configs" / table.replace(".json", ".modules.json")).read_text()
    base = BaseModel.from_table(json.loads(content))
    checkpoint = read_checkpoint(HERE / "cases" / case, base)
    with pytest.raises(AdapterUnsupported, match=rf"LoRA on .*{served}.*merge it"):
        spec_of(checkpoint, LoraLayout(base))
