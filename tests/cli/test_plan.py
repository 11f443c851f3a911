"""``adaptercache plan``: DESIGN's figures, and what the cache itself would say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterCache, BaseModel, CapacityError, KVLayout, LoraLayout
from adaptercache.cli.footprint import HOST_BLOCK_BYTES
from adaptercache.testing import FakeSource, any_device, random_adapter

SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
KV = ("--kv-block-size", 16, "--kv-heads", 8, "--head-dim", 128)
MIB = 1 << 20


@pytest.mark.parametrize("kv", [(), KV], ids=["alone", "beside KV"])
def test_the_figures_of_the_design(kv: tuple[object, ...], run: Any, llama: Path) -> None:
    done = run("plan", "--config", llama, "--rank", 16, "--gpu-bytes", "8GiB", *kv, "--json")
    plan = done.json
    assert done.code == 0
    assert plan["adapter"]["tensor_bytes"] == 80 * MIB
    assert plan["adapter"]["modules"] == 32 * 7
    assert plan["tiers"]["gpu"] == {
        "budget_bytes": 8 << 30,
        "adapter_bytes": 80 * MIB,
        "adapters": 102,
    }
    if kv:
        assert plan["arena"] == {"page_bytes": 2 * MIB, "pages": 4096, "kv_pages": 0}
        assert plan["adapter"]["pages"] == 40


@pytest.mark.parametrize(
    ("rank", "targets", "pages"), [(8, "q_proj,k_proj,v_proj,o_proj", 7), (8, "q_proj,v_proj", 4)]
)
def test_pages_of_some_modules(rank: int, targets: str, pages: int, run: Any, llama: Path) -> None:
    done = run(
        *("plan", "--config", llama, "--rank", rank, "--gpu-bytes", "8GiB"),
        *("--targets", targets, *KV, "--json"),
    )
    assert done.json["adapter"]["pages"] == pages
    assert done.json["tiers"]["gpu"]["adapters"] == 4096 // pages


def test_tiers_and_loads(run: Any, llama: Path) -> None:
    arguments = (
        *("plan", "--config", llama, "--rank", 16, "--gpu-bytes", "8GiB", "--host-bytes", "64GiB"),
        *("--disk-bytes", "200GB", "--file-dtype", "float32"),
        *("--h2d-GBps", 50, "--disk-GBps", 2, "--remote-GBps", "0.5"),
    )
    plan = run(*arguments, "--json").json
    assert plan["tiers"]["host"]["adapters"] == (64 << 30) // (80 * MIB)
    disk = plan["tiers"]["disk"]
    header = disk["adapter_bytes"] - 160 * MIB - 80 * MIB  # of the packed file
    assert 0 < header < MIB // 8
    assert disk["adapters"] == 200_000_000_000 // disk["adapter_bytes"]
    assert [(load["source"], load["target"], load["nbytes"]) for load in plan["loads"]] == [
        ("remote", "disk", 160 * MIB),
        ("disk", "host", 80 * MIB),
        ("host", "gpu", 80 * MIB),
    ]
    seconds = [load["seconds"] for load in plan["loads"]]
    assert seconds == pytest.approx([160 * MIB / 0.5e9, 80 * MIB / 2e9, 80 * MIB / 50e9])
    assert plan["load_seconds"] == pytest.approx(sum(seconds))
    shown = run(*arguments).out
    for part in ("102", "819", "80 MiB", "1.68 ms", "REMOTE -> GPU"):
        assert part in shown


def test_loads_without_a_bandwidth_have_no_time(run: Any, llama: Path) -> None:
    arguments = ("plan", "--config", llama, "--rank", 16, "--gpu-bytes", "8GiB", "--h2d-GBps", 54)
    plan = run(*arguments, "--json").json
    assert [load["seconds"] is None for load in plan["loads"]] == [True, True, False]
    assert plan["load_seconds"] is None
    assert set(plan["tiers"]) == {"gpu"}
    assert "REMOTE" not in run(*arguments).out


def test_room_for_kv_is_taken_off(run: Any, llama: Path) -> None:
    arguments = ("plan", "--config", llama, "--rank", 16, "--gpu-bytes", "8GiB", *KV, "--json")
    plan = run(*arguments, "--kv-tokens", 16 * 3000 + 1).json
    assert plan["arena"]["kv_pages"] == 3001
    assert plan["tiers"]["gpu"]["adapters"] == (4096 - 3001) // 40
    assert run(*arguments, "--kv-tokens", 16 * 4056).json["tiers"]["gpu"]["adapters"] == 1
    refused = run(*arguments, "--kv-tokens", 16 * 4057)
    assert (refused.code, refused.json["refusal"]["error"]) == (1, "CapacityError")
    assert (refused.json["refusal"]["needed"], refused.json["refusal"]["limit"]) == (4097, 4096)


def test_a_cut_model_takes_less_on_each_gpu(run: Any, llama: Path) -> None:
    plan = run(
        *("plan", "--config", llama, "--rank", 16, "--gpu-bytes", "8GiB", "--tp-size", 4),
        *("--remote-GBps", 1, "--json"),
    ).json
    assert 20 * MIB < plan["tiers"]["gpu"]["adapter_bytes"] < 80 * MIB
    assert plan["loads"][0]["nbytes"] == 80 * MIB  # the files are whole
    layout = LoraLayout.from_config(llama, max_rank=16, tp_size=4)
    assert plan["loads"][2]["nbytes"] == layout.max_elements * layout.itemsize


@pytest.mark.parametrize("kv_heads", [0, 1])
def test_the_cache_holds_as_many_as_planned(
    kv_heads: int, run: Any, tiny: Any, tmp_path: Path
) -> None:
    """A real cache of those budgets keeps that many, and not one more."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    kv = KVLayout(16, kv_heads, 16, "bfloat16") if kv_heads else None
    sizes = ("--kv-block-size", 16, "--kv-heads", kv_heads, "--head-dim", 16) if kv else ()
    budgets = {"gpu_bytes": 450_000, "host_bytes": 9 << 20}
    plan = run(
        *("plan", "--config", tmp_path, "--rank", 8, "--dtype", "bfloat16", *sizes, "--json"),
        *("--gpu-bytes", budgets["gpu_bytes"], "--host-bytes", budgets["host_bytes"]),
    ).json
    layout = LoraLayout.from_config(SMALL, max_rank=8, dtype="bfloat16")
    source = FakeSource()
    for seed in range(40):
        every = layout.modules
        source.put(f"a{seed}", *random_adapter(layout.base, rank=8, targets=every, seed=seed))
    with AdapterCache(layout, source, **budgets, kv=kv, gpu_slots=64, device=any_device()) as cache:
        tiny.load(cache, *(f"a{seed}" for seed in range(40)))
        counts = {tier.value: n for tier, n in cache.stats().resident_adapters.items()}
    assert 1 < plan["tiers"]["gpu"]["adapters"] < 40
    for tier in ("gpu", "host"):
        assert counts[tier] == plan["tiers"][tier]["adapters"]


