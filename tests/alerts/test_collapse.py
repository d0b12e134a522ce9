"""Falls in noise proved by ranks, parts of the step that grow by themselves, messages that agree with themselves."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest

from mfu_monitor.alerts import Alert, AlertDetector
from mfu_monitor.alerts.messages import _seconds
from mfu_monitor.alerts.rank_tests import lies_below, rank_shift
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

PEAK, FLOPS, STEPS, SUSTAIN = 1e14, 10**13, 10, 6


def reading(index: int, mfu: float, wait_s: float = 0.002) -> UtilizationReading:
    """Ten steps of 1e12 FLOPs; the wait for data comes on top of what the MFU leaves."""
    rest_s = FLOPS / (mfu * PEAK)
    window = StepWindow(
        first_step=index * STEPS + 1,
        last_step=index * STEPS + STEPS,
        steps=STEPS,
        elapsed_s=rest_s + wait_s,
        wall_s=rest_s + wait_s,
        model_flops=FLOPS,
        hardware_flops=FLOPS,
        data_wait_s=wait_s,
        forward_s=0.4 * rest_s,
        backward_s=0.6 * rest_s,
    )
    mfu = FLOPS / ((rest_s + wait_s) * PEAK)
    return UtilizationReading(window=window, mfu=mfu, precision="bf16", peak_flops_per_s=PEAK)


def noisy(rng: random.Random, windows: int, noise: float, level: float = 0.4) -> list[float]:
    return [max(0.02, level * (1 + rng.gauss(0.0, noise))) for _ in range(windows)]


def alerts_of(levels: list[float], waits_s: list[float] | None = None) -> list[tuple[int, Alert]]:
    detector = AlertDetector()
    waits_s = waits_s or [0.002] * len(levels)
    return [
        (index, alert)
        for index, (mfu, wait_s) in enumerate(zip(levels, waits_s, strict=True))
        for alert in detector.update(reading(index, mfu, wait_s))
    ]


@pytest.mark.parametrize(("noise", "drop"), [(0.05, 0.3), (0.1, 0.3), (0.2, 0.5), (0.2, 0.8), (0.3, 0.5), (0.3, 0.8)])
def test_a_collapse_is_told_within_three_times_sustain_whatever_the_noise(noise: float, drop: float) -> None:
    rng = random.Random(3)
    for _ in range(12):
        levels = [mfu * (1 - drop if k >= 260 else 1.0) for k, mfu in enumerate(noisy(rng, 260 + 3 * SUSTAIN, noise))]
        found = alerts_of(levels)
        assert [alert.kind for _, alert in found] == ["drop"]
        assert found[0][0] >= 260


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_alone_is_no_collapse(noise: float) -> None:
    rng = random.Random(4)
    assert [alerts_of(noisy(rng, 600, noise)) for _ in range(5)] == [[]] * 5


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_irregular_slow_downs_are_told_within_two_long_windows(noise: float) -> None:
    rng = random.Random(5)
    levels = noisy(rng, 260 + 104, noise)
    for start in range(260, len(levels), 8):
        for index in rng.sample(range(start, start + 8), 5):
            levels[index] /= rng.uniform(1.6, 5.0)
    index, alert = alerts_of(levels)[0]
    assert 260 <= index < 260 + 100
    assert alert.kind in ("drop", "sag")


def test_a_part_that_grows_is_told_by_its_name_though_noise_hides_it_in_mfu() -> None:
    """A wait of 0.2 ms a step becomes 24 ms, in steps of 0.17 s that vary by a fifth."""
    rng = random.Random(6)
    levels = noisy(rng, 280, 0.2, level=0.06)
    waits_s = [0.002 if index < 260 else 0.24 for index in range(280)]
    [(index, alert)] = alerts_of(levels, waits_s)
    assert 260 <= index <= 275
    assert alert.causes[0].name == "data_loading"
    assert alert.message.startswith("Waiting for data grew from 200 us to 24 ms a step and costs ")
    assert alert.loss == pytest.approx(0.0238 / (0.1667 + 0.0238), abs=0.02)


def test_a_part_that_is_back_is_a_recovery() -> None:
    rng = random.Random(6)
    levels = noisy(rng, 340, 0.2, level=0.06)
    waits_s = [0.24 if 260 <= index < 290 else 0.002 for index in range(340)]
    assert [alert.kind for _, alert in alerts_of(levels, waits_s)] == ["drop", "recovery"]


def test_time_that_moves_from_one_part_to_another_is_no_loss() -> None:
    """The device's work is waited for in the data loader from window 260 on; the step takes as long as before."""
    detector, found = AlertDetector(), []
    for index in range(320):
        wait_s, rest_s = (0.02, 1.98) if index < 260 else (0.8, 1.2)
        window = StepWindow(
            first_step=index, last_step=index, steps=STEPS, elapsed_s=2.0, wall_s=2.0, model_flops=FLOPS,
            data_wait_s=wait_s, forward_s=0.4 * rest_s, backward_s=0.6 * rest_s,
        )  # fmt: skip
        found += detector.update(UtilizationReading(window=window, mfu=0.05, precision="bf16", peak_flops_per_s=PEAK))
    assert found == []


