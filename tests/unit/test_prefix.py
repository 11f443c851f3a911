from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptercache import prefix
from adaptercache.prefix import prefix_keys

DIGEST = bytes(range(32))
OTHER_DIGEST = bytes(range(1, 33))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def le(number: int, size: int) -> bytes:
    return number.to_bytes(size, "little")


def keys_by_the_formula(
    token_ids: list[int], block_size: int, adapter: bytes | None, adapter_from_token: int
) -> list[bytes]:
    """As the module's docstring says it, position by position."""
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parts = [b"adaptercache prefix v1", le(block_size, 8)]
        if adapter is not None and adapter_from_token < start + block_size:
            parts += [adapter, le(max(0, adapter_from_token - start), 8)]
        root = sha256(b"".join(le(len(part), 8) + part for part in parts)).digest()
        block = b"".join(le(token, 4) for token in token_ids[start : start + block_size])
        keys.append(sha256(root + (keys[-1] if keys else bytes(32)) + block).digest())
    return keys


# Published vectors: whoever shares keys across processes, machines or releases relies on them.


def test_the_keys_of_the_base_model_are_those_published() -> None:
    assert [key.hex() for key in prefix_keys([1, 2, 3, 4, 5, 2**32 - 1, 7], block_size=3)] == [
        "8f68d97ef90c1342647e3cf2e32c1fed438c4196665f442f5c5b36868df17f4b",
        "0f21b5609974257f9f82391b15ffa736cd9347c91b30155f457211573a3a6b70",
    ]


def test_the_keys_of_an_adapter_are_those_published() -> None:
    keys = prefix_keys([1, 2, 3, 4, 5, 2**32 - 1, 7], block_size=3, adapter=DIGEST)
    assert [key.hex() for key in keys] == [
        "6605d0873a4806f2d57265a04506f4299c0558f6707bb2e1bd546f9a95cd25f7",
        "27ad0d8e2c624d74b5bed96086cfdb6ba4130a29342ba09effb549f43a324392",
    ]


def test_the_keys_of_an_adapter_that_sets_in_later_are_those_published() -> None:
    keys = prefix_keys(range(9), block_size=3, adapter=DIGEST, adapter_from_token=4)
    assert [key.hex() for key in keys] == [
        "958f1d9e272cd200c92c73bdb6e1dd551c13b6fd9d90058f54bdc701af47d082",
        "6077d0b1219c2e30a76dc81f0d65576efc45f0c366b96a8f3e4d337a4164a58b",
        "f9c21881ca195e5e9714c2da0ae0199ce6d2629f51d4ca1c5af4260841539b14",
    ]


@given(
    TOKENS, st.integers(1, 7), st.none() | st.binary(min_size=32, max_size=32), st.integers(0, 25)
)
def test_keys_follow_the_formula(
    token_ids: list[int], block_size: int, adapter: bytes | None, adapter_from_token: int
) -> None:
    assert prefix_keys(
        token_ids, block_size=block_size, adapter=adapter, adapter_from_token=adapter_from_token
    ) == keys_by_the_formula(token_ids, block_size, adapter, adapter_from_token)


