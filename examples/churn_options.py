"""The options of the run, and the sizes that follow from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptercache import KVLayout, LoraLayout
from churn_check import LIMITS
from churn_library import Library
from churn_workload import Workload

__all__ = ["Sizes", "parse", "workload_of"]

MIB = 1 << 20
KV_TOKENS = 8192  # about what runs at once: the KV cache's part of the arena
# With these as they are by default, the run must evict and check enough rows, or it has failed.
SIZING = ("adapters", "count", "requests", "law", "gpu_mib", "host_mib", "gpu_slots")


def parse(description: str, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, bool]:
    """The options, and whether those that size the run are the defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_work(parser, Workload())
    add = parser.add_argument
    add("--gpu-mib", type=float, help="arena; default: a sixth of the library, and some for KV")
    add("--host-mib", type=float, help="CPU memory; default: two fifths of the library")
    add("--gpu-slots", type=int, default=64, help="adapters on the GPU at most (%(default)s)")
    add("--max-adapters", type=int, default=16, help="in one batch (%(default)s)")
    add("--policy", choices=("lru", "lfu"), default="lru", help="of eviction (%(default)s)")
    add("--dtype", choices=tuple(LIMITS), help="of the arena; default: the base model's")
    add("--device", help="default: cuda if torch sees one, else cpu")
    add("--real-time", action="store_true", help="steps go on while loads run")
    add("--metrics-port", type=int, metavar="PORT", help="serve /metrics there; 0: any port")
    add("--report", type=Path, default=Path("report.html"), help="(%(default)s)")
    add("--json", type=Path, metavar="PATH", help="write the numbers there, too")
    args = parser.parse_args(argv)
    if (args.adapters is None) != (args.config is None):
        parser.error("--adapters and --config go together")
    return args, all(getattr(args, name) == parser.get_default(name) for name in SIZING)


def _add_work(parser: argparse.ArgumentParser, drawn: Workload) -> None:
    """The options that say what is to be served: which adapters, which requests."""
    add = parser.add_argument
    laws = "S-LoRA's power law, Zipf with drift, or one after the other (%(default)s)"
    add("--adapters", type=Path, metavar="DIR", help="a directory of PEFT adapter folders")
    add("--config", type=Path, help="the config.json of their base model")
    add("--count", type=int, default=160, help="adapters to make up otherwise (%(default)s)")
    add("--requests", type=int, default=drawn.requests, help="(%(default)s)")
    add("--workload", dest="law", choices=("slora", "zipf", "both"), default=drawn.law, help=laws)
    add("--alpha", type=float, default=drawn.alpha, help="S-LoRA's; 1 is uniform (%(default)s)")
    add("--zipf", type=float, default=drawn.zipf, help="Zipf's exponent (%(default)s)")
    add("--drift-every", type=int, default=drawn.drift_every, help="requests (%(default)s)")
    add("--rate", type=float, default=drawn.rate, help="requests a second (%(default)s)")
    add("--cv", type=float, default=drawn.cv, help="of the gaps between them (%(default)s)")
    add("--seed", type=int, default=drawn.seed, help="of all that is random (%(default)s)")


def workload_of(args: argparse.Namespace) -> Workload:
    """What to draw."""
    return Workload(
        law=args.law,
        requests=args.requests,
        rate=args.rate,
        cv=args.cv,
        alpha=args.alpha,
        zipf=args.zipf,
        drift_every=args.drift_every,
        seed=args.seed,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """How the cache is cut: small beside the library, so that its tiers evict."""

    gpu_bytes: int
    host_bytes: int
    host_block_bytes: int

    @classmethod
    def of(
        cls, args: argparse.Namespace, library: Library, layout: LoraLayout, kv: KVLayout
    ) -> Sizes:
        largest = layout.max_elements * layout.itemsize
        block = max(4096, min(2 * MIB, 1 << (largest // 32).bit_length()))
        kv_bytes = KV_TOKENS // kv.block_size * kv.block_bytes * layout.num_layers
        gpu = max(library.weight_bytes // 6, 2 * largest) + kv_bytes
        host = max(library.weight_bytes * 2 // 5, 2 * largest + 64 * block)
        if args.gpu_mib is not None:
            gpu = int(args.gpu_mib * MIB)
        if args.host_mib is not None:
            host = int(args.host_mib * MIB)
        return cls(gpu, host, block)
