"""Which trainer wrote an adapter, and the way from its directory to one of PEFT's."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptercache.checkpoint.files import read_object
from adaptercache.convert.foreign import ForeignAdapter
from adaptercache.convert.mlx import read_mlx
from adaptercache.convert.peft import write_peft
from adaptercache.convert.torchtune import read_torchtune
from adaptercache.errors import AdapterInvalid, AdapterUnsupported, LoadFailed

__all__ = ["convert_to_peft"]


@dataclass(frozen=True, slots=True)
class _Format:
    """One trainer's layout.

    Args:
        name: what the caller is told.
        weights: the file that it is recognised by.
        read: takes the adapter's directory, and the content of the base's config where known.
    """

    name: str
    weights: str
    read: Callable[[Path, Mapping[str, Any] | None], ForeignAdapter]


_FORMATS = (
    _Format("mlx-lm", "adapters.safetensors", read_mlx),
    _Format("torchtune", "adapter_model.pt", read_torchtune),
)
_PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def convert_to_peft(
    source: Path,
    target: Path,
    *,
    base_model: str | None = None,
    base_config: Path | None = None,
) -> str:
    """Writes another trainer's adapter as a PEFT adapter directory.

    ΔW of every module stays what it was, element for element: matrices are renamed, transposed,
    cut, reordered and laid beside zeros, never computed with, and keep their dtypes. What can't be
    carried over like that is refused. The source is only read. The target appears whole, by a
    rename, or not at all. Blocks on the file system; safe to call from several threads.

    Args:
        source: the directory of the adapter, in the layout of MLX-LM (``adapters.safetensors``) or
            torchtune (``adapter_model.pt``; a PEFT file beside it is not looked at).
        target: the directory to write; it must not exist, its parent must.
        base_model: what the new config names as its base model; None: what the source's config
            names in PEFT's own field, else nothing.
        base_config: the base model's Hugging Face ``config.json``, or its directory; None: the one
            in ``source``, if any. Needed for the q and k projections of torchtune, and for
            MLX-LM's LoRA of embeddings.

    Returns:
        The layout that was recognised: ``"mlx-lm"`` or ``"torchtune"``.

    Raises:
        AdapterInvalid: a file is missing or broken, or doesn't fit the base.
        AdapterUnsupported: it isn't one of these layouts, has no equal in PEFT's, or can't be
            converted without the base's config.
        LoadFailed: the operating system can't read the source or write the target; ``__cause__``
            is a `FileExistsError` where there is something at the target.
    """
    source, target = Path(source), Path(target)
    with _as_load_failed(source, target):
        _refuse_existing(target)
        found = _recognise(source)
        adapter = found.read(source, _base_content(source, base_config))
        with _published(target) as folder:
            write_peft(folder, adapter, base_model or adapter.base_model)
    return found.name


def _recognise(source: Path) -> _Format:
    if not source.is_dir():
        raise AdapterInvalid("there is no such adapter directory", where=str(source))
    found = [layout for layout in _FORMATS if (source / layout.weights).is_file()]
    if len(found) > 1:
        raise AdapterUnsupported(
            "adapters of two trainers in one directory",
            where=f"{source}: {' and '.join(layout.weights for layout in found)}",
            remedy="leave one of them",
        )
    if found:
        return found[0]
    for name in _PEFT_WEIGHTS:
        if (source / name).is_file():
            raise AdapterUnsupported(
                "converting what has PEFT's layout already",
                where=str(source / name),
                remedy="use it as it is",
            )
    raise AdapterUnsupported(
        "an adapter of unknown layout",
        where=str(source),
        remedy="there should be one of "
        + ", ".join(f"{layout.weights} ({layout.name})" for layout in _FORMATS)
        + "; an intermediate checkpoint has to be given that name",
    )


def _base_content(source: Path, base_config: Path | None) -> Mapping[str, Any] | None:
    if base_config is None:
        beside = source / "config.json"
        return read_object(beside) if beside.is_file() else None
    path = Path(base_config)
    return read_object(path / "config.json" if path.is_dir() else path)


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, which becomes it once it is filled and on the disk."""
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        yield folder
        _flush(folder)
        _refuse_existing(target)  # a rename would take an empty directory's place
        os.rename(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _flush(target.parent)


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _as_load_failed(source: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LoadFailed(f"can't convert {source} to {target}") from error
