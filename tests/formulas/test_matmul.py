"""Matrix products: every expected value is 2 * (multiply-adds), written out from the shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfu_monitor.errors import MFUMonitorError
from mfu_monitor.formulas.cost import OperatorCall
from mfu_monitor.formulas.matmul import (
    contraction_flops,
    grouped_matmul_flops,
    matmul_flops,
    sparse_matmul_flops,
    trilinear_flops,
)
from mfu_monitor.formulas.registry import bind_call, find_formula

FlopsOf = Callable[[Callable[[], Any]], int]


def empty(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, device=device, dtype=dtype)


DENSE: list[tuple[str, Callable[[str], Any], int]] = [
    ("mm", lambda d: torch.mm(empty(3, 5, device=d), empty(5, 7, device=d)), 2 * 3 * 5 * 7),
    ("mm out=", lambda d: torch.mm(empty(3, 5, device=d), empty(5, 7, device=d), out=empty(3, 7, device=d)), 210),
    ("addmm", lambda d: torch.addmm(empty(7, device=d), empty(3, 5, device=d), empty(5, 7, device=d)), 210),
    ("addmm_", lambda d: empty(3, 7, device=d).addmm_(empty(3, 5, device=d), empty(5, 7, device=d)), 210),
    (
        "addmm_activation",
        lambda d: torch._addmm_activation(empty(7, device=d), empty(3, 5, device=d), empty(5, 7, device=d)),
        210,
    ),
    ("bmm", lambda d: torch.bmm(empty(4, 3, 5, device=d), empty(4, 5, 7, device=d)), 4 * 210),
    (
        "baddbmm",
        lambda d: torch.baddbmm(empty(4, 3, 7, device=d), empty(4, 3, 5, device=d), empty(4, 5, 7, device=d)),
        840,
    ),
    (
        "baddbmm_",
        lambda d: empty(4, 3, 7, device=d).baddbmm_(empty(4, 3, 5, device=d), empty(4, 5, 7, device=d)),
        840,
    ),
    ("addbmm", lambda d: torch.addbmm(empty(3, 7, device=d), empty(4, 3, 5, device=d), empty(4, 5, 7, device=d)), 840),
    ("mv", lambda d: torch.mv(empty(3, 5, device=d), empty(5, device=d)), 2 * 3 * 5),
    ("addmv", lambda d: torch.addmv(empty(3, device=d), empty(3, 5, device=d), empty(5, device=d)), 30),
    ("dot", lambda d: torch.dot(empty(5, device=d), empty(5, device=d)), 2 * 5),
    ("vdot", lambda d: torch.vdot(empty(5, device=d), empty(5, device=d)), 10),
    ("addr", lambda d: torch.addr(empty(3, 5, device=d), empty(3, device=d), empty(5, device=d)), 2 * 3 * 5),
    (
        "linear, batched input",
        lambda d: torch.nn.functional.linear(empty(2, 3, 5, device=d), empty(7, 5, device=d)),
        420,
    ),
    ("matmul 1d x 1d", lambda d: torch.matmul(empty(5, device=d), empty(5, device=d)), 10),
    ("matmul 1d x 2d", lambda d: torch.matmul(empty(5, device=d), empty(5, 7, device=d)), 2 * 5 * 7),
    ("matmul 2d x 1d", lambda d: torch.matmul(empty(3, 5, device=d), empty(5, device=d)), 30),
    ("matmul 4d x 3d", lambda d: torch.matmul(empty(2, 4, 3, 5, device=d), empty(4, 5, 7, device=d)), 2 * 840),
    ("matmul broadcast", lambda d: torch.matmul(empty(2, 1, 3, 5, device=d), empty(4, 5, 7, device=d)), 2 * 840),
    ("chain_matmul", lambda d: torch.linalg.multi_dot([empty(2, 3, device=d), empty(3, 4, device=d)]), 2 * 2 * 3 * 4),
    ("einsum", lambda d: torch.einsum("bij,bjk->bik", empty(4, 3, 5, device=d), empty(4, 5, 7, device=d)), 840),
    (
        "tensordot",
        lambda d: torch.tensordot(empty(2, 3, 5, device=d), empty(3, 5, 7, device=d), dims=2),
        2 * 2 * 15 * 7,
    ),
    ("outer is elementwise", lambda d: torch.outer(empty(3, device=d), empty(5, device=d)), 0),
    ("inner", lambda d: torch.inner(empty(3, 5, device=d), empty(7, 5, device=d)), 210),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("run", "expected"), [case[1:] for case in DENSE], ids=[case[0] for case in DENSE])
def test_a_product_costs_two_flops_a_multiply_add(
    run: Callable[[str], Any], expected: int, device: str, flops_of: FlopsOf
) -> None:
    assert flops_of(lambda: run(device)) == expected


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_foreach_mm"), reason="this torch has no _foreach_mm")
def test_a_list_of_products_costs_what_each_costs(flops_of: FlopsOf) -> None:
    assert flops_of(lambda: torch.ops.aten._foreach_mm([empty(3, 5)] * 2, [empty(5, 7)] * 2)) == 2 * (2 * 3 * 5 * 7)


@pytest.mark.parametrize(
    "run",
    [
        lambda z: torch.mm(z(3, 5), z(5, 7)),
        lambda z: torch.addmm(z(7), z(3, 5), z(5, 7)),
        lambda z: torch.bmm(z(1, 3, 5), z(1, 5, 7)),
        lambda z: torch.matmul(z(3, 5), z(5, 7)),
        lambda z: torch.nn.functional.linear(z(3, 5), z(7, 5)),
    ],
)
def test_complex_products_cost_four_times_the_real_ones(run: Callable[..., Any], flops_of: FlopsOf) -> None:
    # (a + ib)(c + id): four real multiply-adds
    assert flops_of(lambda: run(lambda *shape: empty(*shape, dtype=torch.complex64))) == 4 * 2 * 3 * 5 * 7


def test_linear_backward_is_two_products_of_the_forward_s_size(flops_of: FlopsOf) -> None:
    linear, x = torch.nn.Linear(5, 7), torch.zeros(3, 5, requires_grad=True)
    assert flops_of(lambda: linear(x).sum().backward()) == 3 * (2 * 3 * 5 * 7)


def test_a_leaf_without_gradient_saves_its_product(flops_of: FlopsOf) -> None:
    linear, x = torch.nn.Linear(5, 7), torch.zeros(3, 5)
    assert flops_of(lambda: linear(x).sum().backward()) == 2 * (2 * 3 * 5 * 7)


@pytest.mark.parametrize("rows", [1, 3])
def test_inference_mode_dispatches_linear_whole_and_costs_the_same(rows: int, flops_of: FlopsOf) -> None:
    linear = torch.nn.Linear(100, 100)
    with torch.inference_mode():
        assert flops_of(lambda: linear(torch.zeros(rows, 100))) == rows * 20_000


# --- bilinear ---------------------------------------------------------------------------------------------------------


def test_bilinear_is_one_contraction_with_each_input(flops_of: FlopsOf) -> None:
    B, I, J, O = 7, 3, 4, 5  # noqa: E741
    bilinear = torch.nn.Bilinear(I, J, O, bias=False)
    forward = 2 * B * O * I * J + 2 * B * O * J
    assert flops_of(lambda: bilinear(torch.zeros(B, I), torch.zeros(B, J))) == forward


def test_trilinear_that_sums_over_nothing_is_elementwise() -> None:
    assert trilinear_flops((2, 3, 4), expand1=(), expand2=(), expand3=(), sumdim=()) == 0


# --- low precision ----------------------------------------------------------------------------------------------------


def cost_of(func: Any, *args: Any, output: Any, **kwargs: Any) -> Any:
    """The cost of a call whose kernel this machine may not have."""
    call = bind_call(func, args, kwargs, output)
    found = find_formula(call.name)
    assert found is not None
    return found(call)


def test_int8_product_names_its_precision() -> None:
    a, b = empty(17, 16, dtype=torch.int8), empty(16, 24, dtype=torch.int8)
    cost = cost_of(torch.ops.aten._int_mm.default, a, b, output=empty(17, 24, dtype=torch.int32))
    assert (cost.flops, cost.precision) == (2 * 17 * 16 * 24, "int8")


def test_scaled_mm_counts_fp8_operands_by_their_shapes() -> None:
    a, b = (empty(*s, dtype=torch.float8_e4m3fn) for s in ((48, 80), (80, 112)))
    one = torch.ones(())
    cost = cost_of(torch.ops.aten._scaled_mm.default, a, b, one, one, output=empty(48, 112))
    assert (cost.flops, cost.precision) == (860_160, None)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no packed fp4")
def test_packed_fp4_has_two_values_an_element_along_k() -> None:
    a = torch.empty(48, 40, dtype=torch.float4_e2m1fn_x2, device="meta")
    b = torch.empty(40, 112, dtype=torch.float4_e2m1fn_x2, device="meta")
    one = torch.ones(())
    cost = cost_of(torch.ops.aten._scaled_mm.default, a, b, one, one, output=empty(48, 112))
    assert (cost.flops, cost.precision) == (2 * 48 * 80 * 112, "fp4")


@pytest.mark.parametrize(
    ("left", "right", "used", "expected"),
    [
        ((512, 64), (4, 64, 128), None, 8_388_608),  # rows split among experts: 2*512*64*128
        ((512, 64), (4, 64, 128), 500, 2 * 500 * 64 * 128),  # the last 12 rows belong to no expert
        ((4, 16, 64), (64, 512), None, 2 * 16 * 64 * 512),  # columns split
        ((4, 16, 64), (64, 512), 480, 2 * 16 * 64 * 480),
        ((16, 512), (512, 32), None, 2 * 16 * 512 * 32),  # K split: the weights' gradients
        ((16, 512), (512, 32), 448, 2 * 16 * 448 * 32),
        ((4, 16, 64), (4, 64, 32), None, 4 * 2 * 16 * 64 * 32),  # an ordinary batch
    ],
)
def test_groups_share_the_split_dimension_and_add_nothing(
    left: tuple[int, ...], right: tuple[int, ...], used: int | None, expected: int
) -> None:
    assert grouped_matmul_flops(left, right, used=used) == expected


def test_grouped_mm_forward_and_backward(flops_of: FlopsOf) -> None:
    x = torch.zeros(512, 64, dtype=torch.bfloat16, requires_grad=True)
    w = torch.zeros(4, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([100, 200, 300, 512], dtype=torch.int32)
    grad = torch.ones(512, 128, dtype=torch.bfloat16)
    assert flops_of(lambda: torch._grouped_mm(x, w, offs=offs).backward(grad)) == 3 * 8_388_608


def test_grouped_mm_leaves_out_rows_beyond_the_last_group(flops_of: FlopsOf) -> None:
    x, w = torch.zeros(512, 64, dtype=torch.bfloat16), torch.zeros(4, 64, 128, dtype=torch.bfloat16)
    offs = torch.tensor([100, 200, 300, 400], dtype=torch.int32)
    assert flops_of(lambda: torch._grouped_mm(x, w, offs=offs)) == 2 * 400 * 64 * 128


def test_grouped_mm_on_meta_counts_every_row() -> None:
    x, w = (torch.zeros(*s, dtype=torch.bfloat16, device="meta") for s in ((512, 64), (4, 64, 128)))
    offs = torch.zeros(4, dtype=torch.int32, device="meta")
    assert cost_of(torch.ops.aten._grouped_mm.default, x, w, offs, output=empty(512, 128)).flops == 8_388_608


def price_by_name(name: str, arguments: dict[str, Any], output: Any) -> int:
    """The FLOPs of an operator of a library that need not be installed."""
    found = find_formula(name)
    assert found is not None
    return found(OperatorCall(name, arguments, output)).flops


def test_transformers_loop_over_experts_counts_as_the_grouped_product() -> None:
    arguments = {
        "input": empty(512, 64),
        "weight": empty(4, 64, 128),
        "offs": torch.tensor([100, 200, 300, 512]),
        "grad_output": empty(512, 128),
    }
    assert price_by_name("transformers::grouped_mm_fallback", arguments, empty(512, 128)) == 8_388_608
    assert price_by_name("transformers::grouped_mm_fallback_backward", arguments, None) == 2 * 8_388_608


def test_products_fused_with_collectives_count_this_rank_s_share() -> None:
    # four ranks: 8 rows here, 32 gathered; the weight's columns are this rank's own
    gathered = {"A": empty(8, 64), "Bs": [empty(64, 16), empty(64, 24)]}
    results = (None, [empty(32, 16), empty(32, 24)])
    assert price_by_name("symm_mem::fused_all_gather_matmul", gathered, results) == 2 * 32 * 64 * (16 + 24)
    scattered = {"A": empty(32, 16), "B": empty(16, 64)}
    assert price_by_name("symm_mem::fused_matmul_reduce_scatter", scattered, empty(8, 64)) == 2 * 32 * 16 * 64


def test_bitsandbytes_kernels_count_their_logical_shape() -> None:
    packed = {"A": empty(3, 64), "B": torch.zeros(64 * 128 // 2, 1, dtype=torch.uint8), "out": empty(3, 128)}
    assert price_by_name("bitsandbytes::gemm_4bit", packed, ()) == 2 * 3 * 64 * 128


# --- sparse -----------------------------------------------------------------------------------------------------------

DIAGONAL = torch.eye(6)  # six stored values


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_times_dense_costs_its_stored_values(layout: str, flops_of: FlopsOf) -> None:
    sparse = DIAGONAL.to_sparse() if layout == "coo" else DIAGONAL.to_sparse_csr()
    assert flops_of(lambda: sparse @ torch.zeros(6, 5)) == 2 * 6 * 5


def test_blocks_of_bsr_are_stored_whole(flops_of: FlopsOf) -> None:
    sparse = DIAGONAL.to_sparse_bsr((2, 2))  # three diagonal blocks of four values
    assert sparse_matmul_flops(12, 5) == 2 * 12 * 5
    call = bind_call(torch.ops.aten.mm.default, (sparse, torch.zeros(6, 5)), {}, torch.zeros(6, 5))
    found = find_formula("aten::mm")
    assert found is not None
    assert found(call).flops == 2 * 12 * 5


def test_a_product_of_two_sparse_matrices_is_refused_and_not_guessed() -> None:
    call = bind_call(torch.ops.aten.mm.default, (DIAGONAL.to_sparse(), DIAGONAL.to_sparse()), {}, None)
    found = find_formula("aten::mm")
    assert found is not None
    with pytest.raises(MFUMonitorError, match="depend on where their entries meet"):
        found(call)


def test_semi_structured_products_cost_the_kept_half() -> None:
    # W (O=32, I=64) keeps 32 of 64 values a row; 10 rows of input
    kept = empty(32, 32, dtype=torch.float16)
    x, out = empty(10, 64, dtype=torch.float16), empty(10, 32, dtype=torch.float16)
    cost = cost_of(torch.ops.aten._sparse_semi_structured_linear.default, x, kept, kept, output=out)
    assert cost.flops == 2 * 10 * 32 * 64 // 2


# --- distances --------------------------------------------------------------------------------------------------------


def test_cdist_by_products_costs_the_product_with_its_two_norm_columns(flops_of: FlopsOf) -> None:
    assert flops_of(lambda: torch.cdist(torch.zeros(30, 4), torch.zeros(40, 4))) == 2 * 30 * 40 * (4 + 2)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_cdist_without_products_costs_nothing(p: float, flops_of: FlopsOf) -> None:
    mode = "donot_use_mm_for_euclid_dist"
    assert flops_of(lambda: torch.cdist(torch.zeros(30, 4), torch.zeros(40, 4), p=p, compute_mode=mode)) == 0


def test_affine_grid_is_a_small_product_forward_and_backward(flops_of: FlopsOf) -> None:
    theta = torch.zeros(2, 2, 3, requires_grad=True)
    grid = 2 * (2 * 4 * 5) * 2 * 3  # 40 points, 2 coordinates, 3 homogeneous terms

    def run() -> None:
        torch.nn.functional.affine_grid(theta, [2, 3, 4, 5], align_corners=False).sum().backward()

    assert flops_of(run) == 2 * grid


# --- properties -------------------------------------------------------------------------------------------------------

SMALL = st.integers(min_value=0, max_value=6)


@given(m=SMALL, k=SMALL, n=SMALL, batch=SMALL)
def test_matmul_flops_equal_a_counted_triple_loop(m: int, k: int, n: int, batch: int) -> None:
    counted = sum(2 for _ in range(batch) for _ in range(m) for _ in range(n) for _ in range(k))
    assert matmul_flops(m, k, n, batch=batch) == contraction_flops(batch * m * n, k) == counted


@st.composite
def einsum_cases(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]], dict[str, int]]:
    """Two operands, each letter in one or both, a subset of all letters in the result."""
    sizes = {letter: draw(st.integers(2, 4)) for letter in "abcde"}
    left = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
    right = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
    shared = [letter for letter in left if letter in right]
    # letters of one operand alone stay, so that no sum runs before the product
    kept = [letter for letter in dict.fromkeys([*left, *right]) if letter not in shared or draw(st.booleans())]
    equation = f"{''.join(left)},{''.join(right)}->{''.join(kept)}"
    return equation, [tuple(sizes[x] for x in left), tuple(sizes[x] for x in right)], sizes


@settings(max_examples=100, deadline=None)
@given(case=einsum_cases())
def test_einsum_equals_a_nested_loop_over_all_its_letters(
    case: tuple[str, list[tuple[int, ...]], dict[str, int]], flops_of: FlopsOf
) -> None:
    equation, shapes, sizes = case
    operands, kept = equation.split("->")
    letters = set(operands) - {","}
    multiply_adds = sum(1 for _ in itertools.product(*(range(sizes[letter]) for letter in letters)))
    is_summed = bool(letters - set(kept))  # nothing summed: an elementwise product, which counts 0
    counted = flops_of(lambda: torch.einsum(equation, *[torch.zeros(shape) for shape in shapes]))
    assert counted == (2 * multiply_adds if is_summed else 0)


def test_a_scaled_product_that_is_added_counts_as_the_product() -> None:
    arguments = {"self": empty(8, 32), "mat1": empty(8, 64).to(torch.float8_e4m3fn), "mat2": empty(64, 32)}
    assert price_by_name("aten::_scaled_addmm", arguments, empty(8, 32)) == 2 * 8 * 64 * 32
