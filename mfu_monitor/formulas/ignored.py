"""Operators that count 0 FLOPs by convention: everything that is not a matmul, attention or convolution.

An operator is ignored when it is in a list below, or by one of these rules:

* it only makes a view: its schema says that every result aliases an argument;
* torch tags it ``pointwise`` or ``view_copy``;
* it is the in-place form (``relu_``), the list form (``_foreach_add``) or the gradient (``tanh_backward``) of an
  ignored operator: the gradient of what has no products has none;
* it packs a quantised weight for its kernel, or unpacks one (``quantized::linear_prepack``): a copy.

What has a formula is looked up first, so nothing here can hide a product. What is in no list and under no rule is
decomposed, or reported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mfu_monitor.internals.dispatcher import schema_of

__all__ = ["IGNORED_GROUPS", "REPORTED", "is_ignored"]

IGNORED_GROUPS: Mapping[str, str] = {
    "elementwise (without torch's pointwise tag)": """
        _add_relu _conj_physical _masked_scale _prelu_kernel _unsafe_masked_index _transform_bias_rescale_qkv
        complex polar __irshift__ __ilshift__ copysign eq ge gt le lt ne floor_divide gcd lcm heaviside gelu
        hardswish mish threshold abs glu glu_jvp glu_backward_jvp elu hardshrink hardsigmoid hardtanh leaky_relu
        log_sigmoid_forward log_sigmoid softplus softshrink rrelu_with_noise rrelu_with_noise_functional isin
        masked_fill linalg_cross _thnn_fused_gru_cell _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
        trace dist
    """,
    "reductions, scans, sorting, searching, counting": """
        sum nansum mean prod all any amax amin aminmax _aminmax argmax argmin max min median nanmedian mode
        kthvalue norm native_norm linalg_vector_norm linalg__powsum _foreach_powsum logsumexp count_nonzero std
        var var_mean std_mean cumsum cumprod cummax cummin _cummax_helper _cummin_helper _logcumsumexp
        logcumsumexp renorm hash_tensor sort topk unique_consecutive unique_dim unique_dim_consecutive _unique
        _unique2 bincount histc histogram _histogramdd_bin_edges _histogramdd_from_bin_cts
        _histogramdd_from_bin_tensors searchsorted bucketize nonzero nonzero_static segment_reduce
        _segment_reduce_backward allclose equal _is_all_true _is_any_true _is_zerotensor
    """,
    "softmax and normalisation": """
        _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax _masked_softmax
        _sparse_softmax _sparse_softmax_backward_data _sparse_log_softmax _sparse_log_softmax_backward_data
        _nested_tensor_softmax_with_shape native_layer_norm native_group_norm _fused_rms_norm native_batch_norm
        cudnn_batch_norm miopen_batch_norm quantized_batch_norm batch_norm _batch_norm_with_update
        _batch_norm_with_update_functional _batch_norm_no_update _native_batch_norm_legit
        _native_batch_norm_legit_functional _native_batch_norm_legit_no_training batch_norm_backward_elemt
        batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats batch_norm_gather_stats_with_counts
        batch_norm_stats batch_norm_update_stats _weight_norm_interface
    """,
    "embeddings, gathers and scatters": """
        embedding embedding_dense_backward embedding_renorm _embedding_bag _embedding_bag_forward_only
        _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward gather scatter scatter_add
        scatter_reduce index index_select index_put _index_put_impl index_add index_copy index_fill index_reduce
        _unsafe_index _unsafe_index_put _unsafe_masked_index_put_accumulate masked_select masked_scatter take
        put
    """,
    "copies, padding and rearrangement": """
        cat _stack stack _chunk_cat clone copy _to_copy _copy_from _copy_from_and_resize _lazy_clone _pin_memory
        repeat flip roll rot90 tril triu tril_indices triu_indices diag_embed block_diag constant_pad_nd
        reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
        channel_shuffle native_channel_shuffle pixel_shuffle pixel_unshuffle im2col col2im narrow_copy
        as_strided_scatter diagonal_scatter select_scatter slice_scatter diagonal_backward select_backward
        slice_backward slice_inverse unfold_backward unsafe_split unsafe_split_with_sizes split_with_sizes_copy
        split_copy unbind_copy view_copy _unsafe_view _reshape_copy unfold_copy lift lift_fresh_copy _mkldnn_reshape
        _mkldnn_transpose to_mkldnn mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight
        _cudnn_rnn_flatten_weight _pack_padded_sequence
    """,
    "creation and random numbers": """
        empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided new_full
        new_ones new_zeros _new_zeros_with_same_feature_meta _efficientzerotensor zeros zeros_like zero ones
        ones_like full full_like fill eye arange range linspace logspace scalar_tensor bartlett_window
        blackman_window hamming_window hann_window kaiser_window fft_fftfreq fft_rfftfreq from_file rand
        rand_like randn randn_like randint randint_like randperm random normal normal_functional uniform
        bernoulli binomial cauchy exponential geometric log_normal multinomial poisson _standard_gamma
        _standard_gamma_grad _sample_dirichlet _dirichlet_grad _philox_key_fold_in _philox_key_split
        _philox_normal _philox_randint _philox_uniform native_dropout _fused_dropout _cudnn_init_dropout_state
        _fill_mem_eff_dropout_mask_
    """,
    "pooling, interpolation and sampling grids": """
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
        avg_pool2d avg_pool3d fractional_max_pool2d fractional_max_pool3d max_pool2d max_pool2d_with_indices
        max_pool3d_with_indices max_unpool2d max_unpool3d mkldnn_adaptive_avg_pool2d mkldnn_max_pool2d
        mkldnn_max_pool3d quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d _upsample_bicubic2d_aa
        _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_trilinear3d grid_sampler_2d grid_sampler_3d
        _grid_sampler_2d_cpu_fallback cudnn_grid_sampler
    """,
    "losses and distances without a product": """
        binary_cross_entropy binary_cross_entropy_with_logits nll_loss_forward nll_loss nll_loss2d_forward
        nll_loss2d mse_loss huber_loss smooth_l1_loss soft_margin_loss multi_margin_loss
        multilabel_margin_loss_forward multilabel_margin_loss _ctc_loss _cudnn_ctc_loss miopen_ctc_loss
        _use_cudnn_ctc_loss _use_miopen_ctc_loss _cdist_backward _pdist_forward _pdist_backward
    """,
    "Fourier transforms: left out, as they are not dense matmuls": """
        _fft_c2c _fft_c2r _fft_r2c
    """,
    "factorisations, solves and what follows from them: not counted by convention": """
        cholesky cholesky_inverse cholesky_solve _cholesky_solve_helper geqrf ormqr triangular_solve lu_unpack
        linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
        linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_qr
        linalg_solve_triangular _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex
        _linalg_svd _linalg_check_errors _spsolve linalg_matrix_sqrth linalg_polar
    """,
    "optimizer steps and gradient scaling, elementwise": """
        _fused_adagrad _fused_adam _fused_adamw _fused_sgd _amp_foreach_non_finite_check_and_unscale
        _amp_update_scale
    """,
    "quantisation": """
        quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel dequantize int_repr q_scale
        q_zero_point q_per_channel_axis q_per_channel_scales q_per_channel_zero_points qscheme
        _empty_affine_quantized _empty_per_channel_affine_quantized _make_per_channel_quantized_tensor
        _make_per_tensor_quantized_tensor fake_quantize_per_channel_affine_cachemask
        fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine
        _fused_moving_avg_obs_fq_helper _fused_moving_avg_obs_fq_helper_functional _convert_weight_to_int4pack
        _convert_weight_to_int4pack_for_cpu _dyn_quant_pack_4bit_weight
    """,
    "sparse and nested bookkeeping": """
        _coalesce _coalesced is_coalesced _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo
        copy_sparse_to_sparse resize_as_sparse sparse_mask sparse_resize sparse_resize_and_clear sparse_dim
        dense_dim _dimI _dimV _nnz sparse_compressed_tensor _sparse_compressed_tensor_with_dims
        _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors _sparse_csr_prod _sparse_csr_sum
        _sparse_sum _sparse_mask_projection _sparse_semi_structured_apply _sparse_semi_structured_apply_dense
        _sparse_semi_structured_tile _spdiags _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc
        _to_sparse_csr _to_sparse_semi_structured _cslt_compress _cslt_sparse_mm_search
        _validate_compressed_sparse_indices to_padded_tensor _jagged_to_padded_dense_forward
        _padded_dense_to_jagged_forward _nested_compute_contiguous_strides_offsets _nested_from_padded
        _nested_from_padded_and_nested_example _nested_from_padded_tensor _nested_get_jagged_dummy
        _nested_get_lengths _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets
        _nested_get_ragged_idx _nested_select_backward _nested_sum_backward _nested_tensor_from_mask
        _nested_tensor_from_mask_left_aligned _nested_tensor_from_tensor_list _nested_tensor_size
        _nested_tensor_storage_offsets _nested_tensor_strides
    """,
    "metadata, assertions, memory": """
        _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
        sym_constrain_range sym_constrain_range_for_size _functional_sym_constrain_range
        _functional_sym_constrain_range_for_size _fused_sdp_choice _has_same_storage_numel _local_scalar_dense
        _make_dep_token _print is_pinned is_same_size is_set_to record_stream resize resize_as _resize_output
        set sym_size sym_stride sym_numel sym_storage_offset sym_is_contiguous size stride numel dim
        storage_offset shallow_copy_data
    """,
}
"""Bare aten names by reason. In-place, list and gradient forms follow from the rules in the module's docstring."""

