"""The connection to a store: boto3's client, its credentials, and requests tried again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from adaptercache.s3.failures import (
    Broken,
    S3Failure,
    code_of,
    is_expired,
    is_transient,
    pauses,
    remedy_for,
)
from adaptercache.s3.options import S3Options

__all__ = ["Connection"]

T = TypeVar("T")


class Connection:
    """A client of a store that is made again when its credentials have expired. Thread-safe.

    boto3 itself renews what it can renew (roles, web identity, instance metadata) before it
    expires; what was only read from a file or the environment is read again.

    Args:
        session: a `boto3.Session` to use instead of one that ``options`` describe.
    """

    def __init__(self, options: S3Options, session: Any = None) -> None:
        self.options = options
        self._given = session
        self._lock = threading.Lock()
        self._client: Any = None

    def client(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def renew(self, expired: Any) -> None:
        """Make a new client, unless another thread has done so since."""
        with self._lock:
            if self._client is expired:
                self._client = None

    def close(self) -> None:
        """Close the connections. They are made again if they are needed."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> Any:
        options = self.options
        config = Config(
            region_name=options.region,
            signature_version=UNSIGNED if options.anonymous else None,
            s3={"addressing_style": options.addressing},
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.stall_timeout_s,
            max_pool_connections=options.connections,
            retries={"total_max_attempts": 1},  # we do that: for the body of an answer, too
            response_checksum_validation="when_required",  # we do that, for ranges
        )
        session = self._given or boto3.Session(profile_name=options.profile)
        verify = str(options.ca_bundle) if options.ca_bundle is not None else None
        return session.client("s3", endpoint_url=options.endpoint_url, config=config, verify=verify)

    def ask(self, what: str, request: Callable[[Any], T], *, expected: frozenset[str]) -> T:
        """The answer to one short request, tried again while the store is busy or breaks off.

        Args:
            what: for the error.
            expected: answers that the caller deals with: raised as they are.

        Raises:
            ClientError: an expected one.
            S3Failure: any other; or it failed as often as `S3Options.tries`.
        """
        waits = pauses(self.options.tries)
        while True:
            client = None
            try:
                client = self.client()
                return request(client)
            except Broken as error:
                if code_of(error) in expected:
                    raise
                self.survive(error, client, what, next(waits, None))

    def survive(self, error: Exception, client: Any, what: str, pause_s: float | None) -> None:
        """Wait before the next try, where there is one and it may help; else raise S3Failure."""
        if is_expired(error) and pause_s is not None:
            self.renew(client)
        elif pause_s is None or not is_transient(error) or isinstance(error, S3Failure):
            remedy = remedy_for(error)
            text = f"{what}: {code_of(error)}" + (f" ({remedy})" if remedy else "")
            if isinstance(error, BotoCoreError) and not is_transient(error):
                text = f"{what}: {error}"  # no credentials, no such profile
            raise S3Failure(text) from error
        time.sleep(pause_s)
