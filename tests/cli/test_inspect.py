"""``adaptercache inspect`` over real PEFT adapters: what it shows, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.test_conformance import CASES, LOAD, REFUSALS, REFUSE, base_of
from safetensors.torch import load_file, save_file

from adaptercache import AdapterCache, LoraLayout
from adaptercache.checkpoint import read_checkpoint
from adaptercache.testing import any_device

MODULE_KEYS = {
    *("path", "kind", "rank", "scaling", "a", "b", "dtypes", "nbytes", "norm", "is_served"),
}
KEYS = {
    *("path", "status", "config", "base", "digest", "modules", "skipped"),
    *("layout", "bytes", "refusal"),
}


def is_plain_decoder(case: dict[str, Any]) -> bool:
    """Whether all of it is on dense linear modules of the one decoder's layers."""
    return all(
        kind in ("linear", "conv1d")
        and "experts" not in path
        and "vision" not in path
        and "projector" not in path
        and (".layers." in f".{path}" or ".h." in path)
        for path, kind in case["module_kinds"].items()
    )


@pytest.mark.parametrize("name", LOAD)
def test_shows_what_loads_in_numbers(name: str, run: Any, case: Any, table: Any) -> None:
    done = run("inspect", case(name), "--base", table(name), "--json")
    report, facts = done.json, CASES[name]
    assert set(report) == KEYS
    assert all(set(module) == MODULE_KEYS for module in report["modules"])
    assert {m["path"]: m["rank"] for m in report["modules"]} == facts["ranks"]
    assert {m["path"]: m["scaling"] for m in report["modules"]} == facts["scales"]
    kinds = {"param": "parameter"}  # as the cases have it, and as the library does
    assert {m["path"]: m["kind"] for m in report["modules"]} == {
        path: kinds.get(kind, kind) for path, kind in facts["module_kinds"].items()
    }
    golden = load_file(case(name) / "golden.safetensors")
    for module in report["modules"]:
        want = golden[module["path"]].double().norm().item()
        assert module["norm"] == pytest.approx(want, rel=1e-5)
    checkpoint = read_checkpoint(case(name), base_of(facts))
    assert report["digest"] == checkpoint.digest.hex()
    assert report["bytes"]["tensors"] == checkpoint.nbytes
    assert len(report["skipped"]) == len(checkpoint.skipped)
    if is_plain_decoder(facts):
        assert (done.code, report["status"], report["refusal"]) == (0, "loads", None)
        assert all(module["is_served"] for module in report["modules"])
        assert all(report["bytes"].values())
    else:
        assert (done.code, report["status"]) == (1, "refused")
        refusal = report["refusal"]
        assert (refusal["by"], refusal["error"]) == ("layout", "AdapterUnsupported")
        homeless = [m["path"] for m in report["modules"] if not m["is_served"]]
        assert refusal["where"] in homeless
        assert refusal["feature"] == f"LoRA on {refusal['where']}"
        assert refusal["remedy"]
        assert report["bytes"]["gpu"] is None


def test_some_load_and_some_only_read() -> None:
    plain = [name for name in LOAD if is_plain_decoder(CASES[name])]
    assert 30 < len(plain) < len(LOAD) - 10


@pytest.mark.parametrize("name", REFUSE)
def test_refuses_by_name(name: str, run: Any, case: Any, table: Any) -> None:
    error, word = REFUSALS[name]
    done = run("inspect", case(name), "--base", table(name), "--json")
    report = done.json
    assert (done.code, report["status"], done.err) == (1, "refused", "")
    assert set(report) == KEYS
    assert report["refusal"]["by"] == "reader"
    assert report["refusal"]["error"] == error.__name__
    assert word in report["refusal"]["message"]
    in_words = run("inspect", case(name), "--base", table(name))
    assert in_words.code == 1
    assert in_words.err.startswith("refused by the reader: ")
    assert report["refusal"].get("remedy", "") in in_words.err


