"""OpenAI's completions for the fleet of ray_fleet.py: the deployment in front of its replicas."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from adaptercache import DirectorySource
from serve_http import status_of
from serve_request import BadRequest, Completion, Text

__all__ = ["MOST_REPLICAS", "Gateway"]

BASE = "base"
TRIES = 3  # of a request that meets a replica that dies
MOST_REPLICAS = 8


class Gateway:
    """OpenAI's completions. ``model`` in a body names the adapter; the router is told by
    ``multiplexed_model_id``."""

    def __init__(self, engine: Any, tokenizer: Any, adapters: Path, wanted: Path) -> None:
        self._engine, self._tokenizer, self._wanted = engine, tokenizer, wanted
        self._source = DirectorySource(adapters)

    async def __call__(self, request: Request) -> Response:
        try:
            match request.method, request.url.path:
                case "POST", "/v1/completions":
                    return await self._complete(await _body(request))
                case "POST", "/v1/prefetch":
                    return await self._prefetch(await _body(request))
                case "GET", "/v1/models":
                    names = [BASE, *sorted(self._source.ids())]
                    return JSONResponse({"object": "list", "data": [{"id": n} for n in names]})
                case "POST", "/fleet":
                    return self._scale(await _body(request))
                case "GET", "/fleet":
                    said = self._engine.broadcast("describe")
                    found = await said.results_async(timeout_s=10, return_exceptions=True)
                    return JSONResponse([one for one in found if isinstance(one, dict)])
                case "GET", "/health":
                    return JSONResponse({"status": "ok"})
            return _failed(404, "not_found", f"no {request.url.path} here")
        except Exception as error:  # before any part of an answer was sent
            cause = getattr(error, "cause", error)  # as it was in the replica
            return _failed(*status_of(cause), str(cause))

    async def _prefetch(self, body: dict[str, Any]) -> Response:
        """``{"model": id}``: it will be wanted soon. The hint goes where its requests will."""
        adapter_id = body.get("model")
        if not isinstance(adapter_id, str) or adapter_id in ("", BASE):
            raise BadRequest("model: the id of an adapter")
        await self._engine.options(multiplexed_model_id=adapter_id).prefetch.remote([adapter_id])
        return JSONResponse({"model": adapter_id})

    def _scale(self, body: dict[str, Any]) -> Response:
        replicas = body.get("replicas")
        if not isinstance(replicas, int) or not 1 <= replicas <= MOST_REPLICAS:
            raise BadRequest(f"replicas {replicas!r}: 1 to {MOST_REPLICAS}")
        self._wanted.write_text(str(replicas))
        return JSONResponse({"replicas": replicas})

    async def _complete(self, body: dict[str, Any]) -> Response:
        """Greedy tokens are the same everywhere, so who has sent nothing yet may begin again where
        a replica has died; Serve no longer offers that one."""
        asked = Completion.read(body, self._tokenizer)
        for left in reversed(range(TRIES)):
            try:
                return await self._try(asked)
            except RayActorError:
                if not left:
                    raise
        raise AssertionError("TRIES is 1 or more")

    async def _try(self, asked: Completion) -> Response:
        call = self._engine.options(
            stream=True,
            method_name="complete",
            multiplexed_model_id="" if asked.model == BASE else asked.model,
        )
        events = call.remote(asked.prompt, asked.max_tokens, asked.sampling)
        headers = {"x-replica": await anext(events)}  # nothing is sent before: errors have a status
        if asked.stream:
            return StreamingResponse(
                self._stream(asked, events), media_type="text/event-stream", headers=headers
            )
        *tokens, reason = [event async for event in events]
        piece = Text(self._tokenizer).add(tokens, is_last=True)
        return JSONResponse(_chunk(asked, piece, tokens, reason), headers=headers)

    async def _stream(self, asked: Completion, events: AsyncIterator[Any]) -> AsyncIterator[str]:
        """Server-sent events; one that fails half-way says so in its last."""
        text = Text(self._tokenizer)
        try:
            async for event in events:
                is_last = isinstance(event, str)
                tokens, reason = ([], event) if is_last else ([event], None)
                yield _event(_chunk(asked, text.add(tokens, is_last), tokens, reason))
        except Exception as error:
            cause = getattr(error, "cause", error)
            yield _event({"error": {"message": str(cause), "type": status_of(cause)[1]}})
        yield "data: [DONE]\n\n"


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _chunk(asked: Completion, text: str, tokens: list[int], reason: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
    if asked.return_token_ids:
        choice["token_ids"] = tokens
    return {"object": "text_completion", "model": asked.model, "choices": [choice]}


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _failed(status: int, kind: str, text: str) -> Response:
    return JSONResponse({"error": {"message": text, "type": kind, "code": status}}, status)
