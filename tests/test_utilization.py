"""Readings from windows and peaks: hand-made numbers in, hand-derived numbers out."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading, metrics_of, read_utilization

PEAK = DevicePeak(
    device_name="test device",
    flops_per_s_by_precision={"bf16": 1000.0, "fp32": 100.0, "fp8": 2000.0},
    bytes_per_s=10.0,
    source="user",
)


def window(**changes: Any) -> StepWindow:
    """Ten steps in 2 s: 800 model and 1000 hardware FLOPs in bf16, 40 tokens, 20 samples."""
    values: dict[str, Any] = {
        "first_step": 10,
        "last_step": 19,
        "steps": 10,
        "elapsed_s": 2.0,
        "wall_s": 3.0,
        "model_flops": 800,
        "hardware_flops": 1000,
        "recompute_flops": 200,
        "palm_model_flops": 1200,
        "model_flops_by_precision": {"bf16": 800},
        "hardware_flops_by_precision": {"bf16": 1000},
        "tokens": 40,
        "samples": 20,
    }
    return StepWindow(**{**values, **changes})


def test_mfu_and_hfu_are_flops_over_time_and_peak() -> None:
    reading = read_utilization(window(), PEAK)
    assert reading.mfu == 800 / (2.0 * 1000)
    assert reading.hfu == 1000 / (2.0 * 1000)
    assert reading.mfu_palm == pytest.approx(1200 / (2.0 * 1000))
    assert reading.reason is None


def test_the_palm_convention_changes_mfu_only() -> None:
    reading = read_utilization(window(), PEAK, convention="palm")
    assert reading.mfu == pytest.approx(1200 / 2000)
    assert reading.hfu == 1000 / 2000
    assert reading.convention == "palm"


def test_a_reading_names_its_peak_and_where_it_comes_from() -> None:
    reading = read_utilization(window(), PEAK)
    assert (reading.peak_flops_per_s, reading.peak_source, reading.peak_is_dense) == (1000.0, "user", True)
    assert (reading.precision, reading.device_name, reading.peak_bytes_per_s) == ("bf16", "test device", 10.0)
    assert (reading.first_step, reading.last_step, reading.elapsed_s) == (10, 19, 2.0)


def test_rates_are_per_second_of_the_window() -> None:
    reading = read_utilization(window(), PEAK)
    assert (reading.tokens_per_s, reading.device_tokens_per_s) == (20.0, 20.0)
    assert (reading.samples_per_s, reading.device_samples_per_s) == (10.0, 10.0)
    assert (reading.device_model_flops_per_s, reading.device_hardware_flops_per_s) == (400.0, 500.0)


def test_micro_batches_of_one_optimizer_step_all_count() -> None:
    micro_batches = window(steps=8, elapsed_s=2.0, tokens=8 * 1024)
    assert read_utilization(micro_batches, PEAK).tokens_per_s == 8 * 1024 / 2.0


class TestUnknown:
    """What cannot be known is None, with a reason that says what to do."""

    @pytest.mark.parametrize(
        ("changes", "peak", "words"),
        [
            ({"elapsed_s": 0.0}, PEAK, "time is 0.0 s"),
            ({"elapsed_s": -1.0}, PEAK, "time is -1.0 s"),
            ({"elapsed_s": math.nan}, PEAK, "time is nan s"),
            ({"elapsed_s": math.inf}, PEAK, "time is inf s"),
            ({"world_size": 0}, PEAK, "world size is 0"),
            ({}, None, "pass peak=<FLOP/s> or peak='measure'"),
            ({}, DevicePeak(device_name="x", flops_per_s_by_precision={"bf16": 0.0}), "no usable bf16 peak"),
            ({}, DevicePeak(device_name="x", flops_per_s_by_precision={"fp32": 1.0}), "no usable bf16 peak"),
            ({"model_flops": None}, PEAK, "was counted"),
            ({"model_flops_by_precision": {}}, PEAK, "no product was counted"),
            ({"model_flops": 0, "model_flops_by_precision": {}}, None, "no product was counted"),
            ({"world_size": 2}, PEAK, "other 1 ranks"),
            ({"invalid_reason": "the clock went back"}, PEAK, "the clock went back"),
        ],
    )
    def test_no_mfu_and_a_reason_instead_of_an_exception_or_a_zero(
        self, changes: dict[str, Any], peak: DevicePeak | None, words: str
    ) -> None:
        reading = read_utilization(window(**changes), peak)
        assert reading.mfu is None
        assert reading.hfu is None
        assert reading.mfu_palm is None
        assert words in str(reading.reason)

    def test_rates_stay_known_without_a_peak(self) -> None:
        metrics = metrics_of(read_utilization(window(), None))
        assert metrics["throughput/device/model_flops_per_s"] == 400.0
        assert not any(name.startswith("utilization/") for name in metrics)

    def test_no_rate_is_made_of_no_time(self) -> None:
        reading = read_utilization(window(elapsed_s=0.0), PEAK)
        assert reading.tokens_per_s is None
        assert reading.device_model_flops_per_s is None

    def test_an_invalid_window_gives_no_step_time(self) -> None:
        metrics = metrics_of(read_utilization(window(elapsed_s=0.0, invalid_reason="clock"), PEAK))
        assert not any(name.startswith("step_time/") for name in metrics)

    @given(
        elapsed_s=st.floats(allow_nan=True, allow_infinity=True),
        flops=st.none() | st.integers(min_value=0, max_value=10**30),
        rate=st.none() | st.floats(allow_nan=True, allow_infinity=True),
        world=st.integers(min_value=-1, max_value=3),
    )
    def test_any_figures_give_a_reading(
        self, elapsed_s: float, flops: int | None, rate: float | None, world: int
    ) -> None:
        peak = None if rate is None else DevicePeak(device_name="x", flops_per_s_by_precision={"bf16": rate})
        by_precision = {"bf16": flops} if flops else {}
        changes = {"elapsed_s": elapsed_s, "model_flops": flops, "world_size": world}
        reading = read_utilization(window(**changes, model_flops_by_precision=by_precision), peak)
        assert (reading.mfu is None) == (reading.reason is not None)
        assert all(math.isfinite(value) for value in metrics_of(reading).values())


class TestMixedPrecision:
    """The weighted reading: each precision's FLOPs at its own peak."""

    def test_above_one_percent_each_precision_counts_at_its_own_peak(self) -> None:
        mixed = window(
            model_flops_by_precision={"bf16": 700, "fp32": 100},
            hardware_flops_by_precision={"bf16": 900, "fp32": 100},
        )
        reading = read_utilization(mixed, PEAK)
        assert reading.mfu == 800 / (2 * 1000)
        assert reading.mfu_weighted == pytest.approx((700 / 1000 + 100 / 100) / 2.0)
        assert reading.hfu_weighted == pytest.approx((900 / 1000 + 100 / 100) / 2.0)

    def test_at_one_percent_no_weighted_reading_is_given(self) -> None:
        mixed = window(
            model_flops_by_precision={"bf16": 792, "fp32": 8},
            hardware_flops_by_precision={"bf16": 990, "fp32": 10},
        )
        assert read_utilization(mixed, PEAK).mfu_weighted is None

    def test_seven_tenths_fp8_on_an_h100_is_weighted_by_a_peak_of_1522(self) -> None:
        peak = DevicePeak(device_name="x", flops_per_s_by_precision={"fp8": 1979e12, "bf16": 989.5e12})
        mixed = {"fp8": 7 * 10**14, "bf16": 3 * 10**14}
        reading = read_utilization(
            window(
                model_flops=10**15,
                hardware_flops=10**15,
                model_flops_by_precision=mixed,
                hardware_flops_by_precision=mixed,
                elapsed_s=1.0,
            ),
            peak,
        )
        assert reading.mfu_weighted == pytest.approx(1000 / 1522, rel=1e-3)

    def test_precisions_mixed_in_what_ran_alone_are_weighted_too(self) -> None:
        recomputed_in_fp32 = window(
            model_flops_by_precision={"bf16": 800},
            hardware_flops_by_precision={"bf16": 900, "fp32": 100},
        )
        reading = read_utilization(recomputed_in_fp32, PEAK)
        assert reading.mfu_weighted == pytest.approx(800 / 1000 / 2.0)
        assert reading.hfu_weighted == pytest.approx((900 / 1000 + 100 / 100) / 2.0)

    def test_a_precision_without_a_peak_leaves_the_weighted_reading_unknown(self) -> None:
        mixed = window(model_flops_by_precision={"bf16": 700, "fp64": 100})
        assert read_utilization(mixed, PEAK).mfu_weighted is None

    def test_products_of_unknown_precision_leave_it_unknown(self) -> None:
        assert read_utilization(window(model_flops_by_precision={"bf16": 700}), PEAK).mfu_weighted is None

    def test_the_active_precision_carries_the_most_model_flops(self) -> None:
        assert window(model_flops_by_precision={"fp32": 3, "bf16": 5}).active_precision == "bf16"
        assert window(model_flops_by_precision={"fp32": 0}).active_precision is None


