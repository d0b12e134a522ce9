"""Every row of the conformance table: our count against arithmetic derived by hand."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from mfu_monitor.counting.compiled.watch import guards_notice_modes
from mfu_monitor.counting.step_record import FlopTotals, StepRecord

from .case import Case, evaluate, run
from .cases_attention import BY_MASK
from .table import all_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage.*"),
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*"),
    pytest.mark.filterwarnings("ignore:.*torch.chain_matmul is deprecated.*"),
    pytest.mark.filterwarnings("ignore:.*Sparse .* tensor support is in beta state.*"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True.*"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths.*"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN.*"),
]


def runs(cases: tuple[Case, ...]) -> list[Any]:
    """One parameter set a row and device."""
    return [pytest.param(case, device, id=f"{case.id}-{device}") for case in cases for device in case.devices]


CASES = all_cases()


def _run_or_skip(case: Case, device: str) -> StepRecord:
    """The row's record. Torch before 2.10 lacks some functions and meta kernels that the rows use."""
    try:
        return run(case, device)
    except (AttributeError, NotImplementedError) as error:
        if not guards_notice_modes():
            raise
        pytest.skip(f"this torch lacks what the row uses: {error}")


@pytest.mark.parametrize(("case", "device"), runs(CASES))
def test_the_count_is_the_arithmetic(case: Case, device: str) -> None:
    record = _run_or_skip(case, device)
    assert tuple(op.op for op in record.unsupported_ops) == case.unsupported_ops
    assert record.uncovered_parameters == ()
    assert not record.incomplete, record.notes
    assert record.model_flops == evaluate(case.model_flops)
    assert record.palm_model_flops == evaluate(case.palm_flops or case.model_flops)
    if device == case.devices[0]:  # the kernels, and so what the hardware runs, depend on the device
        assert record.hardware_flops == evaluate(case.hardware_flops or case.model_flops)
        assert record.recompute_flops == evaluate(case.recompute_flops)
        assert record.optimizer_flops == evaluate(case.optimizer_flops)
    if case.forward_flops is not None:
        phases = record.by_phase()
        assert phases["forward"].model_flops == evaluate(case.forward_flops)
        assert phases["backward"].model_flops == evaluate(f"({case.model_flops}) - ({case.forward_flops})")
    assert_parts_sum_to_the_total(record)


def assert_parts_sum_to_the_total(record: StepRecord) -> None:
    assert record.hardware_flops >= record.model_flops
    assert record.by_module()[""] == record.totals
    for parts in (record.by_module(inclusive=False), record.by_phase(), record.by_op()):
        assert sum(parts.values(), start=FlopTotals()) == record.totals


def test_rows_have_names_of_their_own() -> None:
    assert [name for name, times in Counter(case.id for case in CASES).items() if times > 1] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_expected_values_are_arithmetic_on_shapes(case: Case) -> None:
    counts = (case.model_flops, case.hardware_flops, case.forward_flops, case.palm_flops)
    for expression in filter(None, (*counts, case.recompute_flops, case.optimizer_flops)):
        assert expression == "0" or re.search(r"[*+]", expression), f"{expression} is a bare number: write the shapes"
        longest = max((len(number) for number in re.findall(r"\d+", expression)), default=0)
        assert longest <= 6, f"{expression} holds a result: write the shapes"
    assert evaluate(case.hardware_flops or case.model_flops) >= evaluate(case.model_flops)
    assert case.phase == "training" or case.forward_flops is None


def test_a_wrong_expectation_would_be_seen() -> None:
    case = BY_MASK[0]
    assert run(case).model_flops != evaluate(case.palm_flops or "0")
