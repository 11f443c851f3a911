"""Processes that share one disk tier, for tests of storage: forked from a parent that has imported
torch, each with a cache of its own.

    python tests/storage_crowd.py {share|fly|churn} ROOT ...

`Library` is a directory of small adapters, each of which can be made again from its number.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import Tiny

from adaptercache import AdapterCache, DirectorySource
from adaptercache.testing import held_weights

HERE = Path(__file__).parent
SITE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


class Library(DirectorySource):
    """A directory of adapters that counts its downloads, of all processes, in a file beside it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "adapters")
        self._log = root / "reads"

    @staticmethod
    def make(root: Path, count: int) -> None:
        for number in range(count):
            Library.publish(root, f"a{number}", number)

    @staticmethod
    def publish(root: Path, adapter_id: str, number: int) -> None:
        """Under an id, the adapter of that number; as a whole, in the place of an older one."""
        folder, fresh = root / "adapters" / adapter_id, root / f"fresh-{os.getpid()}"
        fresh.mkdir(parents=True)
        tensors, config = Tiny.tensors(number)
        save_file(tensors, fresh / "adapter_model.safetensors", {"format": "pt"})
        (fresh / "adapter_config.json").write_text(json.dumps(config))
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            os.replace(fresh / file, folder / file)
        fresh.rmdir()

    def files(self, adapter_id: str, revision: str) -> Any:
        with open(self._log, "a") as log:
            log.write(f"{adapter_id}\n")
        return super().files(adapter_id, revision)

    @staticmethod
    def downloads(root: Path) -> list[str]:
        log = root / "reads"
        return log.read_text().split() if log.exists() else []


def cache_on(root: Path, **options: Any) -> AdapterCache:
    options = {"disk_dir": root / "disk", "gpu_slots": 24, "host_bytes": 1 << 18} | options
    return Tiny.cache(Library(root), pages=128, device="cpu", **options)


def serves(cache: AdapterCache, adapter_id: str, number: int) -> bool:
    """Whether a lease on it has that adapter's bytes."""
    with cache.acquire(adapter_id).result(60) as lease:
        found = held_weights(cache, lease, 0, "q_proj")
        return found is not None and found[0].equal(Tiny.tensors(number)[0][SITE])


def forked(works: Iterable[Callable[[], None]]) -> list[int]:
    """Start a child for each; it ends with 0, or 1 if the work raises."""
    children = []
    for work in works:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    return children


def exit_codes(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Raises what the first of them raised."""
    caught: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if caught:
        raise caught[0]


def content_bytes(root: Path) -> int:
    """What lies in the disk tier now; what goes meanwhile isn't counted."""
    total = 0
    for file in Tiny.files(root / "disk" / "objects"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def share(
    root: Path, processes: int, threads: int, adapters: int, rounds: int, budget: int
) -> None:
    """Everybody wants everything, and the disk holds a part: every read is right, and the budget
    is kept at every moment."""

    def work() -> None:
        with cache_on(root, disk_bytes=budget) as cache:

            def ask(number: int) -> None:
                rng = random.Random(os.getpid() * 100 + number)
                for _ in range(rounds):
                    wanted = rng.randrange(adapters)
                    assert serves(cache, f"a{wanted}", wanted), wanted

            in_threads(threads, ask)

    most, ended = 0, False

    def watch() -> None:
        nonlocal most
        while not ended:
            most = max(most, content_bytes(root))
            time.sleep(0.005)

    children = forked([work] * processes)
    watching = threading.Thread(target=watch)
    watching.start()
    codes = exit_codes(children)
    ended = True
    watching.join()
    print(json.dumps({"codes": codes, "most": most, "budget": budget}))


def fly(root: Path, processes: int) -> None:
    """All ask for one adapter at one moment."""
    start = time.time() + 1.0

    def work() -> None:
        with cache_on(root) as cache:
            time.sleep(max(0.0, start - time.time()))
            in_threads(4, lambda _: _assert(serves(cache, "a0", 0)))

    print(json.dumps({"codes": exit_codes(forked([work] * processes))}))


def _assert(holds: bool) -> None:
    assert holds


def churn(root: Path, kills: int, adapters: int, budget: int) -> None:
    """A reader goes on, while writers are killed at random moments of whatever they do."""
    stop = root / "stop"

    def write() -> None:
        seed = os.getpid()
        rng = random.Random(seed)
        with cache_on(root, disk_bytes=budget) as cache:
            while True:
                wanted = rng.randrange(adapters)
                assert serves(cache, f"a{wanted}", wanted)
                if rng.random() < 0.3:  # another layout's worth of work: all is packed again
                    for packed in Tiny.files(root / "disk/objects"):
                        if len(packed.stem) == 64 and rng.random() < 0.3:
                            packed.unlink(missing_ok=True)

    def read() -> None:
        rng = random.Random(1)
        with cache_on(root, disk_bytes=budget, host_bytes=1 << 16) as cache:
            while not stop.exists():
                wanted = rng.randrange(adapters)
                assert serves(cache, f"a{wanted}", wanted), wanted

    (reader,) = forked([read])
    rng = random.Random(kills)
    ends = []
    for _ in range(kills):
        (writer,) = forked([write])
        time.sleep(rng.uniform(0.02, 0.35))
        os.kill(writer, signal.SIGKILL)
        ends += exit_codes([writer])
    stop.touch()
    (code,) = exit_codes([reader])
    print(json.dumps({"reader": code, "writers": ends}))


def main() -> None:
    torch.set_num_threads(1)
    what, root = sys.argv[1], Path(sys.argv[2])
    {"share": share, "fly": fly, "churn": churn}[what](root, *map(int, sys.argv[3:]))


if __name__ == "__main__":
    main()