def test_every_message_agrees_with_its_own_levels() -> None:
    rng, seen = random.Random(8), 0
    for _ in range(40):
        noise, drop, slow = rng.uniform(0.005, 0.3), rng.uniform(0.15, 0.8), rng.choice([1, 60, 200])
        levels = noisy(rng, 420, noise)
        levels = [mfu * (1 - drop * min(1.0, max(0.0, (k - 150) / slow))) for k, mfu in enumerate(levels)]
        for _, alert in alerts_of(levels):
            if alert.kind not in ("drop", "sag"):
                continue
            seen += 1
            told, before, after = re.search(r"(\d+)%.*?: ([\d.]+)% -> ([\d.]+)%", alert.message).groups()  # type: ignore[union-attr]
            if "prove" not in alert.message:
                assert 100 * (1 - float(after) / float(before)) == pytest.approx(float(told), abs=2.0), alert.message
    assert seen >= 30


def test_the_rank_tests_are_exact() -> None:
    # Six windows below all of 100 happen in one of C(106, 6) = 1.7e9 orders; below all of 10 in one of 8,008.
    assert math.comb(106, 6) == 1_705_904_746
    assert lies_below([float(k) for k in range(1, 101)], [0.5] * 6)
    assert not lies_below([float(k) for k in range(1, 11)], [0.5] * 6)
    # Of 100 windows two may lie as low: C(8, 6) = 28 orders in 1.7e9; of all of them none may.
    assert lies_below([0.1, 0.2, *[1.0] * 98], [0.5] * 6)
    assert not lies_below([1.0] * 100, [1.0] * 6)
    # U = n m where all are lower: (50 * 18 - 450) / sqrt(50 * 18 * 69 / 12).
    assert rank_shift([1.0] * 50, [0.5] * 18) == pytest.approx(450 / math.sqrt(50 * 18 * 69 / 12))
    assert rank_shift([1.0] * 50, [1.0] * 18) == 0.0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0002, "200 us"), (0.024, "24 ms"), (1.5, "1.5 s"), (0.9999, "1 s"), (0.0, "0 us")]
)
def test_seconds_are_written_as_people_write_them(seconds: float, words: str) -> None:
    assert _seconds(seconds) == words


def test_a_state_with_a_grown_part_goes_on_after_a_resume() -> None:
    rng = random.Random(6)
    levels: list[Any] = noisy(rng, 340, 0.2, level=0.06)
    detector, kinds = AlertDetector(), []
    for index in range(340):
        if index == 285:
            state = detector.state_dict()
            detector = AlertDetector()
            detector.load_state_dict(state)
        wait_s = 0.24 if 260 <= index < 290 else 0.002
        kinds += [alert.kind for alert in detector.update(reading(index, levels[index], wait_s))]
    assert kinds == ["drop", "recovery"]
