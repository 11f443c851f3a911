"""What the kernels are measured on: shapes, batches, byte floors, and targets."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

COPY_BYTES_PER_US = 4.2e6  # an H200's device-to-device copy, read and written
PEERS = Path(__file__).parent / "results" / "nvidia-h200" / "peers.json"
MIXES = {"rmix": (8, 16, 32, 64), "rmix5": (4, 8, 16, 32, 64)}


@dataclass(frozen=True, slots=True)
class Shape:
    """Modules that share their input, and the geometry of the arena that holds them."""

    k: int
    widths: tuple[int, ...]
    rows: int = 32
    page_bytes: int = 64 << 10


SHAPES = {
    "o_proj": Shape(4096, (4096,)),
    "qkv": Shape(4096, (4096, 1024, 1024)),
    "gate_up": Shape(4096, (14336, 14336)),
    "down": Shape(14336, (4096,)),
    "qwen7b_qkv": Shape(3584, (3584, 512, 512), 28, 32 << 10),
    "qwen7b_o_proj": Shape(3584, (3584,), 28, 32 << 10),
    "qwen7b_gate_up": Shape(3584, (18944, 18944), 28, 32 << 10),
    "qwen7b_down": Shape(18944, (3584,), 28, 32 << 10),
    "llama70b_tp8_qkv": Shape(8192, (1024, 128, 128), 80, 8 << 10),
    "llama70b_tp8_o_proj": Shape(1024, (8192,), 80, 8 << 10),
    "llama70b_tp8_gate_up": Shape(8192, (3584, 3584), 80, 8 << 10),
    "llama70b_tp8_down": Shape(3584, (8192,), 80, 8 << 10),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One batch for one shape: ``decode/o_proj/r16/t64/zipf``, ``prefill/qkv/r8/t2048/a4``."""

    phase: str
    shape: str
    rank: str  # "16", or a mix's name
    tokens: int
    popularity: str
    slots: int = 128

    @property
    def name(self) -> str:
        rank = self.rank if self.rank in MIXES else f"r{self.rank}"
        name = f"{self.phase}/{self.shape}/{rank}/t{self.tokens}/{self.popularity}"
        return name if self.slots == 128 else f"{name}/slots{self.slots}"

    def rank_of(self, slot: int) -> int:
        mix = MIXES.get(self.rank)
        return mix[slot % len(mix)] if mix else int(self.rank)

    @property
    def max_rank(self) -> int:
        return max(MIXES.get(self.rank) or [int(self.rank)])

    @property
    def num_adapters(self) -> int:
        """That must be on the GPU."""
        if self.popularity == "distinct":
            return self.tokens
        return 128 if self.popularity == "zipf" else int(self.popularity[1:])

    def segments(self) -> list[tuple[int, int]]:
        """``(slot, tokens)``: in decode a token each, adapters in turn or drawn; in prefill runs of
        equal length."""
        if self.phase == "prefill":
            n = self.num_adapters
            return [(slot, self.tokens // n) for slot in range(n)]
        if self.popularity == "zipf":  # p ~ 1 / rank
            weights = [1 / (i + 1) for i in range(self.num_adapters)]
            draws = random.Random(self.tokens).choices(range(len(weights)), weights, k=self.tokens)
            return [(slot, 1) for slot in draws]
        return [(token % self.num_adapters, 1) for token in range(self.tokens)]

    def bytes(self) -> int:
        """That no kernel can avoid: A and B of the batch's adapters once, x, y in and out."""
        shape = SHAPES[self.shape]
        a_and_b = len(shape.widths) * shape.k + sum(shape.widths)
        ranks = sum(self.rank_of(slot) for slot in {slot for slot, _ in self.segments()})
        return 2 * (ranks * a_and_b + self.tokens * (shape.k + 2 * sum(shape.widths)))

    @property
    def floor_us(self) -> float:
        return self.bytes() / COPY_BYTES_PER_US

    @property
    def limit_us(self) -> float:
        """The target (docs/design.md)."""
        if self.phase == "decode":
            factor, more = (1.1, 3.5) if self.max_rank <= 16 else (1.15, 4.5)
            factor, more = (1.3, 6.0) if self.rank in MIXES else (factor, more)
        else:
            factor, more = (1.1, 10.0) if self.max_rank <= 16 else (1.25, 11.0)
            factor, more = (1.4, 12.0) if self.max_rank > 32 else (factor, more)
        return factor * self.floor_us + more

    @property
    def worst_ratio(self) -> float:
        """How many times faster than the best peer it has to be at the least."""
        return 1.35 if self.phase == "decode" else 1.2

    @property
    def best_peer_us(self) -> float | None:
        """The faster peer's time; where each drew its own batch, scaled by our byte floor."""
        peer = _peers().get(self.name, {})
        if "best_peer_floors" in peer:
            return round(peer["best_peer_floors"] * self.floor_us, 3)
        return peer.get("best_peer_us")

    @property
    def peer_had_these_bytes(self) -> bool:
        return "best_peer_us" in _peers().get(self.name, {})


@cache
def _peers() -> dict[str, dict[str, float]]:
    cases: dict[str, dict[str, float]] = json.loads(PEERS.read_text())["cases"]
    return cases


def all_cases() -> list[Case]:
    """The peers' grid, and ours."""
    llama = ("o_proj", "qkv", "gate_up", "down")
    ranks = ("8", "16", "32", "64")
    cases = [
        *_decode(llama, ranks, (1, 8, 32, 64, 128, 256), ("distinct", "a1", "a8", "zipf")),
        *_decode(llama, ("rmix", "rmix5"), (64, 128, 256), ("distinct", "zipf")),
        *_decode(("o_proj", "gate_up"), ("16",), (64, 256), ("a8",), slots=(8, 1024)),
        *_decode([s for s in SHAPES if s not in llama], ("16", "64"), (1, 64, 256), ("distinct",)),
    ]
    for shape, rank, tokens, n in itertools.product(llama, ranks, (2048, 8192), (1, 4, 16)):
        cases.append(Case("prefill", shape, rank, tokens, f"a{n}"))
    cases += [Case("prefill", shape, "rmix", 2048, "a4") for shape in llama]
    for shape in [shape for shape in SHAPES if shape not in llama]:
        cases.append(Case("prefill", shape, "16", 2048, "a4"))
    return cases


def _decode(
    shapes: Sequence[str],
    ranks: Sequence[str],
    tokens: Sequence[int],
    popularities: Sequence[str],
    slots: Sequence[int] = (128,),
) -> Iterator[Case]:
    grid = itertools.product(shapes, ranks, tokens, popularities, slots)
    for shape, rank, t, popularity, num_slots in grid:
        n = int(popularity[1:]) if popularity[0] == "a" else 1
        if n == t > 1 or n > t or (t == 1 and popularity != "distinct"):
            continue  # the same as distinct
        yield Case("decode", shape, rank, t, popularity, num_slots)
