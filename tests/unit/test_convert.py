"""Adapters of MLX-LM and torchtune become PEFT's: the same ΔW to the bit, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint import Checkpoint, ReadOptions, read_checkpoint
from adaptercache.convert import convert_to_peft
from adaptercache.errors import AdapterCacheError, AdapterInvalid, AdapterUnsupported, LoadFailed

Tensors = dict[str, torch.Tensor]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden_size / heads
    "vocab_size": 17,
    "tie_word_embeddings": False,
}
BASE = BaseModel.from_config(CONFIG)
LAYER = "model.layers.0"
Q, K, V = (f"{LAYER}.self_attn.{leaf}_proj" for leaf in "qkv")


def whole(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: whatever the order of a product's sums, they are exact."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=draw).to(dtype)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def convert(source: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    """Converts, and checks what holds for every conversion."""
    if config is not None:
        (source.parent / "base.json").write_text(json.dumps(config))
        options["base_config"] = source.parent / "base.json"
    before = files(source)
    target = source.parent / "target"
    try:
        convert_to_peft(source, target, **options)
    finally:
        assert files(source) == before
        assert {path.name for path in source.parent.iterdir()} <= {
            *("source", "target", "base.json"),
        }
    return target


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return content


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


# MLX-LM.


def mlx(folder: Path, tensors: Tensors, scale: object = 20.0, **config: Any) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / MLX)
    content = {
        "fine_tune_type": "lora",
        "model": "mlx-community/Llama-3.2-1B-Instruct-4bit",
        "num_layers": 16,
        "lora_parameters": {"rank": 8, "scale": scale, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps(content | config))
    return folder


MLX = "adapters.safetensors"


def mlx_lora(
    *paths: str, rank: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensors:
    tensors: Tensors = {}
    for index, path in enumerate(paths):
        outputs, inputs = BASE.modules[path].shape
        if BASE.modules[path].kind == "embedding":
            outputs, inputs = inputs, outputs
        tensors[f"{path}.lora_a"] = whole(inputs, rank, seed=seed + index, dtype=dtype)
        tensors[f"{path}.lora_b"] = whole(rank, outputs, seed=seed - index - 1, dtype=dtype)
    return tensors


def mlx_delta(tensors: Tensors, path: str, scale: float) -> torch.Tensor:
    """As MLX-LM fuses it into a linear layer ``[out, in]``."""
    a, b = tensors[f"{path}.lora_a"].float(), tensors[f"{path}.lora_b"].float()
    return scale * (b.T @ a.T)


LINEAR = [path for path, module in BASE.modules.items() if module.kind == "linear"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    paths=st.lists(st.sampled_from(LINEAR), min_size=1, unique=True),
    rank=st.integers(1, 9),
    scale=st.floats(1e-6, 1e6) | st.integers(1, 64),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_mlx_linear_layers_keep_their_deltas(
    tmp_path_factory: pytest.TempPathFactory,
    paths: list[str],
    rank: int,
    scale: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("mlx") / "source"
    folder.mkdir()
    tensors = mlx_lora(*paths, rank=rank, seed=seed, dtype=dtype)
    got = read_checkpoint(convert(mlx(folder, tensors, scale)), BASE)
    assert list(got.modules) == [path for path in BASE.modules if path in paths]
    for path in paths:
        assert torch.equal(got.delta(path), mlx_delta(tensors, path, scale))
        assert got.modules[path].a.dtype == dtype
        assert torch.tensor(got.modules[path].scaling) == torch.tensor(scale, dtype=torch.float32)


@pytest.mark.parametrize("rank", [1, 2, 3, 7, 8, 12, 16, 48, 64, 100])
@pytest.mark.parametrize("scale", [20.0, 10.0, 0.1, 2 / 3, 1e-3, 1.9999999999999998, 16])
def test_alpha_over_rank_is_the_scale(source: Path, rank: int, scale: float) -> None:
    tensors = {f"{V}.lora_a": whole(32, rank, seed=1), f"{V}.lora_b": whole(rank, 24, seed=2)}
    config = config_of(convert(mlx(source, tensors, scale)))
    found = config["lora_alpha"] / config["r"]
    assert config["r"] == rank
    if rank & (rank - 1) == 0:
        assert found == scale
    assert torch.tensor(found, dtype=torch.float32) == torch.tensor(scale, dtype=torch.float32)
    assert abs(found - scale) <= 2**-52 * scale


def test_mlx_ranks_may_differ(source: Path) -> None:
    """Even where one module's path ends in another's, which a pattern would catch."""
    base = BaseModel({path: BaseModule("linear", (4, 4)) for path in ("a.b.c", "b.c", "d", "e")})
    tensors: Tensors = {}
    for seed, (path, rank) in enumerate({"a.b.c": 3, "b.c": 5, "d": 3, "e": 3}.items()):
        tensors[f"{path}.lora_a"] = whole(4, rank, seed=seed)
        tensors[f"{path}.lora_b"] = whole(rank, 4, seed=seed + 50)
    got = read_checkpoint(convert(mlx(source, tensors, 0.7)), base)
    for path in base.modules:
        assert torch.equal(got.delta(path), mlx_delta(tensors, path, 0.7))
    assert config_of(source.parent / "target")["rank_pattern"] == {r"a\.b\.c": 3, r"b\.c": 5}


EXPERTS = 3
LEAVES = {"gate_proj": (20, 32), "up_proj": (20, 32), "down_proj": (32, 20)}


def mlx_experts(parent: str, *, is_flat: bool = False) -> Tensors:
    tensors: Tensors = {}
    for seed, (leaf, (outputs, inputs)) in enumerate(LEAVES.items()):
        a = whole(EXPERTS, 2, inputs, seed=seed)
        tensors[f"{parent}.switch_mlp.{leaf}.lora_a"] = a.flatten(0, 1) if is_flat else a
        tensors[f"{parent}.switch_mlp.{leaf}.lora_b"] = whole(EXPERTS, outputs, 2, seed=seed + 9)
    return tensors


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    ("parent", "leaves"),
    [
        (f"{LAYER}.mlp", {leaf: leaf for leaf in LEAVES}),
        (
            f"{LAYER}.block_sparse_moe",
            {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        ),
    ],
)
def test_mlx_experts_become_one_by_one(
    source: Path, parent: str, leaves: dict[str, str], is_flat: bool
) -> None:
    base = BaseModel(
        {
            f"{parent}.experts.{expert}.{leaves[leaf]}": BaseModule("linear", shape)
            for expert in range(EXPERTS)
            for leaf, shape in LEAVES.items()
        }
    )
    target = convert(mlx(source, mlx_experts(parent, is_flat=is_flat), 2.5))
    got = read_checkpoint(target, base)
    stacked = mlx_experts(parent)
    assert set(got.modules) == set(base.modules)
    for leaf in LEAVES:
        a, b = (stacked[f"{parent}.switch_mlp.{leaf}.lora_{side}"] for side in "ab")
        for expert in range(EXPERTS):
            path = f"{parent}.experts.{expert}.{leaves[leaf]}"
            assert torch.equal(got.delta(path), 2.5 * (b[expert] @ a[expert]))
            assert f"base_model.model.{path}.lora_A.weight" in load_file(
                target / "adapter_model.safetensors"
            )


def test_mlx_embeddings_that_are_not_tied(source: Path) -> None:
    tensors = mlx_lora("model.embed_tokens", "lm_head")
    got = read_checkpoint(convert(mlx(source, tensors, 3.0), CONFIG), BASE)
    a, b = tensors["model.embed_tokens.lora_a"], tensors["model.embed_tokens.lora_b"]
    assert torch.equal(got.delta("model.embed_tokens"), 3.0 * (a @ b))
    assert torch.equal(got.delta("lm_head"), mlx_delta(tensors, "lm_head", 3.0))


def test_mlx_embeddings_that_are_tied_change_the_output_layer_too(source: Path) -> None:
    tensors = mlx_lora("model.embed_tokens")
    tied = CONFIG | {"tie_word_embeddings": True}
    got = read_checkpoint(convert(mlx(source, tensors, 3.0), tied), BASE)
    a, b = tensors["model.embed_tokens.lora_a"], tensors["model.embed_tokens.lora_b"]
    assert torch.equal(got.delta("model.embed_tokens"), 3.0 * (a @ b))
    # MLX-LM's output layer: x lora_bᵀ lora_aᵀ, so the matrix [vocabulary, hidden] is the same.
    assert torch.equal(got.delta("lm_head"), 3.0 * (a @ b))


def changed_mlx(**parameters: Any) -> dict[str, Any]:
    return {"lora_parameters": {"rank": 3, "scale": 2.0, "dropout": 0.0} | parameters}


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"fine_tune_type": "dora"}, AdapterUnsupported, "DoRA"),
        ({"fine_tune_type": "full"}, AdapterUnsupported, "full fine-tune"),
        ({"fine_tune_type": "ortho"}, AdapterUnsupported, "ortho"),
        ({"fine_tune_type": 1}, AdapterUnsupported, "fine_tune_type 1"),
        ({"use_dora": True}, AdapterUnsupported, "DoRA"),
        ({"lora_parameters": None}, AdapterInvalid, "lora_parameters"),
        ({"lora_parameters": {"rank": 3}}, AdapterInvalid, "scale"),
        (changed_mlx(alpha=16), AdapterUnsupported, "alpha"),
        (changed_mlx(scale=0), AdapterInvalid, "scale"),
        (changed_mlx(scale=-1.0), AdapterInvalid, "scale"),
        (changed_mlx(scale=True), AdapterInvalid, "scale"),
        (changed_mlx(scale="2"), AdapterInvalid, "scale"),
        (changed_mlx(scale=1e39), AdapterInvalid, "scale"),
        (changed_mlx(scale=1e-45), AdapterInvalid, "scaling"),
        ({"model": "mlx-community/Falcon-H1-0.5B-4bit"}, AdapterUnsupported, "falcon_h1"),
    ],
)
def test_mlx_configs_that_are_refused(
    source: Path, config: dict[str, Any], error: type[AdapterCacheError], said: str
) -> None:
    with pytest.raises(error, match=said):
        convert(mlx(source, mlx_lora(V), **config))
    assert not (source.parent / "target").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"fine_tune_type": "lora", "use_dora": False},  # of a release before fine_tune_type
        changed_mlx(alpha=3, scale=20.0),  # alpha / rank is 1, so both readings agree
    ],
)
def test_mlx_configs_of_older_releases(source: Path, config: dict[str, Any]) -> None:
    scale = config.get("lora_parameters", {}).get("scale", 20.0)
    tensors = mlx_lora(V)
    got = read_checkpoint(convert(mlx(source, tensors, **config)), BASE)
    assert torch.equal(got.delta(V), mlx_delta(tensors, V, scale))


def nan() -> torch.Tensor:
    return torch.full((32, 3), torch.nan)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({f"{V}.m": torch.ones(24)}, AdapterUnsupported, "DoRA"),
        ({f"{V}.weight": torch.ones(24, 32)}, AdapterUnsupported, "no LoRA"),
        ({"lora_a": torch.ones(24, 32)}, AdapterUnsupported, "no LoRA"),
        ({f"{K}.lora_a": torch.ones(32, 3)}, AdapterInvalid, "without the other"),
        ({f"{V}.lora_a": torch.ones(32, 4)}, AdapterInvalid, "fit each other"),
        ({f"{V}.lora_a": torch.ones(32, 0)}, AdapterInvalid, "fit each other"),
        ({f"{V}.lora_a": torch.ones(3)}, AdapterUnsupported, "of this form"),
        ({f"{V}.lora_a": torch.ones(2, 32, 3)}, AdapterUnsupported, "of this form"),
        ({f"{V}.lora_b": torch.ones(2, 24, 3)}, AdapterUnsupported, "experts"),
        ({f"{V}.lora_a": torch.ones(32, 3, dtype=torch.int8)}, AdapterUnsupported, "int8"),
        ({f"{V}.lora_a": nan()}, AdapterInvalid, "finite"),
        ({f"{V}.lora_a": -nan() / 0}, AdapterInvalid, "finite"),
        (
            {
                f"{LAYER}.mlp.switch_mlp.up_proj.lora_a": torch.ones(5, 2, 32),
                f"{LAYER}.mlp.switch_mlp.up_proj.lora_b": torch.ones(4, 20, 2),
            },
            AdapterInvalid,
            "experts' lora_a and lora_b",
        ),
        (
            {
                "model.embed_tokens.lora_a": torch.ones(17, 3),
                "model.embed_tokens.lora_b": torch.ones(3, 32),
            },
            AdapterUnsupported,
            "base_config",
        ),
        (  # the reader would take both for one module
            {
                f"language_model.{V}.{key}": value
                for key, value in (("lora_a", torch.ones(32, 3)), ("lora_b", torch.ones(3, 24)))
            },
            AdapterInvalid,
            "two tensors for one",
        ),
    ],
)
def test_mlx_tensors_that_are_refused(
    source: Path, change: Tensors, error: type[AdapterCacheError], said: str
) -> None:
    with pytest.raises(error, match=said):
        convert(mlx(source, mlx_lora(V) | change))
    assert not (source.parent / "target").exists()


def test_mlx_without_tensors_is_refused(source: Path) -> None:
    with pytest.raises(AdapterInvalid, match="no weights"):
        convert(mlx(source, {}))


# torchtune.

TUNE_NAMES = {
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "mlp.gate_proj": "mlp.w1",
    "mlp.down_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w3",
}


def tune_name(path: str) -> str:
    if path == "lm_head":
        return "output"
    _, layers, number, module = path.split(".", 3)
    return f"{layers}.{number}.{TUNE_NAMES[module]}"


def tune_lora(*paths: str, rank: int = 4, seed: int = 0, base: BaseModel = BASE) -> Tensors:
    tensors: Tensors = {}
    for index, path in enumerate(paths):
        outputs, inputs = base.modules[path].shape
        name = tune_name(path)
        tensors[f"{name}.lora_a.weight"] = whole(rank, inputs, seed=seed + index)
        tensors[f"{name}.lora_b.weight"] = whole(outputs, rank, seed=seed - index - 1)
    return tensors


def tune(folder: Path, tensors: object, **config: Any) -> Path:
    torch.save(tensors, folder / "adapter_model.pt")
    content = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(content | config))
    return folder


def tune_delta(tensors: Tensors, path: str, scaling: float) -> torch.Tensor:
    a, b = (tensors[f"{tune_name(path)}.lora_{side}.weight"] for side in "ab")
    return scaling * (b @ a)


def neighbours_scores(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Attention scores where rows 2i and 2i + 1 are the parts of one complex number.

    Args:
        q, k: ``[tokens, heads, head_dim]``.
        angles: ``[tokens, head_dim / 2]``.
    """
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn for x in (q, k))
    return torch.einsum("ihd,jhd->hij", q, k.conj()).real


