"""What vLLM carries an adapter's name and path around in, and how we see that it still does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

__all__ = ["HeldRequest", "held_request"]


class HeldRequest(LoRARequest, weakref=True):  # type: ignore[call-arg,misc]
    """A `LoRARequest` that can be watched. To vLLM's processes it looks like any other.

    The API server makes one an adapter, keeps it by its name, and hands that very object on with
    each request of the name, until the request has ended. So as long as anybody may still ask the
    engine for the path, this object is alive, and when it has gone nobody can.
    """

    def __copy__(self) -> HeldRequest:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldRequest:
        return self


def held_request(name: str, path: Path, on_end: Callable[[], None]) -> HeldRequest:
    """For an adapter in this folder; vLLM gives it its number.

    Args:
        on_end: called once it has gone, in any thread.
    """
    request = HeldRequest(lora_name=name, lora_int_id=1, lora_path=str(path))
    weakref.finalize(request, on_end).atexit = False
    return request
