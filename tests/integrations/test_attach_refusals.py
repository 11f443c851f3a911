"""What `attach` refuses, when, and that nothing else suffers from it."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", minversion="0.21")
pytest.importorskip("transformers", minversion="5")

import peft
import transformers
import trips
from attached import attached, cache_of

from adaptercache import (
    AdapterCache,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    CapacityError,
    LoraLayout,
)
from adaptercache.integrations.transformers import attach, detach

GREEDY = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4, "pad_token_id": 0}
IDS = torch.tensor([[7, 8, 9], [10, 11, 12]])


@pytest.fixture
def attachment(llama_adapters: Path) -> Iterator[tuple[Any, AdapterCache]]:
    with attached("llama", llama_adapters) as pair:
        yield pair


# -- adapters


@pytest.fixture
def with_bad_ones(llama_adapters: Path, tmp_path: Path) -> Path:
    """Two sound adapters, a corrupt one, and one with a feature that isn't served."""
    for name in ("a1", "a2", "corrupt", "dora"):
        source = name if name.startswith("a") else "a1"
        shutil.copytree(llama_adapters / source, tmp_path / name)
    weights = tmp_path / "corrupt" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config = tmp_path / "dora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    return tmp_path


@pytest.mark.parametrize(
    ("bad", "error"),
    [("nobody", AdapterNotFound), ("corrupt", AdapterInvalid), ("dora", AdapterUnsupported)],
)
def test_a_bad_adapter_fails_its_call_before_anything_is_computed(
    bad: str, error: type[Exception], with_bad_ones: Path
) -> None:
    with attached("llama", with_bad_ones) as (model, cache):
        want = model.generate(IDS, adapters=["a1", "a2"], **GREEDY)
        forwards = []
        model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
        for act in (
            lambda: model.generate(IDS, adapters=["a1", bad], **GREEDY),
            lambda: model(IDS, adapters=[bad, "a2"]),
        ):
            with pytest.raises(error) as raised:
                act()
            assert raised.value.adapter_id == bad
        assert not forwards
        assert cache.stats().leases == 0
        assert torch.equal(model.generate(IDS, adapters=["a1", "a2"], **GREEDY), want)


def test_more_adapters_than_slots_are_refused(llama_adapters: Path) -> None:
    ids = torch.ones(4, 2, dtype=torch.long)
    with attached("llama", llama_adapters, gpu_slots=2) as (model, cache):
        with pytest.raises(CapacityError) as raised:
            model(ids, adapters=["a0", "a1", "a2", None])
        assert (raised.value.needed, raised.value.limit, raised.value.unit) == (3, 2, "slots")
        assert cache.stats().leases == 0
        model(ids, adapters=["a2", "a1", None, "a2"])  # as many as there are, and the base


def test_more_bytes_than_the_gpu_has_are_refused(llama_adapters: Path) -> None:
    page = 64 << 10
    with attached("llama", llama_adapters, gpu_bytes=2 * page) as (model, cache):
        with pytest.raises(CapacityError) as raised:
            model(IDS.repeat(2, 1)[:3], adapters=["a3", "a4", "a5"])
        assert (raised.value.limit, raised.value.unit) == (2, "pages")
        assert cache.stats().leases == 0
        model(IDS, adapters=["a3", "a4"])


def test_two_names_of_one_content_take_one_slot(with_bad_ones: Path) -> None:
    shutil.copytree(with_bad_ones / "a1", with_bad_ones / "twin")
    with attached("llama", with_bad_ones, gpu_slots=2) as (model, _):
        ids = IDS[:1].repeat(3, 1)
        logits = model(ids, adapters=["a1", "twin", "a2"]).logits
        assert torch.equal(logits[0], logits[1])


def test_waiting_for_an_adapter_has_a_limit(llama_adapters: Path) -> None:
    model = trips.base_model("llama")
    with cache_of(model, llama_adapters, gpu_slots=1) as cache:
        attach(model, cache, timeout_s=0.1)
        with cache.acquire("a1"), pytest.raises(TimeoutError):
            model(IDS, adapters="a2")
        model(IDS, adapters="a2")


