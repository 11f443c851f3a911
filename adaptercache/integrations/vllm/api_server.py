"""The plugin that vLLM hands its API server's state: adapters are served from here on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY
from vllm import envs

from adaptercache.adapter_files import AdapterFiles
from adaptercache.base_model import BaseModel
from adaptercache.integrations.vllm.fitness import Fitness
from adaptercache.integrations.vllm.metrics import ServingCollector
from adaptercache.integrations.vllm.resolver import NAME, resolver
from adaptercache.integrations.vllm.serving import Serving
from adaptercache.integrations.vllm.settings import PREFIX, Settings
from adaptercache.integrations.vllm.telling_apart import kv_tells_apart

__all__ = ["Endpoint"]

log = logging.getLogger(__name__)


class Endpoint:
    """For ``vllm.endpoint_plugins``. It has no routes."""

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
        config = engine_client.vllm_config
        _check(config)
        model = config.model_config
        base = await asyncio.to_thread(BaseModel.from_config, model.hf_config.to_dict())

        def open_files(make_room: Callable[[], bool]) -> AdapterFiles:
            return AdapterFiles(
                settings.source,
                base,
                disk_dir=settings.disk_dir,
                disk_bytes=settings.disk_bytes,
                check=Fitness(config.lora_config, model),
                make_room=make_room,
                wait_s=settings.wait_s,
            )

        resolver.serving = Serving(
            state.openai_serving_models,
            engine_client,
            revision_ttl_s=settings.revision_ttl_s,
            threads=settings.threads,
            open_files=open_files,
        )
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            log.warning("PROMETHEUS_MULTIPROC_DIR is set: vLLM's /metrics can't show ours")
        REGISTRY.register(ServingCollector(resolver.serving))
        log.info("adapters come from %s through %s", settings.source, settings.disk_dir)


def _check(config: Any) -> None:
    """Whether vLLM was started with what we need. Raises RuntimeError."""
    if config.lora_config is None:
        raise RuntimeError(f"{PREFIX}SOURCE is set: start vLLM with --enable-lora")
    if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        raise RuntimeError(f"{PREFIX}SOURCE needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 beside it")
    if config.cache_config.enable_prefix_caching and not kv_tells_apart():
        raise RuntimeError("a republished adapter would meet KV of the old one in this vLLM")
