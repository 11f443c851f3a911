"""Ways to make an adapter's files wrong: blindly, and by someone who knows the formats."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

__all__ = ["Files", "mutated"]

ITEMSIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8}
ITEMSIZES |= {"I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
LARGEST_DATA = 1 << 16  # a tensor that is made to fit a shape; a larger shape stays a lie

STRANGE_SIZES = (0, 1, 2, 3, 7, 31, 64, 1 << 16, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1)
STRANGE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1 << 31, 1 << 63, 1 << 64, 10**400),
    *(0.0, 1.5, -0.0, 5e-324, 1e-40, 3.3e38, 1e308, math.nan, math.inf, -math.inf),
    *(
        "",
        "none",
        "all",
        "NaN",
        "1",
        "\0",
        "\ud800",
        "\U0001f600",
        "x" * 2000,
        ".",
        "../..",
        "q_proj",
    ),
    *("(a|a)*b", ".*.*.*x", "(", "(?i:[\u0100-\uffff])", r"\1", "a{9}{9}{9}", "((((a*)*)*)*)*"),
    *([], {}, [[]], [None], {"": {}}, [0, 2], ["q_proj"], {"q_proj": 8}, {".*": 4}, {"(.|a)*": 4}),
    json.loads("[" * 70 + "]" * 70),
    {f"layers.{number}.*": number for number in range(300)},
)
STRANGE_PARTS = (
    *("", "weight", "bias", "default", "model", "base_model", "base_layer", "module", "layers"),
    *("lora_A", "lora_B", "lora_a", "lora_E", "lora_embedding_A", "lora_embedding_B"),
    *("lora_magnitude_vector", "experts", "mlp", "self_attn", "q_proj", "qkv_proj", "W_pack"),
    *("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "lm_head", "embed_tokens"),
    *("0", "1", "2", "01", "-1", "\u0661", "99999999999999999999", "x" * 600, "\x1b[2J", "\ud800"),
    *("_orig_mod", "language_model", "vision_tower", "linear", "model.model", "module." * 50),
)
STRANGE_NUMBERS = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e20, 1e-40, -0.0)


@dataclass(frozen=True)
class Files:
    """An adapter's two files; None: it isn't there."""

    config: bytes | None
    weights: bytes | None


@dataclass
class Tensor:
    """An entry of a safetensors file, with its data."""

    name: str
    dtype: Any
    shape: Any
    data: bytes


def mutated(draw: Callable[[st.SearchStrategy[Any]], Any], files: Files) -> Files:
    """One to three things done to an adapter."""
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["config", "config", "header", "tensors", "tensors", "bytes"]))
        if kind == "bytes" and draw(st.booleans()) and files.config:
            files = replace(files, config=damage(draw, files.config))
        elif kind == "bytes" and files.weights:
            files = replace(files, weights=damage(draw, files.weights))
        elif kind == "config" and files.config:
            files = replace(files, config=edit_config(draw, files.config))
        elif kind == "header" and files.weights:
            files = replace(files, weights=edit_header(draw, files.weights))
        elif kind == "tensors" and files.weights:
            files = replace(files, weights=edit_tensors(draw, files.weights))
    return files


def damage(draw: Any, data: bytes) -> bytes:
    """Bytes flipped, cut off, cut out, moved or put in."""
    at = draw(st.integers(0, max(0, min(len(data), 4096) - 1)) | st.integers(0, len(data)))
    length = draw(st.integers(1, 64))
    other = draw(st.integers(0, len(data)))
    match draw(st.sampled_from(["flip", "cut off", "cut out", "splice", "insert", "double"])):
        case "flip":
            flips = draw(st.binary(min_size=1, max_size=4))
            window = bytes(a ^ b for a, b in zip(data[at : at + len(flips)], flips, strict=False))
            return data[:at] + window + data[at + len(window) :]
        case "cut off":
            return data[:at]
        case "cut out":
            return data[:at] + data[at + length :]
        case "splice":
            return data[:at] + data[other : other + length] + data[at + length :]
        case "insert":
            return data[:at] + draw(st.binary(max_size=8)) + data[at:]
    return data + data


# The config.


def edit_config(draw: Any, text: bytes) -> bytes:
    """A value at any depth replaced, taken out or given twice."""
    try:
        config = json.loads(text)
    except ValueError:
        return damage(draw, text)
    value = draw(st.sampled_from(STRANGE_VALUES))
    places = list(inner_places(config))
    if not places:
        return json.dumps(value).encode()
    container, key = draw(st.sampled_from(places))
    match draw(st.sampled_from(["replace"] * 6 + ["take out", "rename", "rename", "twice"])):
        case "replace":
            container[key] = value
        case "take out":
            del container[key]
        case "rename" if isinstance(container, dict):
            name = value if isinstance(value, str) else f"use_{value!r:.40}"
            container[name] = container.pop(key)
        case _:
            twice = f"{json.dumps(str(key))}: {json.dumps(value)}, "
            return json.dumps(config).replace("{", "{" + twice, 1).encode()
    return json.dumps(config).encode()


def inner_places(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a document, with each key or index in it."""
    places: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        container = todo.pop()
        if isinstance(container, dict | list):
            keys = container if isinstance(container, dict) else range(len(container))
            places += [(container, key) for key in keys]
            todo += [container[key] for key in keys]
    return places