def halves_scores(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Attention scores as transformers' Llama computes them."""
    both = torch.cat((angles, angles), dim=-1)[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * both.cos() + torch.cat((-right, left), dim=-1) * both.sin()

    return torch.einsum("ihd,jhd->hij", rotate(q), rotate(k))


def scores(
    deltas: dict[str, torch.Tensor], config: dict[str, Any], rotary: Any, seed: int
) -> torch.Tensor:
    """Of random tokens, with ΔW of q and k as the whole weights; ``[heads, tokens, tokens]``."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(5, config["hidden_size"], generator=draw, dtype=torch.float64)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    q = (x @ deltas[Q].double().T).unflatten(-1, (heads, -1))
    k = (x @ deltas[K].double().T).unflatten(-1, (groups, -1))
    k = k.repeat_interleave(heads // groups, dim=1)
    steps = torch.arange(q.shape[-1] // 2, dtype=torch.float64)
    positions = torch.tensor([0.0, 1.0, 2.0, 7.0, 40.0], dtype=torch.float64)
    angles = positions[:, None] * 100.0 ** (-2 * steps / q.shape[-1])
    result: torch.Tensor = rotary(q, k, angles)
    return result


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 3),
    heads_a_group=st.integers(1, 3),
    half=st.integers(1, 5),
    rank=st.integers(1, 5),
    alpha=st.floats(0.01, 100),
    model_type=st.sampled_from(["llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3"]),
    seed=st.integers(0, 99),
)
def test_torchtune_attention_scores_stay(
    tmp_path_factory: pytest.TempPathFactory,
    groups: int,
    heads_a_group: int,
    half: int,
    rank: int,
    alpha: float,
    model_type: str,
    seed: int,
) -> None:
    config = CONFIG | {
        "model_type": model_type,
        "num_attention_heads": groups * heads_a_group,
        "num_key_value_heads": groups,
        "head_dim": 2 * half,
    }
    base = BaseModel.from_config(config)
    tensors = tune_lora(Q, K, rank=rank, seed=seed, base=base)
    folder = tmp_path_factory.mktemp("tune") / "source"
    folder.mkdir()
    target = convert(tune(folder, tensors, r=rank, lora_alpha=alpha), config)
    got = read_checkpoint(target, base)
    trained = {path: tune_delta(tensors, path, alpha / rank) for path in (Q, K)}
    served = {path: got.delta(path) for path in (Q, K)}
    # torchtune's Qwen turns by halves itself, all others by neighbours.
    in_training = halves_scores if "qwen" in model_type else neighbours_scores
    want = scores(trained, config, in_training, seed)
    found = scores(served, config, halves_scores, seed)
    assert torch.allclose(found, want, rtol=1e-9, atol=1e-9 * float(want.abs().max()))
    for path in (Q, K):  # and nothing but the order of the rows has changed
        rows = [sorted(map(tuple, delta[path].tolist())) for delta in (trained, served)]
        assert rows[0] == rows[1]


def test_the_two_ways_of_rotating_do_differ() -> None:
    deltas = {Q: whole(48, 32, seed=1), K: whole(24, 32, seed=2)}
    found = [scores(deltas, CONFIG, way, 0) for way in (halves_scores, neighbours_scores)]
    assert not torch.allclose(*found, rtol=0.1)


def test_torchtune_other_modules_keep_their_deltas(source: Path) -> None:
    paths = [path for path in LINEAR if not path.endswith(("q_proj", "k_proj"))]
    tensors = tune_lora(*paths)
    assert convert_to_peft(tune(source, tensors), source.parent / "target") == "torchtune"
    got = read_checkpoint(source.parent / "target", BASE)
    assert set(got.modules) == set(paths)
    for path in paths:
        assert torch.equal(got.delta(path), tune_delta(tensors, path, 3.0))


def test_torchtune_takes_the_config_beside_the_weights(source: Path) -> None:
    tensors = tune_lora(*LINEAR)
    (source / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaModel"]}))
    got = read_checkpoint(convert(tune(source, tensors)), BASE)
    assert set(got.modules) == set(LINEAR)
    assert not torch.equal(got.delta(Q), tune_delta(tensors, Q, 3.0))


PHI_CONFIG = CONFIG | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
PHI = BaseModel.from_config(PHI_CONFIG)
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def phi_place(path: str) -> str:
    """The module of Phi-3 that a module of Llama's is in."""
    for fused, parts in FUSED.items():
        for part in parts:
            path = path.removesuffix(part) + fused if path.endswith(part) else path
    return path


def phi_delta(tensors: Tensors, path: str, scaling: float) -> torch.Tensor:
    """ΔW of a module of Phi-3: that of its parts, one above the other."""
    rows = []
    for part in (part for part in BASE.modules if phi_place(part) == path):
        known = f"{tune_name(part)}.lora_a.weight" in tensors
        zeros = torch.zeros(BASE.modules[part].shape)
        rows.append(tune_delta(tensors, part, scaling) if known else zeros)
    return torch.cat(rows)


@settings(max_examples=30, deadline=None)
@given(
    paths=st.sets(st.sampled_from([*LINEAR, "lm_head"]), min_size=1),
    rank=st.integers(1, 6),
    alpha=st.floats(0.01, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_torchtune_fuses_what_phi3_has_fused(
    tmp_path_factory: pytest.TempPathFactory,
    paths: set[str],
    rank: int,
    alpha: float,
    dtype: torch.dtype,
) -> None:
    folder = tmp_path_factory.mktemp("phi") / "source"
    folder.mkdir()
    tensors = {k: v.to(dtype) for k, v in tune_lora(*sorted(paths), rank=rank).items()}
    target = convert(tune(folder, tensors, r=rank, lora_alpha=alpha), PHI_CONFIG)
    got = read_checkpoint(target, PHI)
    assert set(got.modules) == {phi_place(path) for path in paths}
    names = load_file(target / "adapter_model.safetensors")
    in_file = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names}
    assert in_file == set(got.modules)  # so that PEFT itself finds them in the model
    exact = {name: tensor.float() for name, tensor in tensors.items()}
    for path, weights in got.modules.items():
        assert weights.a.dtype == weights.b.dtype == dtype
        assert torch.tensor(weights.scaling) == torch.tensor(alpha / rank)
        assert torch.equal(got.delta(path), phi_delta(exact, path, weights.scaling))


def test_peft_merges_a_converted_phi3_adapter_as_we_read_it(source: Path) -> None:
    pytest.importorskip("peft", minversion="0.21")
    pytest.importorskip("transformers", minversion="5")
    import trips

    content = trips.config_of("phi3")
    apart = BaseModel.from_config(content | {"model_type": "llama", "architectures": None})
    paths = [path for path in apart.modules if "layers" in path and not path.endswith("v_proj")]
    (source / "config.json").write_text(json.dumps(content))
    tensors = {k: v / 8 for k, v in tune_lora(*paths, base=apart).items()}
    target = convert(tune(source, tensors))
    added = trips.merged(target, "phi3")
    got = read_checkpoint(target, BaseModel.from_config(content))
    adapted = {path for path, delta in added.items() if delta.any()}
    assert set(got.modules) == adapted
    assert len(adapted) == 8
    for path in adapted:
        assert (got.delta(path) - added[path]).abs().max() <= 1e-6 * added[path].abs().max()


V_A = torch.ones(4, 32)


def test_a_peft_file_that_torchtune_left_beside_is_not_looked_at(source: Path) -> None:
    tensors = tune_lora(V)
    tune(source, tensors)
    (source / "adapter_model.safetensors").write_bytes(b"wrong")
    got = read_checkpoint(convert(source), BASE)
    assert torch.equal(got.delta(V), tune_delta(tensors, V, 3.0))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"layers.0.attn.q_proj.magnitude": torch.ones(48)}, AdapterUnsupported, "DoRA"),
        ({"layers.0.attn.qkv.lora_a.weight": torch.ones(4, 4)}, AdapterUnsupported, "no LoRA"),
        ({"decoder.layers.0.attn.v_proj.lora_a.weight": V_A}, AdapterUnsupported, "no LoRA"),
        ({"layers.0.attn.v_proj.weight": torch.ones(24, 32)}, AdapterUnsupported, "no LoRA"),
        ({f"base_model.model.{V}.lora_A.weight": V_A}, AdapterUnsupported, "no LoRA"),
        ({"layers.1.attn.v_proj.lora_a.weight": V_A}, AdapterInvalid, "without"),
        ({"layers.0.attn.v_proj.lora_a.weight": torch.ones(3, 32)}, AdapterInvalid, "fit each"),
        ({"layers.0.attn.v_proj.lora_a.weight": torch.ones(4, 31)}, AdapterInvalid, "base's"),
        ({"layers.0.attn.v_proj.lora_a.weight": torch.ones(4, 2, 32)}, AdapterUnsupported, "3 dim"),
        (
            {
                "layers.2.attn.v_proj.lora_a.weight": torch.ones(4, 32),
                "layers.2.attn.v_proj.lora_b.weight": torch.ones(24, 4),
            },
            AdapterInvalid,
            "a module of the base",
        ),
        (
            {"layers.0.attn.v_proj.lora_b.weight": torch.full((24, 4), torch.inf)},
            AdapterInvalid,
            "finite",
        ),
    ],
)
def test_torchtune_tensors_that_are_refused(
    source: Path, change: Tensors, error: type[AdapterCacheError], said: str
) -> None:
    with pytest.raises(error, match=said):
        convert(tune(source, tune_lora(Q, K, V) | change), CONFIG)
    assert not (source.parent / "target").exists()


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"r": 8}, AdapterInvalid, "rank"),
        ({"lora_alpha": None}, AdapterInvalid, "lora_alpha"),
        ({"use_dora": True}, AdapterUnsupported, "DoRA"),
        ({"use_rslora": True}, AdapterUnsupported, "rsLoRA"),
        ({"alpha_pattern": {"v_proj": 3}}, AdapterUnsupported, "patterns"),
    ],
)
def test_torchtune_configs_that_are_refused(
    source: Path, config: dict[str, Any], error: type[AdapterCacheError], said: str
) -> None:
    with pytest.raises(error, match=said):
        convert(tune(source, tune_lora(V), **config))


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        (None, AdapterUnsupported, "base_config"),
        ({"model_type": "mixtral"}, AdapterUnsupported, "mixtral"),
        ({"model_type": "phi3", "num_key_value_heads": 4}, AdapterInvalid, "k_proj"),
        ({"model_type": "phi3", "num_attention_heads": 8}, AdapterInvalid, "q_proj"),
        ({"model_type": "phi3", "hidden_size": 64}, AdapterInvalid, "q_proj"),
        ({"model_type": None}, AdapterUnsupported, "None"),
        ({"model_type": ["llama"]}, AdapterUnsupported, "llama"),
        ({"num_attention_heads": None}, AdapterInvalid, "num_attention_heads"),
        ({"num_key_value_heads": 4}, AdapterInvalid, "k_proj"),
        ({"num_attention_heads": 8}, AdapterInvalid, "q_proj"),
        (
            {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 3},
            AdapterInvalid,
            "rotated",
        ),
        ({"num_hidden_layers": 1 << 60}, AdapterInvalid, "num_hidden_layers"),
    ],
)
def test_torchtune_needs_the_heads_of_the_base(
    source: Path, config: dict[str, Any] | None, error: type[AdapterCacheError], said: str
) -> None:
    content = None if config is None else CONFIG | config
    with pytest.raises(error, match=said):
        convert(tune(source, tune_lora(Q, K)), content)