IGNORED_ELSEWHERE: Mapping[str, str] = {
    "quantized": """
        add add_out add_relu add_relu_out add_scalar add_scalar_out add_scalar_relu add_scalar_relu_out mul
        mul_out mul_relu mul_relu_out mul_scalar mul_scalar_out mul_scalar_relu mul_scalar_relu_out cat cat_out
        cat_relu cat_relu_out celu clamp dropout elu hardswish leaky_relu prelu relu6 sigmoid softmax threshold
        batch_norm batch_norm1d batch_norm1d_relu batch_norm2d batch_norm2d_relu batch_norm3d batch_norm3d_relu
        batch_norm_relu group_norm instance_norm layer_norm max_pool1d max_pool2d embedding_4bit embedding_byte
        embedding_bag_4bit embedding_bag_byte embedding_bag_2bit_rowwise_offsets
        embedding_bag_4bit_rowwise_offsets embedding_bag_byte_rowwise_offsets
    """,
    "mkldnn": """
        _reorder_convolution_transpose_weight _reorder_convolution_weight _reorder_linear_weight
        _reorder_mkldnn_rnn_layer_weight
    """,
    "mkl": "_mkl_reorder_linear_weight",
    "onednn": "qadd qadd_relu qmul qbatch_norm2d qconv_prepack qlinear_prepack linear_prepack_fp16",
    "inductor": "_alloc_from_pool _reinterpret_tensor accumulate_grad resize_storage_bytes",
    "fsdp": """
        all_gather_copy_in split_with_sizes_copy chunk_cat chunk_cat_mixed_dtype copy set record_grad_output_stream
    """,
    "symm_mem": """
        _barrier _rendezvous all_to_all_vdev all_to_all_vdev_2d all_to_all_vdev_2d_offset get_remote_tensors
        memset32_ multi_root_tile_reduce multimem_all_gather_out multimem_all_reduce_
        multimem_one_shot_all_reduce multimem_one_shot_all_reduce_out multimem_one_shot_reduce_out nccl_get
        nccl_put nccl_put_signal nccl_put_with_signal nccl_reduce_scatter_offset nccl_wait_for_signal
        nccl_wait_signal nvshmem_all_to_all nvshmem_broadcast nvshmem_get nvshmem_put nvshmem_put_with_signal
        nvshmem_wait_for_signal one_shot_all_reduce one_shot_all_reduce_copy one_shot_all_reduce_copy_out
        one_shot_all_reduce_out reduce_scatter_out stream_write_value32_ tile_reduce two_shot_all_reduce_
        two_shot_all_reduce_out _low_contention_all_gather _low_contention_reduce_scatter
    """,
    "torchvision": "nms roi_align roi_pool ps_roi_align ps_roi_pool",
    "bitsandbytes": """
        quantize_4bit dequantize_4bit quantize_blockwise dequantize_blockwise int8_vectorwise_quant
        int8_vectorwise_dequant int8_double_quant int8_mm_dequant optimizer_update_32bit
        optimizer_update_8bit_blockwise
    """,
}
"""Names in other namespaces, those of libraries that need not be installed included."""

