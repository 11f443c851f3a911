"""A batch knows what its adapters have, so that nothing is launched for modules that none has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Tiny

from adaptercache import AdapterCache, Tier
from adaptercache.kernels import LoraBatch, add_lora

QKV = ("q_proj", "k_proj", "v_proj")


def cache_of(*modules: str) -> AdapterCache:
    """With an adapter for each of the modules, called as it is, and ``all``."""
    source = Tiny.source()
    source.put("all", *Tiny.tensors(9, targets=Tiny.layout.modules))
    for seed, module in enumerate(modules):
        source.put(module, *Tiny.tensors(seed, targets=(module,)))
    return Tiny.cache(source)


def term(batch: LoraBatch, modules: tuple[str, ...]) -> torch.Tensor:
    stack = batch.stack
    group = stack.group(1, modules)
    x = torch.ones(batch.num_rows, group.in_features, device=stack.device)
    y = torch.zeros(batch.num_rows, sum(group.widths), device=stack.device)
    add_lora(y, x, batch, modules, 1)
    return y


def test_a_batch_has_the_modules_of_its_adapters() -> None:
    with cache_of("q_proj", "down_proj") as cache:
        leases = {each: cache.acquire(each).result(10) for each in ("q_proj", "down_proj", "all")}
        base = cache.acquire(None)
        for ids, modules in (
            (["q_proj"], {"q_proj"}),
            (["q_proj", "down_proj", "q_proj"], {"q_proj", "down_proj"}),
            (["q_proj", "all"], set(cache.layout.modules)),
        ):
            with cache.lora_batch([(base, 2), *((leases[each], 1) for each in ids)]) as batch:
                assert batch.modules == modules
                q, down = term(batch, ("q_proj",)), term(batch, ("down_proj",))
                assert q[2].any()
                assert not q[:2].any()
                assert bool(down.any()) == ("down_proj" in modules)
                assert bool(term(batch, QKV)[:, 32:].any()) == ("k_proj" in modules)
        with cache.lora_batch([(base, 2)]) as batch:  # it may be captured for others
            assert batch.modules == set(cache.layout.modules)


def test_modules_that_are_fixed_may_be_any_names() -> None:
    """Of an iterator that a check has spent none would be left, and the adapter do nothing."""
    with cache_of("q_proj") as cache:
        lease = cache.acquire("q_proj").result(10)
        for names in ({"q_proj": 1, "o_proj": 2}, ["o_proj", "q_proj", "q_proj"]):
            with cache.lora_batch([(lease, 1)], modules_to=names) as batch:
                assert batch.modules == {"q_proj", "o_proj"}
        spent: Any = iter(["q_proj", "o_proj"])
        with cache.lora_batch([(lease, 1)], modules_to=spent) as batch:
            assert batch.modules == {"q_proj", "o_proj"}
            assert term(batch, ("q_proj",)).any()
        one = cache.lora_batch([(lease, 1)], modules_to="q_proj")
        with pytest.raises(TypeError, match="one string"), one:
            pytest.fail("it was let in")


def test_modules_that_are_fixed_hold_those_of_the_adapters() -> None:
    with cache_of("q_proj", "down_proj") as cache:
        leases = [cache.acquire(each).result(10) for each in ("q_proj", "down_proj")]
        with cache.lora_batch([(leases[0], 1)], modules_to=QKV) as batch:
            assert batch.modules == set(QKV)
            assert term(batch, QKV)[:, :32].any()
            assert not term(batch, ("down_proj",)).any()
        opened = cache.lora_batch([(leases[0], 1), (leases[1], 1)], modules_to=QKV)
        with pytest.raises(ValueError, match="an adapter with down_proj is in the batch"), opened:
            pytest.fail("it was let in")
        with (
            pytest.raises(ValueError, match="no module 'q'"),
            cache.lora_batch([], modules_to=["q"]),
        ):
            pytest.fail("it was let in")
        for lease in leases:  # nothing is held by what was refused
            lease.release()
        cache.remove("down_proj")
        assert Tiny.wait_until(lambda: cache.resident(Tier.GPU) == {"q_proj"})
