"""REMOTE: where adapters come from. A source is anything with four methods."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from torch import Tensor

from adaptercache.checkpoint.files import find_weights
from adaptercache.errors import AdapterInvalid, AdapterNotFound, LoadFailed
from adaptercache.identity import check_own_id
from adaptercache.regular_file import open_regular

__all__ = ["CONFIG", "WEIGHTS", "DirectorySource", "Source", "TensorSource", "open_source"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class Source(Protocol):
    """Where adapters come from. All methods may block, and are called from several threads.

    They raise `AdapterNotFound` for an id that there is no adapter of, another
    `AdapterCacheError` where they can say what is wrong, and OSError for a failure that may pass.
    """

    def revision(self, adapter_id: str) -> str:
        """A token for config and weights together: as long as it is equal, nothing changed."""

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        """The files that make up the adapter: names and sizes in bytes."""

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        """Read bytes of a file from ``offset`` on. Returns how many; fewer only at its end.

        Raises LoadFailed where the adapter is not at ``revision`` any more.
        """

    def ids(self) -> Iterable[str]:
        """All adapter ids."""

    # A source may also have
    #     stream(adapter_id, revision, name, start, stop) -> Iterator[bytes]
    # bytes [start, stop) in order, in pieces; used instead of `read`, by several threads at once.
    #     check(adapter_id, revision, name, data: memoryview) -> None
    # called with a whole file; raises LoadFailed where these are other bytes than it has.
    #     name: str
    # says which adapters these are: where the source can't be asked, what a source of the same
    # name had last under an id is served from the disk.


def open_source(source: str | os.PathLike[str] | Source) -> Source:
    """A source from what a user writes: a directory, ``s3://bucket/prefix``, or a source as it is.

    Raises:
        NotADirectoryError, ValueError: as the sources' own.
        ModuleNotFoundError: boto3 is missing.
    """
    if not isinstance(source, (str, os.PathLike)):
        if not all(hasattr(source, name) for name in ("revision", "files", "read", "ids")):
            raise TypeError(f"source {source!r}: give a directory, or an object like a Source")
        return source
    scheme, separator, _ = str(source).partition("://")
    if scheme == "s3" and separator:
        try:
            from adaptercache.s3 import S3Source
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "s3:// needs boto3: pip install 'boto3[crt]'", name=error.name
            ) from error
        return S3Source(str(source))
    if separator and scheme != "file":
        raise ValueError(f"no source for {scheme}://; give a directory, or a Source of your own")
    root = str(source).removeprefix("file://")
    if not root:  # the working directory, which nobody meant
        raise ValueError(f"source {str(source)!r} names no directory")
    return DirectorySource(root)


class DirectorySource:
    """A directory with a folder an adapter, as PEFT saves them; ids may have slashes.

    The revision is made of the size, inode and times of config and weights. Thread-safe.

    Raises:
        NotADirectoryError: there is no such directory, now or when an adapter is asked for.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.realpath(root))  # Path.resolve raises where links go in a circle
        self.name = f"file://{self._root}"
        self._check_root()

    def _check_root(self) -> None:
        """A root that is gone is our failure (not mounted, perhaps), not that of who asks."""
        if not self._root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the source is no directory", str(self._root))

    def revision(self, adapter_id: str) -> str:
        folder = self._folder(adapter_id)
        marks = []
        for name in self._names(folder, adapter_id):
            info = os.stat(folder / name)
            marks.append([name, info.st_size, info.st_ino, info.st_mtime_ns, info.st_ctime_ns])
        return hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:32]

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        folder = self._folder(adapter_id)
        return {name: os.stat(folder / name).st_size for name in self._names(folder, adapter_id)}

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        with open_regular(self._folder(adapter_id) / name) as file:
            done = 0
            while done < len(into) and (
                count := os.preadv(file.fileno(), [into[done:]], offset + done)
            ):
                done += count
        if self.revision(adapter_id) != revision:
            raise LoadFailed("the adapter was rewritten while it was read", adapter_id=adapter_id)
        return done

    def ids(self) -> Iterable[str]:
        for folder, _, names in os.walk(self._root):
            if CONFIG in names and folder != str(self._root):
                yield Path(folder).relative_to(self._root).as_posix()

    def _folder(self, adapter_id: str) -> Path:
        """The adapter's folder; an id never leads out of the root."""
        parts = adapter_id.split("/")
        if "\0" in adapter_id or any(part in ("", ".", "..") for part in parts):
            raise AdapterNotFound("not an adapter's name", adapter_id=adapter_id)
        folder = self._root.joinpath(*parts)
        try:
            is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
        except ValueError:  # what no file can be called: a lone surrogate
            is_folder = False
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                raise
            is_folder = False
        if not is_folder:
            self._check_root()
        if not is_folder or not folder.resolve().is_relative_to(self._root):
            raise AdapterNotFound(f"no such folder in {self._root}", adapter_id=adapter_id)
        return folder

    def _names(self, folder: Path, adapter_id: str) -> list[str]:
        if not (folder / CONFIG).is_file():
            with os.scandir(folder) as entries:
                found = [each.name for each in entries if not each.is_dir(follow_symlinks=False)]
            if not found:  # what is below has other ids, which are nobody's business here
                raise AdapterNotFound(f"no {CONFIG} in {folder}", adapter_id=adapter_id)
            what, where = f"no {CONFIG}", str(folder)
            raise AdapterInvalid(what, where=where, found=found, adapter_id=adapter_id)
        weights = find_weights(lambda name: (folder / name).is_file(), str(folder))
        return [CONFIG, weights] if weights else [CONFIG]


