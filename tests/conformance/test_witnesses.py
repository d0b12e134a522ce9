"""Witnesses that share nothing with the counter: loops that do the arithmetic, fvcore's tracer, profiler events."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import FlopTotals, StepRecord

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True.*")

# --- einsum against nested loops --------------------------------------------------------------------------------------

Array = dict[tuple[int, ...], float]
"""Values by index."""


def as_array(tensor: torch.Tensor) -> Array:
    indices = itertools.product(*map(range, tensor.shape))
    return dict(zip(indices, tensor.flatten().tolist(), strict=True))


def contract_pair(
    left: tuple[str, Array], right: tuple[str, Array], kept: set[str], sizes: Mapping[str, int]
) -> tuple[tuple[str, Array], int]:
    """One step of an einsum as nested loops: its result and the multiply-adds of the innermost line.

    What only one side has and nobody needs is summed beforehand. A step that sums over nothing is an elementwise
    product, without multiply-adds.
    """
    beforehand = {c for c in set(left[0]) ^ set(right[0]) if c not in kept}
    (a_letters, a), (b_letters, b) = (sum_out(side, beforehand) for side in (left, right))
    loops = "".join(dict.fromkeys(a_letters + b_letters))
    result_letters = "".join(c for c in loops if c in kept)
    result: Array = {}
    multiply_adds = 0
    for values in itertools.product(*(range(sizes[c]) for c in loops)):
        at = dict(zip(loops, values, strict=True))
        target = tuple(at[c] for c in result_letters)
        product = a[tuple(at[c] for c in a_letters)] * b[tuple(at[c] for c in b_letters)]
        result[target] = result.get(target, 0.0) + product
        multiply_adds += 1
    return (result_letters, result), multiply_adds if len(result_letters) < len(loops) else 0


def sum_out(side: tuple[str, Array], letters: set[str]) -> tuple[str, Array]:
    names, array = side
    summed: Array = {}
    for index, value in array.items():
        target = tuple(i for c, i in zip(names, index, strict=True) if c not in letters)
        summed[target] = summed.get(target, 0.0) + value
    return "".join(c for c in names if c not in letters), summed


def einsum_by_loops(inputs: Sequence[str], output: str, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The einsum contracted from the left, and its multiply-adds."""
    sizes = {c: n for names, t in zip(inputs, operands, strict=True) for c, n in zip(names, t.shape, strict=True)}
    acc, total = (inputs[0], as_array(operands[0])), 0
    for position in range(1, len(inputs)):
        kept = set(output).union(*inputs[position + 1 :])
        acc, multiply_adds = contract_pair(acc, (inputs[position], as_array(operands[position])), kept, sizes)
        total += multiply_adds
    names, array = acc
    result = torch.zeros([sizes[c] for c in output], dtype=torch.float64)
    for index, value in array.items():
        at = dict(zip(names, index, strict=True))
        result[tuple(at[c] for c in output)] = value
    return result, total


@st.composite
def einsums(draw: st.DrawFn) -> tuple[list[str], str, list[tuple[int, ...]]]:
    """Two or three operands over at most five letters of sizes 2 to 4, and some of their letters as output."""
    sizes = dict(zip("abcde", draw(st.lists(st.integers(2, 4), min_size=5, max_size=5)), strict=True))
    names = st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True).map("".join)
    inputs = draw(st.lists(names, min_size=2, max_size=3))
    used = sorted(set("".join(inputs)))
    output = "".join(draw(st.lists(st.sampled_from(used), max_size=4, unique=True)))
    return inputs, output, [tuple(sizes[c] for c in name) for name in inputs]


