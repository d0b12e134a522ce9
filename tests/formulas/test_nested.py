"""Products of strided nested tensors against one product a sequence."""

from __future__ import annotations

import pytest
import torch

from mfu_monitor.formulas.nested import is_strided_nested, nested_matmul_flops, nested_sizes

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage.*")


def strided(*shapes: tuple[int, ...]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(shape) for shape in shapes], layout=torch.strided)


def test_only_the_strided_layout_needs_its_sizes_read() -> None:
    assert is_strided_nested(strided((2, 3)))
    assert not is_strided_nested(torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged))
    assert not is_strided_nested(torch.zeros(2, 3))
    assert not is_strided_nested(None)
    assert nested_sizes(strided((8, 5, 4), (8, 3, 4))) == [(8, 5, 4), (8, 3, 4)]


def test_a_nested_product_is_the_sum_over_its_sequences() -> None:
    queries, keys = strided((8, 128, 64), (8, 64, 64)), strided((8, 64, 128), (8, 64, 64))
    assert nested_matmul_flops(queries, keys) == 2 * 8 * (128 * 64 * 128 + 64 * 64 * 64)


def test_a_dense_right_operand_is_shared_by_all_sequences() -> None:
    assert nested_matmul_flops(strided((5, 16), (3, 16)), torch.zeros(16, 32)) == 2 * (5 + 3) * 16 * 32
