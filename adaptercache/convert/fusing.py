"""An adapter whose base is fused where the trainer had it apart: qkv_proj, gate_up_proj of Phi-3.

PEFT adapts the modules that the model has. So the parts become one matrix: the ranks add up, the As
lie one above the other, and each B beside zeros (checkpoint/fused.py). ΔW is the parts', one above
the other, and zero for a part that was not trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from adaptercache.base_model import BaseModel
from adaptercache.checkpoint.fused import Piece, assemble, fused_pieces
from adaptercache.checkpoint.names import BaseNames, canonical
from adaptercache.checkpoint.pairs import Pair
from adaptercache.checkpoint.weights import LoraWeights

__all__ = ["fused_pairs"]


def fused_pairs(pairs: Sequence[Pair], base: BaseModel) -> tuple[Pair, ...]:
    """The pairs of the modules that a fused base has, in its order.

    Args:
        pairs: of modules of the base, or of parts of such; all have one scaling.

    Raises:
        AdapterInvalid: the base has no place for one of them, or of another size.
    """
    names = BaseNames(base)
    pieces: list[Piece] = []
    sources: dict[str, tuple[str, str]] = {}
    for pair in pairs:
        weights = LoraWeights(pair.a, pair.b, 1.0, pair.a.shape[0])
        places = [Piece(pair.module, weights)]
        if pair.module not in base.modules:
            places = fused_pieces(canonical(pair.module), weights, names)
        pieces += places
        sources |= {piece.target: pair.names for piece in places}
    return tuple(
        Pair(path, False, 0, weights.a, weights.b, sources[path])
        for path, weights in assemble(pieces, base).items()
    )
