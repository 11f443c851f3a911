"""What rank 0 knows of the others, and the values that they send each other."""

from __future__ import annotations

import pickle

import pytest

from adaptercache.batch import Load
from adaptercache.peers import Evict, Orders, Peers, Report

A, B = b"a" * 32, b"b" * 32


def wants(peers: Peers, *digests: bytes) -> Orders:
    return peers.orders([], [(digest[:1].decode(), digest) for digest in digests])


def holds(rank: int, number: int, *digests: bytes, on_gpu: tuple[bytes, ...] = ()) -> Report:
    return Report(rank, number, frozenset(digests), frozenset(on_gpu))


def test_orders_are_small_values() -> None:
    peers = Peers([1])
    peers.load(Load(A, 2, tuple(range(40))))
    peers.evict(B)
    orders = peers.orders([(f"r{n}", "a", A, 1, 4) for n in range(64)], [("b", B)] * 256)
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert len(pickle.dumps(orders)) < 8192
    assert orders.acts == (Load(A, 2, tuple(range(40))), Evict(B))
    assert wants(peers).acts == ()


def test_a_load_waits_until_every_rank_holds_it() -> None:
    peers = Peers([1, 2])
    assert not peers.have(A)
    wants(peers, A)
    peers.hear(holds(1, 1, A))
    assert not peers.have(A)
    peers.hear(holds(2, 1, A))
    assert peers.have(A)


def test_what_was_not_wanted_for_a_while_may_be_gone() -> None:
    """A rank keeps what is wanted, and only that: an old report says nothing of it any more."""
    peers = Peers([1])
    wants(peers, A)
    peers.hear(holds(1, 1, A))
    wants(peers)  # here it lets go
    wants(peers, A)
    assert not peers.have(A)
    peers.hear(holds(1, 2, A))
    assert not peers.have(A)
    peers.hear(holds(1, 3, A))
    assert peers.have(A)


def test_an_adapter_is_ready_once_every_rank_has_loaded_it() -> None:
    peers = Peers([1, 2])
    peers.load(Load(A, 0, (1,)))
    number = wants(peers).number
    assert peers.hear(holds(1, number - 1, on_gpu=(A,))) == ([], {})  # of a copy before this one
    assert peers.hear(holds(1, number, on_gpu=(A,))) == ([], {})
    assert peers.are_loading(A)
    assert peers.hear(holds(2, number)) == ([], {})
    assert peers.hear(holds(2, number, on_gpu=(A,))) == ([A], {})
    assert not peers.are_loading(A)


def test_one_that_is_evicted_and_loaded_again_is_waited_for_again() -> None:
    peers = Peers([1])
    peers.load(Load(A, 0, (1,)))
    first = wants(peers).number
    peers.evict(A)
    peers.load(Load(A, 1, (2,)))
    second = wants(peers).number
    assert peers.hear(holds(1, first, on_gpu=(A,))) == ([], {})
    assert peers.hear(holds(1, second, on_gpu=(A,))) == ([A], {})


def test_a_failure_is_told_once_until_it_is_over() -> None:
    peers = Peers([1])
    failed = Report(1, 1, failed={"x": "no"})
    assert peers.hear(failed) == ([], {"x": "no"})
    assert peers.hear(failed) == ([], {})
    peers.hear(Report(1, 2))
    assert peers.hear(Report(1, 3, failed={"x": "no"})) == ([], {"x": "no"})
    assert peers.hear(Report(1, 2, failed={"y": "late"})) == ([], {})


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 3"):
        Peers([1, 2]).hear(Report(3, 1))
