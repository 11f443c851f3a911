"""Attention over paged KV, against softmax written out, with NaN wherever no token is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import serve_paged
from adaptercache.testing import any_device
from serve_attention import TILE_TOKENS, attend, attend_plainly
from serve_paged import attend_in_place

DEVICE = any_device()
NAN = float("nan")
BLOCK = 16

Part = tuple[int, int]
"""Tokens of a sequence that are computed already, and new ones."""
DECODING = [(0, 1), (15, 1), (16, 1), (100, 1)]
MIXED = [(99, 1), (0, 5), (15, 1), (9, 41), (0, 2 * TILE_TOKENS), (63, 17), (0, 1)]
CHUNK = [(30, 3)]


def expected(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """Of one token: ``q [heads, d]``, ``k`` and ``v [tokens, kv_heads, d]``, in float64."""
    shared = len(q) // k.shape[1]
    k, v = (x[: position + 1].double().repeat_interleave(shared, dim=1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) / q.shape[1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(dim=1), v).flatten()


def tiles_of(parts: Sequence[Part]) -> list[list[int]]:
    tiles, row = [], 0
    for sequence, (_, new) in enumerate(parts):
        tiles += [
            [sequence, row + done, min(TILE_TOKENS, new - done)]
            for done in range(0, new, TILE_TOKENS)
        ]
        row += new
    return tiles


@dataclass(frozen=True)
class Step:
    """Rows of these parts and three of padding, in a KV that is NaN where no token is."""

    inputs: tuple[Tensor, ...]  # q, view, tables and positions
    tiles: Tensor
    want: Tensor

    @classmethod
    def of(
        cls, kv_heads: int, shared: int, head_dim: int, parts: Sequence[Part], width: int
    ) -> Step:
        generator = torch.Generator().manual_seed(head_dim + shared)
        heads = kv_heads * shared
        num_pages = width * len(parts) + 1
        view = torch.full((num_pages, 2, BLOCK, kv_heads, head_dim), NAN)
        # The last page is nobody's: padding.
        tables = torch.randperm(num_pages - 1, generator=generator).view(len(parts), width)
        kv = torch.randn(len(parts), 2, width * BLOCK, kv_heads, head_dim, generator=generator)
        for sequence, (before, new) in enumerate(parts):
            for position in range(before + new):
                page = tables[sequence, position // BLOCK]
                view[page, :, position % BLOCK] = kv[sequence, :, position]
            tables[sequence, -(-(before + new) // BLOCK) :] = num_pages - 1
        places = [(n, before + at) for n, (before, new) in enumerate(parts) for at in range(new)]
        rows = len(places)
        # Apart, as they lie beside keys and values.
        q = torch.full((rows + 3, heads + 2, head_dim), NAN)
        q[:rows, :heads] = torch.randn(rows, heads, head_dim, generator=generator)
        q = q[:, :heads]
        want = torch.stack(
            [expected(q[row], *kv[its], position) for row, (its, position) in enumerate(places)]
        )
        positions = torch.tensor([position for _, position in places] + [0, 0, 0])
        tiles = torch.tensor([*tiles_of(parts), [0, 0, 0], [0, 0, 0]])
        tables = torch.cat((tables, torch.full((2, width), num_pages - 1)))  # of padding jobs
        inputs = tuple(x.to(DEVICE) for x in (q, view, tables, positions))
        return cls(inputs, tiles.to(DEVICE), want)

    def is_got_by(self, way: Any) -> bool:
        """As tiles; and, where each row is a sequence's only one, without, too."""
        q, view, tables, positions = self.inputs
        got = [way(q, view, tables, positions, self.tiles)]
        rows = len(self.want)
        if rows == len(tables) - 2:
            got.append(way(q[:rows], view, tables[:rows], positions[:rows], None))
        return all((its[:rows].cpu() - self.want).abs().max() < 1e-5 for its in got)


HEADS = pytest.mark.parametrize(("kv_heads", "shared"), [(2, 2), (1, 7), (4, 1)])


@HEADS
@pytest.mark.parametrize("head_dim", [16, 48, 128])
@pytest.mark.parametrize("parts", [DECODING, MIXED, CHUNK], ids=["decoding", "mixed", "chunk"])
def test_attention_is_exact_and_reads_nothing_beyond(
    kv_heads: int, shared: int, head_dim: int, parts: list[Part]
) -> None:
    step = Step.of(kv_heads, shared, head_dim, parts, width=8)
    for way in (attend, attend_plainly, attend_in_place):
        assert step.is_got_by(way), way.__name__


LONG = [(length - 1, 1) for length in (1, 63, 64, 65, 128, 129, 300)]
LONG_MIXED = [(63, 1), (60, 10), (0, 70), (250, 1), (188, 5)]


@pytest.mark.parametrize(("kv_heads", "shared"), [(2, 2), (1, 7)])
@pytest.mark.parametrize("parts", [LONG, LONG_MIXED], ids=["decoding", "mixed"])
@pytest.mark.parametrize(("part", "most"), [(32, 5), (64, 2)])  # its tokens; parts at most
def test_the_parts_of_a_long_sequence_are_added(
    monkeypatch: pytest.MonkeyPatch,
    kv_heads: int,
    shared: int,
    parts: list[Part],
    part: int,
    most: int,
) -> None:
    """Of some parts the first rows of a tile see nothing."""
    step = Step.of(kv_heads, shared, 16, parts, width=24)
    for name in ("PART", "PART_OF_TILES"):
        monkeypatch.setattr(serve_paged, name, part)
    monkeypatch.setattr(serve_paged, "PROGRAMS", most * kv_heads * len(step.tiles))
    counters = torch.zeros(serve_paged.PROGRAMS, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(serve_paged, "_counters", lambda device: counters)
    for _ in range(2):  # the next launch finds the counters as they were
        assert step.is_got_by(attend_in_place)
        assert not counters.any()


def test_a_sequence_of_several_parts_as_the_engine_cuts_them() -> None:
    part = serve_paged.PART
    decoding = [(length - 1, 1) for length in (part, part + 1, 3 * part)]
    for parts in (decoding, [(part - 9, 20), (2 * part, 1)]):
        assert Step.of(1, 4, 16, parts, width=64).is_got_by(attend_in_place)


@pytest.mark.parametrize("way", [attend_plainly, attend_in_place])
def test_no_tile_is_written_but_its_own_rows(way: Any) -> None:
    """Also where nothing but padding is left of a launch."""
    q, view = torch.ones(20, 2, 16), torch.ones(1, 2, BLOCK, 2, 16)
    numbers = [torch.zeros(1, 1, dtype=torch.int64), torch.arange(20)]
    tiles = torch.tensor([[0, 4, 3], [0, 0, 0]])
    got = way(*(x.to(DEVICE) for x in (q, view, *numbers, tiles))).cpu()
    is_written = (got == 1).all(dim=1)
    assert is_written.nonzero().flatten().tolist() == [4, 5, 6]
