"""A real vLLM API server on loopback, with the plugin, and a client for it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

NO_VLLM = "needs vLLM: make test-vllm"
PROGRAM = "vllm.entrypoints.openai.api_server"
OURS = {
    "VLLM_PLUGINS": "adaptercache",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
UP_S = 240
LOGS = Path(__file__).parent.parent / "build" / "test-vllm"


def has_vllm() -> bool:
    """Whether it is installed. (This folder's ``vllm`` looks like a package without a file.)"""
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None


class Answer(NamedTuple):
    """Of the server: its status, and its body as JSON, or as text."""

    status: int
    body: Any

    @property
    def tokens(self) -> list[int]:
        """Those that were generated."""
        assert self.status == 200, self
        tokens: list[int] = self.body["choices"][0]["token_ids"]
        return tokens

    @property
    def cached(self) -> int:
        """How many tokens of the prompt came from the prefix cache."""
        assert self.status == 200, self
        return int(
            (self.body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        )


class Vllm:
    """A server that runs. Thread-safe."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port, self.process, self.log = port, process, log

    def call(self, path: str, body: object = None, timeout_s: float = 120.0) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return Answer(answer.status, _parsed(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _parsed(error.read()))

    def complete(self, model: str, prompt: Sequence[int], length: int = 8, **more: Any) -> Answer:
        """Greedily; ``base`` is the base model."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": length, "temperature": 0}
        return self.call(
            "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True} | more
        )

    def hang_up(self, model: str, prompt: Sequence[int], length: int, after_s: float) -> None:
        """Ask for a stream and go away."""
        body = json.dumps(
            {"model": model, "prompt": list(prompt), "max_tokens": length, "stream": True}
            | {"ignore_eos": True}
        ).encode()
        with socket.create_connection(("127.0.0.1", self.port), 30) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            time.sleep(after_s)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels; 0 where there is none."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.call("/metrics").body)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def models(self) -> set[str]:
        return {model["id"] for model in self.call("/v1/models").body["data"]}

    def kill(self) -> None:
        """kill -9, all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running_vllm(
    base: Path, environment: Mapping[str, str], log_name: str, *options: str
) -> Iterator[Vllm]:
    """A server of the model in ``base``, ready. Its log stays in build/test-vllm."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{log_name}.log"
    port = free_port()
    with open(path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, *_options(base, port), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=clean_environment(OURS | dict(environment)),
            cwd=path.parent,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    server = Vllm(port, process, path)
    try:
        wait_until_up(server)
        yield server
    finally:
        if process.poll() is None:
            server.kill()


def _options(base: Path, port: int) -> list[str]:
    return [
        *("--model", str(base), "--served-model-name", "base", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "256", "--max-num-seqs", "8", "--block-size", "32"),
        *("--enforce-eager", "--enable-lora", "--max-lora-rank", "16"),
        *("--max-loras", "2", "--max-cpu-loras", "3"),
        *("--enable-prompt-tokens-details",),
    ]


def clean_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process' own without what would change the server, and ``more``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "ADAPTERCACHE_", "PYTEST", "VLLM_", "TRITON_"))
    }
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    quiet = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "2"}
    return kept | offline | quiet | dict(more)


def wait_until_up(server: Vllm) -> None:
    """Raises RuntimeError with the end of the log."""
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if server.call("/health", timeout_s=5).status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"vLLM didn't start; {server.log} ends with:\n{tail(server.log)}")


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
