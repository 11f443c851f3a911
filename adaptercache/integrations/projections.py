"""The projections of a model that carry LoRA: each calls what it was, and adds its adapters' term.

A projection's ``forward`` is replaced on the instance, and everything else of the model is left as
it is. Modules that share their input (q, k and v; gate and up) go in one call of `add_lora`: the
first of them that is called computes all of them, and the others hand out what is there if they
are called with that same input. A model that gives them other inputs is served one by one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import update_wrapper
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from adaptercache.errors import AdapterUnsupported
from adaptercache.kernels import LoraBatch, add_lora
from adaptercache.kernels.warm import SHARE_THEIR_INPUT
from adaptercache.layout import LoraLayout, Site

__all__ = ["Override", "Projection", "Running", "Step", "projections_of", "refuse_compiling"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def refuse_compiling() -> NoReturn:
    """Called where a compiler traces. It can't trace this, so it is called for real."""
    raise AdapterUnsupported(
        "torch.compile on a model that adapters are attached to",
        remedy="run the model without it (generate: disable_compile=True), or detach first",
    )


class Override(ABC):
    """A callable that stands on an instance in the place of one of its methods."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        inner = getattr(owner, name)
        update_wrapper(self, inner)  # transformers reads the signature
        self._owner, self._name = owner, name
        self._shadowed = owner.__dict__.get(name)
        self.inner: Callable[..., Any] = inner

    def put(self) -> None:
        setattr(self._owner, self._name, self)

    @property
    def is_on_top(self) -> bool:
        """Whether nobody has put another over it."""
        return self._owner.__dict__.get(self._name) is self

    def take_off(self) -> None:
        """As it was before, to the last attribute."""
        if self._shadowed is None:
            del self._owner.__dict__[self._name]
        else:
            self._owner.__dict__[self._name] = self._shadowed

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In the method's place."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A copy would go on calling the modules of the original.
        raise AdapterUnsupported(
            "a copy or a pickle of a model that adapters are attached to", remedy="detach first"
        )


class _Ahead(NamedTuple):
    """A projection's output that was computed before it was called."""

    x: Tensor
    version: int
    y: Tensor


class Step:
    """One forward of the model with adapters.

    Args:
        shape: rows of the batch, tokens a row.
        new_batch: of so many tokens a row; the batches live as long as the step.
        launching: held while kernels are launched.

    Raises:
        What making the first batch raises.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        new_batch: Callable[[int], LoraBatch],
        launching: threading.Lock,
    ) -> None:
        self.shape = shape
        self.launching = launching
        self.ahead: dict[Projection, _Ahead] = {}
        self._new_batch = new_batch
        self._batches = {shape[1]: new_batch(shape[1])}

    def batch(self, shape: torch.Size) -> LoraBatch | None:
        """For an input of this shape, which runs through the tokens row by row; None: it doesn't.

        Sizes of 1 beside these don't matter. It may have other tokens than the model was given, as
        where keys and values of all that went before are made anew.
        """
        rows, tokens = self.shape
        if shape != self.shape and [size for size in shape if size != 1] != [rows * tokens]:
            if shape[:1] != (rows,):
                return None
            tokens = shape[1:].numel()
        if tokens not in self._batches:
            self._batches[tokens] = self._new_batch(tokens)
        return self._batches[tokens]

    def end(self) -> None:
        """What was computed for nothing is not computed ahead again."""
        for projection in self.ahead:
            projection.alone()


class Running(threading.local):
    """The step that the model is in, of each thread; None: the base model's."""

    step: Step | None = None


class Projection(Override):
    """A linear module at a site of the layout.

    Args:
        module: what it was.
        site: which one.
        running: of the model's threads.
    """

    def __init__(self, module: nn.Module, site: Site, running: Running) -> None:
        super().__init__(module, "forward")
        self.site = site
        self.group: tuple[Projection, ...] = (self,)
        self._running = running

    def alone(self) -> None:
        """From now on, all of its group are served one by one."""
        for projection in self.group:
            projection.group = (projection,)

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            refuse_compiling()
        step = self._running.step
        if step is None:
            return self.inner(x)  # type: ignore[no-any-return]
        ahead = step.ahead.pop(self, None)
        if ahead is not None:
            if ahead.x is x and ahead.version == _version(x):
                return ahead.y
            self.alone()
        group = self.group  # another thread may dissolve it
        outputs = dict(zip(group, self._adapted(group, x, step), strict=True))
        y = outputs.pop(self)
        for projection, output in outputs.items():
            step.ahead[projection] = _Ahead(x, _version(x), output)
        return y

    def _adapted(self, group: tuple[Projection, ...], x: Tensor, step: Step) -> list[Tensor]:
        """The outputs of a group, adapters and all."""
        batch = step.batch(x.shape[:-1])
        if batch is None:
            raise AdapterUnsupported(
                f"a model that gives {self.site.path} an input of {list(x.shape)}, where the batch "
                f"is {step.shape[0]} rows of {step.shape[1]} tokens",
                where=self.site.path,
                remedy="leave it out of the layout's targets",
            )
        outputs = [projection.inner(x) for projection in group]
        if not all(isinstance(y, Tensor) for y in outputs):
            _check_unadapted(group, batch)
            return outputs
        flat = [y.reshape(-1, y.shape[-1]) for y in outputs]
        names = tuple(projection.site.module for projection in group)
        x = x.reshape(-1, x.shape[-1])
        with ExitStack() as stack:
            if x.is_cuda:
                # Buffers may be made that outlive this, and inference mode would freeze them.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(step.launching)
            add_lora(flat, x, batch, names, self.site.layer)
        return [y.view(output.shape) for y, output in zip(flat, outputs, strict=True)]


def _check_unadapted(group: tuple[Projection, ...], batch: LoraBatch) -> None:
    """For what is a linear module by its class, and a router by what it gives."""
    slots = [slot for slot, _ in batch.segments if slot >= 0]
    for projection in group:
        site = projection.site
        if batch.stack.rank[slots, batch.stack.site(site.layer, site.module)].any():
            raise AdapterUnsupported(
                f"LoRA on a module that does not give one tensor: {site.path}",
                where=site.path,
                remedy="train without it",
            )


def _version(x: Tensor) -> int:
    """Grows when the tensor is changed in place; inference mode doesn't count."""
    return -1 if x.is_inference() else x._version


def projections_of(model: nn.Module, layout: LoraLayout, running: Running) -> list[Projection]:
    """One a site of the layout, in its order, grouped, and not put yet."""
    found = {
        site.path: Projection(model.get_submodule(site.path), site, running)
        for site in layout.sites
    }
    groups: dict[tuple[str, tuple[str, ...], int], list[Projection]] = {}
    for path, projection in found.items():
        parent, _, leaf = path.rpartition(".")
        for names in SHARE_THEIR_INPUT:
            if leaf in names:
                key = (parent, names, projection.site.in_features)
                groups.setdefault(key, []).append(projection)
    for group in groups.values():
        for projection in group:
            projection.group = tuple(group)
    return [*found.values()]
