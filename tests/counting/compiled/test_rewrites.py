"""What the compiler makes of products, on the text of graphs as it writes them: padded, decomposed, wrapped, unread."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from mfu_monitor.counting.compiled.graph import TensorSpec, parse_graph
from mfu_monitor.counting.compiled.products import CompiledProduct, CompiledRun, count_graph
from mfu_monitor.counting.compiled.watch import guards_notice_modes
from mfu_monitor.counting.counter import FlopCounter


def products(
    arguments: str, *lines: str, is_backward: bool = False, origins: frozenset[str] | None = frozenset()
) -> list[CompiledProduct]:
    """Count a graph from the lines of its body; ``origins`` are what its fused kernels were made of."""
    run = _run(arguments, lines, is_backward=is_backward, origins=origins)
    assert run.unsupported == []
    assert run.notes == []
    return run.products


def _run(
    arguments: str, lines: Sequence[str], *, is_backward: bool = False, origins: frozenset[str] | None = frozenset()
) -> CompiledRun:
    body = textwrap.indent("\n".join(lines), " " * 8)
    text = f"class GraphModule(torch.nn.Module):\n    def forward(self, {arguments}):\n{body}\n"
    graph = replace(parse_graph(text), origins=origins)
    inputs = [spec.meta({}) for spec in graph.placeholders.values() if isinstance(spec, TensorSpec)]
    return count_graph(graph, inputs, is_backward=is_backward, known_scores={})


# --- padding ---------------------------------------------------------------------------------------------------------

PADDED = (
    'pad: "f32[8, 16][16, 1]cuda:0" = torch.ops.aten.constant_pad_nd.default(a, [0, 3, 0, 1])',
    'pad_1: "f32[16, 24][24, 1]cuda:0" = torch.ops.aten.constant_pad_nd.default(b, [0, 5, 0, 3])',
    'mm: "f32[8, 24][24, 1]cuda:0" = torch.ops.aten.mm.default(pad, pad_1)',
    'slice_1: "f32[7, 24][24, 1]cuda:0" = torch.ops.aten.slice.Tensor(mm, 0, 0, -1)',
    'slice_2: "f32[7, 19][24, 1]cuda:0" = torch.ops.aten.slice.Tensor(slice_1, 1, 0, -5)',
)
OPERANDS = 'a: "f32[7, 13][13, 1]cuda:0", b: "f32[13, 19][19, 1]cuda:0"'


def test_the_compilers_padding_is_executed_and_no_models() -> None:
    (product,) = products(OPERANDS, *PADDED, "return (slice_2,)")
    assert product.cost.flops == 2 * 7 * 13 * 19
    assert product.cost.masked_flops == 2 * 8 * 16 * 24 - 2 * 7 * 13 * 19


def test_padding_of_the_summed_dimension_alone_needs_no_slice() -> None:
    (product,) = products(
        'a: "f32[8, 13][13, 1]cuda:0", b: "f32[24, 13][13, 1]cuda:0"',
        'pad: "f32[8, 16][16, 1]cuda:0" = torch.ops.aten.constant_pad_nd.default(a, [0, 3, 0, 0])',
        'pad_1: "f32[24, 16][16, 1]cuda:0" = torch.ops.aten.constant_pad_nd.default(b, [0, 3, 0, 0])',
        'permute: "f32[16, 24][1, 16]cuda:0" = torch.ops.aten.permute.default(pad_1, [1, 0])',
        'mm: "f32[8, 24][24, 1]cuda:0" = torch.ops.aten.mm.default(pad, permute)',
        "return (mm,)",
    )
    assert product.cost.flops == 2 * 8 * 13 * 24
    assert product.cost.masked_flops == 2 * 8 * 3 * 24


def test_batched_products_are_padded_the_same_way() -> None:
    (product,) = products(
        'a: "f32[4, 7, 16][112, 16, 1]cuda:0", b: "f32[4, 16, 8][128, 8, 1]cuda:0"',
        'pad: "f32[4, 8, 16][128, 16, 1]cuda:0" = torch.ops.aten.constant_pad_nd.default(a, [0, 0, 0, 1, 0, 0])',
        'bmm: "f32[4, 8, 8][64, 8, 1]cuda:0" = torch.ops.aten.bmm.default(pad, b)',
        'slice_1: "f32[4, 7, 8][64, 8, 1]cuda:0" = torch.ops.aten.slice.Tensor(bmm, 1, 0, -1)',
        "return (slice_1,)",
    )
    assert product.cost.flops == 2 * 4 * 7 * 16 * 8
    assert product.cost.masked_flops == 2 * 4 * 1 * 16 * 8


@pytest.mark.parametrize("padding", ["[0, 0, 0, 1]", "[0, 0, 1, 0]", "[0, 0, 0, 1], 1.0"])
def test_padding_that_the_user_wrote_counts_as_in_eager(padding: str) -> None:
    """It stays in the result, comes first, or is no zero."""
    (product,) = products(
        'a: "f32[7, 16][16, 1]cuda:0", b: "f32[16, 24][24, 1]cuda:0"',
        f'pad: "f32[8, 16][16, 1]cuda:0" = torch.ops.aten.constant_pad_nd.default(a, {padding})',
        'mm: "f32[8, 24][24, 1]cuda:0" = torch.ops.aten.mm.default(pad, b)',
        "return (mm,)",
    )
    assert product.cost.flops == 2 * 8 * 16 * 24
    assert product.cost.masked_flops == 0


# --- products run as elementwise code --------------------------------------------------------------------------------


def test_a_product_over_one_element_is_a_product_though_it_runs_as_a_multiplication() -> None:
    """The input gradient of a layer with one output: (16, 1) x (1, 32)."""
    (product,) = products(
        'tangents_1: "f32[16, 1][1, 1]cpu", primals_1: "f32[1, 32][32, 1]cpu"',
        "# File: linear.py:130 in forward, code: return F.linear(input, self.weight, self.bias)",
        'permute: "f32[32, 1][1, 32]cpu" = torch.ops.aten.permute.default(primals_1, [1, 0])',
        'permute_1: "f32[1, 32][32, 1]cpu" = torch.ops.aten.permute.default(permute, [1, 0])',
        'mul: "f32[16, 32][32, 1]cpu" = torch.ops.aten.mul.Tensor(tangents_1, permute_1)',
        "return (mul,)",
        is_backward=True,
        origins=frozenset({"mm", "t"}),
    )
    assert (product.op, product.cost.flops) == ("aten::mm", 2 * 16 * 1 * 32)
    assert not product.is_recomputed


def test_a_batched_product_over_one_element_is_one_through_a_cast() -> None:
    (product,) = products(
        'a: "bf16[4, 1, 6][6, 6, 1]cpu", b: "bf16[4, 1, 5][5, 5, 1]cpu"',
        "# File: x.py:1 in f, code: a.mT @ b",
        'permute: "bf16[4, 6, 1][6, 1, 6]cpu" = torch.ops.aten.permute.default(a, [0, 2, 1])',
        'cast: "f32[4, 6, 1][6, 1, 1]cpu" = torch.ops.prims.convert_element_type.default(permute, torch.float32)',
        'cast_1: "f32[4, 1, 5][5, 5, 1]cpu" = torch.ops.prims.convert_element_type.default(b, torch.float32)',
        'mul: "f32[4, 6, 5][30, 5, 1]cpu" = torch.ops.aten.mul.Tensor(cast, cast_1)',
        "return (mul,)",
        origins=frozenset({"bmm"}),
    )
    assert (product.op, product.cost.flops) == ("aten::bmm", 2 * 4 * 6 * 1 * 5)


def test_matrix_times_vector_is_a_product_as_a_sum_of_multiplications() -> None:
    (product,) = products(
        'a: "f32[6, 7][7, 1]cuda:0", b: "f32[7, 1][1, 1]cuda:0"',
        "# File: x.py:1 in f, code: a @ b",
        'unsqueeze: "f32[6, 7, 1][7, 1, 1]cuda:0" = torch.ops.aten.unsqueeze.default(a, 2)',
        'unsqueeze_1: "f32[1, 7, 1][7, 1, 1]cuda:0" = torch.ops.aten.unsqueeze.default(b, 0)',
        'mul: "f32[6, 7, 1][7, 1, 1]cuda:0" = torch.ops.aten.mul.Tensor(unsqueeze, unsqueeze_1)',
        'sum_1: "f32[6, 1][1, 1]cuda:0" = torch.ops.aten.sum.dim_IntList(mul, [1])',
        "return (sum_1,)",
        origins=frozenset({"mm"}),
    )
    assert product.cost.flops == 2 * 6 * 7 * 1


@pytest.mark.parametrize(
    "line",
    [
        'mul: "f32[16, 32][32, 1]cpu" = torch.ops.aten.mul.Tensor(a, b)',  # broadcast as the user wrote it
        'mul: "f32[16, 32][32, 1]cpu" = torch.ops.aten.mul.Tensor(c, d)',
        'mul: "f32[16, 32][32, 1]cpu" = torch.ops.aten.mul.Tensor(c, 2.0)',
    ],
)
def test_multiplications_that_the_user_wrote_are_none(line: str) -> None:
    found = products(
        'a: "f32[16, 1][1, 1]cpu", b: "f32[1, 32][32, 1]cpu", c: "f32[16, 32][32, 1]cpu", d: "f32[16, 32][32, 1]cpu"',
        "# File: x.py:1 in f, code: a * b",
        line,
        "return (mul,)",
        origins=frozenset({"mul", "mm"}),
    )
    assert found == []


OUTER = ('mul: "f32[16, 32][32, 1]cpu" = torch.ops.aten.mul.Tensor(a, b)', "return (mul,)")
OUTER_OPERANDS = 'a: "f32[16, 1][1, 1]cpu", b: "f32[1, 32][32, 1]cpu"'


@pytest.mark.parametrize(
    ("origins", "code"),
    [
        (None, "a @ b"),  # kernels without names: nothing vouches for the line
        (frozenset({"mm", "mul"}), "y = block(a, b)"),
        (frozenset({"mm", "mul"}), "y = (a * 2) @ b"),
    ],
)
def test_what_cannot_be_told_from_a_multiplication_is_left_out_and_said(
    origins: frozenset[str] | None, code: str
) -> None:
    run = _run(OUTER_OPERANDS, (f"# File: x.py:1 in f, code: {code}", *OUTER), origins=origins)
    assert run.products == []
    assert any("cannot be told" in note for note in run.notes)


SWAPPED = (
    'permute: "f32[4, 6, 1][6, 1, 6]cpu" = torch.ops.aten.permute.default(a, [0, 2, 1])',
    'mul: "f32[4, 6, 5][30, 5, 1]cpu" = torch.ops.aten.mul.Tensor(permute, b)',
    "return (mul,)",
)


@pytest.mark.parametrize(
    ("code", "flops"),
    [
        ("y = torch.bmm(x, w) * s", [2 * 4 * 6 * 1 * 5]),  # the gradient of the product transposes x
        ("y = k.transpose(1, 2) * v + torch.bmm(x, w)", []),  # the user did
    ],
)
def test_a_line_with_a_product_and_a_multiplication_is_told_by_who_transposes(code: str, flops: list[int]) -> None:
    operands = 'a: "f32[4, 1, 6][6, 6, 1]cpu", b: "f32[4, 1, 5][5, 5, 1]cpu"'
    run = _run(operands, (f"# File: x.py:1 in f, code: {code}", *SWAPPED), origins=frozenset({"bmm", "mul"}))
    assert [product.cost.flops for product in run.products] == flops
    assert bool(run.notes) is not bool(flops)


def test_a_kernel_made_of_a_vector_product_that_the_graph_does_not_show_is_said() -> None:
    run = _run(OUTER_OPERANDS, OUTER, origins=frozenset({"dot", "relu"}))
    assert run.products == []
    assert any("does not show" in note for note in run.notes)


VECTORS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "W @ v": (lambda W, v, X, Y: (W @ v).relu(), 2 * 24 * 24),
    "addmv": (lambda W, v, X, Y: torch.addmv(v, W, v).relu(), 2 * 24 * 24),
    "dot": (lambda W, v, X, Y: torch.dot(v, v + 1).relu(), 2 * 24),
    "dot with itself": (lambda W, v, X, Y: torch.dot(v, v).relu(), 2 * 24),
    "vdot": (lambda W, v, X, Y: torch.vdot(v, v + 1).relu(), 2 * 24),
    "addr": (lambda W, v, X, Y: torch.addr(W, v, v).relu(), 2 * 24 * 24),
    "row by column": (lambda W, v, X, Y: torch.bmm(X[:, None], Y[:, :, None]).relu(), 2 * 8 * 24),
    "written sum": (lambda W, v, X, Y: (X.squeeze(1) * Y.squeeze(1)).sum(1).relu(), 0),
    "written matrix times vector": (lambda W, v, X, Y: (W * v).sum(1).relu(), 0),
    "written dot": (lambda W, v, X, Y: (v * (v + 1)).sum().relu(), 0),
    "written transpose": (lambda W, v, X, Y: (X[:, None].transpose(1, 2) * Y[:, None]).relu(), 0),
    "rotary angles": (lambda W, v, X, Y: torch.einsum("i,j->ij", X[0], Y[0]).cos(), 0),
}


@pytest.mark.skipif(guards_notice_modes(), reason="before torch 2.10 counted steps of compiled code run in eager")
@pytest.mark.parametrize("name", sorted(VECTORS))
def test_products_of_vectors_count_compiled_and_multiplications_do_not(name: str) -> None:
    function, flops = VECTORS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function)
    arguments = torch.randn(24, 24), torch.randn(24), torch.randn(8, 24), torch.randn(8, 24)
    # The compiler's cache gives the graph of `torch.dot` for a written sum of products: the two have one key.
    with torch._inductor.config.patch(force_disable_caches=True), FlopCounter() as counter:
        compiled(*arguments)
    torch._dynamo.reset()
    assert counter.record.model_flops == flops
    assert counter.record.notes == ()


class TopKAttention(torch.nn.Module):
    """Its mask is made of a product in the graph: nobody knows its contents before it ran."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2)
        mask = scores >= scores.topk(4, -1).values[..., -1:]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.skipif(guards_notice_modes(), reason="before torch 2.10 counted steps of compiled code run in eager")
