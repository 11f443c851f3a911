"""JSON that was small to send and dear to read: the second of two equal keys was looked for in
quadratic time, and millions of empty values were built before the first was looked at."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest
from adapter_files import BASE, with_header, write_adapter

from adaptercache import AdapterInvalid
from adaptercache.checkpoint import read_checkpoint
from adaptercache.checkpoint.json_object import parse_object

EMPTY = b'{"x":[' + b"{}," * 1_000_000 + b"1]}"


def refused(folder: Path) -> AdapterInvalid:
    begin = time.process_time()
    with pytest.raises(AdapterInvalid) as raised:
        read_checkpoint(folder, BASE)
    assert time.process_time() - begin < 1
    return raised.value


def test_the_last_key_given_twice_is_found_at_once(tmp_path: Path) -> None:
    keys = "".join(f'"{number}":1,' for number in range(60_000))
    config = f'{{"r":1,"lora_alpha":1,{keys}"59999":1}}'.encode()
    assert "'59999' is given twice" in str(refused(write_adapter(tmp_path, config=config)))


def test_a_config_of_millions_of_values_is_not_built(tmp_path: Path) -> None:
    assert "values" in str(refused(write_adapter(tmp_path, config=EMPTY)))


def test_a_header_of_millions_of_values_is_not_built(tmp_path: Path) -> None:
    assert "values" in str(refused(write_adapter(tmp_path, with_header(EMPTY))))


def test_a_header_without_data_is_not_long(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"x":"' + b"x" * (8 << 20) + b'"}}'
    assert "header is too long" in str(refused(write_adapter(tmp_path, with_header(header))))


def test_brackets_in_a_string_hide_no_depth() -> None:
    text = '{"a":"' + "]" * 500 + '","b":' + "[" * 200 + "]" * 200 + "}"
    with pytest.raises(AdapterInvalid, match="64 deep"):
        parse_object(text.encode(), "here")


@pytest.mark.parametrize("text", [r'{"a":"\\\"[[["}', '{"a":"' + "[" * 500 + '"}', r'{"a\\":"["}'])
def test_brackets_in_a_string_are_no_depth(text: str) -> None:
    assert parse_object(text.encode(), "here")


@pytest.mark.parametrize("text", [rb'{"\ud800":1}', rb'{"a":["\udfff\ud800"]}'])
def test_half_a_character_is_no_text(text: bytes) -> None:
    with pytest.raises(AdapterInvalid, match="surrogates"):
        parse_object(text, "here")


def test_escaped_characters_are_text() -> None:
    assert parse_object(rb'{"\ud83d\ude00":"\\ud800"}', "here") == {"\U0001f600": "\\ud800"}


@pytest.mark.parametrize("ending", [b"", b"\xff"])
def test_an_error_that_is_remembered_does_not_hold_the_text(ending: bytes) -> None:
    with pytest.raises(AdapterInvalid) as raised:
        parse_object(b'{"a": "' + b"x" * (1 << 20) + ending, "here")
    raised.value.__traceback__ = None
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    assert len(pickle.dumps(raised.value)) < 2000
