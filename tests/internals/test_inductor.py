"""Origins of fused kernels, read off generated code: there, missing, and something else."""

from __future__ import annotations

import pytest

from mfu_monitor.internals.inductor import fused_origins


def test_kernels_name_the_operators_they_were_made_of() -> None:
    source = "cpp_fused_addmv_mul_0 = async_compile(...)\ncpp_fused_relu_1 = async_compile(...)"
    assert fused_origins(source) == {"addmv", "mul", "relu"}


def test_triton_kernels_that_share_a_name_are_told_by_their_comments() -> None:
    source = "# Original ATen: [aten.mv, aten.relu]\ntriton_per_fused_mul_sum_0.run(a)"
    assert fused_origins(source) == {"mul", "sum", "mv", "relu"}


def test_attention_and_scaled_products_are_no_products_of_vectors() -> None:
    source = "cpp_fused__scaled_dot_product_flash_attention_for_cpu_0\ncpp_fused__scaled_mm_view_1"
    assert fused_origins(source) is not None
    assert not {"dot", "mm"} & (fused_origins(source) or frozenset())


@pytest.mark.parametrize("source", [None, 3, "", "cpp_kernel_0 = async_compile(...)"])
def test_nothing_is_known_where_the_code_is_missing_or_names_nothing(source: object) -> None:
    assert fused_origins(source) is None