IGNORED_NAMESPACES = frozenset(
    {
        "prims",  # torch's elementwise, reduction and copy primitives; a product is not among them
        "rngprims",
        "debugprims",
        "inductor_prims",
        "profiler",
        "c10d",  # collectives move data
        "_c10d_functional",
        "c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
    }
)
"""Namespaces without products."""

PACKING_SUFFIXES = ("_prepack", "_prepack_fp16", "_unpack", "_unpack_fp16", "_unpack_sizes")
"""Ends of names in the quantized namespaces that rearrange a weight."""

REPORTED: Mapping[str, str] = {
    "aten::_sparse_sparse_matmul": "its FLOPs depend on where the entries of the two sparse matrices meet",
    "aten::linalg_matrix_exp": "how many products it takes depends on the values",
    "aten::_compute_linear_combination": "a step of the matrix exponential, whose products depend on the values",
    "aten::quantized_lstm": "its packed weights cannot be read",
    "aten::quantized_gru": "its packed weights cannot be read",
}
"""Operators with products that shapes do not give; they are reported as unsupported, with this reason."""

_LISTED = frozenset(f"aten::{name}" for group in IGNORED_GROUPS.values() for name in group.split()) | frozenset(
    f"{namespace}::{name}" for namespace, group in IGNORED_ELSEWHERE.items() for name in group.split()
)


