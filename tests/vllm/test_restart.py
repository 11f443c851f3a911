"""The server is killed, and another finds what it had on the disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3_proxy import Fault, Proxy
from vllm_adapters import Trainer
from vllm_server import Vllm

PROMPT = [309, 307, 300, 303, 42, 77]


def test_after_kill_9_the_disk_serves_even_while_the_store_is_down(
    start: Callable[..., Any],
    bucket: Any,
    trainer: Trainer,
    many: list[str],
    proxy: Proxy,
    disk: Path,
) -> None:
    def is_right(vllm: Vllm, name: str) -> bool:
        return vllm.complete(name, PROMPT).tokens == trainer.truth(bucket.folders[name], PROMPT)

    with start("before-kill") as vllm:
        assert all(is_right(vllm, name) for name in many[:6])
        vllm.kill()
    (disk / "tmp" / "of-a-dead-one").mkdir()

    down = [
        Fault("error", method=method, where="", times=1 << 30, status=503, code="SlowDown")
        for method in ("GET", "HEAD")
    ]
    proxy.inject(*down)
    with start("after-kill") as vllm:
        assert all(is_right(vllm, name) for name in many[:6])
        assert vllm.metric("adaptercache_requests_total", tier="disk", result="hit") == 6
        assert vllm.metric("adaptercache_load_bytes_total") == 0
        assert vllm.complete(many[40], PROMPT).status == 503
        for fault in down:
            fault.times = 0
        time.sleep(2.1)
        assert is_right(vllm, many[40])
        assert not (disk / "tmp" / "of-a-dead-one").exists()
        proxy.inject(Fault("stall", where="adapter_model", times=3))
        vllm.hang_up(many[41], PROMPT, 8, 1.0)  # the download goes on without its client
        vllm.process.terminate()
        assert vllm.process.wait(90) is not None, "a store that hangs keeps it from ending"
        proxy.released.set()
        assert not list((disk / "tmp").iterdir())