def test_a_world_is_read_by_its_sums() -> None:
    world = window(
        world_size=2,
        world_model_flops=1500,
        world_hardware_flops=1900,
        world_tokens=75,
        world_samples=38,
        world_peak_flops_per_s=1500.0,
    )
    reading = read_utilization(world, PEAK)
    assert reading.mfu == 1500 / (2.0 * 1500)
    assert reading.hfu == 1900 / (2.0 * 1500)
    assert (reading.tokens_per_s, reading.device_tokens_per_s) == (37.5, 20.0)


def test_the_worlds_rates_are_over_the_slowest_ranks_seconds_and_this_ranks_over_its_own() -> None:
    world = window(world_size=2, world_model_flops=1500, world_tokens=75, world_peak_flops_per_s=1500.0,
                   world_palm_model_flops=1800, world_elapsed_s=2.5, world_steps=10)  # fmt: skip
    reading = read_utilization(world, PEAK)
    assert (reading.mfu, reading.mfu_palm) == (1500 / (2.5 * 1500), pytest.approx(1800 / (2.5 * 1500)))
    assert (reading.tokens_per_s, reading.device_tokens_per_s, reading.elapsed_s) == (30.0, 20.0, 2.5)


@pytest.mark.parametrize(
    ("lower", "sampled", "expected"),
    [
        (False, False, "exact"),
        (True, False, "lower_bound"),
        (False, True, "sampled"),
        (True, True, "lower_bound+sampled"),
    ],
)
def test_exactness_is_said(lower: bool, sampled: bool, expected: str) -> None:
    assert read_utilization(window(is_lower_bound=lower, is_sampled=sampled), PEAK).exactness == expected


