"""REMOTE in an object store that speaks S3: ``s3://bucket/prefix``. Needs the extra ``s3``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaptercache.s3.options import S3Options

if TYPE_CHECKING:
    from adaptercache.s3.source import S3Source

__all__ = ["S3Options", "S3Source"]


def __getattr__(name: str) -> Any:
    if name == "S3Source":  # it brings boto3 in
        from adaptercache.s3.source import S3Source

        return S3Source
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
