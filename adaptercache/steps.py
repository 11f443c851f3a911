"""One step: its adapters are held, its batch is open, and its end is marked on the GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from adaptercache.kernels import LoraBatch, rank_class_of
from adaptercache.lease import Lease
from adaptercache.leasing import Leasing
from adaptercache.tiers.gpu import GpuTier

__all__ = ["open_step"]


@contextmanager
def open_step(
    leasing: Leasing,
    gpu: GpuTier,
    pairs: Iterable[tuple[Lease, int]],
    pad_to: int | None,
    rank_to: int | None,
    modules_to: Collection[str] | None,
) -> Iterator[LoraBatch]:
    """See `AdapterCache.lora_batch`."""
    with leasing.hold(pairs) as held:
        rank = max(held.ranks.values(), default=0)
        if not isinstance(rank_to, (int, type(None))):
            raise TypeError(f"rank_to is {rank_to!r:.80}: give an int, or None")
        if rank_to is not None and rank_to < 1:
            raise ValueError(f"{rank_to=}: a rank is 1 or more")
        if rank_to is not None and rank > rank_to:
            raise ValueError(f"an adapter of rank {rank} is in the batch: over {rank_to=}")
        to = rank_class_of(rank_to or rank)
        with gpu.streams.step() as held.step:
            arrivals = gpu.arrivals(held.coming)
            wait = arrivals.wait if arrivals is not None else None
            with LoraBatch(
                gpu.stack,
                held.segments,
                pad_to=pad_to,
                rank_class=to,
                ranks=held.ranks,
                modules=modules_to,
                own_modules=held.modules,
                wait=wait,
            ) as batch:
                try:
                    yield batch
                finally:
                    if arrivals is not None:
                        arrivals.end()
                if arrivals is not None and not arrivals.was_awaited:
                    raise RuntimeError(
                        "a pipelined adapter was still coming, and the step never waited for it: "
                        "its output is wrong. Call lora.wait(layer) before each captured piece, or "
                        "don't ask for pipelined requests"
                    )