@pytest.mark.parametrize(
    "name", ["plain_p0.20.0", "moe_qwen3_both_p0.20.0", "two_adapters_p0.20.0"]
)
def test_without_a_base_says_what_the_files_say(name: str, run: Any, case: Any) -> None:
    done = run("inspect", case(name), "--json")
    report = done.json
    assert (done.code, report["status"], report["base"]) == (0, "unchecked", None)
    assert set(report) == KEYS
    tensors = load_file(case(name) / "adapter_model.safetensors")
    assert report["bytes"]["tensors"] == sum(tensor.nbytes for tensor in tensors.values())
    shapes = [tuple(shape) for m in report["modules"] for shape in (m["a"], m["b"])]
    assert sorted(shapes) == sorted(tuple(tensor.shape) for tensor in tensors.values())
    published = [case(name) / f for f in ("adapter_config.json", "adapter_model.safetensors")]
    assert report["bytes"]["remote"] == sum(file.stat().st_size for file in published)
    for tier in ("disk", "host", "gpu"):
        assert report["bytes"][tier] is None
    assert "--base" in run("inspect", case(name)).out


def test_without_a_base_a_stack_of_experts_has_no_rank_yet(run: Any, case: Any) -> None:
    modules = run("inspect", case("moe_qwen3_both_p0.20.0"), "--json").json["modules"]
    ranks = {m["path"].rpartition(".")[2]: (m["rank"], m["scaling"]) for m in modules}
    assert ranks["q_proj"] == (2, 2.0)
    assert ranks["experts"] == ranks["base_layer"] == (None, None)


# What is wrong in the files themselves shows without a base too.
FILES_ALONE = [
    name
    for name in REFUSE
    if name not in ("d_unknown_layer", "d_shape_in", "d_rank_ab")
    and "rank_conflict" not in name
    and name != "d_rank_config_conflict"
]


@pytest.mark.parametrize("name", FILES_ALONE)
def test_without_a_base_refuses_what_needs_none(name: str, run: Any, case: Any) -> None:
    done = run("inspect", case(name), "--json")
    assert done.code == 1
    assert REFUSALS[name][1] in done.json["refusal"]["message"]


@pytest.mark.parametrize("name", sorted(set(REFUSE) - set(FILES_ALONE)))
def test_without_a_base_leaves_the_rest_open(name: str, run: Any, case: Any) -> None:
    done = run("inspect", case(name), "--json")
    assert (done.code, done.json["status"]) == (0, "unchecked")


@pytest.mark.parametrize("name", ["d_rank_config_conflict", "moe_qwen3_both_p0.20.0"])
def test_without_a_base_says_that_ranks_are_others_than_the_configs(
    name: str, run: Any, case: Any
) -> None:
    assert "another rank than the config says" in run("inspect", case(name)).out
    assert "another rank" not in run("inspect", case("plain_p0.20.0")).out


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_the_base_beside_the_adapter_is_found(
    run: Any, case: Any, table: Any, tmp_path: Path
) -> None:
    adapter = copied(case("plain_p0.20.0"), tmp_path / "adapter")
    config = Path(str(table("plain_p0.20.0")).replace(".modules.json", ".json"))
    shutil.copy(config, adapter / "config.json")
    report = run("inspect", adapter, "--json").json
    assert (report["status"], report["base"]) == ("loads", str(adapter / "config.json"))
    for base in (config, adapter, adapter / "config.json"):
        assert run("inspect", case("plain_p0.20.0"), "--base", base).code == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model_type": 3}', '{"x": {"kind": "y"}}', None]
)
def test_a_base_that_is_none_is_refused_as_the_base(
    text: str | None, run: Any, case: Any, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "base.json").write_text(text)
    done = run("inspect", case("plain_p0.20.0"), "--base", tmp_path / "base.json", "--json")
    assert (done.code, done.json["refusal"]["by"]) == (1, "base")
    assert done.json["refusal"]["error"] == "AdapterInvalid"


