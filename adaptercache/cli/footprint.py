"""What one adapter takes on every tier, as the tiers count it."""

from __future__ import annotations

from dataclasses import dataclass

from adaptercache.disk.contents import sums_size
from adaptercache.layout import ArenaShape, LoraLayout
from adaptercache.packing import VectorSpec, packed_size

__all__ = ["HOST_BLOCK_BYTES", "Footprint"]

HOST_BLOCK_BYTES = 2 << 20  # AdapterCache's default
_PUBLISHED = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one adapter.

    Args:
        remote: of its files, as published.
        disk: of these, their checksums, and the packed file.
        host: of its blocks.
        gpu: of its pages.
        vector: of the flat vector, which is what moves from DISK up.
    """

    remote: int
    disk: int
    host: int
    gpu: int
    vector: int

    @classmethod
    def of(
        cls, layout: LoraLayout, spec: VectorSpec, arena: ArenaShape, published: int
    ) -> Footprint:
        """Of an adapter whose files have ``published`` bytes."""
        vector = spec.elements * layout.itemsize
        return cls(
            remote=published,
            disk=published + sums_size(_PUBLISHED) + packed_size(layout, spec),
            host=-(-vector // HOST_BLOCK_BYTES) * HOST_BLOCK_BYTES,
            gpu=arena.pages_for(spec.elements) * arena.rows * arena.page_bytes,
            vector=vector,
        )
