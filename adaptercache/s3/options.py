"""Which bucket, under which prefix, and how the store is spoken to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Location", "S3Options"]


class Location(NamedTuple):
    """What ``s3://bucket/prefix`` names; ``prefix`` is empty, or ends with a slash."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Location:
        """Slashes at the end of ``url`` mean nothing.

        Raises:
            ValueError: it isn't ``s3://bucket`` or ``s3://bucket/prefix``.
        """
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.rstrip("/")
        if scheme != "s3" or not bucket or any(c in bucket for c in " ?#@"):
            raise ValueError(f"{url!r}: give s3://bucket/prefix")
        return cls(bucket, f"{prefix}/" if prefix else "")


@dataclass(frozen=True, slots=True)
class S3Options:
    """How a store is spoken to; what is None is as boto3 finds it (environment, profile, metadata).

    Args:
        endpoint_url: of a store that isn't AWS.
        region: of the bucket.
        profile: of the shared config; it may name a role, a process or SSO.
        addressing: ``"path"`` for ``endpoint/bucket/key``, ``"virtual"`` for
            ``bucket.endpoint/key``, ``"auto"``: as boto3 decides.
        ca_bundle: a file of certificates to trust instead of the usual ones.
        requester_pays: pay for the requests to a bucket that asks for it.
        anonymous: send no credentials.
        tries: how often one request is made at most, while none brings 64 KiB.
        connect_timeout_s: seconds for a connection.
        stall_timeout_s: seconds without a byte, after which a request counts as failed.
        slowest_bytes_per_s: below it a transfer counts as stalled, though bytes drip.
        connections: open at once at most.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    ca_bundle: str | os.PathLike[str] | None = None
    requester_pays: bool = False
    anonymous: bool = False
    tries: int = 6
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 20.0
    slowest_bytes_per_s: int = 64 << 10
    connections: int = 32

    def __post_init__(self) -> None:
        if self.addressing not in ("auto", "path", "virtual"):
            raise ValueError(f"addressing {self.addressing!r}: auto, path or virtual")
        for name in ("tries", "connections", "slowest_bytes_per_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}: at least 1")
        for name in ("connect_timeout_s", "stall_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}: more than 0")
