"""Sources: what they hand out, what they refuse, and what changes while it is read."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from adaptercache import (
    AdapterInvalid,
    AdapterNotFound,
    CapacityError,
    DirectorySource,
    LoadFailed,
)
from adaptercache.errors import as_load_error
from adaptercache.testing import TierContract
from adaptercache.tiers.remote import CONFIG, WEIGHTS, TensorSource, open_source


def whole(source: Any, adapter_id: str, name: str = WEIGHTS, piece: int = 7) -> bytes:
    """A file of an adapter, read in pieces."""
    revision = source.revision(adapter_id)
    size = source.files(adapter_id, revision)[name]
    data, buffer = b"", memoryview(bytearray(piece))
    while len(data) < size:
        count = source.read(adapter_id, revision, name, len(data), buffer)
        data += bytes(buffer[:count])
    return data


class Folders:
    """A `DirectorySource` and who writes it, as the contract wants them."""

    def __init__(self, root: Path) -> None:
        self.capacity, self.unit = 20, 64
        self.root, self.source = root, DirectorySource(root)

    def store(self, name: str, data: bytes) -> None:
        if self.used() + -(-len(data) // self.unit) > self.capacity:
            raise CapacityError("as much as the contract asks for")
        write(self.root, name, data)

    def store_in_vain(self, name: str, data: bytes) -> None:
        raise OSError("a source is not written by us")

    def load(self, name: str) -> bytes:
        try:
            return whole(self.source, name)
        except AdapterNotFound as error:
            raise KeyError(name) from error

    def drop(self, name: str) -> None:
        for file in (CONFIG, WEIGHTS):
            (self.root / name / file).unlink()
        (self.root / name).rmdir()

    def used(self) -> int:
        return sum(-(-len(self.load(name)) // self.unit) for name in self.source.ids())


def write(root: Path, name: str, data: bytes) -> None:
    (root / name).mkdir(parents=True)
    (root / name / CONFIG).write_text("{}")
    (root / name / WEIGHTS).write_bytes(data)


class TestDirectory(TierContract):
    @contextmanager
    def tier(self) -> Iterator[Folders]:
        with TemporaryDirectory() as root:
            yield Folders(Path(root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of adapters, and a secret beside it."""
    write(tmp_path / "adapters", "a", b"weights of a")
    write(tmp_path / "adapters", "team/b", b"weights of b")
    write(tmp_path / "adapters", "a1", b"weights of a1")
    write(tmp_path, "secret", b"secret")
    return tmp_path / "adapters"


STRANGE = [
    "..",
    ".",
    "",
    "/",
    "//a",
    "a/",
    "/a",
    "a//b",
    "../secret",
    "a/../../secret",
    "team/../a",
    "./a",
    "a\0",
    "\0",
    "a/\0/b",
    "unknown",
    "team",
    "a/b",
    "x" * 300,
    "y/" * 5000 + "y",
    "%2e%2e/secret",
    "..\\secret",
]


@pytest.mark.parametrize("adapter_id", STRANGE, ids=lambda text: repr(text[:20]))
def test_an_id_that_names_no_adapter_is_not_found(root: Path, adapter_id: str) -> None:
    with pytest.raises(
        (AdapterNotFound, AdapterInvalid) if adapter_id == "team" else AdapterNotFound
    ):
        DirectorySource(root).revision(adapter_id)


def test_an_absolute_path_is_not_found(root: Path) -> None:
    with pytest.raises(AdapterNotFound):
        DirectorySource(root).revision(str(root / "a"))


@pytest.mark.parametrize("target", ["../../secret", "{root}/../secret"])
def test_a_link_that_leads_out_of_the_directory_is_not_found(root: Path, target: str) -> None:
    (root / "team" / "link").symlink_to(target.format(root=root))
    with pytest.raises(AdapterNotFound):
        DirectorySource(root).revision("team/link")


def test_a_link_within_the_directory_is_followed(root: Path) -> None:
    (root / "link").symlink_to("team/b")
    assert whole(DirectorySource(root), "link") == b"weights of b"


@pytest.mark.parametrize("name", ["ünï", "😀", "with space", "dots.in.it", "a\\b", "c:d", "-x"])
def test_any_name_that_a_folder_can_have_is_an_id(root: Path, name: str) -> None:
    write(root, name, name.encode())
    assert whole(DirectorySource(root), name) == name.encode()


def test_ids_are_the_folders_with_a_config(root: Path) -> None:
    assert sorted(DirectorySource(root).ids()) == ["a", "a1", "team/b"]


