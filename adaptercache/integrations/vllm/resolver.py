"""The plugin that vLLM loads in each of its processes: the resolver, which the API server asks."""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from adaptercache.integrations.vllm.settings import PREFIX, Settings
from adaptercache.integrations.vllm.telling_apart import tell_apart

if TYPE_CHECKING:
    from adaptercache.integrations.vllm.serving import Serving

__all__ = ["NAME", "Resolver", "install_resolver", "resolver"]

NAME = "adaptercache"


class Resolver(LoRAResolver):  # type: ignore[misc]
    """vLLM asks it for names that it doesn't know, in the API server only."""

    def __init__(self) -> None:
        self.serving: Serving | None = None

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """See `Serving.open`."""
        return await self.serving.open(lora_name) if self.serving is not None else None


resolver = Resolver()
"""The one of this process; the endpoint's plugin gives it something to serve."""


def install_resolver() -> None:
    """For ``vllm.general_plugins``; called in each of vLLM's processes.

    Raises:
        RuntimeError, ValueError: the environment doesn't say what it must.
    """
    settings = Settings.from_environment(os.environ)
    if settings is None:
        return
    if NAME not in (envs.VLLM_PLUGINS or ()):
        raise RuntimeError(f"{PREFIX}SOURCE is set: set VLLM_PLUGINS={NAME}, too")
    _log_as_vllm_does()
    if multiprocessing.parent_process() is None:  # the others would say the same again
        _say_what_is_wrong(settings)
    tell_apart()
    if NAME not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(NAME, resolver)


def _say_what_is_wrong(settings: Settings) -> None:
    """An API server stops at it, but once the model is loaded, and that may take long. Offline use
    of vLLM comes by here, too, and needs none of it: so nothing is raised."""
    try:
        settings.check()
    except ValueError as error:  # a warning, because vLLM sets logging up later than this
        warnings.warn(f"no adapter can be served: {error}", RuntimeWarning, stacklevel=2)


def _log_as_vllm_does() -> None:
    """Our lines beside vLLM's, in its format, unless somebody has set up our loggers. vLLM sets its
    own up later than this: so we have none of its handlers, but their logger above ours."""
    ours = logging.getLogger("adaptercache")
    if all(isinstance(handler, logging.NullHandler) for handler in ours.handlers):
        ours.parent = logging.getLogger("vllm")