@pytest.mark.parametrize(
    ("adapters", "error"),
    [(["a1"], ValueError), (["a1"] * 3, ValueError), ([1, 2], TypeError), (7, TypeError)],
)
def test_adapters_are_one_id_or_one_a_row(
    adapters: Any, error: type[Exception], attachment: tuple[Any, AdapterCache]
) -> None:
    model, cache = attachment
    with pytest.raises(error):
        model(IDS, adapters=adapters)
    with pytest.raises(error):
        model.generate(IDS, adapters=adapters, **GREEDY)
    assert cache.stats().leases == 0


# -- leases


class Watch(transformers.LogitsProcessor):
    """Calls ``act`` with the number of each step of `generate`."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.act, self.step = act, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.act(self.step)
        self.step += 1
        return scores


def test_leases_are_held_through_generate_and_released_on_error(
    attachment: tuple[Any, AdapterCache],
) -> None:
    model, cache = attachment
    held = []

    def look(step: int) -> None:
        held.append(cache.stats().leases)
        if step == 2:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        model.generate(
            IDS.repeat(2, 1),
            adapters=["a1", "a2", None, "a1"],
            logits_processor=transformers.LogitsProcessorList([Watch(look)]),
            **GREEDY,
        )
    assert held == [2, 2, 2]
    assert cache.stats().leases == 0


def test_an_adapter_that_changes_in_the_midst_changes_the_next_call(
    attachment: tuple[Any, AdapterCache], llama_adapters: Path
) -> None:
    from safetensors.torch import load_file

    model, cache = attachment
    want = model.generate(IDS, adapters="a1", **GREEDY)
    other = model.generate(IDS, adapters="a3", **GREEDY)
    assert not torch.equal(want, other)
    tensors = load_file(llama_adapters / "a3/adapter_model.safetensors")
    config = json.loads((llama_adapters / "a3/adapter_config.json").read_text())

    def replace(step: int) -> None:
        if step == 1:
            cache.put("a1", tensors, config).result(10)

    watch = transformers.LogitsProcessorList([Watch(replace)])
    got = model.generate(IDS, adapters="a1", logits_processor=watch, **GREEDY)
    assert torch.equal(got, want)
    assert torch.equal(model.generate(IDS, adapters="a1", **GREEDY), other)


def test_threads_share_a_model_and_few_slots(llama_adapters: Path) -> None:
    """Each call needs two or three of six adapters, and there are three slots."""
    batches = [["a0", "a1", "a2"], ["a3", "a4", None], ["a5", "a0", "a3"], ["a2", "a5", "a4"]]
    ids = torch.tensor([[7, 8, 9], [10, 11, 12], [13, 14, 15]])
    with attached("llama", llama_adapters, gpu_slots=3) as (model, cache):
        want = [model.generate(ids, adapters=names, **GREEDY) for names in batches]
        wrong: list[Any] = []

        def serve(first: int) -> None:
            for i in range(8):
                batch = (first + i) % len(batches)
                try:
                    got = model.generate(ids, adapters=batches[batch], **GREEDY)
                    if not torch.equal(got, want[batch]):
                        wrong.append((batches[batch], got))
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), "batches wait for each other"
        assert not wrong
        assert cache.stats().leases == 0


# -- models


def test_attaching_twice_is_refused(llama_adapters: Path) -> None:
    model = trips.base_model("llama")
    with cache_of(model, llama_adapters) as cache:
        attach(model, cache)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="attached"):
                attach(model, cache)
        detach(model)
        with pytest.raises(RuntimeError, match="no adapters are attached"):
            detach(model)
        with attach(model, cache):
            model(IDS, adapters="a1")
        with pytest.raises(RuntimeError, match="no adapters are attached"):
            detach(model)


def test_detaching_in_the_midst_is_refused(attachment: tuple[Any, AdapterCache]) -> None:
    model, _ = attachment
    refused = []

    def try_it(step: int) -> None:
        with pytest.raises(RuntimeError, match="running"):
            detach(model)
        refused.append(step)

    watch = transformers.LogitsProcessorList([Watch(try_it)])
    model.generate(IDS, adapters="a1", logits_processor=watch, **GREEDY)
    assert refused == [0, 1, 2, 3]


def test_detaching_under_somebody_elses_wrapper_is_refused(
    attachment: tuple[Any, AdapterCache],
) -> None:
    model, _ = attachment
    q_proj = model.model.layers[1].self_attn.q_proj
    ours = q_proj.forward
    q_proj.forward = lambda x: ours(x)
    with pytest.raises(RuntimeError, match="replaced"):
        detach(model)
    q_proj.forward = ours
    model(IDS, adapters="a1")


def test_a_wrapper_that_was_there_before_is_there_after(llama_adapters: Path) -> None:
    model = trips.base_model("llama")
    q_proj = model.model.layers[0].self_attn.q_proj
    inner = q_proj.forward
    q_proj.forward = wrapper = lambda x: inner(x) + 1
    want = model(IDS).logits
    with cache_of(model, llama_adapters) as cache, attach(model, cache):
        assert torch.equal(model(IDS).logits, want)
    assert q_proj.forward is wrapper


def in_dtype(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda model: model.to(dtype)


def without_a_layer(model: Any) -> Any:
    del model.model.layers[1]
    return model


def with_peft(model: Any) -> Any:
    with trips.quiet():
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def with_adapter_of_peft(model: Any) -> Any:
    with_peft(model)
    return model


def with_a_compiled_layer(model: Any) -> Any:
    model.model.layers[1].compile(backend="eager")
    return model


def with_an_encoder(model: Any) -> Any:
    model.config.is_encoder_decoder = True
    return model


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (in_dtype(torch.bfloat16), AdapterUnsupported, "bfloat16"),
        (lambda model: model.to("meta"), AdapterUnsupported, "meta"),
        (without_a_layer, ValueError, r"model\.layers\.1"),
        (lambda model: model.model, ValueError, "from_model"),
        (with_peft, ValueError, "PEFT"),
        (with_adapter_of_peft, ValueError, "PEFT"),
        (with_a_compiled_layer, AdapterUnsupported, "compile"),
        (lambda model: torch.compile(model, backend="eager"), AdapterUnsupported, "compile"),
        (with_an_encoder, AdapterUnsupported, "encoder-decoder"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_left_alone(
    change: Callable[[Any], Any], error: type[Exception], says: str, llama_adapters: Path
) -> None:
    plain = trips.base_model("llama")
    with cache_of(plain, llama_adapters) as cache:
        model = change(trips.base_model("llama"))
        with pytest.raises(error, match=says):
            attach(model, cache)
        assert not any("forward" in vars(module) for module in plain.modules())


def test_a_layout_of_one_rank_of_several_is_refused(llama_adapters: Path) -> None:
    model = trips.base_model("llama")
    layout = LoraLayout.from_model(model, tp_rank=0, tp_size=2)
    with (
        AdapterCache(
            layout, llama_adapters, gpu_bytes=1 << 20, host_bytes=4 << 20, device="cpu"
        ) as cache,
        pytest.raises(AdapterUnsupported, match="tensor parallelism"),
    ):
        attach(model, cache)


def test_copies_and_pickles_of_an_attached_model_are_refused(
    attachment: tuple[Any, AdapterCache],
) -> None:
    model, _ = attachment
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(AdapterUnsupported, match="detach first"):
            act(model)


def test_autocast_is_refused_where_adapters_are_used(
    attachment: tuple[Any, AdapterCache],
) -> None:
    model, cache = attachment
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS)
        with pytest.raises(AdapterUnsupported, match="autocast"):
            model(IDS, adapters="a1")
    assert cache.stats().leases == 0


def compile_around(model: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


def compile_fully(model: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[no-any-return]


def compile_in_place(model: Any) -> Callable[..., Any]:
    model.compile(backend="eager")
    return model  # type: ignore[no-any-return]


def compile_a_layer(model: Any) -> Callable[..., Any]:
    model.model.layers[1].compile(backend="eager")
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "compile_it", [compile_around, compile_fully, compile_in_place, compile_a_layer]
)
def test_compiling_an_attached_model_is_refused(
    compile_it: Callable[[Any], Callable[..., Any]], attachment: tuple[Any, AdapterCache]
) -> None:
    model, cache = attachment
    compiled = compile_it(model)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(AdapterUnsupported, match=r"torch\.compile"):
            compiled(IDS, adapters=["a1", "a2"])
    assert cache.stats().leases == 0
    for module in model.modules():
        module._compiled_call_impl = None


def test_what_was_compiled_before_never_runs_without_the_adapters(llama_adapters: Path) -> None:
    model = trips.base_model("llama")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(IDS)
        with cache_of(model, llama_adapters) as cache:
            attach(model, cache)
            with pytest.raises(AdapterUnsupported, match=r"torch\.compile"):
                compiled(IDS, adapters=["a1", "a2"])
            detach(model)
        compiled(IDS)


def test_generate_that_would_compile_by_itself_is_refused(
    attachment: tuple[Any, AdapterCache],
) -> None:
    model, _ = attachment
    config = transformers.CompileConfig(backend="eager")
    config._compile_all_devices = True  # as on a GPU
    static = {"cache_implementation": "static", "compile_config": config}
    with pytest.raises(AdapterUnsupported, match="disable_compile=True"):
        model.generate(IDS, adapters="a1", **static, **GREEDY)


def test_continuous_batching_is_refused(attachment: tuple[Any, AdapterCache]) -> None:
    model, _ = attachment
    with pytest.raises(AdapterUnsupported, match="continuous batching"):
        model.generate_batch([[7, 8, 9]], adapters=["a1"])
    with pytest.raises(AdapterUnsupported, match="continuous batching"):
        model.generate(IDS, adapters="a1", cache_implementation="paged", **GREEDY)


def test_adapters_for_the_decoder_inside_are_refused(
    attachment: tuple[Any, AdapterCache],
) -> None:
    model, _ = attachment
    with pytest.raises(TypeError, match="the model that they are attached to"):
        model.model(IDS, adapters=["a1", "a2"])
    model.model(IDS)


@pytest.mark.parametrize("name", ["adapter", "adapter_names"])
def test_other_spellings_do_not_pass_for_the_base_model(
    attachment: tuple[Any, AdapterCache], name: str
) -> None:
    model, _ = attachment
    for its in (model, model.model):
        with pytest.raises(TypeError, match=r"adapters=\[\.\.\.\]"):
            its(IDS, **{name: ["a1", "a2"]})
    with pytest.raises((TypeError, ValueError), match=name):
        model.generate(IDS, **{name: ["a1", "a2"]}, **GREEDY)


def test_a_call_inside_a_call_that_never_fits_beside_it_is_refused(llama_adapters: Path) -> None:
    """Guidance by another adapter, from a logits processor: it waited for what its own thread
    held."""
    with attached("llama", llama_adapters, gpu_slots=2) as (model, cache):

        def guided(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            model(ids, adapters=["a3"] * len(ids))
            return scores

        with pytest.raises(CapacityError, match="does not fit the GPU at once"):
            model.generate(IDS, adapters=["a1", "a2"], logits_processor=[guided], **GREEDY)
        model.generate(IDS, adapters=["a1", "a1"], logits_processor=[guided], **GREEDY)
        assert cache.stats().leases == 0


class Transposed(torch.nn.Module):
    """A model that works on tokens first, rows second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].q_proj = torch.nn.Linear(32, 32)

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[0].q_proj(inputs_embeds.transpose(0, 1))
        return y.transpose(0, 1)


def test_a_model_that_turns_rows_and_tokens_is_refused(tmp_path: Path) -> None:
    model = Transposed()
    tensors = {
        "layers.0.q_proj.lora_A.weight": torch.ones(2, 32),
        "layers.0.q_proj.lora_B.weight": torch.ones(32, 2),
    }
    with cache_of(model, tmp_path) as cache, attach(model, cache):
        cache.put("a", tensors, {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}).result(10)
        with pytest.raises(AdapterUnsupported, match=r"\[3, 2, 32\]"):
            model(inputs_embeds=torch.ones(2, 3, 32), adapters=["a", None])
