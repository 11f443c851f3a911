"""A proxy before an S3 server that does to its answers what networks and stores do."""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HTML = b"<html><body>Please sign in to the network</body></html>"
TROUBLE = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"


@dataclass
class Fault:
    """What happens to the next ``times`` answers to such requests.

    ``kind``: ``reset``, ``truncate``, ``stall``, ``drip`` (after ``after`` bytes of the body);
    ``short`` (a body that is shorter, and says so), ``flip`` (one bit of it), ``html`` (another
    body), ``error`` (``status`` and ``code``), or ``call`` (``act`` is called, and nothing else).
    """

    kind: str
    method: str = "GET"
    where: str = "adapter_model"
    times: int = 1
    after: int = 0
    status: int = 500
    code: str = "InternalError"
    headers: dict[str, str] = field(default_factory=dict)
    act: Callable[[], object] = lambda: None


class Proxy:
    """Where it listens, what went through it, and what is to go wrong. Thread-safe."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent = 0
        """Bytes of bodies that went to clients."""
        self.released = threading.Event()
        """Ends what stalls."""
        self.url = ""

    def inject(self, *faults: Fault) -> None:
        with self._lock:
            self._faults += faults

    def count(self, method: str, where: str = "") -> int:
        with self._lock:
            return sum(m == method and where in path for m, path, _ in self.requests)

    def _next(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times > 0 and fault.method == method and fault.where in path:
                    fault.times -= 1
                    return fault
        return None

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.title(): value for name, value in handler.headers.items()}
        with self._lock:
            self.requests.append((handler.command, handler.path, headers))
        fault = self._next(handler.command, handler.path)
        body = handler.rfile.read(int(headers.get("Content-Length", 0)))
        if fault is not None and fault.kind == "call":
            fault.act()
            fault = None
        if fault is not None and fault.kind == "error":
            text = TROUBLE.format(code=fault.code).encode()
            self._send(handler, fault.status, fault.headers, text)
            return
        address = (self._upstream.hostname or "", self._upstream.port)
        upstream = http.client.HTTPConnection(*address, timeout=60)
        try:
            upstream.request(handler.command, handler.path, body, headers)
            answer = upstream.getresponse()
            content = answer.read()
            self._spoil(handler, fault, answer, content)
        finally:
            upstream.close()

    def _spoil(
        self,
        handler: BaseHTTPRequestHandler,
        fault: Fault | None,
        answer: http.client.HTTPResponse,
        content: bytes,
    ) -> None:
        headers = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "date", "server")
        }
        kind = fault.kind if fault is not None else ""
        if fault is None:
            self._send(handler, answer.status, headers, content)
        elif kind == "short":
            headers["Content-Length"] = str(fault.after)
            self._send(handler, answer.status, headers, content[: fault.after])
        elif kind == "flip":
            spoiled = bytearray(content)
            spoiled[min(fault.after, len(spoiled) - 1)] ^= 0x10
            self._send(handler, answer.status, headers, bytes(spoiled))
        elif kind == "html":
            self._send(handler, 200, {"Content-Type": "text/html"}, HTML)
        else:
            self._send(handler, answer.status, headers, content[: fault.after], len(content))
            self._break(handler, kind, content[fault.after :])

    def _break(self, handler: BaseHTTPRequestHandler, kind: str, rest: bytes) -> None:
        handler.close_connection = True
        if kind == "stall":
            self.released.wait(30)
        elif kind == "drip":
            for byte in rest:
                if self.released.wait(0.02):
                    break
                try:
                    handler.wfile.write(bytes([byte]))
                except OSError:  # the client has had enough
                    break
        elif kind == "reset":
            handler.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            handler.connection.close()

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        length: int | None = None,
    ) -> None:
        declared = length if length is not None else len(content)
        if handler.command == "HEAD":
            declared = int(headers.get("Content-Length", 0))
        handler.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(declared))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)
            with self._lock:
                self.sent += len(content)


@contextmanager
def running_proxy(upstream: str, secure: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """Speaks TLS where ``secure`` says how."""
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        setattr(Handler, f"do_{method}", lambda self: proxy.answer(self))

    class Listening(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:  # clients hang up: that is what we test
            pass

    with Listening(("127.0.0.1", 0), Handler) as server:
        if secure is not None:
            server.socket = secure.wrap_socket(server.socket, server_side=True)
        scheme = "https" if secure is not None else "http"
        proxy.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.released.set()
            server.shutdown()
            thread.join()
            time.sleep(0.05)
