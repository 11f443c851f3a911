"""`attach` gives each row of a mixed batch what PEFT gives its request alone."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", minversion="0.21")
pytest.importorskip("transformers", minversion="5")

import peft
import transformers
import trips
from attached import Peft, attached, cache_of, logits_by_row, padded, prompts, save

from adaptercache import AdapterUnsupported, LoraLayout
from adaptercache.integrations import projections
from adaptercache.integrations.transformers import attach, detach

FAMILIES = ("llama", "qwen2", "mistral", "gemma", "phi3", "gpt2")
GREEDY = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_64_mixed_requests_give_pefts_tokens(family: str, tmp_path: Path) -> None:
    names = save(tmp_path, family, range(16))
    of_rows = [*(names * 3), *([None] * 16)]
    random.Random(0).shuffle(of_rows)
    rows = prompts(64)
    with attached(family, tmp_path) as (model, _):
        got = model.generate(**padded(rows), adapters=of_rows, **GREEDY)[:, -6:]
        base = model.generate(**padded(rows), **GREEDY)[:, -6:]
    changed = (got != base).any(1)
    assert changed.sum() > 24
    assert not any(changed[row] for row, name in enumerate(of_rows) if name is None)
    reference = Peft(family, tmp_path, names)
    for name in [*names, None]:
        for row, (prompt, its) in enumerate(zip(rows, of_rows, strict=True)):
            if its == name:
                want = reference.generate(prompt, name, **GREEDY)[0]
                assert got[row].tolist() == want.tolist(), f"row {row} of {name}"


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text"])
def test_norms_on_q_and_k_read_what_was_added(family: str, tmp_path: Path) -> None:
    """They are computed between one projection and the next, on its output."""
    names = [*save(tmp_path, family, range(3)), None]
    ids = torch.stack([prompt[:3] for prompt in prompts(4)])
    with attached(family, tmp_path) as (model, _):
        got = model(input_ids=ids, adapters=names).logits
    want = logits_by_row(Peft(family, tmp_path, names[:-1]), ids, names)
    assert_close(got, want)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_bfloat16_is_as_near_to_float32_as_pefts_own(tmp_path: Path) -> None:
    names = save(tmp_path, "llama", range(8), dtype=torch.bfloat16, autocast=False)
    ids = torch.randint(6, 67, (8, 12), generator=torch.Generator().manual_seed(0))
    model = trips.base_model("llama", torch.bfloat16)
    with cache_of(model, tmp_path) as cache, attach(model, cache):
        got = model(input_ids=ids, adapters=names).logits.float()
    want = logits_by_row(Peft("llama", tmp_path, names), ids, names)
    theirs = logits_by_row(Peft("llama", tmp_path, names, torch.bfloat16), ids, names).float()
    assert (got - want).pow(2).mean() <= 1.1 * (theirs - want).pow(2).mean()
    assert_near(got, want)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """As bfloat16 is to float32, in each row: about 0.02. Another adapter makes 1.4."""
    squared = (got - want).pow(2).mean((1, 2)) / want.pow(2).mean((1, 2))
    assert squared.max() <= 0.1**2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the next test runs them compiled")
def test_the_kernels_take_its_tensors_as_the_reference_does(
    llama_adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from adaptercache.kernels.launch import add_lora_triton

    def interpreted(y: Any, x: Any, batch: Any, modules: tuple[str, ...], layer: int) -> None:
        add_lora_triton(y, x, batch, batch.stack.group(layer, modules))

    ids = torch.stack([prompt[:1] for prompt in prompts(3)])
    of_rows = ["a5", None, "a1"]
    with attached("llama", llama_adapters) as (model, _):
        want = model(ids, adapters=of_rows).logits
        monkeypatch.setattr(projections, "add_lora", interpreted)
        assert_close(model(ids, adapters=of_rows).logits, want)


@pytest.mark.gpu
def test_on_a_gpu_it_gives_pefts_logits(tmp_path: Path) -> None:
    names = save(tmp_path, "llama", range(16), dtype=torch.bfloat16, autocast=False)
    of_rows = [*names, None]
    ids = torch.randint(6, 67, (17, 12), generator=torch.Generator().manual_seed(0))
    model = trips.base_model("llama", torch.bfloat16).cuda()
    with cache_of(model, tmp_path, device="cuda") as cache, attach(model, cache):
        got = model(input_ids=ids.cuda(), adapters=of_rows).logits.float().cpu()
        tokens = model.generate(input_ids=ids.cuda(), adapters=of_rows, **GREEDY)
    assert tokens.shape == (17, 18)
    want = logits_by_row(Peft("llama", tmp_path, names), ids, of_rows)
    assert_near(got, want)


BEAMS = {"do_sample": False, "num_beams": 3, "max_new_tokens": 5, "pad_token_id": 0}


def test_the_beams_of_a_row_use_its_adapter(llama_adapters: Path) -> None:
    names = ["a2", None, "a5", "a1"]
    rows = prompts(4, seed=3)
    options = BEAMS | {"num_return_sequences": 2, "min_new_tokens": 5}
    with attached("llama", llama_adapters) as (model, _):
        got = model.generate(**padded(rows), adapters=names, **options)[:, -5:]
    reference = Peft("llama", llama_adapters, ["a1", "a2", "a5"])
    want = [reference.generate(*pair, **options) for pair in zip(rows, names, strict=True)]
    assert got.tolist() == torch.cat(want).tolist()


def test_several_samples_of_a_row_use_its_adapter(llama_adapters: Path) -> None:
    # The sharpest of distributions: a sample is what greedy search gives.
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    with attached("llama", llama_adapters) as (model, _):
        inputs = padded(prompts(3))
        names = ["a1", "a4", None]
        once = model.generate(**inputs, adapters=names, **GREEDY)
        got = model.generate(**inputs, adapters=names, **(GREEDY | sampled))
    assert got.tolist() == once.repeat_interleave(3, dim=0).tolist()


@pytest.mark.parametrize(
    "more",
    [
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"prefill_chunk_size": 2},
        {"guidance_scale": 1.5},
    ],
    ids=lambda more: next(iter(more)),
)
def test_other_ways_to_generate(more: dict[str, Any], llama_adapters: Path) -> None:
    rows = [prompt[:3] for prompt in prompts(3)]
    names = ["a1", None, "a3"]
    with attached("llama", llama_adapters) as (model, _):
        got = model.generate(**padded(rows), adapters=names, **GREEDY, **more)
    reference = Peft("llama", llama_adapters, ["a1", "a3"])
    want = [reference.generate(*pair, **GREEDY, **more) for pair in zip(rows, names, strict=True)]
    assert got[:, -6:].tolist() == torch.cat(want).tolist()


def test_prompt_lookup_verifies_several_tokens_at_once(llama_adapters: Path) -> None:
    prompt = torch.tensor([[7, 8, 9, 7, 8, 9, 7, 8]])
    with attached("llama", llama_adapters) as (model, _):
        want = model.generate(input_ids=prompt, adapters="a3", **GREEDY)
        got = model.generate(input_ids=prompt, adapters="a3", prompt_lookup_num_tokens=2, **GREEDY)
    assert got.tolist() == want.tolist()


def test_forward_takes_ids_or_embeddings_one_adapter_or_many(llama_adapters: Path) -> None:
    ids = torch.stack([prompt[:3] for prompt in prompts(2)])
    with attached("llama", llama_adapters) as (model, _):
        both = model(ids, adapters=["a1", "a1"]).logits
        assert torch.equal(model(ids, adapters="a1").logits, both)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embedded, adapters=("a1", "a1")).logits, both)
        assert not torch.equal(model(ids).logits, both)
        assert not both.requires_grad
    want = logits_by_row(Peft("llama", llama_adapters, ["a1"]), ids, ["a1", "a1"])
    assert_close(both, want)


def test_the_base_model_is_untouched_while_attached_and_after(llama_adapters: Path) -> None:
    model = trips.base_model("llama").requires_grad_(True)
    ids = torch.stack([prompt[:3] for prompt in prompts(2)])
    before = model(ids).logits
    tokens = model.generate(ids, **GREEDY)
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    weights = {name: (w.clone(), w.data_ptr()) for name, w in model.state_dict().items()}
    with cache_of(model, llama_adapters) as cache:
        attach(model, cache)
        attached_keys = list(model.state_dict())
        mixed = model(ids, adapters=["a2", None]).logits
        assert torch.equal(mixed[1], before[1])
        assert not torch.equal(mixed[0], before[0])
        for logits in (model(ids).logits, model(ids, adapters=None).logits):
            assert torch.equal(logits, before)
            assert logits.requires_grad
        assert torch.equal(model(ids, adapters=[None, None]).logits, before)
        assert torch.equal(model.generate(ids, **GREEDY), tokens)
        detach(model)
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(model.generate(ids, **GREEDY), tokens)
    assert attached_keys == list(weights)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name][0])
        assert weight.data_ptr() == weights[name][1]
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    with pytest.raises(ValueError, match="adapters"):
        model.generate(ids, adapters="a2", **GREEDY)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """How often `add_lora` was called for each group of modules."""
    counted: Counter[tuple[str, ...]] = Counter()
    add_lora = projections.add_lora

    def count(y: Any, x: Any, batch: Any, modules: tuple[str, ...], layer: int) -> None:
        counted[modules] += 1
        add_lora(y, x, batch, modules, layer)

    monkeypatch.setattr(projections, "add_lora", count)
    return counted


QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def test_modules_that_share_their_input_go_in_one_call(
    llama_adapters: Path, calls: Counter[tuple[str, ...]]
) -> None:
    with attached("llama", llama_adapters) as (model, _):
        ids = torch.ones(3, 2, dtype=torch.long)
        model(ids, adapters=[None, None, None])
        assert not calls, "no launch where there is no adapter"
        for _ in range(2):
            model(ids, adapters=["a1", None, "a2"])
    assert calls == {QKV: 4, ("o_proj",): 4, GATE_UP: 4, ("down_proj",): 4}


def test_a_module_with_an_input_of_its_own_is_served_by_itself(
    llama_adapters: Path, calls: Counter[tuple[str, ...]]
) -> None:
    def double(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (2 * args[0],)

    ids = torch.stack([prompt[:3] for prompt in prompts(2)])
    names = ["a1", "a2"]
    with attached("llama", llama_adapters) as (model, _):
        model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(double)
        got = [model(ids, adapters=names).logits for _ in range(2)]
    reference = Peft("llama", llama_adapters, names)
    layer = reference.model.base_model.model.model.layers[1]
    layer.self_attn.k_proj.register_forward_pre_hook(double)
    want = logits_by_row(reference, ids, names)
    for logits in got:
        assert_close(logits, want)
    # Of the second layer: first with what was computed for nothing, then one by one.
    assert calls[QKV] == 3
    assert calls["k_proj",] == 2
    assert calls["q_proj",] == 1


def llama4() -> Any:
    """Its routers are linear modules that give two tensors."""
    return transformers.Llama4TextConfig(
        **trips.SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=2
    )


def deepseek() -> Any:
    """Its ``kv_b_proj`` is given ``[rows, 1, tokens, in]``, of all tokens so far."""
    return transformers.DeepseekV3Config(
        **(trips.SIZES | {"num_key_value_heads": 4}),
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=2,
    )


def opt() -> Any:
    """Its MLP is given all tokens in one dimension."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 67}
    return transformers.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32)


