"""Which adapter each token of a step belongs to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adaptercache.caps import RANK_CLASSES
from adaptercache.kernels.integers import integer
from adaptercache.kernels.stack import LoraStack
from adaptercache.kernels.work import WorkShape

__all__ = ["BASE_SLOT", "RANK_CLASSES", "LoraBatch", "rank_class_of"]

BASE_SLOT = -1
"""The slot of tokens that run on the base model alone."""


def rank_class_of(rank: int) -> int:
    """The rank class of a batch whose largest rank is ``rank``: 16, 64, 128, 256 or 512."""
    for rank_class in RANK_CLASSES:
        if rank <= rank_class:
            return rank_class
    raise ValueError(f"rank {rank} is over 512")


class LoraBatch:
    """The tokens of one step, in segments of one slot each.

    Args:
        stack: where the slots lie.
        segments: ``(slot, number of tokens)`` in the order of the tokens; slot −1 is the base
            model.
        pad_to: the number of rows of x and y, where it is larger than the number of tokens; rows
            beyond the tokens are left alone.
        rank_class: an upper bound of the ranks in the batch (see `rank_class_of`); None: what
            ``ranks`` say, or where that is not known, or there is no adapter, the stack's
            ``max_rank``.
        ranks: of slots, an upper bound of their own ranks: mixed ranks are sooner done where this
            is told. None: what the stack knows of them.
        modules: names that cover all modules of the batch's adapters; calls of `add_lora` for
            others launch nothing, also where they are captured: a replay's adapters have none of
            them either. None: ``own_modules``.
        own_modules: likewise, but a call for others that is captured launches its kernels, since a
            replay may bring adapters that have them. None, or a batch without adapters: all.
        wait: called with a layer before that layer's adapters are read.

    Raises:
        ValueError: a slot out of range, more tokens than ``pad_to``, no such module or rank class,
            or a rank class that ``ranks``, or modules that ``own_modules`` exceed.
        TypeError: segments that are no pairs of integers, or a ``pad_to`` that is none.

    Not thread-safe: a step is launched by one thread.
    """

    def __init__(
        self,
        stack: LoraStack,
        segments: Sequence[tuple[int, int]],
        *,
        pad_to: int | None = None,
        rank_class: int | None = None,
        ranks: Mapping[int, int] | None = None,
        modules: Collection[str] | None = None,
        own_modules: Collection[str] | None = None,
        wait: Callable[[int], None] | None = None,
    ) -> None:
        if not isinstance(stack, LoraStack):
            raise TypeError(f"stack is of type {type(stack).__name__}: give a LoraStack")
        self.segments, slots, counts = _columns(segments)
        self.num_tokens = sum(counts)
        if slots and not (min(slots) >= BASE_SLOT and max(slots) < stack.num_slots):
            wrong = min(slots) if min(slots) < BASE_SLOT else max(slots)
            raise ValueError(f"slot {wrong}: there are {BASE_SLOT} to {stack.num_slots - 1}")
        if counts and min(counts) < 0:
            raise ValueError(f"{min(counts)} tokens of slot {slots[counts.index(min(counts))]}")
        self.num_rows = self.num_tokens
        if pad_to is not None:
            self.num_rows = integer(pad_to, f"pad_to is {pad_to!r:.80}")
        if self.num_tokens > self.num_rows:
            raise ValueError(f"{self.num_tokens} tokens, but pad_to is {pad_to}")
        self.stack = stack
        used = set(slots) - {BASE_SLOT} if ranks is None or rank_class is None else ()
        if ranks is None:
            ranks = {slot: stack.known_ranks[slot] for slot in used if slot in stack.known_ranks}
        largest = max(ranks.values(), default=0)
        if rank_class is None:  # of a batch of the base alone any: it may be captured for others
            is_known = used and all(slot in ranks for slot in used)
            rank_class = rank_class_of(largest if is_known else stack.layout.max_rank)
        if type(rank_class) is not int or rank_class not in RANK_CLASSES or rank_class < largest:
            with_ranks = f", with ranks of up to {largest}" if largest else ""
            raise ValueError(
                f"rank_class is {rank_class!r:.80}{with_ranks}: one of "
                f"{', '.join(map(str, RANK_CLASSES))}"
            )
        self.rank_class = rank_class
        self._ranks = ranks
        self._fixes_modules = modules is not None
        if max(slots, default=BASE_SLOT) == BASE_SLOT:
            own_modules = None
        self.modules = _modules(modules, own_modules, stack.layout.modules)
        """Outside of which no adapter of the batch has anything."""
        self._wait = wait
        self.shape = WorkShape(self.num_rows, stack.num_slots)
        self.num_groups = 0
        """Of the work that was laid out last."""
        self.has_launched = False
        """Whether a kernel was launched since the work was laid out (see `launch`)."""
        self.has_ended = False
        """Set when its step has ended: its slots may be another adapter's now."""
        self.adapters: list[Any] | None = None
        """What `reference` read of them in the tables."""
        self._name = object()  # not itself: the stack would keep it, and it the stack
        if stack.device.type == "cuda":
            self.work()  # for a replay of a graph, which calls nothing else

    def __enter__(self) -> LoraBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.has_ended = True

    @cached_property
    def max_rank(self) -> int:
        """Of its own adapters, as far as it was told; of the base alone the rank class. A graph may
        be replayed with higher ones, up to the rank class."""
        its = (self._ranks.get(slot, self.rank_class) for slot, _ in self.segments if slot >= 0)
        return max(its, default=self.rank_class)

    @property
    def token_slots(self) -> Tensor:
        """``int32 [num_rows]`` in CPU memory: each row's slot; −1 is base or padding."""
        slots = [slot for slot, tokens in self.segments for _ in range(tokens)]
        slots += [BASE_SLOT] * (self.num_rows - self.num_tokens)
        return torch.tensor(slots, dtype=torch.int32)

    def work(self) -> Tensor:
        """The kernels' work, on the GPU (see `work`).

        Batches of as many rows share the buffer, so that a CUDA graph finds the next batch's work
        in it; if another batch's is in it, this writes ours again, behind the launches so far.

        Raises:
            RuntimeError: it would have to be written while a CUDA graph is captured: each replay
                would then run the captured batch again.
        """
        buffer = self.stack.work(self.shape)
        capturing = buffer.tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing:
            self.stack.keep_work(self.shape)
        if buffer.owner is not self._name:
            if capturing:
                raise RuntimeError(
                    "a LoraBatch is made before a CUDA graph is captured, and the batch that was "
                    f"made last for {self.num_rows} rows is the one to capture"
                )
            numbers = self.shape.lay_out(self.segments, self.rank_class, self._ranks)
            self.num_groups = numbers[0]
            buffer.write(numbers, self._name)
            self.has_launched = False
        return buffer.tensor

    def passes_over(self, modules: Sequence[str]) -> bool:
        """Whether a call of `add_lora` for these modules has nothing to launch."""
        if not self.modules.isdisjoint(modules):
            return False
        on_gpu = self.stack.device.type == "cuda"
        return self._fixes_modules or not (on_gpu and torch.cuda.is_current_stream_capturing())

    def wait(self, layer: int) -> None:
        """Make the compute stream wait until this layer's adapters are in place."""
        if self._wait is not None:
            self._wait(layer)
            self.has_launched = False  # the next kernel reads what came behind all before it


