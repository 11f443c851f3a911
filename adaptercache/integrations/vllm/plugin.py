"""The two plugins that vLLM loads: one brings the resolver, the other ties it to the API server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY
from vllm import envs
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from adaptercache.adapter_files import AdapterFiles
from adaptercache.base_model import BaseModel
from adaptercache.integrations.vllm.fitness import Fitness
from adaptercache.integrations.vllm.held_request import HeldRequest
from adaptercache.integrations.vllm.metrics import ServingCollector
from adaptercache.integrations.vllm.serving import Serving
from adaptercache.integrations.vllm.settings import PREFIX, Settings
from adaptercache.integrations.vllm.telling_apart import kv_tells_apart, tell_apart

__all__ = ["Endpoint", "Resolver", "install_resolver"]

NAME = "adaptercache"

log = logging.getLogger(__name__)


class Resolver(LoRAResolver):  # type: ignore[misc]
    """vLLM asks it for names that it doesn't know, in the API server only."""

    def __init__(self) -> None:
        self.serving: Serving | None = None

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> HeldRequest | None:
        """See `Serving.open`."""
        return await self.serving.open(lora_name) if self.serving is not None else None


_resolver = Resolver()


def install_resolver() -> None:
    """For ``vllm.general_plugins``; called in each of vLLM's processes.

    Raises:
        RuntimeError, ValueError: the environment doesn't say what it must.
    """
    if Settings.from_environment(os.environ) is None:
        return
    if NAME not in (envs.VLLM_PLUGINS or ()):
        raise RuntimeError(f"{PREFIX}SOURCE is set: set VLLM_PLUGINS={NAME}, too")
    _log_as_vllm_does()
    tell_apart()
    if NAME not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(NAME, _resolver)


class Endpoint:
    """For ``vllm.endpoint_plugins``: vLLM hands it the API server's state. It has no routes."""

    name = NAME
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Nothing to attach."""

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Start to serve adapters.

        Raises:
            RuntimeError: vLLM was started without what it needs for that.
            AdapterCacheError: the base model can't be laid out.
            ValueError, OSError: as `AdapterFiles` does.
        """
        settings = Settings.from_environment(os.environ)
        if settings is None or engine_client is None:  # a server that only renders prompts
            return
        lora = engine_client.vllm_config.lora_config
        if lora is None:
            raise RuntimeError(f"{PREFIX}SOURCE is set: start vLLM with --enable-lora")
        if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            raise RuntimeError(
                f"{PREFIX}SOURCE is set: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, too"
            )
        if engine_client.vllm_config.cache_config.enable_prefix_caching and not kv_tells_apart():
            raise RuntimeError("a republished adapter would meet KV of the old one in this vLLM")
        model = engine_client.vllm_config.model_config
        base = await asyncio.to_thread(BaseModel.from_config, model.hf_config.to_dict())

        def open_files(make_room: Callable[[], bool]) -> AdapterFiles:
            return AdapterFiles(
                settings.source,
                base,
                disk_dir=settings.disk_dir,
                disk_bytes=settings.disk_bytes,
                check=Fitness(lora, model),
                make_room=make_room,
                wait_s=settings.wait_s,
            )

        _resolver.serving = Serving(
            state.openai_serving_models,
            engine_client,
            revision_ttl_s=settings.revision_ttl_s,
            threads=settings.threads,
            open_files=open_files,
        )
        _expose(_resolver.serving)
        log.info("adapters come from %s through %s", settings.source, settings.disk_dir)


def _expose(serving: Serving) -> None:
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        log.warning("PROMETHEUS_MULTIPROC_DIR is set: vLLM's /metrics can't show ours")
    REGISTRY.register(ServingCollector(serving))


def _log_as_vllm_does() -> None:
    """Our lines beside vLLM's, in its format, unless somebody has set up our loggers. vLLM sets its
    own up later than this: so we have none of its handlers, but their logger above ours."""
    ours = logging.getLogger("adaptercache")
    if all(isinstance(handler, logging.NullHandler) for handler in ours.handlers):
        ours.parent = logging.getLogger("vllm")