@settings(max_examples=80, deadline=None)
@given(problem=einsums())
def test_any_einsum_counts_the_multiply_adds_of_its_loops(
    problem: tuple[list[str], str, list[tuple[int, ...]]],
) -> None:
    inputs, output, shapes = problem
    generator = torch.Generator().manual_seed(0)
    operands = [torch.rand(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    with torch.backends.opt_einsum.flags(enabled=False), FlopCounter() as counter:
        result = torch.einsum(f"{','.join(inputs)}->{output}", *operands)
        torch.autograd.backward(result.sum())
    expected, multiply_adds = einsum_by_loops(inputs, output, [t.detach() for t in operands])
    torch.testing.assert_close(result.detach(), expected)  # the loops do compute it
    phases = counter.record.by_phase()
    assert phases["forward"].model_flops == 2 * multiply_adds
    assert counter.record.model_flops == 3 * 2 * multiply_adds


# --- convolutions against a loop over outputs -------------------------------------------------------------------------


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    """A convolution in one to three dimensions, transposed or not, on an input just large enough to hold its kernel."""
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    groups, kernel, dilation, padding = draw(st.integers(1, 3)), each(1, 3), each(1, 2), each(0, 1)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    return {
        "rank": rank,
        "batch": draw(st.integers(1, 2)),
        "groups": groups,
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 2)),
        "kernel": kernel,
        "stride": each(1, 2),
        "padding": padding,
        "dilation": dilation,
        "spatial": tuple(span + 2 + draw(st.integers(0, 1)) for span in spans),
        "transposed": draw(st.booleans()),
        "needs_input_gradient": draw(st.booleans()),
        "needs_weight_gradient": draw(st.booleans()),
    }


def taps_of_outputs(case: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(output position, tap, input position) of every tap of every output, padding included: windows slid by hand."""
    starts = []
    for size, k, s, p, d in zip(
        *(case[n] for n in ("spatial", "kernel", "stride", "padding", "dilation")), strict=True
    ):
        slid = [start for start in range(-p, size + p, s) if start + d * (k - 1) <= size - 1 + p]
        starts.append(list(enumerate(slid)))
    for window in itertools.product(*starts):
        for tap in itertools.product(*map(range, case["kernel"])):
            at = tuple(start + d * t for (_, start), d, t in zip(window, case["dilation"], tap, strict=True))
            yield tuple(i for i, _ in window), tap, at


def taps_of_inputs(case: Mapping[str, Any]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(output position, tap, input position) of every tap that every input is spread by, what is cropped included."""
    for at in itertools.product(*map(range, case["spatial"])):
        for tap in itertools.product(*map(range, case["kernel"])):
            target = tuple(
                i * s - p + d * t
                for i, s, p, d, t in zip(at, case["stride"], case["padding"], case["dilation"], tap, strict=True)
            )
            yield target, tap, at


def convolve_by_loops(case: Mapping[str, Any], x: torch.Tensor, weight: torch.Tensor) -> tuple[Array, int]:
    """Values of the outputs that were met, by (batch, channel, *position), and the multiply-adds it took."""
    inputs, weights, result = as_array(x), as_array(weight), dict[tuple[int, ...], float]()
    per_group_in, per_group_out = case["in_channels"] // case["groups"], case["out_channels"] // case["groups"]
    multiply_adds = 0
    for out_at, tap, in_at in taps_of_inputs(case) if case["transposed"] else taps_of_outputs(case):
        for n, g, i, o in itertools.product(*map(range, (case["batch"], case["groups"], per_group_in, per_group_out))):
            c_in, c_out = g * per_group_in + i, g * per_group_out + o
            key = (c_in, o, *tap) if case["transposed"] else (c_out, i, *tap)
            value = inputs.get((n, c_in, *in_at), 0.0) * weights[key]  # 0 on padding
            result[n, c_out, *out_at] = result.get((n, c_out, *out_at), 0.0) + value
            multiply_adds += 1
    return result, multiply_adds


CONVOLUTIONS: dict[tuple[int, bool], Callable[..., torch.Tensor]] = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


@settings(max_examples=60, deadline=None)
@given(case=convolutions())
def test_any_convolution_counts_the_multiply_adds_of_its_loops(case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    i, o = case["in_channels"], case["out_channels"]
    channels = (i, o // case["groups"]) if case["transposed"] else (o, i // case["groups"])
    shapes = (case["batch"], i, *case["spatial"]), (*channels, *case["kernel"])
    x, weight = (torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    expected, multiply_adds = convolve_by_loops(case, x, weight)
    wanted = [case["needs_input_gradient"], case["needs_weight_gradient"]]
    x.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    function = CONVOLUTIONS[case["rank"], case["transposed"]]
    with FlopCounter() as counter:
        y = function(x, weight, None, *(case[n] for n in ("stride", "padding")), **rest(case))
        if any(wanted):
            torch.autograd.backward(y.sum())
    for index, value in as_array(y.detach()).items():
        assert math.isclose(value, expected.get(index, 0.0), abs_tol=1e-9)  # the loops do compute it
    assert counter.record.model_flops == (1 + sum(wanted)) * 2 * multiply_adds
    assert counter.record.hardware_flops == counter.record.model_flops


def rest(case: Mapping[str, Any]) -> dict[str, Any]:
    return {"groups": case["groups"], "dilation": case["dilation"]}


# --- properties of any step -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A Linear that may be frozen and may be checkpointed."""

    def __init__(self, inputs: int, outputs: int, *, is_frozen: bool, is_checkpointed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs).requires_grad_(not is_frozen)
        self.norm = nn.LayerNorm(outputs)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.compute, x, use_reentrant=False) if self.is_checkpointed else self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(self.linear(x)))


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Sequential, list[int], list[bool], list[bool]]:
    widths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=6))
    flags = st.lists(st.booleans(), min_size=len(widths) - 1, max_size=len(widths) - 1)
    frozen, checkpointed = draw(flags), draw(flags)
    shapes = itertools.pairwise(widths)
    blocks = [
        Block(*shape, is_frozen=f, is_checkpointed=c) for shape, f, c in zip(shapes, frozen, checkpointed, strict=True)
    ]
    return nn.Sequential(*blocks), widths, frozen, checkpointed


