"""Records of compiled models beside those of the same models in eager: equal but for what fusion really saves.

Explained differences, and the only ones: elementwise work of a compiled graph is one operator, ``inductor::fused``, in
the module that was compiled, and it moves fewer bytes than the same work operator by operator; a module without a
product of its own (a norm) is not told apart in it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting.compiled.runs import FUSED
from mfu_monitor.counting.compiled.watch import guards_notice_modes
from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import FlopTotals, StepRecord

pytestmark = pytest.mark.skipif(
    guards_notice_modes(), reason="before torch 2.10 counted steps of compiled code run in eager"
)


class MLP(nn.Module):
    def __init__(self, width: int = 48, hidden: int = 96) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.body, self.head = nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Shared(nn.Module):
    """A weight for all sequences: an expanded operand lies in memory once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(16, 8), nn.Parameter(torch.zeros(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self.inner(x), self.weight.expand(x.shape[0], 8, 16))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(64, 64), MLP(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, F.gelu(self.first(x)), use_reentrant=False)  # type: ignore[no-any-return]


class Model(NamedTuple):
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    precision: str = "fp32"


def bf16_autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


MODELS = {
    "mlp": Model(MLP, (32, 48)),
    "conv net": Model(ConvNet, (2, 3, 16, 16)),
    "attention block": Model(AttentionBlock, (2, 32, 64)),
    "expanded weight": Model(Shared, (3, 4, 16)),
    "checkpointed": Model(Checkpointed, (32, 64)),
    "mlp, bf16 autocast": Model(MLP, (32, 48), bf16_autocast, "bf16"),
}


@functools.cache
def count(model: Model, *, is_compiled: bool) -> StepRecord:
    torch._dynamo.reset()
    torch.manual_seed(0)
    root = model.build()
    x = torch.randn(model.shape, dtype=next(root.parameters()).dtype)
    run = torch.compile(root) if is_compiled else root
    with FlopCounter(root) as counter:
        with model.context():
            result = run(x)
        result.backward(torch.ones_like(result))
    assert counter.record is not None
    return counter.record


def products(record: StepRecord) -> dict[tuple[str, ...], FlopTotals]:
    """By what they are: operator, module, phase, precision."""
    found: dict[tuple[str, ...], FlopTotals] = {}
    for op in record.ops:
        if op.totals.hardware_flops:
            key = op.op, op.module_fqn, op.phase.value, str(op.precision)
            found[key] = found.get(key, FlopTotals()) + op.totals
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_record_says_all_that_eager_s_says(name: str) -> None:
    model = MODELS[name]
    eager, compiled = (count(model, is_compiled=is_compiled) for is_compiled in (False, True))
    assert FUSED in compiled.by_op()  # it did run compiled
    assert FUSED not in eager.by_op()
    assert products(compiled) == products(eager)  # FLOPs of every kind and bytes
    assert compiled.by_dtype() == eager.by_dtype()
    assert compiled.active_precision == eager.active_precision == model.precision
    assert (compiled.notes, compiled.unsupported_ops) == (eager.notes, eager.unsupported_ops) == ((), ())
    assert not compiled.is_lower_bound
    assert 0 < compiled.bytes_accessed <= eager.bytes_accessed
    with_products = {key[1] for key in products(eager)}
    assert with_products == set(dict(model.build().named_modules())) & with_products
    assert {m for m in compiled.by_module(inclusive=False) if m} == with_products - {""}


def fused_bytes(record: StepRecord, phase: str) -> int:
    return sum(op.totals.bytes_accessed for op in record.ops if op.op == FUSED and op.phase == phase)


ROWS, WIDTH, HIDDEN = 32, 48, 96


def test_fused_regions_move_what_crosses_their_border() -> None:
    record = count(MODELS["mlp"], is_compiled=True)
    hidden, outer = ROWS * HIDDEN, ROWS * WIDTH
    assert fused_bytes(record, "forward") == 4 * (hidden + hidden)  # gelu: the product before it, the one after
    gelu_backward = hidden + hidden + hidden  # the saved product, the gradient product, the result
    bias_gradients = (outer + WIDTH) + HIDDEN  # of the incoming gradient, and of what the region made itself
    assert fused_bytes(record, "backward") == 4 * (gelu_backward + bias_gradients)


def test_a_fused_region_moves_casts_in_the_precision_that_lies_in_memory() -> None:
    record = count(MODELS["mlp, bf16 autocast"], is_compiled=True)
    cast = ROWS * WIDTH + 2 * WIDTH * HIDDEN + WIDTH + HIDDEN  # the input and all parameters, fp32 to bf16
    assert fused_bytes(record, "forward") == (4 + 2) * cast + 2 * (ROWS * HIDDEN + ROWS * HIDDEN)


def test_parts_of_a_tensor_are_views_and_copies_into_a_part_are_none() -> None:
    from mfu_monitor.counting.compiled.products import _is_view

    for target in ("split.Tensor", "split_with_sizes.default", "unbind.int", "select.int", "slice.Tensor", "t.default",
                   "permute.default", "view.default", "reshape.default", "_unsafe_view.default", "sym_size.int",
                   "as_strided.default", "expand.default"):  # fmt: skip
        assert _is_view(f"aten.{target}"), target
    for target in ("select_scatter.default", "slice_scatter.default", "view_copy.default", "as_strided_scatter.default",
                   "expand_copy.default", "add.Tensor", "clone.default", "no_such_operator.default"):  # fmt: skip
        assert not _is_view(f"aten.{target}"), target
