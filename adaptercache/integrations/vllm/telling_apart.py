"""Two adapters of one name: the one from before, which still runs or has left KV, and the new one.

vLLM compares `LoRARequest`s by their names alone, and a worker collects those of a batch in a set.
Of two with one name it loads one, looks for the other's number and dies, and the engine with it:
whenever a name is unloaded and loaded again while a request of it runs. So in each of vLLM's
processes the number counts, too.
"""

from __future__ import annotations

from types import SimpleNamespace

from vllm.lora.request import LoRARequest

__all__ = ["kv_tells_apart", "tell_apart"]


def tell_apart() -> None:
    """Make `LoRARequest`s of one name and two numbers differ, unless they do already."""
    one, other = LoRARequest("a", 1, "/a"), LoRARequest("a", 2, "/b")
    if one != other and len({one, other}) == 2:
        return
    LoRARequest.__eq__ = _equal
    LoRARequest.__hash__ = _hash
    assert len({one, other}) == 2, "vLLM's LoRARequest can't be told to compare numbers"


def _equal(one: LoRARequest, other: object) -> bool:
    return isinstance(other, LoRARequest) and _facts(one) == _facts(other)


def _hash(one: LoRARequest) -> int:
    return hash(_facts(one))


def _facts(one: LoRARequest) -> tuple[str, int]:
    return one.lora_name, one.lora_int_id


def kv_tells_apart() -> bool:
    """Whether KV of one name and two paths is two in vLLM's prefix cache, as it is in 0.32; where
    that can't be found out, no."""
    try:
        from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys as keys

        requests = [
            SimpleNamespace(lora_request=LoRARequest("a", 1, path)) for path in ("/a", "/b")
        ]
        return bool(keys(requests[0]) != keys(requests[1]))
    except (ImportError, AttributeError, TypeError):
        return False
