from __future__ import annotations

import pytest

from adaptercache.pages import Owner, PageAllocator

ADAPTER, KV = Owner.ADAPTER, Owner.KV


def test_any_free_pages_serve_any_request_that_they_suffice_for() -> None:
    pages = PageAllocator(8)
    assert pages.allocate(8, KV) is not None
    pages.free([1, 3, 5, 7], KV)
    assert set(pages.allocate(4, ADAPTER) or ()) == {1, 3, 5, 7}


def test_a_request_for_more_than_is_free_gets_nothing() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(5, KV) is None
    assert (pages.num_free, pages.count(KV)) == (4, 0)


def test_no_pages_are_an_answer_too() -> None:
    pages = PageAllocator(1)
    assert pages.allocate(1, KV) == (0,)
    assert pages.allocate(0, KV) == ()
    assert pages.preview().allocate(0) == ()


def test_an_allocator_may_have_no_pages() -> None:
    pages = PageAllocator(0)
    assert (pages.num_pages, pages.num_free, pages.allocate(1, KV)) == (0, 0, None)


def test_what_was_freed_last_is_used_first_and_in_the_same_order() -> None:
    pages = PageAllocator(8)
    first, second = pages.allocate(3, KV), pages.allocate(3, KV)
    assert first is not None
    assert second is not None
    pages.free(second, KV)
    pages.free(first, KV)
    assert pages.allocate(6, ADAPTER) == first + second


def test_pages_are_counted_by_owner() -> None:
    pages = PageAllocator(8)
    pages.allocate(2, ADAPTER)
    pages.allocate(3, KV)
    assert (pages.count(ADAPTER), pages.count(KV), pages.num_free) == (2, 3, 3)
    assert [pages.owner_of(page) for page in (0, 2, 7)] == [ADAPTER, KV, None]


def test_pages_that_are_not_there_have_no_owner() -> None:
    pages = PageAllocator(2)
    pages.allocate(2, KV)
    assert pages.owner_of(-1) is None
    assert pages.owner_of(2) is None


@pytest.mark.parametrize(
    "ids",
    [[0, 4], [0, 2], [0, 0], [0, -8], [0, 8]],
    ids=["free", "another owner's", "twice", "negative", "too large"],
)
def test_a_free_that_is_wrong_in_one_page_changes_nothing(ids: list[int]) -> None:
    pages = PageAllocator(8)
    pages.allocate(2, ADAPTER)
    pages.allocate(2, KV)
    with pytest.raises(ValueError, match=f"page {ids[1]} is not ADAPTER"):
        pages.free(ids, ADAPTER)
    assert (pages.count(ADAPTER), pages.count(KV), pages.num_free) == (2, 2, 4)
    pages.free([0, 1], ADAPTER)


@pytest.mark.parametrize("ids", [[4, 0], [4, 4], [4, -1], [4, 8]])
def test_a_take_that_is_wrong_in_one_page_changes_nothing(ids: list[int]) -> None:
    pages = PageAllocator(8)
    pages.allocate(2, KV)
    with pytest.raises(ValueError, match=f"page {ids[1]} is not free"):
        pages.take(ids, ADAPTER)
    assert (pages.count(ADAPTER), pages.num_free) == (0, 6)
    assert pages.allocate(6, KV) == (2, 3, 4, 5, 6, 7)


def test_pages_can_be_taken_from_anywhere_in_the_stack() -> None:
    pages = PageAllocator(6)
    pages.take([3, 1], ADAPTER)
    assert pages.count(ADAPTER) == 2
    assert pages.allocate(4, KV) == (0, 2, 4, 5)


def test_pages_come_back_as_plain_ints_whatever_they_were_given_as() -> None:
    numpy = pytest.importorskip("numpy")
    pages = PageAllocator(2)
    pages.allocate(2, KV)
    pages.free(numpy.array([0, 1]), KV)
    assert [type(page) for page in pages.allocate(2, KV) or ()] == [int, int]


def test_a_page_number_is_an_integer() -> None:
    pages = PageAllocator(2)
    pages.allocate(2, KV)
    with pytest.raises(TypeError):
        pages.free([1.0], KV)  # type: ignore[list-item]


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(-1)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(4).allocate(-1, KV)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(4).preview().allocate(-1)


def test_a_preview_reuses_first_what_was_freed_on_it() -> None:
    pages = PageAllocator(8)
    pages.allocate(4, ADAPTER)
    preview = pages.preview()
    preview.free([2, 1])
    assert preview.allocate(3) == (2, 1, 4)
    assert preview.allocate(4) is None
    assert preview.num_free == 3


def test_a_preview_leaves_the_allocator_as_it_is() -> None:
    pages = PageAllocator(8)
    pages.allocate(4, ADAPTER)
    preview = pages.preview()
    preview.free([0, 1])
    preview.allocate(5)
    assert (pages.count(ADAPTER), pages.num_free) == (4, 4)
    assert pages.allocate(4, KV) == (4, 5, 6, 7)


def test_what_a_preview_allocated_can_be_freed_on_it_once() -> None:
    preview = PageAllocator(4).preview()
    assert preview.allocate(2) == (0, 1)
    preview.free([1])
    with pytest.raises(ValueError, match="are allocated"):
        preview.free([1])
    assert preview.num_free == 3
