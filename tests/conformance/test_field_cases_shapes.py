"""Section D of ``tests/field_cases.md``: fused matrices, dtypes, ranks, embeddings. Each test
names its rows; experts are in ``test_field_cases_experts.py``."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adaptercache import AdapterCache, AdapterInvalid, AdapterUnsupported, LoraLayout, Tier
from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import checkpoint_from_tensors
from adaptercache.kernels import LoraBatch, add_lora
from adaptercache.kernels.segments import RANK_CLASSES
from adaptercache.layout import MAX_RANK
from adaptercache.packing import pack, spec_of
from adaptercache.testing import any_device, held_weights, random_adapter

KERNELS = Path(__file__).parents[2] / "adaptercache" / "kernels"
ATTENTION = "model.layers.0.self_attn"


def attention(**rows: int) -> BaseModel:
    """One layer whose attention has these modules; all take 8 inputs."""
    return BaseModel(
        {f"{ATTENTION}.{name}": BaseModule("linear", (out, 8)) for name, out in rows.items()}
    )


def lora(path: str, out: int, inputs: int = 8, rank: int = 2) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(out)
    return {
        f"{path}.lora_A.weight": torch.randn(rank, inputs, generator=draw),
        f"{path}.lora_B.weight": torch.randn(out, rank, generator=draw),
    }


# Fused matrices.


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("qkv_proj", {"q_proj": 8, "k_proj": 4, "v_proj": 4}),
        ("W_pack", {"q_proj": 8, "k_proj": 8, "v_proj": 8}),
    ],
)
def test_a_fused_adapter_and_its_parts_are_one(fused: str, parts: dict[str, int]) -> None:
    """Rows 64, 65, 68, 81: q, then k, then v by rows, whose sizes are the base's own."""
    total = sum(parts.values())
    tensors = lora(f"{ATTENTION}.{fused}", total)
    a, b = tensors.values()
    apart = checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 2}, attention(**parts))
    whole = checkpoint_from_tensors(
        tensors, {"r": 2, "lora_alpha": 2}, attention(**{fused: total, "o_proj": 8})
    )
    assert torch.equal(torch.cat([apart.delta(f"{ATTENTION}.{part}") for part in parts]), b @ a)
    assert torch.equal(whole.delta(f"{ATTENTION}.{fused}"), b @ a)


def test_gate_comes_before_up() -> None:
    """Row 67: the first half of gate_up_proj is gate; the layout names each module by itself, so
    that an engine of another order asks for what it wants."""
    mlp = "model.layers.0.mlp"
    rows = {"gate_proj": 6, "up_proj": 6}
    base = BaseModel({f"{mlp}.{n}": BaseModule("linear", (out, 8)) for n, out in rows.items()})
    tensors = lora(f"{mlp}.gate_up_proj", 12)
    a, b = tensors.values()
    checkpoint = checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 2}, base)
    assert torch.equal(checkpoint.delta(f"{mlp}.gate_proj"), b[:6] @ a)
    assert torch.equal(checkpoint.delta(f"{mlp}.up_proj"), b[6:] @ a)
    assert LoraLayout(base).modules == ("gate_proj", "up_proj")


@pytest.mark.parametrize("fused", ["query_key_value", "c_attn", "wqkv", "Wqkv"])
def test_a_fused_matrix_of_another_order_is_never_cut(fused: str) -> None:
    """Row 68: heads interleaved, or an order that only the model's class knows: the base's own
    module of that name takes it, and any other base refuses it by name."""
    tensors, config = lora(f"{ATTENTION}.{fused}", 24), {"r": 2, "lora_alpha": 2}
    whole = checkpoint_from_tensors(tensors, config, attention(**{fused: 24}))
    assert list(whole.modules) == [f"{ATTENTION}.{fused}"]
    with pytest.raises(AdapterInvalid, match=fused):
        checkpoint_from_tensors(tensors, config, attention(q_proj=8, k_proj=8, v_proj=8))
    with pytest.raises(AdapterInvalid, match="q_proj"):
        checkpoint_from_tensors(
            lora(f"{ATTENTION}.q_proj", 8), config, attention(**{fused: 24, "o_proj": 8})
        )


