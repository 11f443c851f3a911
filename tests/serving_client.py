"""A client of `examples/serve.py`'s server, and the server around it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from serving import World, is_idle, settle

import serve
from adaptercache.testing import check_consistent

__all__ = ["Client", "served", "tokens_of"]


@dataclass
class Client:
    """Speaks to a server; each call is a connection of its own."""

    host: str
    port: int

    def post(self, path: str, content: Any) -> tuple[int, Any]:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self._call("POST", path, body)

    def get(self, path: str) -> tuple[int, Any]:
        return self._call("GET", path, None)

    def complete(self, model: str, prompt: Any, count: int, **fields: Any) -> tuple[int, Any]:
        content = {"model": model, "prompt": prompt, "max_tokens": count, **fields}
        return self.post("/v1/completions", {"return_token_ids": True, **content})

    def stream(self, model: str, prompt: Any, count: int) -> Iterator[Any]:
        """The events of a completion; closing it goes away in the middle."""
        content = {"model": model, "prompt": prompt, "max_tokens": count, "stream": True}
        body = json.dumps({**content, "return_token_ids": True}).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", body)
            with connection.getresponse() as response:
                assert response.status == 200, response.read()
                for line in response:
                    if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                        yield json.loads(line[6:])
        finally:
            connection.close()

    def leave(self, model: str, prompt: Any, count: int) -> None:
        """Ask for an answer, and go away without it."""
        content = {"model": model, "prompt": prompt, "max_tokens": count}
        body = json.dumps(content).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((self.host, self.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(0.01)

    def _call(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            text = response.read()
            if response.headers["Content-Type"] != "application/json":
                return response.status, text.decode()
            return response.status, json.loads(text)
        finally:
            connection.close()


@contextmanager
def served(world: World, **options: Any) -> Iterator[tuple[Client, Any]]:
    """A server on a free port, and its engine. At the end nothing may be left of it."""
    before = {thread.name for thread in threading.enumerate()}
    with ExitStack() as stack:
        engine = stack.enter_context(world.engine(**options))
        service = serve.service_of(engine, world.source, world.tokenizer, "base")
        server = stack.enter_context(serve.serving(service, "127.0.0.1", 0))
        host, port = server.server_address[:2]
        yield Client(str(host), port), engine
        assert settle(lambda: is_idle(engine)), engine.cache.stats()
        check_consistent(engine.cache)
    assert engine.cache.stats().pages["kv"] == 0
    left = {thread.name for thread in threading.enumerate()} - before
    assert not left, "threads left running"


def tokens_of(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])
