from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from adaptercache.checkpoint.patterns import Pattern, StepBudget
from adaptercache.errors import AdapterInvalid, AdapterUnsupported

PATHS = (
    "model.layers.1.self_attn.q_proj",
    "layers.10.mlp.up_proj",
    "lm_head",
    "a.b",
    "ab1",
    "a{",
    "",
)
ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "1",
        ".",
        r"\.",
        r"\d",
        r"\w",
        "[ab.]",
        "[^a]",
        "[]a]",
        "^",
        "$",
        r"\b",
        "{",
        "_proj",
    ]
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        inner.map(lambda part: f"(?:{part})"),
        st.tuples(inner, st.sampled_from("*+?")).map("".join),
        st.tuples(inner, st.sampled_from(["{2}", "{1,3}", "{,2}", "{2,}", "{}"])).map("".join),
    ),
    max_leaves=6,
)


def matches(key: str, path: str) -> bool:
    return Pattern(key, "rank_pattern", StepBudget()).matches(path)


@given(key=EXPRESSIONS)
@example("layers\\.1\\.self_attn\\.(q|k)_proj")
@example("q_proj|model")
@example("a)(b")
@example("(.*)\\.[0-9]{1,2}\\..*_proj")
def test_it_says_what_re_says(key: str) -> None:
    assume(sum(key.count(mark) for mark in "*+{") <= 3)  # or re itself takes for ever
    try:
        expected = re.compile(rf"(.*\.)?({key})$")
    except re.error:
        with pytest.raises(AdapterInvalid, match="regular expression"):
            Pattern(key, "rank_pattern", StepBudget())
        return
    try:
        pattern = Pattern(key, "rank_pattern", StepBudget())
    except AdapterUnsupported:
        assert "*+" in key or "++" in key or "?+" in key or "}+" in key
        return
    for path in PATHS:
        assert pattern.matches(path) == (expected.match(path) is not None), path


@pytest.mark.parametrize(
    ("key", "path", "expected"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("_proj", "model.layers.0.self_attn.q_proj", False),
        ("^layers.*", "model.layers.0", False),
        (r"layers\.(0|2)\..*", "model.layers.2.mlp.up_proj", True),
        (r"layers\.(0|2)\..*", "model.layers.1.mlp.up_proj", False),
    ],
)
def test_a_key_is_the_end_of_a_path(key: str, path: str, expected: bool) -> None:
    assert matches(key, path) is expected


@pytest.mark.parametrize(
    "key",
    [
        "(a|a)*b",
        "(a*)*b",
        "(a|a)" * 200 + "b",
        "((((a*)*)*)*)*b",
        "(a{1,500}){1,500}b",
        "a{1000000000}",
        "(a?){500}b",
        ".*" * 500 + "b",
    ],
)
def test_no_key_takes_long(key: str) -> None:
    begin = time.monotonic()
    with suppress(AdapterInvalid):  # the budget is spent
        assert not matches(key, "a" * 500)
    assert time.monotonic() - begin < 20  # re would take longer than the universe has


@pytest.mark.parametrize("key", ["(?=a)", "(?<!a)b", r"(a)\3", "(?P<x>a)", r"\x41(b|c)"])
def test_what_the_walk_cannot_do_is_refused_by_name(key: str) -> None:
    with pytest.raises(AdapterUnsupported, match="in a pattern"):
        Pattern(key, "rank_pattern", StepBudget())


@pytest.mark.parametrize("key", ["(", "[", "*", "a{2,1}", "a" * 5000, "(" * 500 + ")" * 500])
def test_what_is_no_expression_is_refused(key: str) -> None:
    with pytest.raises(AdapterInvalid, match="rank_pattern"):
        Pattern(key, "rank_pattern", StepBudget())
