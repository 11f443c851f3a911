"""The disk: published whole or not at all, and what an earlier run left there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tiny import BASE_CONFIG

from adaptercache import AdapterInvalid, AdapterKey, CapacityError, LoadFailed, LoraLayout
from adaptercache.disk import transfer
from adaptercache.identity import content_digest
from adaptercache.packing import VectorSpec, read_packed_header, write_packed
from adaptercache.testing import TierContract
from adaptercache.tiers.disk import DiskTier

LAYOUT = LoraLayout.from_config(
    BASE_CONFIG,
    max_rank=16,
    dtype="float32",
)


def digest_of(name: str) -> bytes:
    return content_digest([("name", name.encode())])


class Contents:
    """`DiskTier` with a budget, as the contract wants it."""

    def __init__(self, root: Path) -> None:

        self.capacity, self.unit = 20, 64
        self.tier = DiskTier(root)

    def store(self, name: str, data: bytes) -> None:
        if self.used() + -(-len(data) // self.unit) > self.capacity:
            raise CapacityError("over the budget")
        folder = self._filled(data)
        with self.tier.changing:
            self.tier.publish(folder, digest_of(name))

    def store_in_vain(self, name: str, data: bytes) -> None:
        folder = self._filled(data[: len(data) // 2])
        self.tier.discard(folder)
        raise OSError("injected")

    def _filled(self, data: bytes) -> Path:
        folder = self.tier.new_folder()
        (folder / "data").write_bytes(data)
        return folder

    def load(self, name: str) -> bytes:
        try:
            return (self.tier.folder(digest_of(name)) / "data").read_bytes()
        except FileNotFoundError as error:
            raise KeyError(name) from error

    def drop(self, name: str) -> None:
        with self.tier.changing:
            self.tier.delete(digest_of(name))

    def used(self) -> int:
        """What a restart would find, in units, and whatever lies about."""
        left = [path for path in (self.tier.root / "tmp").rglob("*") if path.is_file()]
        assert left == []
        return sum(-(-size // self.unit) for _, size in self.tier.scan())


class TestContents(TierContract):
    @contextmanager
    def tier(self) -> Iterator[Contents]:
        with TemporaryDirectory() as root:
            contents = Contents(Path(root))
            try:
                yield contents
            finally:
                contents.tier.close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path)
    yield tier
    tier.close()


def vector_and_spec() -> tuple[torch.Tensor, VectorSpec]:
    spec = VectorSpec.of(LAYOUT, [4] * len(LAYOUT.sites), [0.5] * len(LAYOUT.sites))
    return torch.randn(spec.elements, generator=torch.Generator().manual_seed(3)), spec


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "packed.safetensors"
    vector, spec = vector_and_spec()
    write_packed(path, LAYOUT, digest_of("a"), spec, vector)
    return path


def views_for(path: Path, piece: int = 1000) -> list[torch.Tensor]:
    left, views = read_packed_header(path, LAYOUT).nbytes, []
    while left:
        views.append(torch.zeros(min(piece, left), dtype=torch.uint8))
        left -= len(views[-1])
    return views


def test_a_packed_file_reads_back_to_the_bit(
    tier: DiskTier, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "READ_BYTES", 300)  # many pieces, by several threads
    header, views = read_packed_header(packed, LAYOUT), views_for(packed)
    tier.read_into(header, views)
    vector, spec = vector_and_spec()
    assert torch.cat(views).view(torch.float32).equal(vector)
    assert header.spec == spec


def test_a_packed_file_is_a_sound_safetensors_file(packed: Path) -> None:
    from safetensors.torch import load_file

    assert load_file(packed)["vector"].equal(vector_and_spec()[0])


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, 4095, 4096, 4103, 4104, -4, -1])
def test_a_packed_file_cut_short_anywhere_is_refused(packed: Path, cut: int) -> None:
    packed.write_bytes(packed.read_bytes()[:cut])
    with pytest.raises(AdapterInvalid):
        read_packed_header(packed, LAYOUT)


def test_a_packed_file_with_bytes_after_its_end_is_refused(packed: Path) -> None:
    packed.write_bytes(packed.read_bytes() + b"\0")
    with pytest.raises(AdapterInvalid):
        read_packed_header(packed, LAYOUT)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**32, 100 << 20])
def test_a_header_length_beyond_reason_is_refused(packed: Path, length: int) -> None:
    packed.write_bytes(length.to_bytes(8, "little") + packed.read_bytes()[8:])
    with pytest.raises(AdapterInvalid):
        read_packed_header(packed, LAYOUT)


def test_a_packed_file_of_another_layout_is_refused(packed: Path) -> None:
    other = LoraLayout(LAYOUT.base, targets=("q_proj",), dtype="float32")
    with pytest.raises(AdapterInvalid):
        read_packed_header(packed, other)


def test_a_file_that_shrinks_while_it_is_read_fails_the_read(tier: DiskTier, packed: Path) -> None:
    header, views = read_packed_header(packed, LAYOUT), views_for(packed)
    os.truncate(packed, header.offset + header.nbytes // 2)
    with pytest.raises(LoadFailed):
        tier.read_into(header, views)


# Notes: which content an id stood for


KEY = AdapterKey("team/a", "r1")


@pytest.fixture
def noted(tier: DiskTier) -> DiskTier:
    folder = tier.new_folder()
    (folder / "data").write_bytes(b"data")
    with tier.changing:
        tier.publish(folder, digest_of("a"))
        tier.note(KEY, digest_of("a"))
    return tier


def test_a_note_is_found_again(noted: DiskTier) -> None:
    assert noted.lookup(KEY) == digest_of("a")


@pytest.mark.parametrize("key", [AdapterKey("team/a", "r2"), AdapterKey("team/b", "r1")], ids=str)
def test_a_note_is_of_one_id_at_one_revision(noted: DiskTier, key: AdapterKey) -> None:
    assert noted.lookup(key) is None


def test_a_note_of_content_that_is_gone_is_none(noted: DiskTier) -> None:
    with noted.changing:
        noted.delete(digest_of("a"))
    assert noted.lookup(KEY) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"id": 1}', "\xff"])
def test_a_note_that_is_torn_is_none(noted: DiskTier, tmp_path: Path, text: str) -> None:
    (path,) = (tmp_path / "index").iterdir()
    path.write_bytes(text.encode("latin-1"))
    assert noted.lookup(KEY) is None


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a\0b", "", "x" * 5000, "ünï/😀", "\udc80"]
)
def test_a_note_of_any_id_stays_in_its_folder(tier: DiskTier, tmp_path: Path, name: str) -> None:
    tier.note(AdapterKey(name, "r"), digest_of("a"))
    assert len(list((tmp_path / "index").iterdir())) == 1


# What an earlier run left


def test_temporary_files_of_a_run_that_died_are_removed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "dead" / "folder").mkdir(parents=True)
    (tmp_path / "tmp" / "dead" / "folder" / "half").write_text("half")
    tier = DiskTier(tmp_path)
    left = [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
    tier.close()
    assert left == []


def test_content_is_found_least_recently_written_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    for index, name in enumerate("cab"):
        folder = tier.new_folder()
        (folder / "data").write_bytes(bytes(index + 1))
        with tier.changing:
            tier.publish(folder, digest_of(name))
        os.utime(tier.folder(digest_of(name)), (index, index))
    found = tier.scan()
    tier.close()
    assert found == [(digest_of(name), index + 1) for index, name in enumerate("cab")]


PROGRAM = """
import os, sys
from pathlib import Path
from adaptercache.identity import AdapterKey, content_digest
from adaptercache.tiers import disk
from adaptercache.tiers.disk import DiskTier

