"""An adapter's pairs onto the modules of its base model: shapes, ranks and scalings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint.config import LoraConfig
from adaptercache.checkpoint.experts import read_experts
from adaptercache.checkpoint.fused import Piece, assemble, fused_pieces, unstacked_pieces
from adaptercache.checkpoint.names import BaseNames, canonical
from adaptercache.checkpoint.options import ReadOptions
from adaptercache.checkpoint.pairs import Pair, check_values, sort_tensors
from adaptercache.checkpoint.stored import StoredTensors
from adaptercache.checkpoint.weights import Checkpoint, LoraWeights, Skipped
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["fit"]

_OTHER_PART = "not of the language part"


def fit(
    stored: StoredTensors, config: LoraConfig, base: BaseModel, options: ReadOptions
) -> Checkpoint:
    """Gives everything in a file its place in the base. Reads what has one, and nothing else.

    Raises:
        AdapterInvalid: something has no place, or doesn't fit it.
        AdapterUnsupported: LoRA of a weight that isn't served.
    """
    names = BaseNames(base)
    contents = sort_tensors(stored.outlines)
    pieces: list[Piece] = []
    consumed: list[str] = []
    skipped: list[Skipped] = []
    homeless: list[str] = []
    for outlines in _by_module(contents.pairs):
        tensors = [name for pair in outlines for name in pair.names]
        if options.text_only and not names.is_language(outlines[0].module):
            skipped += [Skipped(name, _OTHER_PART) for name in tensors]
            continue
        pairs = [pair.with_values(stored.read) for pair in outlines]
        found = _place(pairs, names, config, options)
        if found:
            largest = max(piece.weights.scaling for piece in found)
            for pair in pairs:
                check_values(pair, largest)
            pieces += found
            consumed += tensors
        else:
            homeless += tensors
    if homeless or not pieces:
        raise _without_place(homeless or [entry.name for entry in skipped], len(consumed), base)
    skipped += [
        _skip(name, copy.module, shape, names, options)
        for name, (copy, shape) in contents.copies.items()
    ]
    return Checkpoint(base, assemble(pieces, base), tuple(consumed), tuple(skipped))


def _by_module(pairs: Iterable[Pair]) -> list[list[Pair]]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(canonical(pair.module), []).append(pair)
    return list(groups.values())


def _place(
    pairs: Sequence[Pair], names: BaseNames, config: LoraConfig, options: ReadOptions
) -> list[Piece]:
    """What the base gets from all pairs of one module; nothing where it has no such module."""
    first, path = pairs[0], names.find(pairs[0].module)
    if path is None and any(pair.is_embedding for pair in pairs):
        return []
    if path is None and (pieces := _place_in_parameters(pairs, names, config, options)):
        return pieces
    if len(pairs) > 1 or first.depth > 0:
        raise AdapterUnsupported(
            "several LoRA of one module",
            where=f"{first.module}: {', '.join(name for pair in pairs for name in pair.names)}",
            remedy="merge all but one of them into the base model",
        )
    if path is None:
        return fused_pieces(canonical(first.module), _weights(first, config), names)
    pair = _of_the_module(first, names.module(path), config)
    _check_shape(pair, path, names.module(path))
    return [Piece(path, _weights(pair, config))]


def _place_in_parameters(
    pairs: Sequence[Pair], names: BaseNames, config: LoraConfig, options: ReadOptions
) -> list[Piece]:
    """What the experts get that lie in a module as its parameters; nothing where there are none."""
    path = pairs[0].module
    for other in names.bare_matrices(path):
        if config.targets_parameter(other):
            raise AdapterUnsupported(
                f"LoRA of the parameter {other}",
                where=path,
                remedy="train it on linear layers, embeddings or experts",
            )
    if stacked := names.stacked(path):
        experts = read_experts(pairs, stacked, config, options)
        return [Piece(target, weights) for target, weights in experts.items()]
    if split := names.split_experts(path):
        return unstacked_pieces(read_experts(pairs, split, config, options), names)
    return []


def _of_the_module(pair: Pair, module: BaseModule, config: LoraConfig) -> Pair:
    """The pair in the module's own orientation, also where PEFT adapted its bare weight.

    As a parameter the weight is adapted as it is stored: of a conv1d ``[in, out]``, of an embedding
    ``[vocabulary, hidden]``. So the module's matrix gets (b a)ᵀ, which is aᵀ bᵀ.
    """
    is_stored_transposed = module.kind in ("conv1d", "embedding") and not pair.is_embedding
    if not is_stored_transposed or not config.targets_parameter(f"{pair.module}.weight"):
        return pair
    return replace(pair, a=pair.b.T, b=pair.a.T, is_embedding=module.kind == "embedding")


def _weights(pair: Pair, config: LoraConfig) -> LoraWeights:
    parameter = f"{pair.module}.weight"  # PEFT matches a router's parameter by its full name
    is_parameter = config.targets_parameter(parameter)
    path = parameter if is_parameter else pair.module
    wrapped = f"{pair.wrapped}.weight" if is_parameter and pair.wrapped else pair.wrapped
    rank, expected = pair.a.shape[0], config.rank_of(path)
    if pair.b.shape[1] != rank:
        raise AdapterInvalid(
            "lora_A and lora_B disagree on the rank",
            where=path,
            found=f"A {tuple(pair.a.shape)}, B {tuple(pair.b.shape)}",
            expected="A [rank, in], B [out, rank]",
        )
    if rank != expected:
        if config.ties_weights and not any(part.isdecimal() for part in path.split(".")):
            raise AdapterUnsupported(
                "tied embedding and head of different ranks (ensure_weight_tying)",
                where=path,
                remedy="give them one rank",
            )
        raise AdapterInvalid(
            "the tensors disagree with the config's rank",
            where=path,
            found=f"rank {rank} in the tensors",
            expected=f"rank {expected} by r and rank_pattern",
            remedy="publish config and weights of one and the same run",
        )
    return LoraWeights(pair.a, pair.b, config.scaling_of(path, rank, wrapped), rank)


def _check_shape(pair: Pair, path: str, module: BaseModule) -> None:
    is_embedding = module.kind == "embedding"
    if len(module.shape) != 2 or is_embedding != pair.is_embedding:
        raise AdapterUnsupported(
            f"LoRA of this form on a {module.kind} {module.shape}",
            where=f"{path}: {pair.names[0]}",
            remedy="train it on linear layers, embeddings or experts",
        )
    outputs, inputs = reversed(module.shape) if is_embedding else module.shape
    if (pair.b.shape[0], pair.a.shape[1]) != (outputs, inputs):
        raise AdapterInvalid(
            "the adapter's shape doesn't fit the base model",
            where=path,
            found=f"A {tuple(pair.a.shape)}, B {tuple(pair.b.shape)}",
            expected=f"A [rank, {inputs}], B [{outputs}, rank]",
        )


def _skip(
    name: str, module: str, shape: tuple[int, ...], names: BaseNames, options: ReadOptions
) -> Skipped:
    path = names.find(module)
    if path is None and options.text_only and not names.is_language(module):
        return Skipped(name, _OTHER_PART)
    expected = names.module(path).shape if path is not None else "a module of the base model"
    # Of a resized vocabulary it is no copy. GPT-2 stores its linear layers transposed.
    if path is None or sorted(expected) != sorted(shape):
        raise AdapterInvalid(
            "a copy of a base weight doesn't fit the base model",
            where=name,
            found=shape,
            expected=expected,
            remedy="was the vocabulary resized? Use that base, or train without resizing",
        )
    return Skipped(name, "a copy of the base's own weight")


def _without_place(tensors: Sequence[str], consumed: int, base: BaseModel) -> AdapterInvalid:
    some = ", ".join(tensors[:3])
    if consumed:
        return AdapterInvalid(
            "the base model has no module for a part of the adapter",
            where=some,
            found=f"{len(tensors)} tensors without a place, {consumed} with one",
            expected="a place for every tensor",
            remedy="if the base is the text part of the adapter's, ReadOptions(text_only=True)",
        )
    return AdapterInvalid(
        "no tensor of the adapter belongs to a module of the base model",
        found=some,
        expected=", ".join(islice(base.modules, 3)),
        remedy="is it an adapter of this base model?",
    )
