"""A request, as far as the cache has to know it."""

from __future__ import annotations

from dataclasses import dataclass

from adaptercache.identity import check_id

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request that waits, or runs.

    Args:
        request_id: yours; unique among the requests of one `admit`, running ones included.
        adapter_id: its adapter; None is the base model.
        num_tokens: that it brings into a step; with speculative decoding, its draft too.
        kv_pages: KV pages that it will take when it is admitted (0 where KV doesn't share the
            arena). Admission holds it back until they can be had; take them before the next
            call, for a load that ends meanwhile may need the room.
        pipelined: admit it while its adapter is still being copied to the GPU. The step then
            waits layer by layer: `add_lora` does, outside of CUDA graphs; between the pieces of a
            piecewise captured model call ``lora.wait(layer)``.
    """

    request_id: str
    adapter_id: str | None = None
    num_tokens: int = 1
    kv_pages: int = 0
    pipelined: bool = False

    def __post_init__(self) -> None:
        check_id(self.adapter_id)
        for value in (self.num_tokens, self.kv_pages):
            if not hasattr(value, "__index__"):
                raise TypeError(f"num_tokens and kv_pages are ints, not {value!r:.80}")
        if self.num_tokens < 0 or self.kv_pages < 0:
            raise ValueError(f"{self}: num_tokens and kv_pages are not negative")