def test_attention_whose_mask_cannot_be_read_is_a_lower_bound_that_says_so() -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    compiled = torch.compile(TopKAttention())
    with FlopCounter() as counter:
        compiled(q, k, v)
    torch._dynamo.reset()
    product = 2 * 2 * 4 * 16 * 16 * 8
    assert counter.record.hardware_flops == 3 * product  # the scores, Q K^T and P V
    assert counter.record.model_flops <= product + 2 * product * 4 // 16  # four keys of sixteen attend
    assert counter.record.is_lower_bound
    assert any("cannot be read" in note for note in counter.record.notes)


@pytest.mark.skipif(guards_notice_modes(), reason="before torch 2.10 counted steps of compiled code run in eager")
@pytest.mark.parametrize(("rows", "I", "O"), [(1, 8, 8), (1, 32, 48), (1, 16, 1), (5, 1, 3), (6, 7, 1), (1, 1, 1)])
def test_layers_with_a_side_of_one_count_compiled_as_in_eager(rows: int, I: int, O: int) -> None:  # noqa: E741
    torch._dynamo.reset()
    layer = torch.nn.Linear(I, O)
    x = torch.randn(rows, I, requires_grad=True)
    run = torch.compile(layer)
    with FlopCounter(layer) as counter:
        run(x).square().sum().backward()
    torch._dynamo.reset()
    assert counter.record.model_flops == 3 * 2 * rows * I * O


