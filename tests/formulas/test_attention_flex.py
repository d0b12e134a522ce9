"""Pairs that flex_attention attends, by block mask, against mask_mod asked pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch._higher_order_ops.flex_attention import flex_attention_backward as flex_backward_operator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import (
    BlockMask,
    _create_empty_block_mask,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torch.utils._python_dispatch import TorchDispatchMode

from mfu_monitor.formulas import attention_flex as flex
from mfu_monitor.formulas.attention_flex import FlexPairs, flex_backward_cost, flex_forward_cost, flex_pairs
from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.formulas.registry import bind_call, find_formula

MaskMod = Callable[..., torch.Tensor]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(size: int) -> MaskMod:
    return lambda b, h, q, k: (q - k).abs() < size


def documents(ids: torch.Tensor) -> MaskMod:
    return lambda b, h, q, k: ids[q] == ids[k]


def heads_differ(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k + h * 3 - b


def operands(B: int = 1, H: int = 2, S: int = 128, D: int = 16, Hkv: int | None = None, Sk: int | None = None) -> Any:
    query = torch.zeros(B, H, S, D)
    key = torch.zeros(B, Hkv or H, S if Sk is None else Sk, D)
    return query, key, key


def brute_force(mask_mod: MaskMod, B: int, H: int, q_len: int, k_len: int) -> int:
    return sum(
        bool(mask_mod(*(torch.tensor(i) for i in (b, h, q, k))))
        for b in range(B)
        for h in range(H)
        for q in range(q_len)
        for k in range(k_len)
    )


def call_of(query: Any, key: Any, value: Any, block_mask: BlockMask) -> OperatorCall:
    arguments = {"query": query, "key": key, "value": value, "block_mask": block_mask.as_tuple()}
    return OperatorCall("higher_order::flex_attention", arguments, None)


def cost_of(call: OperatorCall) -> OpCost:
    found = find_formula(call.name)
    assert found is not None, call.name
    return found(call)


def pairs_of(query: torch.Tensor, key: torch.Tensor, block_mask: BlockMask) -> FlexPairs:
    found = flex_pairs(query, key, block_mask.as_tuple())
    assert found is not None
    return found


def mask_of(mask_mod: MaskMod, q_len: int, k_len: int, **kwargs: Any) -> BlockMask:
    return create_block_mask(mask_mod, kwargs.pop("B", None), kwargs.pop("H", None), q_len, k_len, "cpu", **kwargs)


class Recorder(TorchDispatchMode):
    """Costs of the flex operators that run under it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[OpCost] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        call = bind_call(func, args, kwargs or {}, out)
        if call.name.startswith("higher_order::flex"):
            self.costs.append(cost_of(call))
        return out


def test_dense_flex_counts_the_square() -> None:
    query, key, value = operands()
    cost = flex_forward_cost(call_of(query, key, value, _create_empty_block_mask(query, key)), dense_execution=True)
    assert cost.flops == 2 * 1 * 2 * 128 * 128 * (16 + 16) == 2_097_152
    assert cost.masked_flops == 0
    assert cost.palm_flops is None


def test_causal_flex_counts_exact_pairs_although_blocks_are_whole() -> None:
    query, key, value = operands()
    pairs = 128 * 129 // 2
    assert pairs == 8_256
    cost = flex_forward_cost(call_of(query, key, value, mask_of(causal, 128, 128)), dense_execution=False)
    assert cost.flops == 2 * 2 * pairs * (16 + 16) == 1_056_768
    assert cost.palm_flops == 2_097_152
    assert cost.flops + cost.masked_flops == 2_097_152  # the only block is computed whole


