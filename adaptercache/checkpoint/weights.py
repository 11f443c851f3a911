"""What an adapter is made of, once read: its A and B by module, ready to be packed or merged."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import TypeAlias

import torch

from adaptercache.base_model import BaseModel
from adaptercache.identity import Digest, content_digest

__all__ = ["Checkpoint", "ExpertWeights", "LoraWeights", "Skipped", "Weights"]

_HASH_THREADS = 4
_WORTH_THREADS = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """LoRA of one matrix: ΔW = scaling · b a, as ``[out, in]``.

    Args:
        a: ``[rank, in]``, in the file's own dtype. Of an embedding, ``in`` is the vocabulary.
        b: ``[out, rank]``.
        scaling: alpha / rank, or alpha / √rank for rsLoRA; never folded into a or b.
        rank: as the tensors have it.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """LoRA of stacked MoE experts: ΔW[e] = scaling · b[e] a[e], as ``[rows, columns]``.

    Rows and columns are those of the base parameter ``[experts, rows, columns]`` as it is stored,
    whichever of them is the input (``BaseModule.is_transposed`` says where that is known).

    Args:
        a: ``[experts, rank, columns]``, in the file's own dtype, often not contiguous.
        b: ``[experts, rows, rank]``.
        scaling: as in `LoraWeights`.
        rank: of each expert.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    rank: int


Weights: TypeAlias = LoraWeights | ExpertWeights


@dataclass(frozen=True, slots=True)
class Skipped:
    """A tensor of the file that is no part of the adapter, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An adapter that was read, checked and fitted to its base model.

    Immutable and safe to share between threads. It owns what was read of the file.

    Args:
        base: the base model that it was fitted to.
        modules: weights by path of the base's module, in the base's order.
        consumed: names of the file's tensors that went into ``modules``.
        skipped: all other tensors of the file.
    """

    base: BaseModel
    modules: Mapping[str, Weights]
    consumed: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @property
    def max_rank(self) -> int:
        return max(weights.rank for weights in self.modules.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all A and B, in the file's dtypes."""
        return sum(w.a.nbytes + w.b.nbytes for w in self.modules.values())

    def delta(self, path: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The full ΔW of a module, scaling included, in the base weight's own orientation, computed
        in ``dtype``.

        Linear and conv1d ``[out, in]``, embedding ``[vocabulary, hidden]``, a parameter in its own
        shape.

        Raises:
            KeyError: the adapter has nothing for that path.
        """
        weights = self.modules[path]
        product = weights.scaling * (weights.b.to(dtype) @ weights.a.to(dtype))
        return product.T if self.base.modules[path].kind == "embedding" else product

    @cached_property
    def digest(self) -> Digest:
        """32 bytes over paths, dtypes, shapes, ranks, scalings and the tensors' bytes.

        It doesn't depend on the order or the prefixes of the names in the file, nor on anything
        that was skipped. Reads all the weights; a large adapter is hashed by several threads.
        """
        parts = list(self._parts())
        if self.nbytes < _WORTH_THREADS:
            return content_digest((label, _leaf(tensor)) for label, tensor in parts)
        with ThreadPoolExecutor(_HASH_THREADS, "adaptercache-hash") as threads:
            shares = [parts[first::_HASH_THREADS] for first in range(_HASH_THREADS)]
            hashed = threads.map(lambda share: [(label, _leaf(t)) for label, t in share], shares)
            return content_digest(chain.from_iterable(hashed))

    def _parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, weights in self.modules.items():
            for side, tensor in (("A", weights.a), ("B", weights.b)):
                facts = (
                    path,
                    side,
                    str(tensor.dtype),
                    str(tuple(tensor.shape)),
                    str(weights.rank),
                    weights.scaling.hex(),
                )
                yield "\n".join(facts), tensor


def _leaf(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the tensor's bytes in row-major order. Lets go of the interpreter's lock."""
    dense = tensor.contiguous()
    view = (ctypes.c_char * dense.nbytes).from_address(dense.data_ptr())  # no copy, and no numpy
    return sha256(view).digest()
