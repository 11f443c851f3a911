"""What the kernels of `fragments` read: a step's work, and rows of an adapter out of the arena."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "end_in_turn",
    "entry_of",
    "launch_dependents",
    "load_steps",
    "numbers_of",
    "pages_of",
    "sixteens",
    "token_of",
    "tokens_of",
    "wait",
]


@gluon.jit
def launch_dependents():
    """As ``tl.extra.cuda.gdc_launch_dependents``."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait():
    """As ``tl.extra.cuda.gdc_wait``."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def end_in_turn(PDL: gl.constexpr):
    """As `jit.end_in_turn`."""
    if PDL:  # noqa: SIM102
        if gl.program_id(0) == 0:
            wait()


@gluon.jit
def _entries(work, tokens):
    """Where a step's work has what is ours (see `work`)."""
    return work + 8 + tokens // 2 * 17 + tokens * 2


@gluon.jit
def numbers_of(work, tokens):
    """Entries: of ranks over 32, of 17 to 32, all but narrow ones, and narrow ones."""
    at = _entries(work, tokens)
    over32, over16 = gl.load(at), gl.load(at + 1)
    return over32, over16, over32 + over16 + gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def entry_of(work, entry, tokens):
    """Its slot, and what `tokens_of` takes. May be asked for before it is known whether there is
    such an entry."""
    at = _entries(work, tokens) + 4 + entry
    slot = gl.load(at, mask=entry < tokens, other=0)
    return slot, gl.load(at + tokens, mask=entry < tokens, other=0)


@gluon.jit
def tokens_of(which):
    """How many an entry has."""
    return gl.where(which < 0, (-1 - which) % 16 + 1, 1)


@gluon.jit
def token_of(work, which, tokens, i):
    """An entry's i-th token, −1 after the last."""
    at = _entries(work, tokens) + 4 + 2 * tokens + (-1 - which) // 16 + i
    its = gl.load(at, mask=(which < 0) & (i < tokens_of(which)), other=-1)
    return gl.where((which >= 0) & (i == 0), which, its)


@gluon.jit
def pages_of(slot_pages, element, mask, PAGE_ELEMS: gl.constexpr, ROWS: gl.constexpr):
    """Pages of elements of a slot's vector (see `paging.load_tile`)."""
    return gl.load(slot_pages + element // PAGE_ELEMS // ROWS, mask=mask, other=0)


@gluon.jit
def sixteens(page, num_pages, element, PAGE_ELEMS: gl.constexpr, ROWS: gl.constexpr):
    """Where these elements, multiples of 16, lie in an arena, in units of 16 elements: 32 bits do,
    up to 128 GiB, and are quicker."""
    row = (element // PAGE_ELEMS % ROWS).to(gl.int32)
    cell = (row * num_pages + page).to(gl.uint32)
    return cell * (PAGE_ELEMS // 16) + element % PAGE_ELEMS // 16


@gluon.jit
def load_steps(pointers, mask, STEPS: gl.constexpr, APART: gl.constexpr):
    """What lies there, and STEPS - 1 times APART numbers further."""
    tiles = ()
    for step in gl.static_range(STEPS):
        tiles += (gl.load(pointers + step * APART, mask=mask, other=0),)
    return tiles
