"""What `bench_serving.py` measures: a model, thousands of adapters that differ, and the example
engine with a meter in it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from adaptercache import AdapterNotFound, BaseModel, Tier
from adaptercache.kernels import LoraBatch
from adaptercache.testing import random_adapter

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import serve
from churn_workload import Arrival, Workload, draw
from serve_engine import Engine
from serve_job import Finished, Job, Sampling, Settings
from serve_runner import Runner
from serve_tiny import tiny_model

__all__ = [
    "Arrival",
    "Asked",
    "Engine",
    "Job",
    "Meter",
    "Sampling",
    "Settings",
    "Shape",
    "Step",
    "VariedSource",
    "Workload",
    "ask",
    "bring_up",
    "draw",
    "metered",
    "run",
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class VariedSource:
    """Any number of adapters of one shape whose contents all differ: one adapter's file, of which a
    few weights are the number's own. So thousands take no time to make."""

    def __init__(self, base: BaseModel, rank: int, count: int, dtype: torch.dtype) -> None:
        tensors, config = random_adapter(base, rank=rank, targets=ATTENTION, dtype=dtype)
        weights = save(tensors)
        self._files = {
            "adapter_config.json": json.dumps(config).encode(),
            "adapter_model.safetensors": weights,
        }
        self.bytes_each = sum(tensor.nbytes for tensor in tensors.values())
        self._begin = 8 + int.from_bytes(weights[:8], "little")  # where the weights begin
        self._ids = {f"adapter-{number:05d}": number for number in range(count)}

    def ids(self) -> Iterable[str]:
        return list(self._ids)

    def revision(self, adapter_id: str) -> str:
        if adapter_id not in self._ids:
            raise AdapterNotFound("no such adapter", adapter_id=adapter_id)
        return "1"

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        return {name: len(content) for name, content in self._files.items()}

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        content = self._files[name]
        piece = memoryview(content)[offset : offset + len(into)]
        into[: len(piece)] = piece
        if name.endswith(".safetensors"):
            # The first weights' lowest bytes: one bit each, so that they stay near what they were.
            for bit in range(16):
                at = self._begin + 8 * bit - offset
                if 0 <= at < len(piece):
                    into[at] = (into[at] & 0xFE) | (self._ids[adapter_id] >> bit & 1)
        return len(piece)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a run. Token counts are a prompt's and an answer's, at least and at most."""

    name: str
    device: torch.device
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    max_context: int
    max_step_tokens: int
    gpu_bytes: int
    host_bytes: int
    host_block_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Shape:
        """8B shapes on a GPU, S-LoRA's lengths; the tiny model elsewhere."""
        if device.type == "cuda":
            sizes = (64 << 30, 32 << 30, 2 << 20)
            return cls("8B", device, (8, 512), (8, 512), 1024, 1024, *sizes)
        return cls("tiny", device, (8, 64), (4, 32), 128, 128, 32 << 20, 256 << 20, 64 << 10)

    def model(self) -> Any:
        """With random weights."""
        if self.name == "tiny":
            return tiny_model()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
        )
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


class Step(NamedTuple):
    """``at_s``: when its computing began. ``is_decode``: no prompt was in it."""

    at_s: float
    rows: int
    adapters: int
    is_decode: bool


class Meter:
    """A runner that notes each step, in front of the engine's own."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.block_size = runner.block_size
        self.padded, self.close = runner.padded, runner.close
        self.steps: list[Step] = []

    def __call__(self, work: Sequence[tuple[Job, int]], lora: LoraBatch) -> list[int]:
        adapters = len({slot for slot, _ in lora.segments} - {-1})
        rows = sum(count for _, count in work)
        is_decode = all(job.num_pending == 1 for job, _ in work)
        self.steps.append(Step(time.perf_counter(), rows, adapters, is_decode))
        return self._runner(work, lora)

    def step_seconds(self, rows: int) -> list[float]:
        """Of the steps in which so many decoded, up to the next step's beginning."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [
            after.at_s - step.at_s
            for step, after in pairs
            if step.is_decode and after.is_decode and step.rows == after.rows == rows
        ]


@contextmanager
def metered(
    model: Any, source: VariedSource, shape: Shape, settings: Settings, **options: Any
) -> Iterator[tuple[Engine, Meter]]:
    """An engine that runs, with a meter in it."""
    options = {
        "gpu_bytes": shape.gpu_bytes,
        "host_bytes": shape.host_bytes,
        "host_block_bytes": shape.host_block_bytes,
        "max_rank": 16,
        "disk_bytes": 16 << 30,  # of thousands of 8B's adapters: CPU memory holds them all
    } | options
    with serve.build(model, source, settings, **options) as engine:
        meter = Meter(engine._runner)
        engine._runner = meter  # type: ignore[assignment]  # it is called alike
        yield engine, meter


@dataclass(slots=True, eq=False)
class Asked:
    """A request, and when what happened to it happened."""

    at_s: float
    first_s: float = 0.0
    done_s: float = 0.0
    tokens: int = 0
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Noting(SimpleQueue):  # type: ignore[type-arg]
    """The events of a job, noted as they come and not kept."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def put(self, item: int | Finished | Exception, *_: Any, **__: Any) -> None:
        asked, now = self._asked, time.perf_counter()
        if isinstance(item, int):
            asked.tokens += 1
            asked.first_s = asked.first_s or now
            return
        if isinstance(item, Exception):
            asked.error = item
        asked.done_s = now
        asked.done.set()


def ask(engine: Engine, adapter_id: str | None, prompt: list[int], max_tokens: int) -> Asked:
    """Submit a request."""
    asked = Asked(time.perf_counter())
    engine.submit(Job(adapter_id, prompt, max_tokens, Sampling(), Noting(asked)))
    return asked


def run(
    engine: Engine, arrivals: Sequence[Arrival], prompts: Sequence[list[int]], *, at_once: bool
) -> list[Asked]:
    """Ask for all of them, each at its time or all at once, and wait until the last has ended.

    Raises:
        Exception: what a request has failed of.
    """
    start, asked = time.perf_counter(), []
    for arrival, prompt in zip(arrivals, prompts, strict=True):
        if not at_once:
            time.sleep(max(0.0, start + arrival.at_s - time.perf_counter()))
        asked.append(ask(engine, arrival.adapter_id, prompt, arrival.output_tokens))
    for each in asked:
        each.done.wait()
        if each.error is not None:
            raise each.error
    return asked


def bring_up(engine: Engine, ids: Sequence[str], to: Tier, timeout_s: float = 600.0) -> None:
    """Load all of these.

    Raises:
        TimeoutError: they are not all there in time.
    """
    deadline = time.monotonic() + timeout_s
    while missing := set(ids) - engine.cache.resident(to):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(missing)} adapters of {len(ids)} are not in {to}")
        engine.cache.prefetch(sorted(missing)[:64], to=to)
        time.sleep(0.02)
