"""Some were taken, and hung whoever waited, filled the working directory, or failed much later."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaptercache import CapacityError, Caps, KVLayout, Tier


@pytest.mark.parametrize("adapter_id", [5, None, b"a", ("x",), ["x"]])
def test_what_is_no_id_is_refused_at_once(tiny: Any, adapter_id: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        for act in (
            lambda: cache.put(adapter_id, *tiny.tensors(1)),
            lambda: cache.refresh(adapter_id),
            lambda: cache.remove(adapter_id),
        ):
            with pytest.raises(TypeError, match="give a str"):
                act()
        assert cache.refresh("a").result(10)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("revision_ttl_s", "60", TypeError),
        ("revision_ttl_s", True, TypeError),
        ("revision_ttl_s", math.nan, ValueError),
        ("revision_ttl_s", -1, ValueError),
        ("clock", 5, TypeError),
        ("clock", lambda: "now", TypeError),
        ("kv", 5, TypeError),
        ("read_options", 5, TypeError),
        ("disk_dir", "", ValueError),
        ("host_block_bytes", 0, CapacityError),
        ("host_block_bytes", -4096, CapacityError),
    ],
)
def test_the_constructor_says_what_it_wants(
    tiny: Any, option: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=option):
        tiny.cache(tiny.source("a"), **{option: value})


def test_verbs_say_what_they_want(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        tensors, config = tiny.tensors(1)
        refused: list[tuple[Callable[[], Any], str]] = [
            (lambda: cache.put("a", [tensors], config), "tensors is a list: give a dict"),
            (lambda: cache.put("a", tensors, None), "config is a NoneType: give a dict"),
            (lambda: cache.resident("gpu"), "tier='gpu': Tier.GPU, Tier.HOST or Tier.DISK"),
            (lambda: cache.resident(Tier.REMOTE), "Tier.GPU, Tier.HOST or Tier.DISK"),
            (lambda: cache.resident(Tier.GPU, most=-1), "most=-1: give 0 or more"),
            (lambda: cache.admit([], max_adapters=-1), "adapters is -1: give 0 or more"),
            (lambda: Caps(tokens=-4), "tokens is -4: give 0 or more"),
            (lambda: cache.lora_batch([], rank_to="16").__enter__(), "rank_to is '16': give an"),
            (lambda: cache.lora_batch([], rank_to=16.5).__enter__(), "rank_to is 16.5: give an"),
            (lambda: cache.lora_batch([], rank_to=-1).__enter__(), "rank_to=-1: a rank is 1"),
            (lambda: cache.lora_batch([], rank_to=0).__enter__(), "rank_to=0: a rank is 1"),
        ]
        for act, text in refused:
            with pytest.raises((TypeError, ValueError), match=re.escape(text)):
                act()
        assert cache.acquire("a").result(10)


def test_what_is_reported_wrongly_hangs_nobody(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours, or of a handler, in writing a failure down."""
    with tiny.cache(tiny.source("a")) as cache:

        def broken(*args: Any) -> None:
            raise ValueError("can't be written")

        monkeypatch.setattr(cache._parts.lifter._journal, "failed", broken)
        with pytest.raises(Exception, match="unknown"):
            cache.refresh("unknown").result(10)


def test_a_kv_layout_takes_torchs_dtype_as_the_adapters_does() -> None:
    assert KVLayout(16, 1, 16, dtype=torch.float16) == KVLayout(16, 1, 16, "float16")
    with pytest.raises(ValueError, match="dtype 'int8'"):
        KVLayout(16, 1, 16, "int8")