def test_a_base_nested_too_deep_is_refused(run: Any, case: Any, tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text("[" * 200_000)
    done = run("inspect", case("plain_p0.20.0"), "--base", tmp_path / "base.json", "--json")
    assert (done.code, done.json["refusal"]["by"]) == (1, "base")


def test_the_bytes_are_those_that_a_cache_counts(
    run: Any, case: Any, table: Any, tiny: Any
) -> None:
    name = "all_linear_p0.20.0"
    found = run("inspect", case(name), "--base", table(name), "--dtype", "float32", "--json").json
    layout = LoraLayout(base_of(CASES[name]), dtype="float32")
    with AdapterCache(
        layout,
        case(name).parent,
        gpu_bytes=8 << 20,
        host_bytes=8 << 20,
        device=any_device(),
    ) as cache:
        tiny.load(cache, name)
        resident = cache.stats().resident_bytes
    by_name = {tier.value: nbytes for tier, nbytes in resident.items()}
    assert {tier: found["bytes"][tier] for tier in ("gpu", "host", "disk")} == {
        tier: by_name[tier] for tier in ("gpu", "host", "disk")
    }


# The options of the reader.


def test_a_pickle_is_read_when_allowed(run: Any, case: Any, table: Any) -> None:
    name = "pickle_bin_p0.20.0"
    refused = run("inspect", case(name), "--base", table(name))
    assert (refused.code, "here: --allow-pickle" in refused.err) == (1, True)
    done = run("inspect", case(name), "--base", table(name), "--allow-pickle", "--json")
    assert (done.code, done.json["status"]) == (0, "loads")


def test_an_unknown_key_is_ignored_when_named(run: Any, case: Any, table: Any) -> None:
    name = "d_unknown_use_key"
    refused = run("inspect", case(name), "--base", table(name), "--json").json["refusal"]
    assert refused["option"] == "--ignore-config-key"
    key = refused["where"]
    assert run("inspect", case(name), "--base", table(name), refused["option"], key).code == 0


def test_the_language_part_alone_when_asked_for(run: Any, case: Any, table: Any) -> None:
    name = "mm_llava_all_tf4.57_p0.18.1"
    text_base = table("plain_p0.20.0")
    refused = run("inspect", case(name), "--base", text_base, "--json").json["refusal"]
    assert refused["option"] == "--text-only"
    done = run("inspect", case(name), "--base", text_base, refused["option"], "--json").json
    assert done["digest"]
    assert "not of the language part" in {entry["reason"] for entry in done["skipped"]}


def test_the_experts_columns_change_what_is_read(run: Any, case: Any, table: Any) -> None:
    name = "moe_qwen3_both_p0.20.0"
    arguments = ("inspect", case(name), "--base", table(name), "--json", "--expert-columns")
    fastest, slowest = (run(*arguments, f"expert_{way}").json for way in ("fastest", "slowest"))
    assert fastest["digest"] != slowest["digest"]
    norms = [{m["path"]: m["norm"] for m in read["modules"]} for read in (fastest, slowest)]
    assert any(norms[0][path] != norms[1][path] for path in norms[0] if "experts" in path)


# The options of the layout.


def test_a_layout_of_some_modules_refuses_the_others(run: Any, case: Any, table: Any) -> None:
    name = "plain_p0.20.0"
    arguments = ("inspect", case(name), "--base", table(name), "--targets")
    done = run(*arguments, "q_proj,k_proj")
    assert done.code == 1
    assert "refused by the layout: unsupported: LoRA on model.layers.0.self_attn.v_proj" in done.err
    assert "model.layers.0.self_attn.v_proj" in done.out
    assert run(*arguments, "q_proj, v_proj").code == 0


def test_a_rank_over_the_maximum_is_refused(run: Any, case: Any, table: Any) -> None:
    name = "plain_p0.20.0"
    done = run("inspect", case(name), "--base", table(name), "--max-rank", 3, "--json")
    assert done.json["refusal"]["feature"] == "rank 4 over the maximum of 3"
    assert done.json["refusal"]["option"] == "--max-rank"
    assert run("inspect", case(name), "--base", table(name), "--max-rank", 4).code == 0


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--targets", "w_pack", "targets ['w_pack']: the base has"),
        ("--targets", ",", "targets empty: the base has"),
        ("--dtype", "int8", "dtype 'int8'"),
        ("--max-rank", "0", "--max-rank"),
        ("--expert-columns", "both", "--expert-columns"),
    ],
)
def test_a_wrong_option_is_no_refusal(
    option: str, value: str, word: str, run: Any, case: Any, table: Any
) -> None:
    name = "plain_p0.20.0"
    done = run("inspect", case(name), "--base", table(name), option, value, "--json")
    assert (done.code, done.out) == (2, "")
    assert word in done.err


