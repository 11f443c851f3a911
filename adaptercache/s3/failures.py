"""What a store answers when it doesn't give the bytes, and what follows from it.

not found, or forbidden            the adapter's affair: AdapterNotFound
replaced or deleted meanwhile      the load starts again, at the new revision: LoadFailed
busy, broken off, stalled          tried again after a while
refused (credentials, region, …)   ours to repair: an OSError that says so
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)
from urllib3.exceptions import HTTPError

__all__ = ["FORBIDDEN", "MISSING", "REPLACED", "Broken", "S3Failure", "code_of", "is_expired"]
__all__ += ["is_transient", "pauses", "remedy_for"]

Broken = (ClientError, BotoCoreError, HTTPError, OSError)
"""All that a request may raise."""

MISSING = frozenset({"404", "NoSuchKey"})
FORBIDDEN = frozenset({"403", "AccessDenied", "Forbidden"})
REPLACED = frozenset({"412", "PreconditionFailed", "416", "InvalidRange"})

_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
)
_BUSY = frozenset(
    {
        *("429", "500", "502", "503", "504", "408"),
        *(
            "SlowDown",
            "InternalError",
            "ServiceUnavailable",
            "RequestTimeout",
            "BandwidthLimitExceeded",
        ),
        *("Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"),
        *("OperationAborted", "RequestTimeTooSkewed", "Busy", "XMinioServerNotInitialized"),
    }
)
_BROKEN_OFF = (
    *(ConnectionError, HTTPClientError, IncompleteReadError, ResponseStreamingError),
    *(HTTPError, OSError),
)
_REMEDIES = {
    "NoSuchBucket": "there is no such bucket: check source and endpoint_url",
    "InvalidAccessKeyId": "the store doesn't know these credentials",
    "SignatureDoesNotMatch": "the secret key is wrong, or a proxy changes requests",
    "ExpiredToken": "the credentials have expired, and no newer ones were found",
    "InvalidToken": "the session token is wrong",
    "AllAccessDisabled": "the owner has closed the bucket",
}
_WRONG_REGION = frozenset(
    {
        *("301", "302", "307", "308", "PermanentRedirect", "TemporaryRedirect"),
        *("AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
    }
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class S3Failure(OSError):
    """The store can't be read: after retries, or because it refuses us. Its cause is the last."""


def code_of(error: BaseException) -> str:
    """The store's word for what went wrong, or the exception's name."""
    if not isinstance(error, ClientError):
        return type(error).__name__
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return str(error.response.get("Error", {}).get("Code") or status)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed in a moment."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or code_of(error) in _BUSY
    return isinstance(error, _BROKEN_OFF)


def is_expired(error: BaseException) -> bool:
    """Whether newer credentials would help."""
    return code_of(error) in _EXPIRED


def remedy_for(error: BaseException) -> str:
    """What whoever runs the cache can do about a refusal."""
    code = code_of(error)
    if code in _WRONG_REGION:
        return "the bucket is elsewhere: give its region, or another endpoint_url"
    return _REMEDIES.get(code, "")


def pauses(tries: int) -> Iterator[float]:
    """Seconds to wait between tries: full jitter, so that a crowd that failed at one moment doesn't
    come back at one moment."""
    longest = FIRST_PAUSE_S
    for _ in range(tries - 1):
        yield random.uniform(0, longest)
        longest = min(2 * longest, LONGEST_PAUSE_S)
