"""KV blocks out of the arena that adapters share, and a prefix cache of those that are full.

A block is one page of `cache.pages`. A full block has a prefix key: a hash over the adapter's
content, all tokens before it and its own. Whoever begins with the same tokens on the same weights
uses the same block. The adapter is in the key by its digest, so a block is never shared between
adapters, nor between an adapter and what is published later under its name.

A block that nobody uses stays, idle, until its page is wanted: by a request, or by an adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adaptercache import AdapterCache, Digest, Tier, prefix_keys
from serve_job import Job

__all__ = ["Blocks", "check_room"]


@dataclass(slots=True)
class Block:
    users: int = 1
    key: bytes | None = None  # once it is full
    digest: Digest | None = None  # of the adapter that computed it; None: the base model


class Blocks:
    """The KV cache's blocks, by page id. Not thread-safe: the engine's thread has it to itself."""

    def __init__(self, cache: AdapterCache) -> None:
        self._size: int = cache.kv_view(0).shape[2]
        self._pages = cache.pages
        self._blocks: dict[int, Block] = {}
        self._by_key: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the first is the next to go

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def pages_of(self, job: Job) -> int:
        """How many its sequence takes."""
        return -(-job.length // self._size)

    def begin(self, job: Job) -> bool:
        """Give a job the blocks of its tokens: those that somebody has computed before, and new
        ones. False: not now."""
        assert job.lease is not None
        job.keys = prefix_keys(job.tokens, block_size=self._size, adapter=job.lease.digest)
        # At least one token is computed, for its logits.
        found = self._match(job.keys[: (len(job.tokens) - 1) // self._size])
        rest = self.allocate(self.pages_of(job) - len(found))
        if rest is None:
            self.release(found)
            return False
        job.pages = found + rest
        job.published = len(found)
        job.computed = len(found) * self._size
        if job.num_generated == 0:
            job.cached = max(job.cached, job.computed)
        return True

    def publish(self, job: Job) -> None:
        """Others may have its full blocks: those that are computed, as far as its tokens are known.
        A step under way may still be writing to them; whoever reads them is launched behind it. If
        an equal block is there already (two began alike in one step), this one stays private."""
        assert job.lease is not None
        digest, size = job.lease.digest, self._size
        full = min(job.computed, len(job.tokens)) // size
        for index in range(job.published, full):
            if index == len(job.keys):  # generated tokens: the chain of keys goes on
                tokens = job.tokens[index * size : (index + 1) * size]
                parent = job.keys[-1] if job.keys else None
                job.keys += prefix_keys(tokens, block_size=size, adapter=digest, parent=parent)
            page, key = job.pages[index], job.keys[index]
            if key not in self._by_key:
                self._by_key[key] = page
                self._blocks[page].key, self._blocks[page].digest = key, digest
        job.published = full

    def _match(self, keys: Sequence[bytes]) -> list[int]:
        """The longest run of blocks, from the first on, that somebody has computed before. They
        are the caller's, too, until `release`."""
        found: list[int] = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            self._blocks[page].users += 1
            self._idle.pop(page, None)
            found.append(page)
        return found

    def allocate(self, n: int) -> list[int] | None:
        """``n`` new blocks, or None: not now. Cold adapters go first, which `pages.allocate` sees
        to; then idle blocks, which only we know of."""
        pages = self._pages.allocate(n)
        if pages is None and self.give_back(n - self._pages.num_available):
            pages = self._pages.allocate(n)
        if pages is None:
            return None
        self._blocks.update((page, Block()) for page in pages)
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        """The caller's use of its blocks ends. Last block first, so that of a chain the end goes
        before the beginning, without which it could not be found."""
        private = []
        for page in reversed(pages):
            block = self._blocks[page]
            block.users -= 1
            if block.users == 0 and block.key is not None:
                self._idle[page] = None
            elif block.users == 0:
                private.append(page)
        self._free(private)

    def give_back(self, n: int) -> int:
        """Free up to ``n`` idle blocks, the coldest first; returns how many."""
        pages = [page for page, _ in zip(self._idle, range(n), strict=False)]
        self._free(pages)
        return len(pages)

    def forget(self, digest: Digest) -> None:
        """No adapter id stands for these weights any more: what they computed can't be hit again.
        Idle blocks go at once; those in use stay their users' own."""
        self._free([page for page in self._idle if self._blocks[page].digest == digest])
        for block in self._blocks.values():
            if block.digest == digest and block.key is not None:
                del self._by_key[block.key]
                block.key = None

    def _free(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        for page in pages:
            key = self._blocks.pop(page).key
            self._idle.pop(page, None)
            if key is not None:
                del self._by_key[key]
        if pages:
            self._pages.free(pages)


def check_room(cache: AdapterCache, max_adapters: int, max_context: int) -> None:
    """That a whole context fits beside ``max_adapters`` of the largest rank. So one request can
    always go on to its end, whatever others have to make way for it.

    Raises:
        ValueError: it doesn't.
    """
    stats, layout = cache.stats(), cache.layout
    num_pages = sum(stats.pages.values())
    page_bytes = stats.capacity_bytes[Tier.GPU] // num_pages
    each = -(-layout.max_elements * layout.itemsize // page_bytes)
    block_size = cache.kv_view(0).shape[2]
    needed = max_adapters * each + -(-max_context // block_size) + 1
    if needed > num_pages:
        raise ValueError(
            f"the arena has {num_pages} pages, and {needed} are needed: {max_adapters} adapters of "
            f"rank {layout.max_rank} take {each} each, beside a context of {max_context} tokens"
        )
