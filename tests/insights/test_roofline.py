"""Every operator under the roof, against arithmetic written here: intensity, bound, ideal time, attainable MFU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import (
    RooflinePoint,
    attainable_mfu,
    group_points,
    operator_point,
    step_roofline,
)

# Round figures, so that every expected value can be followed by eye: ridge 100 FLOP/byte in bf16, 10 in fp32.
PEAK = DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 100e12, "fp32": 10e12}, bytes_per_s=1e12)
NO_BANDWIDTH = DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 100e12})


def product(model: int, moved: int, *, precision: str = "bf16", calls: int = 1, op: str = "aten::mm") -> OpRecord:
    return OpRecord(
        op=op,
        phase=Phase.FORWARD,
        precision=precision,
        calls=calls,
        totals=FlopTotals(model_flops=model, bytes_accessed=moved),
    )


def elementwise(moved: int) -> OpRecord:
    return OpRecord(op="aten::gelu", phase=Phase.FORWARD, totals=FlopTotals(bytes_accessed=moved))


def test_an_operator_above_the_ridge_is_bound_by_compute() -> None:
    point = operator_point(product(200 * 10**9, 10**9), PEAK)  # 200 FLOP/byte, ridge 100
    assert point.arithmetic_intensity == 200.0
    assert point.ridge_point == 100.0
    assert point.bound == "compute"
    assert point.attainable_flops_per_s == 100e12
    assert point.ideal_time_s == pytest.approx(200e9 / 100e12)


def test_an_operator_below_the_ridge_is_bound_by_memory() -> None:
    point = operator_point(product(50 * 10**9, 10**9), PEAK)  # 50 FLOP/byte
    assert point.bound == "memory"
    assert point.attainable_flops_per_s == 50 * 1e12
    assert point.ideal_time_s == pytest.approx(1e9 / 1e12)


def test_the_same_operator_changes_its_bound_with_its_precision() -> None:
    assert operator_point(product(50, 1, precision="fp32"), PEAK).bound == "compute"  # ridge 10 in fp32
    assert operator_point(product(50, 1, precision="bf16"), PEAK).bound == "memory"


def test_exactly_at_the_ridge_both_bounds_agree() -> None:
    point = operator_point(product(100 * 10**9, 10**9), PEAK)
    assert point.bound == "compute"
    assert point.compute_time_s == pytest.approx(point.memory_time_s)


def test_an_elementwise_operator_costs_its_bytes() -> None:
    point = operator_point(elementwise(2 * 10**9), PEAK)
    assert point.bound == "memory"
    assert point.attainable_flops_per_s == 0.0
    assert point.ideal_time_s == pytest.approx(2e-3)


def test_a_view_costs_nothing_and_has_no_bound() -> None:
    point = operator_point(elementwise(0), PEAK)
    assert point.ideal_time_s == 0.0
    assert point.bound is None
    assert point.arithmetic_intensity is None


def test_totals_over_calls_give_the_sum_of_the_calls() -> None:
    one = operator_point(product(3 * 10**9, 10**9), PEAK)
    many = operator_point(product(7 * 3 * 10**9, 7 * 10**9, calls=7), PEAK)
    assert many.ideal_time_s == pytest.approx(7 * one.ideal_time_s)  # type: ignore[operator]


def test_the_step_is_the_sum_of_its_operators_and_gives_the_attainable_mfu() -> None:
    record = StepRecord(ops=(product(200 * 10**9, 10**9), product(50 * 10**9, 10**9), elementwise(10**9)))
    roofline = step_roofline(record, PEAK)
    ideal_s = 2e-3 + 1e-3 + 1e-3
    assert roofline.ideal_time_s == pytest.approx(ideal_s)
    assert roofline.attainable_mfu == pytest.approx(250e9 / (ideal_s * 100e12))
    assert roofline.precision == "bf16"
    assert roofline.reason is None


def test_recompute_lowers_the_attainable_mfu_by_its_time() -> None:
    rerun = OpRecord(
        op="aten::mm", phase=Phase.RECOMPUTE, precision="bf16", totals=FlopTotals(recompute_flops=100 * 10**9)
    )
    record = StepRecord(ops=(product(300 * 10**9, 10**9), rerun))
    assert attainable_mfu(record, PEAK) == pytest.approx(3 / 4)


def test_a_run_as_fast_as_the_roof_allows_measures_the_attainable_mfu() -> None:
    record = StepRecord(ops=(product(200 * 10**9, 10**9), elementwise(10**9)))
    roofline = step_roofline(record, PEAK)
    assert roofline.ideal_time_s is not None
    assert roofline.attainable_mfu is not None
    measured_mfu = record.model_flops / (1.25 * roofline.ideal_time_s * 100e12)  # a quarter slower than ideal
    assert measured_mfu < roofline.attainable_mfu < 1


@given(st.lists(st.tuples(st.integers(1, 10**12), st.integers(1, 10**12)), min_size=1, max_size=8))
def test_attainable_mfu_is_a_fraction_in_one_precision(sizes: list[tuple[int, int]]) -> None:
    value = attainable_mfu(StepRecord(ops=tuple(product(f, b) for f, b in sizes)), PEAK)
    assert value is not None
    assert 0 < value <= 1 + 1e-12


@given(st.integers(1, 10**13), st.integers(1, 10**10))
def test_the_ideal_time_is_the_flops_over_the_attainable_rate(flops: int, moved: int) -> None:
    point = operator_point(product(flops, moved), PEAK)
    assert point.attainable_flops_per_s is not None
    assert point.ideal_time_s == pytest.approx(flops / point.attainable_flops_per_s)


@pytest.mark.parametrize(
    ("record", "peak", "words"),
    [
        (StepRecord(ops=(product(1, 1),)), None, "peak of this device is unknown"),
        (StepRecord(ops=(product(1, 1),)), NO_BANDWIDTH, "memory bandwidth of toy is unknown"),
        (StepRecord(ops=(product(1, 1, precision="fp64"),)), PEAK, "no dense peak of toy is known for fp64"),
        (StepRecord(ops=(product(9, 1), product(1, 1, precision="fp8"))), PEAK, "known for fp8"),
        (StepRecord(), PEAK, "no model FLOPs were counted"),
        (StepRecord(ops=(elementwise(4),)), PEAK, "no model FLOPs were counted"),
    ],
)
def test_what_is_unknown_is_none_with_the_reason(record: StepRecord, peak: DevicePeak | None, words: str) -> None:
    roofline = step_roofline(record, peak)
    assert roofline.attainable_mfu is None
    assert attainable_mfu(record, peak) is None
    assert words in (roofline.reason or "")


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_peak_that_cannot_be_is_unknown_and_never_a_division_by_zero(rate: float) -> None:
    peak = DevicePeak(device_name="broken", flops_per_s_by_precision={"bf16": rate}, bytes_per_s=rate)
    assert step_roofline(StepRecord(ops=(product(1, 1),)), peak).attainable_mfu is None


def test_without_bandwidth_a_product_still_has_its_compute_time() -> None:
    point = operator_point(product(100 * 10**9, 10**9), NO_BANDWIDTH)
    assert point.compute_time_s == pytest.approx(1e-3)
    assert point.ideal_time_s is None
    assert point.bound is None


def test_the_active_precision_is_the_one_with_most_model_flops() -> None:
    record = StepRecord(ops=(product(70, 1, precision="fp8"), product(20, 1), product(10, 1)))
    assert record.active_precision == "fp8"
    assert StepRecord(ops=(elementwise(1),)).active_precision is None


def test_groups_add_up_and_are_bound_by_where_their_time_goes() -> None:
    points = step_roofline(
        StepRecord(ops=(product(200 * 10**9, 10**9), product(10**9, 10**9, op="aten::bmm"), elementwise(3 * 10**9))),
        PEAK,
    ).points
    groups = group_points(points, lambda point: point.op)
    assert list(groups) == ["aten::mm", "aten::bmm", "aten::gelu"]
    assert groups["aten::mm"].bound == "compute"
    assert groups["aten::gelu"].bound == "memory"
    whole = group_points(points, lambda _: "step")["step"]
    assert whole.hardware_flops == 201 * 10**9
    assert whole.bytes_accessed == 5 * 10**9
    assert whole.ideal_time_s == pytest.approx(2e-3 + 1e-3 + 3e-3)
    assert whole.bound == "memory"  # 4 of 6 ms


def test_a_point_can_be_made_by_hand() -> None:
    point = RooflinePoint(
        op="mm", hardware_flops=2 * 4096**3, bytes_accessed=3 * 4096**2 * 2, peak_flops_per_s=989.4e12,
        peak_bytes_per_s=3.35e12,
    )  # fmt: skip
    assert point.arithmetic_intensity == pytest.approx(4096 / 3)
    assert point.bound == "compute"


def test_every_counted_product_and_every_elementwise_operator_has_its_bytes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 16), nn.LayerNorm(16))
    with FlopCounter(model) as counter:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    points = step_roofline(counter.record, PEAK).points
    assert all(point.bytes_accessed for point in points if point.hardware_flops)
    moved = {point.op: point.bytes_accessed for point in points if point.phase is Phase.FORWARD}
    assert moved["aten::gelu"] == 2 * (2 * 8 * 6 * 6) * 4  # read once, written once, 4 bytes each
