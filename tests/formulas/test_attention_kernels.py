"""Attention operators as they are dispatched, in their own layouts, against products written out here.

``matmul(P, D)`` below is one product over P query-key pairs of width D: 2 P D FLOPs. A forward is two of them, a
backward four, and a fused backward runs a fifth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import mfu_monitor.formulas  # noqa: F401  # registers every formula
from mfu_monitor.formulas.attention_cost import logical_width
from mfu_monitor.formulas.attention_masks import attended_pairs_of_scores
from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.formulas.registry import bind_call, find_formula

with contextlib.suppress(ImportError):  # since torch 2.10; registers torch_attn::_varlen_attn
    import torch.nn.attention.varlen


aten = torch.ops.aten


def matmul(pairs: int, width: int) -> int:
    return 2 * pairs * width


def triangle(S: int) -> int:
    return S * (S + 1) // 2


def cost_of(op: Any, *args: Any, **kwargs: Any) -> OpCost:
    """The cost of a call, from its arguments alone: nothing is run."""
    return found_cost(bind_call(op, args, kwargs, None))


def found_cost(call: OperatorCall) -> OpCost:
    found = find_formula(call.name)
    assert found is not None, call.name
    return found(call)


def executed(cost: OpCost) -> int:
    return cost.flops + cost.masked_flops + cost.kernel_recompute_flops


class Recorder(TorchDispatchMode):
    """Costs of attention operators that run under it, and the pairs of every softmax of the math path."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: dict[str, OpCost] = {}
        self.softmax_pairs: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        call = bind_call(func, args, kwargs or {}, out)
        if "attention" in call.name or "encoder_layer" in call.name:
            self.costs[call.name.removeprefix("aten::")] = found_cost(call)
        if call.name == "aten::_safe_softmax":
            self.softmax_pairs.append(attended_pairs_of_scores(args[0]))
        return out


