"""Adapters by row in the causal language models of Hugging Face transformers.

attach(model, cache)
model.generate(**inputs, adapters=["acme/sql-v3", None, "acme/chat"])
model(**inputs, adapters="acme/sql-v3").logits
detach(model)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from inspect import signature
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from adaptercache.cache import AdapterCache
from adaptercache.errors import AdapterUnsupported
from adaptercache.integrations.calls import Adapters, Calls
from adaptercache.integrations.fit import check_fit
from adaptercache.integrations.projections import Override, projections_of, refuse_compiling

__all__ = ["Attachment", "attach", "detach"]


def attach(model: nn.Module, cache: AdapterCache, *, timeout_s: float | None = None) -> Attachment:
    """Give a model's ``generate`` and ``forward`` the argument ``adapters``.

    It is a list with the adapter id of each row of the batch (None: the base model), or one id for
    all rows. Calls without it run the base model, bit for bit as before. A call leases all the
    adapters that it names, waits for them, and holds them to its end; what fails is raised before
    anything is computed. Beams and returned sequences of a row use its adapter. Weights are left
    alone, and no gradients are recorded where adapters are used.

    Calls may come from several threads; attach and detach from one.

    Args:
        model: a causal language model of transformers, on the cache's device, in its dtype.
        cache: of a layout of this model.
        timeout_s: how long a call waits for its adapters; None: until they are there.

    Raises:
        ValueError: the cache's layout is another model's.
        RuntimeError: adapters are attached to the model, or to a part of it.
        AdapterUnsupported: a model that is compiled, cut or spread over devices, or has an encoder.
    """
    check_fit(model, cache)
    attachment = Attachment(model, cache, timeout_s)
    attachment.put()
    return attachment


def detach(model: nn.Module) -> None:
    """Take off what `attach` put on: the model is as it was before, to the last attribute.

    Raises:
        RuntimeError: nothing is attached, a call with adapters is running, or somebody has replaced
            a ``forward`` since: undo that first.
    """
    forward = model.__dict__.get("forward")
    if not isinstance(forward, _Forward):
        raise RuntimeError(f"no adapters are attached to this {type(model).__name__}")
    forward.attachment.detach()


class Attachment:
    """A model with its cache, until `detach`; as a context manager, until the block's end."""

    def __init__(self, model: nn.Module, cache: AdapterCache, timeout_s: float | None) -> None:
        self.calls = Calls(cache, timeout_s)
        self._overrides: list[Override] = [
            *(kind(model, name, self) for name, kind in _METHODS.items() if hasattr(model, name)),
            *(_Decoder(decoder, "forward", self) for decoder in _inner_models(model)),
            *projections_of(model, cache.layout, self.calls.running),
        ]

    def put(self) -> None:
        for override in self._overrides:
            override.put()

    def detach(self) -> None:
        """See `detach`."""
        with self.calls.stopped():
            if not all(override.is_on_top for override in self._overrides):
                raise RuntimeError("a forward was replaced since attach, or this was detached")
            for override in self._overrides:
                override.take_off()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()


class _Unsaid:
    """A call without the argument, which None is not."""


_UNSAID = _Unsaid()


class _Method(Override):
    """A method of the model."""

    def __init__(self, model: nn.Module, name: str, attachment: Attachment) -> None:
        super().__init__(model, name)
        self.attachment = attachment
        self._calls = attachment.calls
        self._names = tuple(signature(self.inner).parameters)

    def _shape(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
        """Rows and tokens of the call; None: it names neither ids nor embeddings."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        for name in ("inputs", "input_ids", "inputs_embeds"):
            tokens = given.get(name)
            if isinstance(tokens, Tensor) and tokens.dim() >= 2:
                return tokens.shape[0], tokens.shape[1]
        return None

    def _refuse_other_spellings(self, kwargs: Mapping[str, Any]) -> None:
        """Models take any keyword, and drop what they don't know in silence: the base model's
        answer would pass for an adapter's. PEFT spells it ``adapter_names``."""
        for name in ("adapter", "adapter_names"):
            if name in kwargs and name not in self._names:
                raise TypeError(f"{name}: here it is adapters=[...], an id or None for each row")


class _Forward(_Method):
    def __call__(self, *args: Any, adapters: Adapters | _Unsaid = _UNSAID, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            refuse_compiling()
        self._refuse_other_spellings(kwargs)
        leases = self._calls.generating
        if isinstance(adapters, _Unsaid) and leases is None:
            return self.inner(*args, **kwargs)
        shape = self._shape(args, kwargs)
        if shape is None:
            raise TypeError("adapters go by the rows of input_ids or inputs_embeds: give either")
        with ExitStack() as stack:
            if not isinstance(adapters, _Unsaid):
                leases = stack.enter_context(self._calls.leases(adapters, shape[0]))
            assert leases is not None
            stack.enter_context(self._calls.step(leases, shape))
            return self.inner(*args, **kwargs)


class _Generate(_Method):
    def __call__(self, *args: Any, adapters: Adapters = None, **kwargs: Any) -> Any:
        if adapters is None:
            with self._calls.generation(None):
                return self.inner(*args, **kwargs)
        rows, _ = self._shape(args, kwargs) or (1, 0)  # from nothing: one row
        with ExitStack() as stack:
            leases = stack.enter_context(self._calls.leases(adapters, rows))
            stack.enter_context(self._calls.generation(leases))
            return self.inner(*args, **kwargs)


class _Decoder(_Method):
    """The decoder's own ``forward`` takes any keyword, and would drop this one in silence."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "adapters" in kwargs:
            raise TypeError("give adapters to the model that they are attached to")
        self._refuse_other_spellings(kwargs)
        return self.inner(*args, **kwargs)


class _GenerateBatch(_Method):
    """Continuous batching packs many requests into one row, in a thread of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "adapters" in kwargs or self._calls.generating is not None:
            raise AdapterUnsupported(
                "adapters in transformers' continuous batching",
                where="generate_batch",
                remedy="use generate, or add_lora in an engine of yours: see docs/embedding.md",
            )
        return self.inner(*args, **kwargs)


class _GetCompiledCall(_Method):
    """`generate` compiles by itself where a static cache is on a GPU."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_compiling()


_METHODS: Mapping[str, type[_Method]] = {
    "forward": _Forward,
    "generate": _Generate,
    "generate_batch": _GenerateBatch,
    "get_compiled_call": _GetCompiledCall,
}


def _inner_models(model: nn.Module) -> list[nn.Module]:
    """As transformers names it: the model without its head."""
    decoder = getattr(model, "base_model", model)
    return [] if decoder is model else [decoder]
