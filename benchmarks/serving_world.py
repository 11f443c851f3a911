"""What `bench_serving.py` and `bench_attach.py` measure: a model, adapters that differ, and the
example engine with a meter in it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from adaptercache import AdapterNotFound, BaseModel, Source, Tier
from adaptercache.kernels import LoraBatch
from adaptercache.testing import random_adapter

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import serve
import serve_model
from churn_workload import Arrival, Workload, draw
from serve_engine import Engine
from serve_job import Finished, Job, Sampling, Settings
from serve_runner import Launched
from serve_tiny import tiny_model

__all__ = [
    "ALL_LINEAR",
    "ATTENTION",
    "GROUPS",
    "Arrival",
    "Engine",
    "Finished",
    "Job",
    "Kind",
    "Meter",
    "Sampling",
    "Settings",
    "Shape",
    "Step",
    "VariedSource",
    "Workload",
    "bring_up",
    "draw",
    "metered",
    "say",
    "serve_model",
]

DISK_BYTES = 16 << 30
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
GROUPS = serve.GROUPS

_began = time.perf_counter()


def say(text: str) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.perf_counter() - _began:6.1f} s] {text}", flush=True)


class Kind(NamedTuple):
    """Adapters of one shape, called ``name-00000`` and so on."""

    name: str
    rank: int
    targets: tuple[str, ...]
    size: int

    @property
    def ids(self) -> list[str]:
        return [f"{self.name}-{number:05d}" for number in range(self.size)]


class VariedSource:
    """Any number of adapters whose contents all differ: of each kind one adapter's file, of which a
    few weights are the number's own. So thousands take no time to make."""

    def __init__(self, base: BaseModel, kinds: Sequence[Kind], dtype: torch.dtype) -> None:
        self._files: dict[str, dict[str, bytes]] = {}
        self.bytes_each: dict[str, int] = {}
        for kind in kinds:
            tensors, config = random_adapter(
                base, rank=kind.rank, targets=kind.targets, dtype=dtype
            )
            self._files[kind.name] = {
                "adapter_config.json": json.dumps(config).encode(),
                "adapter_model.safetensors": save(tensors),
            }
            self.bytes_each[kind.name] = sum(tensor.nbytes for tensor in tensors.values())
        self._ids = {
            adapter_id: (kind.name, number)
            for kind in kinds
            for number, adapter_id in enumerate(kind.ids)
        }

    def ids(self) -> Iterable[str]:
        return list(self._ids)

    def revision(self, adapter_id: str) -> str:
        if adapter_id not in self._ids:
            raise AdapterNotFound("no such adapter", adapter_id=adapter_id)
        return "1"

    def files(self, adapter_id: str, revision: str) -> Mapping[str, int]:
        kind, _ = self._ids[adapter_id]
        return {name: len(content) for name, content in self._files[kind].items()}

    def read(self, adapter_id: str, revision: str, name: str, offset: int, into: memoryview) -> int:
        kind, number = self._ids[adapter_id]
        content = self._files[kind][name]
        piece = memoryview(content)[offset : offset + len(into)]
        into[: len(piece)] = piece
        if name.endswith(".safetensors"):
            # The first weights' lowest bytes: one bit each, so that they stay near what they were.
            begin = 8 + int.from_bytes(content[:8], "little")  # where the weights begin
            for bit in range(16):
                at = begin + 8 * bit - offset
                if 0 <= at < len(piece):
                    into[at] = (into[at] & 0xFE) | (number >> bit & 1)
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
            sizes = (64 << 30, 34 << 30, 2 << 20)
            # At 256 rows an H200's products take about as long as reading the weights.
            return cls("8B", device, (8, 512), (8, 512), 1024, 256, *sizes)
        return cls("tiny", device, (8, 64), (4, 32), 128, 128, 32 << 20, 256 << 20, 64 << 10)

    def model(self) -> Any:
        """With random weights."""
        if self.name == "tiny":
            return tiny_model().to(self.device)
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
    """``at_s``: when its launch began; ``launch_s``: how long it took, on a CPU computing and all;
    ``began`` and ``ended``: when a GPU came to the first and past the last of it. ``jobs``:
    requests in it, of which ``decoding`` had no prompt left. ``kv_tokens``: whose keys and values
    were read. ``new_tokens``: that came out. ``waiting``: requests that were not in."""

    at_s: float
    launch_s: float
    began: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    jobs: int
    decoding: int
    rows: int
    adapters: int
    kv_tokens: int
    new_tokens: int
    waiting: int

    def idle_s(self, after: Step) -> float:
        """Seconds between this step and the next in which the device had nothing to do. The host
        runs ahead of a GPU, and what it does meanwhile costs nothing; on a CPU all of it does."""
        if self.ended is None or after.began is None:
            return after.at_s - self.at_s - self.launch_s
        after.began.synchronize()
        return float(self.ended.elapsed_time(after.began)) / 1e3

    def lasted_s(self, after: Step) -> float:
        """Seconds from its begin to that of the next, on a GPU as the GPU came to them."""
        if self.began is None or after.began is None:
            return after.at_s - self.at_s
        after.began.synchronize()
        return float(self.began.elapsed_time(after.began)) / 1e3