# The weights.


def taken_apart(weights: bytes) -> tuple[dict[str, Any], bytes] | None:
    """The header and the data; None where there is no header."""
    length = int.from_bytes(weights[:8], "little")
    try:
        header = json.loads(weights[8 : 8 + length])
    except ValueError:
        return None
    return (header, weights[8 + length :]) if isinstance(header, dict) and header else None


def put_together(header: str, data: bytes) -> bytes:
    text = header.encode("utf-8")
    return len(text).to_bytes(8, "little") + text + data


def edit_header(draw: Any, weights: bytes) -> bytes:
    """A header that lies about its data."""
    apart = taken_apart(weights)
    if apart is None:
        return damage(draw, weights)
    header, data = apart
    name, other = (draw(st.sampled_from(sorted(header))) for _ in range(2))
    match draw(st.sampled_from(["value", "offsets", "exchange", "twice", "length"])):
        case "value":
            container, key = draw(st.sampled_from(inner_places(header)))
            container[key] = draw(st.sampled_from(STRANGE_VALUES))
        case "offsets":
            edges = st.sampled_from(STRANGE_SIZES) | st.integers(-8, len(data) + 8)
            header[name] = {"dtype": "F32", "shape": [2, 2], **as_dict(header[name])}
            header[name]["data_offsets"] = [draw(edges), draw(edges)]
        case "exchange":
            header[name], header[other] = header[other], header[name]
        case "twice":
            twice = f"{json.dumps(name)}: {json.dumps(header[other])}, "
            return put_together(json.dumps(header).replace("{", "{" + twice, 1), data)
        case "length":
            length = draw(st.sampled_from(STRANGE_SIZES) | st.integers(0, (1 << 64) - 1))
            return length.to_bytes(8, "little") + weights[8:]
    return put_together(json.dumps(header), data)


def as_dict(entry: object) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else {}


