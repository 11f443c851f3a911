"""The base model as a table: the path of every weight matrix, its kind and its shape.

An adapter's files say nothing about the model that they belong to, so the table is what each
tensor of an adapter is checked against. It comes from a ``config.json`` (no weights are read),
from a live model, or from a table that was made elsewhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from adaptercache.base_module import (
    LARGEST_SIZE,
    MOST_LAYERS,
    BaseModule,
    ModuleKind,
    broken_base,
)
from adaptercache.errors import AdapterUnsupported
from adaptercache.families import modules_by_config
from adaptercache.regular_file import open_regular

if TYPE_CHECKING:
    import torch

__all__ = ["BaseModel", "BaseModule", "ModuleKind"]

_LARGEST_CONFIG = 4 << 20
_COUNTS = re.compile(r"(layers?|blocks|depths?|experts|labels)$", re.ASCII)
"""Fields by which a model class repeats its modules, or a config its lines."""

_MOST_CALLS = 1_000_000
"""Of torch, to lay a model out: seconds. The models with most modules take a tenth of it."""


@dataclass(frozen=True)
class BaseModel:
    """The weight matrices of a base model by path (``model.layers.0.self_attn.q_proj``).

    Immutable, so threads may share it. A bare parameter called ``weight`` goes by its module's
    path, any other by its own name after the module's path.

    Args:
        modules: kind and shape by path.
        model_type: as transformers names it; "" where unknown.
        dtype: of the weights, by torch's name (``"bfloat16"``); "" where unknown.
        heads: query heads and KV heads of a layer's attention; None where unknown.
    """

    modules: Mapping[str, BaseModule]
    model_type: str = ""
    dtype: str = ""
    heads: tuple[int, int] | None = None

    @classmethod
    def from_table(
        cls, table: Mapping[str, Mapping[str, object]], heads: tuple[int, int] | None = None
    ) -> BaseModel:
        """From ``{path: {"kind": ..., "out_in" or "shape": [...], "is_transposed": ...}}``.

        Raises:
            AdapterInvalid: an entry is not of that form.
        """
        return cls({path: _table_entry(path, entry) for path, entry in table.items()}, heads=heads)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> BaseModel:
        """From a Hugging Face ``config.json``: its content, its path, or its directory's.

        Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2, Gemma 3 (text) and Phi-3 are built in. Any
        other model is laid out by transformers, without memory for its weights, where transformers
        is installed. Code that comes with a model is never run.

        Raises:
            AdapterInvalid: a field is missing or makes no sense; ``where`` names it.
            AdapterUnsupported: the model is not built in and transformers doesn't know it.
        """
        content = config if isinstance(config, Mapping) else _read_config(Path(config))
        if "peft_type" in content or "lora_alpha" in content:
            raise broken_base(
                "config", "an adapter's config", "that of its base_model_name_or_path"
            )
        model_type = content.get("model_type")
        if not isinstance(model_type, str):
            raise broken_base("model_type", model_type, "a string")
        modules: Mapping[str, BaseModule] | None = modules_by_config(model_type, content)
        if modules is None:
            modules = _through_transformers(content, model_type).modules
        dtype = str(content.get("dtype") or content.get("torch_dtype") or "")
        return cls(modules, model_type, dtype.removeprefix("torch."), _heads(content.get))

    @classmethod
    def from_model(cls, model: torch.nn.Module) -> BaseModel:
        """From a live module: the plain base, before PEFT wraps it. Reads shapes, no weights."""
        modules = {
            path: entry
            for prefix, module in model.named_modules()
            for path, entry in _entries_of(prefix, module)
        }
        config = getattr(model, "config", None)
        dtypes = (str(weight.dtype) for weight in model.parameters() if weight.is_floating_point())
        return cls(
            modules,
            str(getattr(config, "model_type", "")),
            next(dtypes, "").removeprefix("torch."),
            _heads(lambda key: getattr(config, key, None)),
        )


def _heads(field: Callable[[str], Any]) -> tuple[int, int] | None:
    """By a config's fields, of the text model's where there are several."""
    text = field("text_config")
    if text is not None:
        field = text.get if isinstance(text, Mapping) else lambda key: getattr(text, key, None)
    names = ("num_attention_heads", "n_head", "num_key_value_heads")
    heads, gpt2_heads, kv_heads = (
        value if type(value) is int and value > 0 else 0 for value in map(field, names)
    )
    heads = heads or gpt2_heads
    return (heads, kv_heads or heads) if heads else None


def _table_entry(path: str, entry: Mapping[str, object]) -> BaseModule:
    kind = entry.get("kind")
    shape = entry.get("out_in", entry.get("shape"))
    sound = isinstance(shape, (list, tuple)) and all(
        type(n) is int and 0 < n <= LARGEST_SIZE for n in shape
    )
    if kind not in get_args(ModuleKind) or not sound:
        raise broken_base(path, _shown(entry), f"one of {get_args(ModuleKind)} and a shape")
    return BaseModule(
        cast(ModuleKind, kind),
        tuple(cast("list[int]", shape)),
        bool(entry.get("is_transposed", False)),
    )


def _shown(entry: Mapping[str, object]) -> str:
    try:
        return f"{dict(entry)!r:.200}"
    except ValueError:  # a number that Python won't write out
        return "a number of thousands of digits"


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists() and (adapter := path / "adapter_config.json").exists():
        file = adapter  # only to be told what it is
    try:
        with open_regular(file) as opened:
            text = opened.read(_LARGEST_CONFIG + 1)
        if len(text) > _LARGEST_CONFIG:
            raise ValueError(f"more than {_LARGEST_CONFIG} bytes")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise broken_base(str(file), f"{error!s:.200}", "a config.json") from error
    if not isinstance(content, dict):
        raise broken_base(str(file), type(content).__name__, "a JSON object")
    return content


def _check_counts(content: Mapping[str, Any], where: str = "") -> None:
    """Raises AdapterInvalid where a config, or one inside of it, repeats something too often."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            _check_counts(value, f"{where}{key}.")
        elif _COUNTS.search(str(key)):
            for count in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(count, int) and count > MOST_LAYERS:
                    raise broken_base(f"{where}{key}", count, f"at most {MOST_LAYERS}")


