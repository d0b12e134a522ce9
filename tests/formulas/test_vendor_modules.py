"""Opaque layers, by stand-in classes under the names of the libraries that have them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mfu_monitor.formulas.cost import OpCost, UncountableCallError
from mfu_monitor.formulas.registry import find_module_formula

S = torch.Size
TE = "transformer_engine.pytorch"


def stand_in(name: str, module: str, **attributes: Any) -> nn.Module:
    """An instance of a class that says it was defined in ``module``."""
    cls = type(name, (nn.Module,), {"__module__": module})
    instance: nn.Module = cls()
    for key, value in attributes.items():
        setattr(instance, key, value)
    return instance


@pytest.fixture
def loaded() -> Iterator[dict[str, types.ModuleType]]:
    """Modules to be found in ``sys.modules`` for the length of a test."""
    made: dict[str, types.ModuleType] = {}
    yield made
    for name in made:
        sys.modules.pop(name, None)


def forward(module: nn.Module, *shapes: S, out_shape: S | None = None) -> OpCost:
    found = find_module_formula(module)
    assert found is not None
    return found(module, *shapes, out_shape=out_shape)


@pytest.mark.parametrize(
    ("name", "defined_in"),
    [
        ("Linear", f"{TE}.module.linear"),
        ("LayerNormLinear", f"{TE}.module.layernorm_linear"),
        ("GroupedLinear", f"{TE}.module.grouped_linear"),
        ("Linear8bitLt", "bitsandbytes.nn.modules"),
        ("Linear4bit", "bitsandbytes.nn.modules"),
        ("LinearFP4", "bitsandbytes.nn.modules"),
        ("LinearNF4", "bitsandbytes.nn"),
    ],
)
def test_linears_cost_their_logical_shape(name: str, defined_in: str) -> None:
    module = stand_in(name, defined_in, in_features=64, out_features=128)
    assert forward(module, S([4, 10, 64]), out_shape=S([4, 10, 128])).flops == 2 * 40 * 64 * 128


def test_packed_weights_do_not_mislead() -> None:
    module = stand_in("Linear4bit", "bitsandbytes.nn.modules", in_features=64, out_features=128)
    module.weight = nn.Parameter(torch.zeros(64 * 128 // 2, 1, dtype=torch.uint8), requires_grad=False)
    assert forward(module, S([3, 64]), out_shape=S([3, 128])).flops == 2 * 3 * 64 * 128


def test_sequence_parallel_linears_count_all_gathered_rows() -> None:
    column = stand_in("Linear", f"{TE}.module.linear", in_features=64, out_features=32)
    assert forward(column, S([5, 2, 64]), out_shape=S([20, 2, 32])).flops == 2 * 40 * 64 * 32
    row = stand_in("Linear", f"{TE}.module.linear", in_features=16, out_features=64)
    assert forward(row, S([20, 2, 16]), out_shape=S([5, 2, 64])).flops == 2 * 40 * 16 * 64


def test_gated_mlp_counts_both_halves_of_its_first_product() -> None:
    module = stand_in("LayerNormMLP", f"{TE}.module.layernorm_mlp")
    module.fc1_weight = nn.Parameter(torch.zeros(2 * 96, 64))
    module.fc2_weight = nn.Parameter(torch.zeros(64, 96))
    assert forward(module, S([7, 64]), out_shape=S([7, 64])).flops == 2 * 7 * (2 * 96 * 64 + 96 * 64)


def test_the_public_name_finds_a_class_defined_anywhere(loaded: dict[str, types.ModuleType]) -> None:
    module = stand_in("Linear", "transformer_engine.somewhere.new", in_features=8, out_features=8)
    assert find_module_formula(module) is None
    # a class is looked up once: a fresh one, of the public name
    public = stand_in("Linear", "transformer_engine.somewhere.newer", in_features=8, out_features=8)
    loaded[TE] = sys.modules[TE] = types.ModuleType(TE)
    loaded[TE].Linear = type(public)  # type: ignore[attr-defined]
    assert forward(public, S([1, 8]), out_shape=S([1, 8])).flops == 2 * 8 * 8


def attention(mask_type: str, *, qkv_format: str = "bshd", window: tuple[int, int] | None = None) -> nn.Module:
    return stand_in(
        "DotProductAttention",
        f"{TE}.attention.dot_product_attention.dot_product_attention",
        attn_mask_type=mask_type,
        qkv_format=qkv_format,
        window_size=window,
    )


@pytest.mark.parametrize(
    ("module", "pairs"),
    [
        (attention("no_mask"), 64 * 64),
        (attention("causal"), 64 * 65 // 2),
        (attention("causal_bottom_right"), 64 * 65 // 2),
        (attention("causal", window=(15, 0)), 16 * 64 - 16 * 15 // 2),  # window of 16 keys, one's own included
        (attention("causal", window=(-1, 0)), 64 * 65 // 2),
        (attention("no_mask", window=(0, 0)), 64),  # only the diagonal
    ],
)
def test_attention_counts_attended_pairs(module: nn.Module, pairs: int) -> None:
    # batch 2, 8 query heads, 2 key-value heads, widths 32 and 16
    cost = forward(module, S([2, 64, 8, 32]), S([2, 64, 2, 32]), S([2, 64, 2, 16]), out_shape=S([2, 64, 8 * 16]))
    assert cost.flops == 2 * 2 * 8 * pairs * (32 + 16)
    assert cost.palm_flops == 2 * 2 * 8 * 64 * 64 * (32 + 16)


def test_attention_with_fewer_queries_than_keys_follows_its_corner() -> None:
    # 2 queries, 5 keys: 1+2 pairs from the top left, 4+5 from the bottom right
    shapes = (S([1, 2, 1, 4]), S([1, 5, 1, 4]), S([1, 5, 1, 4]))
    assert forward(attention("causal"), *shapes).flops == 2 * 3 * 8
    assert forward(attention("causal_bottom_right"), *shapes).flops == 2 * 9 * 8


def test_sequence_first_layout_swaps_batch_and_length() -> None:
    shapes = [S([64, 2, 8, 32])] * 3
    assert forward(attention("no_mask", qkv_format="sbhd"), *shapes).flops == 2 * 2 * 8 * 64 * 64 * 64


def test_the_gradient_of_attention_is_four_products() -> None:
    found, linear = (
        find_module_formula(attention("causal")),
        find_module_formula(stand_in("Linear", f"{TE}.module.linear")),
    )
    assert found is not None
    assert linear is not None
    assert (found.input_gradient_factor, linear.input_gradient_factor) == (2, 1)


@pytest.mark.parametrize("module", [attention("padding_causal"), attention("causal", qkv_format="thd")])
def test_attention_whose_lengths_are_in_tensors_is_refused_and_not_guessed(module: nn.Module) -> None:
    with pytest.raises(UncountableCallError, match=r"not in shapes.*register_module_formula"):
        forward(module, *[S([2, 64, 8, 32])] * 3)
