"""Numbers that count or name something, of whatever type they come."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["integer"]


def integer(value: Any, what: str) -> int:
    """The int that it is: also of numpy, or a tensor of one element.

    Raises:
        TypeError: it is a float, a bool or no number. ``what`` names it.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{what}: an integer")
