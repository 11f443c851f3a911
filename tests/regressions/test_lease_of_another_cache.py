"""A lease's slot is a row of its own cache's tables: another cache computed with the adapter that
it had in a slot of that number."""

from __future__ import annotations

from typing import Any

import pytest

from adaptercache import Request


@pytest.mark.parametrize("has_it", [True, False])
def test_a_batch_and_an_admission_refuse_it(tiny: Any, has_it: bool) -> None:
    source = tiny.source("a", "b")
    with tiny.cache(source) as ours, tiny.cache(source) as theirs, theirs.acquire("a") as lease:
        tiny.load(ours, *(("b", "a") if has_it else "b"))
        of_another = "'a' is of another cache"
        with pytest.raises(RuntimeError, match=of_another), ours.lora_batch([(lease, 1)]):
            pass
        with pytest.raises(RuntimeError, match=of_another):
            ours.admit([Request("new", "b")], running=[(Request("old", "a"), lease)])
        with theirs.lora_batch([(lease, 1)]):
            pass
        assert not ours.stats().leases


def test_the_base_model_is_everybodys(tiny: Any) -> None:
    with tiny.cache() as ours, tiny.cache() as theirs:
        base = theirs.acquire(None)
        with ours.lora_batch([(base, 2)]) as batch:
            assert batch.num_rows == 2
