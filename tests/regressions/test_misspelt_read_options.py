"""An option that was misspelt meant another one: any word but one for `expert_columns` was the
other order of the experts, and a string for the ignored keys ignored whatever it contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_files import BASE, write_adapter

from adaptercache import AdapterUnsupported, ReadOptions
from adaptercache.checkpoint import read_checkpoint


@pytest.mark.parametrize("value", ["fastest", "expert-fastest", "EXPERT_FASTEST", "", None, 1])
def test_an_order_of_columns_that_there_is_not_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="'expert_fastest' or 'expert_slowest'"):
        ReadOptions(expert_columns=value)


@pytest.mark.parametrize("value", ["use_foo", ["use_foo"], {"use_foo": 1}, {1}, None])
def test_keys_that_are_no_set_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="ignored_config_keys"):
        ReadOptions(ignored_config_keys=value)


@pytest.mark.parametrize("value", ["no", "False", 0, 1, None])
def test_a_flag_is_true_or_false(value: Any) -> None:
    with pytest.raises(TypeError, match="allow_pickle"):
        ReadOptions(allow_pickle=value)
    with pytest.raises(TypeError, match="text_only"):
        ReadOptions(text_only=value)


def test_a_key_that_is_a_part_of_an_ignored_one_is_not_ignored(tmp_path: Path) -> None:
    write_adapter(tmp_path, config={"r": 1, "lora_alpha": 1, "use_fo": True})
    options = ReadOptions(ignored_config_keys=frozenset({"use_foo"}))
    with pytest.raises(AdapterUnsupported, match="use_fo'"):
        read_checkpoint(tmp_path, BASE, options=options)


def test_a_plain_set_is_taken_and_kept(tmp_path: Path) -> None:
    keys = {"use_foo"}
    options = ReadOptions(ignored_config_keys=keys)  # type: ignore[arg-type]
    keys.clear()
    assert options == ReadOptions(ignored_config_keys=frozenset({"use_foo"}))
    assert hash(options)
    config = json.dumps({"r": 1, "lora_alpha": 1, "use_foo": True}).encode()
    write_adapter(tmp_path, config=config)
    assert read_checkpoint(tmp_path, BASE, options=options).max_rank == 1
