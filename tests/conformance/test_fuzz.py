"""Every conformance case made wrong: it is refused with an error of ours or read whole, in bounded
time and memory; and whoever is served beside it never notices."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import Files, mutated, taken_apart
from tiny import Tiny

from adaptercache import (
    AdapterCache,
    AdapterCacheError,
    AdapterInvalid,
    AdapterUnsupported,
    Request,
)
from adaptercache.base_model import BaseModel
from adaptercache.checkpoint import Checkpoint, read_checkpoint
from adaptercache.testing import FakeSource, held_weights
from adaptercache.tiers.remote import CONFIG, WEIGHTS

HERE = Path(__file__).parent
CASES = sorted(path.parent.name for path in (HERE / "cases").glob("*/case.json"))
EXAMPLES = settings().max_examples  # of the profile: 100, or 2000 in `make soak`

SECONDS = 1.0
SPARE_BYTES = 32 << 20
"""Beside twice the file: what the interpreter and torch take from the system at once (a pool of
small objects is 1 MiB, a thread's stack 8), and the JSON of a config, which is at most 20 MB."""

Result = TypeVar("Result")


@cache
def files_of(case: str) -> Files:
    paths = (HERE / "cases" / case / name for name in (CONFIG, WEIGHTS))
    return Files(*(path.read_bytes() if path.is_file() else None for path in paths))


@cache
def base_of(case: str) -> BaseModel:
    named = json.loads((HERE / "cases" / case / "case.json").read_text())["base_config"]
    table = HERE / "configs" / named.replace(".json", ".modules.json")
    return BaseModel.from_table(json.loads(table.read_text()))


def write(folder: Path, files: Files) -> int:
    """Puts the files into the folder, in the place of others; their bytes."""
    for name, content in ((CONFIG, files.config), (WEIGHTS, files.weights)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    return len(files.config or b"") + len(files.weights or b"")


@contextmanager
def memory_limited(nbytes: int) -> Iterator[None]:
    """No more than ``nbytes`` on top of what the process has, untouched memory included: whoever
    asks for more gets a MemoryError, or torch's RuntimeError."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def in_time(act: Callable[[], Result]) -> Result:
    """The result of ``act``; of this process's own time it takes a second at most. Once more if it
    takes longer: the garbage collector of a long test run may have come in between."""
    for _ in range(2):
        begin = time.process_time()
        result = act()
        if time.process_time() - begin <= SECONDS:
            return result
    raise AssertionError("it took too long, twice")


def read(folder: Path, base: BaseModel, size: int) -> Checkpoint | AdapterCacheError:
    try:
        with memory_limited(2 * size + SPARE_BYTES):
            return read_checkpoint(folder, base)
    except AdapterCacheError as error:
        return error


def check(folder: Path, files: Files, base: BaseModel) -> bool:
    """Whether the files are read; each of the promises is kept, either way."""
    size = write(folder, files)
    found = in_time(lambda: read(folder, base, size))
    if isinstance(found, AdapterCacheError):
        assert type(found) in (AdapterInvalid, AdapterUnsupported)
        assert str(found).isprintable()
        assert len(str(found)) < 3000
        return False
    apart = taken_apart(files.weights or b"")
    assert apart is not None
    in_file = sorted(name for name in apart[0] if name != "__metadata__")
    assert sorted([*found.consumed, *(entry.name for entry in found.skipped)]) == in_file
    for path, weights in found.modules.items():
        assert found.delta(path).isfinite().all()
        assert 0 < weights.scaling < math.inf
    assert len(found.digest) == 32
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files are written; all that is loaded or started once is, before memory is limited."""
    torch.ones(1 << 20).sum()
    folder = tmp_path_factory.mktemp("fuzz")
    for case in CASES:
        check(folder, files_of(case), base_of(case))
    return folder


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_mutated_case_is_refused_or_read_whole(
    folder: Path, case: str, data: st.DataObject
) -> None:
    check(folder, mutated(data.draw, files_of(case)), base_of(case))


def test_the_limits_are_felt(folder: Path) -> None:
    more = SPARE_BYTES + (
        8 << 30
    )  # than what other tests gave back, too, which the process still has
    with memory_limited(SPARE_BYTES), pytest.raises(MemoryError):
        bytearray(more)
    with memory_limited(SPARE_BYTES), pytest.raises(RuntimeError, match="memory"):
        torch.empty(more, dtype=torch.uint8)

    def spin() -> None:
        end = time.process_time() + 1.1 * SECONDS
        while time.process_time() < end:
            pass

    with pytest.raises(AssertionError, match="too long"):
        in_time(spin)


# Through the cache: packed, on disk, in CPU memory and on the device.


@cache
def tiny_files() -> Files:
    tensors, config = Tiny.tensors(1)
    return Files(json.dumps(config).encode(), safetensors.torch.save(tensors, {"format": "pt"}))


@settings(max_examples=max(1, EXAMPLES // 10))
@given(data=st.data())
def test_who_is_served_beside_mutated_adapters_never_notices(data: st.DataObject) -> None:
    tensors, config = Tiny.tensors(0)
    source = FakeSource()
    source.put("good", tensors, config)
    source.put("fine", *Tiny.tensors(2))
    for number in range(4):
        files = mutated(data.draw, tiny_files())
        found = {CONFIG: files.config, WEIGHTS: files.weights}
        source.put_files(f"bad-{number}", {k: v for k, v in found.items() if v is not None})
    waiting = [
        Request(f"r-{name}", name) for name in ("bad-0", "bad-1", "good", "bad-2", "fine", "bad-3")
    ]
    with Tiny.cache(source) as cache, cache.acquire("good").result(10) as good:
        before = held_weights(cache, good, 0, "q_proj")
        admitted = serve(cache, waiting)
        after = held_weights(cache, good, 0, "q_proj")
    assert {"good", "fine"} <= admitted
    assert before is not None
    assert after is not None
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    assert after[0].equal(before[0])
    assert after[0].equal(tensors[f"{name}_A.weight"])
    assert after[1].equal(tensors[f"{name}_B.weight"])


def serve(cache: AdapterCache, waiting: list[Request]) -> set[str]:
    """Admits each request or fails it with an error of ours; the adapters that were admitted."""
    admitted: set[str] = set()
    for _ in range(100):
        admission = cache.admit(waiting)
        for request, lease in admission.admitted:
            admitted.add(request.adapter_id)
            weights = held_weights(cache, lease, 1, "down_proj")
            assert weights is None or all(m.isfinite().all() for m in weights[:2])
            lease.release()
        for _, error in admission.failed:
            assert type(error) in (AdapterInvalid, AdapterUnsupported), error
        waiting = admission.deferred
        if not waiting:
            return admitted
        Tiny.wait_until(lambda: Tiny.idle(cache))
    raise AssertionError(f"still waiting: {waiting}")
