"""The merge of a model's files: shard by shard, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from adaptercache.checkpoint import Checkpoint
from adaptercache.merge.places import Plan, plan_of
from adaptercache.merge.shards import FLOATS, Change, Shard, StoredTensor, open_shards, write_shard
from adaptercache.merge.weights import added, check_dtype, weight_of_head

__all__ = ["merge_files"]

_WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"))
_TIED = "tie_word_embeddings"


def merge_files(checkpoint: Checkpoint, source: Path, output: Path, untie: bool) -> Path:
    shards, index = open_shards(source)
    stored = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    plan = plan_of(checkpoint, {name: tensor.shape for name, tensor in stored.items()}, untie)
    for name in (*plan.names.values(), *plan.heads):
        check_dtype(name, stored[name].dtype, stored[name].dtype in FLOATS)
    changes: dict[str, Change] = {
        name: partial(added, checkpoint, path) for path, name in plan.names.items()
    }
    copies: dict[str, tuple[str, Change]] = {
        name: (head_name, partial(weight_of_head, checkpoint, head))
        for name, (head, head_name) in plan.heads.items()
    }
    with _new_directory(output) as folder:
        for shard in shards:
            write_shard(folder / shard.path.name, shard, changes, copies)
        if source.is_dir():
            _copy_the_rest(source, folder)
        if index is not None:
            _write_index(index, folder, shards, stored, plan)
        if plan.apart and (folder / "config.json").is_file():
            _say_untied(folder / "config.json")
    return output


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """A folder that becomes ``path`` once it is whole, and is gone where it doesn't."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists: give a new directory")
    folder = path.parent / f".{path.name}-{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        yield folder
        _flush(folder)
        folder.rename(path)
        _flush(path.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_the_rest(source: Path, folder: Path) -> None:
    """Configs, tokenizers, chat templates: whatever is neither weights nor an adapter's."""
    for file in sorted(source.iterdir()):
        is_other = file.suffix not in _WEIGHTS and not file.name.endswith(".index.json")
        if file.is_file() and is_other and file.name != "adapter_config.json":
            folder.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / file.name)
        elif file.is_dir() and not file.is_symlink() and not file.name.startswith("."):
            _copy_the_rest(file, folder / file.name)


def _write_index(
    index: Path,
    folder: Path,
    shards: Sequence[Shard],
    stored: Mapping[str, StoredTensor],
    plan: Plan,
) -> None:
    content = json.loads(index.read_bytes())
    places = {tensor.name: shard.path.name for shard in shards for tensor in shard.tensors}
    heads = {head_name: name for name, (_, head_name) in plan.heads.items()}
    places |= {head_name: places[name] for head_name, name in heads.items()}
    sizes = [*stored.values(), *(stored[name] for name in heads.values())]
    total = sum(tensor.end - tensor.begin for tensor in sizes)
    metadata = {**(content.get("metadata") or {}), "total_size": total}
    text = json.dumps({"metadata": metadata, "weight_map": places}, indent=2) + "\n"
    (folder / index.name).write_text(text)


def _say_untied(config: Path) -> None:
    content: dict[str, Any] = json.loads(config.read_bytes())
    if content.get(_TIED) is False:
        return
    for part in (content, content.get("text_config")):
        if isinstance(part, dict) and (part is content or _TIED in part):
            part[_TIED] = False
    config.write_text(json.dumps(content, indent=2) + "\n")
