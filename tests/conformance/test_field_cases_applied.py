"""Section A of ``tests/field_cases.md``: an adapter was taken, and nothing or the wrong thing was
applied. Each test names its rows."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from adaptercache import (
    AdapterCache,
    AdapterCacheError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    BaseModel,
    LoraLayout,
    Request,
)
from adaptercache.checkpoint import checkpoint_from_tensors
from adaptercache.kernels import add_lora
from adaptercache.packing import pack, spec_of

CONFIGS = Path(__file__).parent / "configs"
QKV = ("q_proj", "k_proj", "v_proj")


def base_of(name: str) -> BaseModel:
    return BaseModel.from_table(json.loads((CONFIGS / f"{name}.modules.json").read_text()))


@pytest.mark.parametrize("trained_on", ["model", "language_model.model", "model.language_model"])
@pytest.mark.parametrize(
    "served_on", ["tiny-llava.tf4.57", "tiny-llava.tf5.24", "tiny-llama.tf5.24"]
)
def test_one_language_model_under_three_prefixes_packs_to_one_vector(
    trained_on: str, served_on: str
) -> None:
    """Rows 2, 3, 4: trained on the text model or on either wrapper, served on any of them."""
    layout = LoraLayout(base_of(served_on), targets=("q_proj", "v_proj"), dtype="float32")
    draw = torch.Generator().manual_seed(0)
    tensors, wanted = {}, []
    for site in layout.sites:
        inside = site.path[site.path.index("layers.") :]
        a = torch.randn(2, site.in_features, generator=draw)
        b = torch.randn(site.out_features, 2, generator=draw)
        tensors[f"base_model.model.{trained_on}.{inside}.lora_A.weight"] = a
        tensors[f"base_model.model.{trained_on}.{inside}.lora_B.weight"] = b
        wanted += [a, b]
    checkpoint = checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 4}, layout.base)
    spec, vector = pack(checkpoint, layout)
    assert sorted(checkpoint.consumed) == sorted(tensors)
    assert checkpoint.skipped == ()
    assert set(spec.ranks) == {2}
    for start, (a, b) in zip(spec.starts, zip(wanted[::2], wanted[1::2], strict=True), strict=True):
        at = start + -(-a.numel() // 512) * 512
        assert vector[start : start + a.numel()].equal(a.flatten())
        assert vector[at : at + b.numel()].equal(b.t().flatten())


def test_an_adapter_of_none_of_the_target_modules_is_refused_and_never_served(tiny: Any) -> None:
    """Row 5: the cache serves q and v; the adapter has o and down."""
    layout = LoraLayout(tiny.layout.base, targets=("q_proj", "v_proj"), dtype="float32")
    tensors, config = tiny.tensors(0, targets=("o_proj", "down_proj"))
    with AdapterCache(layout, gpu_bytes=4 << 20, host_bytes=4 << 20, device="cpu") as cache:
        with pytest.raises(AdapterUnsupported, match=r"serves q_proj, v_proj"):
            cache.put("a", tensors, config).result(10)
        admission = cache.admit([Request("r", "a")])
        assert tiny.wait_until(lambda: cache.admit([Request("r", "a")]).failed)
        assert not admission.admitted
        with pytest.raises(AdapterUnsupported):
            cache.acquire("a").result(10)


NAMES = st.lists(
    st.sampled_from(
        [
            *("base_model", "model", "layers", "0", "7", "self_attn", "mlp", "experts", "module"),
            *("q_proj", "k_proj", "qkv_proj", "gate_up_proj", "down_proj", "w1", "lm_head", "gate"),
            *("lora_A", "lora_B", "lora_a", "lora_embedding_A", "lora_embedding_B", "base_layer"),
            *("weight", "bias", "default", "lora_magnitude_vector", "visual", "", "linear"),
        ]
    ),
    max_size=9,
).map(".".join)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, 6, 8, 32, 64]), max_size=4)
BASES = {
    name: base_of(name)
    for name in ("tiny-llama.tf5.24", "tiny-qwen3moe.tf5.24", "tiny-phi3.tf5.24")
}


@given(
    base=st.sampled_from(sorted(BASES)),
    tensors=st.dictionaries(NAMES, SHAPES, max_size=5),
    config=st.fixed_dictionaries(
        {"r": st.sampled_from([1, 2, 4]), "lora_alpha": st.just(4)},
        optional={
            "peft_version": st.sampled_from(["0.18.1", "0.20.0", None]),
            "target_parameters": st.sampled_from([None, ["experts.gate_up_proj"]]),
            "rank_pattern": st.sampled_from([None, {"q_proj": 2}]),
        },
    ),
)
def test_no_bare_error_leaves_the_reader(
    base: str, tensors: dict[str, list[int]], config: dict[str, Any]
) -> None:
    """Row 8: whatever names and shapes there are, no KeyError or the like; rows 3, 4, 22, 107."""
    ones = {name: torch.ones(shape) for name, shape in tensors.items()}
    with suppress(AdapterCacheError):
        checkpoint = checkpoint_from_tensors(ones, config, BASES[base])
        skipped = {entry.name for entry in checkpoint.skipped}
        assert {*checkpoint.consumed} | skipped == ones.keys()
        assert checkpoint.modules
        for path in checkpoint.modules:
            checkpoint.delta(path)


@pytest.mark.parametrize("lacks", ["v_proj", "k_proj"])
def test_a_module_missing_in_some_layers_contributes_zero_there(tiny: Any, lacks: str) -> None:
    """Row 11: layer 1 shares its keys and values, so that the adapter has nothing for one of
    them; the packed group of q, k and v still gets the others right. Row 109: all or nothing."""
    tensors, config = tiny.tensors(3, targets=QKV)
    tensors = {n: t for n, t in tensors.items() if f"layers.1.self_attn.{lacks}" not in n}
    with tiny.cache() as cache:
        cache.put("a", tensors, config).result(10)
        with cache.acquire("a").result(10) as lease, cache.lora_batch([(lease, 2)]) as lora:
            device = lora.stack.device
            x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
            for layer in (0, 1):
                outputs = [torch.zeros(2, width, device=device) for width in (32, 16, 16)]
                add_lora(outputs, x.to(device), lora, QKV, layer)
                for module, got in zip(QKV, outputs, strict=True):
                    name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora"
                    if f"{name}_A.weight" not in tensors:
                        assert (layer, module) == (1, lacks)
                        assert not got.any()
                        continue
                    a, b = tensors[f"{name}_A.weight"], tensors[f"{name}_B.weight"]
                    assert torch.allclose(got.cpu(), 2 * (x @ a.T) @ b.T, atol=1e-4)


def written(folder: Path, weights: str, tensors: dict[str, torch.Tensor], config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("adapters.safetensors", "MLX-LM"),
        ("pytorch_lora_weights.safetensors", "diffusers"),
        ("adapter_model.tensors", "tensorizer"),
        ("model.lora_weights.npy", "TensorRT-LLM"),
    ],
)
def test_another_tools_layout_is_named_by_the_cache_too(
    tiny: Any, tmp_path: Path, name: str, feature: str
) -> None:
    """Row 16: a directory of MLX-LM (or diffusers, ...) is refused as that, and says what to do,
    when it is asked for through a cache; not as one that lacks a file."""
    tensors, config = tiny.tensors(0)
    written(tmp_path / "a", name, tensors, config)
    with tiny.cache(tmp_path) as cache:
        with pytest.raises(AdapterUnsupported, match=feature) as raised:
            cache.acquire("a").result(10)
        assert "convert" in raised.value.remedy


def test_weights_of_peft_beside_another_tools_are_read(tiny: Any, tmp_path: Path) -> None:
    """Row 16, the other way: nothing is refused for a file that nobody needs."""
    tensors, config = tiny.tensors(0)
    written(tmp_path / "a", "adapter_model.safetensors", tensors, config)
    save_file(tensors, tmp_path / "a" / "adapters.safetensors")
    with tiny.cache(tmp_path) as cache, cache.acquire("a").result(10) as lease:
        assert lease.slot >= 0


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_lora_outside_of_the_layers_is_read_and_refused_by_name_on_serving(
    tiny: Any, module: str
) -> None:
    """Rows 19, 86: LoRA of lm_head or of the embedding is read exactly (to merge it), and a cache
    that has no place for it says so by its name."""
    sides = {"A": (2, 32), "B": (64, 2)}
    if module.endswith("embed_tokens"):
        sides = {"embedding_A": (2, 64), "embedding_B": (32, 2)}
    draw = torch.Generator().manual_seed(0)
    head = {
        f"base_model.model.{module}.lora_{side}{'.weight' if len(side) == 1 else ''}": torch.randn(
            shape, generator=draw
        )
        for side, shape in sides.items()
    }
    tensors, config = tiny.tensors(0, rank=2)
    checkpoint = checkpoint_from_tensors({**tensors, **head}, config, tiny.layout.base)
    a, b = head.values()
    product = b @ a
    want = 2 * (product if module == "lm_head" else product.T)
    assert torch.allclose(checkpoint.delta(module), want, atol=1e-5)
    with pytest.raises(AdapterUnsupported, match=rf"LoRA on {module}.*merge it"):
        spec_of(checkpoint, tiny.layout)


def test_what_was_read_can_be_looked_into(tiny: Any) -> None:
    """Row 23: "it seems not to work": each module's rank, scaling and size can be asked for."""
    tensors, config = tiny.tensors(0, rank=4, alpha=6)
    checkpoint = checkpoint_from_tensors(tensors, config, tiny.layout.base)
    told = {
        path: (weights.rank, weights.scaling, float(weights.b.norm()))
        for path, weights in checkpoint.modules.items()
    }
    assert set(told) == {s.path for s in tiny.layout.sites if s.module in ("q_proj", "v_proj")}
    for path, (rank, scaling, norm) in told.items():
        assert (rank, scaling) == (4, 1.5)
        assert norm == pytest.approx(
            float(tensors[f"base_model.model.{path}.lora_B.weight"].norm())
        )