def test_a_block_of_cpu_memory_is_what_the_cache_takes() -> None:
    import inspect

    parameters = inspect.signature(AdapterCache).parameters
    assert parameters["host_block_bytes"].default == HOST_BLOCK_BYTES


def test_beside_kv_the_cache_refuses_what_the_plan_refuses(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    layout = LoraLayout.from_config(SMALL, max_rank=8, dtype="bfloat16")
    kv = KVLayout(16, 1, 16)
    arguments = ("plan", "--config", tmp_path, "--rank", 8, "--kv-block-size", 16)
    outcomes = set()
    for pages in range(1, 30):
        gpu_bytes = pages * kv.block_bytes * layout.num_layers
        done = run(*arguments, "--kv-heads", 1, "--head-dim", 16, "--gpu-bytes", gpu_bytes)
        try:
            AdapterCache(
                layout, gpu_bytes=gpu_bytes, host_bytes=4 << 20, kv=kv, device=any_device()
            ).close()
            refused = False
        except CapacityError:
            refused = True
        assert (done.code == 1) == refused, pages
        outcomes.add(refused)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("arguments", "by", "words"),
    [
        (("--gpu-bytes", "1KiB"), "plan", "gpu_bytes holds no page"),
        (("--gpu-bytes", "79MiB"), "plan", "gpu_bytes holds no adapter of this rank"),
        (("--gpu-bytes", "8GiB", "--host-bytes", "79MiB"), "plan", "host_bytes holds no adapter"),
        (("--gpu-bytes", "8GiB", "--disk-bytes", "159MiB"), "plan", "disk_bytes holds no adapter"),
        (
            ("--gpu-bytes", "8GiB", "--kv-block-size", 1, "--kv-heads", 1, "--head-dim", 8),
            "plan",
            "choose block_size",
        ),
        (("--gpu-bytes", "8GiB", "--tp-size", 3), "layout", "remedy"),
        (("--gpu-bytes", "8GiB", "--config", "/nowhere"), "base", "can't be read"),
    ],
)
def test_what_can_never_fit_is_refused(
    arguments: tuple[object, ...], by: str, words: str, run: Any, llama: Path
) -> None:
    done = run("plan", "--config", llama, "--rank", 16, *arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"refused by the {by}: ")
    assert words in done.err
    again = run("plan", "--config", llama, "--rank", 16, *arguments, "--json")
    assert (again.code, again.err) == (1, "")
    assert again.json["status"] == "refused"
    assert again.json["refusal"]["by"] == by


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu-bytes", "8G"), "'8G' is no size: give bytes"),
        (("--gpu-bytes", "8GiB", "--disk-bytes", "0"), "at least one byte"),
        (("--gpu-bytes", "8GiB", "--rank", 0), "--rank"),
        (("--gpu-bytes", "8GiB", "--h2d-GBps", "fast"), "'fast' is no bandwidth"),
        (("--gpu-bytes", "8GiB", "--h2d-GBps", "0"), "'0' is no bandwidth"),
        (("--gpu-bytes", "8GiB", "--h2d-GBps", "1e-320"), "'1e-320' is no bandwidth"),
        (("--gpu-bytes", "8GiB", "--h2d-GBps", "nan"), "'nan' is no bandwidth"),
        (("--gpu-bytes", "8GiB", "--file-dtype", "int3"), "one of bfloat16"),
        (("--gpu-bytes", "8GiB", "--kv-heads", 8), "--kv-block-size, --kv-heads and --head-dim"),
        (("--gpu-bytes", "8GiB", "--kv-tokens", 8), "--kv-block-size, --kv-heads and --head-dim"),
        (("--gpu-bytes", "8GiB", "--targets", "lm_head"), "targets ['lm_head']"),
        ((), "--gpu-bytes"),
    ],
)
def test_a_wrong_option_is_no_refusal(
    arguments: tuple[object, ...], words: str, run: Any, llama: Path
) -> None:
    done = run("plan", "--config", llama, "--rank", 16, *arguments, "--json")
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_a_table_of_modules_is_as_good_as_a_config(run: Any, llama: Path, tmp_path: Path) -> None:
    base = BaseModel.from_config(llama)
    table = {path: {"kind": m.kind, "shape": m.shape} for path, m in base.modules.items()}
    (tmp_path / "base.modules.json").write_text(json.dumps(table))
    plan = run(
        *("plan", "--config", tmp_path / "base.modules.json", "--rank", 16),
        *("--gpu-bytes", "8GiB", "--json"),
    ).json
    assert plan["tiers"]["gpu"]["adapters"] == 102