# --- wrapped and unread ----------------------------------------------------------------------------------------------

QKV = ", ".join(f'{name}: "f32[2, 4, 8, 16][512, 128, 16, 1]cpu"' for name in ("q", "k", "v"))
PAIRS = 8 * 9 // 2
PRODUCT = 2 * 2 * 4 * PAIRS * 16


SDPA = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize(
    "call",
    [
        f"run_and_save_rng_state({SDPA}, q, k, v, 0.0, True)",
        f"run_with_rng_state(r, {SDPA}, q, k, v, 0.0, True)",
        f"graphsafe_run_with_rng_state({SDPA}, q, k, v, 0.0, True, rng_state = r)",
    ],
)
def test_attention_whose_random_state_is_kept_for_recomputation_counts(call: str) -> None:
    (product,) = products(
        f'{QKV}, r: "u8[16][1]cpu"', f"kept = torch.ops.higher_order.{call}", "taken = kept[0]", "return (taken,)"
    )
    assert product.cost.flops == 2 * PRODUCT


@pytest.mark.parametrize(
    ("read", "wanted"), [((0, 1, 2), 4), ((0, 2), 3), ((1, 2), 3), ((0, 1), 3), ((2,), 1), ((0,), 2)]
)
def test_gradients_of_attention_that_nobody_reads_are_no_models(read: tuple[int, ...], wanted: int) -> None:
    """dQ and dK need dP = dO V^T each or together, dV is alone; the kernel makes all and Q K^T once more."""
    op = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    shape = "f32[2, 4, 8, 16][512, 128, 16, 1]cpu"
    (product,) = products(
        f'tangents_1: "{shape}", {QKV}, o: "{shape}", l: "f32[2, 4, 8][32, 8, 1]cpu"',
        f"back = {op}(tangents_1, q, k, v, o, l, 0.0, True)",
        *(f'g{i}: "{shape}" = back[{i}]' for i in read),
        f"return ({', '.join(f'g{i}' for i in read)},)",
        is_backward=True,
    )
    assert product.cost.flops == wanted * PRODUCT
    assert product.cost.flops + product.cost.masked_flops == 4 * PRODUCT
    assert product.cost.kernel_recompute_flops == PRODUCT
