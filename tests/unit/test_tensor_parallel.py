"""Tensor parallelism: every rank has its part, and the parts make up the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptercache import BaseModel, LoraLayout
from adaptercache.checkpoint import Checkpoint, LoraWeights
from adaptercache.errors import AdapterUnsupported
from adaptercache.packing import pack

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "torch_dtype": "float32",
}
PHI3 = LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
GPT2 = {
    f"transformer.h.0.{name}": {"kind": "conv1d", "out_in": out_in}
    for name, out_in in {
        "attn.c_attn": [96, 32],
        "attn.c_proj": [32, 32],
        "mlp.c_fc": [128, 32],
        "mlp.c_proj": [32, 128],
    }.items()
}


def bases() -> list[BaseModel]:
    return [
        BaseModel.from_config(LLAMA),
        BaseModel.from_config(PHI3),
        BaseModel.from_table(GPT2, heads=(4, 4)),
    ]


def layouts(base: BaseModel, size: int) -> list[LoraLayout]:
    return [
        LoraLayout(base, max_rank=8, dtype="float32", tp_rank=rank, tp_size=size)
        for rank in range(size)
    ]


def adapter(base: BaseModel, rank: int = 4) -> Checkpoint:
    modules = {
        site.path: LoraWeights(
            torch.randn(rank, site.in_features), torch.randn(site.out_features, rank), 2.0, rank
        )
        for site in LoraLayout(base, dtype="float32").sites
    }
    return Checkpoint(base, modules)


def unpack(checkpoint: Checkpoint, layout: LoraLayout) -> dict[str, tuple[torch.Tensor, ...]]:
    """A and B of each path, from the packed vector."""
    spec, vector = pack(checkpoint, layout)
    found = {}
    for site, rank, start in zip(layout.sites, spec.ranks, spec.starts, strict=True):
        b_start = start + -(-rank * site.in_features // 512) * 512
        a = vector[start : start + rank * site.in_features].view(rank, -1)
        b = vector[b_start : b_start + rank * site.out_features].view(rank, -1).t()
        found[site.path] = (a, b)
    return found


@pytest.mark.parametrize("base", bases(), ids=["llama", "phi3", "gpt2"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_parts_of_all_ranks_make_up_the_whole(base: BaseModel, size: int) -> None:
    """Each rank's ΔW is what is cut out of the whole one, and nothing of that is left out."""
    if base.heads == (4, 4) and size == 8:
        with pytest.raises(AdapterUnsupported, match="8 ranks for q of 32 in 4 heads"):
            layouts(base, size)
        return
    checkpoint = adapter(base)
    cut = layouts(base, size)
    seen = {path: torch.zeros_like(checkpoint.delta(path)) for path in checkpoint.modules}
    for layout in cut:
        parts = unpack(checkpoint, layout)
        for site in layout.sites:
            a, b = parts[site.path]
            whole = checkpoint.delta(site.path)
            columns = slice(*(site.columns or (0, whole.shape[1])))
            rows = torch.cat([torch.arange(*run) for run in site.rows or ((0, whole.shape[0]),)])
            got = checkpoint.modules[site.path].scaling * b @ a
            assert torch.allclose(got, whole[rows][:, columns], atol=1e-5)
            seen[site.path][rows, columns] += 1
    for path, times in seen.items():
        assert times.min() >= 1, path


@given(st.sampled_from([(2, 2), (2, 8), (4, 2), (4, 4), (8, 2), (8, 1)]), st.data())
def test_kv_heads_are_shared_where_ranks_are_more(
    sizes: tuple[int, int], data: st.DataObject
) -> None:
    size, heads = sizes
    base = BaseModel.from_config(LLAMA | {"num_key_value_heads": heads})
    rank = data.draw(st.integers(0, size - 1))
    layout = LoraLayout(base, tp_rank=rank, tp_size=size)
    site = next(s for s in layout.sites if s.module == "k_proj")
    (run,) = site.rows
    # Its query heads are served by its KV heads: grouped attention needs nothing of another rank.
    group = 8 // heads
    queries = range(rank * 8 // size, (rank + 1) * 8 // size)
    assert {query // group for query in queries} == set(range(run[0] // 8, run[1] // 8))


def test_the_digest_names_the_rank() -> None:
    base = BaseModel.from_config(LLAMA)
    digests = {layout.digest for size in (1, 2, 4) for layout in layouts(base, size)}
    # Of 4 ranks, two and two have the same k and v, but never the same q.
    assert len(digests) == 1 + 2 + 4


@pytest.mark.parametrize("size", [3, 5, 16])
def test_sizes_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(AdapterUnsupported, match=f"{size} ranks for"):
        LoraLayout(BaseModel.from_config(LLAMA), tp_size=size)


def test_the_number_of_kv_heads_must_be_known() -> None:
    base = BaseModel(BaseModel.from_config(LLAMA).modules)
    with pytest.raises(AdapterUnsupported, match="number of KV heads"):
        LoraLayout(base, tp_size=2)
    LoraLayout(base, tp_size=2, targets=["q_proj", "down_proj"])


def test_a_module_that_we_cannot_cut_is_refused_by_name() -> None:
    table = {"model.layers.0.mlp.router": {"kind": "linear", "out_in": [8, 8]}}
    with pytest.raises(AdapterUnsupported, match="tensor parallelism of router"):
        LoraLayout(BaseModel.from_table(table), tp_size=2)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (1, 1)])
def test_a_rank_that_there_is_not_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="no such rank"):
        LoraLayout(BaseModel.from_config(LLAMA), tp_rank=rank, tp_size=size)
