"""What the plugin is told by environment variables: they reach every process that vLLM starts."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adaptercache.cli.sizes import parse_size

__all__ = ["PREFIX", "Settings"]

PREFIX = "ADAPTERCACHE_"
_NOT_OURS = re.compile(
    rf"{PREFIX}(TEST.*|(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?))"
)
"""What tests say to each other, and what Kubernetes tells every container of a service whose name
begins with ours."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`ADAPTERCACHE_<NAME>` by its name in small letters; docs/vllm.md has the table."""

    source: str
    disk_dir: str
    disk_bytes: int
    revision_ttl_s: float = 60.0
    wait_s: float = 30.0
    threads: int = 16

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings | None:
        """The settings; None where no source is named: then vLLM runs without us.

        Raises:
            ValueError: a variable is missing, unknown or makes no sense; it says which.
        """
        given = {
            name.removeprefix(PREFIX).lower(): value.strip()
            for name, value in environment.items()
            if name.startswith(PREFIX) and not _NOT_OURS.fullmatch(name)
        }
        if not given.get("source"):
            return None
        for name in given:
            if name not in _READ:
                known = ", ".join(PREFIX + known.upper() for known in _READ)
                raise ValueError(f"{PREFIX}{name.upper()} is none of {known}")
        for name in ("disk_dir", "disk_bytes"):
            if not given.get(name):
                raise ValueError(f"{PREFIX}SOURCE needs {PREFIX}{name.upper()} beside it")
        values: dict[str, Any] = {name: _value(name, text) for name, text in given.items()}
        return cls(**values)

    def check(self) -> None:
        """Whether adapters can come from these places, as far as looking tells; makes nothing.

        Raises:
            ValueError: they can't; it says which variable names what.
        """
        from adaptercache.s3.options import Location
        from adaptercache.tiers.remote import open_source

        try:
            # vLLM may fork after this: boto3 isn't brought in where it is there.
            if self.source.startswith("s3://") and find_spec("boto3") is not None:
                Location.parse(self.source)
            else:
                open_source(self.source)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            raise ValueError(f"{PREFIX}SOURCE: {error}") from error
        try:
            _check_disk(Path(self.disk_dir).absolute())
        except OSError as error:
            raise ValueError(f"{PREFIX}DISK_DIR: {error}") from error


def _check_disk(root: Path) -> None:
    """Whether it is a directory, or can be made. One that can only be read serves what is there."""
    there = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if there != root and not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{text!r} is no number of seconds")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1024:
        raise ValueError(f"{text!r} is no number from 1 to 1024")
    return int(text)


_READ: dict[str, Callable[[str], object]] = {
    "source": str,
    "disk_dir": str,
    "disk_bytes": parse_size,
    "revision_ttl_s": _seconds,
    "wait_s": _seconds,
    "threads": _count,
}


def _value(name: str, text: str) -> object:
    try:
        return _READ[name](text)
    except ValueError as error:
        raise ValueError(f"{PREFIX}{name.upper()}: {error}") from error
