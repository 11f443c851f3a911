"""Projections that one release keeps apart and another keeps fused: the adapter fits both.

q, k and v in ``qkv_proj``, gate and up in ``gate_up_proj``, experts one by one or stacked in one
parameter. From fused to apart, the parts share A and cut B by rows. From apart to fused, the ranks
add up and B is block-diagonal. Both are exact: no weight is changed, only copied beside zeros.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from adaptercache.base_model import BaseModel, BaseModule
from adaptercache.checkpoint.names import BaseNames
from adaptercache.checkpoint.weights import ExpertWeights, LoraWeights, Weights
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

__all__ = ["Piece", "assemble", "fused_pieces", "unstacked_pieces"]

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "W_pack": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_MOST_GROWN = 1 << 30


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights for a module of the base, or for some rows of one.

    Args:
        target: path of the base's module.
        weights: of the module, or of those rows.
        first_row: where they begin in the module's output; None: they are the whole module's.
        expert: which of the stacked experts, in a stacked parameter.
    """

    target: str
    weights: Weights
    first_row: int | None = None
    expert: int = 0


def fused_pieces(form: str, weights: LoraWeights, names: BaseNames) -> list[Piece]:
    """The places of a matrix that the base keeps fused with others, or apart; else nothing.

    Args:
        form: the canonical path of the adapter's module, which the base lacks.

    Raises:
        AdapterInvalid: the base's modules have other sizes.
    """
    parent, _, leaf = form.rpartition(".")
    parts = [_find_matrix(f"{parent}.{part}", names) for part in _FUSED.get(leaf, ())]
    found = [part for part in parts if part is not None]
    if found and len(found) == len(parts):
        return _cut(form, weights, found, names)
    for fused, members in _FUSED.items():
        target = _find_matrix(f"{parent}.{fused}", names)
        if target is not None and leaf in members:
            module, index = names.module(target), members.index(leaf)
            rows = _member_rows(parent, module, members, names)
            _expect(form, weights, rows[index], module.shape[1])
            return [Piece(target, weights, sum(rows[:index]))]
    return _expert_part(form, weights, names)


def _find_matrix(path: str, names: BaseNames) -> str | None:
    """The base's own path for a module of two dimensions: stacked experts are another thing."""
    found = names.find(path)
    return found if found is not None and len(names.module(found).shape) == 2 else None


def unstacked_pieces(stacks: Mapping[str, ExpertWeights], names: BaseNames) -> list[Piece]:
    """Stacked experts onto a base that keeps them one by one (`BaseNames.split_experts`)."""
    pieces = []
    for path, stack in stacks.items():
        parent, _, leaf = path.rpartition(".")
        for expert, (a, b) in enumerate(zip(stack.a, stack.b, strict=True)):
            form = f"{parent}.{expert}.{leaf}"
            weights = LoraWeights(a, b, stack.scaling, stack.rank)
            target = names.find(form)
            pieces += [Piece(target, weights)] if target else fused_pieces(form, weights, names)
    return pieces


def _cut(form: str, weights: LoraWeights, targets: Sequence[str], names: BaseNames) -> list[Piece]:
    """A fused matrix onto modules that are apart: A is shared, B is cut by rows."""
    shapes = [names.module(target).shape for target in targets]
    rows = [shape[0] for shape in shapes]
    _expect(form, weights, sum(rows), shapes[0][1])
    return [
        Piece(target, LoraWeights(weights.a, b, weights.scaling, weights.rank))
        for target, b in zip(targets, weights.b.split(rows), strict=True)
    ]