@pytest.mark.parametrize(
    "adapter_id", ["", "base", "None", "-1", "meta-llama/Llama-3-8B", "a/", "A"]
)
def test_only_none_is_the_base_model(tiny: Any, adapter_id: str) -> None:
    """Rows 25 to 28: no unknown id, whatever it looks like, is served by the base."""
    with tiny.cache(tiny.source("a")) as cache:
        tiny.load(cache, "a")
        with pytest.raises(AdapterNotFound):
            cache.acquire(adapter_id).result(10)
        waiting = [Request("r", adapter_id), Request("base", None)]
        assert tiny.wait_until(lambda: cache.admit(waiting).failed)
        admission = cache.admit(waiting)
        assert [request.request_id for request, _ in admission.admitted] == ["base"]
        assert cache.acquire(None).slot == -1


@pytest.mark.parametrize("what", ["folder", "file", "content"])
def test_an_adapter_given_as_the_base_model_is_recognised(tmp_path: Path, what: str) -> None:
    """Row 32: an adapter's directory where the base's config.json was asked for."""
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    given: Any = {"folder": tmp_path, "file": tmp_path / "adapter_config.json", "content": config}
    with pytest.raises(AdapterInvalid, match="an adapter's config") as raised:
        LoraLayout.from_config(given[what])
    assert "base_model_name_or_path" in str(raised.value.expected)
