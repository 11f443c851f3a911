"""Names in an adapter's files went into messages as they were: with the terminal's own escape
sequences, with line ends that made log lines of their own, and megabytes long."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_files import BASE, COLUMN, ROW, A, write_adapter

from adaptercache import AdapterCacheError, AdapterInvalid, AdapterUnsupported
from adaptercache.checkpoint import read_checkpoint

EVIL = "\x1b[2J\nERROR all is lost\r\x00\u202e"


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterCacheError) as raised:
        read_checkpoint(folder, BASE)
    return str(raised.value)


@pytest.mark.parametrize(
    ("weights", "config"),
    [
        ({A: ROW, f"{EVIL}.lora_B.weight": COLUMN}, {"r": 1, "lora_alpha": 1}),
        ({EVIL: ROW, A: ROW}, {"r": 1, "lora_alpha": 1}),
        (None, {"r": 1, "lora_alpha": 1, f"use_{EVIL}": True}),
        (None, {"r": 1, "lora_alpha": 1, f"use_{'x' * 100_000}": True}),
        (None, {"r": 1, "lora_alpha": 1, "rank_pattern": {EVIL: 0}}),
        (None, {"r": 1, "lora_alpha": 1, "rank_pattern": {f"({EVIL}": 1}}),
        (None, {"r": 1, "lora_alpha": 1, "peft_type": EVIL}),
    ],
)
def test_a_message_is_one_short_printable_line(tmp_path: Path, weights: None, config: dict) -> None:
    message = refusal(write_adapter(tmp_path, weights, config))
    assert message.isprintable()
    assert len(message) < 2000


def test_what_is_printable_stays_as_it_is() -> None:
    error = AdapterInvalid("naïve ΔW", where="層.0", found="a\\b")
    assert str(error) == "naïve ΔW (where: 層.0; found: a\\b)"
    assert str(AdapterUnsupported("a\tb", where="x" * 600)).count("x") == 493