def count_steps(model: nn.Module, x: torch.Tensor, *, steps: int = 1) -> StepRecord:
    with FlopCounter(model) as counter:
        for _ in range(steps):
            model.zero_grad()
            x.grad = None
            model(x).sum().backward()
    return counter.record


@settings(max_examples=40, deadline=None)
@given(network=networks(), T=st.integers(0, 5), needs_input_gradient=st.booleans(), steps=st.integers(1, 4))
def test_steps_parts_and_kinds_of_work_add_up(
    network: tuple[nn.Sequential, list[int], list[bool], list[bool]], T: int, needs_input_gradient: bool, steps: int
) -> None:
    model, widths, frozen, checkpointed = network
    x = torch.zeros(T, widths[0], requires_grad=needs_input_gradient)
    one, many = count_steps(model, x), count_steps(model, x, steps=steps)
    model_flops = recomputed = 0
    gradient_reaches = needs_input_gradient
    for (inputs, outputs), is_frozen, again in zip(itertools.pairwise(widths), frozen, checkpointed, strict=True):
        f = 2 * T * inputs * outputs
        model_flops += f * (1 + (not is_frozen) + gradient_reaches)
        recomputed += f * again  # the norm and the GELU behind need the product's result again
        gradient_reaches = True  # the norms are trained
    assert one.model_flops == model_flops
    assert one.recompute_flops == recomputed
    assert one.hardware_flops == model_flops + recomputed
    assert many.totals == one.totals * steps
    assert_parts_add_up(one)


def assert_parts_add_up(record: StepRecord) -> None:
    assert sum(record.by_module(inclusive=False).values(), start=FlopTotals()) == record.totals
    modules = record.by_module()
    assert modules[""] == record.totals
    children = [totals for name, totals in modules.items() if name.isdigit()]
    assert sum(c.hardware_flops for c in children) == record.hardware_flops
    assert all(totals.hardware_flops >= totals.model_flops for totals in modules.values())


# --- fvcore, module by module -----------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.inner(x)


class SelfAttention(nn.Module):
    """Heads by hand: two batched products that a tracer sees."""

    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.qkv, self.out, self.H = nn.Linear(D, 3 * D), nn.Linear(D, D), H

    def forward(self, x: torch.Tensor) -> Any:
        B, S, D = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.H, D // self.H).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(B, S, D))


