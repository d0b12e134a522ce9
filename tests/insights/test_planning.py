"""Plans from the published lessons to the digits given, and the identities between their three questions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import AttentionShape, Layers
from mfu_monitor.insights.planning import format_duration, plan_training, remaining_work, training_flops

H100_BF16 = 989.4e12
H100_FP8 = 1978.9e12
DAY_S = 86400.0


def attention(layers: int, width: int, length: int) -> AttentionShape:
    return AttentionShape(
        heads=1, qk_width=width, v_width=width, sequence_length=length, layers=(Layers(count=layers),)
    )


def test_70b_on_15t_tokens_takes_what_the_lesson_says() -> None:
    flops = training_flops(70e9, 15e12)
    assert flops == pytest.approx(6.3e24, rel=1e-12)  # 6 x 70e9 x 15e12
    plan = plan_training(flops, H100_BF16, mfu=0.40, devices=8192, price_per_device_hour=2.0)
    assert round(plan.device_hours / 1e6, 1) == 4.4
    assert plan.wall_clock_days is not None
    assert round(plan.wall_clock_days, 1) == 22.5
    assert plan.cost is not None
    assert round(plan.cost / 1e6, 1) == 8.8


def test_400b_on_8t_tokens_in_fp8_and_in_bf16_takes_what_the_lesson_says() -> None:
    flops = training_flops(400e9, 8e12)
    fp8 = plan_training(flops, H100_FP8, mfu=0.35, deadline_s=30 * DAY_S)
    assert round(fp8.device_hours / 1e6, 1) == 7.7
    assert fp8.devices is not None
    assert round(fp8.devices, -2) == 10_700
    assert round(plan_training(flops, H100_BF16, mfu=0.35).device_hours / 1e7, 2) == 1.54


def test_a_mixture_of_experts_costs_its_active_parameters() -> None:
    assert training_flops(37e9, 14.8e12) == pytest.approx(6 * 37e9 * 14.8e12)


def test_attention_adds_twelve_layers_width_and_keys_for_each_token() -> None:
    palm = attention(118, 48 * 256, 2048)
    assert palm.flops_per_token("palm") == 12 * 118 * 48 * 256 * 2048  # PaLM 540B, appendix B: 12 L H Q T
    exact = attention(2, 64, 7)
    assert exact.flops_per_token() == 12 * 2 * 64 * 4  # on average (7 + 1) / 2 keys
    assert training_flops(1e3, 10, exact.flops_per_token()) == pytest.approx(10 * (6e3 + 6144))


def test_exact_attention_is_the_sum_over_every_querys_keys() -> None:
    length, layers, width = 9, 3, 32
    forward = sum(2 * 2 * width * (query + 1) for query in range(length))  # two products, 2 FLOPs a multiply-add
    shape = attention(layers, width, length)
    assert shape.flops_per_token() * length == pytest.approx(3 * layers * forward)


def test_an_unknown_convention_is_refused() -> None:
    shape = attention(1, 1, 1)
    with pytest.raises(ConfigurationError, match="expected 'exact' or 'palm'"):
        shape.flops_per_token("dense")


_RATES = st.floats(1e12, 1e16)
_FLOPS = st.floats(1e18, 1e27)
_MFUS = st.floats(0.01, 1.0)


@given(_FLOPS, _RATES, _MFUS, st.integers(1, 100_000))
def test_wall_clock_gives_back_the_mfu(flops: float, rate: float, mfu: float, devices: int) -> None:
    plan = plan_training(flops, rate, mfu=mfu, devices=devices)
    assert plan.wall_clock_s is not None
    assert plan.wall_clock_s * rate * devices * mfu == pytest.approx(flops)
    assert plan_training(flops, rate, devices=devices, deadline_s=plan.wall_clock_s).mfu == pytest.approx(mfu)


@given(_FLOPS, _RATES, _MFUS, st.floats(3600, 1e8))
def test_the_devices_for_a_deadline_are_enough_and_one_less_is_not(
    flops: float, rate: float, mfu: float, deadline_s: float
) -> None:
    plan = plan_training(flops, rate, mfu=mfu, deadline_s=deadline_s)
    assert plan.devices is not None
    assert plan.devices_exact is not None
    assert plan.wall_clock_s is not None
    assert plan.wall_clock_s <= deadline_s * (1 + 1e-9)
    assert plan.devices - plan.devices_exact < 1
    if plan.devices > 1:
        fewer = plan_training(flops, rate, mfu=mfu, devices=plan.devices - 1).wall_clock_s
        assert fewer is not None
        assert fewer >= deadline_s * (1 - 1e-9)


def test_a_deadline_beyond_the_peak_is_answered_and_marked_impossible() -> None:
    plan = plan_training(2e15, 1e12, devices=1, deadline_s=1000.0)  # 2e15 FLOPs in 1e15 at peak
    assert plan.mfu == pytest.approx(2.0)
    assert not plan.is_possible
    assert plan_training(0.5e15, 1e12, devices=1, deadline_s=1000.0).is_possible


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mfu": 0.4, "devices": 8, "deadline_s": 1.0}, "two of them give the third"),
        ({"devices": 8}, "neither an MFU nor both devices and a deadline"),
        ({}, "neither an MFU"),
        ({"mfu": 1.2}, "mfu is 1.2; expected a fraction"),
        ({"mfu": 0.0}, "mfu is 0.0; expected a finite number above zero"),
        ({"mfu": math.nan}, "mfu is nan"),
        ({"mfu": 0.4, "devices": 0}, "devices is 0"),
        ({"mfu": 0.4, "price_per_device_hour": -2.0}, "price_per_device_hour is -2.0"),
    ],
)
def test_wrong_questions_are_refused_with_what_is_missing(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan_training(1e20, H100_BF16, **arguments)


@pytest.mark.parametrize(("parameters", "tokens"), [(0, 1e12), (7e9, -1), (math.inf, 1)])
def test_wrong_sizes_are_refused(parameters: float, tokens: float) -> None:
    with pytest.raises(ConfigurationError, match="expected a finite number above zero"):
        training_flops(parameters, tokens)


def test_the_rest_of_a_running_job_is_its_steps_at_the_present_pace() -> None:
    left = remaining_work(total_steps=1000, steps_done=400, seconds_per_step=6.0, devices=16, price_per_device_hour=2.5)
    assert left is not None
    assert left.steps == 600
    assert left.wall_clock_s == 3600.0
    assert left.device_hours == 16.0
    assert left.cost == 40.0
    assert left.text() == "600 steps left: 60.0 min, 16 device-hours, cost 40"
    assert left.metrics() == {"remaining/wall_clock_s": 3600.0, "remaining/device_hours": 16.0}


def test_a_job_that_is_done_has_nothing_left() -> None:
    left = remaining_work(total_steps=10, steps_done=12, seconds_per_step=1.0)
    assert left is not None
    assert (left.steps, left.wall_clock_s) == (0, 0.0)


@pytest.mark.parametrize(("total", "pace"), [(0, 1.0), (-1, 1.0), (10, 0.0), (10, math.nan), (10, math.inf)])
def test_an_unknown_total_or_pace_gives_no_estimate(total: int, pace: float) -> None:
    assert remaining_work(total_steps=total, steps_done=0, seconds_per_step=pace) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (90, "90 s"), (600, "10.0 min"), (3 * 3600, "3.0 h"), (22.5 * DAY_S, "22.5 days")],
)
def test_durations_are_told_in_the_unit_people_would_use(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