@settings(max_examples=60, deadline=None)
@given(
    key=st.sampled_from(sorted(CONFIG)),
    value=st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just([]),
)
def test_a_strange_base_raises_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    folder = tmp_path_factory.mktemp("strange") / "source"
    folder.mkdir()
    tune(folder, tune_lora(Q, K))
    try:
        convert(folder, CONFIG | {key: value})
    except AdapterCacheError:
        assert not (folder.parent / "target").exists()


def test_torchtune_without_a_config_says_what_to_write(source: Path) -> None:
    (tune(source, tune_lora(V)) / "adapter_config.json").unlink()
    with pytest.raises(AdapterInvalid, match=r"lora_alpha.*recipe"):
        convert(source)


# Whatever the format.


def test_the_layout_is_named_and_the_base_is_written(source: Path) -> None:
    target = source.parent / "target"
    assert convert_to_peft(mlx(source, mlx_lora(V)), target, base_model="acme/base") == "mlx-lm"
    assert config_of(target)["base_model_name_or_path"] == "acme/base"
    assert config_of(target)["target_modules"] == [V]


def test_torchtune_names_its_base(source: Path) -> None:
    tune(source, tune_lora(V), base_model_name_or_path="meta/llama")
    assert config_of(convert(source))["base_model_name_or_path"] == "meta/llama"


