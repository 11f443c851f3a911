"""vLLM's adapters through the disk tier: see docs/vllm.md.

vLLM finds these two functions by their entry points. Nothing else is public.
"""

from __future__ import annotations

from typing import Any

__all__ = ["endpoint", "install"]


def install() -> None:
    """The plugin ``adaptercache`` of the group ``vllm.general_plugins``."""
    from adaptercache.integrations.vllm.resolver import install_resolver

    install_resolver()


def endpoint() -> Any:
    """The plugin ``adaptercache`` of the group ``vllm.endpoint_plugins``."""
    from adaptercache.integrations.vllm.api_server import Endpoint

    return Endpoint()
