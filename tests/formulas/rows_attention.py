"""Rows of attention: 5 queries of 6 heads on 7 keys of 3 heads, 16 wide, values 24 wide where a kernel allows it.

A forward is two products over the attended pairs, a backward four; a fused backward runs ``Q K^T`` once more.
"""

from __future__ import annotations

from typing import Any

import torch

from .row import Row, T, row

I32 = torch.int32

HEADS = 2 * 6
SQUARE = HEADS * 5 * 7
TOP_LEFT = HEADS * (1 + 2 + 3 + 4 + 5)
BOTTOM_RIGHT = HEADS * (3 + 4 + 5 + 6 + 7)
LOWER = torch.ones(5, 7, dtype=torch.bool).tril()
"""As a mask tensor what a causal flag says: 15 of 35 pairs."""


def products(pairs: int, width: int, *more: int) -> int:
    """FLOPs of one product a width over so many query-key pairs."""
    return sum(2 * pairs * each for each in (width, *more))


# --- PyTorch's kernels on (B, H, S, D) --------------------------------------------------------------------------------


def q(wide: int = 16) -> torch.Tensor:
    return T(2, 6, 5, wide)


def k(wide: int = 16) -> torch.Tensor:
    return T(2, 3, 7, wide)


def v() -> torch.Tensor:
    return T(2, 3, 7, 24)


def lse() -> torch.Tensor:
    return T(2, 6, 5)


Q, K, V, O, LSE = 12 * 5 * 16, 6 * 7 * 16, 6 * 7 * 24, 12 * 5 * 24, 12 * 5  # noqa: E741
FORWARD_MOVED = 4 * (Q + K + V + O + LSE)
BACKWARD_MOVED = 4 * ((O + Q + K + V + O + LSE) + (Q + K + V))
FULL, CAUSAL = products(SQUARE, 16, 24), products(TOP_LEFT, 16, 24)

HEADS_SECOND_FORWARDS = tuple(
    one
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
                 "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable")
    for mask in (["attn_mask"] if name.endswith("for_cpu") else ["attn_bias"])
    for one in (
        row(f"aten::{name}", query=q(), key=k(), value=v(), gives=(T(2, 6, 5, 24), lse()), flops=FULL,
            moved=FORWARD_MOVED),
        row(f"aten::{name}", label="causal", query=q(), key=k(), value=v(), is_causal=True,
            gives=(T(2, 6, 5, 24), lse()), flops=CAUSAL, palm=FULL, moved=FORWARD_MOVED),
        row(f"aten::{name}", label="mask", query=q(), key=k(), value=v(), **{mask: LOWER},
            gives=(T(2, 6, 5, 24), lse()), flops=CAUSAL, palm=FULL, masked=FULL - CAUSAL, moved=FORWARD_MOVED + 35),
    )
)  # fmt: skip

WHOLE = tuple(
    one
    for name, skips, results in (
        ("scaled_dot_product_attention", True, 0),
        ("_scaled_dot_product_attention_math", False, SQUARE),
        ("_scaled_dot_product_attention_math_for_mps", False, SQUARE),
    )
    for one in (
        row(f"aten::{name}", query=q(), key=k(), value=v(),
            gives=(T(2, 6, 5, 24), T(2, 6, 5, 7))[: 1 if skips else 2], flops=FULL,
            moved=FORWARD_MOVED - 4 * LSE + 4 * results),
        row(f"aten::{name}", label="causal", query=q(), key=k(), value=v(), is_causal=True,
            gives=(T(2, 6, 5, 24), T(2, 6, 5, 7))[: 1 if skips else 2], flops=CAUSAL, palm=FULL,
            masked=0 if skips else FULL - CAUSAL, moved=FORWARD_MOVED - 4 * LSE + 4 * results),
    )
)  # fmt: skip

