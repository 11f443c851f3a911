"""The one handle: a lease says that an adapter is wanted, and holds it while it is used."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Protocol

from adaptercache.errors import AdapterCacheError
from adaptercache.identity import AdapterKey, Digest
from adaptercache.request import Request
from adaptercache.waiting import Grant

__all__ = ["Admission", "Lease"]


class Issuer(Protocol):
    """Who gives leases out and takes them back."""

    def take_back(self, grant: Grant) -> None:
        """A lease is released, from any thread."""

    def abandon(self, grant: Grant) -> None:
        """A lease was garbage-collected unreleased. Takes no lock: it may be held by whoever
        was interrupted by the collection."""


class Lease:
    """An adapter that is wanted, and once it is ready, held on the GPU until `release`.

    While it is held, the bytes that its slot names never change. Three ways to use it:

    - ``with cache.acquire(id) as lease:`` blocks until it is ready, and releases it at the end;
    - ``async with cache.acquire(id) as lease:`` awaits it;
    - ``lease.ready`` looks, without waiting.

    A pending lease reserves nothing; it is served first come, first served. Thread-safe.
    ``adapter_id`` None is the base model: ready at once, slot −1, nothing to hold.
    """

    __slots__ = ("__weakref__", "_future", "_grant", "_issuer", "adapter_id")

    def __init__(self, adapter_id: str | None, grant: Grant | None, issuer: Issuer | None) -> None:
        self.adapter_id = adapter_id
        self._grant = grant
        self._issuer = issuer
        self._future: Future[None] | None = None

    @classmethod
    def pending(cls, adapter_id: str, grant: Grant, issuer: Issuer) -> Lease:
        """One that is not ready: its grant calls back when it is settled."""
        lease = cls(adapter_id, grant, issuer)
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        lease._future = future
        grant.settled = lambda: future.set_result(None)  # must not refer to the lease
        return lease

    @property
    def ready(self) -> bool:
        """Whether it has succeeded or failed: entering, awaiting or `result` won't wait."""
        return self._grant is None or self._grant.key is not None or self._grant.error is not None

    @property
    def key(self) -> AdapterKey | None:
        """What it stands for: id and revision; None for the base model. Raises as `slot`."""
        grant = self.served()
        return grant.key if grant is not None else None

    @property
    def digest(self) -> Digest | None:
        """Of the content that is held: roots prefix-cache keys; None for the base model."""
        grant = self.served()
        return grant.digest if grant is not None else None

    @property
    def slot(self) -> int:
        """The adapter's row of the tables, −1 for the base model.

        Raises:
            RuntimeError: it is not ready, or was released.
            AdapterCacheError: it has failed.
        """
        grant = self.served()
        return grant.slot if grant is not None else -1

    def served(self) -> Grant | None:
        """For the cache only: None is the base model. Raises as `slot`."""
        grant = self._grant
        if grant is None:
            return None
        if grant.error is not None:
            raise grant.error.copy_for(grant.adapter_id)  # raised again it would only grow
        if grant.released:
            raise RuntimeError(f"the lease on {self.adapter_id!r} was released")
        if grant.key is None:
            raise RuntimeError(f"the lease on {self.adapter_id!r} is not ready")
        return grant

    def served_by(self, issuer: Issuer) -> Grant | None:
        """The same, for one cache: slots of another's leases are rows of other tables.

        Raises:
            RuntimeError: as `slot`, or another cache gave it.
        """
        if self._issuer is not issuer and self._issuer is not None:
            raise RuntimeError(f"the lease on {self.adapter_id!r} is of another cache")
        return self.served()

    def result(self, timeout_s: float | None = None) -> Lease:
        """Wait until it is ready.

        Raises:
            AdapterCacheError: what failed.
            TimeoutError: it took longer; the lease goes on waiting.
        """
        if not self.ready and self._future is not None:
            try:
                self._future.result(timeout_s)
            except FutureTimeoutError:  # another class than the built-in one in Python 3.10
                raise TimeoutError(f"{self!r} after {timeout_s} s") from None
        self.served()
        return self

    def release(self) -> None:
        """Give it back. Idempotent; legal in any state and from any thread; touches no CUDA."""
        if self._grant is not None and self._issuer is not None:
            self._issuer.take_back(self._grant)

    def __enter__(self) -> Lease:
        try:
            return self.result()
        except BaseException:
            self.release()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __await__(self) -> Generator[object, None, Lease]:
        if not self.ready and self._future is not None:
            import asyncio

            # Shielded: one task that gives up must not cancel what others wait for.
            yield from asyncio.shield(asyncio.wrap_future(self._future)).__await__()
        self.served()
        return self

    async def __aenter__(self) -> Lease:
        try:
            return await self
        except BaseException:
            self.release()
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        grant = self._grant
        if grant is None or grant.released or grant.error is not None:
            return  # it holds nothing
        if self._issuer is not None:
            self._issuer.abandon(grant)

    def __repr__(self) -> str:
        grant = self._grant
        if grant is None:
            return "<Lease base model>"
        if grant.released:
            state = "released"
        elif grant.error is not None:
            state = f"failed: {grant.error}"
        else:
            state = f"slot {grant.slot}" if grant.key is not None else "pending"
        return f"<Lease {self.adapter_id!r} {state}>"


class Admission:
    """What `AdapterCache.admit` answers.

    Attributes:
        admitted: ``(request, lease)``, in order; the leases are ready.
        deferred: the requests that go on waiting, in order: the next call's ``waiting``.
        reasons: why each of them waits, by request id: ``loading``, ``room``, ``kv_pages``, or the
            cap, such as ``max_adapters``.
        failed: ``(request, error)``: will never run; its own error.
        pages_wanted: how many idle KV pages freed would let cold adapters in: as many as the caps
            let join the batch, and one at least.
    """

    __slots__ = ("admitted", "deferred", "failed", "pages_wanted", "reasons")

    def __init__(
        self,
        admitted: list[tuple[Request, Lease]],
        deferred: list[Request],
        reasons: dict[str, str],
        failed: list[tuple[Request, AdapterCacheError]],
        pages_wanted: int,
    ) -> None:
        self.admitted = admitted
        self.deferred = deferred
        self.reasons = reasons
        self.failed = failed
        self.pages_wanted = pages_wanted

    def __repr__(self) -> str:
        counts = {name: len(getattr(self, name)) for name in ("admitted", "deferred", "failed")}
        return f"Admission({counts}, pages_wanted={self.pages_wanted})"