def test_mlx_names_no_base_of_peft(source: Path) -> None:
    """Its "model" is often quantised in a way that only MLX reads."""
    assert config_of(convert(mlx(source, mlx_lora(V))))["base_model_name_or_path"] is None


def test_mixed_dtypes_stay_and_are_aligned(source: Path) -> None:
    tensors = mlx_lora(V, dtype=torch.bfloat16) | mlx_lora(Q) | mlx_lora(K, dtype=torch.float64)
    target = convert(mlx(source, tensors, 2.0))
    written = load_file(target / "adapter_model.safetensors")  # the library's own reader
    for path in (Q, K, V):
        for old, new in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            found = written[f"base_model.model.{path}.{new}.weight"]
            assert found.dtype == tensors[f"{path}.{old}"].dtype
            assert torch.equal(found, tensors[f"{path}.{old}"].T)


@pytest.mark.parametrize("kind", ["folder", "file", "link", "the source"])
def test_whatever_is_at_the_target_stays(source: Path, kind: str) -> None:
    mlx(source, mlx_lora(V))
    target = source if kind == "the source" else source.parent / kind
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.touch()
    elif kind == "link":
        target.symlink_to("nowhere")
    before = files(source)
    with pytest.raises(LoadFailed) as caught:
        convert_to_peft(source, target)
    assert isinstance(caught.value.__cause__, FileExistsError)
    assert files(source) == before
    assert {path.name for path in source.parent.iterdir()} == {"source", target.name}
    assert kind != "folder" or not any(target.iterdir())