@functools.cache
def is_ignored(name: str) -> bool:
    """True for operators that count 0 by convention (elementwise, norms, look-ups, copies).

    Args:
        name: qualified, without overload: ``"aten::add_"``.

    Example:
        >>> is_ignored("aten::_foreach_add_"), is_ignored("aten::_foreach_mm")
        (True, False)
    """
    if name in REPORTED:
        return False
    namespace, _, bare = name.partition("::")
    if namespace in IGNORED_NAMESPACES or name in _LISTED:
        return True
    if namespace in ("quantized", "_quantized") and bare.endswith(PACKING_SUFFIXES):
        return True
    if any(_is_tagged(overload) or _only_makes_views(overload) for overload in _overloads(name)):
        return True
    return any(is_ignored(base) for base in _bases(name))


def _bases(name: str) -> Iterator[str]:
    """The operators of which ``name`` is the in-place form, the list form or the gradient."""
    namespace, _, bare = name.partition("::")
    if bare.endswith("_") and not bare.endswith("__"):
        yield f"{namespace}::{bare[:-1]}"
    elif bare.endswith("_backward"):
        yield f"{namespace}::{bare.removesuffix('_backward')}"
    elif bare.startswith("_foreach_"):
        yield f"{namespace}::{bare.removeprefix('_foreach_')}"


def _overloads(name: str) -> list[Any]:
    namespace, _, bare = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), bare, None)
    if packet is None or not hasattr(packet, "overloads"):
        return []  # not imported, or a higher-order operator
    return [getattr(packet, overload) for overload in packet.overloads()]


def _is_tagged(overload: Any) -> bool:
    return torch.Tag.pointwise in overload.tags or torch.Tag.view_copy in overload.tags


def _only_makes_views(overload: Any) -> bool:
    returns = schema_of(overload).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
