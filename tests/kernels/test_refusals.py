"""What can't be computed is refused by name, and before anything is; what can be is not refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaptercache.kernels import LoraBatch, LoraStack, add_lora, warmup
from adaptercache.kernels.spans import Span, share

WIDTHS = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
QKV = tuple(WIDTHS)
PAIRS = [(0, 2), (-1, 1), (1, 2)]


def dense_of(slots: int = 2, rank: int = 4, k: int = 12) -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        (0, module): (
            torch.randn(slots, rank, k, generator=generator),
            torch.randn(slots, n, rank, generator=generator),
            [0.5] * slots,
        )
        for module, n in WIDTHS.items()
    }


@pytest.fixture
def stack() -> LoraStack:
    return LoraStack.from_dense(dense_of())


def outputs() -> list[Tensor]:
    return [torch.zeros(5, n) for n in WIDTHS.values()]


def term(stack: LoraStack, x: Tensor) -> Tensor:
    y = torch.zeros(5, sum(WIDTHS.values()))
    add_lora(y, x, LoraBatch(stack, PAIRS), QKV, 0)
    return y


# Gradients.


@pytest.mark.parametrize("is_list", [True, False], ids=["list", "one"])
def test_an_input_that_asks_for_gradients_is_refused(stack: LoraStack, is_list: bool) -> None:
    x = torch.randn(5, 12, requires_grad=True)
    y: Any = outputs() if is_list else torch.zeros(5, 32)
    with pytest.raises(TypeError, match="no gradients, and x asks"):
        add_lora(y, x, LoraBatch(stack, PAIRS), QKV, 0)
    for each in y if is_list else [y]:
        assert not each.requires_grad
        assert not each.any()
    with torch.no_grad():
        add_lora(y, x, LoraBatch(stack, PAIRS), QKV, 0)
    assert y[0].any()


@pytest.mark.parametrize("made_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("called_in", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_list", [True, False], ids=["list", "one"])
def test_tensors_are_changed_in_whatever_mode_they_were_made(
    stack: LoraStack, made_in: Any, called_in: Any, is_list: bool
) -> None:
    """As on a GPU, where the kernels ask torch for nothing."""
    x = torch.randn(5, 12)
    want = term(stack, x)
    with made_in():
        whole = torch.zeros(5, 33)[:, 1:]
        y: Any = [*outputs()[:2], torch.zeros(5, 8)] if is_list else whole
    with called_in():
        add_lora(y, x, LoraBatch(stack, PAIRS), QKV, 0)
    got = torch.cat(y, dim=1) if is_list else y
    assert not got.requires_grad
    assert got.equal(want)


def test_what_autograd_kept_of_y_is_known_to_be_changed(stack: LoraStack) -> None:
    weights = torch.ones(5, 32, requires_grad=True)
    y = torch.zeros(5, 32)
    product = (weights * y).sum()  # keeps y
    add_lora(y, torch.randn(5, 12), LoraBatch(stack, PAIRS), QKV, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# Memory that is shared.


def test_memory_that_is_shared_is_refused(stack: LoraStack) -> None:
    batch, x = LoraBatch(stack, PAIRS), torch.randn(5, 12)
    buffer = torch.zeros(5, 48)
    q, k, v = outputs()
    shared: list[tuple[Any, Tensor, str]] = [
        (buffer[:, :32], buffer[:, 20:32], "y overlaps x"),
        (buffer[:, 8:40], buffer[:, :12], "y overlaps x"),
        ([q, k, buffer[:, :8]], buffer[:, 6:18], "y overlaps x"),
        ([q, buffer[:, :8], buffer[:, 4:12]], x, "twice: k_proj and v_proj"),
        ([buffer[:, :16], k, buffer[:, 8:16]], x, "twice: q_proj and v_proj"),
        ([q, k, k], x, "twice: k_proj and v_proj"),
        ([q, buffer.view(-1)[:40].view(5, 8), buffer[:, 8:16]], x, "twice"),  # strides differ
    ]
    for y, its_x, message in shared:
        with pytest.raises(ValueError, match=message):
            add_lora(y, its_x, batch, QKV, 0)
        assert not buffer.any()
        assert not any(each.any() for each in (q, k, v))


def test_columns_and_rows_of_one_buffer_are_not_shared(stack: LoraStack) -> None:
    x = torch.randn(5, 12)
    want = term(stack, x)
    buffer = torch.zeros(10, 44)
    apart: list[tuple[Any, Tensor]] = [
        (buffer[:5, :32], buffer[:5, 32:]),
        (buffer[:5, 12:], buffer[:5, :12]),
        (buffer[::2, :32], buffer[1::2, :12]),
        (list(buffer[:5, :32].split((16, 8, 8), dim=1)), buffer[:5, 32:]),
        ([buffer[:5, 12:28], buffer[5:, :8], buffer[:5, 28:36]], buffer[:5, :12]),
    ]
    for y, its_x in apart:
        buffer.zero_()
        its_x.copy_(x)
        add_lora(y, its_x, LoraBatch(stack, PAIRS), QKV, 0)
        assert (y if isinstance(y, Tensor) else torch.cat(y, dim=1)).equal(want)


@given(
    st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(1, 6)),
    st.integers(1, 5),
)
def test_memory_is_shared_where_a_byte_is(
    first: tuple[int, int, int], second: Span, rows: int
) -> None:
    """Against the sets of their bytes; rows of the second may overlap, as those of x may."""
    at, gap, width = first
    a, b = (at, width + gap, width), second

    def its(span: Span) -> set[int]:
        at, step, width = span
        return {at + row * step + i for row in range(rows) for i in range(width)}

    assert share(a, b, rows) == bool(its(a) & its(b))


# Batches.


@pytest.mark.parametrize("wrong", [1.5, 1.0, True, "1", None], ids=repr)
def test_a_slot_is_an_integer(stack: LoraStack, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"slot {wrong!r} in segments: an integer"):
        LoraBatch(stack, [(1, 1), (wrong, 1)])
    with pytest.raises(TypeError, match=f"{wrong!r} tokens of slot 1 in segments: an integer"):
        LoraBatch(stack, [(1, wrong)])


def test_integers_of_all_kinds_are_integers(stack: LoraStack) -> None:
    batch = LoraBatch(stack, [(torch.tensor(1), torch.tensor(2)), (0, 1)], pad_to=torch.tensor(4))  # type: ignore[list-item,arg-type]
    assert batch.segments == ((1, 2), (0, 1))
    assert {type(number) for pair in batch.segments for number in pair} == {int}
    assert type(batch.num_rows) is type(batch.num_tokens) is int


def test_pairs_that_come_one_by_one_are_kept(stack: LoraStack) -> None:
    batch = LoraBatch(stack, ((slot, 1) for slot in range(2)))  # type: ignore[arg-type]
    assert batch.token_slots.tolist() == [0, 1]


@pytest.mark.parametrize("wrong", [64.0, True, "64"], ids=repr)
def test_rows_are_an_integer(stack: LoraStack, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"pad_to is {wrong!r}: an integer"):
        LoraBatch(stack, [], pad_to=wrong)


@pytest.mark.parametrize("wrong", [64.0, True, "64", 17, [64]], ids=repr)
def test_a_rank_class_is_one_of_five(stack: LoraStack, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"rank_class is .*: one of 16, 64, 128") as caught:
        LoraBatch(stack, [(-1, 1)], rank_class=wrong)
    assert "ranks of up to" not in str(caught.value), "there are none"
    large = LoraStack.from_dense(dense_of(rank=40))
    with pytest.raises(ValueError, match="rank_class is 16, with ranks of up to 40"):
        LoraBatch(large, [(0, 1)], rank_class=16)


@pytest.mark.parametrize("wrong", [None, "stack", [1]], ids=repr)
def test_a_batch_is_of_a_stack(wrong: Any) -> None:
    with pytest.raises(TypeError, match="stack is of type"):
        LoraBatch(wrong, [])


# Names.


def test_what_is_given_for_something_else_is_named_by_its_type(stack: LoraStack) -> None:
    batch, x, y = LoraBatch(stack, PAIRS), torch.randn(5, 12), torch.zeros(5, 32)
    calls: list[tuple[tuple[Any, ...], str]] = [
        ((y, x, x), "batch is of type Tensor: give a LoraBatch"),
        ((y, [1.0], batch), "x is of type list: give a tensor"),
        (({"q": y}, x, batch), "y is of type dict: give a tensor, or a list"),
    ]
    for args, message in calls:
        with pytest.raises(TypeError, match=f"^{message}"):
            add_lora(*args, QKV, 0)


def test_sites_that_there_are_not_are_named(stack: LoraStack) -> None:
    batch, x = LoraBatch(stack, PAIRS), torch.randn(5, 12)
    with pytest.raises(ValueError, match=r"^layer 9 has no modules"):
        add_lora(torch.zeros(5, 16), x, batch, ["q_proj"], 9)
    with pytest.raises(ValueError, match="no module 'o_proj' in layer 0, there are q_proj, k_proj"):
        add_lora(torch.zeros(5, 16), x, batch, ["o_proj"], 0)


def test_a_module_that_is_named_twice_is_computed_twice(stack: LoraStack) -> None:
    y = torch.zeros(5, 32)
    add_lora(y, torch.randn(5, 12), LoraBatch(stack, PAIRS), ["q_proj", "q_proj"], 0)
    assert y[:, :16].any()
    assert y[:, :16].equal(y[:, 16:])


# Dense tensors.


def with_q(dense: dict[Any, Any], place: int, value: Any) -> dict[Any, Any]:
    """``dense`` with another A (0), B (1) or scalings (2) for q."""
    parts = list(dense[0, "q_proj"])
    parts[place] = value
    return dense | {(0, "q_proj"): tuple(parts)}


def wrong_dense() -> list[tuple[Any, Sequence[Any] | None, type[Exception], str]]:
    dense = dense_of()
    a, b, scalings = dense[0, "q_proj"]
    q = {(0, "q_proj"): (a.double(), b.double(), scalings)}
    k = {(0, "k_proj"): dense[0, "k_proj"]}
    large = (torch.zeros(2, 600, 12), torch.zeros(2, 8, 600), scalings)
    other = r"layer 0, 'k_proj'.* torch.float32.*layer 0, 'q_proj' torch.float64"
    return [
        # As keys and values go.
        ([1], None, TypeError, "dense is of type list: give a dict"),
        ({"q_proj": dense[0, "q_proj"]}, None, ValueError, "'q_proj': a key is"),
        ({(0, 1, "q"): dense[0, "q_proj"]}, None, ValueError, "a key is"),
        ({(True, "q"): dense[0, "q_proj"]}, None, ValueError, "a key is"),
        ({(-1, "q"): dense[0, "q_proj"]}, None, ValueError, "layer -1: layers count from 0"),
        ({(0, "q"): (a, b)}, None, TypeError, r"layer 0, 'q': give \(A, B, scalings\)"),
        ({(0, "q"): a}, None, TypeError, r"layer 0, 'q': give \(A, B, scalings\)"),
        (with_q(dense, 0, a.tolist()), None, TypeError, "'q_proj': A is of type list"),
        (with_q(dense, 1, None), None, TypeError, "'q_proj': B is of type NoneType"),
        # Ranks.
        ({(0, "q"): large}, None, ValueError, "layer 0, 'q': r is 600: 1 to 512"),
        ({(0, "q"): (a[:, :0], b[:, :, :0], scalings)}, None, ValueError, "r is 0: 1 to 512"),
        (dense, [2.5, 1], TypeError, "slot 0 is of rank 2.5: an integer"),
        (dense, [1, True], TypeError, "slot 1 is of rank True: an integer"),
        (dense, 4, TypeError, "ranks is of type int"),
        (dense, torch.tensor(4), TypeError, "ranks is of type int"),  # type: ignore[list-item]
        # Dtypes: both that differ are named, whichever comes first.
        (q | k, None, ValueError, other),
        (with_q(dense, 2, scalings) | {}, [1, 5], ValueError, "slot 1 is of rank 5: A and B hold"),
        (with_q(dense, 0, a.double()), None, ValueError, "'q_proj': A is torch.float64, B is"),
        (q, None, ValueError, "dtype 'float64'"),
        # Scalings.
        (with_q(dense, 2, 1.0), None, TypeError, "'q_proj': scalings is of type float"),
        (with_q(dense, 2, {0: 1.0, 1: 2.0}), None, TypeError, "scalings is of type dict"),
        (with_q(dense, 2, [torch.ones(2), 1.0]), None, TypeError, "of slot 0: a number"),
        (with_q(dense, 2, ["1", "2"]), None, TypeError, "'q_proj': scaling '1' of slot 0: a numb"),
        (with_q(dense, 2, [1.0, None]), None, TypeError, "scaling None of slot 1: a number"),
        (with_q(dense, 2, torch.ones(2, 2)), None, ValueError, r"scalings are \[2, 2\]"),
        (with_q(dense, 2, torch.tensor(1.0)), None, ValueError, r"scalings are \[\]"),
        (with_q(dense, 2, [1.0, float("nan")]), None, ValueError, "scaling nan of slot 1"),
        (with_q(dense, 2, [1e300, 1.0]), None, ValueError, "scaling 1e[+]300 of slot 0"),
        (with_q(dense, 2, torch.tensor([1, torch.inf])), None, ValueError, "inf of slot 1"),
    ]


@pytest.mark.parametrize(
    ("dense", "ranks", "error", "message"),
    [pytest.param(*each, id=each[3]) for each in wrong_dense()],
)
def test_tensors_that_make_no_stack_are_named(
    dense: Any, ranks: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LoraStack.from_dense(dense, ranks)


@pytest.mark.parametrize(
    "of",
    [list, tuple, torch.tensor, lambda numbers: [torch.tensor(each) for each in numbers]],
    ids=["list", "tuple", "tensor", "tensors"],
)
def test_scalings_of_all_kinds(of: Any) -> None:
    stack = LoraStack.from_dense(with_q(dense_of(), 2, of([2, 3])))
    assert [stack.dense(slot, 0, "q_proj")[2] for slot in (0, 1)] == [2.0, 3.0]  # type: ignore[index]


def test_parameters_are_copied_like_all_tensors() -> None:
    dense = {
        key: (torch.nn.Parameter(a), torch.nn.Parameter(b), torch.ones(2, requires_grad=True))
        for key, (a, b, _) in dense_of().items()
    }
    stack = LoraStack.from_dense(dense)
    assert not stack.arena.requires_grad
    assert stack.dense(1, 0, "q_proj")[0].equal(dense[0, "q_proj"][0][1])  # type: ignore[index]


def test_a_stack_may_have_no_slots() -> None:
    batch = LoraBatch(LoraStack.from_dense(dense_of(slots=0)), [(-1, 5)])
    y = torch.zeros(5, 32)
    add_lora(y, torch.randn(5, 12), batch, QKV, 0)
    assert not y.any()


# Warming up.


@pytest.mark.parametrize(
    ("groups", "num_rows", "error", "message"),
    [
        (None, -1, ValueError, "num_rows is -1"),
        (None, "x", TypeError, "num_rows is 'x': an integer"),
        (None, True, TypeError, "num_rows is True: an integer"),
        ("q_proj", 8, TypeError, "groups is one string"),
        (["q_proj"], 8, TypeError, "one string"),
        ([()], 8, ValueError, "no modules are named"),
    ],
    ids=str,
)
def test_what_cannot_be_warmed_up_is_refused(
    stack: LoraStack, groups: Any, num_rows: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        warmup(stack, groups, num_rows)


def test_every_order_of_names_is_a_group(stack: LoraStack) -> None:
    for groups in itertools.permutations(QKV):
        warmup(stack, [groups], 8)


# Modules that no adapter has.


@pytest.mark.parametrize(
    ("modules", "own", "passed_over"),
    [
        (None, None, ()),
        (None, ("q_proj",), ("k_proj", "v_proj")),
        (("k_proj", "q_proj"), ("q_proj",), ("v_proj",)),
        ((), None, QKV),
    ],
)
def test_calls_for_modules_that_no_adapter_has_launch_nothing(
    stack: LoraStack, modules: Any, own: Any, passed_over: Sequence[str]
) -> None:
    batch = LoraBatch(stack, PAIRS, modules=modules, own_modules=own)
    x = torch.randn(5, 12)
    for name, width in WIDTHS.items():
        y = torch.zeros(5, width)
        add_lora(y, x, batch, (name,), 0)
        assert y.any() == (name not in passed_over)
    y = torch.zeros(5, sum(WIDTHS.values()))
    add_lora(y, x, batch, QKV, 0)  # one that somebody has is enough
    assert y.any() == bool(batch.modules)
    with pytest.raises(ValueError, match="y is"):  # what is passed over is checked as well
        add_lora(torch.zeros(5, 1), x, batch, ("v_proj",), 0)


def test_a_batch_without_adapters_has_all_modules(stack: LoraStack) -> None:
    assert LoraBatch(stack, [(-1, 3)], own_modules=()).modules == set(QKV)  # it may be captured
    assert LoraBatch(stack, [(-1, 3)], modules=()).modules == set()
    assert LoraBatch(stack, []).modules == set(QKV)


def test_modules_of_a_batch_that_there_are_not_are_refused(stack: LoraStack) -> None:
    with pytest.raises(ValueError, match="no module 'q_prj': there are q_proj, k_proj, v_proj"):
        LoraBatch(stack, PAIRS, modules=["q_prj"])
    with pytest.raises(TypeError, match="one string"):
        LoraBatch(stack, PAIRS, modules="q_proj")
    for modules, told in ((["v_proj", "q_proj"], "q_proj, v_proj"), ((), "none")):
        with pytest.raises(ValueError, match=f"with k_proj is in the batch: modules are {told}"):
            LoraBatch(stack, PAIRS, modules=modules, own_modules=[*modules, "k_proj"])