steps, root = int(sys.argv[1]), Path(sys.argv[2])

def dying(name, module):
    do = getattr(module, name)
    def counted(*args, **options):
        global steps
        steps -= 1
        if steps < 0:
            os._exit(9)
        return do(*args, **options)
    setattr(module, name, counted)

tier = DiskTier(root)
for name in ("rename", "replace", "fsync"):
    dying(name, os)
digest = content_digest([("name", b"new")])
folder = tier.new_folder()
for file in ("adapter_config.json", "packed"):
    with open(folder / file, "xb") as opened:
        opened.write(file.encode() * 100)
        opened.flush()
        os.fsync(opened.fileno())
tier.seal(folder)
with tier.changing:
    tier.publish(folder, digest)
    tier.note(AdapterKey("a", "r"), digest)
    tier.delete(content_digest([("name", b"old")]))
tier.make_durable(digest)
os._exit(0)
"""


@pytest.mark.parametrize("steps", range(9))
def test_a_run_that_is_killed_at_any_step_leaves_the_old_or_the_new_whole(
    tmp_path: Path, steps: int
) -> None:
    old = tmp_path / "objects" / digest_of("old").hex()
    old.mkdir(parents=True)
    for name in ("adapter_config.json", "packed"):
        (old / name).write_bytes(name.encode() * 100)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(steps), str(tmp_path)], env=environment, timeout=60
    )
    assert done.returncode == (0 if steps == 8 else 9) or steps >= 7
    tier = DiskTier(tmp_path)
    for digest, _ in tier.scan():
        for name in ("adapter_config.json", "packed"):
            assert (tier.folder(digest) / name).read_bytes() == name.encode() * 100
    assert tier.lookup(AdapterKey("a", "r")) in (None, content_digest([("name", b"new")]))
    assert [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()] == []
    tier.close()


def test_a_file_that_goes_while_sizes_are_counted_hides_no_content(tier: DiskTier) -> None:
    """Another process removes a packed file that it found broken: between our reading the folder's
    names and asking for a size, which a link to nowhere stands for."""
    folder = tier.new_folder()
    (folder / "data").write_bytes(b"x" * 10)
    with tier.changing:
        tier.publish(folder, digest_of("a"))
    (tier.folder(digest_of("a")) / "gone").symlink_to("nowhere")
    assert tier.scan() == [(digest_of("a"), 10)]
