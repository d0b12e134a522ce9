"""Compiled models on the inductor backend: counted to the FLOP, and left as they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from mfu_monitor.counting.compiled.watch import guards_notice_modes
from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord

from .models import TEXT_MODELS
from .models_compiled import COMPILED, CompiledCase, GraphWalk
from .test_models import SETUPS, expected, prepare, step

pytestmark = [
    pytest.mark.skipif(guards_notice_modes(), reason="before torch 2.10 counted steps of compiled code run in eager"),
    pytest.mark.filterwarnings("ignore:.*dynamo_pgo force disabled.*"),
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*"),
    pytest.mark.filterwarnings("ignore:.*enable_nested_tensor.*"),
]

STEPS = 30
COUNTED = (0, 1, 7, 29)
"""Cold, warm, and two more among the steps."""


@dataclass(frozen=True)
class Run:
    """What STEPS steps of one model came to."""

    records: tuple[StepRecord, ...]
    losses: tuple[torch.Tensor, ...]
    counters: dict[str, dict[str, int]]
    """dynamo's own: compiled graphs, graph breaks, recompiles."""
    compiled_calls: int
    """Calls of compiled graphs in one step after the last counted one, by the profiler."""
    walked_flops: int
    walked_graphs: int


def one_step(case: CompiledCase, model: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with case.context():
        if not case.is_training:
            with torch.no_grad():
                return model(*inputs)  # type: ignore[no-any-return]
        loss = model(*inputs)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]


def fresh(case: CompiledCase) -> tuple[Any, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return case.build()


def run_steps(case: CompiledCase, *, counted: tuple[int, ...]) -> Run:
    """Compile from nothing and train; nothing comes from a cache, so that the walk sees every graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    walk = GraphWalk(case)
    model, inputs = fresh(case)
    compiled = torch.compile(model, dynamic=case.dynamic)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    records: list[StepRecord] = []
    losses: list[torch.Tensor] = []
    cold = torch._functorch.config.patch(enable_autograd_cache=False)
    with cold, torch._inductor.config.patch(fx_graph_cache=False, post_grad_custom_post_pass=walk):
        for step in range(STEPS):
            optimizer.zero_grad()
            if step in counted:
                with FlopCounter(model) as counter:
                    losses.append(one_step(case, compiled, inputs))
                records.append(counter.record)
            else:
                losses.append(one_step(case, compiled, inputs))
            optimizer.step()
        optimizer.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            one_step(case, compiled, inputs)
    counters = {group: dict(values) for group, values in torch._dynamo.utils.counters.items()}
    calls = sum("CompiledFxGraph" in event.name for event in profile.events())
    return Run(tuple(records), tuple(losses), counters, calls, walk.flops, walk.graphs)


@dataclass(frozen=True)
class Outcome:
    case: CompiledCase
    eager: StepRecord
    counted: Run
    plain: Run


def cases() -> list[Any]:
    return [pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.is_slow else []) for case in COMPILED]


@pytest.fixture(scope="module", params=cases())
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    case: CompiledCase = request.param
    model, inputs = fresh(case)
    with FlopCounter(model) as counter:
        one_step(case, model, inputs)
    yield Outcome(case, counter.record, run_steps(case, counted=COUNTED), run_steps(case, counted=()))
    torch._dynamo.reset()


def test_model_flops_equal_those_of_eager(outcome: Outcome) -> None:
    assert outcome.eager.model_flops > 0
    for record in outcome.counted.records:
        assert record.model_flops == outcome.eager.model_flops
        assert record.palm_model_flops == outcome.eager.palm_model_flops
        assert record.notes == ()
        assert not record.is_lower_bound


def test_hardware_flops_are_the_products_of_the_final_graphs(outcome: Outcome) -> None:
    assert outcome.counted.walked_graphs > 0
    for record in outcome.counted.records:
        assert record.hardware_flops == outcome.counted.walked_flops


def test_every_counted_step_counts_the_same_cold_or_warm(outcome: Outcome) -> None:
    first, *others = (record.totals for record in outcome.counted.records)
    assert all(totals == first for totals in others)


def test_products_belong_to_the_modules_they_belong_to_in_eager(outcome: Outcome) -> None:
    eager, compiled = (
        {name: t.model_flops for name, t in record.by_module(inclusive=False).items() if t.model_flops}
        for record in (outcome.eager, outcome.counted.records[0])
    )
    assert sum(compiled.values()) == sum(eager.values())
    # Where the operands do not tell (docs/counting.md) names differ: this fails when a case leaves that list.
    assert (compiled == eager) is outcome.case.has_same_modules


def test_compiled_graphs_breaks_and_recompiles_are_the_same_without_counting(outcome: Outcome) -> None:
    assert outcome.plain.counters["stats"]["unique_graphs"] > 0
    assert outcome.counted.counters == outcome.plain.counters
    assert outcome.counted.walked_graphs == outcome.plain.walked_graphs


def test_the_step_after_a_counted_one_runs_compiled_code(outcome: Outcome) -> None:
    assert outcome.counted.compiled_calls == outcome.plain.compiled_calls > 0


def test_losses_are_the_same_bits_without_counting(outcome: Outcome) -> None:
    assert all(
        torch.equal(seen, plain) for seen, plain in zip(outcome.counted.losses, outcome.plain.losses, strict=True)
    )
    if outcome.case.is_training:
        assert not torch.equal(outcome.plain.losses[0], outcome.plain.losses[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_id", "setup_name", "beyond_eager"),
    [
        ("gpt2", "checkpointing", None),  # attention keeps its random state to be run again
        ("t5", "lora", 0),  # gradients of K that nobody wants
        # Experts run behind an operator of transformers' own, which makes the frozen layer's weight gradients too:
        # 24 tokens x 2 experts through gate and up (32 x 96) and down (48 x 32).
        ("mixtral", "top-half-frozen", 2 * 24 * 2 * (32 * 96 + 48 * 32)),
    ],
)
def test_models_of_transformers_count_compiled_what_their_configuration_says(
    model_id: str, setup_name: str, beyond_eager: int | None
) -> None:
    torch._dynamo.reset()
    case = next(case for case in TEXT_MODELS if case.id == model_id)
    setup = SETUPS[setup_name](case)
    model, inputs = prepare(case, setup)
    model.forward = torch.compile(model.forward)
    record, right = step(model, inputs), expected(case, setup)
    torch._dynamo.reset()
    assert record.notes == ()
    assert not record.is_lower_bound
    assert record.model_flops == right.model_flops
    assert record.palm_model_flops == right.palm
    assert record.by_module()[""] == record.totals
    if beyond_eager is None:
        assert record.recompute_flops > 0  # as the compiler chose
    else:
        assert record.hardware_flops == right.hardware_flops + beyond_eager
