"""Two thousand training steps made at random: no count is wrong and calls itself complete."""

from __future__ import annotations

import pytest
import torch

import mfu_monitor as mm
from mfu_monitor.counting.step_record import StepRecord
from tests.conformance.random_programs import Program, expected, forward, forward_with_gradients, layers_of, make, train

PROGRAMS = 2000
BATCHES = 20


def is_right(record: StepRecord, program: Program, *, about: object) -> bool:
    """Asserts that a record is right, or says that it is a lower bound and is one; True where it is right."""
    truth = expected(program)
    seen = (record.model_flops, record.recompute_flops, record.other_flops)
    if not record.is_lower_bound:
        assert seen == (truth.model, truth.recompute, truth.other), about
        return True
    assert record.model_flops <= truth.model, about
    assert record.notes, about
    return False


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_random_step_is_counted_as_it_is_read(batch: int) -> None:
    right = 0
    for seed in range(batch, PROGRAMS, BATCHES):
        program = make(seed)
        layers = layers_of(program)
        with mm.FlopCounter(layers) as counter:
            train(program, layers)
        right += is_right(counter.record, program, about=(seed, program))
        # The split is in doubt at most; all that ran is seen.
        truth = expected(program)
        assert counter.record.hardware_flops == truth.model + truth.recompute + truth.other
    assert right >= 0.7 * PROGRAMS / BATCHES


@pytest.mark.parametrize(("backend", "programs"), [("aot_eager", 12), ("inductor", 4)])
def test_a_random_compiled_step_is_counted_as_it_is_read(backend: str, programs: int) -> None:
    right = 0
    for seed in range(programs):
        program = make(seed, is_compiled=True)
        layers = layers_of(program)
        torch.compiler.reset()
        switches = any(kind == "no_grad" for kind, *_ in program.statements)
        compiled = torch.compile(forward if switches else forward_with_gradients, backend=backend)
        train(program, layers, compiled)
        with mm.FlopCounter(layers) as counter:
            train(program, layers, compiled)
        right += is_right(counter.record, program, about=(seed, program))
    assert right >= programs / 4
