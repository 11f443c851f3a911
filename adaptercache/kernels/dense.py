"""Your own dense tensors, checked before they are copied into a stack (`LoraStack.from_dense`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

__all__ = ["table_of"]


def table_of(
    dense: Mapping[tuple[int, str], tuple[Tensor, Tensor, Sequence[float] | Tensor]],
    ranks: Sequence[int] | None,
) -> tuple[int, dict[str, dict[str, object]]]:
    """The number of slots, and the base as a table (see `BaseModel.from_table`).

    Raises:
        ValueError: nothing given, or keys, shapes, dtypes, devices or ranks that don't go together.
    """
    if not dense:
        raise ValueError("no tensors were given")
    first, _, _ = next(iter(dense.values()))
    table: dict[str, dict[str, object]] = {}
    for key, (a, b, scalings) in dense.items():
        layer, module = key
        where = f"layer {layer!r}, {module!r}"
        if [type(part) for part in key] != [int, str] or "." in module:
            raise ValueError(f"{key}: a key is (layer, module), such as (0, 'q_proj')")
        if a.dim() != 3 or b.dim() != 3:
            raise ValueError(
                f"{where}: A is {list(a.shape)}, B is {list(b.shape)}; expected [slots, r, in] and "
                "[slots, out, r]"
            )
        if b.shape[::2] != a.shape[:2] or len(first) != len(a) or len(scalings) != len(a):
            raise ValueError(
                f"{where}: A is {list(a.shape)}, B is {list(b.shape)}, {len(scalings)} scalings, "
                f"of {len(first)} slots"
            )
        if {a.dtype, b.dtype, first.dtype} != {a.dtype}:
            raise ValueError(f"{where}: A is {a.dtype}, B is {b.dtype}, others {first.dtype}")
        if {a.device, b.device, first.device} != {a.device}:
            raise ValueError(f"{where}: A is on {a.device}, B on {b.device}")
        table[f"layers.{layer}.{module}"] = {"kind": "linear", "out_in": [b.shape[1], a.shape[2]]}
    if ranks is not None and len(ranks) != len(first):
        raise ValueError(f"{len(ranks)} ranks for {len(first)} slots: one each")
    most = max(a.shape[1] for a, _, _ in dense.values())
    for slot, rank in enumerate(ranks or ()):
        if not 0 <= rank <= most:
            raise ValueError(f"slot {slot} is of rank {rank}: A and B hold 0 to {most}")
    return len(first), table