def qkv(*shape: int, device: str = "cpu", **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (torch.zeros(*shape, device=device, **kwargs) for _ in range(3))
    return query, key, value


# --- what runs on a CPU -----------------------------------------------------------------------------------------------


def run_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Recorder:
    recorder = Recorder()
    with recorder:
        F.scaled_dot_product_attention(query, key, value, **kwargs).sum().backward()
    return recorder


def test_cpu_flash_forward_and_backward_of_a_dense_call() -> None:
    recorder = run_sdpa(*qkv(1, 12, 64, 64, requires_grad=True))
    product = matmul(12 * 64 * 64, 64)
    forward = recorder.costs["_scaled_dot_product_flash_attention_for_cpu"]
    backward = recorder.costs["_scaled_dot_product_flash_attention_for_cpu_backward"]
    assert forward.flops == 2 * product == 12_582_912
    assert forward.flops + backward.flops == 6 * product == 37_748_736
    assert executed(forward) + executed(backward) == 7 * product == 44_040_192


def test_cpu_flash_skips_by_a_causal_flag_and_runs_a_mask_dense() -> None:
    operands = qkv(1, 2, 32, 8, requires_grad=True)
    by_flag = run_sdpa(*operands, is_causal=True).costs["_scaled_dot_product_flash_attention_for_cpu"]
    mask = torch.ones(32, 32, dtype=torch.bool).tril()
    by_mask = run_sdpa(*operands, attn_mask=mask).costs["_scaled_dot_product_flash_attention_for_cpu"]
    exact, dense = 2 * matmul(2 * triangle(32), 8), 2 * matmul(2 * 32 * 32, 8)
    assert by_flag.flops == by_mask.flops == exact
    assert by_flag.palm_flops == by_mask.palm_flops == dense
    assert (executed(by_flag), executed(by_mask)) == (exact, dense)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_math_path_attends_as_many_pairs_as_the_fused_call_counts(is_causal: bool) -> None:
    operands = qkv(2, 3, 24, 8, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        math_path = run_sdpa(*operands, is_causal=is_causal)
    fused = run_sdpa(*operands, is_causal=is_causal).costs["_scaled_dot_product_flash_attention_for_cpu"]
    assert math_path.costs == {}
    pairs = 2 * 3 * (triangle(24) if is_causal else 24 * 24)
    assert math_path.softmax_pairs == [pairs]
    assert fused.flops == 2 * matmul(pairs, 8)


@pytest.mark.parametrize("is_causal", [False, True])
def test_query_heads_decide_under_gqa(is_causal: bool) -> None:
    query = torch.zeros(1, 8, 256, 64, requires_grad=True)
    key = torch.zeros(1, 2, 256, 64, requires_grad=True)
    recorder = run_sdpa(query, key, key, enable_gqa=True, is_causal=is_causal)
    pairs = 8 * (triangle(256) if is_causal else 256 * 256)
    assert recorder.costs["_scaled_dot_product_flash_attention_for_cpu"].flops == 2 * matmul(pairs, 64)
    assert 2 * matmul(8 * 256 * 256, 64) == 134_217_728


def test_inference_mode_shows_the_whole_call_and_counts_the_same() -> None:
    recorder = Recorder()
    with torch.inference_mode(), recorder:
        query, key, value = qkv(1, 12, 64, 64)
        F.scaled_dot_product_attention(query, key, value)
        shown = recorder.costs["scaled_dot_product_attention"]
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert shown.flops == 12_582_912
    assert recorder.costs["scaled_dot_product_attention"].flops == 2 * matmul(12 * triangle(64), 64)


@pytest.mark.parametrize("shape", [(5, 7, 8), (7, 8), (2, 3, 4, 7, 8)])
def test_any_number_of_leading_dimensions_is_a_batch(shape: tuple[int, ...]) -> None:
    leading = torch.Size(shape[:-2]).numel()
    query, key, value = qkv(*shape, device="meta")
    mask = torch.ones(*shape[:-2], 7, 7, dtype=torch.bool).tril()
    cost = cost_of(aten.scaled_dot_product_attention.default, query, key, value)
    masked = cost_of(aten.scaled_dot_product_attention.default, query, key, value, mask)
    assert cost.flops == 2 * matmul(leading * 49, 8)
    assert masked.flops == 2 * matmul(leading * triangle(7), 8)


# --- every fused kernel on (B, H, S, D) -------------------------------------------------------------------------------

B, H, S, D = 2, 16, 1024, 64
PAIRS = B * H * S * S
FORWARDS: dict[str, Callable[..., OpCost]] = {
    "flash": lambda q, k, v, c: cost_of(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, c),
    "cpu": lambda q, k, v, c: cost_of(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, c),
    "efficient": lambda q, k, v, c: cost_of(
        aten._scaled_dot_product_efficient_attention.default, q, k, v, None, True, 0.0, c
    ),
    "cudnn": lambda q, k, v, c: cost_of(aten._scaled_dot_product_cudnn_attention.default, q, k, v, None, True, 0.0, c),
    "overrideable": lambda q, k, v, c: cost_of(
        aten._scaled_dot_product_fused_attention_overrideable.default, q, k, v, None, 0.0, c
    ),
    "math": lambda q, k, v, c: cost_of(aten._scaled_dot_product_attention_math.default, q, k, v, None, 0.0, c),
    "mps": lambda q, k, v, c: cost_of(aten._scaled_dot_product_attention_math_for_mps.default, q, k, v, None, 0.0, c),
    "composite": lambda q, k, v, c: cost_of(aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, c),
}


@pytest.mark.parametrize("kernel", FORWARDS)
def test_model_flops_do_not_depend_on_the_kernel(kernel: str) -> None:
    operands = qkv(B, H, S, D, device="meta")
    dense, causal = (FORWARDS[kernel](*operands, is_causal) for is_causal in (False, True))
    assert dense.flops == 2 * matmul(PAIRS, D) == 8_589_934_592
    assert causal.flops == 2 * matmul(B * H * triangle(S), D)
    assert causal.palm_flops == dense.flops
    runs_dense = kernel in ("math", "mps")
    assert executed(causal) == (dense.flops if runs_dense else causal.flops)


def backward_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> dict[str, OpCost]:
    lse, seed, none = q.new_empty(q.shape[:3]), q.new_empty(2), torch.empty(0, device=q.device)
    length = q.shape[2]
    everything = [True, True, True, False]
    return {
        "flash": cost_of(
            aten._scaled_dot_product_flash_attention_backward.default,
            *(q, q, k, v, q, lse, none, none, length, length, 0.0, is_causal, seed, seed),
        ),
        "cpu": cost_of(
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default, q, q, k, v, q, lse, 0.0, is_causal
        ),
        "efficient": cost_of(
            aten._scaled_dot_product_efficient_attention_backward.default,
            *(q, q, k, v, None, q, lse, seed, seed, 0.0, everything, is_causal),
        ),
        "cudnn": cost_of(
            aten._scaled_dot_product_cudnn_attention_backward.default,
            *(q, q, k, v, q, lse, seed, seed, none, none, none, length, length, 0.0, is_causal),
        ),
        "overrideable": cost_of(
            aten._scaled_dot_product_fused_attention_overrideable_backward.default,
            *(q, q, k, v, none, everything, q, lse, none, none, length, length, 0.0, is_causal, seed, seed),
        ),
    }


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "cpu", "efficient", "cudnn", "overrideable"])
def test_every_fused_backward_is_four_products_and_runs_a_fifth(kernel: str, is_causal: bool) -> None:
    cost = backward_calls(*qkv(B, H, S, D, device="meta"), is_causal)[kernel]
    product = matmul(B * H * (triangle(S) if is_causal else S * S), D)
    assert cost.flops == 4 * product
    assert cost.kernel_recompute_flops == product
    assert executed(cost) == 5 * product


