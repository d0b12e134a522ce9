"""Whole models in tiny configurations: our count against arithmetic written from their configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("transformers", minversion="5.0")

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import step_roofline

from .models import TEXT_MODELS, ModelCase
from .models_vision import VISION_MODELS
from .tally import Setup, Tally

CASES = (*TEXT_MODELS, *VISION_MODELS)


class Adapter(nn.Module):
    """LoRA: y = W x + B A x, with W frozen."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        self.base = base
        if base.weight.dim() == 4:
            same: Any = {"stride": base.stride, "padding": base.padding, "bias": False}
            self.lora_a: nn.Module = nn.Conv2d(base.in_channels, rank, base.kernel_size, **same)
            self.lora_b: nn.Module = nn.Conv2d(rank, base.out_channels, 1, bias=False)
        else:
            width_in, width_out = _widths(base)
            self.lora_a = nn.Linear(width_in, rank, bias=False)
            self.lora_b = nn.Linear(rank, width_out, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.lora_b(self.lora_a(x))


def _widths(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.weight.shape[0], layer.weight.shape[1]  # transformers' Conv1D keeps its weight (in, out)


def add_adapters(model: nn.Module, targets: tuple[str, ...], rank: int) -> None:
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in targets:
            setattr(model.get_submodule(parent), last, Adapter(layer, rank))


def prepare(case: ModelCase, setup: Setup, S: int | None = None) -> tuple[Any, Any]:
    with torch.device(case.device):
        model, inputs = case.build(S or case.S, setup.attention)
        if setup.lora_targets:
            add_adapters(model, setup.lora_targets, setup.lora_rank)
    for prefix in setup.frozen:
        model.get_submodule(prefix).requires_grad_(False)
    if setup.checkpointing != "none":
        reentrant = setup.checkpointing == "reentrant"
        if case.checkpoint is not None:
            case.checkpoint(model, reentrant)
        else:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
    return model.train(), inputs


def loss_of(output: Any) -> Any:
    return output if isinstance(output, torch.Tensor) else output.loss


def step(model: Any, inputs: Any) -> StepRecord:
    with FlopCounter(model) as counter:
        loss_of(model(**inputs)).backward()
    return counter.record


def expected(case: ModelCase, setup: Setup, S: int | None = None) -> Tally:
    tally = Tally(setup)
    case.closed_form(tally, S or case.S)
    return tally


SETUPS: dict[str, Callable[[ModelCase], Setup]] = {
    "trained": lambda case: Setup(),
    "eager-attention": lambda case: Setup(attention="eager"),
    "bottom-half-frozen": lambda case: Setup(frozen=case.frozen_bottom),
    "top-half-frozen": lambda case: Setup(frozen=case.frozen_top),
    "lora": lambda case: Setup(lora_targets=case.lora_targets),
    "checkpointing": lambda case: Setup(checkpointing="non_reentrant"),
    "reentrant-checkpointing": lambda case: Setup(checkpointing="reentrant"),
    "lora-checkpointing": lambda case: Setup(lora_targets=case.lora_targets, checkpointing="non_reentrant"),
    "bottom-half-frozen-checkpointing": lambda case: Setup(frozen=case.frozen_bottom, checkpointing="non_reentrant"),
}


def runs() -> list[Any]:
    return [
        pytest.param(case, setup(case), id=f"{case.id}-{name}")
        for case in CASES
        for name, setup in SETUPS.items()
        if case.has_eager_attention or name != "eager-attention"
    ]


@pytest.mark.parametrize(("case", "setup"), runs())
def test_a_model_counts_to_the_flop_what_its_configuration_says(case: ModelCase, setup: Setup) -> None:
    record = step(*prepare(case, setup))
    right = expected(case, setup)
    assert not record.is_lower_bound
    assert record.notes == ()
    by_module = {n: t.model_flops for n, t in record.by_module(inclusive=False).items() if t.model_flops}
    assert by_module == right.model
    assert record.model_flops == right.model_flops
    assert record.palm_model_flops == right.palm
    assert record.recompute_flops == right.recompute
    assert record.kernel_recompute_flops == right.kernel_recompute
    assert record.other_flops == right.masked
    assert record.hardware_flops == right.hardware_flops
    assert record.by_module()[""] == record.totals


# --- properties ------------------------------------------------------------------------------------------------------

ATTENTION_CASES = [case for case in CASES if case.id not in ("mamba", "resnet50", "vit")]


def attention_flops(case: ModelCase, record: StepRecord) -> tuple[int, int]:
    """Model FLOPs of attention whose keys grow with its queries, by attended pairs and by the full square.

    T5 trains its mask, so its attention runs as batched products; no other product of these models is a batched one.
    """
    totals = [
        op.totals
        for op in record.ops
        if ("attention" in op.op or op.op == "aten::bmm")
        and not (case.attends_to_fixed and re.fullmatch(case.attends_to_fixed, op.module_fqn))
    ]
    return sum(t.model_flops for t in totals), sum(t.palm_model_flops for t in totals)


def fixed_flops(case: ModelCase, record: StepRecord) -> int:
    own = record.by_module(inclusive=False)
    return sum(t.model_flops for name, t in own.items() if case.fixed and re.fullmatch(case.fixed, name))


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.id)
@settings(max_examples=3, deadline=None)
@given(half=st.integers(2, 8))
def test_only_attention_grows_with_the_square_of_the_sequence(case: ModelCase, half: int) -> None:
    """F(2S) - 2 F(S) = 2 attention(S) with the full square.

    F is a S + k S^2, of which k S^2 is attention. By attended pairs a causal square of side n counts n (n + 1) / 2, so
    attention(2S) = 4 attention(S) less twice the diagonal's n, and one diagonal is missing from the right-hand side.
    What does not grow with the sequence is counted once on the left and twice on the right.
    """
    S = 2 * half
    once, twice = (step(*prepare(case, Setup(), size)) for size in (S, 2 * S))
    fixed = fixed_flops(case, once)
    assert fixed == fixed_flops(case, twice)
    exact, full = attention_flops(case, once)
    assert twice.palm_model_flops - 2 * once.palm_model_flops + fixed == 2 * full
    diagonal = expected(case, Setup(), S).diagonal
    assert twice.model_flops - 2 * once.model_flops + fixed == 2 * exact - diagonal
    assert once.hardware_flops >= once.model_flops


def test_patches_of_a_vision_transformer_grow_the_same_way() -> None:
    """2 x 2 patches and a class token make S = 5, 3 x 3 make 2 S = 10; one patch is left over, and the classifier."""
    case = next(case for case in CASES if case.id == "vit")
    once, twice = (step(*prepare(case, Setup(), patches)) for patches in (4, 9))
    patch = 2 * (2 * 2 * 3 * 4**2 * 32)  # forward and weight gradient of one patch in each of two images
    classifier = 3 * (2 * 2 * 32 * 5)
    exact, full = attention_flops(case, once)
    assert exact == full == 6 * 2 * (2 * 2 * 4 * 5**2 * 8)  # 6 products, 2 layers, 2 images, 4 heads of width 8
    assert twice.model_flops - 2 * once.model_flops == 2 * exact + patch - classifier


MOVES_NOTHING = {"aten::_unsafe_view", "aten::empty", "aten::empty_like"}
"""A view, and memory that is reserved and not filled."""
EMPTY_HERE = {"aten::zeros"}
"""Whisper's backward asks for zeros of no elements; a filled tensor has bytes (tests/formulas/test_traffic.py)."""
ROOF = DevicePeak(device_name="toy", flops_per_s_by_precision={"fp32": 1e13}, bytes_per_s=1e12)


@pytest.mark.parametrize(
    ("case", "setup"),
    [
        pytest.param(case, SETUPS[name](case), id=f"{case.id}-{name}")
        for case in CASES
        for name in ("trained", "eager-attention", "checkpointing")
        if case.has_eager_attention or name != "eager-attention"
    ],
)
def test_no_operator_of_a_model_is_without_its_bytes_and_the_roof_is_above_what_was_measured(
    case: ModelCase, setup: Setup
) -> None:
    record = step(*prepare(case, setup))
    without = {op.op for op in record.ops if not op.totals.bytes_accessed}
    assert without <= MOVES_NOTHING | EMPTY_HERE
    assert all(op.totals.bytes_accessed for op in record.ops if op.totals.hardware_flops)
    roofline = step_roofline(record, ROOF)
    assert roofline.ideal_time_s is not None
    assert roofline.attainable_mfu is not None
    measured_mfu = record.model_flops / (1.25 * roofline.ideal_time_s * 1e13)  # a quarter slower than ideal
    assert measured_mfu < roofline.attainable_mfu < 1


def test_resnet50_has_the_published_multiply_adds() -> None:
    """4.09 G multiply-adds for one image (torchvision's table of ResNet50_Weights: "GFLOPS 4.09")."""
    case = next(case for case in CASES if case.id == "resnet50")
    model, inputs = prepare(case, Setup())
    with torch.no_grad(), FlopCounter(model) as counter:
        model(**inputs)
    assert round(counter.record.model_flops / 2 / 1e9, 2) == 4.09
    # The image needs no gradient: the first convolution has a weight gradient only.
    first = 2 * 112**2 * 64 * 3 * 49
    assert expected(case, Setup()).model_flops == 3 * counter.record.model_flops - first


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_mixtral_counts_the_experts_that_were_used(implementation: str) -> None:
    """Whatever runs them, the rows of all experts are tokens x top_k; an expert without a token costs nothing."""
    case = next(case for case in CASES if case.id == "mixtral")
    model, inputs = prepare(case, Setup())
    model.set_experts_implementation(implementation)
    inputs = {"input_ids": torch.ones(2, 12, dtype=torch.long), "labels": torch.ones(2, 12, dtype=torch.long)}
    used: list[set[int]] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: used.append(set(out[2].flatten().tolist())))
    record = step(model, inputs)
    assert [len(experts) for experts in used] == [2, 2]  # equal tokens go to the same two of four experts
    assert record.model_flops == expected(case, Setup()).model_flops
    experts = record.by_module()["model.layers.0.mlp.experts"].model_flops
    assert experts == 3 * (2 * 2 * 12 * 2) * (32 * 2 * 48 + 48 * 32)  # 24 tokens x 2 experts, gate and up and down


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_several_steps_count_several_times_one(case: ModelCase) -> None:
    model, inputs = prepare(case, Setup())
    with FlopCounter(model) as counter:
        for _ in range(3):
            model.zero_grad()
            loss_of(model(**inputs)).backward()
    model.zero_grad()
    assert counter.record.totals == step(model, inputs).totals * 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_products_run_under_the_names_of_the_model(case: ModelCase) -> None:
    model, inputs = prepare(case, Setup(checkpointing="non_reentrant"))
    names = dict(model.named_modules())
    with_products = {op.module_fqn for op in step(model, inputs).ops if op.totals.hardware_flops}
    assert with_products <= names.keys()
