"""Sections B and C of ``tests/field_cases.md``: what configs say, and the scaling that follows.
Each test names its rows."""

from __future__ import annotations

import math
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptercache import AdapterInvalid, AdapterUnsupported, BaseModel, Tier
from adaptercache.checkpoint import checkpoint_from_tensors, read_checkpoint
from adaptercache.kernels import add_lora
from adaptercache.testing import held_weights

UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp|dense)"
    r".*?(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|v_proj|o_proj)))"
)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        UNSLOTH,
        None,
        [],
        ["model.layers.0.self_attn.q_proj", "self_attn.v_proj"],
        ["q_proj", "v_proj", "nothing_of_this_name"],
        "q",
    ],
    ids=str,
)
def test_no_form_of_target_modules_matters(tiny: Any, targets: Any) -> None:
    """Rows 9, 10, 33 to 38: a string is no list of letters, a pattern of Unsloth's is no error,
    full paths are no strangers; the tensors say which modules there are."""
    tensors, config = tiny.tensors(0)
    plain = checkpoint_from_tensors(tensors, config, tiny.layout.base)
    again = checkpoint_from_tensors(tensors, config | {"target_modules": targets}, tiny.layout.base)
    assert again.digest == plain.digest


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"null", b'{"r": 1', b'\xef\xbb\xbf{"r": 1}', b'{"r": NaN}', b"\xff\xfe{"],
    ids=repr,
)
def test_a_broken_config_names_its_file(tiny: Any, tmp_path: Path, content: bytes) -> None:
    """Row 43."""
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterInvalid) as raised:
        read_checkpoint(tmp_path, tiny.layout.base)
    assert raised.value.where == str(tmp_path / "adapter_config.json")


NAMES = [None, "", "N/A", "meta-llama/Llama-3.1-8B", "/home/trainer/models/llama", "../base"]


@pytest.mark.parametrize("name", [*NAMES, "absent"])
def test_the_name_of_the_base_causes_no_look_up(
    tiny: Any, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 44, 45, 46: null, "", a gated repository or a folder of the trainer's machine: no
    socket is opened, and nothing depends on it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was asked for")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    tensors, config = tiny.tensors(0)
    config["base_model_name_or_path"] = name
    if name == "absent":
        del config["base_model_name_or_path"]
    source = tiny.source("plain")
    source.put("a", tensors, config)
    with tiny.cache(source) as cache:
        leases = [cache.acquire(adapter_id).result(10) for adapter_id in ("a", "plain")]
        assert leases[0].digest == leases[1].digest
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_the_names_changes_a_rank_or_a_scaling(tiny: Any, seed: int) -> None:
    """Row 49: ranks are mixed, and no tensor stands for the others."""
    tensors, config = tiny.tensors(0, rank=4, targets=("q_proj", "v_proj", "down_proj"))
    for name in [name for name in tensors if "v_proj" in name]:
        tensors[name] = tensors[name][:2] if "lora_A" in name else tensors[name][:, :2]
    config["rank_pattern"] = {"v_proj": 2}
    names = sorted(tensors)
    random.Random(seed).shuffle(names)
    plain, again = (
        checkpoint_from_tensors(each, config, tiny.layout.base)
        for each in (tensors, {name: tensors[name] for name in names})
    )
    assert again.digest == plain.digest
    assert list(again.modules) == list(plain.modules)
    for path, weights in again.modules.items():
        assert weights.rank == (2 if "v_proj" in path else 4)
        assert weights.scaling == 8 / weights.rank


@pytest.mark.parametrize("adapter_id", ["org/name:v2", "base:adapter", "a b", "ü/é", "x.y-z"])
def test_an_id_comes_back_as_it_was_given(tiny: Any, adapter_id: str) -> None:
    """Row 50: no separator in an id means anything."""
    source = tiny.source(adapter_id, "org/name", "base")
    with tiny.cache(source) as cache, cache.acquire(adapter_id).result(10) as lease:
        assert lease.key.adapter_id == adapter_id
        assert cache.resident(Tier.GPU) == {adapter_id}


@pytest.mark.parametrize(
    ("config", "rank", "scaling"),
    [
        ({"r": 64, "lora_alpha": 16, "use_rslora": True}, 64, 2.0),
        ({"r": 64, "lora_alpha": 16, "use_rslora": False}, 64, 0.25),
        ({"r": 64, "lora_alpha": 16, "use_rslora": None}, 64, 0.25),
        ({"r": 8, "lora_alpha": 12.5}, 8, 1.5625),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 9}, "use_rslora": True}, 9, 8 / 3),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {r"^model\.layers\.0\..*": 2}}, 4, 0.5),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {r"layers\.0\..*": 2}}, 4, 0.5),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {r"layers\.7\..*": 2, "proj": 3}}, 4, 2.0),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"x": 1}, "alpha_pattern": {"y": 1}}, 4, 2.0),
    ],
    ids=str,
)
def test_the_table_of_scalings(
    tiny: Any, config: dict[str, Any], rank: int, scaling: float
) -> None:
    """Rows 51, 52, 53, 55, 58, 61: alpha / r, or alpha / sqrt(r) with that module's own r;
    patterns that match nothing change nothing."""
    tensors, plain = tiny.tensors(0, rank=rank, targets=("q_proj",), layers=(0,))
    checkpoint = checkpoint_from_tensors(tensors, {**plain, **config}, tiny.layout.base)
    (weights,) = checkpoint.modules.values()
    assert (weights.rank, weights.scaling) == (rank, pytest.approx(scaling, rel=1e-12))


