"""The checksum of a packed file covered its vector alone: a flipped bit in its header was served as
another scaling, and a rank over the maximum was served after the maximum had been lowered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptercache import AdapterInvalid, AdapterUnsupported, LoraLayout
from adaptercache.packing import VectorSpec, pack, read_packed_header, write_packed
from adaptercache.testing import FakeSource, held_weights


@pytest.fixture
def packed(tiny: Any, tmp_path: Path) -> Path:
    from adaptercache.checkpoint import checkpoint_from_tensors

    checkpoint = checkpoint_from_tensors(*tiny.tensors(0, alpha=6), tiny.layout.base)
    spec, vector = pack(checkpoint, tiny.layout)
    write_packed(tmp_path / "packed", tiny.layout, checkpoint.digest, spec, vector)
    return tmp_path / "packed"


def test_no_byte_of_the_header_can_change(tiny: Any, packed: Path) -> None:
    whole = packed.read_bytes()
    header = whole[: read_packed_header(packed, tiny.layout).offset]
    for place in (*range(len(header.rstrip())), len(header) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        packed.write_bytes(changed)
        with pytest.raises(AdapterInvalid):
            read_packed_header(packed, tiny.layout)


@pytest.mark.parametrize(
    "metadata",
    [
        {"ranks": "[" * 100_000},
        {"scalings": json.dumps(["0x1p99999"] * 14)},
        {"ranks": json.dumps([-4] * 14)},
        {"crc32": "-1"},
        [],
        None,
    ],
)
def test_a_strange_header_is_refused(tiny: Any, packed: Path, metadata: Any) -> None:
    whole = packed.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    old = header["__metadata__"]
    header["__metadata__"] = {**old, **metadata} if isinstance(metadata, dict) else metadata
    text = json.dumps(header).encode()
    packed.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(AdapterInvalid, match="packed"):
        read_packed_header(packed, tiny.layout)


def test_the_header_of_deeply_nested_json_is_refused(tiny: Any, packed: Path) -> None:
    text = b"[" * 100_000
    packed.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(AdapterInvalid, match="packed"):
        read_packed_header(packed, tiny.layout)


def test_a_rank_over_the_maximum_is_refused(tiny: Any, packed: Path) -> None:
    from tiny import BASE_CONFIG

    lower = LoraLayout.from_config(BASE_CONFIG, max_rank=3, dtype="float32")
    assert lower.digest == tiny.layout.digest
    with pytest.raises(AdapterInvalid, match="packed"):
        read_packed_header(packed, lower)


def test_a_lowered_maximum_holds_for_what_is_on_disk(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny import BASE_CONFIG

    source = tiny.source("a")
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        tiny.load(cache, "a")
    lower = LoraLayout.from_config(BASE_CONFIG, max_rank=2, dtype="float32")
    monkeypatch.setattr(tiny, "layout", lower)
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        lease = cache.acquire("a")
        with pytest.raises(AdapterUnsupported, match="over the maximum of 2"):
            lease.result(10)


def test_a_source_does_not_publish_packed_files(tiny: Any, tmp_path: Path) -> None:
    """One adapter's folder is that of all adapters of its content: it would be theirs too."""
    tensors, config = tiny.tensors(0)
    source = FakeSource()
    source.put("a", tensors, config)
    sound = {name: bytes(data) for name, data in source._adapters["a"][1].items()}
    spec = VectorSpec.of(tiny.layout, [1] * len(tiny.layout.sites), [1.0] * len(tiny.layout.sites))
    forged = b"forged" * spec.elements
    source.put_files("evil", {**sound, f"{tiny.layout.digest.hex()}.safetensors": forged})
    with tiny.cache(source, disk_dir=tmp_path) as cache:
        with pytest.raises(AdapterInvalid, match="strange name"):
            cache.acquire("evil").result(10)
        with cache.acquire("a").result(10) as lease:
            a, _, _ = held_weights(cache, lease, 0, "q_proj")
        assert a.equal(tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    assert not list(tmp_path.rglob("*forged*"))