def transformer(D: int = 16, H: int = 4) -> nn.Sequential:
    feed_forward = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    layers = [nn.Sequential(Residual(SelfAttention(D, H)), Residual(feed_forward)) for _ in range(1)]
    return nn.Sequential(*layers, nn.LayerNorm(D), nn.Linear(D, 11))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        Residual(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1))),
        *(nn.Conv2d(8, 6, 3, stride=2, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
    )


PLAIN_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False)), (4, 5)),
    "tokens": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), (2, 4, 5)),
    "convolutional": (convolutional, (2, 3, 10, 10)),
    "conv1d-conv3d": (
        lambda: nn.Sequential(nn.Conv1d(2, 8, 3), nn.Unflatten(1, (2, 2, 2)), nn.Conv3d(2, 3, (1, 2, 3), dilation=1)),
        (2, 2, 9),
    ),
    "transformer": (transformer, (2, 6, 16)),
}

FVCORE_PRODUCTS = ("linear", "conv", "matmul", "addmm", "bmm", "einsum")
"""Fvcore counts norms and pooling as well; both of us count these."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_fvcore_times_two_is_our_forward_module_by_module(name: str) -> None:
    fvcore = pytest.importorskip("fvcore.nn")
    make, shape = PLAIN_MODELS[name]
    model, x = make(), torch.zeros(shape)
    analysis = fvcore.FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    theirs = {
        module: 2 * sum(int(by_operator[op]) for op in FVCORE_PRODUCTS)
        for module, by_operator in analysis.tracer_warnings("none").by_module_and_operator().items()
    }
    with torch.no_grad(), FlopCounter(model) as counter:
        model(x)
    ours = counter.record.by_module()
    assert {module: flops for module, flops in theirs.items() if flops} == {
        module: totals.model_flops for module, totals in ours.items() if totals.model_flops
    }
    assert ours[""].model_flops > 0


# --- the profiler's events --------------------------------------------------------------------------------------------


def product_events(events: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Name, and sizes or scalars of the inputs, of the outermost event of each product."""
    for event in events:
        if event.name in FLOPS_OF_EVENT:
            inputs = event.typed[1].inputs
            yield event.name, [tuple(i.sizes) if hasattr(i, "sizes") else i for i in inputs]
        else:
            yield from product_events(event.children)


def matrix_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any) -> int:
    """2 M K N, for every matrix of a batch."""
    return 2 * math.prod(left) * right[-1]


def same_convolution_flops(x: tuple[int, ...], weight: tuple[int, ...], *_: Any) -> int:
    """With stride 1 and padding that keeps the size, there are as many output positions as input positions."""
    return 2 * x[0] * math.prod(x[2:]) * math.prod(weight)


FLOPS_OF_EVENT: dict[str, Callable[..., int]] = {
    "aten::mm": matrix_flops,
    "aten::bmm": matrix_flops,
    "aten::addmm": lambda bias, left, right, *_: matrix_flops(left, right),
    "aten::convolution": same_convolution_flops,
    "aten::convolution_backward": lambda grad, x, weight, *_: 2 * same_convolution_flops(x, weight),
    # B H S S D for each of two products forward, five backward, one of which is the forward's again
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda q, k, *_: 2 * 2 * math.prod(q) * k[2],
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, *_: 5 * 2 * math.prod(q) * k[2],
}


def profiled_flops(step: Callable[[], Any]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    flops: Counter[str] = Counter()
    for name, inputs in product_events(results.experimental_event_tree()):
        flops[name] += FLOPS_OF_EVENT[name](*inputs)
    return flops


def same_convolutions() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2, groups=4)),
        *(nn.Flatten(), nn.Linear(8 * 36, 5)),
    )


PROFILED_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": PLAIN_MODELS["mlp"],
    "convolutional": (same_convolutions, (2, 3, 6, 6)),
    "transformer": (transformer, (2, 6, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0), (2, 6, 16)),
}


@pytest.mark.parametrize("name", PROFILED_MODELS)
def test_the_profilers_events_add_up_to_what_the_hardware_ran(name: str) -> None:
    make, shape = PROFILED_MODELS[name]
    model, x = make(), torch.zeros(shape, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    events = profiled_flops(step)
    with FlopCounter(model) as counter:
        step()
    assert {
        op: totals.hardware_flops for op, totals in counter.record.by_op().items() if totals.hardware_flops
    } == events
    assert counter.record.hardware_flops > 0
