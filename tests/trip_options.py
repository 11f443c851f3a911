"""Random options of PEFT's ``LoraConfig`` for a tiny model of `trips`: what people write there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import trips
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import nn

__all__ = ["Adapter", "adapters"]


@dataclass(frozen=True)
class Adapter:
    """What `trips.save` takes beside the model."""

    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    autocast: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Paths:
    """The places of a model where LoRA may go."""

    linear: tuple[str, ...]
    ends: tuple[str, ...]
    """The embeddings and the head."""
    parameters: tuple[str, ...]
    """Matrices that are no linear layer's: stacked experts, routers."""


@cache
def paths_of(family: str) -> Paths:
    model = trips.base_model(family)
    linear = [name for name, m in model.named_modules() if isinstance(m, trips.LINEAR)]
    embeddings = [name for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
    known = {*linear, *embeddings}
    bare = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() in (2, 3)
        and name.removesuffix(".weight") not in known
        and not name.endswith("bias")  # of experts: refused, by a test of its own
    ]
    return Paths(
        tuple(name for name in linear if name != "lm_head"),
        (*(name for name in embeddings if "position" not in name), "lm_head"),
        tuple(bare),
    )


def _end(path: str, parts: int) -> str:
    return ".".join(path.split(".")[-parts:])


def _some(values: list[str], most: int = 4) -> SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True)


def _ends_of(paths: tuple[str, ...], parts: int) -> SearchStrategy[list[str]]:
    return _some(sorted({_end(path, parts) for path in paths}))


def _layer(path: str) -> str:
    return next(part for part in path.split(".") if part.isdecimal())


def targets(paths: Paths) -> SearchStrategy[list[str] | str]:
    """``target_modules``: names, dotted ends, full paths, expressions, or the shorthand."""
    leaves = _ends_of(paths.linear, 1)
    lists = st.one_of(leaves, _ends_of(paths.linear, 2), _some(list(paths.linear)))
    with_ends = st.tuples(lists, _some([_end(path, 1) for path in paths.ends], 2))
    return st.one_of(
        lists,
        with_ends.map(lambda both: both[0] + both[1]),
        st.just("all-linear"),
        leaves.map(lambda names: rf".*\.({'|'.join(names)})"),
        st.tuples(st.integers(0, 1), leaves).map(
            lambda drawn: rf".*\.{drawn[0]}\..*\.(?:{'|'.join(drawn[1])})"
        ),
        st.just(r".*(embed_tokens|wte|lm_head|_proj)"),
    )


def parameters(paths: Paths) -> SearchStrategy[list[str]]:
    """``target_parameters``: by ends or in full, of experts where there are any."""
    plain = tuple(f"{path}.weight" for path in (*paths.linear, *paths.ends))
    choices = [_ends_of(plain, 2), _some(list(plain), 2)]
    if paths.parameters:
        choices = [_ends_of(paths.parameters, 2), _some(list(paths.parameters)), *choices]
    return st.one_of(*choices)


def pattern_keys(paths: Paths) -> SearchStrategy[str]:
    """Keys of ``rank_pattern`` and ``alpha_pattern``."""
    path = st.sampled_from(paths.linear + paths.parameters + paths.ends)
    layered = st.sampled_from([p for p in paths.linear + paths.parameters if _has_layer(p)])
    return st.one_of(
        st.tuples(path, st.integers(1, 4)).map(lambda drawn: _end(*drawn)),
        path.map(lambda p: f"^{re.escape(p)}"),
        path.map(lambda p: rf".*{re.escape(_end(p, 1))}"),
        layered.map(lambda p: rf".*\.{_layer(p)}\..*"),
        layered.map(lambda p: rf"(?:layers|h)\.{_layer(p)}\..*{_end(p, 1)[0]}\w+"),
        st.tuples(path, path).map(lambda two: f"({_end(two[0], 1)}|{_end(two[1], 1)})"),
    )


def _is_tied(family: str) -> bool:
    # PEFT doesn't know GPT-2's wte for an embedding: it forgets the tied head when it loads.
    return bool(trips.FAMILIES[family]().tie_word_embeddings) and family != "gpt2"


def _has_layer(path: str) -> bool:
    return any(part.isdecimal() for part in path.split("."))


alphas = st.one_of(st.integers(1, 64), st.floats(0.5, 64, width=32))


@st.composite
def adapters(draw: DrawFn, family: str) -> Adapter:
    """An adapter of a family. PEFT may refuse the options, where nothing is left to adapt."""
    paths = paths_of(family)
    keys = pattern_keys(paths)
    options: dict[str, Any] = {
        "r": draw(st.integers(1, 8)),
        "lora_alpha": draw(alphas),
        "use_rslora": draw(st.booleans()),
        "rank_pattern": draw(st.dictionaries(keys, st.integers(1, 8), max_size=3)),
        "alpha_pattern": draw(st.dictionaries(keys, alphas, max_size=3)),
        "init_lora_weights": draw(st.sampled_from([True, False, "gaussian"])),
    }
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    autocast = draw(st.booleans())
    if draw(st.booleans() if paths.parameters else st.sampled_from([False] * 4 + [True])):
        options["target_parameters"] = draw(parameters(paths))
        options["target_modules"] = draw(st.one_of(st.just([]), _ends_of(paths.linear, 1)))
    else:
        options |= _of_modules(draw, family, paths)
    # As PEFT casts the tensors it lets go of the tie, and ties again what it loads.
    if _is_tied(family) and not (autocast and dtype != torch.float32) and draw(st.booleans()):
        options |= {"ensure_weight_tying": True, "rank_pattern": {}}
    return Adapter(options, dtype, autocast, draw(st.integers(0, 1000)))


def _of_modules(draw: DrawFn, family: str, paths: Paths) -> dict[str, Any]:
    options: dict[str, Any] = {
        "target_modules": draw(targets(paths)),
        "lora_dropout": draw(st.sampled_from([0.0, 0.05])),
        "fan_in_fan_out": family == "gpt2",
    }
    if isinstance(options["target_modules"], list):
        options["layers_to_transform"] = draw(st.sampled_from([None, None, 0, 1, [1], [0, 1]]))
    if draw(st.booleans()):
        names = draw(_ends_of(paths.linear, 1))
        options["exclude_modules"] = draw(st.sampled_from([names, rf".*\.({'|'.join(names)})"]))
    return options