class Meter:
    """A runner that notes each step, in front of the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._runner = engine, engine._runner
        self.block_size = self._runner.block_size
        self.padded, self.close = self._runner.padded, self._runner.close
        self.check = self._runner.check
        self._on_gpu = engine.cache.kv_view(0).is_cuda
        self.steps: list[Step] = []

    def __call__(self, work: Sequence[tuple[Job, int]], lora: LoraBatch) -> Launched:
        at, began = time.perf_counter(), self._mark()
        launched = self._runner(work, lora)
        took, ended = time.perf_counter() - at, self._mark()
        self.steps.append(
            Step(
                at,
                took,
                began,
                ended,
                len(work),
                sum(job.num_pending == 1 for job, _ in work),
                sum(count for _, count in work),
                len({slot for slot, _ in lora.segments} - {-1}),
                sum(job.computed + count for job, count in work),
                sum(job.num_pending == count for job, count in work),
                self._engine.num_waiting,
            )
        )
        return launched

    def _mark(self) -> torch.cuda.Event | None:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def decode_steps(self, rows: int) -> list[tuple[float, float]]:
        """Seconds of the steps in which so many decoded and nothing else was computed, from one
        launch to the next; and those of them in which the device had nothing to do."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [
            (after.at_s - step.at_s, step.idle_s(after))
            for step, after in pairs
            if step.decoding == step.rows == after.decoding == after.rows == rows
        ]

    def full_steps(self) -> list[tuple[Step, Step]]:
        """The steps while requests waited, but for the first few, each with the one after it. So
        neither the start nor the last requests' end, when batches are small, is in them."""
        last = max((n for n, step in enumerate(self.steps) if step.waiting), default=0)
        last = last or len(self.steps) - 1  # so few requests that none waited
        first = min(8, last // 4)
        return list(zip(self.steps[first:last], self.steps[first + 1 : last + 1], strict=True))


@contextmanager
def metered(
    model: Any, source: Source, shape: Shape, settings: Settings, **options: Any
) -> Iterator[tuple[Engine, Meter]]:
    """An engine that runs, with a meter in it. Its disk is memory, where there is enough: what is
    measured begins in CPU memory, and here it comes there sooner."""
    memory = Path("/dev/shm")
    is_roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2 * DISK_BYTES
    options = {
        "gpu_bytes": shape.gpu_bytes,
        "host_bytes": shape.host_bytes,
        "host_block_bytes": shape.host_block_bytes,
        "max_rank": 16,
        "disk_bytes": DISK_BYTES,  # of thousands of 8B's adapters: CPU memory holds them all
    } | options
    with ExitStack() as stack:
        if is_roomy:
            options["disk_dir"] = stack.enter_context(TemporaryDirectory(dir=memory))
        engine = stack.enter_context(serve.build(model, source, settings, **options))
        meter = Meter(engine)
        engine._runner = meter  # type: ignore[assignment]  # it is called alike
        yield engine, meter


def bring_up(engine: Engine, ids: Sequence[str], to: Tier, timeout_s: float = 600.0) -> list[str]:
    """Load all of these, or as many as can be in the time; returns which are there."""
    deadline = time.monotonic() + timeout_s
    while True:
        there = engine.cache.resident(to)
        missing = [each for each in ids if each not in there]
        if not missing or time.monotonic() > deadline:
            return [each for each in ids if each in there]
        engine.cache.prefetch(missing[:64], to=to)
        time.sleep(0.01)
