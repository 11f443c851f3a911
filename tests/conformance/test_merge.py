"""Merging, against PEFT's own: weights in memory, and files that transformers loads again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

pytest.importorskip("peft", minversion="0.21")
pytest.importorskip("transformers", minversion="5")

import trips
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration
from trip_options import Adapter, adapters

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import ReadOptions, read_checkpoint
from adaptercache.errors import AdapterUnsupported
from adaptercache.merge import base_of_files, merge

MOST = settings.default.max_examples
a_few = settings(
    max_examples=3 if MOST <= 100 else MOST,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
each_family = pytest.mark.parametrize("family", trips.FAMILIES)


@contextmanager
def saved(family: str, adapter: Adapter) -> Iterator[Path]:
    """A directory with the adapter in it, as PEFT saves it."""
    with TemporaryDirectory() as name:
        path = Path(name) / "saved"
        try:
            trips.save(
                path, family, adapter.options, dtype=adapter.dtype, autocast=adapter.autocast
            )
        except ValueError:  # nothing to adapt is left, or the same weight in two ways
            reject()
        yield path


CASES = {
    path.parent.name: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "cases").glob("*/case.json"))
}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["expect"] == "load"])
def test_every_conformance_case_is_merged_as_peft_merges_it(name: str) -> None:
    here, config = Path(__file__).parent, CASES[name]["base_config"]
    table = here / "configs" / config.replace(".json", ".modules.json")
    base = BaseModel.from_table(json.loads(table.read_text()))
    options = ReadOptions(**CASES[name].get("options", {}))
    before, generator = dict[str, Tensor](), torch.Generator().manual_seed(0)
    for path, module in base.modules.items():
        shape = module.shape[::-1] if module.kind == "conv1d" else module.shape
        key = path if module.kind == "parameter" and len(shape) == 3 else f"{path}.weight"
        before[key] = torch.randn(shape, generator=generator)
    after = merge(read_checkpoint(here / "cases" / name, base, options=options), before)
    golden = load_file(here / "cases" / name / "golden.safetensors")
    for path, module in base.modules.items():
        key = path if path in before else f"{path}.weight"
        if path not in golden:
            assert after[key] is before[key]
            continue
        delta = golden[path].T if module.kind == "conv1d" else golden[path]
        error = (after[key] - (before[key] + delta)).abs().max()
        assert error <= 1e-5 * delta.abs().max() + 1e-6, path


def weights(model: Any) -> dict[str, Tensor]:
    """A state dict in which nothing is shared, for PEFT's truth is of untied weights."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def truth(path: Path, family: str) -> dict[str, Tensor]:
    """What PEFT merges, in float64."""
    wanted = weights(trips.base_model(family, torch.float64))
    model = trips._load(path, family, torch.float64)
    with trips.quiet():
        wanted.update(weights(model.merge_and_unload()))
    return wanted


@each_family
@a_few
@given(data=st.data())
def test_a_merged_state_dict_is_that_of_peft(family: str, data: st.DataObject) -> None:
    adapter = data.draw(adapters(family))
    with saved(family, adapter) as path:
        base = trips.base_model(family)
        try:
            wanted = truth(path, family)
        except trips.NotLoadable:
            reject()
        checkpoint = read_checkpoint(path, BaseModel.from_model(base))
        before = weights(base)
        got = merge(checkpoint, before)
        assert got.keys() == wanted.keys()
        for name, want in wanted.items():
            assert got[name].dtype == torch.float32
            assert (got[name] - want).abs().max() <= 1e-6 * want.abs().max().clamp(min=1), name
            if torch.equal(want, before[name].double()):
                assert got[name] is before[name], "unchanged weights are shared"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_there_is_one_rounding(family: str, dtype: torch.dtype) -> None:
    options = {"r": 3, "target_modules": "all-linear", "fan_in_fan_out": family == "gpt2"}
    with saved(family, Adapter(options, torch.float32, autocast=False)) as path:
        base = trips.base_model(family, dtype)  # exact in either: see trips
        wanted = truth(path, family)
        got = merge(read_checkpoint(path, BaseModel.from_model(base)), weights(base))
    differ = 0
    for name, want in wanted.items():
        exact = want.to(dtype)
        assert got[name].dtype == dtype
        differ += int((got[name] != exact).sum())
        below = torch.nextafter(exact, exact.new_tensor(-torch.inf))
        above = torch.nextafter(exact, exact.new_tensor(torch.inf))
        assert bool(((got[name] >= below) & (got[name] <= above)).all()), name
    # What float32 makes of the sum may fall on the other side of a tie: one in thousands.
    assert differ <= 2e-3 * sum(want.numel() for want in wanted.values())


