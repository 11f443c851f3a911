"""What every kernel here is made with."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["alike", "end_in_turn", "kernel", "pick", "share_of"]

# Numbers that only shift addresses, and tables that are read one number at a time: what they are
# makes no other binary. Of x and y it matters, since they are read sixteen bytes at a time.
_NUMBERS = ("table_stride", "num_pages", "site0", "site1", "site2", "max_groups", "tokens")
_TABLES = ("pages", "start", "rank", "scaling", "work", "counters")


def kernel(function: Any) -> Any:
    """``triton.jit``, with as few binaries as can be."""
    return triton.jit(function, **alike(function))


def alike(function: Any) -> dict[str, list[str]]:
    """What of its arguments makes no other binary."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return {
        "do_not_specialize": [name for name in names if name in _NUMBERS],
        "do_not_specialize_on_alignment": [name for name in names if name in _TABLES],
    }


@triton.jit
def end_in_turn(PDL: tl.constexpr):
    """Last in a kernel (see `binary.has_pdl`): one that found nothing to do, and so waited for
    nothing, would else be done before the one ahead of it, and the one behind it begin."""
    if PDL:  # noqa: SIM102 (known when it is compiled)
        if tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()


@triton.jit
def pick(m, v0, v1, v2, M: tl.constexpr):
    """``(v0, v1, v2)[m]`` of the M that there are."""
    v = v0
    if M > 1:
        v = tl.where(m == 1, v1, v)
    if M > 2:
        v = tl.where(m == 2, v2, v)
    return v


@triton.jit
def share_of(units, program, programs, IN_RUNS: tl.constexpr):
    """A program's units, as a range: in a run, side by side in memory, or every so many."""
    if IN_RUNS:
        each = units // programs
        longer = units % programs  # programs that have one unit more
        first = program * each + tl.minimum(program, longer)
        return first, first + each + tl.where(program < longer, 1, 0), 1
    return program, units, programs
