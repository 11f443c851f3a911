"""The allocator and its preview against a list and a dict; what must fail changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adaptercache.pages import Owner, PageAllocator

NUM_PAGES = 12
OWNERS = st.sampled_from(Owner)
SIZES = st.integers(0, NUM_PAGES + 1)
ANY_PAGES = st.lists(st.integers(-2, NUM_PAGES + 1), max_size=4)


class Model:
    def __init__(self) -> None:
        self.free_pages = list(range(NUM_PAGES))  # the first is the next to go
        self.owners: dict[int, Owner] = {}

    def pages_of(self, owner: Owner) -> list[int]:
        return [page for page in self.owners if self.owners[page] is owner]

    def take(self, ids: list[int], owner: Owner) -> None:
        self.free_pages = [page for page in self.free_pages if page not in ids]
        self.owners.update(dict.fromkeys(ids, owner))

    def free(self, ids: list[int]) -> None:
        self.free_pages = ids + self.free_pages
        for page in ids:
            del self.owners[page]


def subsets(pages: list[int]) -> st.SearchStrategy[list[int]]:
    """Some of these pages, in any order."""
    return st.lists(st.sampled_from(pages), unique=True) if pages else st.just([])


class PagesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.model = Model()

    @rule(n=SIZES, owner=OWNERS)
    def allocate(self, n: int, owner: Owner) -> None:
        ids = self.pages.allocate(n, owner)
        if n > len(self.model.free_pages):
            assert ids is None
        else:
            assert ids == tuple(self.model.free_pages[:n])
            self.model.take(list(ids), owner)

    @rule(data=st.data(), owner=OWNERS)
    def take(self, data: st.DataObject, owner: Owner) -> None:
        ids = data.draw(subsets(self.model.free_pages) | ANY_PAGES)
        if len(set(ids)) == len(ids) and set(ids) <= set(self.model.free_pages):
            self.pages.take(ids, owner)
            self.model.take(ids, owner)
        else:
            with pytest.raises(ValueError, match="is not free"):
                self.pages.take(ids, owner)

    @rule(data=st.data(), owner=OWNERS)
    def free(self, data: st.DataObject, owner: Owner) -> None:
        mine = self.model.pages_of(owner)
        ids = data.draw(subsets(mine) | ANY_PAGES)
        if len(set(ids)) == len(ids) and set(ids) <= set(mine):
            self.pages.free(ids, owner)
            self.model.free(ids)
        else:
            with pytest.raises(ValueError, match=f"is not {owner.name}"):
                self.pages.free(ids, owner)

    @rule(data=st.data(), owner=OWNERS)
    def do_what_was_planned_on_a_preview(self, data: st.DataObject, owner: Owner) -> None:
        preview = self.pages.preview()
        mine = self.model.pages_of(owner)
        plan: list[tuple[list[int], int, tuple[int, ...] | None]] = []
        for _ in range(data.draw(st.integers(1, 5))):
            freed = data.draw(subsets(mine))
            preview.free(freed)
            n = data.draw(SIZES)
            ids = preview.allocate(n)
            mine = [page for page in mine if page not in freed] + list(ids or ())
            plan.append((freed, n, ids))
        self.everything_is_as_in_the_model()  # planning changed nothing
        for freed, n, ids in plan:
            self.pages.free(freed, owner)
            self.model.free(freed)
            assert self.pages.allocate(n, owner) == ids
            self.model.take(list(ids or ()), owner)
        assert preview.num_free == self.pages.num_free

    @rule(data=st.data(), owner=OWNERS)
    def take_what_a_preview_allocated(self, data: st.DataObject, owner: Owner) -> None:
        preview = self.pages.preview()
        freed = data.draw(subsets(self.model.pages_of(owner)))
        preview.free(freed)
        ids = preview.allocate(data.draw(SIZES)) or ()
        self.pages.free(freed, owner)
        self.pages.take(ids, owner)
        self.model.free(freed)
        assert ids == tuple(self.model.free_pages[: len(ids)])
        self.model.take(list(ids), owner)

    @rule(data=st.data())
    def a_preview_frees_only_what_somebody_owns(self, data: st.DataObject) -> None:
        ids = data.draw(subsets(list(self.model.owners)) | ANY_PAGES)
        preview = self.pages.preview()
        if len(set(ids)) == len(ids) and set(ids) <= set(self.model.owners):
            preview.free(ids)
            assert preview.num_free == len(self.model.free_pages) + len(ids)
        else:
            with pytest.raises(ValueError, match="are allocated"):
                preview.free(ids)
            assert preview.num_free == len(self.model.free_pages)

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        for page in range(-2, NUM_PAGES + 2):
            assert self.pages.owner_of(page) is self.model.owners.get(page)
        for owner in Owner:
            assert self.pages.count(owner) == len(self.model.pages_of(owner))
        assert self.pages.num_free == len(self.model.free_pages)
        assert self.pages.preview().allocate(self.pages.num_free) == tuple(self.model.free_pages)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(stateful_step_count=40)
