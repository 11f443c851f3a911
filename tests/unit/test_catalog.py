"""What ids stand for, and which failed a short while ago."""

from __future__ import annotations

import pytest

from adaptercache import AdapterNotFound
from adaptercache.catalog import Catalog, Failures, Known

ERROR = AdapterNotFound("gone", adapter_id="a")


def known(digest: bytes, revision: str = "r") -> Known:
    return Known(revision, digest, 512)


def test_content_that_the_last_id_left_is_told() -> None:
    catalog = Catalog()
    catalog.learn("a", known(b"1"))
    catalog.learn("b", known(b"1"))
    assert catalog.learn("a", known(b"2")) is None
    assert catalog.learn("b", known(b"2")) == b"1"
    assert not catalog.is_named(b"1")
    assert catalog.ids_of(b"2") == {"a", "b"}


def test_a_new_revision_of_the_same_content_leaves_nothing() -> None:
    catalog = Catalog()
    catalog.learn("a", known(b"1", "r1"))
    assert catalog.learn("a", known(b"1", "r2")) is None
    assert catalog.get("a") == known(b"1", "r2")
    assert catalog.forget("a") == b"1"


def test_forgetting_what_nobody_knows_is_fine() -> None:
    assert Catalog().forget("a") is None


def test_an_id_that_was_forgotten_leaves_no_trace() -> None:
    catalog = Catalog()
    catalog.learn("a", known(b"1"))
    catalog.forget("a")
    assert (len(catalog), catalog.get("a"), catalog.ids_of(b"1")) == (0, None, frozenset())


@pytest.mark.parametrize(
    ("times", "seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (6, 32.0), (7, 60.0), (40, 60.0)]
)
def test_a_failure_is_remembered_longer_each_time_up_to_a_bound(times: int, seconds: float) -> None:
    failures = Failures()
    for _ in range(times):
        failures.add("a", ERROR, 100.0)
    assert failures.get("a", 100.0 + seconds - 0.01) is ERROR
    assert failures.get("a", 100.0 + seconds) is None


def test_a_failure_counts_on_after_it_has_lapsed() -> None:
    failures = Failures()
    failures.add("a", ERROR, 0.0)
    failures.add("a", ERROR, 50.0)
    assert failures.get("a", 51.5) is ERROR


def test_a_success_starts_the_count_anew() -> None:
    failures = Failures()
    failures.add("a", ERROR, 0.0)
    failures.clear("a")
    failures.add("a", ERROR, 10.0)
    assert failures.get("a", 11.0) is None


def test_the_table_of_failures_is_bounded_and_drops_the_oldest() -> None:
    failures = Failures(capacity=3)
    for number in range(10):
        failures.add(f"a{number}", ERROR, 0.0)
    assert len(failures) == 3
    assert [failures.get(f"a{n}", 0.5) is ERROR for n in (6, 7, 8, 9)] == [False, True, True, True]