def _modules(
    modules: Collection[str] | None, own: Collection[str] | None, known: Sequence[str]
) -> frozenset[str]:
    """Those that are fixed, or else the adapters' own."""
    its = _names(own, known)
    if modules is None:
        return its
    fixed = _names(modules, known)
    if own is not None and not its <= fixed:
        beyond, to = (", ".join(sorted(names)) for names in (its - fixed, fixed))
        raise ValueError(f"an adapter with {beyond} is in the batch: modules are {to or 'none'}")
    return fixed


def _names(modules: Collection[str] | None, known: Sequence[str]) -> frozenset[str]:
    if isinstance(modules, str):
        raise TypeError(f"modules is one string: give ({modules!r},)")
    names = frozenset(known if modules is None else modules)
    if not names <= frozenset(known):
        unknown = ", ".join(sorted(map(repr, names.difference(known))))
        raise ValueError(f"no module {unknown}: there are {', '.join(known)}")
    return names


def _columns(
    segments: Sequence[tuple[int, int]],
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], tuple[int, ...]]:
    """The segments, their slots, and their tokens, as ints."""
    try:
        pairs = tuple(segments)
        slots, counts = zip(*pairs, strict=True) if pairs else ((), ())
    except (TypeError, ValueError):
        raise TypeError(f"segments is {segments!r:.80}: give (slot, tokens) pairs") from None
    if {*map(type, slots), *map(type, counts)} <= {int}:
        return pairs, slots, counts
    return _columns(
        [
            (
                integer(slot, f"slot {slot!r:.80} in segments"),
                integer(tokens, f"{tokens!r:.80} tokens of slot {slot!r:.80} in segments"),
            )
            for slot, tokens in pairs
        ]
    )
