"""Records from JSON: what was written comes back, and a wrong type is an error that names the field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mfu_monitor.alerts.alert import Alert, CauseShare
from mfu_monitor.counting.plain_types import PlainTypes
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

WINDOW = StepWindow(first_step=0, last_step=9, steps=10, elapsed_s=1.0, wall_s=1.0, throttle_reasons=("heat",))
RECORD = StepRecord(
    ops=(OpRecord(op="aten::mm", phase=Phase.BACKWARD, shapes=((2, 3), (3, 4)), totals=FlopTotals(model_flops=48)),)
)
ALERT = Alert(
    kind="drop",
    step=7,
    mfu=0.3,
    baseline=0.4,
    message="slower",
    causes=(CauseShare(name="data_wait", before=0.1, after=0.2, unit="s", share_of_loss=0.9),),
)
READING = UtilizationReading(window=WINDOW, mfu=0.4, peak_flops_per_s_by_precision={"bf16": 1e12})


@pytest.mark.parametrize("record", [WINDOW, RECORD, ALERT, READING], ids=lambda r: type(r).__name__)
def test_a_record_comes_back_from_json_and_ignores_what_a_later_version_adds(record: PlainTypes) -> None:
    text = json.dumps(record.to_dict() | {"later": 1})
    assert type(record).from_dict(json.loads(text)) == record


@pytest.mark.parametrize(
    ("record", "path", "value", "field"),
    [
        (WINDOW, ("steps",), "ten", "StepWindow.steps"),
        (WINDOW, ("steps",), 1.5, "StepWindow.steps"),
        (WINDOW, ("steps",), True, "StepWindow.steps"),
        (WINDOW, ("elapsed_s",), [1.0], "StepWindow.elapsed_s"),
        (WINDOW, ("throttle_reasons",), "heat", "StepWindow.throttle_reasons"),
        (WINDOW, ("model_flops_by_precision",), 3, "StepWindow.model_flops_by_precision"),
        (READING, ("window",), None, "UtilizationReading.window"),
        (READING, ("window", "last_step"), {}, "UtilizationReading.window.last_step"),
        (READING, ("peak_flops_per_s_by_precision", "bf16"), "fast", r"peak_flops_per_s_by_precision\['bf16'\]"),
        (RECORD, ("ops", 0, "phase"), "sideways", r"StepRecord.ops\[0\].phase is 'sideways'; expected 'forward'"),
        (RECORD, ("ops", 0, "shapes"), [[2, "x"]], r"StepRecord.ops\[0\].shapes\[0\]\[1\]"),
        (RECORD, ("ops", 0, "totals"), 48, r"StepRecord.ops\[0\].totals"),
        (ALERT, ("causes",), [3], r"Alert.causes\[0\]"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_the_field(
    record: PlainTypes, path: tuple[Any, ...], value: object, field: str
) -> None:
    values = json.loads(json.dumps(record.to_dict()))
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(ConfigurationError, match=field):
        type(record).from_dict(values)


def test_a_missing_field_and_what_is_not_a_record_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"StepWindow\.steps is missing"):
        StepWindow.from_dict({"first_step": 0, "last_step": 1, "elapsed_s": 1.0, "wall_s": 1.0})
    with pytest.raises(ConfigurationError, match="expected the fields of Alert"):
        Alert.from_dict([])  # type: ignore[arg-type]


def test_a_number_that_json_cannot_write_comes_back_as_not_a_number() -> None:
    values = {**WINDOW.to_dict(), "elapsed_s": None}
    assert math.isnan(StepWindow.from_dict(values).elapsed_s)