class TestMetricNames:
    """The public names, and what each holds."""

    def test_flops_and_times_are_means_per_step(self) -> None:
        metrics = metrics_of(read_utilization(window(data_wait_s=0.5, forward_s=0.4), PEAK))
        assert metrics["flops_per_step/model"] == 80
        assert metrics["flops_per_step/hardware"] == 100
        assert metrics["flops_per_step/recompute"] == 20
        assert metrics["step_time/total_s"] == pytest.approx(0.2)
        assert metrics["step_time/data_wait_s"] == pytest.approx(0.05)
        assert metrics["step_time/forward_s"] == pytest.approx(0.04)
        assert "step_time/backward_s" not in metrics

    def test_fractions_are_not_percent(self) -> None:
        reading = read_utilization(window(), PEAK, goodput_mfu=0.25, attainable_mfu=0.75)
        metrics = metrics_of(reading)
        assert (metrics["utilization/mfu"], metrics["utilization/hfu"]) == (0.4, 0.5)
        assert (metrics["utilization/goodput_mfu"], metrics["utilization/attainable_mfu"]) == (0.25, 0.75)

    def test_the_share_of_the_best_measured_product_has_a_name_of_its_own(self) -> None:
        reading = read_utilization(window(), PEAK, achievable_flops_per_s=500.0)  # 400 FLOP/s, of a peak of 1000
        metrics = metrics_of(reading)
        assert (metrics["utilization/mfu"], metrics["utilization/of_measured_peak"]) == (0.4, 0.8)
        assert "utilization/of_measured_peak" not in metrics_of(read_utilization(window(), PEAK))
        measured = dataclasses.replace(reading, peak_source="measured")
        assert "utilization/of_measured_peak" not in metrics_of(measured)

    def test_throughput_monitor_names_for_one_device(self) -> None:
        metrics = metrics_of(read_utilization(window(), PEAK), names="throughput_monitor")
        assert metrics == {
            "train/device/mfu": 0.4,
            "train/device/flops_per_sec": 400.0,
            "train/device/items_per_sec": 20.0,
            "train/device/samples_per_sec": 10.0,
            "train/device/batches_per_sec": 5.0,
        }

    def test_throughput_monitor_names_of_the_world_appear_with_more_than_one_rank(self) -> None:
        world = window(world_size=2, world_model_flops=1600, world_tokens=80, world_samples=40)
        metrics = metrics_of(read_utilization(world, PEAK), names="throughput_monitor")
        assert metrics["train/flops_per_sec"] == 800.0
        assert metrics["train/items_per_sec"] == 40.0
        assert metrics["train/samples_per_sec"] == 20.0
        assert metrics["train/batches_per_sec"] == 10.0