@given(TOKENS, st.integers(1, 4), st.integers(0, 5), st.integers(0, 25))
def test_a_later_call_goes_on_from_the_key_of_an_earlier_one(
    token_ids: list[int], block_size: int, blocks: int, adapter_from_token: int
) -> None:
    done = min(blocks, len(token_ids) // block_size) * block_size
    first = prefix_keys(
        token_ids[:done],
        block_size=block_size,
        adapter=DIGEST,
        adapter_from_token=adapter_from_token,
    )
    then = prefix_keys(
        token_ids[done:],
        block_size=block_size,
        adapter=DIGEST,
        adapter_from_token=max(0, adapter_from_token - done),
        parent=first[-1] if first else None,
    )
    at_once = prefix_keys(
        token_ids, block_size=block_size, adapter=DIGEST, adapter_from_token=adapter_from_token
    )
    assert first + then == at_once


def test_only_full_blocks_have_keys() -> None:
    assert [len(prefix_keys(range(n), block_size=4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_key_covers_every_token_before_it_and_none_after() -> None:
    changed = prefix_keys([0, 1, 9, 3, 4, 5], block_size=2)
    keys = prefix_keys(range(6), block_size=2)
    assert [one == other for one, other in zip(keys, changed, strict=True)] == [True, False, False]


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    assert len(set(prefix_keys([7] * 40, block_size=4))) == 10


def test_keys_of_different_block_sizes_differ() -> None:
    assert not set(prefix_keys([0] * 8, block_size=2)) & set(prefix_keys([0] * 8, block_size=4))


def test_keys_of_different_adapters_differ_in_every_block() -> None:
    every = [
        key
        for adapter in (None, DIGEST, OTHER_DIGEST)
        for key in prefix_keys(range(8), block_size=2, adapter=adapter)
    ]
    assert len(set(every)) == 12


@pytest.mark.parametrize(("adapter_from_token", "shared"), [(0, 0), (1, 0), (2, 1), (3, 1), (9, 4)])
def test_blocks_before_the_adapter_sets_in_share_the_base_models_keys(
    adapter_from_token: int, shared: int
) -> None:
    base = prefix_keys(range(8), block_size=2)
    keys = prefix_keys(
        range(8), block_size=2, adapter=DIGEST, adapter_from_token=adapter_from_token
    )
    assert [one == other for one, other in zip(base, keys, strict=True)] == [
        block < shared for block in range(4)
    ]


def test_where_in_a_block_the_adapter_sets_in_makes_a_difference() -> None:
    keys = [
        prefix_keys(range(8), block_size=4, adapter=DIGEST, adapter_from_token=position)
        for position in range(4)
    ]
    assert len({key for position in keys for key in position}) == 8


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        lambda ids: array("I", ids),
        lambda ids: array("q", ids),
        lambda ids: memoryview(array("I", [i for token in ids for i in (token, 0)]))[::2],
        lambda ids: memoryview(array("i", ids)),
    ],
    ids=["tuple", "uint32", "int64", "strided", "int32"],
)
def test_the_keys_are_the_same_whatever_holds_the_tokens(
    make: Callable[[list[int]], Sequence[int]],
) -> None:
    ids = [5, 0, 2**31 - 1, 128_000, 3, 7]
    assert prefix_keys(make(ids), block_size=2) == prefix_keys(ids, block_size=2)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "int64", "uint64"])
def test_numpy_arrays_are_taken_as_they_are(dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    ids = numpy.arange(12, dtype=dtype)
    assert prefix_keys(ids, block_size=3) == prefix_keys(range(12), block_size=3)
    assert prefix_keys(ids[::2], block_size=3) == prefix_keys(range(0, 12, 2), block_size=3)


def test_each_byte_of_bytes_is_a_token() -> None:
    assert prefix_keys(b"abcd", block_size=2) == prefix_keys([97, 98, 99, 100], block_size=2)


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_a_token_that_does_not_fit_is_refused_by_its_position(token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} at position 2"):
        prefix_keys([0, 1, token], block_size=1)


def test_a_negative_token_in_an_array_is_refused() -> None:
    with pytest.raises(ValueError, match="token id -1 at position 1"):
        prefix_keys(array("i", [0, -1]), block_size=1)


def test_a_table_of_tokens_is_refused() -> None:
    table: Any = memoryview(bytes(8)).cast("I", (1, 2))
    with pytest.raises(ValueError, match="one dimension, not 2"):
        prefix_keys(table, block_size=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_size": 0},
        {"block_size": 1, "adapter_from_token": -1},
        {"block_size": 1, "adapter": b"short"},
        {"block_size": 1, "parent": b"short"},
    ],
    ids=lambda arguments: list(arguments)[-1],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(arguments)[-1]):
        prefix_keys([1, 2], **arguments)


roots = st.tuples(
    st.integers(1, 1 << 40),
    st.none() | st.binary(min_size=32, max_size=32),
    st.integers(0, 1 << 40),
)


@given(roots, roots)
def test_no_two_roots_are_made_of_the_same_bytes(
    one: tuple[int, bytes | None, int], other: tuple[int, bytes | None, int]
) -> None:
    """Nobody can choose a digest, a block size or a position so that it passes for another's."""

    def made_of(block_size: int, digest: bytes | None, position: int) -> tuple[bytes, ...]:
        parts = [block_size.to_bytes(8, "little")]
        if digest is not None:
            parts += [digest, position.to_bytes(8, "little")]
        return tuple(parts)

    first, second = made_of(*one), made_of(*other)
    assert (prefix._root(*first) == prefix._root(*second)) is (first == second)
