"""What holds for every test: profiles, markers, poisoned memory, and nothing left behind."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tiny import Tiny

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
TIMEOUT_S = {"dev": 120, "ci": 300, "nightly": 3600}[PROFILE]
NO_GPU = "needs a CUDA device, and torch.cuda.is_available() is False"

# No deadlines: two shared cores make them fail by chance.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(PROFILE)


@pytest.fixture
def tiny() -> type[Tiny]:
    return Tiny


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(NO_GPU)  # from here, so that the report has one line for them all


# Nothing left behind. This fixture comes first in the file's chain, so it looks last: after
# `open_caches` has closed what the test left open.


def our_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("adaptercache")]


def open_files() -> set[str]:
    """The files and sockets that this process has open, each with its number.

    Left out: devices, pipes and event objects. CUDA opens them at its first use, for good.
    """
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:  # the one that lists the folder
            continue
        if not target.startswith(("/dev/", "/proc/", "anon_inode:", "pipe:")):
            found.add(f"{fd.name} -> {target}")
    return found


@pytest.fixture(scope="session", autouse=True)
def cuda_started() -> None:
    """CUDA opens sockets at its first use, for good: not in some test's time."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda")
        torch.ones(1).pin_memory()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread of ours running, or a file or socket open."""
    threads, files = set(our_threads()), open_files()
    yield
    deadline = time.monotonic() + 10.0
    for thread in set(our_threads()) - threads:  # one that was told to end may be ending
        thread.join(max(0.0, deadline - time.monotonic()))
    left_running = [t.name for t in our_threads() if t not in threads]
    assert not left_running, "threads left running"
    if open_files() - files:
        gc.collect()  # slow, so only where something may be waiting for it
        while (left_open := open_files() - files) and time.monotonic() < deadline:
            time.sleep(0.02)  # a server of the test's may be seeing just now that its client left
        assert not left_open, "files left open"


# Caches: consistent whenever they close, and closed after every test.


@pytest.fixture(autouse=True)
def open_caches(
    nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[int, Any]]:
    """Check every `AdapterCache` of the test before it closes, and close those still open.

    Held alive here, by id, until then; a test about a cache that is dropped unclosed clears this.
    """
    caches: dict[int, Any] = {}
    if find_spec("adaptercache.cache") is None or find_spec("adaptercache.testing") is None:
        yield caches
        return
    from adaptercache.cache import AdapterCache
    from adaptercache.testing import check_consistent

    make, close = AdapterCache.__init__, AdapterCache.close

    @functools.wraps(make)
    def make_and_remember(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        caches[id(self)] = self

    @functools.wraps(close)
    def check_and_close(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if caches.pop(id(self), None) is not None:
                check_consistent(self)
        finally:
            close(self, *args, **kwargs)

    monkeypatch.setattr(AdapterCache, "__init__", make_and_remember)
    monkeypatch.setattr(AdapterCache, "close", check_and_close)
    yield caches
    with ExitStack() as closing:
        for cache in caches.values():
            closing.callback(cache.close)


# Memory that nobody wrote reads as NaN, so a kernel that reads it fails loudly.


with torch.device("meta"):
    torch.empty(0)  # at its first use torch notes which functions to redirect: the unpoisoned ones


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def make_and_poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        with torch.no_grad():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype is torch.uint8:  # raw memory: a NaN in whatever float it is read as
                tensor.fill_(0xFF)
        return tensor

    return make_and_poison


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