# CUDA's flash kernel starts its diagonal bottom-right, and its operands are padded to a multiple of 8: heads of 20
# come as 24, with the scale of 20.
PADDED = products(BOTTOM_RIGHT, 20, 20)
PADDED_READ = 12 * 5 * 24 + 2 * (6 * 7 * 24)
CUDA_FLASH = (
    row("aten::_scaled_dot_product_flash_attention", query=q(24), key=k(24), value=k(24), is_causal=True,
        scale=20**-0.5, gives=(T(2, 6, 5, 24), lse()), flops=PADDED, palm=products(SQUARE, 20, 20),
        masked=products(BOTTOM_RIGHT, 24, 24) - PADDED, moved=4 * (PADDED_READ + O + LSE)),
    row("aten::_scaled_dot_product_flash_attention", overload="quantized", query=q(), key=k(), value=k(),
        q_descale=T(2, 6), gives=(T(2, 6, 5, 16), lse()), flops=products(SQUARE, 16, 16),
        moved=4 * (Q + K + K + 12 + Q + LSE)),
    row("aten::_scaled_dot_product_flash_attention_backward", grad_out=q(24), query=q(24), key=k(24), value=k(24),
        out=q(24), logsumexp=lse(), cum_seq_q=T(0), cum_seq_k=T(0), is_causal=True, philox_seed=T(2),
        philox_offset=T(1), scale=20**-0.5, gives=(q(24), k(24), k(24)), flops=2 * PADDED,
        palm=2 * products(SQUARE, 20, 20), masked=2 * (products(BOTTOM_RIGHT, 24, 24) - PADDED),
        redone=products(BOTTOM_RIGHT, 24), moved=4 * (2 * O + PADDED_READ + LSE + 3 + PADDED_READ)),
    row("aten::_triton_scaled_dot_attention", q=q(), k=k(), v=v(), gives=T(2, 6, 5, 24), flops=FULL,
        moved=FORWARD_MOVED - 4 * LSE),
)  # fmt: skip


def given(name: str) -> dict[str, Any]:
    """What a backward takes beside its six operands."""
    seeds: dict[str, Any] = {"philox_seed": T(0), "philox_offset": T(0)}
    ends: dict[str, Any] = {"cum_seq_q": T(0), "cum_seq_k": T(0)}
    if name.startswith("_scaled_dot_product_flash"):
        return {}
    return seeds | {"attn_bias": T(0)} | ({} if "efficient" in name else ends)


def heads_second_backward(name: str, *, is_causal: bool, needs: tuple[bool, bool, bool] | None = None) -> Row:
    grad = "grad_out_" if "efficient" in name else "grad_out"
    pairs = TOP_LEFT if is_causal else SQUARE
    asked_q, asked_k, asked_v = needs or (True, True, True)
    # dQ and dK need dA = dO V^T first, dV is a product of its own
    widths = [16] * asked_q + [16] * asked_k + [24] * asked_v + [24] * (asked_q or asked_k)
    model, palm = products(pairs, 0, *widths), products(SQUARE, 0, *widths)
    gives = (q() if asked_q else None, k() if asked_k else None, v() if asked_v else None)
    written = Q * asked_q + K * asked_k + V * asked_v
    mask = {"grad_input_mask": [*needs, False]} if needs else {}
    return row(f"aten::{name}_backward", label=f"causal {is_causal}, {needs}", **{grad: T(2, 6, 5, 24)}, query=q(),
               key=k(), value=v(), out=T(2, 6, 5, 24), logsumexp=lse(), is_causal=is_causal, **mask, **given(name),
               gives=gives, flops=model, palm=palm if is_causal else None,
               masked=products(pairs, 16, 16, 24, 24) - model, redone=products(pairs, 16),
               moved=BACKWARD_MOVED - 4 * (Q + K + V - written))  # fmt: skip


HEADS_SECOND_BACKWARDS = (
    *(
        heads_second_backward(name, is_causal=is_causal)
        for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention")
        for is_causal in (False, True)
    ),
    *(
        heads_second_backward(name, is_causal=is_causal, needs=needs)
        for name in (
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        )
        for is_causal in (False, True)
        for needs in ((True, True, True), (False, True, True), (True, False, False), (False, False, True))
    ),
)


