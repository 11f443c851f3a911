"""The engine over HTTP: OpenAI's ``/v1/completions`` and ``/v1/models``, and ``/metrics``.

The standard library's server, a thread a connection: nothing to install, and every thread reads
from top to bottom. It serves hundreds of clients, not tens of thousands: there an ASGI server would
stand here, with the same calls of the engine. A connection carries one request (HTTP/1.0), so
"the client has gone" is the same as "its connection has ended".
"""

from __future__ import annotations

import json
import logging
import queue
import select
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from weakref import WeakSet

from prometheus_client import CollectorRegistry, generate_latest

from adaptercache import AdapterNotFound, CacheClosed, LoadFailed, Source
from adaptercache.errors import AdapterCacheError
from serve_engine import Engine
from serve_job import Finished, Job, Overloaded
from serve_request import BadRequest, Completion, Text

__all__ = ["Server", "Service"]

log = logging.getLogger(__name__)

LOOK_S = 0.1  # how often a connection is looked at
REFRESH_S = 60
MAX_BODY = 4 << 20


class Service(NamedTuple):
    """What the handlers need."""

    engine: Engine
    source: Source
    tokenizer: Any
    base_name: str
    registry: CollectorRegistry


class EngineFailed(Exception):
    """A step broke. Whatever it was is neither the connection's error nor the request's."""


def status_of(error: Exception) -> tuple[HTTPStatus, str]:
    """The HTTP status of whatever may go wrong, and OpenAI's type of it."""
    match error:
        case BadRequest() | ValueError():
            return HTTPStatus.BAD_REQUEST, "invalid_request_error"
        case AdapterNotFound():
            return HTTPStatus.NOT_FOUND, "model_not_found"
        case Overloaded():
            return HTTPStatus.TOO_MANY_REQUESTS, "overloaded"
        case LoadFailed() | CacheClosed():  # may go well later, or elsewhere
            return HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"
        case AdapterCacheError():  # AdapterInvalid, AdapterUnsupported, CapacityError: never will
            return HTTPStatus.UNPROCESSABLE_ENTITY, type(error).__name__
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR, "server_error"


