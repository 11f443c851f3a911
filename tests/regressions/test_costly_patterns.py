"""The budget of a config's patterns counted matches, not what they cost: compiling was free, a
``.*`` counted as much as a letter, and what came after a dead end was walked for nothing."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from adapter_files import BASE, COLUMN, ROW, A, B, write_adapter

from adaptercache import AdapterInvalid, AdapterUnsupported
from adaptercache.checkpoint import read_checkpoint
from adaptercache.checkpoint.patterns import Pattern, StepBudget

DEEP = "module." * 60  # wrappers, which may stand before any module's path
KEYS = {
    "literals": [f"{'x' * 30}{number}" for number in range(40_000)],
    "repetition and classes": [f".*{'[a-z_.]' * 100}b{number}" for number in range(4000)],
    "dots": [f".*{'.' * 200}b{number}" for number in range(4000)],
    "dead ends": [f"(.|{'x' * 900})*{number}" for number in range(4000)],
    "empty branches": [f"({'|' * 900})*{number}" for number in range(4000)],
    "long walks": [f"(a|.)*(b|.)*{number}" for number in range(4000)],
    "many classes": [f"({'[ab]|[^c]|' * 90}x){number}" for number in range(4000)],
}


@pytest.mark.parametrize("kind", KEYS)
def test_no_set_of_patterns_takes_long(tmp_path: Path, kind: str) -> None:
    config = {"r": 1, "lora_alpha": 1, "rank_pattern": dict.fromkeys(KEYS[kind], 1)}
    folder = write_adapter(tmp_path, {DEEP + A: ROW, DEEP + B: COLUMN}, config)
    begin = time.process_time()
    with suppress(AdapterInvalid):
        read_checkpoint(folder, BASE)
    assert time.process_time() - begin < 2  # half a second by the budget; slow machines are slow


@pytest.mark.parametrize("key", [r"[\u0100-\uffff]" * 60, r"(?i:[\x01-\U0010ffff])", "[Ā-\uffff]"])
def test_classes_that_take_long_to_compile_are_refused(key: str) -> None:
    begin = time.process_time()
    with pytest.raises(AdapterUnsupported, match="in a pattern"):
        Pattern(key, "rank_pattern", StepBudget())
    assert time.process_time() - begin < 0.05


@pytest.mark.parametrize(
    "key", ["[[]]", "[^[a]x", "[a--b]", "[a&&b]", "[a||b]", "[a~~b]", r"\\[[a]", "(?i)a", "a(?i)b"]
)
def test_what_re_warns_of_is_refused(key: str) -> None:
    with pytest.raises(AdapterUnsupported, match="in a pattern"):
        Pattern(key, "rank_pattern", StepBudget())


@pytest.mark.parametrize(
    ("key", "path"), [(r"\[[a]", "[a"), (r"[\[a]--", "[--"), ("a&&b", "a&&b"), ("[]a-]--", "]--")]
)
def test_what_re_does_not_warn_of_is_matched(key: str, path: str) -> None:
    assert Pattern(key, "rank_pattern", StepBudget()).matches(path)


def test_a_rank_for_every_module_of_a_large_model_is_affordable() -> None:
    budget = StepBudget()
    paths = [f"model.layers.{layer}.self_attn.p{p}_proj" for layer in range(80) for p in range(7)]
    for _ in ("rank_pattern", "alpha_pattern"):
        patterns = [Pattern(path.replace(".", r"\."), "rank_pattern", budget) for path in paths]
        for place, path in enumerate(paths):
            fits = (n for n, pattern in enumerate(patterns) if pattern.matches(path))
            assert next(fits) == place
