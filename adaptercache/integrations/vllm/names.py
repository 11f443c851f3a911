"""The adapters that vLLM knows by name, and who is using them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["Names"]


class Names(dict[str, "LoRARequest"]):
    """Takes the place of vLLM's own ``lora_requests``; on the event loop's thread only.

    vLLM looks a name up twice in a request: to see whether it is there, and, some steps of the loop
    later, to take it. A task that has seen a name keeps it until the task ends, so a name that is
    unloaded in between is still found by whoever was promised it, and by nobody else.

    Args:
        names: what is known already.
        on_use: called with the name whenever somebody looks it up.
    """

    def __init__(
        self, names: Mapping[str, LoRARequest], on_use: Callable[[str], None] = lambda name: None
    ) -> None:
        super().__init__(names)
        self._on_use = on_use
        self._used_at = dict.fromkeys(names, 0.0)
        self._seen: WeakKeyDictionary[asyncio.Task[Any], dict[str, LoRARequest]]
        self._seen = WeakKeyDictionary()

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None

    def __getitem__(self, name: str) -> LoRARequest:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, request: LoRARequest) -> None:
        super().__setitem__(name, request)
        self._see(name, request)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._used_at.pop(name, None)

    def get(self, name: Any, default: Any = None) -> Any:
        found = super().get(name)
        if found is None:
            return self._seen_by_this_task().get(name, default)
        self._see(name, found)
        return found

    def coldest(self) -> list[str]:
        """All names, the least recently used first."""
        return sorted(self, key=lambda name: self._used_at.get(name, 0.0))

    def in_use(self) -> set[int]:
        """`id` of the requests that running tasks have seen."""
        return {id(request) for seen in list(self._seen.values()) for request in seen.values()}

    def peek(self, name: str) -> LoRARequest | None:
        """What is known by a name; no use of it."""
        return super().get(name)

    def _see(self, name: str, request: LoRARequest) -> None:
        self._used_at[name] = time.monotonic()
        self._seen_by_this_task()[name] = request
        self._on_use(name)

    def _seen_by_this_task(self) -> dict[str, LoRARequest]:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs
            task = None
        return self._seen.setdefault(task, {}) if task is not None else {}