@pytest.mark.parametrize("block", [16, 32, 128])
def test_compiled_blocks_off_the_diagonal_are_skipped(block: int) -> None:
    S, blocks = 128, 128 // block
    query, key, value = operands(H=1)
    cost = flex_forward_cost(call_of(query, key, value, mask_of(causal, S, S, BLOCK_SIZE=block)), dense_execution=False)
    listed = blocks * (blocks + 1) // 2 * block * block
    assert cost.flops == 2 * (S * (S + 1) // 2) * 32
    assert cost.flops + cost.masked_flops == 2 * listed * 32


def test_uncompiled_execution_runs_the_square_whatever_the_mask() -> None:
    query, key, value = operands()
    call = call_of(query, key, value, mask_of(causal, 128, 128))
    assert flex_forward_cost(call, dense_execution=True).masked_flops == 2 * 2 * (128 * 128 - 8_256) * 32


def test_backward_recomputes_one_product_uncompiled_and_three_compiled() -> None:
    query, key, value = torch.zeros(1, 2, 64, 24), torch.zeros(1, 2, 64, 24), torch.zeros(1, 2, 64, 8)
    call = call_of(query, key, value, _create_empty_block_mask(query, key))
    qk_product, v_product = 2 * 2 * 64 * 64 * 24, 2 * 2 * 64 * 64 * 8
    uncompiled = flex_backward_cost(call, dense_execution=True)
    compiled = flex_backward_cost(call, dense_execution=False)
    assert uncompiled.flops == compiled.flops == 2 * qk_product + 2 * v_product
    assert uncompiled.kernel_recompute_flops == qk_product
    assert compiled.kernel_recompute_flops == 2 * qk_product + v_product


MASKS: dict[str, MaskMod] = {
    "causal": causal,
    "window": window(5),
    "causal window": and_masks(causal, window(7)),
    "documents": documents(torch.tensor([0] * 11 + [1] * 9 + [2] * 30)),
    "all": lambda b, h, q, k: q >= 0,
    "none": lambda b, h, q, k: q < 0,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_len", "k_len", "block"), [(32, 32, 16), (29, 45, 16), (45, 29, 8), (7, 7, 128)])
def test_pairs_of_any_mask_are_the_pairs_it_lets_through(name: str, q_len: int, k_len: int, block: int) -> None:
    query, key, _ = operands(B=2, H=3, S=q_len, Sk=k_len)
    found = pairs_of(query, key, mask_of(MASKS[name], q_len, k_len, BLOCK_SIZE=block))
    assert found.attended == 6 * brute_force(MASKS[name], 1, 1, q_len, k_len)
    assert found.attended <= found.in_blocks <= 6 * q_len * k_len


def test_masks_that_differ_by_sequence_and_head_are_asked_for_each() -> None:
    query, key, _ = operands(B=2, H=3, S=20)
    block_mask = mask_of(heads_differ, 20, 20, B=2, H=3, BLOCK_SIZE=8)
    assert pairs_of(query, key, block_mask).attended == brute_force(heads_differ, 2, 3, 20, 20)


def test_query_heads_decide_when_key_heads_are_shared() -> None:
    query, key, value = operands(H=8, Hkv=2)
    cost = flex_forward_cost(call_of(query, key, value, mask_of(causal, 128, 128)), dense_execution=False)
    assert cost.flops == 2 * 8 * 8_256 * 32


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    size=st.integers(1, 40),
    block=st.sampled_from([4, 8, 16]),
    chunk=st.integers(1, 200),
)
def test_random_document_windows_are_counted_exactly_in_chunks_of_any_size(
    lengths: Any, size: int, block: int, chunk: int
) -> None:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    S = len(ids)
    keep = (ids[:, None] == ids[None, :]) & ((torch.arange(S)[:, None] - torch.arange(S)[None, :]).abs() < size)
    block_mask = mask_of(and_masks(documents(ids), window(size)), S, S, BLOCK_SIZE=block)
    query, key, _ = operands(H=1, S=S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "CHUNK_ELEMENTS", chunk)
        assert pairs_of(query, key, block_mask).attended == keep.sum().item()


def test_a_block_mask_without_contents_counts_as_dense_and_says_so() -> None:
    with FakeTensorMode():
        query, key, value = operands()
        cost = flex_forward_cost(
            call_of(query, key, value, _create_empty_block_mask(query, key)), dense_execution=False
        )
    assert cost.flops == 2_097_152
    assert "block mask could not be read" in (cost.note or "")


def test_a_mask_mod_that_raises_counts_as_dense_and_does_not_raise() -> None:
    def broken(b: Any, h: Any, q: Any, k: Any) -> Any:
        raise ValueError("not today")

    query, key, value = operands()
    block_mask = mask_of(causal, 128, 128)
    block_mask.mask_mod = broken
    cost = flex_forward_cost(call_of(query, key, value, block_mask), dense_execution=False)
    assert cost.flops == 2_097_152
    assert cost.note is not None


def test_the_tuple_of_older_torch_versions_is_read_alike() -> None:
    query, key, _ = operands()
    values = mask_of(causal, 128, 128).as_tuple()
    torch_2_9 = (*values[:10], *values[-3:])  # without the write orders that came later
    assert flex_pairs(query, key, torch_2_9) == flex_pairs(query, key, values)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_that_an_uncompiled_call_dispatches_is_counted(masked: bool) -> None:
    query, key, value = operands()
    recorder = Recorder()
    ids = torch.arange(128) // 50
    mask_mod = and_masks(causal, documents(ids))
    with torch.no_grad(), recorder:
        flex_attention(query, key, value, block_mask=mask_of(mask_mod, 128, 128) if masked else None)
    pairs = sum(n * (n + 1) // 2 for n in (50, 50, 28)) if masked else 128 * 128
    assert [cost.flops for cost in recorder.costs] == [2 * 2 * pairs * 32]


def test_the_backward_operator_is_counted_by_its_own_arguments() -> None:
    query, key, value = operands()
    block_mask = mask_of(causal, 128, 128).as_tuple()
    logsumexp = torch.zeros(1, 2, 128)
    args: Any = (query, key, value, query, logsumexp, query, logsumexp, None, None, block_mask, 0.25, {}, (), ())
    call = bind_call(flex_backward_operator, args, {}, None)
    cost = cost_of(call)
    assert cost.flops == 2 * (2 * 2 * 8_256 * 32)
    executed = cost.flops + cost.masked_flops + cost.kernel_recompute_flops
    assert executed == 5 * (2 * 2 * 128 * 128 * 16)  # sdpa_dense_backward: five dense products


def test_counting_draws_no_random_numbers() -> None:
    query, key, _ = operands()
    state = torch.get_rng_state()
    flex_pairs(query, key, mask_of(causal, 128, 128).as_tuple())
    assert torch.equal(torch.get_rng_state(), state)


def test_operator_names_are_those_that_the_binding_gives() -> None:
    for operator in (flex_operator, flex_backward_operator):
        assert find_formula(bind_call(operator, (), {}, None).name) is not None
