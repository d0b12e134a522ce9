"""Kernels with packed documents or (B, S, H, D) operands: PyTorch's own, and stand-ins with the schemas of others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mfu_monitor.formulas  # noqa: F401  # registers every formula
from mfu_monitor.formulas.attention_packed import hub_flash_formula
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
    call = bind_call(op, args, kwargs, None)
    found = find_formula(call.name)
    assert found is not None, call.name
    return found(call)


def executed(cost: OpCost) -> int:
    return cost.flops + cost.masked_flops + cost.kernel_recompute_flops


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def ends(*lengths: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, **kwargs: Any) -> OpCost:
    cu_q, cu_k = kwargs.pop("cu_q", None), kwargs.pop("cu_k", None)
    max_q, max_k = kwargs.pop("max_q", q.shape[-3]), kwargs.pop("max_k", k.shape[-3])
    op = aten._flash_attention_forward.default
    return cost_of(op, q, k, v, cu_q, cu_k, max_q, max_k, 0.0, is_causal, False, **kwargs)


def flash_backward(q: torch.Tensor, cu: torch.Tensor | None, longest: int, is_causal: bool = False) -> OpCost:
    seed, lse = meta(2), meta(1)
    op = aten._flash_attention_backward.default
    return cost_of(op, q, q, q, q, q, lse, cu, cu, longest, longest, 0.0, is_causal, seed, seed)


# --- PyTorch's own ----------------------------------------------------------------------------------------------------


def test_operands_of_the_flash_and_efficient_operators_have_heads_third() -> None:
    q = meta(2, 1024, 16, 64)
    product = matmul(2 * 16 * 1024 * 1024, 64)
    efficient = cost_of(aten._efficient_attention_forward.default, q, q, q, None, None, None, None, None, 0.0, 0)
    assert flash(q, q, q).flops == efficient.flops == 2 * product == 8_589_934_592
    backward = flash_backward(q, None, 1024)
    assert backward.flops == 4 * product == 17_179_869_184
    assert executed(backward) == 5 * product == 21_474_836_480


def test_packed_documents_count_their_own_squares_and_no_padding() -> None:
    q = meta(192, 8, 64)
    cost = flash(q, q, q, cu_q=ends(128, 64), cu_k=ends(128, 64), max_q=128, max_k=128)
    assert cost.flops == 2 * matmul(8 * (128**2 + 64**2), 64) == 41_943_040
    backward = flash_backward(q, ends(128, 64), 128)
    assert backward.flops == 2 * 41_943_040
    assert backward.kernel_recompute_flops == matmul(8 * (128**2 + 64**2), 64)


def test_a_pack_of_four_documents_is_a_quarter_of_the_square() -> None:
    q = meta(8192, 1, 64)
    cu = ends(2048, 2048, 2048, 2048)
    packed = flash(q, q, q, cu_q=cu, cu_k=cu, max_q=2048, max_k=2048)
    assert packed.flops == 2 * matmul(4 * 2048**2, 64)
    assert packed.palm_flops is None  # a document's own square
    unpacked = flash(meta(1, 8192, 1, 64), meta(1, 8192, 1, 64), meta(1, 8192, 1, 64))
    assert packed.flops * 4 == unpacked.flops


def test_causal_documents_of_unequal_query_and_key_lengths_align_bottom_right() -> None:
    q, k = meta(5, 1, 8), meta(9, 1, 8)
    cost = flash(q, k, k, True, cu_q=ends(2, 3), cu_k=ends(5, 4), max_q=3, max_k=5)
    assert cost.flops == 2 * matmul((4 + 5) + (2 + 3 + 4), 8)
    assert cost.palm_flops == 2 * matmul(2 * 5 + 3 * 4, 8)


@pytest.mark.parametrize(
    ("left", "right", "is_causal", "pairs"),
    [
        (-1, -1, False, 16 * 16),
        (None, None, False, 16 * 16),
        (3, 0, False, 4 * 16 - 4 * 3 // 2),  # a window of W = 4 keys with the query's own
        (3, -1, True, 4 * 16 - 4 * 3 // 2),
        (3, 7, True, 4 * 16 - 4 * 3 // 2),  # causal wins over the right limit
        (-1, 0, False, triangle(16)),
        (100, 0, False, triangle(16)),
        (1, 1, False, 3 * 16 - 2),
    ],
)
def test_windows_keep_a_band(left: int | None, right: int | None, is_causal: bool, pairs: int) -> None:
    q = meta(1, 16, 2, 8)
    cost = flash(q, q, q, is_causal, window_size_left=left, window_size_right=right)
    assert cost.flops == executed(cost) == 2 * matmul(2 * pairs, 8)


needs_varlen_attn = pytest.mark.skipif(
    not all(hasattr(torch.ops.torch_attn, name) for name in ("_varlen_attn", "_varlen_attn_out")),
    reason="torch.nn.attention.varlen came with torch 2.10",
)


@needs_varlen_attn
@pytest.mark.parametrize("name", ["_varlen_attn", "_varlen_attn_out"])
def test_varlen_attn_reads_its_window_as_a_pair(name: str) -> None:
    q = meta(192, 8, 64)
    op = getattr(torch.ops.torch_attn, name).default
    out = (q,) if name.endswith("out") else ()
    dense = cost_of(op, *out, q, q, q, ends(128, 64), ends(128, 64), 128, 128)
    causal = cost_of(op, *out, q, q, q, ends(128, 64), ends(128, 64), 128, 128, window_size=[-1, 0])
    assert dense.flops == 41_943_040
    assert causal.flops == 2 * matmul(8 * (triangle(128) + triangle(64)), 64)


@needs_varlen_attn
def test_varlen_attn_backward_is_four_products_and_runs_a_fifth() -> None:
    q, cu = meta(192, 8, 64), ends(128, 64)
    op = torch.ops.torch_attn._varlen_attn_backward.default
    cost = cost_of(op, q, q, q, q, q, meta(8, 192), cu, cu, 128, 128, False, meta(2))
    product = matmul(8 * (128**2 + 64**2), 64)
    assert (cost.flops, executed(cost)) == (4 * product, 5 * product)


@needs_varlen_attn
def test_used_key_lengths_replace_allocated_ones_in_a_cache() -> None:
    q, k = meta(2, 1, 4, 8), meta(2, 100, 4, 8)
    cost = flash(q, k, k, seqused_k=torch.tensor([7, 30], dtype=torch.int32))
    assert cost.flops == 2 * matmul(4 * (7 + 30), 8)
    paged = cost_of(
        torch.ops.torch_attn._varlen_attn.default,
        *(meta(2, 4, 8), meta(50, 16, 4, 8), meta(50, 16, 4, 8), ends(1, 1), None, 1, 100),
        seqused_k=torch.tensor([7, 30], dtype=torch.int32),
        block_table=torch.zeros(2, 7, dtype=torch.int32),
    )
    assert paged.flops == cost.flops


@pytest.mark.parametrize(
    ("total", "documents", "longest", "lengths"),
    [
        (192, 3, 64, [64, 64, 64]),  # all equally long: exact
        (192, 2, 128, [128, 64]),
        (100, 4, 60, [60, 40]),  # an upper bound: no split of 100 tokens has more pairs
    ],
)
def test_documents_whose_ends_cannot_be_read_are_as_long_as_allowed_and_it_says_so(
    total: int, documents: int, longest: int, lengths: Any
) -> None:
    q, cu = meta(total, 2, 8), ends(*[1] * documents, device="meta")
    cost = flash(q, q, q, True, cu_q=cu, cu_k=cu, max_q=longest, max_k=longest)
    assert cost.flops == 2 * matmul(2 * sum(map(triangle, lengths)), 8)
    assert "lengths could not be read" in (cost.note or "")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.booleans())
def test_unreadable_documents_are_never_undercounted(lengths: Any, is_causal: bool) -> None:
    q = meta(sum(lengths), 1, 8)
    known, unknown = ends(*lengths), ends(*lengths, device="meta")
    longest = max(lengths)
    exact = flash(q, q, q, is_causal, cu_q=known, cu_k=known, max_q=longest, max_k=longest)
    bound = flash(q, q, q, is_causal, cu_q=unknown, cu_k=unknown, max_q=longest, max_k=longest)
    assert exact.note is None
    assert exact.flops <= bound.flops
    if len(set(lengths)) == 1:
        assert exact.flops == bound.flops


# --- efficient and cuDNN ----------------------------------------------------------------------------------------------


def efficient(q: torch.Tensor, k: torch.Tensor, mask_type: int = 0, **kwargs: Any) -> OpCost:
    bias, cu_q, cu_k = (kwargs.pop(name, None) for name in ("bias", "cu_q", "cu_k"))
    op = aten._efficient_attention_forward.default
    return cost_of(op, q, k, k, bias, cu_q, cu_k, None, None, 0.0, mask_type, **kwargs)


def test_efficient_mask_types_name_the_corner() -> None:
    q, k = meta(1, 2, 1, 8), meta(1, 5, 1, 8)
    assert efficient(q, k, 0).flops == 2 * matmul(2 * 5, 8)
    assert efficient(q, k, 1).flops == 2 * matmul(1 + 2, 8)
    assert efficient(q, k, 2).flops == 2 * matmul(4 + 5, 8)


def test_an_efficient_window_keeps_that_many_keys_with_the_querys_own() -> None:
    q = meta(1, 16, 1, 8)
    assert efficient(q, q, 1, window_size=4).flops == 2 * matmul(4 * 16 - 4 * 3 // 2, 8)


def test_efficient_packs_documents_in_a_batch_of_one() -> None:
    q = meta(1, 192, 8, 64)
    cost = efficient(q, q, cu_q=ends(128, 64), cu_k=ends(128, 64))
    assert cost.flops == 41_943_040
    causal = efficient(q, q, 1, cu_q=ends(128, 64), cu_k=ends(128, 64))
    assert causal.flops == 2 * matmul(8 * (triangle(128) + triangle(64)), 64)


def test_an_efficient_bias_counts_by_content_and_runs_dense() -> None:
    q = meta(2, 5, 3, 8)
    bias = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    cost = efficient(q, q, bias=bias)
    assert cost.flops == 2 * matmul(2 * 3 * triangle(5), 8)
    assert executed(cost) == 2 * matmul(2 * 3 * 25, 8)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    padded_keys = efficient(meta(1, 10, 3, 8), meta(1, 10, 3, 8), cu_q=ends(5, 5), cu_k=ends(5, 5), seqlen_k=lengths)
    assert padded_keys.flops == 2 * matmul(3 * (5 * 3 + 5 * 4), 8)


def test_efficient_backward_is_four_products_and_runs_a_fifth() -> None:
    q, lse, seed = meta(2, 64, 4, 16), meta(2, 4, 64), meta(1)
    op = aten._efficient_attention_backward.default
    cost = cost_of(op, q, q, q, q, None, q, None, None, 64, 64, lse, 0.0, seed, seed, 1, False)
    product = matmul(2 * 4 * triangle(64), 16)
    assert (cost.flops, executed(cost)) == (4 * product, 5 * product)


def test_cudnn_takes_heads_second_or_packed_documents() -> None:
    dense = meta(2, 4, 64, 16)
    op = aten._cudnn_attention_forward.default
    cost = cost_of(op, dense, dense, dense, None, None, None, 64, 64, True, 0.0, True)
    assert cost.flops == 2 * matmul(2 * 4 * triangle(64), 16)
    packed, cu = meta(192, 8, 64), ends(128, 64)
    assert cost_of(op, packed, packed, packed, None, cu, cu, 128, 128, True).flops == 41_943_040
    backward = cost_of(
        aten._cudnn_attention_backward.default,
        *(packed, packed, packed, packed, packed, meta(1), meta(1), meta(1), None, cu, cu, 128, 128, 0.0, False),
    )
    product = matmul(8 * (128**2 + 64**2), 64)
    assert (backward.flops, executed(backward)) == (4 * product, 5 * product)


# --- other libraries' operators, by name ------------------------------------------------------------------------------

STAND_INS = {
    "flash_attn": [
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
        "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, float dropout_p, float softmax_scale, bool causal, "
        "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, "
        "bool deterministic, Tensor? rng_state=None) -> Tensor",
        "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
        "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
        "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
        "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)",
        "_flash_attn_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
        "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, "
        "bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor",
    ],
    "flash_attn_3": [
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
        "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
        "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
        "int attention_chunk=0) -> (Tensor, Tensor, Tensor, Tensor)",
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? dq=None, "
        "Tensor? dk=None, Tensor? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
    ],
    "_flash_attn2_9e27194": [
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? out_, Tensor? alibi_slopes_, float p_dropout, float softmax_scale, "
        "bool is_causal, int window_size_left, int window_size_right, float softcap, bool return_softmax, "
        "Generator? gen_) -> Tensor[]",
        "varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? dq_, "
        "Tensor? dk_, Tensor? dv_, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes_, int max_seqlen_q, "
        "int max_seqlen_k, float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, "
        "int window_size_left, int window_size_right) -> Tensor[]",
    ],
    "xformers": [
        "efficient_attention_forward_cutlass(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "Tensor? seqstart_q, Tensor? seqstart_k, int? max_seqlen_q, float dropout_p, bool compute_logsumexp, "
        "int custom_mask_type, float? scale, Tensor? seqlen_k, int? window_size) -> (Tensor, Tensor, int, int)",
        "efficient_attention_backward_cutlass(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? bias, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, Tensor logsumexp, "
        "Tensor output, float dropout_p, int rng_seed, int rng_offset, int custom_mask_type, float? scale, "
        "int num_splits_key, int? window_size) -> (Tensor, Tensor, Tensor, Tensor)",
    ],
    "xformers_flash": [
        "flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_k, int max_seqlen_q, int max_seqlen_k, float p, float softmax_scale, bool is_causal, "
        "int window_left, int window_right, bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)",
        "flash_bwd(bool grads_share_storage, Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor softmax_lse_, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, float p, "
        "float softmax_scale, bool is_causal, int window_left, int window_right, Tensor rng_state) "
        "-> (Tensor dq, Tensor dk, Tensor dv)",
    ],
}


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    """Operators of other libraries by name and schema, so that none of them needs to be installed."""
    libraries = [torch.library.Library(name, "FRAGMENT") for name in STAND_INS]
    for library, schemas in zip(libraries, STAND_INS.values(), strict=True):
        for schema in schemas:
            library.define(schema)
    yield
    for library in libraries:
        library._destroy()


Q, PACKED, CU = meta(2, 128, 4, 64), meta(192, 8, 64), ends(128, 64)
SCALE = 64**-0.5
LSE, SEED = meta(2, 4, 128), meta(2)
DENSE, DOCUMENTS = 2 * 4 * 128 * 128, 8 * (128**2 + 64**2)
CAUSAL, CAUSAL_DOCUMENTS = 2 * 4 * triangle(128), 8 * (triangle(128) + triangle(64))

FOREIGN_FORWARDS = {
    "flash-attn 2": lambda c: cost_of(
        torch.ops.flash_attn._flash_attn_forward.default, Q, Q, Q, 0.0, SCALE, c, -1, -1, 0.0, None, False
    ),
    "flash-attn 3": lambda c: cost_of(torch.ops.flash_attn_3.fwd.default, Q, Q, Q, softmax_scale=SCALE, is_causal=c),
    "xFormers cutlass": lambda c: cost_of(
        torch.ops.xformers.efficient_attention_forward_cutlass.default,
        *(Q, Q, Q, None, None, None, None, 0.0, True, int(c), None, None, None),
    ),
    "xFormers flash": lambda c: cost_of(
        torch.ops.xformers_flash.flash_fwd.default,
        *(Q, Q, Q, None, None, None, 128, 128, 0.0, SCALE, c, -1, -1, False, None),
    ),
}


@pytest.mark.parametrize("library", FOREIGN_FORWARDS)
def test_other_libraries_forwards_count_like_pytorchs(library: str) -> None:
    dense, causal = (FOREIGN_FORWARDS[library](is_causal) for is_causal in (False, True))
    assert dense.flops == executed(dense) == 2 * matmul(DENSE, 64)
    assert causal.flops == executed(causal) == 2 * matmul(CAUSAL, 64)
    assert causal.palm_flops == dense.flops


FOREIGN_BACKWARDS = {
    "flash-attn 2": lambda c: cost_of(
        torch.ops.flash_attn._flash_attn_backward.default,
        *(Q, Q, Q, Q, Q, LSE, None, None, None, 0.0, SCALE, c, -1, -1, 0.0, None, False),
    ),
    "flash-attn 3": lambda c: cost_of(
        torch.ops.flash_attn_3.bwd.default, Q, Q, Q, Q, Q, LSE, softmax_scale=SCALE, is_causal=c
    ),
    "xFormers cutlass": lambda c: cost_of(
        torch.ops.xformers.efficient_attention_backward_cutlass.default,
        *(Q, Q, Q, Q, None, None, None, 128, 128, LSE, Q, 0.0, 0, 0, int(c), None, -1, None),
    ),
    "xFormers flash": lambda c: cost_of(
        torch.ops.xformers_flash.flash_bwd.default,
        *(False, Q, Q, Q, Q, Q, LSE, None, None, 128, 128, 0.0, SCALE, c, -1, -1, SEED),
    ),
}


@pytest.mark.parametrize("library", FOREIGN_BACKWARDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_other_libraries_backwards_are_four_products_and_run_a_fifth(library: str, is_causal: bool) -> None:
    cost = FOREIGN_BACKWARDS[library](is_causal)
    product = matmul(CAUSAL if is_causal else DENSE, 64)
    assert (cost.flops, executed(cost)) == (4 * product, 5 * product)


FOREIGN_PACKED = {
    "flash-attn 2": lambda c: cost_of(
        torch.ops.flash_attn._flash_attn_varlen_forward.default,
        *(PACKED, PACKED, PACKED, CU, CU, 128, 128, 0.0, SCALE, c),
    ),
    "flash-attn 3": lambda c: cost_of(
        torch.ops.flash_attn_3.fwd.default,
        *(PACKED, PACKED, PACKED),
        cu_seqlens_q=CU,
        cu_seqlens_k=CU,
        max_seqlen_q=128,
        max_seqlen_k=128,
        is_causal=c,
    ),
    "xFormers cutlass": lambda c: cost_of(
        torch.ops.xformers.efficient_attention_forward_cutlass.default,
        *(PACKED[None], PACKED[None], PACKED[None], None, CU, CU, 128, 0.0, True, int(c), None, None, None),
    ),
    "xFormers flash": lambda c: cost_of(
        torch.ops.xformers_flash.flash_fwd.default,
        *(PACKED, PACKED, PACKED, CU, CU, None, 128, 128, 0.0, SCALE, c, -1, -1, False, None),
    ),
}


@pytest.mark.parametrize("library", FOREIGN_PACKED)
def test_other_libraries_packed_documents_count_their_own_squares(library: str) -> None:
    assert FOREIGN_PACKED[library](False).flops == 2 * matmul(DOCUMENTS, 64) == 41_943_040
    assert FOREIGN_PACKED[library](True).flops == 2 * matmul(CAUSAL_DOCUMENTS, 64)


def test_flash_attn_windows_follow_the_arguments_of_each_library() -> None:
    pairs = 2 * 4 * (5 * 128 - 5 * 4 // 2)
    ours = cost_of(torch.ops.flash_attn._flash_attn_forward.default, Q, Q, Q, 0.0, SCALE, True, 4, 0, 0.0, None, False)
    theirs = cost_of(
        torch.ops.xformers_flash.flash_fwd.default,
        *(Q, Q, Q, None, None, None, 128, 128, 0.0, SCALE, True, 4, 0, False, None),
    )
    assert ours.flops == theirs.flops == 2 * matmul(pairs, 64)


def test_flash_attn_3_chunks_attend_within_themselves() -> None:
    chunked = cost_of(torch.ops.flash_attn_3.fwd.default, Q, Q, Q, is_causal=True, attention_chunk=50)
    assert chunked.flops == 2 * matmul(2 * 4 * (2 * triangle(50) + triangle(28)), 64)


def test_builds_from_the_kernels_hub_are_known_whatever_their_hash() -> None:
    operators = torch.ops._flash_attn2_9e27194
    forward = bind_call(
        operators.fwd.default, (Q, Q, Q, None, None, 0.0, SCALE, True, -1, 0, 0.0, False, None), {}, None
    )
    found = hub_flash_formula(forward.name)
    assert found is not None
    assert found(forward).flops == 2 * matmul(CAUSAL, 64)
    packed = (PACKED,) * 5 + (LSE, None, None, None, CU, CU, None, 128, 128, 0.0, SCALE, False, False, -1, -1)
    backward = bind_call(operators.varlen_bwd.default, packed, {}, None)
    found = hub_flash_formula(backward.name)
    assert found is not None
    assert executed(found(backward)) == 5 * matmul(DOCUMENTS, 64)


@pytest.mark.parametrize(
    "name", ["aten::fwd", "_flash_attn2_9e27194::fwd_kvcache", "flash_mla::fwd", "my_flash_attn::fwd"]
)
def test_other_names_are_no_builds_of_flash_attention(name: str) -> None:
    assert hub_flash_formula(name) is None


def test_cudnn_attention_into_a_given_tensor_counts_as_the_one_that_makes_its_own() -> None:
    query, key = torch.empty(8, 2, 16, device="meta"), torch.empty(8, 2, 16, device="meta")
    arguments = {"query": query, "key": key, "value": key, "is_causal": True, "max_q": 5, "max_k": 5}
    arguments |= {"cum_seq_q": torch.tensor([0, 3, 8]), "cum_seq_k": torch.tensor([0, 3, 8])}
    found = find_formula("aten::_cudnn_attention_forward_no_dropout_inplace")
    assert found is not None
    # Documents of 3 and 5: 6 + 15 causal pairs, 2 heads, Q K^T and P V of width 16.
    assert found(OperatorCall("x", arguments, None)).flops == 2 * 2 * 2 * (6 + 15) * 16