def edit_tensors(draw: Any, weights: bytes) -> bytes:
    """A sound file of other tensors: what is wrong with them, the header doesn't say."""
    apart = taken_apart(weights)
    tensors = tensors_of(*apart) if apart is not None else None
    if not tensors:
        return damage(draw, weights)
    metadata = apart[0].get("__metadata__") if apart is not None else None
    place, other = (draw(st.integers(0, len(tensors) - 1)) for _ in range(2))
    tensor = tensors[place]
    match draw(
        st.sampled_from(["name", "name", "shape", "dtype", "drop", "copy", "swap", "number"])
    ):
        case "name":
            tensor.name = draw(strange_name(tensor.name, tensors[other].name))
        case "shape":
            fit(tensor, draw(strange_shape(tensor.shape)), tensor.dtype)
        case "dtype":
            fit(tensor, tensor.shape, draw(st.sampled_from([*ITEMSIZES, "F4", "C64", ""])))
        case "drop":
            del tensors[place]
        case "copy":
            name = draw(strange_name(tensor.name, tensors[other].name))
            tensors.append(Tensor(name, tensor.dtype, tensor.shape, tensor.data))
        case "swap":
            tensor.name, tensors[other].name = tensors[other].name, tensor.name
        case "number":
            tensor.data = with_number(draw, tensor)
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for tensor in tensors:
        offsets = [len(data), len(data) + len(tensor.data)]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
        data += tensor.data
    return put_together(json.dumps(header), data)


def tensors_of(header: dict[str, Any], data: bytes) -> list[Tensor]:
    tensors = []
    for name, entry in header.items():
        match entry:
            case {"dtype": dtype, "shape": shape, "data_offsets": [int(begin), int(end)]}:
                tensors.append(Tensor(name, dtype, shape, data[max(0, begin) : max(0, end)]))
    return tensors


def strange_name(name: str, other: str) -> st.SearchStrategy[str]:
    """The name with one part replaced, put in or taken out; by one of another's, perhaps."""
    parts = name.split(".")
    part = st.sampled_from([*STRANGE_PARTS, *other.split(".")])

    def edited(at: int, new: str, kind: str) -> str:
        tail = parts[at:] if kind == "insert" else parts[at + 1 :]
        return ".".join([*parts[:at], *([] if kind == "remove" else [new]), *tail])

    kinds = st.sampled_from(["replace", "replace", "insert", "remove"])
    return st.builds(edited, st.integers(0, len(parts) - 1), part, kinds)


def strange_shape(shape: Any) -> st.SearchStrategy[Any]:
    """Other sizes, the same ones in another order, or another number of them."""
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        return st.just([2, 2])
    sizes = st.sampled_from(STRANGE_SIZES) | st.sampled_from([*shape, 1]).map(lambda n: 2 * n)
    others = [shape[::-1], [], [math.prod(shape)], [1, *shape], [*shape, 1, 1, 1], [1] * 20]
    changed = st.builds(
        lambda at, size: [*shape[:at], size, *shape[at + 1 :]],
        st.integers(0, max(0, len(shape) - 1)),
        sizes,
    )
    return st.sampled_from(others) | changed


def fit(tensor: Tensor, shape: Any, dtype: Any) -> None:
    """Another shape and dtype, and as much data as they take."""
    tensor.shape, tensor.dtype = shape, dtype
    try:
        size = math.prod(shape) * ITEMSIZES.get(dtype, 1)
    except TypeError:  # sizes that are none
        return
    if isinstance(size, int) and 0 <= size <= LARGEST_DATA:
        tensor.data = (tensor.data or b"\0").ljust(min(size, 64), b"\1")
        tensor.data = (tensor.data * (size // len(tensor.data) + 1))[:size]


def with_number(draw: Any, tensor: Tensor) -> bytes:
    number = draw(st.sampled_from(STRANGE_NUMBERS))
    kinds = {"F64": "<d", "F32": "<f", "F16": "<e"}
    try:
        packed = struct.pack(kinds.get(str(tensor.dtype), "<f"), number)
    except OverflowError:  # too large for float16
        packed = struct.pack("<e", math.inf)
    if tensor.dtype == "BF16":
        packed = packed[2:]
    at = draw(st.integers(0, max(0, len(tensor.data) // len(packed) - 1))) * len(packed)
    return (tensor.data[:at] + packed + tensor.data[at + len(packed) :])[: len(tensor.data)]
