"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptercache.cli.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536),
        ("1B", 1),
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        (" 64KiB ", 64 << 10),
        ("3MiB", 3 << 20),
        ("2TiB", 2 << 40),
        ("512MB", 512_000_000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("20GB", 20_000_000_000),
        ("1TB", 10**12),
        ("1.5GiB", 3 << 29),
        ("0.3kB", 300),
        ("0.0015kB", 1),
        ("999999999999999999", 10**18 - 1),
    ],
)
def test_reads(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "GiB",
            "8G",
            "8gib",
            "8Gb",
            "8 G iB",
            "-8GiB",
            "+8",
            "1e9",
            "0x10",
            "8GiB!",
            "1,5GiB",
        ),
        *("0", "0GiB", "0.1B", "nan", "inf", "1.", ".5GiB", "٣GiB", "9" * 19, "1  GiB", "1GiB\n2"),
    ],
)
def test_refuses_what_it_would_have_to_guess(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: give") as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (80 << 20, "80 MiB"),
        (3 << 29, "1.5 GiB"),
        (1023 << 30, "1,023 GiB"),
        (5 << 50, "5,120 TiB"),
    ],
)
def test_writes(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, (1 << 50) - 1))
def test_what_is_written_reads_back_within_a_percent(size: int) -> None:
    again = parse_size(format_size(size).replace(",", ""))
    assert abs(again - size) <= 0.01 * size
