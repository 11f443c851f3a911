"""Whether a model and a cache belong together."""

from __future__ import annotations

from typing import Any

from torch import nn

from adaptercache.base_model import BaseModel
from adaptercache.cache import AdapterCache
from adaptercache.errors import AdapterUnsupported
from adaptercache.integrations.projections import Override

__all__ = ["check_fit"]

_FROM_MODEL = "make the cache's layout with LoraLayout.from_model(model)"


def check_fit(model: nn.Module, cache: AdapterCache) -> None:
    """Look at everything before anything is changed.

    Raises:
        ValueError: the cache's layout is another model's.
        RuntimeError: adapters are attached to the model, or to a part of it.
        AdapterUnsupported: a kind of model that `attach` can't serve.
    """
    for path, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), Override):
            raise RuntimeError(f"adapters are attached to {path or 'the model'}: detach first")
        _check_uncompiled(path, module)
    _check_whole(model, cache)
    _check_sites(model, cache)


def _check_uncompiled(path: str, module: nn.Module) -> None:
    is_wrapper = type(module).__name__ == "OptimizedModule"  # without importing the compiler
    if is_wrapper or module._compiled_call_impl is not None:
        raise AdapterUnsupported(
            "torch.compile on a model that adapters are attached to",
            where=path or type(module).__name__,
            remedy="attach to the model as it is without torch.compile",
        )


def _check_whole(model: nn.Module, cache: AdapterCache) -> None:
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise AdapterUnsupported(
            "an encoder-decoder model", where=type(model).__name__, remedy="a causal language model"
        )
    if cache.layout.tp_size > 1 or (getattr(model, "_tp_size", None) or 1) > 1:
        raise AdapterUnsupported(
            "a model cut among GPUs (tensor parallelism)",
            where=type(model).__name__,
            remedy="call add_lora in an engine of yours: see docs/embedding.md",
        )


def _check_sites(model: nn.Module, cache: AdapterCache) -> None:
    base = BaseModel.from_model(model)
    for site in cache.layout.sites:
        module = base.modules.get(site.path)
        shape = (site.out_features, site.in_features)
        if module is None or module.kind not in ("linear", "conv1d") or module.shape != shape:
            found = "nothing" if module is None else f"{module.kind} {list(module.shape)}"
            raise ValueError(
                f"the cache's layout has {site.path} {list(shape)}, the model has {found} there: "
                f"{_FROM_MODEL}, of the plain base before PEFT wraps it"
            )
        _check_weight(site.path, model.get_submodule(site.path).weight, cache)


def _check_weight(path: str, weight: Any, cache: AdapterCache) -> None:
    arena = cache._gpu.stack.arena
    if weight.device != arena.device:
        raise AdapterUnsupported(
            f"a projection on {weight.device} beside an arena on {arena.device}",
            where=path,
            remedy="put the whole model and the cache on one device, without offloading",
        )
    # A quantised weight is of another dtype than what goes in and out.
    if weight.is_floating_point() and weight.itemsize > 1 and weight.dtype != arena.dtype:
        raise AdapterUnsupported(
            f"a model in {weight.dtype} beside an arena in {arena.dtype}",
            where=path,
            remedy=_FROM_MODEL,
        )
