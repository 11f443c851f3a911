"""An adapter as the one flat vector of a layout, and the file that holds it.

Reading PEFT's files, checking, casting and packing happen once for an adapter and a layout. The
result is the packed file: a valid safetensors file of one tensor, ``vector``, whose metadata say
which content and which layout it is of, and each site's rank and scaling. Every later load is a
plain read of its bytes. Scaling is never folded into the weights.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from adaptercache.checkpoint import Checkpoint, LoraWeights
from adaptercache.checkpoint.memory import anonymous_memory
from adaptercache.checkpoint.slices import edges, slices_of
from adaptercache.errors import AdapterInvalid, AdapterUnsupported
from adaptercache.identity import Digest
from adaptercache.layout import LoraLayout, align
from adaptercache.sites import Site

__all__ = [
    "PACKED_FORMAT",
    "PackedFile",
    "VectorSpec",
    "bytes_of",
    "pack",
    "packed_size",
    "read_packed_header",
    "seal_of",
    "spec_of",
    "write_packed",
]

PACKED_FORMAT = "adaptercache packed v1"
_HEADER_STEP = 4096  # the vector begins at a multiple of it, so that direct I/O is possible
_MAX_HEADER = 64 << 20
_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class VectorSpec:
    """What a flat vector holds: for each site of its layout the rank (0 = absent) and scaling.

    ``starts`` (elements, −1 = absent), ``elements`` (the vector's length), and the names of the
    ``modules`` that it has anywhere follow from the layout.
    """

    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    starts: tuple[int, ...]
    elements: int
    modules: frozenset[str]

    @classmethod
    def of(cls, layout: LoraLayout, ranks: Sequence[int], scalings: Sequence[float]) -> VectorSpec:
        starts, elements = layout.starts(ranks)
        modules = frozenset(
            site.module for site, rank in zip(layout.sites, ranks, strict=True) if rank
        )
        return cls(tuple(ranks), tuple(scalings), tuple(starts), elements, modules)

    @cached_property
    def max_rank(self) -> int:
        """The largest rank of a site."""
        return max(self.ranks)


def spec_of(checkpoint: Checkpoint, layout: LoraLayout) -> VectorSpec:
    """Where each matrix of an adapter goes.

    Raises:
        AdapterUnsupported: it has LoRA where the layout has no site, or a rank over the maximum.
    """
    ranks, scalings = [0] * len(layout.sites), [0.0] * len(layout.sites)
    for path, weights in checkpoint.modules.items():
        index = layout.site_of.get(path)
        if index is None or not isinstance(weights, LoraWeights):
            raise AdapterUnsupported(
                f"LoRA on {path}",
                where=path,
                remedy=f"this cache serves {', '.join(layout.modules)} of the decoder's layers; "
                "train without it, or merge it into the base model",
            )
        if weights.rank > layout.max_rank:
            raise AdapterUnsupported(
                f"rank {weights.rank} over the maximum of {layout.max_rank}",
                where=path,
                remedy="raise LoraLayout's max_rank",
            )
        ranks[index], scalings[index] = weights.rank, weights.scaling
    return VectorSpec.of(layout, ranks, scalings)


def pack(checkpoint: Checkpoint, layout: LoraLayout) -> tuple[VectorSpec, Tensor]:
    """The flat vector of an adapter.

    Returns:
        Its spec, and a CPU tensor ``[elements]`` of the layout's dtype. Gaps between matrices are
        zero. Each weight is cast once, to nearest (float64 by way of float32).

    Raises:
        AdapterUnsupported: as `spec_of`.
        AdapterInvalid: a weight is too large for the layout's dtype.
    """
    spec = spec_of(checkpoint, layout)
    dtype = getattr(torch, layout.dtype)
    memory = anonymous_memory(spec.elements * layout.itemsize)  # zeros
    vector = torch.frombuffer(memory, dtype=dtype, count=spec.elements)
    for path, weights in checkpoint.modules.items():
        assert isinstance(weights, LoraWeights), "spec_of has checked it"
        index = layout.site_of[path]
        site, start, rank = layout.sites[index], spec.starts[index], spec.ranks[index]
        b_start = start + align(rank * site.in_features)
        a = vector[start : start + rank * site.in_features].view(rank, site.in_features)
        b = vector[b_start : b_start + rank * site.out_features].view(rank, site.out_features)
        _check_range(path, weights, dtype)
        its_a, its_b = _part(weights, site)
        for rows in slices_of(*a.shape):
            a[rows].copy_(its_a[rows])
        for rows in slices_of(*its_b.shape):
            b[:, rows].copy_(its_b[rows].t())
    return spec, vector


def _check_range(path: str, weights: LoraWeights, dtype: torch.dtype) -> None:
    """Raises AdapterInvalid where a weight would be infinite as ``dtype``.

    Looks at all of it, not at one rank's part: what one of them refuses, all do.
    """
    for matrix in (weights.a, weights.b):
        may_overflow = torch.finfo(matrix.dtype).max > torch.finfo(dtype).max
        if may_overflow and _overflows(matrix, dtype):
            name = str(dtype).removeprefix("torch.")
            raise AdapterInvalid(
                f"a weight is too large for {name}",
                where=path,
                found=f"up to {matrix.abs().max():.3g}",
                expected=f"at most {torch.finfo(dtype).max:.6g}",
                remedy="use bfloat16"
                if name == "float16"
                else "train it again: no sound one has it",
            )


def _overflows(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether a number of it is infinite as ``dtype``, or was before."""
    low, high = edges(matrix)
    if max(-low, high) <= torch.finfo(dtype).max:
        return False
    cast = [torch.tensor(edge, dtype=matrix.dtype).to(dtype) for edge in (low, high)]
    return not all(edge.isfinite() for edge in cast)  # a little above, it is rounded down


def _part(weights: LoraWeights, site: Site) -> tuple[Tensor, Tensor]:
    """This rank's columns of A and rows of B; views, where it is one run."""
    a, b = weights.a, weights.b
    if site.columns is not None:
        a = a[:, slice(*site.columns)]
    if site.rows:
        runs = [b[slice(*run)] for run in site.rows]
        b = runs[0] if len(runs) == 1 else torch.cat(runs)
    return a, b


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, not copied. The tensor must outlive them.

    (``Tensor.numpy`` would do; but numpy is not a dependency of torch.)
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    nbytes = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed file's header: where the vector lies in the file, and what it is of."""

    path: Path
    offset: int
    nbytes: int
    spec: VectorSpec
    content: Digest
    crc32: int


def packed_size(layout: LoraLayout, spec: VectorSpec) -> int:
    """Bytes of the packed file of such a vector."""
    header = _header(layout, bytes(32), spec, crc32=0)
    return len(header) + spec.elements * layout.itemsize


def write_packed(
    path: Path, layout: LoraLayout, content: Digest, spec: VectorSpec, vector: Tensor
) -> None:
    """Write a packed file, whole, and flush it to the device. ``path`` must be a new name."""
    data = bytes_of(vector)
    with open(path, "xb") as file:
        file.write(_header(layout, content, spec, zlib.crc32(data)))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _header(layout: LoraLayout, content: Digest, spec: VectorSpec, crc32: int) -> bytes:
    """The file's beginning; its length doesn't depend on digest and checksum."""
    facts = {
        "format": PACKED_FORMAT,
        "content_digest": content.hex(),
        "layout_digest": layout.digest.hex(),
        "ranks": json.dumps(spec.ranks),
        "scalings": json.dumps([scaling.hex() for scaling in spec.scalings]),
        "crc32": f"{crc32:08x}",
    }
    header = {
        "__metadata__": {**facts, "header_crc32": seal_of(facts)},
        "vector": {
            "dtype": _SAFETENSORS_NAMES[layout.dtype],
            "shape": [spec.elements],
            "data_offsets": [0, spec.elements * layout.itemsize],
        },
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_STEP)
    return len(text).to_bytes(8, "little") + text


def seal_of(facts: Mapping[str, object]) -> str:
    """The checksum of the metadata: a flipped bit in a scaling is a wrong adapter."""
    return f"{zlib.crc32(json.dumps(facts).encode()):08x}"


def read_packed_header(path: Path, layout: LoraLayout) -> PackedFile:
    """The header of a packed file of ``layout``; the vector itself is not read.

    Raises:
        AdapterInvalid: it is not a packed file, is of another layout, has a rank over the
            layout's maximum, is cut short, or its header is not as it was written.
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        text = file.read(length) if length <= _MAX_HEADER else b""
        size = file.seek(0, os.SEEK_END)
    try:
        meta = json.loads(text)["__metadata__"]
        ranks = [int(rank) for rank in json.loads(meta["ranks"])]
        scalings = [float.fromhex(scaling) for scaling in json.loads(meta["scalings"])]
        spec = VectorSpec.of(layout, ranks, scalings)
        content, crc32 = bytes.fromhex(meta["content_digest"]), int(meta["crc32"], 16)
        as_written = _header(layout, content, spec, crc32)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise _not_packed(path) from error
    nbytes = spec.elements * layout.itemsize
    is_whole = prefix + text == as_written and size == len(as_written) + nbytes
    if not is_whole or spec.max_rank > layout.max_rank:
        raise _not_packed(path)
    return PackedFile(path, len(as_written), nbytes, spec, content, crc32)


def _not_packed(path: Path) -> AdapterInvalid:
    return AdapterInvalid(
        "not a whole packed file of this layout", where=str(path), remedy="it is made again"
    )
