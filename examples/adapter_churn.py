"""Adapters churn through a small cache: GPU slots and pages, pinned CPU memory, disk.

A stand-in for a serving engine drives a real `AdapterCache` over real PEFT-format adapters with
real bytes: it prefetches from the queue, admits requests under a cap of adapters per batch, gives
them KV pages out of the arena that adapters share, applies LoRA for the whole mixed batch, and
releases. Sampled rows are checked against the adapters' own files.

    python examples/adapter_churn.py                                  # makes up its adapters
    python examples/adapter_churn.py --adapters DIR --config CONFIG   # yours
    python examples/adapter_churn.py --real-time                      # loads beside the steps

By default time is virtual and every load ends before the next decision, so that equal options and
an equal --seed give equal requests and equal decisions: who is admitted when, into which slot,
with which pages. The run prints their hash. With --real-time only the requests, the sampling and
the inputs are equal. How long things take is measured in real time either way, but by default
loads wait for each other: take --real-time to see what an engine would see.

The loop is in churn_engine.py, the check in churn_check.py, the requests in churn_workload.py.
The exit code is 1 where rows are wrong, or where the default run evicts nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from adaptercache import AdapterCache, AdapterCacheError
from churn_check import Checker
from churn_engine import Engine
from churn_library import Library, make_library, open_library
from churn_options import Sizes, parse, workload_of
from churn_record import Frame, Record, summarise, table
from churn_report import write_report
from churn_workload import Lockstep, WallClock, changes, draw, fingerprint

MIN_ROWS = 1000
INTERRUPTED = 130  # the shell's code for Ctrl-C


class Progress:
    """One line on stderr: rewritten in place on a terminal, else a new one every few seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_live = sys.stderr.isatty()
        self._every_s = 0.1 if self._is_live else 5.0
        self._shown_at = time.monotonic()

    def show(self, frame: Frame, record: Record, checker: Checker) -> None:
        now = time.monotonic()
        if now - self._shown_at < self._every_s:
            return
        self._shown_at = now
        recent = [seen.tier for seen in record.seen[-100:]]
        text = (
            f"{record.served}/{self._total} requests | running {frame.running}, "
            f"waiting {frame.waiting} | GPU hits {recent.count('gpu') / max(1, len(recent)):.0%} | "
            f"evicted {frame.gpu_evictions} GPU, {frame.host_evictions} host | "
            f"largest error {checker.largest:.1e}"
        )
        start, end = ("\r\x1b[K", "") if self._is_live else ("", "\n")
        print(start + text, end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self._is_live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def metrics_server(cache: AdapterCache, port: int) -> Iterator[int]:
    """Serve /metrics while the block runs; yields the port."""
    from prometheus_client import CollectorRegistry, start_http_server

    from adaptercache.metrics import PrometheusCollector

    registry = CollectorRegistry()
    registry.register(PrometheusCollector(cache))
    server, thread = start_http_server(port, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def complaints(summary: dict[str, Any], checker: Checker, is_default: bool) -> list[str]:
    """Why the run has failed; empty where it has not."""
    check, kv, found = summary["check"], summary["kv"], []
    if not checker.is_within_limits:
        found.append(
            f"rows differ from the adapters' own files: RMS {check['rms']:.1e}, "
            f"largest {check['largest']:.1e}, allowed {checker.limits}"
        )
    if kv["damaged"]:
        found.append(f"{kv['damaged']} requests found others' bytes in their KV pages")
    if is_default and check["rows"] < MIN_ROWS:
        found.append(f"only {check['rows']} rows were checked, expected {MIN_ROWS}")
    if is_default:
        evicted = summary["evictions"]
        found += [f"nothing was evicted from {t}" for t in ("gpu", "host") if not evicted.get(t)]
    return found


def library_of(args: argparse.Namespace, stack: ExitStack) -> Library:
    """The user's adapters, or some that are made up and deleted at the end."""
    if args.adapters is not None:
        return open_library(args.adapters, args.config)
    root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adapter-churn-")))
    print(f"making {args.count} adapters", flush=True)
    return make_library(root, args.count, args.seed)


def set_up(args: argparse.Namespace, stack: ExitStack) -> tuple[Engine, str]:
    """The engine around its cache, and a line about them; ``stack`` closes what was opened."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU is used"
    print(f"device: {device} ({gpu})", flush=True)
    library = library_of(args, stack)
    layout = library.layout(args.dtype)
    kv = library.kv_layout(layout)
    sizes = Sizes.of(args, library, layout, kv)
    pace = WallClock() if args.real_time else Lockstep()
    cache = AdapterCache(
        layout,
        library.root,
        gpu_bytes=sizes.gpu_bytes,
        gpu_slots=args.gpu_slots,
        host_bytes=sizes.host_bytes,
        host_block_bytes=sizes.host_block_bytes,
        policy=args.policy,
        kv=kv,
        device=device,
        clock=pace.now,
    )
    stack.enter_context(cache)
    engine = Engine(
        cache,
        draw(workload_of(args), library.ids),
        pace,
        Checker(library.root, (site.path for site in layout.sites), layout.dtype),
        block_size=kv.block_size,
        idle_kv=sum(cache.stats().pages.values()) // 4,
        max_adapters=args.max_adapters,
        device=device,
        seed=args.seed,
    )
    time_is = "real" if args.real_time else "virtual"
    return engine, f"{describe(library, sizes, layout.dtype)}; {device}, {time_is} time"


def describe(library: Library, sizes: Sizes, dtype: str) -> str:
    mib = [n / 2**20 for n in (library.weight_bytes, sizes.gpu_bytes, sizes.host_bytes)]
    return (
        f"{len(library.ids)} adapters of {mib[0]:.1f} MiB, rank up to {library.max_rank}; "
        f"GPU arena {mib[1]:.1f} MiB for them and KV, CPU memory {mib[2]:.1f} MiB, {dtype}"
    )


@contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """Inside the block, the first Ctrl-C sets the event instead of raising KeyboardInterrupt."""
    pressed = threading.Event()

    def note(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def serve(engine: Engine) -> bool:
    """Serve all requests; False if Ctrl-C came first, after which the step was finished."""
    progress = Progress(len(engine.arrivals))
    with ctrl_c() as pressed, closing(engine), closing(progress):
        for frame in engine.steps():
            progress.show(frame, engine.record, engine.checker)
            if pressed.is_set():
                return False
    return True


def churn(args: argparse.Namespace, is_default: bool, stack: ExitStack) -> int:
    """The run; returns the exit code."""
    engine, setting = set_up(args, stack)
    print(setting, flush=True)
    if args.metrics_port is not None:
        port = stack.enter_context(metrics_server(engine.cache, args.metrics_port))
        print(f"metrics: http on port {port}, /metrics", flush=True)
    is_whole = serve(engine)
    summary = {
        "setting": setting,
        "workload": fingerprint(engine.arrivals),
        "decisions": None if args.real_time else engine.decisions.hexdigest()[:16],
        **summarise(engine.record, engine.cache.stats(), engine.checker),
    }
    summary["complaints"] = complaints(summary, engine.checker, is_default and is_whole)
    write_report(args.report, summary, engine.record, changes(workload_of(args), engine.arrivals))
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    for label, text in (*table(summary), ("report", str(args.report))):
        print(f"{label:<22} {text}")
    for complaint in summary["complaints"]:
        print(f"FAILED: {complaint}", file=sys.stderr)
    return 1 if summary["complaints"] else 0 if is_whole else INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    args, is_default = parse(__doc__ or "", argv)
    # Adapters that are refused are listed at the end, once each.
    logging.getLogger("adaptercache").setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            return churn(args, is_default, stack)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (AdapterCacheError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