# Dtypes.

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("served", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_every_dtype_of_a_file_is_cast_once_to_that_of_the_arena(
    tiny: Any, stored: torch.dtype, served: str
) -> None:
    """Rows 87, 88, 89: and the bytes are counted in the arena's dtype, not in the file's."""
    layout = LoraLayout(tiny.layout.base, max_rank=16, dtype=served)
    tensors, config = tiny.tensors(0, dtype=stored)
    host = {"host_bytes": 1 << 20, "host_block_bytes": 4096}
    with AdapterCache(layout, gpu_bytes=4 << 20, device="cpu", **host) as cache:
        cache.put("a", tensors, config).result(10)
        with cache.acquire("a").result(10) as lease:
            for layer in (0, 1):
                found = held_weights(cache, lease, layer, "q_proj")
                assert found is not None
                name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora"
                for got, side in zip(found[:2], "AB", strict=True):
                    assert got.equal(tensors[f"{name}_{side}.weight"].to(getattr(torch, served)))
            assert cache.stats().resident_bytes[Tier.HOST] == 4 * 1024 * layout.itemsize


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize(
    ("stored", "served", "value"),
    [
        (torch.float32, "float16", 7e4),
        (torch.bfloat16, "float16", -1e5),
        (torch.float32, "bfloat16", 3.4e38),  # rounds up, over bfloat16's largest
        (torch.float64, "float32", -1e39),
        (torch.float64, "bfloat16", 1e300),
        (torch.float64, "float16", 65519.0),  # rounds down to the largest: allowed
    ],
    ids=str,
)
def test_a_weight_that_the_arena_cannot_hold_is_refused_and_none_becomes_infinite(
    tiny: Any, stored: torch.dtype, served: str, value: float, side: str
) -> None:
    """Row 87: overflow is checked for every pair of dtypes."""
    layout = LoraLayout(tiny.layout.base, max_rank=16, dtype=served)
    tensors, config = tiny.tensors(0, dtype=stored)
    module = "base_model.model.model.layers.1.self_attn.v_proj"
    for each in "AB":  # ΔW stays small: only the arena can't hold it
        tensors[f"{module}.lora_{each}.weight"].zero_()
    tensors[f"{module}.lora_{side}.weight"][1, 2] = value
    if value == 65519.0:
        checkpoint = checkpoint_from_tensors(tensors, config, layout.base)
        assert pack(checkpoint, layout)[1].isfinite().all()
        return
    with pytest.raises(AdapterInvalid, match=f"too large for {served}|beyond float32") as raised:
        pack(checkpoint_from_tensors(tensors, config, layout.base), layout)
    assert "layers.1.self_attn.v_proj" in str(raised.value.where)


@pytest.mark.parametrize(
    "path", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
)
def test_what_one_rank_refuses_all_do(tiny: Any, path: str) -> None:
    """Row 85: of a model that is cut, each rank holds a part; one that can't be held in the part of
    a single rank is refused on all, so that none of them serves it."""
    tensors, config = tiny.tensors(0, targets=("q_proj", "down_proj"))
    side, at = ("B", (0, 0)) if "q_proj" in path else ("A", (0, 0))
    tensors[f"base_model.model.{path}.lora_{side}.weight"][at] = 1e6
    checkpoint = checkpoint_from_tensors(tensors, config, tiny.layout.base)
    for rank in (0, 1):
        layout = LoraLayout(tiny.layout.base, max_rank=16, dtype="float16", tp_rank=rank, tp_size=2)
        with pytest.raises(AdapterInvalid, match="too large for float16"):
            pack(checkpoint, layout)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_a_quantised_lora_tensor_is_refused_by_its_dtype(tiny: Any, dtype: torch.dtype) -> None:
    """Row 89."""
    tensors, config = tiny.tensors(0)
    cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    with pytest.raises(AdapterUnsupported, match=str(dtype)) as raised:
        checkpoint_from_tensors(cast, config, tiny.layout.base)
    assert "bfloat16" in raised.value.remedy


@pytest.fixture
def lora_batch(tiny: Any) -> Any:
    with tiny.cache(device="cpu") as cache:
        cache.put("a", *tiny.tensors(0)).result(10)
        with cache.acquire("a").result(10) as lease, cache.lora_batch([(lease, 3)]) as batch:
            yield batch


def test_the_term_is_linear_in_an_input_that_is_small_or_large(lora_batch: LoraBatch) -> None:
    """Row 75: nothing in between is quantised, so an input 500 times smaller gives a term 500
    times smaller; no threshold, no scale of its own."""
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    terms = []
    for factor in (1.0, 2.0**-9, 2.0**9):
        y = torch.zeros(3, 32)
        add_lora(y, factor * x, lora_batch, ("q_proj",), 0)
        terms.append(y / factor)
    assert terms[0].any()
    assert terms[1].equal(terms[0])
    assert terms[2].equal(terms[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("which", ["x", "y"])
def test_quantised_activations_are_refused(
    lora_batch: LoraBatch, dtype: torch.dtype, which: str
) -> None:
    """Rows 75, 93: add_lora takes the input as it was before it was quantised."""
    x, y = torch.zeros(3, 32), torch.zeros(3, 32)
    pair = {"x": x, "y": y, which: torch.zeros(3, 32).to(dtype)}
    with pytest.raises(TypeError, match=f"{which} is {dtype}"):
        add_lora(pair["y"], pair["x"], lora_batch, ("q_proj",), 0)


# Ranks.


@pytest.mark.parametrize("rank", [1, 3, 8, 24, 48, 130])
def test_any_rank_in_one_batch(tiny: Any, rank: int) -> None:
    """Rows 97, 98, 99, 101: below 16, no power of two, large, beside another of rank 8, one token
    each; and an adapter takes the pages of its own rank, not of the largest."""
    layout = LoraLayout(tiny.layout.base, max_rank=256, dtype="float32")
    with AdapterCache(layout, gpu_bytes=32 << 20, host_bytes=32 << 20, device="cpu") as cache:
        adapters = {"a": tiny.tensors(1, rank=rank), "b": tiny.tensors(2, rank=8)}
        for adapter_id, adapter in adapters.items():
            cache.put(adapter_id, *adapter).result(10)
        leases = [cache.acquire(adapter_id).result(10) for adapter_id in adapters]
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
        y = torch.zeros(2, 32)
        with cache.lora_batch([(lease, 1) for lease in leases]) as batch:
            add_lora(y, x, batch, ("q_proj",), 1)
        for row, (tensors, _) in enumerate(adapters.values()):
            a, b = (
                tensors[f"base_model.model.model.layers.1.self_attn.q_proj.lora_{s}.weight"]
                for s in "AB"
            )
            assert torch.allclose(y[row], 2 * b @ (a @ x[row]), atol=1e-4)
        for lease in leases:
            lease.release()
    tensors, config = adapters["a"]
    exact = sum(tensor.numel() for tensor in tensors.values())
    spec = spec_of(checkpoint_from_tensors(tensors, config, layout.base), layout)
    assert exact <= spec.elements < exact + 512 * len(tensors)


def test_no_layout_accepts_a_rank_that_no_kernel_has(tiny: Any) -> None:
    """Row 94: what the allocator accepts can be computed: a larger rank is refused when the layout
    is made, not in the step of a batch that others are in."""
    assert RANK_CLASSES[-1] == MAX_RANK
    assert LoraLayout(tiny.layout.base, max_rank=MAX_RANK).max_rank == MAX_RANK
    with pytest.raises(ValueError, match=f"max_rank {MAX_RANK + 1}.* {MAX_RANK}"):
        LoraLayout(tiny.layout.base, max_rank=MAX_RANK + 1)


def test_a_rank_over_the_maximum_names_both_and_harms_nobody(tiny: Any) -> None:
    """Row 95."""
    source = tiny.source("fine")
    source.put("wide", *tiny.tensors(5, rank=17))
    with tiny.cache(source) as cache:
        with pytest.raises(AdapterUnsupported, match=r"rank 17 .* 16.*max_rank"):
            cache.acquire("wide").result(10)
        with cache.acquire("fine").result(10) as lease:
            assert lease.slot >= 0


def far_apart(rows: int, width: int, stride: int, device: str) -> torch.Tensor:
    """Zeros whose rows are ``stride`` elements apart; on a CPU only what is used is there."""
    elements = (rows - 1) * stride + width
    if device == "cpu":
        nothing = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(nothing, dtype=torch.float16)
    else:
        flat = torch.zeros(elements, dtype=torch.float16, device=device)
    return flat.as_strided((rows, width), (stride, 1))


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")  # the interpreter's own
@pytest.mark.parametrize(("rows", "stride"), [(3, 1 << 30), (520, 1 << 22)], ids=str)
def test_rows_beyond_the_reach_of_32_bits_are_read_and_written(
    tiny: Any, rows: int, stride: int
) -> None:
    """Row 103: row · stride is over 2^31 elements, in the kernels of decode and of prefill."""
    pytest.importorskip("triton")
    from adaptercache.kernels.launch import add_lora_triton

    device = any_device()
    layout = LoraLayout(tiny.layout.base, max_rank=16, dtype="float16")
    with AdapterCache(layout, gpu_bytes=4 << 20, host_bytes=4 << 20, device=device) as cache:
        cache.put("a", *tiny.tensors(0)).result(10)
        x, y = (far_apart(rows, 32, stride, device) for _ in "xy")
        last = torch.randn(32, generator=torch.Generator().manual_seed(0)).half()
        x[-1] = last.to(device)
        with cache.acquire("a").result(10) as lease:
            with cache.lora_batch([(lease, rows)]) as batch:
                add_lora_triton([y], x, batch, batch.stack.group(0, ("q_proj",)))
            a, b, scaling = held_weights(cache, lease, 0, "q_proj")
    want = scaling * b.float() @ (a.float() @ last.float())
    assert not y[:-1].any()
    assert torch.allclose(y[-1].float().cpu(), want, atol=2e-2)


def test_kernels_count_programs_along_the_first_axis_alone() -> None:
    """Row 100: the others end at 65,535 programs, which a long prefill is over."""
    sources = [path.read_text() for path in sorted(KERNELS.glob("*.py"))]
    axes = {
        axis for text in sources for axis in re.findall(r"(?:program_id|num_programs)\((\d)", text)
    }
    assert axes == {"0"}


# Embeddings, heads, shapes.


def test_a_head_of_another_vocabulary_names_both_sizes(tiny: Any) -> None:
    """Row 112."""
    tensors = lora("base_model.model.lm_head", 66, 32)
    with pytest.raises(AdapterInvalid) as raised:
        checkpoint_from_tensors(tensors, {"r": 2, "lora_alpha": 2}, tiny.layout.base)
    assert raised.value.where == "lm_head"
    assert "(66, 2)" in str(raised.value.found)
    assert "[64, rank]" in str(raised.value.expected)


def test_added_tokens_are_refused_by_the_cache_too(tiny: Any, tmp_path: Path) -> None:
    """Row 115: a directory with new_embeddings.safetensors, asked for through a cache, which
    would otherwise bring over config and weights alone."""
    tensors, config = tiny.tensors(0)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    save_file({"x": torch.ones(2, 32)}, tmp_path / "new_embeddings.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "a").mkdir()
    for file in [path for path in tmp_path.iterdir() if path.is_file()]:
        file.rename(tmp_path / "a" / file.name)
    with tiny.cache(tmp_path) as cache, pytest.raises(AdapterUnsupported, match="added tokens"):
        cache.acquire("a").result(10)


@pytest.mark.parametrize("name", ["score.weight", "classifier.weight", "v_head.summary.weight"])
def test_a_trained_head_is_refused_by_name(tiny: Any, name: str) -> None:
    """Row 110: also where the config says nothing of it."""
    tensors, config = random_adapter(tiny.layout.base, rank=2)
    tensors[f"base_model.model.{name}"] = torch.ones(2, 32)
    with pytest.raises(AdapterUnsupported, match="trained base tensor") as raised:
        checkpoint_from_tensors(tensors, config, tiny.layout.base)
    assert name in raised.value.where


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_size_that_is_off_by_one_names_module_found_and_expected(
    tiny: Any, side: str, by: int, dim: int
) -> None:
    """Row 121: A's input, B's output, and the rank of either."""
    tensors, config = tiny.tensors(0, targets=("v_proj",))
    path = "model.layers.1.self_attn.v_proj"
    shape = list(tensors[f"base_model.model.{path}.lora_{side}.weight"].shape)
    shape[dim] += by
    tensors[f"base_model.model.{path}.lora_{side}.weight"] = torch.ones(shape)
    with pytest.raises(AdapterInvalid) as raised:
        checkpoint_from_tensors(tensors, config, tiny.layout.base)
    assert raised.value.where == path
    assert str(tuple(shape)) in str(raised.value.found)
    assert "rank" in str(raised.value.expected)