class Server(ThreadingHTTPServer):
    """Serves until `shutdown`; `server_close` then waits for the handlers that are under way. Close
    the engine between the two, which ends them."""

    daemon_threads = False
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        self.service = service
        self._connections: WeakSet[socket.socket] = WeakSet()
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        for connection in list(self._connections):  # who is still sending would never end
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("%s has gone", client_address, exc_info=True)  # the rest is answered, with a log


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds for a client to send its request, or to take a piece of the answer
    server_version = "adaptercache-serve"
    _looked_at = 0.0  # when it was last asked whether the client is still there

    # -- the routes

    def do_GET(self) -> None:
        self._route(
            {"/v1/models": self._models, "/metrics": self._metrics, "/health": self._health}
        )

    def do_POST(self) -> None:
        self._route({"/v1/completions": self._completions, "/v1/refresh": self._refresh})

    def _route(self, routes: Mapping[str, Callable[[], None]]) -> None:
        act = routes.get(self.path.partition("?")[0])
        try:
            if act is None:
                self._send_error(HTTPStatus.NOT_FOUND, "not_found", f"no {self.path} here")
            else:
                act()
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass  # it has gone
        except Exception as error:  # before any part of an answer was sent
            status, kind = status_of(error)
            if status is HTTPStatus.INTERNAL_SERVER_ERROR:
                log.exception("%s", self.path)
            self._send_error(status, kind, str(error))

    def _models(self) -> None:
        base = self.server.service.base_name
        rows: list[dict[str, str]] = [{"id": base}]
        rows += [{"id": name, "parent": base} for name in sorted(self.server.service.source.ids())]
        of_all = {"object": "model", "owned_by": "adaptercache"}
        self._send_json({"object": "list", "data": [row | of_all for row in rows]})

    def _metrics(self) -> None:
        body = generate_latest(self.server.service.registry)
        self._send(HTTPStatus.OK, body, "text/plain; version=0.0.4; charset=utf-8")

    def _health(self) -> None:
        if not self.server.service.engine.is_alive:
            raise CacheClosed("the engine is closed")
        self._send_json({"status": "ok"})

    def _refresh(self) -> None:
        """``{"model": id}``: look at its source again. Requests under way keep the old content."""
        adapter_id = self._body().get("model")
        if not isinstance(adapter_id, str):
            raise BadRequest("model: the id of an adapter")
        future = self.server.service.engine.cache.refresh(adapter_id)
        if not wait([future], REFRESH_S).done:
            raise LoadFailed(f"not there after {REFRESH_S} s; it goes on", adapter_id=adapter_id)
        key = future.result()
        self._send_json({"model": key.adapter_id, "revision": key.revision})

    # -- completions

    def _completions(self) -> None:
        service = self.server.service
        completion = Completion.read(self._body(), service.tokenizer)
        model = completion.model
        job = Job(
            None if model == service.base_name else model,
            completion.prompt,
            completion.max_tokens,
            completion.sampling,
        )
        service.engine.submit(job)
        try:
            # Nothing is sent before the first event, so that an error is told by the status.
            first = self._next_event(job)
            if completion.stream:
                self._stream(completion, job, first)
            else:
                self._answer(completion, job, first)
        finally:
            service.engine.abort(job)  # changes nothing where the job has ended

    def _next_event(self, job: Job) -> int | Finished:
        """Wait for the job's next event, with an eye on the client.

        Raises:
            ConnectionResetError: the client has gone.
            Exception: what the engine says.
        """
        while True:
            now = time.monotonic()
            if now - self._looked_at > LOOK_S:
                self._looked_at = now
                if self._has_gone():
                    raise ConnectionResetError("the client has gone")
            try:
                event = job.events.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if isinstance(event, AdapterCacheError):
                raise event
            if isinstance(event, Exception):
                raise EngineFailed(str(event)) from event
            return event

    def _has_gone(self) -> bool:
        """Whether the connection was ended from the other side; no client says more than it has."""
        looks = select.poll()  # for any number of connections
        looks.register(self.connection, select.POLLIN)
        return bool(looks.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    def _answer(self, completion: Completion, job: Job, event: int | Finished) -> None:
        tokens: list[int] = []
        while not isinstance(event, Finished):
            tokens.append(event)
            event = self._next_event(job)
        text = Text(self.server.service.tokenizer)
        piece = text.add(tokens, is_last=True)
        answer = self._chunk(completion, job, piece, tokens, event.reason)
        cached = {"cached_tokens": job.cached}
        answer["usage"] = {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": len(tokens),
            "total_tokens": job.prompt_tokens + len(tokens),
            "prompt_tokens_details": cached,
        }
        self._send_json(answer)

    def _stream(self, completion: Completion, job: Job, event: int | Finished) -> None:
        """Server-sent events; one that fails half-way says so in its last."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        text = Text(self.server.service.tokenizer)
        try:
            while not isinstance(event, Finished):
                self._send_event(self._chunk(completion, job, text.add([event]), [event], None))
                event = self._next_event(job)
            rest = text.add([], is_last=True)
            self._send_event(self._chunk(completion, job, rest, [], event.reason))
        except OSError:
            raise
        except Exception as error:
            _, kind = status_of(error)
            self._send_event({"error": {"message": str(error), "type": kind}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(
        self, completion: Completion, job: Job, text: str, tokens: list[int], reason: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
        if completion.return_token_ids:
            choice["token_ids"] = tokens
        return {
            "id": f"cmpl-{job.name}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": completion.model,
            "choices": [choice],
        }

    # -- plain HTTP

    def _body(self) -> dict[str, Any]:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise BadRequest("a Content-Length is missing") from None
        if not 0 <= length <= MAX_BODY:
            raise BadRequest(f"a body of {length} bytes; at most {MAX_BODY}")
        try:
            body = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError) as error:  # nested too deep
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        return body

    def _send(self, status: HTTPStatus, body: bytes, content_type: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _send_json(
        self, content: object, status: HTTPStatus = HTTPStatus.OK, **headers: str
    ) -> None:
        self._send(status, json.dumps(content).encode(), "application/json", **headers)

    def _send_error(self, status: HTTPStatus, kind: str, text: str) -> None:
        again = {"Retry_After": "1"} if status in (429, 503) else {}
        error = {"message": text, "type": kind, "code": status.value}
        self._send_json({"error": error}, status, **again)

    def _send_event(self, content: object) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
