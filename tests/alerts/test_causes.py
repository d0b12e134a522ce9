"""Cause: each factor named with its figures and its share, and not where it did not change."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.alerts import AlertDetector, WindowFigures, attribute_loss, figures_of, mean_figures
from mfu_monitor.alerts.causes import CAUSES
from mfu_monitor.alerts.thresholds import AlertConfig
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

BEFORE = WindowFigures(
    step=100,
    first_step=1,
    steps=100,
    signal=0.45,
    label=("mfu", "bf16", 1, 1e14, False),
    mfu=0.45,
    step_s=1.00,
    data_wait_s=0.02,
    forward_s=0.30,
    backward_s=0.60,
    optimizer_s=0.05,
    other_s=0.03,
    gc_pause_s=0.01,
    h2d_copy_s=0.01,
    between_s=0.01,
    cpu_wait_s=0.0,
    model_flops=9e11,
    hardware_flops=1e12,
    recompute_flops=1e11,
    allocation_retries=0.0,
    padding_share=0.10,
    sm_clock_mhz=1980.0,
    temperature_c=60.0,
    rank_spread=0.02,
    slowest_rank=0,
    throttle_reasons=("sw_power_cap",),
)


def after(**changes: Any) -> WindowFigures:
    """The baseline's figures with some of them changed; the step's seconds follow from its parts."""
    changed = dataclasses.replace(BEFORE, **changes)
    parts = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "other_s", "compile_s")
    return dataclasses.replace(changed, step_s=sum(getattr(changed, part) or 0.0 for part in parts))


def shares(changed: WindowFigures) -> dict[str, float]:
    return {cause.name: cause.share_of_loss or 0.0 for cause in attribute_loss(BEFORE, changed)}


SINGLE_FAULTS = {
    "data_loading": {"data_wait_s": 0.32},
    "forward": {"forward_s": 0.60},
    "backward": {"backward_s": 0.90},
    "optimizer": {"optimizer_s": 0.35},
    "other": {"other_s": 0.33},
    "recompilation": {"compile_s": 0.30},
    "compute": {"forward_s": 0.40, "backward_s": 0.80},
    "garbage_collection": {"gc_pause_s": 0.31, "forward_s": 0.40, "backward_s": 0.75, "other_s": 0.08},
    "host_to_device_copy": {"h2d_copy_s": 0.31, "other_s": 0.33},
    "between_steps": {"between_s": 0.31, "other_s": 0.33},
    "cpu_contention": {"cpu_wait_s": 0.28, "forward_s": 0.40, "backward_s": 0.80},
    # 0.2e12 more FLOPs at 0.9 s for 1e12: 0.18 s expected.
    "recompute": {"recompute_flops": 3e11, "hardware_flops": 1.2e12, "backward_s": 0.78},
    # 0.95 s of computing times 1980 / 1410 - 1: 0.384 s expected.
    "clock_throttling": {
        "sm_clock_mhz": 1410.0,
        "temperature_c": 88.0,
        "throttle_reasons": ("sw_power_cap", "hw_thermal_slowdown"),
        "forward_s": 0.42,
        "backward_s": 0.84,
        "optimizer_s": 0.07,
    },
    "allocator_retries": {"allocation_retries": 0.5, "forward_s": 0.45, "backward_s": 0.75},
    "straggler": {"rank_spread": 0.40, "slowest_rank": 3, "backward_s": 0.95},
    "padding": {"padding_share": 0.40},
    "masking": {"model_flops": 6e11},
}


@pytest.mark.parametrize(("name", "fault"), SINGLE_FAULTS.items(), ids=SINGLE_FAULTS)
def test_a_single_fault_is_named_first_with_nearly_all_of_the_loss(name: str, fault: dict[str, Any]) -> None:
    found = shares(after(**fault))
    assert next(iter(found)) == name
    assert found[name] > 0.95
    assert sum(found.values()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("name", [name for name in CAUSES if name != "unknown"])
def test_every_cause_has_its_fault_here(name: str) -> None:
    assert name in SINGLE_FAULTS


@pytest.mark.parametrize(("name", "fault"), SINGLE_FAULTS.items(), ids=SINGLE_FAULTS)
def test_a_cause_that_did_not_change_is_not_named(name: str, fault: dict[str, Any]) -> None:
    """Each fault together with none of the other measured explanations: only the injected name may come out."""
    assert set(shares(after(**fault))) == {name}


def test_nothing_worse_means_no_cause() -> None:
    assert attribute_loss(BEFORE, BEFORE) == ()
    assert attribute_loss(BEFORE, after(forward_s=0.2)) == ()


def test_data_loading_says_both_figures() -> None:
    """A3: data wait from 2% to 25% of the step. 0.98 s of the rest: 0.98 / 0.75 * 0.25 = 0.3267 s of waiting."""
    [cause] = attribute_loss(BEFORE, after(data_wait_s=0.98 / 0.75 * 0.25))
    assert (cause.name, cause.before) == ("data_loading", 0.02)
    assert cause.after == pytest.approx(0.3267, abs=1e-4)
    assert cause.description == "waiting for data (2% -> 25% of the step)"


def test_two_faults_share_the_loss_by_their_seconds() -> None:
    found = shares(after(data_wait_s=0.22, optimizer_s=0.15))
    assert found == pytest.approx({"data_loading": 2 / 3, "optimizer": 1 / 3})


def test_padding_and_time_share_the_loss_by_their_logarithms() -> None:
    """Useful tokens fall to 0.6/0.9, the rate to 1/1.5: both ln 1.5."""
    found = shares(after(padding_share=0.40, data_wait_s=0.52))
    assert math.log(0.9 / 0.6) == pytest.approx(math.log(1.5))
    assert found == pytest.approx({"padding": 0.5, "data_loading": 0.5})


def test_what_no_part_holds_is_unknown() -> None:
    slower = dataclasses.replace(BEFORE, step_s=1.3)
    assert shares(slower) == pytest.approx({"unknown": 1.0})


def test_without_any_part_the_cause_is_unknown() -> None:
    names = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "other_s")
    nothing: dict[str, Any] = dict.fromkeys(names)
    found = attribute_loss(dataclasses.replace(BEFORE, **nothing), dataclasses.replace(BEFORE, **nothing, step_s=1.5))
    assert [(cause.name, cause.share_of_loss) for cause in found] == [("unknown", pytest.approx(1.0))]


def test_recompute_does_not_take_more_than_its_flops_allow() -> None:
    """0.1e12 more FLOPs: 0.09 s expected, 0.135 s at most; backward grew by 0.60 s."""
    found = shares(after(recompute_flops=2e11, hardware_flops=1.1e12, backward_s=1.20))
    assert found == pytest.approx({"backward": 0.465 / 0.6, "recompute": 0.135 / 0.6})


def test_a_wandering_clock_is_no_throttling() -> None:
    assert shares(after(sm_clock_mhz=1965.0, forward_s=0.40, backward_s=0.80)).keys() == {"compute"}


def test_a_reason_that_was_there_before_explains_nothing() -> None:
    """H100s run at their power cap all the time."""
    found = shares(after(sm_clock_mhz=None, throttle_reasons=("sw_power_cap",), forward_s=0.40, backward_s=0.80))
    assert found.keys() == {"compute"}


def test_throttling_names_the_reasons_and_the_temperature() -> None:
    [cause] = attribute_loss(BEFORE, after(**SINGLE_FAULTS["clock_throttling"]))
    assert cause.description == "a lower clock of the device (hw_thermal_slowdown, 88 °C)"
    assert (cause.before, cause.after, cause.unit) == (1980.0, 1410.0, "MHz")


def test_the_straggler_is_named_even_where_the_loss_is_explained_by_its_own_figures() -> None:
    """On the slow rank itself the data wait explains all; that it is this rank alone is still worth saying."""
    causes = attribute_loss(BEFORE, after(data_wait_s=0.42, rank_spread=0.40, slowest_rank=0))
    named = {cause.name: cause for cause in causes}
    assert "(rank 0)" in named["straggler"].description


def test_a_spread_that_was_there_before_is_no_straggler() -> None:
    assert "straggler" not in shares(after(backward_s=0.95, rank_spread=0.05))


TIMES = st.floats(0.001, 10.0)


@given(TIMES, TIMES, TIMES, TIMES, TIMES, st.floats(0.0, 0.9), st.floats(1e11, 1e13))
def test_shares_add_up_to_one(
    data: float, forward: float, backward: float, optimizer: float, other: float, padding: float, flops: float
) -> None:
    changed = after(
        data_wait_s=data,
        forward_s=forward,
        backward_s=backward,
        optimizer_s=optimizer,
        other_s=other,
        padding_share=padding,
        model_flops=flops,
    )
    causes = attribute_loss(BEFORE, changed)
    total = sum(cause.share_of_loss or 0.0 for cause in causes)
    assert not causes or total == pytest.approx(1.0, abs=0.0201)
    assert all(cause.name in CAUSES for cause in causes)
    listed = [cause.share_of_loss or 0.0 for cause in causes]
    assert listed == sorted(listed, reverse=True)


# Figures per step.


def window(**changes: Any) -> StepWindow:
    fields: dict[str, Any] = {"first_step": 1, "last_step": 10, "steps": 10, "elapsed_s": 5.0, "wall_s": 5.0}
    return StepWindow(**fields | {"model_flops": 10**13} | changes)


def test_figures_are_means_per_step() -> None:
    figures = figures_of(UtilizationReading(window=window(data_wait_s=1.0, tokens=50, allocation_retries=5), mfu=0.4))
    assert figures is not None
    assert (figures.step_s, figures.data_wait_s, figures.tokens, figures.model_flops) == (0.5, 0.1, 5.0, 1e12)
    assert (figures.allocation_retries, figures.signal) == (0.5, 0.4)


def test_the_padding_share_comes_from_the_tokens_where_it_is_not_given() -> None:
    figures = figures_of(UtilizationReading(window=window(tokens=16, tokens_not_padding=12), mfu=0.4))
    assert figures is not None
    assert (figures.padding_share, figures.signal) == (0.25, pytest.approx(0.3))


def test_means_are_weighted_by_steps_over_the_windows_that_know() -> None:
    short = dataclasses.replace(BEFORE, steps=10, step=200, data_wait_s=0.24, temperature_c=None, slowest_rank=1)
    mean = mean_figures([BEFORE, short])
    assert mean.data_wait_s == pytest.approx((100 * 0.02 + 10 * 0.24) / 110)
    assert (mean.temperature_c, mean.first_step, mean.step, mean.steps) == (60.0, 1, 200, 110)


def test_a_passing_throttle_reason_is_not_the_windows_reason() -> None:
    hot = dataclasses.replace(BEFORE, throttle_reasons=("hw_thermal_slowdown",))
    assert mean_figures([BEFORE, BEFORE, hot]).throttle_reasons == ("sw_power_cap",)


def test_figures_survive_plain_types() -> None:
    assert WindowFigures.from_dict(BEFORE.to_dict() | {"later": 1}) == BEFORE


def test_the_alert_names_data_loading_with_both_figures_end_to_end() -> None:
    """A3 through the detector: MFU falls as the wait rises from 2% to 25% of the step."""
    detector, found = AlertDetector(AlertConfig(warmup=0)), []
    for index in range(60):
        wait_s = 0.02 if index < 50 else 0.98 / 0.75 * 0.25
        step_s = 0.98 + wait_s
        parts = {"forward_s": 3.0, "backward_s": 6.0, "optimizer_s": 0.5, "other_s": 0.3, "data_wait_s": 10 * wait_s}
        seconds = {"elapsed_s": 10 * step_s, "wall_s": 10 * step_s}
        found += detector.update(UtilizationReading(window=window(**parts, **seconds), mfu=0.45 / step_s))
    [alert] = found
    assert "waiting for data (2% -> 25% of the step), 0.02 -> 0.327 s/step: 100% of the loss" in alert.message
    assert "num_workers" in alert.message


WITHOUT_PHASES = {
    "garbage_collection": {"gc_pause_s": 0.99},
    "between_steps": {"between_s": 0.99},
    "cpu_contention": {"cpu_wait_s": 0.98},
    "clock_throttling": {"sm_clock_mhz": 990.0},
    "allocator_retries": {"allocation_retries": 5.0},
    "straggler": {"rank_spread": 1.02, "slowest_rank": 3},
    "recompute": {"recompute_flops": 1.1e12, "hardware_flops": 2e12},
}


@pytest.mark.parametrize("name", WITHOUT_PHASES)
def test_a_cause_is_named_where_no_phase_is_marked(name: str) -> None:
    """A step of 1 s takes 2 s, and nothing says in which part: what was measured for itself explains it."""
    unmarked: dict[str, Any] = dict.fromkeys(("forward_s", "backward_s", "optimizer_s", "other_s"))
    before = dataclasses.replace(BEFORE, **unmarked, throttle_reasons=None)
    changed = dataclasses.replace(before, step_s=2.0, **WITHOUT_PHASES[name])
    first = attribute_loss(before, changed)[0]
    assert first.name == name
    assert (first.share_of_loss or 0.0) >= 0.9