def test_a_failure_while_writing_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    mlx(source, mlx_lora(V))
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(LoadFailed, match="No space"):
        convert(source)
    assert [path.name for path in source.parent.iterdir()] == ["source"]


def test_a_target_without_a_parent_is_refused(source: Path) -> None:
    with pytest.raises(LoadFailed):
        convert_to_peft(mlx(source, mlx_lora(V)), source.parent / "no" / "target")


def empty(folder: Path) -> None:
    pass


def peft(folder: Path) -> None:
    (folder / "adapter_model.safetensors").touch()


def both(folder: Path) -> None:
    tune(mlx(folder, mlx_lora(V)), tune_lora(V))


def checkpoint_of_training(folder: Path) -> None:
    (mlx(folder, mlx_lora(V)) / MLX).rename(folder / "0000100_adapters.safetensors")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (empty, "unknown layout"),
        (peft, "use it as it is"),
        (both, "two trainers"),
        (checkpoint_of_training, "intermediate checkpoint"),
    ],
)
def test_what_is_not_recognised_is_refused(source: Path, make: Any, said: str) -> None:
    make(source)
    with pytest.raises(AdapterUnsupported, match=said):
        convert(source)


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid, match="no such"):
        convert_to_peft(tmp_path / "nothing", tmp_path / "target")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_broken_files_raise_only_our_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("broken") / "source"
    folder.mkdir()
    if data.draw(st.booleans()):
        mlx(folder, mlx_lora(V))
    else:
        tune(folder, tune_lora(V))
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        target = convert(folder)
    except AdapterCacheError:
        assert not (folder.parent / "target").exists()
    else:
        read: Checkpoint = read_checkpoint(target, BASE, options=ReadOptions())
        assert read.modules


def test_peft_loads_what_was_written(source: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    tensors = tune_lora(*LINEAR)
    target = convert(tune(source, tensors), CONFIG)
    want = read_checkpoint(target, BASE)
    loaded = peft.PeftModel.from_pretrained(model, target)
    for path in LINEAR:
        layer = loaded.base_model.model.get_submodule(path)
        assert torch.equal(layer.get_delta_weight("default"), want.delta(path))
