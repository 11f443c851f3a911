"""Bytes that changed on the disk were served as the adapter's own: the checksum was never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptercache import LoadFailed
from adaptercache.testing import held_weights


def test_a_packed_file_with_a_flipped_bit_is_never_served(tiny: Any, tmp_path: Path) -> None:
    tensors, config = tiny.tensors(0)
    source = tiny.source()
    source.put("a", tensors, config)
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
    (packed,) = tmp_path.glob(f"objects/*/{tiny.layout.digest.hex()}.safetensors")
    data = bytearray(packed.read_bytes())
    data[4096 + 8 + 2] ^= 0x40
    packed.write_bytes(data)
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        try:
            lease = cache.acquire("a").result(10)
        except LoadFailed:
            return  # told so, and fetched again: fine
        with lease:
            a, _, _ = held_weights(cache, lease, 0, "q_proj")
            name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
            assert a.equal(tensors[name])