@pytest.mark.parametrize("config", [llama4, deepseek, opt])
def test_models_that_shape_their_inputs_otherwise(
    config: Callable[[], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval().requires_grad_(False)
    layout = LoraLayout.from_model(model)
    targets = [site.path for site in layout.sites if site.module != "router"]
    with trips.quiet():
        options = {"r": 3, "target_modules": targets, "init_lora_weights": False}
        theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options)).eval()
        theirs.save_pretrained(tmp_path / "a")
    ids = torch.stack([prompt[:3] for prompt in prompts(2)])
    with cache_of(model, tmp_path) as cache, attach(model, cache):
        got = model(ids, adapters=["a", None]).logits
        want = torch.stack([theirs(ids).logits[0], model(ids).logits[1]])
        assert_close(got, want.detach())
        assert (got - model(ids).logits)[0].abs().max() > 1e-3
        tokens = model.generate(ids, adapters=["a", None], **GREEDY)
        assert torch.equal(tokens[:1], theirs.generate(input_ids=ids[:1], **GREEDY))
        assert torch.equal(tokens[1:], model.generate(ids[1:], **GREEDY))


def test_lora_on_what_gives_no_tensor_is_refused(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(llama4())
    path = next(site.path for site in LoraLayout.from_model(model).sites if site.module == "router")
    tensors = {
        f"{path}.lora_A.weight": torch.ones(2, 32),
        f"{path}.lora_B.weight": torch.ones(2, 2),
    }
    with cache_of(model, tmp_path) as cache, attach(model, cache):
        cache.put("a", tensors, {"r": 2, "lora_alpha": 2, "target_modules": ["router"]}).result(10)
        with pytest.raises(AdapterUnsupported, match="router"):
            model(torch.ones(2, 3, dtype=torch.long), adapters="a")


class Lopsided(torch.nn.Module):
    """A model that has a k_proj, and doesn't call it: as where layers share their KV."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].q_proj = torch.nn.Linear(32, 32)
        self.layers[0].k_proj = torch.nn.Linear(32, 32)

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[0].q_proj(inputs_embeds)
        return y


def test_what_is_not_called_is_not_computed_for_ever(
    tmp_path: Path, calls: Counter[tuple[str, ...]]
) -> None:
    model = Lopsided()
    tensors = {
        "layers.0.q_proj.lora_A.weight": torch.ones(2, 32),
        "layers.0.q_proj.lora_B.weight": torch.ones(32, 2),
    }
    with cache_of(model, tmp_path) as cache, attach(model, cache):
        cache.put("a", tensors, {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}).result(10)
        x = torch.ones(2, 3, 32)
        for _ in range(3):
            y = model(inputs_embeds=x, adapters=["a", None])
            assert_close(y - model(x), torch.tensor([64.0, 0]).view(2, 1, 1).expand(2, 3, 32))
    assert calls == {("q_proj", "k_proj"): 1, ("q_proj",): 2}


def test_inference_mode_gives_the_same(llama_adapters: Path) -> None:
    inputs = padded(prompts(3))
    with attached("llama", llama_adapters) as (model, _):
        with torch.inference_mode():
            first = model.generate(**inputs, adapters=["a1", None, "a4"], **GREEDY)
        assert torch.equal(first, model.generate(**inputs, adapters=["a1", None, "a4"], **GREEDY))


def test_an_input_changed_in_place_is_not_the_same_input(llama_adapters: Path) -> None:
    def double(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        args[0].mul_(2)

    ids = torch.stack([prompt[:3] for prompt in prompts(2)])
    names = ["a1", "a2"]
    with attached("llama", llama_adapters) as (model, _):
        model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(double)
        got = model(ids, adapters=names).logits
    reference = Peft("llama", llama_adapters, names)
    layer = reference.model.base_model.model.model.layers[0]
    layer.self_attn.v_proj.register_forward_pre_hook(double)
    assert_close(got, logits_by_row(reference, ids, names))
