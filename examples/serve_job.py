"""What passes between the HTTP server and the engine."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field

import torch

from adaptercache import Lease, Request

__all__ = ["Finished", "Job", "Overloaded", "Settings"]


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
        if prompt < 1 or prompt + max_tokens > self.max_context:
            raise ValueError(
                f"{prompt} tokens of prompt and max_tokens {max_tokens}: at least 1, "
                f"and together at most {self.max_context}"
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

    ``tokens[:computed]`` have their keys and values in ``pages``; the others are pending, and the
    last of them brings the next token.
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
    computed: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.computed


class Sampling:
    """How the next token is chosen: greedily at temperature 0, else by a generator of its own, so
    that a seed gives the same tokens whatever else is in the batch."""

    def __init__(self, temperature: float = 0.0, seed: int | None = None) -> None:
        self.temperature = temperature
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def choose(self, logits: torch.Tensor) -> int:
        """From ``logits [vocab]``."""
        weights = torch.softmax(logits.cpu() / self.temperature, dim=0)
        return int(torch.multinomial(weights, 1, generator=self._generator))
