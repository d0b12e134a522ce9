"""Every operator is counted, ignored by name or rule, decomposed, or reported; nothing with a product is ignored."""

from __future__ import annotations

import pytest
import torch

import mfu_monitor.formulas  # noqa: F401  (registers every formula)
from mfu_monitor.formulas import ignored
from mfu_monitor.formulas.ignored import IGNORED_GROUPS, REPORTED, is_ignored
from mfu_monitor.formulas.registry import find_formula, registered_names


def aten_names() -> list[str]:
    registered = torch._C._dispatch_get_all_op_names()
    names = {name.split(".")[0] for name in registered if name.startswith("aten::")}
    return sorted(name for name in names if not name.startswith(("aten::_test_", "aten::_foobar")))


def is_decomposed(name: str) -> bool:
    """Composite in every case: torch itself turns it into others before it is dispatched."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None:
        return True  # known to TorchScript only
    return any(_is_composite(getattr(packet, overload)) for overload in packet.overloads())


def _is_composite(overload: torch._ops.OpOverload) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    except RuntimeError:  # a TorchScript operator
        return False


def test_every_aten_operator_of_this_torch_is_classified() -> None:
    unclassified = [
        name
        for name in aten_names()
        if not (find_formula(name) or is_ignored(name) or name in REPORTED or is_decomposed(name))
    ]
    assert unclassified == []


def test_nothing_that_has_a_formula_is_ignored() -> None:
    assert [name for name in sorted(registered_names()) if is_ignored(name)] == []


PRODUCT_WORDS = ("mm", "matmul", "linear", "conv", "attention", "rnn", "lstm", "gru", "einsum", "dot", "bilinear")
NOT_A_PRODUCT = {
    "aten::_thnn_fused_gru_cell",  # the gates' arithmetic; their products are operators of their own
    "aten::_thnn_fused_gru_cell_backward",
    "aten::_thnn_fused_lstm_cell",
    "aten::_thnn_fused_lstm_cell_backward",
    "aten::_thnn_fused_lstm_cell_backward_impl",
    "aten::_convert_weight_to_int4pack",  # "conv", "mm" are parts of words in these
    "aten::_convert_weight_to_int4pack_for_cpu",
    "aten::_convert_indices_from_coo_to_csr",
    "aten::_convert_indices_from_csr_to_coo",
    "aten::_nested_get_jagged_dummy",
    "aten::_cudnn_rnn_flatten_weight",
    "aten::_cslt_sparse_mm_search",  # picks an algorithm by trial, once
    "aten::_upsample_bilinear2d_aa",
    "aten::_upsample_bilinear2d_aa_backward",
    "aten::upsample_bilinear2d",
    "aten::upsample_bilinear2d_backward",
    "aten::upsample_linear1d",
    "aten::upsample_linear1d_backward",
    "aten::upsample_trilinear3d",
    "aten::upsample_trilinear3d_backward",
    "aten::mkldnn_reorder_conv2d_weight",
    "aten::mkldnn_reorder_conv3d_weight",
    "aten::digamma",
    "aten::digamma_",
    "aten::special_digamma",
    "aten::lgamma",
    "aten::lgamma_",
    "aten::_standard_gamma",
    "aten::_standard_gamma_grad",
    "aten::polygamma",
    "aten::polygamma_",
    "aten::igamma",
    "aten::igamma_",
    "aten::igammac",
    "aten::igammac_",
    "aten::_foreach_lgamma",
    "aten::_foreach_lgamma_",
    "aten::mvlgamma",
    "aten::mvlgamma_",
    "aten::cummax",
    "aten::cummin",
    "aten::_cummax_helper",
    "aten::_cummin_helper",
    "aten::hamming_window",
    "aten::fmod",
}


def test_no_ignored_name_sounds_like_a_product_without_a_reason() -> None:
    suspicious = {name for name in aten_names() if is_ignored(name) and any(word in name for word in PRODUCT_WORDS)}
    assert suspicious - NOT_A_PRODUCT == set()


@pytest.mark.parametrize(
    "name",
    [
        "aten::mm",
        "aten::addmm_",
        "aten::_foreach_mm",
        "aten::convolution_backward",
        "aten::linalg_matrix_exp",
        "quantized::linear",
        "somelib::linear_prepack",  # the rule holds for torch's own packing only
    ],
)
def test_products_are_never_ignored(name: str) -> None:
    assert not is_ignored(name)


@pytest.mark.parametrize(
    "name",
    [
        "aten::add",  # tagged pointwise
        "aten::relu_",  # in-place form
        "aten::_foreach_add_",  # list form, in place
        "aten::tanh_backward",  # gradient
        "aten::view",  # a view by its schema
        "aten::_unsafe_view",
        "aten::native_layer_norm_backward",
        "aten::embedding_dense_backward",
        "aten::_fft_c2c",
        "aten::linalg_qr",
        "aten::_fused_adamw_",
        "c10d::allreduce_",
        "_c10d_functional::all_reduce",
        "bitsandbytes::dequantize_4bit",  # not installed here: by name
        "quantized::linear_prepack",  # packing a weight
        "quantized::conv2d_unpack",
    ],
)
def test_operators_without_products_are_ignored(name: str) -> None:
    assert is_ignored(name)


def test_an_unknown_operator_is_not_ignored() -> None:
    assert not is_ignored("somelib::mystery")
    assert not is_ignored("somelib::mystery_backward")


def test_reported_operators_say_why() -> None:
    assert all(reason and not find_formula(name) for name, reason in REPORTED.items())


LATER = {"linalg_matrix_sqrth", "linalg_polar", "shallow_copy_data", "_philox_randint"}
"""Since torch 2.14 and 2.15."""


def test_the_list_has_no_name_twice_and_none_that_torch_does_not_know() -> None:
    names = [name for group in IGNORED_GROUPS.values() for name in group.split()]
    assert len(names) == len(set(names))
    known = {name.removeprefix("aten::") for name in aten_names()}
    if torch.__version__.startswith("2.13"):
        assert set(names) - known == LATER


def test_rules_do_not_reach_into_other_namespaces() -> None:
    assert "aten::add" not in ignored.IGNORED_ELSEWHERE
    assert not is_ignored("mylib::add")
