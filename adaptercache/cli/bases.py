"""The base model that a command is about: a config.json, or a table of modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from adaptercache.base_model import BaseModel
from adaptercache.errors import AdapterInvalid
from adaptercache.regular_file import open_regular

__all__ = ["base_beside", "read_base"]

_CONFIG = "config.json"
_LARGEST_FILE = 64 << 20


def base_beside(adapter: Path) -> Path | None:
    """The base's config.json in an adapter's own directory, where some trainers leave it."""
    path = adapter / _CONFIG
    try:
        return path if path.is_file() else None
    except OSError:  # a name that no file system holds: whoever reads the adapter says so
        return None


def read_base(path: Path) -> BaseModel:
    """From a Hugging Face config.json (or its directory), or a JSON table as of
    `BaseModel.from_table`.

    Raises:
        AdapterInvalid: it can't be read, or is neither.
        AdapterUnsupported: a model that is not built in, and transformers doesn't know.
    """
    if path.is_dir():
        return BaseModel.from_config(path)
    try:
        with open_regular(path) as opened:
            content = json.loads(opened.read(_LARGEST_FILE))
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterInvalid(
            "the base model's config can't be read",
            where=str(path),
            found=error,
            expected="a config.json, or a table of modules",
        ) from error
    is_table = content and all(isinstance(entry, Mapping) for entry in content.values())
    return BaseModel.from_table(content) if is_table else BaseModel.from_config(content)