# --- flash kernels on (B, S, H, D) and on packed documents ------------------------------------------------------------

F_FULL, F_CAUSAL = products(SQUARE, 16, 16), products(BOTTOM_RIGHT, 16, 16)
F_READ = Q + K + K
WINDOW = HEADS * (5 + 4)  # 5 queries on 5 keys: their own and the one before
CHUNKS = HEADS * (3 + 3 + 1)  # causal within chunks of 2, 2 and 1

# Documents of 3 and 5 queries on 4 and 5 keys, 2 heads of 16.
ENDS_Q, ENDS_K = torch.tensor([0, 3, 8], dtype=I32), torch.tensor([0, 4, 9], dtype=I32)
PACKED, PACKED_CAUSAL = 2 * (3 * 4 + 5 * 5), 2 * ((2 + 3 + 4) + (1 + 2 + 3 + 4 + 5))
P_Q, P_K = 8 * 2 * 16, 9 * 2 * 16
P_READ = P_Q + 2 * P_K
ENDS = 2 * 3  # two tensors of three fp32-sized numbers


def heads_third(keys: int = 7) -> dict[str, torch.Tensor]:
    return {"query": T(2, 5, 6, 16), "key": T(2, keys, 3, 16), "value": T(2, keys, 3, 16)}


def documents() -> dict[str, torch.Tensor]:
    return {"query": T(8, 2, 16), "key": T(9, 2, 16), "value": T(9, 2, 16)}


