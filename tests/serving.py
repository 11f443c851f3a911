"""What the tests of `examples/serve.py` share: the tiny model, made-up adapters, and the tokens
that PEFT gives for one request at a time."""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import serve
from adaptercache import BaseModel, DirectorySource, LoraLayout
from serve_job import Finished, Job, Sampling, Settings
from serve_model import kv_layout
from serve_tiny import END, ByteTokenizer, make_adapter, make_adapters, tiny_model

__all__ = ["World", "ask", "is_idle", "one_thread", "outcome", "random_prompt", "settle"]


class Peft:
    """The oracle: PEFT's own inference, without a batch, without our library."""

    def __init__(self, model: Any) -> None:
        self._base = model
        self._models: dict[bytes, Any] = {b"": model}  # by the adapter's content
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def tokens(self, folder: Path | None, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy tokens behind ``prompt``, without the end token."""
        content = b""
        if folder is not None:
            files = ("adapter_config.json", "adapter_model.safetensors")
            content = b"".join((folder / name).read_bytes() for name in files)
        if content not in self._models:
            from peft import PeftModel

            self._models[content] = PeftModel.from_pretrained(copy.deepcopy(self._base), folder)
        key = (content, tuple(prompt), count)
        if key not in self._known:
            self._known[key] = self._generate(self._models[content], prompt, count)
        return self._known[key]

    def _generate(self, model: Any, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                token = int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
                if token == END:
                    break
                tokens.append(token)
        return tokens[len(prompt) :]


@dataclass
class World:
    """A folder of made-up adapters for the tiny model, and engines over them."""

    root: Path
    count: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.model = tiny_model().to(self.device)
        self.base = BaseModel.from_model(self.model)
        self.ids = make_adapters(self.root, self.base, self.count)
        self.source = DirectorySource(self.root)
        self.tokenizer = ByteTokenizer()
        self.peft = Peft(tiny_model())
        self.peft_lock = threading.Lock()
        self.broken = self.dora = ""

    @cached_property
    def pages_of_the_largest(self) -> int:
        layout = LoraLayout.from_model(self.model)
        return -(-layout.max_elements * layout.itemsize // self.page_bytes)

    @property
    def page_bytes(self) -> int:
        return 2 * kv_layout(self.model.config, "float32").block_bytes  # it has two layers

    @contextmanager
    def engine(self, *, pages: int, **options: Any) -> Iterator[Any]:
        """An engine whose arena has so many pages. ``options`` are `Settings`' and `build`'s."""
        names = Settings.__dataclass_fields__
        settings = Settings(
            end_tokens=serve.end_tokens(self.model),
            **{name: options.pop(name) for name in [*options] if name in names},
        )
        options = {"host_bytes": 8 << 20, "host_block_bytes": 64 << 10} | options
        with serve.build(
            self.model, self.source, settings, gpu_bytes=pages * self.page_bytes, **options
        ) as engine:
            yield engine

    def expected(self, adapter_id: str | None, prompt: Sequence[int], count: int) -> list[int]:
        return self.peft.tokens(self.root / adapter_id if adapter_id else None, prompt, count)

    def publish(self, adapter_id: str, seed: int) -> None:
        """Other weights under an id, new or old."""
        make_adapter(self.root / adapter_id, self.base, number=seed, seed=seed)

    def break_weights(self, adapter_id: str) -> None:
        weights = self.root / adapter_id / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])

    def make_dora(self, adapter_id: str) -> None:
        config = self.root / adapter_id / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))


def ask(engine: Any, adapter_id: str | None, prompt: Sequence[int], count: int) -> Any:
    """Submit a job."""
    job = Job(adapter_id, list(prompt), count, Sampling())
    engine.submit(job)
    return job


def outcome(job: Any, timeout_s: float = 60) -> tuple[list[int], str]:
    """The tokens of a job and why it ended; raises what it was told."""
    tokens: list[int] = []
    while True:
        event = job.events.get(timeout=timeout_s)
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Finished):
            return tokens, event.reason
        tokens.append(event)


def random_prompt(rng: random.Random, low: int = 3, high: int = 60) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randrange(low, high))]


@contextmanager
def one_thread() -> Iterator[None]:
    """Products as small as these take longer with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def is_idle(engine: Any) -> bool:
    """Whether nothing is held but idle blocks, and the runner's page while it runs."""
    stats = engine.cache.stats()
    return stats.leases == 0 and stats.pages["kv"] == engine.blocks.num_idle + engine.is_alive


def settle(condition: Any, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())