def test_products_for_gradients_that_nobody_needs_are_hardware_work_only() -> None:
    q, k, v = qkv(1, 2, 8, 4, device="meta")
    lse = q.new_empty(1, 2, 8)
    product = matmul(2 * 8 * 8, 4)
    for needed, products in (((True, False, False), 2), ((True, True, False), 3), ((False, False, True), 1)):
        cost = cost_of(
            aten._scaled_dot_product_efficient_attention_backward.default,
            *(q, q, k, v, None, q, lse, lse, lse, 0.0, [*needed, False]),
        )
        assert cost.flops == products * product  # dQ alone also needs dA
        assert executed(cost) == 5 * product


@pytest.mark.parametrize(("trained", "products"), [("q", 2), ("k", 2), ("v", 1), ("qv", 3), ("kv", 3), ("qkv", 4)])
def test_a_kernel_that_does_not_say_so_is_asked_through_its_autograd_node(trained: str, products: int) -> None:
    query, key, value = (torch.zeros(1, 2, 8, 4, requires_grad=name in trained) for name in "qkv")
    cost = run_sdpa(query, key, value).costs["_scaled_dot_product_flash_attention_for_cpu_backward"]
    product = matmul(2 * 8 * 8, 4)
    assert cost.flops == products * product
    assert executed(cost) == 5 * product


def test_the_value_width_may_differ_from_the_query_width() -> None:
    q, k, v = (torch.empty(2, 4, 32, width, device="meta") for width in (192, 192, 128))
    cost = cost_of(aten._scaled_dot_product_cudnn_attention.default, q, k, v, None, True)
    pairs = 2 * 4 * 32 * 32
    assert cost.flops == matmul(pairs, 192) + matmul(pairs, 128)
    backward = backward_calls(q, k, v, False)["cudnn"]
    assert backward.flops == 2 * matmul(pairs, 192) + 2 * matmul(pairs, 128)
    assert backward.kernel_recompute_flops == matmul(pairs, 192)


def test_causal_diagonals_start_where_each_kernel_starts_them() -> None:
    q, k = torch.empty(1, 1, 2, 8, device="meta"), torch.empty(1, 1, 5, 8, device="meta")
    assert FORWARDS["efficient"](q, k, k, True).flops == 2 * matmul(1 + 2, 8)
    assert FORWARDS["flash"](q, k, k, True).flops == 2 * matmul(4 + 5, 8)


@pytest.mark.parametrize("width", [20, 64, 72, 100])
def test_head_widths_padded_for_the_flash_kernel_do_not_change_model_flops(width: int) -> None:
    padded = -(-width // 8) * 8
    operands = qkv(1, 2, 16, padded, device="meta")
    cost = cost_of(aten._scaled_dot_product_flash_attention.default, *operands, scale=width**-0.5)
    assert cost.flops == 2 * matmul(2 * 16 * 16, width)
    assert executed(cost) == 2 * matmul(2 * 16 * 16, padded)


def test_a_scale_that_tells_no_width_leaves_it() -> None:
    assert logical_width(64, 0.1) == logical_width(64, None) == logical_width(64, 50**-0.5) == 64


def test_masks_of_every_broadcast_shape_count_by_content_and_run_dense() -> None:
    q, k, v = qkv(2, 3, 5, 8, device="meta")
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None, :]
    cost = cost_of(aten._scaled_dot_product_efficient_attention.default, q, k, v, padding, True)
    assert cost.flops == 2 * matmul(3 * (5 * 5 + 5 * 3), 8)
    assert executed(cost) == 2 * matmul(2 * 3 * 25, 8)
    both = cost_of(aten._scaled_dot_product_efficient_attention.default, q, k, v, padding, True, 0.0, True)
    rows_of_second = [1, 2, 3, 3, 3]
    assert both.flops == 2 * matmul(3 * (triangle(5) + sum(rows_of_second)), 8)
    assert executed(both) == 2 * matmul(2 * 3 * triangle(5), 8)


def test_a_mask_without_contents_counts_as_unmasked_and_says_so() -> None:
    with FakeTensorMode():
        q, k, v = qkv(1, 2, 8, 4)
        cost = cost_of(aten._scaled_dot_product_efficient_attention.default, q, k, v, torch.zeros(1, 1, 8, 8), True)
    assert cost.flops == 2 * matmul(2 * 64, 4)
    assert "mask could not be read" in (cost.note or "")


