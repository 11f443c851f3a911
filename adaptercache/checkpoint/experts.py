"""LoRA of stacked MoE experts, as PEFT writes it for a three-dimensional parameter.

PEFT sees the parameter ``[E, d1, d2]`` as one linear layer of rank E·r. The rows of A are
``e·r + k``. The columns of B are ``k·E + e`` (other writers: ``e·r + k``, see
``ReadOptions.expert_columns``). With that taken apart, an expert's ΔW is ``B_e A_e`` (direct) or
``(B_e A_e)ᵀ`` (transposed), depending on the PEFT release and the model class. The sizes tell
which, and where d1 = d2 the release does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from adaptercache.base_model import BaseModule
from adaptercache.checkpoint.config import LoraConfig
from adaptercache.checkpoint.options import ReadOptions
from adaptercache.checkpoint.pairs import Pair
from adaptercache.checkpoint.weights import ExpertWeights
from adaptercache.errors import AdapterInvalid

__all__ = ["read_experts"]

_DECLARED_FIRST = ("gate_up_proj",)


def read_experts(
    pairs: Sequence[Pair],
    parameters: Mapping[str, BaseModule],
    config: LoraConfig,
    options: ReadOptions,
) -> dict[str, ExpertWeights]:
    """The weights of one module's stacked parameters.

    Args:
        pairs: all pairs of that module.
        parameters: the base's stacked parameters in it by path.

    Raises:
        AdapterInvalid: they don't fit the parameters, or fit in several ways.
    """
    inner_first = sorted(pairs, key=lambda pair: -pair.depth)
    targets = _targets(inner_first, parameters, config)
    return {
        path: _unstack(pair, path, parameters[path], config, options)
        for pair, path in zip(inner_first, targets, strict=True)
    }


def _targets(
    pairs: Sequence[Pair], parameters: Mapping[str, BaseModule], config: LoraConfig
) -> tuple[str, ...]:
    """Which parameter each pair adapts. PEFT wraps them in the order of the module's class, so
    the inner pair is that of the first, whatever the order of ``target_parameters``."""
    named = [path for path in parameters if config.targets_parameter(path)]
    declared = sorted(
        named or parameters, key=lambda path: path.rpartition(".")[2] not in _DECLARED_FIRST
    )
    fitting = [
        paths
        for paths in combinations(declared, len(pairs))
        if all(_fits(pair, parameters[path]) for pair, path in zip(pairs, paths, strict=True))
    ]
    if len(fitting) != 1:
        raise AdapterInvalid(
            "the experts' tensors fit several parameters" if fitting else "shape mismatch",
            where=pairs[0].module,
            found=", ".join(f"A {tuple(pair.a.shape)} B {tuple(pair.b.shape)}" for pair in pairs),
            expected=", ".join(f"{path} {parameters[path].shape}" for path in declared),
        )
    return fitting[0]


def _fits(pair: Pair, parameter: BaseModule) -> bool:
    _, d1, d2 = parameter.shape
    return (pair.b.shape[0], pair.a.shape[1]) in ((d1, d2), (d2, d1))


def _is_direct(pair: Pair, parameter: BaseModule, version: tuple[int, ...]) -> bool:
    _, d1, d2 = parameter.shape
    if d1 != d2:
        return bool(pair.a.shape[1] == d2)
    if version >= (0, 19, 1):
        return not parameter.is_transposed
    return version >= (0, 19, 0) and parameter.is_transposed


def _unstack(
    pair: Pair, path: str, parameter: BaseModule, config: LoraConfig, options: ReadOptions
) -> ExpertWeights:
    experts = parameter.shape[0]
    leaf = path.rpartition(".")[2]
    own_path = f"{pair.module}.{leaf}"
    wrapped = f"{pair.wrapped}.{leaf}" if pair.wrapped else ""
    rank = config.rank_of(own_path)
    if pair.a.shape[0] != experts * rank or pair.b.shape[1] != experts * rank:
        raise AdapterInvalid(
            "the experts' tensors disagree with the config's rank",
            where=own_path,
            found=f"{pair.a.shape[0]} rows of lora_A, {pair.b.shape[1]} columns of lora_B",
            expected=f"{experts} experts of rank {rank}: {experts * rank}",
        )
    a = pair.a.reshape(experts, rank, -1)
    b = _columns_by_expert(pair.b, experts, rank, options)
    if not _is_direct(pair, parameter, config.peft_version):
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return ExpertWeights(a, b, config.scaling_of(own_path, rank, wrapped), rank)


def _columns_by_expert(
    b: torch.Tensor, experts: int, rank: int, options: ReadOptions
) -> torch.Tensor:
    """B ``[rows, experts · rank]`` as ``[experts, rows, rank]``."""
    rows = b.shape[0]
    if options.expert_columns == "expert_fastest":
        return b.reshape(rows, rank, experts).permute(2, 0, 1)
    return b.reshape(rows, experts, rank).permute(1, 0, 2)