def test_only_config_and_weights_are_handed_out(root: Path) -> None:
    (root / "a" / "optimizer.pt").write_bytes(bytes(100))
    source = DirectorySource(root)
    assert dict(source.files("a", source.revision("a"))) == {CONFIG: 2, WEIGHTS: 12}


def test_a_folder_without_config_is_invalid(root: Path) -> None:
    (root / "a" / CONFIG).unlink()
    with pytest.raises(AdapterInvalid, match=CONFIG):
        DirectorySource(root).revision("a")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_changed_file_is_another_revision(root: Path, name: str) -> None:
    source = DirectorySource(root)
    before = source.revision("a")
    (root / "a" / name).write_bytes(b"other and longer")
    assert source.revision("a") != before


def test_a_file_put_in_the_place_of_another_is_another_revision(root: Path) -> None:
    source, weights = DirectorySource(root), root / "a" / WEIGHTS
    before, info = source.revision("a"), weights.stat()
    (root / "fresh").write_bytes(b"same length!")
    os.utime(root / "fresh", ns=(info.st_atime_ns, info.st_mtime_ns))
    os.replace(root / "fresh", weights)
    assert source.revision("a") != before


def test_the_revision_stays_while_nothing_changes(root: Path) -> None:
    assert DirectorySource(root).revision("a") == DirectorySource(root).revision("a")


def test_a_read_of_an_adapter_that_changed_meanwhile_fails(root: Path) -> None:
    source = DirectorySource(root)
    revision = source.revision("a")
    (root / "a" / WEIGHTS).write_bytes(b"other and longer")
    with pytest.raises(LoadFailed, match="rewritten"):
        source.read("a", revision, WEIGHTS, 0, memoryview(bytearray(12)))


def test_a_read_beyond_the_end_returns_what_there_is(root: Path) -> None:
    source, buffer = DirectorySource(root), memoryview(bytearray(100))
    revision = source.revision("a")
    assert source.read("a", revision, WEIGHTS, 8, buffer) == 4
    assert source.read("a", revision, WEIGHTS, 12, buffer) == 0
    assert bytes(buffer[:4]) == b"of a"


# Tensors that were put


@pytest.fixture
def puts() -> TensorSource:
    source = TensorSource()
    source.put("a", {"w": torch.arange(6.0).view(2, 3).t()}, {"r": 3})
    return source


def test_what_was_put_is_handed_out_as_pefts_files(puts: TensorSource) -> None:
    from safetensors.torch import load

    assert json.loads(whole(puts, "a", CONFIG)) == {"r": 3}
    assert load(whole(puts, "a"))["w"].equal(torch.arange(6.0).view(2, 3).t())


def test_equal_tensors_are_equal_revisions(puts: TensorSource) -> None:
    before = puts.revision("a")
    puts.put("a", {"w": torch.arange(6.0).view(2, 3).t()}, {"r": 3})
    assert puts.revision("a") == before


def test_a_read_of_what_was_put_again_meanwhile_fails(puts: TensorSource) -> None:
    before = puts.revision("a")
    puts.put("a", {"w": torch.zeros(1)}, {})
    with pytest.raises(LoadFailed):
        puts.read("a", before, WEIGHTS, 0, memoryview(bytearray(4)))


def test_what_was_removed_is_not_found(puts: TensorSource) -> None:
    puts.remove("a")
    with pytest.raises(AdapterNotFound):
        puts.revision("a")


def test_a_source_is_taken_as_it_is(puts: TensorSource) -> None:
    assert open_source(puts) is puts


def test_a_file_url_is_a_directory(root: Path) -> None:
    assert sorted(open_source(f"file://{root}").ids()) == ["a", "a1", "team/b"]


def test_a_scheme_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        open_source("nonsense://bucket/key")


def test_a_bucket_without_boto3_says_what_to_install() -> None:
    import subprocess
    import sys

    program = (
        "import sys; sys.modules['boto3'] = None\n"
        "from adaptercache.tiers.remote import open_source\n"
        "open_source('s3://bucket/prefix')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'boto3[crt]'" in done.stderr.splitlines()[-1]


def test_a_failure_says_which_file_could_not_be_read(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(NotADirectoryError) as raised:
        source.revision("acme/sql")
    failed = as_load_error(raised.value, "acme/sql")
    assert str(failed) == (
        "adapter 'acme/sql': loading failed (cause: NotADirectoryError: "
        f"[Errno {errno.ENOTDIR}] the source is no directory: {str(tmp_path)!r})"
    )
    assert "cause: OSError(5, 'I/O')" in str(as_load_error(OSError(5, "I/O")))
