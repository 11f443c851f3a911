"""REMOTE in an object store that speaks S3: ``s3://bucket/prefix``. Needs the extra ``s3``."""

from adaptercache.s3.options import S3Options
from adaptercache.s3.source import S3Source

__all__ = ["S3Options", "S3Source"]
