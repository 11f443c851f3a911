"""One vLLM API server and the adapters that it has open: opened, checked again, and unloaded.

Unloading a name is always safe: who has been promised it keeps it (`Names`), what runs or waits in
the engine keeps its `HeldRequest`, and the folder is held until that has gone and the engine has
answered a question that was asked after it: whatever was sent before it, aborts included, has been
dealt with then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest
from vllm.exceptions import GracefulHTTPError

from adaptercache.adapter_files import AdapterFiles
from adaptercache.errors import (
    AdapterCacheError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    CapacityError,
)
from adaptercache.held_folder import HeldFolder
from adaptercache.integrations.vllm.held_request import HeldRequest, held_request
from adaptercache.integrations.vllm.names import Names

__all__ = ["Serving"]

log = logging.getLogger(__name__)

REFUSED = (AdapterInvalid, AdapterUnsupported, CapacityError)
GIVE_UP_S = 2.0  # waiting for what was unloaded to be let go of


@dataclass(eq=False)
class Hold:
    """The folder of one `HeldRequest`."""

    folder: HeldFolder
    checked_at: float
    is_checking: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Serving:
    """On the event loop's thread, but for `make_room`.

    Args:
        models: vLLM's ``OpenAIServingModels``; its ``lora_requests`` are watched from now on.
        engine: vLLM's engine client.
        revision_ttl_s: how old an answer of the source may be when an adapter is used; 0: any age.
        threads: how many adapters are opened at once.
        open_files: makes the `AdapterFiles`, given what to call when room is short.
    """

    def __init__(
        self,
        models: Any,
        engine: Any,
        *,
        revision_ttl_s: float,
        threads: int,
        open_files: Callable[[Callable[[], bool]], AdapterFiles],
    ) -> None:
        self._models, self._engine = models, engine
        self._revision_ttl_s = revision_ttl_s
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(threads, "adaptercache-open")
        self._unloading = asyncio.Lock()
        self._holds: dict[int, Hold] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.unloaded = {"room": 0, "republished": 0}
        self.files = open_files(self.make_room)
        self._names = models.lora_requests = Names(models.lora_requests, self._used)
        self._start(self._close_at_the_end())

    @property
    def num_loaded(self) -> int:
        """Adapters of ours that vLLM knows by name."""
        return sum(isinstance(request, HeldRequest) for request in self._names.values())

    async def _close_at_the_end(self) -> None:
        """Loops cancel their tasks when they end. The process then waits for threads of ours, which
        may be waiting for a store that hangs."""
        try:
            await self._loop.create_future()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self.files.close()

    # -- a name that vLLM doesn't know

    async def open(self, name: str) -> HeldRequest | None:
        """The adapter of that name, for vLLM to load; None: the source has none.

        Raises:
            GracefulHTTPError: the status for the client: 422, it is refused; 503, try again.
        """
        opening = self._loop.run_in_executor(self._threads, self.files.open, name)
        try:
            folder = await asyncio.shield(opening)
        except asyncio.CancelledError:  # the client has gone; the thread goes on
            opening.add_done_callback(_release)
            raise
        except AdapterNotFound as error:
            log.info("%s", error)
            return None
        except REFUSED as error:
            log.warning("refused: %s", error)
            raise GracefulHTTPError(str(error), HTTPStatus.UNPROCESSABLE_ENTITY) from error
        except AdapterCacheError as error:
            log.warning("not loaded: %s", error)
            text = f"adapter {name!r} can't be loaded now; try again"  # the cause is ours alone
            raise GracefulHTTPError(text, HTTPStatus.SERVICE_UNAVAILABLE) from error
        log.info("adapter %r is %s at revision %s", name, folder.path, folder.revision)
        return self._held(name, folder)

    def _held(self, name: str, folder: HeldFolder) -> HeldRequest:
        key: list[int] = []
        request = held_request(name, folder.path, lambda: self._ended(key[0]))
        key.append(id(request))
        self._holds[id(request)] = Hold(folder, time.monotonic())
        return request

    # -- a name that nobody can ask for any more

    def _ended(self, key: int) -> None:
        """In any thread. Taken out at once: another object may soon have that `id`."""
        hold = self._holds.pop(key)
        with suppress(RuntimeError):  # the loop has ended, and so will the process
            self._loop.call_soon_threadsafe(lambda: self._start(self._let_go(hold)))

    async def _let_go(self, hold: Hold) -> None:
        try:
            await self._engine.list_loras()
        except Exception as error:  # the engine is dead: it reads nothing
            log.debug("the engine doesn't answer: %r", error)
        hold.folder.release()
        hold.ended.set()

    def make_room(self) -> bool:
        """Unload the adapter that was not used for longest, of those that nobody uses. Returns
        whether one was. For any thread but the loop's."""
        waiting = asyncio.run_coroutine_threadsafe(self._unload_coldest(), self._loop)
        try:
            return waiting.result(2 * GIVE_UP_S)
        except concurrent.futures.TimeoutError:  # others unload, or the loop has ended
            return False

    async def _unload_coldest(self) -> bool:
        async with self._unloading:
            in_use = self._in_use()
            for name in self._names.coldest():
                request = self._names.peek(name)
                if isinstance(request, HeldRequest) and id(request) not in in_use:
                    ended = self._holds[id(request)].ended
                    del request
                    if await self._unload(name, "room"):
                        with suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(ended.wait(), GIVE_UP_S)
                        return True
            return False

    def _in_use(self) -> set[int]:
        """`id` of the requests that somebody may need, as far as that can be seen."""
        states = getattr(getattr(self._engine, "output_processor", None), "request_states", {})
        running = {id(getattr(state, "lora_request", None)) for state in states.values()}
        return running | self._names.in_use()

    async def _unload(self, name: str, why: str) -> bool:
        """Through vLLM's own way, in a task of its own: a task that looks a name up keeps it."""
        asked = UnloadLoRAAdapterRequest(lora_name=name)
        answer = await self._loop.create_task(self._models.unload_lora_adapter(asked))
        is_done = isinstance(answer, str)  # else somebody else has unloaded it
        if is_done:
            self.unloaded[why] += 1
            log.info("adapter %r: unloaded (%s)", name, why)
        return is_done

    # -- a name that was published again

    def _used(self, name: str) -> None:
        """Look whether the source has something newer, if nobody has for long."""
        request = self._names.peek(name)
        hold = self._holds.get(id(request)) if isinstance(request, HeldRequest) else None
        if hold is None or hold.is_checking or not self._revision_ttl_s:
            return
        if time.monotonic() - hold.checked_at >= self._revision_ttl_s:
            hold.is_checking = True
            self._start(self._check(name, hold))

    async def _check(self, name: str, hold: Hold) -> None:
        try:
            look = partial(self.files.newer, hold.folder)
            fresh = await self._loop.run_in_executor(self._threads, look)
        except AdapterCacheError as error:
            if self._names.peek(name) is not None:
                log.warning("what is loaded goes on serving: %s", error)
            else:  # perhaps by us: the newer one wanted its room
                text = "adapter %r is not loaded any more; looking for a newer one failed: %s"
                log.warning(text, name, error)
            fresh = None
        hold.checked_at, hold.is_checking = time.monotonic(), False
        if fresh is None:
            return
        with fresh:  # on the disk and found sound; the next request of the name opens it
            request = self._names.peek(name)
            if request is not None and self._holds.get(id(request)) is hold:
                del request
                await self._unload(name, "republished")

    def _start(self, act: Any) -> None:
        task = self._loop.create_task(act)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _release(opening: asyncio.Future[HeldFolder]) -> None:
    """What was opened for a client who has gone."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().release()
