"""What passes between the HTTP server and the engine."""

from __future__ import annotations

import queue
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaptercache import Lease, Request

__all__ = ["Finished", "Job", "Overloaded", "Sampling", "Settings"]


NOBODYS = Request("")


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of an engine. A sequence is a prompt and what was generated behind it."""

    max_running: int = 64  # sequences in a step
    max_adapters: int = 8  # distinct ones in a step: decode reads the weights of each
    max_step_tokens: int = 512  # of a step; what decoding leaves of it goes to prompts
    max_context: int = 512  # tokens of a sequence
    max_waiting: int = 1024  # beyond it: Overloaded
    end_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_step_tokens:
            raise ValueError(
                f"max_running {self.max_running}: 1 to {self.max_step_tokens} (max_step_tokens), "
                "for each of them brings a token into a step"
            )
        if min(self.max_adapters, self.max_context, self.max_waiting) < 1:
            raise ValueError(f"{self}: limits are 1 and more")

    def check_length(self, prompt: int, max_tokens: int) -> None:
        """Raises ValueError where a sequence of so many tokens can never run."""
        if min(prompt, max_tokens) < 1 or prompt + max_tokens > self.max_context:
            raise ValueError(
                f"{prompt} tokens of prompt and max_tokens {max_tokens}: each at least "
                f"1, and together at most {self.max_context}"
            )


class Overloaded(Exception):
    """Too many requests wait; try again later."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a job that went well: ``"stop"`` or ``"length"``."""

    reason: str


@dataclass(slots=True, eq=False)
class Job:
    """One completion. The first four fields are the caller's, ``events`` is for both: each token
    as it comes, then `Finished`, or the exception that ended it. The rest is the engine's own.

    The sequence is ``tokens``, and behind them those that steps under way choose, of which nobody
    knows more yet than that they come (``unread``). The keys and values of the first ``computed``
    are in ``pages``, or will be once these steps are over; the others are pending, and the last of
    them brings the next token.
    """

    adapter_id: str | None
    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    events: queue.SimpleQueue[int | Finished | Exception] = field(default_factory=queue.SimpleQueue)
    aborted: bool = False
    name: str = ""
    request: Request = NOBODYS
    prompt_tokens: int = 0
    cached: int = 0  # tokens of the prompt that the prefix cache had
    lease: Lease | None = None
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    published: int = 0  # blocks, from the first on, that others may have
    computed: int = 0
    unread: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def length(self) -> int:
        return len(self.tokens) + self.unread

    @property
    def num_pending(self) -> int:
        return self.length - self.computed

    @property
    def is_complete(self) -> bool:
        """Whether its last token is chosen, or will be by a step under way."""
        return self.length == self.prompt_tokens + self.max_tokens


class Sampling:
    """How the next token is chosen: greedily at temperature 0, else by numbers of its own, so that
    a seed gives the same tokens whatever else is in the batch."""

    def __init__(self, temperature: float = 0.0, seed: int | None = None) -> None:
        self.temperature = temperature
        self._random = random.Random(seed)

    def draw(self) -> float:
        """0 to 1, for one token: it takes no logits, so that these need not come to the host."""
        return self._random.random()

    @staticmethod
    def choose(logits: Tensor, temperatures: Tensor, draws: Tensor) -> Tensor:
        """The tokens ``int64 [n]`` of ``logits [n, vocab]``, where they are: of all probability,
        laid out from 0 to 1, each draw hits one's. ``temperatures`` and ``draws`` are ``float64
        [n]``: so near 0 a temperature is greedy."""
        scores = logits - logits.amax(dim=1, keepdim=True)
        ends = torch.softmax(scores / temperatures[:, None], dim=1).cumsum(dim=1)
        found = torch.searchsorted(ends, draws[:, None] * ends[:, -1:], right=True)
        return found[:, 0].clamp(max=logits.shape[1] - 1)
