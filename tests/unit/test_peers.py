"""What rank 0 knows of the others, and the values that they send each other."""

from __future__ import annotations

import pickle

import pytest

from adaptercache.peers import Evict, Orders, Peers, Report
from adaptercache.standing import Load

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


def test_a_report_holds_until_the_next_orders_alone() -> None:
    """With them a rank may let something go, for the sake of who is ahead."""
    peers = Peers([1])
    wants(peers, A)
    peers.hear(holds(1, 1, A))
    assert peers.have(A)
    wants(peers, B, A)
    assert not peers.have(A)
    peers.hear(holds(1, 2, B))
    assert peers.have(B)
    assert not peers.have(A)


def test_an_adapter_is_ready_once_every_rank_has_loaded_it() -> None:
    peers = Peers([1, 2])
    peers.load(Load(A, 0, (1,)))
    number = wants(peers).number
    assert peers.hear(holds(1, number - 1, on_gpu=(A,))) == ([], [])  # of a copy before this one
    assert peers.hear(holds(1, number, on_gpu=(A,))) == ([], [])
    assert peers.are_loading(A)
    assert peers.hear(holds(2, number)) == ([], [])
    assert peers.hear(holds(2, number, on_gpu=(A,))) == ([A], [])
    assert not peers.are_loading(A)


def test_one_that_is_evicted_and_loaded_again_is_waited_for_again() -> None:
    peers = Peers([1])
    peers.load(Load(A, 0, (1,)))
    first = wants(peers).number
    peers.evict(A)
    peers.load(Load(A, 1, (2,)))
    second = wants(peers).number
    assert peers.hear(holds(1, first, on_gpu=(A,))) == ([], [])
    assert peers.hear(holds(1, second, on_gpu=(A,))) == ([A], [])


def test_a_copy_that_fails_on_one_rank_is_told_until_it_is_evicted() -> None:
    peers = Peers([1, 2])
    peers.load(Load(A, 0, (1,)))
    number = wants(peers).number
    broken = Report(1, number, broken=frozenset([A]))
    assert peers.hear(Report(1, number - 1, broken=frozenset([A]))) == ([], [])  # an earlier one
    for _ in range(2):
        assert peers.hear(broken) == ([], [A])
    assert peers.hear(holds(2, number, on_gpu=(A,))) == ([], [])
    assert peers.are_loading(A)
    peers.evict(A)
    assert peers.hear(broken) == ([], [])


def test_a_report_that_comes_late_changes_nothing() -> None:
    peers = Peers([1])
    wants(peers, A)
    peers.hear(holds(1, 1, A))
    peers.hear(holds(1, 0))
    assert peers.have(A)


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 3"):
        Peers([1, 2]).hear(Report(3, 1))