@pytest.mark.parametrize("alpha", [0, -1, math.nan, math.inf, True, False, "16", None, [16]])
def test_an_alpha_that_is_no_positive_number_is_refused(tiny: Any, alpha: Any) -> None:
    """Rows 61 and 53: verl exports 0, and JSON has no NaN but an adapter in memory may; in a
    pattern too."""
    tensors, config = tiny.tensors(0)
    for broken in ({"lora_alpha": alpha}, {"alpha_pattern": {"q_proj": alpha}}):
        with pytest.raises(AdapterInvalid, match="alpha"):
            checkpoint_from_tensors(tensors, {**config, **broken}, tiny.layout.base)


def test_evicting_and_reloading_gives_the_same_b_and_scaling(tiny: Any) -> None:
    """Row 56: nothing is folded into B in place, so that no reload scales it again."""
    tensors, config = tiny.tensors(1, rank=3, alpha=48)
    source = tiny.source("b")
    source.put("a", tensors, config)
    with tiny.cache(source, gpu_slots=1, host_bytes=5 * 4096) as cache:
        for _ in range(3):
            with cache.acquire("a").result(10) as lease:
                for layer in (0, 1):
                    found = held_weights(cache, lease, layer, "v_proj")
                    assert found is not None
                    name = f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora"
                    assert found[0].equal(tensors[f"{name}_A.weight"])
                    assert found[1].equal(tensors[f"{name}_B.weight"])
                    assert found[2] == 16
            tiny.load(cache, "b")
        assert cache.stats().evictions[Tier.GPU, "room"] >= 3


def test_another_alpha_under_the_same_id_is_applied_and_takes_no_second_place(tiny: Any) -> None:
    """Row 57: half the alpha, the same tensors: new output, and never more slots than there are."""
    tensors, config = tiny.tensors(1, alpha=8)
    with tiny.cache(gpu_slots=1) as cache:
        outputs = []
        for alpha in (8, 4):
            cache.put("a", tensors, config | {"lora_alpha": alpha}).result(10)
            with cache.acquire("a").result(10) as lease, cache.lora_batch([(lease, 1)]) as lora:
                x = torch.ones(1, 32, device=lora.stack.device)
                y = torch.zeros(1, 32, device=lora.stack.device)
                add_lora(y, x, lora, ("q_proj",), 0)
                outputs.append(y.cpu())
            assert cache.stats().slots["used"] <= 1
    assert outputs[0].any()
    assert torch.allclose(outputs[1], outputs[0] / 2)


def test_the_alpha_tensor_of_kohya_is_refused_by_name(tiny: Any) -> None:
    """Row 59: a scalar beside the matrices would have another scaling than the config's."""
    tensors, config = tiny.tensors(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj.alpha"
    with pytest.raises(AdapterUnsupported) as raised:
        checkpoint_from_tensors({**tensors, name: torch.tensor(4.0)}, config, tiny.layout.base)
    assert raised.value.where == name


INITS = ["pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq", "PiSSA", "something new"]


@pytest.mark.parametrize("init", INITS)
def test_an_initialisation_that_changes_the_base_is_refused(tiny: Any, init: str) -> None:
    """Row 62: right on the changed base only, and garbage on the plain one."""
    tensors, config = tiny.tensors(0)
    with pytest.raises(AdapterUnsupported, match="init_lora_weights") as raised:
        checkpoint_from_tensors(tensors, config | {"init_lora_weights": init}, tiny.layout.base)
    assert "path_initial_model_for_weight_conversion" in raised.value.remedy


@pytest.mark.filterwarnings("ignore")  # of PEFT and torch, about how they are called
@pytest.mark.parametrize(
    "init", [True, False, "gaussian", "Gaussian", "orthogonal", "mica", "MiCA"]
)
def test_an_initialisation_that_leaves_the_base_alone_is_read_as_peft_does(init: Any) -> None:
    """Row 62, the other way: with PEFT itself as the judge, which takes some names in any case."""
    peft = pytest.importorskip("peft", minversion="0.18")
    if str(init).lower() == "mica" and not hasattr(peft.tuners.lora.LoraLayer, "mica_init"):
        pytest.skip("a PEFT without MiCA")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(12, 8, bias=False)})
    base = BaseModel.from_model(model)
    before = model["q_proj"].weight.detach().clone()
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], init_lora_weights=init)
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    tensors = {name: t.clone() for name, t in peft.get_peft_model_state_dict(wrapped).items()}
    said = {"r": 2, "lora_alpha": 3, "init_lora_weights": init}
    delta = checkpoint_from_tensors(tensors, said, base).delta("q_proj")
    merged = wrapped.merge_and_unload()["q_proj"].weight.detach()
    assert torch.allclose(delta, merged - before, atol=1e-5)