def _through_transformers(content: Mapping[str, Any], model_type: str) -> BaseModel:
    _check_counts(content)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise AdapterUnsupported(
            f"base model {model_type!r}",
            where="model_type",
            remedy="install transformers, or use BaseModel.from_model or BaseModel.from_table",
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**content)
        build = getattr(transformers, str((content.get("architectures") or [""])[0]), None)
        if not (isinstance(build, type) and issubclass(build, transformers.PreTrainedModel)):
            # Saved models name their class; of a config that was made in memory the type tells.
            speaks = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            sees = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            sees &= not speaks or "vision_config" in content
            auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
            build = getattr(transformers, auto).from_config
        with _bounded_work(), torch.device("meta"):
            model = build(config)
        return BaseModel.from_model(model)
    except Exception as error:  # whatever a model class raises on a config that it can't take
        raise AdapterUnsupported(
            f"base model {model_type!r}",
            where="model_type",
            remedy="transformers can't lay it out; use BaseModel.from_model or from_table",
        ) from error


def _bounded_work() -> AbstractContextManager[object]:
    """Ends what calls torch more than `_MOST_CALLS` times, whatever makes it do so."""
    from torch.overrides import TorchFunctionMode

    class Bounded(TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            if self.calls > _MOST_CALLS:
                raise RuntimeError(f"it takes more than {_MOST_CALLS} calls of torch")
            return func(*args, **(kwargs or {}))

    return Bounded()


def _entries_of(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, BaseModule]]:
    import torch

    if isinstance(module, torch.nn.Linear):
        # Not weight.shape: a quantised layer stores its weight packed.
        yield prefix, BaseModule("linear", (module.out_features, module.in_features))
    elif isinstance(module, torch.nn.Embedding):
        yield prefix, BaseModule("embedding", (module.num_embeddings, module.embedding_dim))
    elif type(module).__name__ == "Conv1D":
        inputs, outputs = cast(torch.Tensor, module.weight).shape
        yield prefix, BaseModule("conv1d", (outputs, inputs))
    else:
        flag = bool(getattr(module, "is_transposed", False))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                path = ".".join(part for part in (prefix, name) if part)
                path = prefix if name == "weight" and prefix else path
                yield path, BaseModule("parameter", tuple(parameter.shape), flag)