def loaded(folder: Path, family: str) -> dict[str, Tensor]:
    made = LlavaForConditionalGeneration if family == "llava" else AutoModelForCausalLM
    model = made.from_pretrained(folder, torch_dtype=torch.float32)
    found: dict[str, Tensor] = model.state_dict()
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
    "qwen2": {"target_modules": "all-linear"},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"]},
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "qwen3_moe": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "mixtral": {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "gpt_oss": {"target_modules": ["v_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "llava": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("family", OPTIONS)
def test_merged_files_load_as_the_merged_model(family: str, tmp_path: Path) -> None:
    adapter = Adapter({"r": 2, **OPTIONS[family]}, torch.float32, autocast=False)
    model = trips.base_model(family)
    with trips.quiet():
        model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    with saved(family, adapter) as path, trips.quiet():
        checkpoint = read_checkpoint(path, base_of_files(tmp_path / "base"))
        merge(checkpoint, tmp_path / "base", tmp_path / "merged")
        wanted = truth(path, family)
        got = loaded(tmp_path / "merged", family)
    assert got.keys() == wanted.keys()
    changed = 0
    for name, want in wanted.items():
        assert (got[name] - want).abs().max() <= 1e-6 * want.abs().max().clamp(min=1), name
        changed += not torch.equal(got[name], model.state_dict()[name])
    assert changed
    before = {file.name for file in (tmp_path / "base").iterdir()}
    assert {file.name for file in (tmp_path / "merged").iterdir()} == before
    old, new = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        for name in ("base", "merged")
    )
    assert old["weight_map"] == new["weight_map"]
    assert old["metadata"]["total_size"] == new["metadata"]["total_size"]


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_shared_weight_is_refused_by_name_or_untied(module: str, tmp_path: Path) -> None:
    """qwen2 ties its head to its embedding: PEFT's merge would change both."""
    family, adapter = "qwen2", Adapter({"r": 2, "target_modules": ["q_proj", module]})
    model = trips.base_model(family)
    with trips.quiet():
        model.save_pretrained(tmp_path / "base")
    with saved(family, adapter) as path, trips.quiet():
        checkpoint = read_checkpoint(path, BaseModel.from_model(model))
        with pytest.raises(AdapterUnsupported, match="shares its weight"):
            merge(checkpoint, model.state_dict())
        of_files = read_checkpoint(path, base_of_files(tmp_path / "base"))
        with pytest.raises(AdapterUnsupported, match=r"merging into .*" + module):
            merge(of_files, tmp_path / "base", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()

        wanted = truth(path, family)  # PEFT's, of weights that were untied before
        in_memory = merge(checkpoint, model.state_dict(), untie=True)
        merge(of_files, tmp_path / "base", tmp_path / "merged", untie=True)
        from_files = loaded(tmp_path / "merged", family)
    for name, want in wanted.items():
        for got in (in_memory, from_files):
            assert (got[name] - want).abs().max() <= 1e-6 * want.abs().max().clamp(min=1), name


def test_a_head_that_the_files_hold_apart_stays_apart_in_what_is_loaded(tmp_path: Path) -> None:
    """The config ties head and embedding, the files hold both, as some tools save them: loaded, the
    merged head gave way to the embedding."""
    family, adapter = "qwen2", Adapter({"r": 2, "target_modules": ["q_proj", "lm_head"]})
    model = trips.base_model(family)
    with trips.quiet():
        model.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert json.loads((tmp_path / "base" / "config.json").read_text())["tie_word_embeddings"]
    with saved(family, adapter) as path, trips.quiet():
        checkpoint = read_checkpoint(path, base_of_files(tmp_path / "base"))
        merge(checkpoint, tmp_path / "base", tmp_path / "merged")
        wanted, got = truth(path, family), loaded(tmp_path / "merged", family)
    for name, want in wanted.items():
        assert (got[name] - want).abs().max() <= 1e-6 * want.abs().max().clamp(min=1), name
    assert not torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False, "some loaders ask nothing else"


def test_a_config_that_ties_nothing_is_left_as_it_is(tmp_path: Path) -> None:
    family, adapter = "llama", Adapter({"r": 2, "target_modules": ["q_proj", "lm_head"]})
    with trips.quiet():
        trips.base_model(family).save_pretrained(tmp_path / "base")
    with saved(family, adapter) as path, trips.quiet():
        checkpoint = read_checkpoint(path, base_of_files(tmp_path / "base"))
        merge(checkpoint, tmp_path / "base", tmp_path / "merged")
    before, after = (tmp_path / each / "config.json" for each in ("base", "merged"))
    assert before.read_text() == after.read_text()


def test_files_of_gpt2_without_its_root_are_merged(tmp_path: Path) -> None:
    """As the model's own files on the hub are named: ``h.0.attn.c_attn.weight``."""
    family = "gpt2"
    options = {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    with trips.quiet():
        trips.base_model(family).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    bare = {name.removeprefix("transformer."): each for name, each in load_file(file).items()}
    save_file(bare, file)
    with saved(family, Adapter(options)) as path, trips.quiet():
        checkpoint = read_checkpoint(path, base_of_files(tmp_path / "base"))
        merge(checkpoint, tmp_path / "base", tmp_path / "merged")
        wanted = truth(path, family)
    got = load_file(tmp_path / "merged" / "model.safetensors")
    assert got.keys() == bare.keys()
    for name, merged in got.items():
        want = wanted[f"transformer.{name}"]
        assert (merged - want).abs().max() <= 1e-6 * want.abs().max().clamp(min=1), name


def test_one_change_of_a_shared_weight_is_made_once(tmp_path: Path) -> None:
    family = "qwen2"
    options = {"r": 2, "target_modules": ["lm_head", "embed_tokens"], "ensure_weight_tying": True}
    model = trips.base_model(family)
    with saved(family, Adapter(options)) as path, trips.quiet():
        model.save_pretrained(tmp_path / "base")
        checkpoint = read_checkpoint(path, base_of_files(tmp_path / "base"))
        if not torch.equal(checkpoint.delta("lm_head"), checkpoint.delta("model.embed_tokens")):
            pytest.skip("this PEFT gives them different tensors")
        merge(checkpoint, tmp_path / "base", tmp_path / "merged")
        got = loaded(tmp_path / "merged", family)
    want = model.state_dict()["lm_head.weight"] + checkpoint.delta("lm_head")
    assert torch.equal(got["lm_head.weight"], want)
    assert torch.equal(got["model.embed_tokens.weight"], want)