def short(operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As most other libraries name them: q, k, v."""
    return {name[0]: tensor for name, tensor in operands.items()}


def dense_result() -> tuple[torch.Tensor, ...]:
    return T(2, 5, 6, 16), lse()


def packed_result() -> tuple[torch.Tensor, ...]:
    return T(8, 2, 16), T(2, 8)


FLASH = (
    row("aten::_flash_attention_forward", **heads_third(), max_q=5, max_k=7, is_causal=False, gives=dense_result(),
        flops=F_FULL, moved=4 * (F_READ + Q + LSE)),
    row("aten::_flash_attention_forward", label="causal", **heads_third(), max_q=5, max_k=7, is_causal=True,
        gives=dense_result(), flops=F_CAUSAL, palm=F_FULL, moved=4 * (F_READ + Q + LSE)),
    row("aten::_flash_attention_forward", label="window", **heads_third(5), max_q=5, max_k=5, is_causal=False,
        window_size_left=1, window_size_right=0, gives=dense_result(), flops=products(WINDOW, 16, 16),
        palm=products(HEADS * 25, 16, 16), moved=4 * (Q + 2 * (2 * 3 * 5 * 16) + Q + LSE)),
    row("aten::_flash_attention_forward", label="used keys", **heads_third(), max_q=5, max_k=7, is_causal=False,
        seqused_k=torch.tensor([2, 7], dtype=I32), gives=dense_result(), flops=products(6 * 5 * (2 + 7), 16, 16),
        moved=4 * (F_READ + 2 + Q + LSE)),
    row("aten::_flash_attention_forward", label="documents", **documents(), cum_seq_q=ENDS_Q, cum_seq_k=ENDS_K,
        max_q=5, max_k=5, is_causal=True, gives=packed_result(), flops=products(PACKED_CAUSAL, 16, 16),
        palm=products(PACKED, 16, 16), moved=4 * (P_READ + ENDS + P_Q + 16)),
    row("aten::_flash_attention_forward_no_dropout_inplace", out=T(8, 2, 16), **documents(), cum_seq_q=ENDS_Q,
        cum_seq_k=ENDS_K, max_q=5, max_k=5, is_causal=False, gives=T(2, 8), flops=products(PACKED, 16, 16),
        moved=4 * (P_READ + ENDS + P_Q + 16)),
    row("aten::_flash_attention_backward", grad_out=T(8, 2, 16), **documents(), out=T(8, 2, 16), logsumexp=T(2, 8),
        cum_seq_q=ENDS_Q, cum_seq_k=ENDS_K, max_q=5, max_k=5, is_causal=True, rng_state=T(0), unused=T(0),
        gives=(T(8, 2, 16), T(9, 2, 16), T(9, 2, 16)), flops=2 * products(PACKED_CAUSAL, 16, 16),
        palm=2 * products(PACKED, 16, 16), redone=products(PACKED_CAUSAL, 16),
        moved=4 * (2 * P_Q + P_READ + 16 + ENDS + P_READ)),
    row("torch_attn::_varlen_attn", schema="(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, "
        "Tensor? cu_seq_k, SymInt max_q, SymInt max_k, bool is_causal=False) -> (Tensor, Tensor, Tensor)",
        **documents(), cu_seq_q=ENDS_Q, cu_seq_k=ENDS_K, max_q=5, max_k=5, is_causal=True,
        gives=(*packed_result(), T(2)), flops=products(PACKED_CAUSAL, 16, 16), palm=products(PACKED, 16, 16),
        moved=4 * (P_READ + ENDS + P_Q + 16 + 2)),
    row("torch_attn::_varlen_attn_out", schema="(Tensor(a!) out, Tensor query, Tensor key, Tensor value, "
        "Tensor cu_seq_q, Tensor? cu_seq_k, SymInt max_q, SymInt max_k) -> Tensor", out=T(8, 2, 16), **documents(),
        cu_seq_q=ENDS_Q, cu_seq_k=ENDS_K, max_q=5, max_k=5, gives=T(2, 8), flops=products(PACKED, 16, 16),
        moved=4 * (P_READ + ENDS + P_Q + 16)),
    row("torch_attn::_varlen_attn_backward", grad_out=T(8, 2, 16), **documents(), out=T(8, 2, 16), lse=T(2, 8),
        cu_seq_q=ENDS_Q, cu_seq_k=ENDS_K, max_q=5, max_k=5, is_causal=False, rng_state=T(0),
        gives=(T(8, 2, 16), T(9, 2, 16), T(9, 2, 16)), flops=2 * products(PACKED, 16, 16),
        redone=products(PACKED, 16), moved=4 * (2 * P_Q + P_READ + 16 + ENDS + P_READ)),
)  # fmt: skip

# --- the same kernels in other libraries, by the arguments that their schemas have ------------------------------------

BACKWARD_INTO = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
    "Tensor(c!)? dv{}, bool causal) -> Tensor"
)
ENDS_ARGUMENTS = ", Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
CU = {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K, "max_seqlen_q": 5, "max_seqlen_k": 5}

OTHER_FORWARDS = (
    *(
        row(name, **short(heads_third()), **{flag: True}, gives=dense_result(), flops=F_CAUSAL, palm=F_FULL,
            moved=4 * (F_READ + Q + LSE))
        for name, flag in (("flash_attn::_flash_attn_forward", "causal"), ("flashattn::_flash_attn_forward", "causal"),
                           ("flash_attn_3::fwd", "is_causal"), ("flash_attn_3::_flash_attn_forward", "causal"),
                           ("_diffusers_flash_attn_3::_flash_attn_forward", "causal"))
    ),
    row("flash_attn_3::fwd", label="chunks", **short(heads_third(5)), is_causal=True, attention_chunk=2,
        gives=dense_result(), flops=products(CHUNKS, 16, 16), palm=products(HEADS * 25, 16, 16),
        moved=4 * (Q + 2 * (2 * 3 * 5 * 16) + Q + LSE)),
    row("flash_attn_3::fwd", label="used queries and keys", **short(heads_third()),
        seqused_q=torch.tensor([1, 5], dtype=I32), seqused_k=torch.tensor([2, 7], dtype=I32), gives=dense_result(),
        flops=products(6 * (1 * 2 + 5 * 7), 16, 16), moved=4 * (F_READ + 4 + Q + LSE)),
    *(
        row(f"{namespace}::_flash_attn_varlen_forward", **short(documents()), **CU, causal=True, gives=packed_result(),
            flops=products(PACKED_CAUSAL, 16, 16), palm=products(PACKED, 16, 16),
            moved=4 * (P_READ + ENDS + P_Q + 16))
        for namespace in ("flash_attn", "flashattn")
    ),
    *(
        row(f"{namespace}::flash_fwd", **documents(), **CU, is_causal=True, window_left=-1, window_right=-1,
            gives=packed_result(), flops=products(PACKED_CAUSAL, 16, 16), palm=products(PACKED, 16, 16),
            moved=4 * (P_READ + ENDS + P_Q + 16))
        for namespace in ("xformers_flash", "xformers_flash3")
    ),
)  # fmt: skip


def dense_gradients(names: tuple[str, str, str]) -> dict[str, torch.Tensor]:
    return dict(zip(names, (T(2, 5, 6, 16), T(2, 7, 3, 16), T(2, 7, 3, 16)), strict=True))


DENSE_BACKWARD_MOVED = 4 * (2 * Q + F_READ + LSE + F_READ)
OTHER_BACKWARDS = (
    *(
        row(name, schema=BACKWARD_INTO.format(""), dout=T(2, 5, 6, 16), **short(heads_third()), out=T(2, 5, 6, 16),
            softmax_lse=lse(), **dense_gradients(("dq", "dk", "dv")), causal=True, gives=lse(), flops=2 * F_CAUSAL,
            palm=2 * F_FULL, redone=products(BOTTOM_RIGHT, 16), moved=DENSE_BACKWARD_MOVED + 4 * LSE)
        for name in ("flash_attn::_flash_attn_backward", "flashattn::_flash_attn_backward",
                     "flash_attn_3::_flash_attn_backward", "_diffusers_flash_attn_3::_flash_attn_backward")
    ),
    row("flash_attn_3::bwd", dout=T(2, 5, 6, 16), **short(heads_third()), out=T(2, 5, 6, 16), softmax_lse=lse(),
        is_causal=False, gives=(T(2, 5, 6, 16), T(2, 7, 3, 16), T(2, 7, 3, 16), lse()), flops=2 * F_FULL,
        redone=products(SQUARE, 16), moved=DENSE_BACKWARD_MOVED + 4 * LSE),
    *(
        row(f"{namespace}::_flash_attn_varlen_backward", schema=BACKWARD_INTO.format(ENDS_ARGUMENTS),
            dout=T(8, 2, 16), **short(documents()), out=T(8, 2, 16), softmax_lse=T(2, 8),
            dq=T(8, 2, 16), dk=T(9, 2, 16), dv=T(9, 2, 16), **CU, causal=False, gives=T(2, 8),
            flops=2 * products(PACKED, 16, 16), redone=products(PACKED, 16),
            moved=4 * (2 * P_Q + P_READ + 16 + ENDS + P_READ + 16))
        for namespace in ("flash_attn", "flashattn")
    ),
    *(
        row(f"{namespace}::flash_bwd", dout=T(2, 5, 6, 16), **heads_third(), out=T(2, 5, 6, 16), softmax_lse_=lse(),
            is_causal=True, gives=(T(2, 5, 6, 16), T(2, 7, 3, 16), T(2, 7, 3, 16)), flops=2 * F_CAUSAL,
            palm=2 * F_FULL, redone=products(BOTTOM_RIGHT, 16), moved=DENSE_BACKWARD_MOVED)
        for namespace in ("xformers_flash", "xformers_flash3")
    ),
)  # fmt: skip

# --- efficient kernels: mask types 1 and 2 are causal from the top left and the bottom right --------------------------

E_TOP_LEFT = products(TOP_LEFT, 16, 16)
EFFICIENT = (
    row("aten::_efficient_attention_forward", **heads_third(), custom_mask_type=1, gives=dense_result(),
        flops=E_TOP_LEFT, palm=F_FULL, moved=4 * (F_READ + Q + LSE)),
    row("aten::_efficient_attention_forward", label="bottom right", **heads_third(), custom_mask_type=2,
        gives=dense_result(), flops=F_CAUSAL, palm=F_FULL, moved=4 * (F_READ + Q + LSE)),
    row("aten::_efficient_attention_forward", label="window", **heads_third(5), custom_mask_type=1, window_size=2,
        gives=dense_result(), flops=products(WINDOW, 16, 16), palm=products(HEADS * 25, 16, 16),
        moved=4 * (Q + 2 * (2 * 3 * 5 * 16) + Q + LSE)),
    row("aten::_efficient_attention_forward", label="documents of used keys",
        **{name: tensor[None] for name, tensor in documents().items()}, cu_seqlens_q=ENDS_Q, cu_seqlens_k=ENDS_K,
        seqlen_k=torch.tensor([1, 5], dtype=I32), custom_mask_type=0, gives=(T(1, 8, 2, 16), T(2, 8)),
        flops=products(2 * (3 * 1 + 5 * 5), 16, 16), moved=4 * (P_READ + ENDS + 2 + P_Q + 16)),
    row("aten::_efficient_attention_backward", grad_out_=T(2, 5, 6, 16), **heads_third(), out=T(2, 5, 6, 16),
        max_seqlen_q=5, max_seqlen_k=7, logsumexp=lse(), philox_seed=T(0), philox_offset=T(0), custom_mask_type=1,
        gives=(T(2, 5, 6, 16), T(2, 7, 3, 16), T(2, 7, 3, 16), None), flops=2 * E_TOP_LEFT, palm=2 * F_FULL,
        redone=products(TOP_LEFT, 16), moved=DENSE_BACKWARD_MOVED),
    *(
        row(f"xformers::efficient_attention_forward_{kernel}", **heads_third(), custom_mask_type=mask_type,
            gives=dense_result(), flops=flops, palm=palm, moved=4 * (F_READ + Q + LSE))
        for kernel, mask_type, flops, palm in (("cutlass", 1, E_TOP_LEFT, F_FULL), ("ck", 2, F_CAUSAL, F_FULL),
                                               ("small_k", 0, F_FULL, None))
    ),
    row("xformers::efficient_attention_forward_small_k", label="without heads", query=T(2, 5, 16), key=T(2, 7, 16),
        value=T(2, 7, 16), gives=(T(2, 5, 16), T(2, 5)), flops=products(2 * 35, 16, 16),
        moved=4 * (2 * 5 * 16 + 2 * (2 * 7 * 16) + 2 * 5 * 16 + 10)),
    *(
        row(f"xformers::efficient_attention_backward_{kernel}", grad_out=T(2, 5, 6, 16), **heads_third(),
            custom_mask_type=mask_type, logsumexp=lse(), output=T(2, 5, 6, 16),
            gives=(T(2, 5, 6, 16), T(2, 7, 3, 16), T(2, 7, 3, 16), None), flops=2 * products(pairs, 16, 16),
            palm=2 * F_FULL if mask_type else None, redone=products(pairs, 16), moved=DENSE_BACKWARD_MOVED)
        for kernel, mask_type, pairs in (("cutlass", 1, TOP_LEFT), ("ck", 2, BOTTOM_RIGHT), ("small_k", 0, SQUARE))
    ),
)  # fmt: skip

# --- cuDNN: (B, H, S, D) or documents, its diagonal from the top left -------------------------------------------------

# 3 queries on 4 keys and 5 on 5: 6 and 15 pairs, 2 heads
C_PACKED = products(2 * (6 + 15), 16, 16)
CUDNN = (
    row("aten::_cudnn_attention_forward", query=q(), key=k(), value=v(), max_q=5, max_k=7, is_causal=True,
        gives=(T(2, 6, 5, 24), lse()), flops=CAUSAL, palm=FULL, moved=FORWARD_MOVED),
    row("aten::_cudnn_attention_forward", label="bias", query=q(), key=k(), value=v(), max_q=5, max_k=7,
        attn_bias=torch.zeros(5, 7).masked_fill(~LOWER, float("-inf")), gives=(T(2, 6, 5, 24), lse()), flops=CAUSAL,
        palm=FULL, masked=FULL - CAUSAL, moved=FORWARD_MOVED + 4 * 35),
    row("aten::_cudnn_attention_forward", label="documents", **documents(), cum_seq_q=ENDS_Q, cum_seq_k=ENDS_K,
        max_q=5, max_k=5, is_causal=True, gives=packed_result(), flops=C_PACKED, palm=products(PACKED, 16, 16),
        moved=4 * (P_READ + ENDS + P_Q + 16)),
    row("aten::_cudnn_attention_forward_no_dropout_inplace",
        schema="(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
        "SymInt max_q, SymInt max_k, bool is_causal=False) -> Tensor", out=T(8, 2, 16), **documents(),
        cum_seq_q=ENDS_Q, cum_seq_k=ENDS_K, max_q=5, max_k=5, is_causal=True, gives=T(2, 8), flops=C_PACKED,
        palm=products(PACKED, 16, 16), moved=4 * (P_READ + ENDS + P_Q + 16)),
    row("aten::_cudnn_attention_backward", grad_out=T(2, 6, 5, 24), query=q(), key=k(), value=v(),
        out=T(2, 6, 5, 24), logsumexp=lse(), **given("_cudnn"), max_q=5, max_k=7, is_causal=True,
        gives=(q(), k(), v()), flops=2 * CAUSAL, palm=2 * FULL, redone=products(TOP_LEFT, 16), moved=BACKWARD_MOVED),
)  # fmt: skip

# --- flex_attention, uncompiled: the full square runs -----------------------------------------------------------------


def causal_blocks() -> tuple[Any, ...]:
    """Causal over 16 positions in blocks of 8: two partial blocks on the diagonal, one full one below it."""
    partial, full = torch.ones(1, 1, 2, dtype=I32), torch.tensor([[[0, 1]]], dtype=I32)
    diagonal, below = torch.tensor([[[[0, 1], [1, 0]]]], dtype=I32), torch.zeros(1, 1, 2, 2, dtype=I32)
    lists = (partial, diagonal, full, below)
    return (16, 16, *lists, *(part.clone() for part in lists), 8, 8, lambda b, h, i, j: i >= j)


FLEX_PAIRS, FLEX_SQUARE = 2 * (16 * 17 // 2), 2 * 16 * 16
FLEX_LISTS = 2 * (2 + 4 + 2 + 4)  # numbers of 4 bytes
FLEX = (
    row("higher_order::flex_attention", query=T(1, 2, 16, 8), key=T(1, 2, 16, 8), value=T(1, 2, 16, 8),
        block_mask=causal_blocks(), gives=(T(1, 2, 16, 8), T(1, 2, 16)), flops=products(FLEX_PAIRS, 8, 8),
        palm=products(FLEX_SQUARE, 8, 8), masked=products(FLEX_SQUARE - FLEX_PAIRS, 8, 8),
        moved=4 * (3 * 256 + FLEX_LISTS + 256 + 32)),
    row("higher_order::flex_attention_backward", query=T(1, 2, 16, 8), key=T(1, 2, 16, 8), value=T(1, 2, 16, 8),
        out=T(1, 2, 16, 8), logsumexp=T(1, 2, 16), grad_out=T(1, 2, 16, 8), block_mask=causal_blocks(),
        gives=(T(1, 2, 16, 8), T(1, 2, 16, 8), T(1, 2, 16, 8)), flops=2 * products(FLEX_PAIRS, 8, 8),
        palm=2 * products(FLEX_SQUARE, 8, 8), masked=2 * products(FLEX_SQUARE - FLEX_PAIRS, 8, 8),
        redone=products(FLEX_SQUARE, 8), moved=4 * (5 * 256 + 32 + FLEX_LISTS + 3 * 256)),
)  # fmt: skip

# --- the fused inference layers: 2 sequences of 5 tokens, width 12 in 3 heads of 4, feed-forward 20 -------------------

PROJECTIONS = 2 * 10 * 12 * 36 + 2 * 10 * 12 * 12
L_FULL, L_CAUSAL = products(2 * 3 * 25, 4, 4), products(2 * 3 * 15, 4, 4)
FEED_FORWARD = 2 * (2 * 10 * 12 * 20)
HIDDEN = torch.ones(5, 5, dtype=torch.bool).triu(1)
"""Here True hides."""
LAYER_WEIGHTS = 36 * 12 + 36 + 12 * 12 + 12


def attention_layer() -> dict[str, Any]:
    return {
        "embed_dim": 12,
        "qkv_weight": T(36, 12),
        "qkv_bias": T(36),
        "proj_weight": T(12, 12),
        "proj_bias": T(12),
    }


def encoder_layer() -> dict[str, Any]:
    norms = {f"norm_{kind}_{i}": T(12) for kind in ("weight", "bias") for i in (1, 2)}
    feed_forward = {"ffn_weight_1": T(20, 12), "ffn_bias_1": T(20), "ffn_weight_2": T(12, 20), "ffn_bias_2": T(12)}
    return {**attention_layer(), "num_heads": 3, **norms, **feed_forward}


ENCODER_READ = 2 * 5 * 12 + LAYER_WEIGHTS + 4 * 12 + 20 * 12 + 20 + 12 * 20 + 12
LAYERS = (
    *(
        row(f"aten::{name}", query=T(2, 5, 12), key=T(2, 5, 12), value=T(2, 5, 12), num_head=3, **attention_layer(),
            gives=T(2, 5, 12), flops=PROJECTIONS + L_FULL, moved=4 * (3 * 120 + LAYER_WEIGHTS + 120))
        for name in ("_native_multi_head_attention", "_triton_multi_head_attention")
    ),
    row("aten::_native_multi_head_attention", label="mask", query=T(2, 5, 12), key=T(2, 5, 12), value=T(2, 5, 12),
        num_head=3, **attention_layer(), mask=HIDDEN, mask_type=0, gives=(T(2, 5, 12), T(2, 5, 5)),
        flops=PROJECTIONS + L_CAUSAL, palm=PROJECTIONS + L_FULL, masked=L_FULL - L_CAUSAL,
        moved=4 * (3 * 120 + LAYER_WEIGHTS + 120 + 50) + 25),
    row("aten::_transformer_encoder_layer_fwd", src=T(2, 5, 12), **encoder_layer(), gives=T(2, 5, 12),
        flops=PROJECTIONS + L_FULL + FEED_FORWARD, moved=4 * (ENCODER_READ + 120)),
    row("aten::_transformer_encoder_layer_fwd", label="padding: 2 of 5 keys hidden in one sequence",
        src=T(2, 5, 12), **encoder_layer(), mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]), mask_type=1,
        gives=T(2, 5, 12), flops=PROJECTIONS + products(3 * (25 + 15), 4, 4) + FEED_FORWARD,
        palm=PROJECTIONS + L_FULL + FEED_FORWARD, masked=products(3 * 10, 4, 4), moved=4 * (ENCODER_READ + 120) + 10),
)  # fmt: skip

ELEMENTWISE = tuple(
    row(f"fla::{name}", x=T(2, 5, 12), gives=T(2, 5, 12), flops=0, moved=4 * 240)
    for name in ("fused_k_rwkv7", "fused_addcmul_rwkv7", "gate_output_correction_rwkv7")
)

ROWS = (
    *HEADS_SECOND_FORWARDS,
    *WHOLE,
    *CUDA_FLASH,
    *HEADS_SECOND_BACKWARDS,
    *FLASH,
    *OTHER_FORWARDS,
    *OTHER_BACKWARDS,
    *EFFICIENT,
    *CUDNN,
    *FLEX,
    *LAYERS,
    *ELEMENTWISE,
)
