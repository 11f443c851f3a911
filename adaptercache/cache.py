"""`AdapterCache`: the façade. It decides nothing, and no part knows it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from adaptercache.advice import Advice, advise
from adaptercache.assembly import Budgets, assemble
from adaptercache.caps import Caps
from adaptercache.checkpoint import ReadOptions
from adaptercache.given import caps_of
from adaptercache.identity import AdapterKey, Digest, check_id
from adaptercache.kernels import LoraBatch, warmup
from adaptercache.kv import KVPages
from adaptercache.layout import KVLayout, LoraLayout
from adaptercache.lease import Admission, Lease
from adaptercache.request import Request
from adaptercache.sleep import fall_asleep, wake_up
from adaptercache.snapshot import resident_ids, snapshot
from adaptercache.stats import Stats, Tier
from adaptercache.steps import open_step
from adaptercache.tiers.remote import Source

__all__ = ["AdapterCache"]


class AdapterCache:
    """LoRA adapters in tiers: GPU, pinned CPU memory, local disk, and a source.

    Thread-safe. Nothing here waits for I/O or the GPU but `close`, `drop_gpu`, `restore`,
    `warmup`, and what is asked of a lease or a future. Owns its threads, its memory, and a
    temporary disk folder; `close`, or a ``with`` block, gives them back.

    Args:
        layout: the sites of the base model that adapters may touch.
        source: a directory, ``s3://bucket/prefix`` or a `Source`; None: only `put`.
        gpu_bytes: of the arena; a float below 1 is a share of what the GPU has free now.
        gpu_slots: adapters on the GPU at most.
        host_bytes: of CPU memory for adapters, page-locked where ``device`` is a GPU.
        disk_dir: for the disk tier; it may serve many runs and processes. None: a temporary one.
        disk_bytes: its budget, which all processes keep together.
        revision_ttl_s: how old what is known of an adapter in use may be: then the source is asked,
            in the background, whether it has changed. None: only by `refresh`.
        policy: ``"lru"`` or ``"lfu"`` (aged), for GPU and CPU memory.
        kv: the KV cache that shares the arena; None: adapters alone.
        device: of the arena; ``"cpu"`` runs everything without a GPU.
        read_options: how adapters' files are read.
        host_block_bytes: the unit of allocation in CPU memory.
        allow_pageable: where the system page-locks no more CPU memory, use plain memory, from which
            copies are many times slower; else that is a CapacityError.
        on_evict: called with ``(tier, digest)`` after a copy was evicted.
        on_revision: called with ``(adapter id, old digest, new digest)`` after an id came to stand
            for other content. Hooks run on any thread, unlocked; their exceptions are logged.
        clock: seconds, monotonic.

    Raises:
        CapacityError: a budget that holds nothing, or that the machine doesn't have.
        NotADirectoryError, TypeError, ValueError: a source, a budget or a device that is none.
        ModuleNotFoundError, OSError: ``s3://`` without boto3; a disk that can't be read.
        AdapterUnsupported: a KV layout that adapters can't share an arena with.
    """

    def __init__(
        self,
        layout: LoraLayout,
        source: str | os.PathLike[str] | Source | None = None,
        *,
        gpu_bytes: int | float,
        host_bytes: int,
        gpu_slots: int = 128,
        disk_dir: str | os.PathLike[str] | None = None,
        disk_bytes: int = 64 << 30,
        revision_ttl_s: float | None = None,
        policy: str = "lru",
        kv: KVLayout | None = None,
        device: str | torch.device = "cuda",
        read_options: ReadOptions | None = None,
        host_block_bytes: int = 2 << 20,
        allow_pageable: bool = False,
        on_evict: Callable[[Tier, Digest], None] | None = None,
        on_revision: Callable[[str, Digest, Digest], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout, self._kv = layout, kv
        parts = assemble(
            layout,
            source,
            Budgets(gpu_bytes, gpu_slots, host_bytes, host_block_bytes, disk_bytes, allow_pageable),
            kv,
            policy=policy,
            disk_dir=disk_dir,
            revision_ttl_s=revision_ttl_s,
            device=torch.device(device),
            read_options=read_options or ReadOptions(),
            clock=clock,
        )
        parts.ledger.on_evict = on_evict
        parts.lifter.on_revision = on_revision
        self._parts = parts
        self._ledger, self._deciding = parts.ledger, parts.deciding
        self._gpu, self._leasing = parts.gpu, parts.leasing

    # -- leases and batches

    def acquire(self, adapter_id: str | None) -> Lease:
        """Ask for an adapter; None is the base model. Never blocks; see `Lease` for how to wait.

        Raises:
            CacheClosed, TypeError, RuntimeError: closed; no id; a fork or a rank that follows.
        """
        return self._leasing.acquire(adapter_id)

    def prefetch(self, adapter_ids: Iterable[str | None], to: Tier = Tier.GPU) -> None:
        """Say which adapters will be wanted soon, the soonest first. Holds nothing.

        A hint lapses after some seconds unless it is said again. Demand loads overtake it, and it
        evicts nothing that anybody waits for. ``to``: GPU, HOST or DISK.
        """
        if isinstance(adapter_ids, str):
            raise TypeError("adapter_ids is one string; give a list of ids")
        if to not in (Tier.GPU, Tier.HOST, Tier.DISK):
            raise ValueError(f"to={to!r}: Tier.GPU, Tier.HOST or Tier.DISK")
        hinted = [found for adapter_id in adapter_ids if (found := check_id(adapter_id))]
        with self._deciding:
            self._deciding.check_open()
            now = self._ledger.clock()
            for adapter_id in hinted:
                self._ledger.waiting.hint(adapter_id, to, now)

    def admit(
        self,
        waiting: Iterable[Request],
        *,
        running: Iterable[tuple[Request, Lease]] = (),
        max_adapters: int | None = None,
        caps: Caps | None = None,
    ) -> Admission:
        """Decide which waiting requests join the next batch, and start loads for the others.

        Args:
            waiting: in order of arrival: all of them; who is missing is taken to be gone.
            running: the batch as it is.
            max_adapters: cap on the distinct adapters of the batch; short for ``caps``.
            caps: more caps, and how to choose under them.

        Returns:
            See `Admission`. Every lease in it is ready and is the caller's to release.

        Raises:
            CacheClosed, TypeError, ValueError (two ids are one); RuntimeError as `lora_batch`.
        """
        return self._leasing.admit(waiting, running, caps_of(caps, max_adapters))

    @contextmanager
    def lora_batch(
        self,
        pairs: Iterable[tuple[Lease, int]],
        *,
        pad_to: int | None = None,
        rank_to: int | None = None,
        modules_to: Collection[str] | None = None,
    ) -> Iterator[LoraBatch]:
        """The batch of one step; the step's launches are made inside the ``with`` block.

        It holds every adapter that it lists, so leases may be released meanwhile.

        Args:
            pairs: ``(lease, number of tokens)`` in the order of the tokens.
            pad_to: rows of x and y, where padded.
            rank_to: fixes the rank class; None: the batch's own.
            modules_to: fixes `LoraBatch.modules`; None: the batch's own.

        Raises:
            RuntimeError: a lease that is not ready, was released, or is of another cache.
            TypeError, ValueError: no such pairs; more tokens, ranks or modules than was said.
            AdapterCacheError: the GPU's memory was given back (`drop_gpu`), or a pipelined
                adapter's copy has failed.
        """
        with open_step(self._leasing, self._gpu, pairs, pad_to, rank_to, modules_to) as batch:
            yield batch

    @property
    def pages(self) -> KVPages:
        """Pages for the KV manager, out of the arena that adapters share."""
        return self._parts.pages

    def kv_view(
        self, layer: int, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The paged KV tensor of a layer, ``[pages, 2, block_size, kv_heads, head_dim]``: block
        ``b`` is page ``b`` of `pages`. ``shape`` and ``dtype`` are of one block; others than the
        KV layout's must make up the same bytes.

        Raises:
            ValueError: the bytes don't match, there is no such layer, or no KV layout was given.
        """
        if self._kv is None:
            raise ValueError("no KV cache shares the arena: give AdapterCache a KVLayout")
        return self._gpu.kv_view(self._kv, layer, shape, dtype)

    # -- what adapters stand for

    def refresh(self, adapter_id: str) -> Future[AdapterKey]:
        """Look at the source again, in the background.

        If the adapter changed, leases from then on get the new content and running ones keep the
        old; if that fails, the old goes on serving. The future has the key, or the error.
        """
        with self._deciding:
            self._deciding.check_open()
            return self._parts.lifter.refresh(adapter_id)

    def put(
        self, adapter_id: str, tensors: Mapping[str, Tensor], config: Mapping[str, object]
    ) -> Future[AdapterKey]:
        """An adapter from memory, in PEFT's names, instead of what the source has under that id.

        The tensors are copied before this returns. It stays until it is put again or removed. The
        future is that of `refresh`.
        """
        self._parts.puts.put(adapter_id, tensors, config)
        return self.refresh(adapter_id)

    def remove(self, adapter_id: str) -> None:
        """Forget all local copies, those in use once they are released.

        The source may bring it back; what was `put` is gone.
        """
        with self._deciding:
            self._deciding.check_open()
            self._parts.puts.remove(adapter_id)
            self._parts.lifter.remove(adapter_id)

    def resident(
        self, tier: Tier, *, coming: bool = False, most: int | None = None
    ) -> frozenset[str]:
        """The ids of the adapters that are whole in a tier (GPU, HOST or DISK) now; on DISK, only
        those that were asked for since the start. ``coming``: those on their way there instead;
        ``most``: it looks at so many copies, the latest, however many there are."""
        with self._deciding.lock:
            return resident_ids(self._ledger, tier, coming=coming, most=most)

    def stats(self) -> Stats:
        """Counters and gauges; a frozen value."""
        with self._deciding.lock:
            return snapshot(self._ledger, self._parts.movers)

    def advice(self, instances: int = 1) -> tuple[Advice, ...]:
        """Adapters whose share of the last minutes' traffic would fill one of ``instances`` like
        this: candidates for `merge`. See `Advice`."""
        with self._deciding.lock:
            return advise(self._ledger.traffic, instances, self._ledger.clock())

    # -- the GPU's memory

    def warmup(self, groups: Sequence[Sequence[str]] | None = None, num_rows: int = 8192) -> None:
        """Compile all kernels for up to ``num_rows`` rows, before a step: see `kernels.warmup`."""
        warmup(self._gpu.stack, groups, num_rows)

    def drop_gpu(self) -> None:
        """Give the arena's memory back to the GPU, for another job on it, until `restore`. Waits
        for copies that are under way.

        Raises:
            AdapterCacheError: a lease is held, KV pages are allocated, or `restore` is under way.
        """
        fall_asleep(self._parts)

    def restore(self) -> None:
        """Bring arena and adapters back, byte for byte, at new addresses; waits for them. CUDA
        graphs that read the old addresses must be captured again. Raises AdapterCacheError while
        `drop_gpu` is under way."""
        wake_up(self._parts)

    # -- the end

    def close(self) -> None:
        """End running loads, fail whoever waits with CacheClosed, and free all. Idempotent; call
        it again where it was interrupted. Memory that a step reads lives as long as its batch.
        """
        self._parts.close()

    def __enter__(self) -> AdapterCache:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