def _member_rows(
    parent: str, fused: BaseModule, members: Sequence[str], names: BaseNames
) -> tuple[int, ...]:
    """Rows of each member in a fused module: halves, or q as wide as the input of ``o_proj``."""
    rows = fused.shape[-2]
    if len(members) == 2:
        return (rows // 2,) * 2
    output = names.find(f"{parent}.o_proj")
    if output is None:
        raise AdapterUnsupported(
            "q, k and v apart on a fused base without o_proj",
            where=parent,
            remedy="fuse the adapter's matrices before it is published",
        )
    q = names.module(output).shape[1]
    return q, (rows - q) // 2, (rows - q) // 2


def _expert_part(form: str, weights: LoraWeights, names: BaseNames) -> list[Piece]:
    """One expert's matrix onto the stacked parameter of all experts."""
    parent, _, leaf = form.rpartition(".")
    parent, _, number = parent.rpartition(".")
    if not (number.isascii() and number.isdecimal() and str(int(number)) == number):
        return []
    members = _FUSED["gate_up_proj"]
    wanted = "gate_up_proj" if leaf in members else leaf
    for target, module in names.stacked(parent).items():
        if target.rpartition(".")[2] != wanted:
            continue
        experts, rows, columns = module.shape
        if int(number) >= experts or module.is_transposed:
            return []
        height = rows // 2 if leaf in members else rows
        _expect(form, weights, height, columns)
        return [Piece(target, weights, height if leaf == members[1] else 0, int(number))]
    return []


def _expect(form: str, weights: LoraWeights, rows: int, columns: int) -> None:
    if (weights.b.shape[0], weights.a.shape[1]) != (rows, columns):
        raise AdapterInvalid(
            "the adapter's shape doesn't fit the base model",
            where=form,
            found=f"A {tuple(weights.a.shape)}, B {tuple(weights.b.shape)}",
            expected=f"A [rank, {columns}], B [{rows}, rank]",
        )


def assemble(pieces: Sequence[Piece], base: BaseModel) -> dict[str, Weights]:
    """The pieces by module of the base, in the base's order; parts of one module are joined.

    Raises:
        AdapterInvalid: a module, or a part of it, is given twice.
        AdapterUnsupported: parts of one module have different scalings, or take too much memory
            once they are joined.
    """
    by_target: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_target.setdefault(piece.target, []).append(piece)
    _check_growth(by_target, base)
    return {
        path: _joined(path, module, by_target[path])
        for path, module in base.modules.items()
        if path in by_target
    }


def _check_growth(by_target: Mapping[str, Sequence[Piece]], base: BaseModel) -> None:
    """Joined, a few experts take the room of all: a small file must not become a huge adapter."""
    held = grown = 0
    for path, pieces in by_target.items():
        if pieces[0].first_row is not None:
            *experts, rows, columns = base.modules[path].shape
            rank, itemsize = _joined_rank(pieces), _joined_dtype(pieces).itemsize
            grown += math.prod(experts) * rank * (rows + columns) * itemsize
            held += sum(piece.weights.a.nbytes + piece.weights.b.nbytes for piece in pieces)
    if grown > max(_MOST_GROWN, 8 * held):
        raise AdapterUnsupported(
            f"parts of fused or stacked modules that take {grown} bytes once joined, of {held}",
            remedy="save all of their experts, or use a base model that keeps them apart",
        )


def _joined_rank(pieces: Sequence[Piece]) -> int:
    """The ranks of the parts of one matrix add up; of several experts, the largest sum counts."""
    ranks: Counter[int] = Counter()
    for piece in pieces:
        ranks[piece.expert] += piece.weights.rank
    return max(ranks.values())


def _joined_dtype(pieces: Sequence[Piece]) -> torch.dtype:
    """One that holds both dtypes of a mixed file exactly."""
    dtypes = [tensor.dtype for piece in pieces for tensor in (piece.weights.a, piece.weights.b)]
    return reduce(torch.promote_types, dtypes)


def _joined(path: str, module: BaseModule, pieces: list[Piece]) -> Weights:
    if len(pieces) == 1 and pieces[0].first_row is None:
        return pieces[0].weights
    places = {(piece.expert, piece.first_row) for piece in pieces}
    if len(places) < len(pieces) or any(row is None for _, row in places):
        raise AdapterInvalid(
            "the adapter gives a module twice, fused and apart", where=path, expected="one of them"
        )
    scalings = {piece.weights.scaling for piece in pieces}
    if len(scalings) > 1:
        raise AdapterUnsupported(
            "different scalings inside one fused matrix",
            where=f"{path}: {sorted(scalings)}",
            remedy="give its parts one alpha and one rank",
        )
    # Sorted, so that the result (and the digest) doesn't depend on the order in the file.
    ordered = sorted(pieces, key=lambda piece: (piece.expert, piece.first_row or 0))
    a, b = _block_diagonal(ordered, module)
    if len(module.shape) == 3:
        return ExpertWeights(a, b, scalings.pop(), a.shape[1])
    return LoraWeights(a[0], b[0], scalings.pop(), a.shape[1])


def _block_diagonal(
    pieces: Sequence[Piece], module: BaseModule
) -> tuple[torch.Tensor, torch.Tensor]:
    """``a [experts, rank, columns]`` and ``b [experts, rows, rank]``, zero outside the pieces."""
    *leading, rows, columns = module.shape
    experts = leading[0] if leading else 1
    rank, dtype = _joined_rank(pieces), _joined_dtype(pieces)
    a = torch.zeros(experts, rank, columns, dtype=dtype)
    b = torch.zeros(experts, rows, rank, dtype=dtype)
    filled = [0] * experts
    for piece in pieces:
        start = filled[piece.expert]
        filled[piece.expert] = start + piece.weights.rank
        ranks = slice(start, filled[piece.expert])
        first = piece.first_row or 0
        a[piece.expert, ranks] = piece.weights.a
        b[piece.expert, first : first + piece.weights.b.shape[0], ranks] = piece.weights.b
    return a, b