def test_a_reading_survives_json() -> None:
    reading = read_utilization(window(excluded_s={"validation": 5.0}), PEAK)
    assert UtilizationReading.from_dict(json.loads(json.dumps(reading.to_dict()))) == reading


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        ({}, "exact"),
        ({"counts_label": "presumed"}, "presumed"),
        ({"counts_label": "exact", "is_lower_bound": True}, "lower_bound"),
        ({"counts_label": "presumed", "is_lower_bound": True}, "lower_bound"),
        ({"counts_label": "sampled", "is_lower_bound": True}, "lower_bound+sampled"),
        ({"counts_label": "upper_bound", "is_lower_bound": True}, "upper_bound"),
        ({"counts_label": "exact", "model_flops": None}, "unknown"),
    ],
)
def test_a_label_is_never_better_than_what_is_known(flags: dict[str, Any], label: str) -> None:
    assert read_utilization(window(**flags), None).exactness == label


@pytest.mark.parametrize(
    ("own", "weakest", "label"),
    [
        ("exact", "exact", "upper_bound"),
        ("presumed", "exact", "upper_bound"),
        ("exact", "presumed", "upper_bound"),
        ("exact", "sampled", "upper_bound+sampled"),
        ("exact", "lower_bound", "unknown"),
        ("lower_bound", "lower_bound", "unknown"),
        ("exact", "unknown", "unknown"),
        ("exact", None, "unknown"),
    ],
)
def test_no_sum_over_ranks_is_exact_while_repeated_work_is_not_known(own: str, weakest: str | None, label: str) -> None:
    world = window(world_size=2, world_model_flops=1600, counts_label=own, world_counts_label=weakest)
    reading = read_utilization(world, PEAK)
    assert reading.exactness == label
    assert (reading.not_known is None) == (weakest is None)
    assert weakest is None or ("either side" in str(reading.not_known)) == (label == "unknown")


@pytest.mark.parametrize(
    ("weakest", "label"),
    [
        ("exact", "exact"),
        ("presumed", "presumed"),
        ("sampled", "sampled"),
        ("lower_bound", "lower_bound"),
        ("unknown", "unknown"),
        (None, "unknown"),
    ],
)
def test_where_ranks_were_compared_the_world_is_as_sure_as_its_weakest_rank(weakest: str | None, label: str) -> None:
    world = window(world_size=2, world_model_flops=1600, counts_label="exact", world_counts_label=weakest)
    compared = dataclasses.replace(world, world_repeats_known=True)
    reading = read_utilization(compared, PEAK)
    assert (reading.exactness, reading.not_known) == (label, None)


def test_a_world_of_one_repeats_nothing() -> None:
    assert read_utilization(window(), PEAK).not_known is None


@pytest.mark.parametrize(
    ("elapsed_s", "rate", "flops"),
    [(1e-166, 1e-166, 600), (1e-300, 1e300, 10**400), (1e-308, 1e308, 10**308), (5e-324, 1.0, 600), (1.0, 5e-324, 6)],
)
def test_arithmetic_at_the_edges_gives_none_and_a_reason(elapsed_s: float, rate: float, flops: int) -> None:
    edge = window(
        elapsed_s=elapsed_s, model_flops=flops, hardware_flops=flops, palm_model_flops=flops,
        model_flops_by_precision={"bf16": flops}, hardware_flops_by_precision={"bf16": flops},
    )  # fmt: skip
    reading = read_utilization(edge, DevicePeak(device_name="x", flops_per_s_by_precision={"bf16": rate}))
    for value in (reading.mfu, reading.hfu, reading.mfu_palm):
        assert value is None or 0 <= value < float("inf")
    assert (reading.mfu is None) == (reading.reason is not None)
    metrics_of(reading)