# What strangers write.


def test_no_escape_sequence_reaches_the_terminal(run: Any, case: Any, tmp_path: Path) -> None:
    adapter = copied(case("plain_p0.20.0"), tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "evil\x1b[2J\n[bold]"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(adapter / "adapter_model.safetensors")
    bad = {f"{name}\x1b]0;x\x07": tensor for name, tensor in tensors.items()}
    done = run("inspect", adapter)
    assert r"evil\x1b[2J\n[bold]" in done.out
    save_file(bad, adapter / "adapter_model.safetensors")
    refused = run("inspect", adapter)
    assert refused.code == 1
    assert "\x1b" not in done.out + refused.out + refused.err
    assert run("inspect", adapter, "--json").json["status"] == "refused"


def test_a_config_of_strange_values_is_shown_in_bounds(run: Any, case: Any, tmp_path: Path) -> None:
    adapter = copied(case("plain_p0.20.0"), tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    strange = {"base_model_name_or_path": ["x" * 10_000], "peft_version": {"a": [1]}}
    text = json.dumps(config | strange | {"task_type": "INFINITE"})
    (adapter / "adapter_config.json").write_text(text.replace('"INFINITE"', "1e999"))
    shown = run("inspect", adapter, "--json").json["config"]
    assert len(shown["base_model_name_or_path"]) == 200
    assert shown["peft_version"] == "{'a': [1]}"
    assert shown["task_type"] == "inf"


def test_norms_of_huge_and_of_zero_weights(run: Any, case: Any, table: Any, tmp_path: Path) -> None:
    adapter = copied(case("plain_p0.20.0"), tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    doubles = {
        name: torch.full_like(tensor, 1e30 if ".0." in name else 0.0, dtype=torch.float64)
        for name, tensor in tensors.items()
    }
    for name in doubles:
        if ".0." in name and "lora_A" in name:
            doubles[name].fill_(1e-30)
    save_file(doubles, adapter / "adapter_model.safetensors")
    report = run("inspect", adapter, "--base", table("plain_p0.20.0"), "--json").json
    norms = {m["path"].removeprefix("model.layers."): m["norm"] for m in report["modules"]}
    assert norms["0.self_attn.q_proj"] == pytest.approx(2 * 4 * math.sqrt(32 * 32))
    assert norms["1.self_attn.q_proj"] == 0


@pytest.mark.parametrize("where", ["nowhere", "adapter_model.safetensors"])
def test_what_is_no_directory_is_refused(where: str, run: Any, case: Any) -> None:
    done = run("inspect", case("plain_p0.20.0") / where)
    assert done.code == 1
    assert "there is no such adapter directory" in done.err


@pytest.mark.parametrize(
    ("name", "word"),
    [("adapters.safetensors", "MLX-LM"), ("adapter_model.pt", "weights in a pickle")],
)
def test_another_tools_adapter_is_sent_to_the_converter(
    name: str, word: str, run: Any, tmp_path: Path
) -> None:
    (tmp_path / name).touch()
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    refused = run("inspect", str(tmp_path), "--json").json["refusal"]
    assert word in refused["what"]
    assert "adaptercache.convert.convert_to_peft" in refused["remedy"]
    assert refused["option"] == "adaptercache convert"


def test_an_adapters_file_or_folder_in_the_wrong_place_is_recognised(
    run: Any, case: Any, table: Any
) -> None:
    name = "plain_p0.20.0"
    file = f"{case(name)}/adapter_model.safetensors"
    refused = run("inspect", file, "--base", table(name))
    assert (refused.code, "found: a file" in refused.err) == (1, True)
    refused = run("inspect", case(name), "--base", case(name))
    assert (refused.code, "an adapter's config" in refused.err) == (1, True)