def test_strided_nested_operands_count_sequence_by_sequence() -> None:
    sequences = [torch.zeros(8, length, 64) for length in (128, 64)]
    nested = torch.nested.nested_tensor(sequences, layout=torch.strided)
    cost = cost_of(aten._scaled_dot_product_flash_attention.default, nested, nested, nested)
    assert cost.flops == 2 * matmul(8 * (128**2 + 64**2), 64) == 41_943_040
    causal = cost_of(aten._scaled_dot_product_flash_attention.default, nested, nested, nested, 0.0, True)
    assert causal.flops == 2 * matmul(8 * (triangle(128) + triangle(64)), 64)
    assert causal.palm_flops == 41_943_040


# --- fused layers -----------------------------------------------------------------------------------------------------


def layer_flops(tokens: int, width: int, pairs: int, hidden: int = 0) -> int:
    projections = 4 * (2 * tokens * width * width)
    feed_forward = 2 * (2 * tokens * width * hidden)
    return projections + 2 * matmul(pairs, width) + feed_forward  # pairs of one head, all heads together E wide


def test_multi_head_attention_fast_path_counts_projections_and_attention() -> None:
    module, x = nn.MultiheadAttention(448, 4, batch_first=True).eval(), torch.zeros(1, 300, 448)
    recorder = Recorder()
    with torch.no_grad(), recorder:
        module(x, x, x)
    cost = recorder.costs["_native_multi_head_attention"]
    assert cost.flops == layer_flops(300, 448, 300 * 300) == 642_969_600
    assert cost.masked_flops == 0


PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("kwargs", "pairs"),
    [
        ({"key_padding_mask": PADDING}, 6 * 6 + 6 * 4),
        ({"attn_mask": CAUSAL}, 2 * triangle(6)),
        ({"attn_mask": CAUSAL, "key_padding_mask": PADDING}, triangle(6) + (1 + 2 + 3 + 4 + 4 + 4)),
    ],
)
def test_multi_head_attention_masks_count_by_content_and_run_dense(kwargs: dict[str, Any], pairs: int) -> None:
    module, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.zeros(2, 6, 16)
    recorder = Recorder()
    with torch.no_grad(), recorder:
        module(x, x, x, **kwargs)
    cost = recorder.costs["_native_multi_head_attention"]
    assert cost.flops == layer_flops(12, 16, pairs)
    assert executed(cost) == cost.palm_flops == layer_flops(12, 16, 2 * 36)


def test_a_boolean_mask_of_the_fused_layer_is_true_where_it_hides() -> None:
    x, w, b = torch.zeros(2, 6, 16), torch.zeros(48, 16), torch.zeros(48)
    cost = cost_of(
        aten._native_multi_head_attention.default, x, x, x, 16, 4, w, b, w[:16], b[:16], PADDING, False, True, 1
    )
    assert cost.flops == layer_flops(12, 16, 6 * 6 + 6 * 4)


def test_encoder_layer_fast_path_counts_the_feed_forward_as_well() -> None:
    module, x = nn.TransformerEncoderLayer(448, 4, 448, batch_first=True).eval(), torch.zeros(1, 300, 448)
    recorder = Recorder()
    with torch.no_grad(), recorder:
        module(x)
    assert recorder.costs["_transformer_encoder_layer_fwd"].flops == layer_flops(300, 448, 300 * 300, 448)
    assert layer_flops(300, 448, 300 * 300, 448) == 883_814_400


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage.*")
def test_an_encoder_that_packs_padded_batches_counts_real_tokens_only() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1).eval()
    recorder = Recorder()
    with torch.no_grad(), recorder:
        encoder(torch.zeros(2, 6, 16), src_key_padding_mask=PADDING)
    assert recorder.costs["_transformer_encoder_layer_fwd"].flops == layer_flops(6 + 4, 16, 6 * 6 + 4 * 4, 32)


def test_every_attention_operator_of_this_torch_has_a_formula_or_is_named_here() -> None:
    left_out = {
        "onnx::Attention",  # a composite for export; decomposes before it is dispatched
    }
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    attention = {
        name
        for name in names
        if any(word in name.lower() for word in ("attention", "attn", "multi_head", "transformer_encoder"))
    }
    assert {name for name in attention - left_out if find_formula(name) is None and not is_test_stand_in(name)} == set()
    assert len(attention) > 20  # 24 in torch 2.9


def is_test_stand_in(name: str) -> bool:
    return name.startswith("mfu_monitor_tests")