def _copy(name: str, tensor: object) -> Tensor:
    """In CPU memory of its own, row-major, its bytes its values."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: give a torch tensor")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(f"{name} has no dense values: give a strided tensor")
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _as_list(value: object) -> list[object]:
    if isinstance(value, (set, frozenset)):  # PEFT's own target_modules
        return sorted(value, key=str)
    raise TypeError(f"the config has {value!r:.80}: give what JSON can say")


class TensorSource:
    """Adapters that the caller has put here, in memory, in PEFT's format. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._adapters: dict[str, tuple[str, dict[str, bytes]]] = {}

    def put(
        self, adapter_id: str, tensors: Mapping[str, Tensor], config: Mapping[str, object]
    ) -> None:
        """Put an adapter here, in the place of an older one of that id.

        Args:
            tensors: by PEFT's names, as in ``adapter_model.safetensors``. They are copied.
            config: as in ``adapter_config.json``, or what PEFT's ``LoraConfig.to_dict`` gives.

        Raises:
            TypeError: a tensor that has no dense values, a config that JSON can't say, or an id
                that is no string.
        """
        check_own_id(adapter_id)
        for name, value in (("tensors", tensors), ("config", config)):
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} is a {type(value).__name__}: give a dict")
        copies = {name: _copy(name, tensor) for name, tensor in tensors.items()}
        files = {
            CONFIG: json.dumps(dict(config), default=_as_list).encode(),
            WEIGHTS: safetensors.torch.save(copies, {"format": "pt"}),
        }
        revision = hashlib.sha256(files[CONFIG] + files[WEIGHTS]).hexdigest()
        with self._lock:
            self._adapters[adapter_id] = (revision, files)

    def remove(self, adapter_id: str) -> None:
        """Forget it, if it is here."""
        check_own_id(adapter_id)
        with self._lock:
            self._adapters.pop(adapter_id, None)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._adapters

    def revision(self, adapter_id: str) -> str:
        return self._adapter(adapter_id)[0]

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        return {name: len(data) for name, data in self._adapter(adapter_id)[1].items()}

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        now, files = self._adapter(adapter_id)
        if now != revision:
            raise LoadFailed("the adapter was put again while it was read", adapter_id=adapter_id)
        data = memoryview(files[name])[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def ids(self) -> Iterable[str]:
        return list(self._adapters)

    def _adapter(self, adapter_id: str) -> tuple[str, dict[str, bytes]]:
        with self._lock:
            found = self._adapters.get(adapter_id)
        if found is None:
            raise AdapterNotFound("nobody has put it here", adapter_id=adapter_id)
        return found
