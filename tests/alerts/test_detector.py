"""Detection: one alert an incident, none without one, and a change is not a drop."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfu_monitor.alerts import Alert, AlertConfig, AlertDetector, CauseShare
from mfu_monitor.alerts.changes import is_other_kind
from mfu_monitor.alerts.figures import figures_of
from mfu_monitor.alerts.levels import Level, drop_boundary, robust_level, sag_boundary, steadiness
from mfu_monitor.alerts.messages import floor_message
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

PEAK = 100e12
FLOPS_PER_STEP = 10**12
STEPS = 10
QUIET = AlertConfig(warmup=0)


def window_reading(index: int, mfu: float, **changes: Any) -> UtilizationReading:
    """One window of ten steps of 1e12 FLOPs at the given MFU; seconds follow: 1e13 / (mfu * 1e14)."""
    steps = changes.pop("steps", STEPS)
    flops = changes.pop("flops", FLOPS_PER_STEP) * steps
    elapsed_s = flops / (mfu * PEAK)
    parts = {"data_wait_s": 0.02, "forward_s": 0.30, "backward_s": 0.60, "optimizer_s": 0.05, "other_s": 0.03}
    fields: dict[str, Any] = {
        "first_step": index * STEPS + 1,
        "last_step": index * STEPS + STEPS,
        "steps": steps,
        "elapsed_s": elapsed_s,
        "wall_s": elapsed_s,
        "model_flops": flops,
        "hardware_flops": flops,
        **{name: share * elapsed_s for name, share in parts.items()},
    }
    reading = {"mfu": mfu, "precision": "bf16", "peak_flops_per_s": PEAK}
    for name in reading.keys() & changes.keys():
        reading[name] = changes.pop(name)
    return UtilizationReading(window=StepWindow(**fields | changes), **reading)


def _with(reading: UtilizationReading, **changes: Any) -> UtilizationReading:
    """The reading with other figures, of its window where they are the window's."""
    own = {name: changes.pop(name) for name in ("mfu",) if name in changes}
    return dataclasses.replace(reading, window=dataclasses.replace(reading.window, **changes), **own)


def noisy(level: float, count: int, *, seed: int = 0, sigma: float = 0.01) -> list[float]:
    rng = random.Random(seed)
    return [level + rng.gauss(0.0, sigma) for _ in range(count)]


def feed(
    detector: AlertDetector, levels: Iterable[float], *, start: int = 0, **changes: Any
) -> list[tuple[int, Alert]]:
    """Every notice, with the index of the window that led to it."""
    found = []
    for index, mfu in enumerate(levels, start=start):
        found += [(index, alert) for alert in detector.update(window_reading(index, mfu, **changes))]
    return found


def kinds(notices: Sequence[tuple[int, Alert]]) -> list[str]:
    return [alert.kind for _, alert in notices]


def test_a_drop_is_told_once_within_a_few_windows_and_recovers_once() -> None:
    """A1: 0.45 +- 0.01 for 200 windows, then 0.36; then back."""
    detector = AlertDetector()
    notices = feed(detector, [*noisy(0.45, 200), *noisy(0.36, 100, seed=1)])
    assert kinds(notices) == ["drop"]
    index, alert = notices[0]
    assert 200 + 5 <= index <= 200 + 7
    assert alert.mfu == pytest.approx(0.36, abs=0.01)
    assert alert.baseline == pytest.approx(0.45, abs=0.005)
    assert alert.loss == pytest.approx(0.20, abs=0.03)
    assert alert.first_step == 200 * STEPS + 1
    assert detector.active
    back = feed(detector, noisy(0.45, 100, seed=2), start=300)
    assert kinds(back) == ["recovery"]
    assert back[0][0] <= 312
    assert back[0][1].incident == alert.incident
    assert not detector.active


@pytest.mark.parametrize("dip", [[0.20], [0.20, 0.05], [0.3, 0.3, 0.3], [0.02] * 5])
def test_a_dip_of_a_few_windows_is_no_drop(dip: list[float]) -> None:
    """A2: one single window at 0.20; its neighbours, two and three."""
    assert feed(AlertDetector(), [*noisy(0.45, 100), *dip, *noisy(0.45, 100, seed=1)]) == []


@pytest.mark.parametrize("later", [0.22, 0.045, 0.0045])
def test_a_deep_drop_is_a_drop_and_no_recurring_dip(later: float) -> None:
    [(index, alert)] = feed(AlertDetector(), [*noisy(0.45, 150), *[later] * 50])
    assert index == 155
    assert alert.message.startswith("MFU fell by")


def test_the_message_says_what_was_seen_how_much_and_where() -> None:
    [(_, alert)] = feed(AlertDetector(QUIET), [0.45] * 30 + [0.36] * 6)
    assert alert.message.startswith("MFU fell by 20%: 45.0% -> 36.0% (steps 301-360). Cause: ")
    assert "Next: " in alert.message


def test_a_drop_less_than_asked_for_is_not_told() -> None:
    assert feed(AlertDetector(AlertConfig(drop=0.10, warmup=0)), [0.50] * 50 + [0.485] * 200) == []
    assert kinds(feed(AlertDetector(AlertConfig(drop=0.03, warmup=0)), [0.50] * 50 + [0.484] * 20)) == ["drop"]


@pytest.mark.parametrize("level", [0.45, 0.1, 0.6, 1 / 3])
def test_a_drop_of_exactly_what_was_asked_for_is_told_also_without_any_noise(level: float) -> None:
    [(index, alert)] = feed(AlertDetector(), [level] * 50 + [0.9 * level] * 60)
    assert (index, alert.kind) == (55, "drop")


def test_a_further_drop_is_another_incident_and_one_recovery_ends_both() -> None:
    levels = [0.45] * 50 + [0.36] * 50 + [0.18] * 50 + [0.45] * 50
    notices = feed(AlertDetector(QUIET), levels)
    assert kinds(notices) == ["drop", "drop", "recovery"]
    assert [alert.incident for _, alert in notices] == [1, 2, 1]


def test_a_further_drop_soon_after_is_told_when_the_cooldown_is_over() -> None:
    levels = [0.45] * 50 + [0.36] * 15 + [0.18] * 50
    notices = feed(AlertDetector(AlertConfig(warmup=0, cooldown=20)), levels)
    assert [(index, alert.kind) for index, alert in notices] == [(55, "drop"), (75, "drop")]


def test_nothing_is_told_in_the_cooldown_after_a_recovery() -> None:
    config = AlertConfig(warmup=0, cooldown=40)
    up, down = [0.45] * 30, [0.30] * 15
    # Recovered at the latest 12 windows after coming back; the second fall lies in the 40 windows after that.
    notices = feed(AlertDetector(config), [*up, *down, *[0.45] * 20, *down, *[0.45] * 60])
    assert kinds(notices) == ["drop", "recovery"]
    assert kinds(feed(AlertDetector(config), [*up, *down, *[0.45] * 20, *[0.30] * 60])) == ["drop", "recovery", "drop"]


def test_a_level_between_drop_and_recovery_neither_repeats_nor_recovers() -> None:
    """Hysteresis: 0.45 -> 0.36, then 0.425 (5.6% below) is no recovery and no new alert."""
    assert kinds(feed(AlertDetector(QUIET), [0.45] * 50 + [0.36] * 30 + [0.425] * 300)) == ["drop"]


def test_a_noisy_run_recovers_too() -> None:
    """With 8% of noise a median of 12 windows is often 3% low; half of the loss made good is back all the same."""
    notices = feed(
        AlertDetector(QUIET),
        [*noisy(0.45, 60, sigma=0.036), *noisy(0.15, 60, seed=1, sigma=0.012), *noisy(0.44, 60, seed=2, sigma=0.036)],
    )
    assert kinds(notices) == ["drop", "recovery"]
    assert notices[1][0] <= 120 + 12


def test_a_slow_sag_is_told_once_by_the_long_level() -> None:
    sag = [level * (1 - 0.10 * min(1.0, k / 2000)) for k, level in enumerate(noisy(0.45, 2400))]
    notices = feed(AlertDetector(), noisy(0.45, 100, seed=1) + sag)
    assert kinds(notices) == ["sag"]
    alert = notices[0][1]
    assert "declined gradually by" in alert.message
    # told by a fall of 0.7 of the drop between medians of 50 windows, of a slope that takes 200 windows for 1%
    assert alert.loss is not None
    assert 0.07 < alert.loss < 0.09
    assert alert.before is not None
    assert alert.after is not None
    assert alert.loss == pytest.approx(1 - alert.after / alert.before, abs=0.005)
    assert f"declined gradually by {alert.loss:.0%}" in alert.message


def test_slow_windows_that_keep_coming_back_are_told_though_the_median_holds() -> None:
    """From window 150 on every fifth window takes four times as long, all of it waiting for data."""
    detector, notices = AlertDetector(QUIET), []
    for index in range(400):
        slow = index >= 150 and index % 5 == 0
        reading = window_reading(index, 0.45)
        if slow:
            base_s = reading.elapsed_s
            reading = window_reading(
                index,
                0.45 / 4,
                forward_s=0.3 * base_s,
                backward_s=0.6 * base_s,
                optimizer_s=0.05 * base_s,
                other_s=0.03 * base_s,
                data_wait_s=3.02 * base_s,
            )
        notices += [(index, alert) for alert in detector.update(reading)]
    assert kinds(notices) == ["drop"]
    alert = notices[0][1]
    assert "keep coming back" in alert.message
    assert alert.causes[0].name == "data_loading"


def test_dips_that_were_there_from_the_start_are_the_baseline() -> None:
    levels = [0.20 if index % 20 < 2 else mfu for index, mfu in enumerate(noisy(0.45, 600))]
    assert feed(AlertDetector(), levels) == []


def test_the_floor_is_told_whatever_the_baseline_was() -> None:
    detector = AlertDetector(AlertConfig(floor=0.30, warmup=0))
    notices = feed(detector, [0.25] * 60)
    assert kinds(notices) == ["floor"]
    assert "MFU 25.0% is below the floor of 30.0%" in notices[0][1].message
    assert kinds(feed(detector, [0.305] * 40, start=60)) == []
    assert kinds(feed(detector, [0.40] * 40, start=100)) == ["recovery"]


def test_no_floor_no_floor_alert() -> None:
    assert feed(AlertDetector(QUIET), [0.01] * 100) == []


def test_warm_up_is_not_judged_and_no_part_of_the_baseline() -> None:
    assert feed(AlertDetector(AlertConfig(warmup=10)), [0.9] * 10 + [0.45] * 100) == []
    assert kinds(feed(AlertDetector(AlertConfig(warmup=0, min_baseline=10)), [0.9] * 10 + [0.45] * 100)) == ["drop"]


def test_windows_without_a_reading_are_left_out() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 30)
    empty = UtilizationReading(window=StepWindow(first_step=1, last_step=1, steps=0, elapsed_s=0.0, wall_s=9.0))
    assert all(detector.update(empty) == () for _ in range(50))
    assert kinds(feed(detector, [0.36] * 6, start=30)) == ["drop"]


def test_a_longer_validation_is_no_drop() -> None:
    """Its seconds are in ``wall_s`` and ``excluded_s`` only."""
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50)
    assert feed(detector, [0.45] * 50, start=50, wall_s=900.0, excluded_s={"validation": 800.0}) == []


def test_windows_cut_short_by_an_epochs_end_are_not_judged() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 30)
    for index in range(30, 60):
        steps = 2 if index % 3 == 0 else STEPS
        assert detector.update(window_reading(index, 0.20 if steps == 2 else 0.45, steps=steps)) == ()


def test_shorter_windows_for_good_are_judged_again() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 30)
    assert kinds(feed(detector, [0.30] * 30, start=30, steps=2)) == ["drop"]


# Changes.


def test_other_flops_per_step_are_a_change_and_start_a_new_baseline() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50, tokens=1000 * STEPS)
    notices = feed(detector, [0.36] * 100, start=50, flops=2 * FLOPS_PER_STEP, tokens=2000 * STEPS)
    assert kinds(notices) == ["change"]
    alert = notices[0][1]
    assert [(c.name, c.before, c.after) for c in alert.causes] == [
        ("model_flops", 1e12, 2e12),
        ("tokens", 1000.0, 2000.0),
    ]
    assert "MFU 45.0% -> 36.0%. A new baseline starts here." in alert.message
    assert alert.step == 56 * STEPS
    assert kinds(feed(detector, [0.27] * 10, start=150, flops=2 * FLOPS_PER_STEP, tokens=2000 * STEPS)) == ["drop"]


def test_unfreezing_is_told_as_more_flops_per_token() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50, tokens=1000 * STEPS)
    [(_, alert)] = feed(detector, [0.40] * 50, start=50, flops=3 * FLOPS_PER_STEP // 2, tokens=1000 * STEPS)
    assert [(c.name, c.after) for c in alert.causes] == [("model_flops", 1.5e12), ("flops_per_token", 1.5e9)]


def test_a_single_batch_of_another_size_is_neither() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50)
    assert feed(detector, [0.20] * 3, start=50, flops=FLOPS_PER_STEP // 2) == []
    assert feed(detector, [0.45] * 50, start=53) == []


def test_recompute_switched_on_is_a_drop_and_no_change() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50, recompute_flops=0)
    more = FLOPS_PER_STEP * STEPS // 3
    notices = feed(detector, [0.36] * 20, start=50, hardware_flops=FLOPS_PER_STEP * STEPS + more, recompute_flops=more)
    assert kinds(notices) == ["drop"]
    assert "recompute" in [cause.name for cause in notices[0][1].causes]


def test_fewer_model_flops_in_the_same_hardware_work_are_a_loss_and_no_change() -> None:
    """Longer masked parts: the device does what it did, a third of it for nothing."""
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50, hardware_flops=FLOPS_PER_STEP * STEPS)
    flops = 2 * FLOPS_PER_STEP // 3
    notices = feed(detector, [0.30] * 20, start=50, flops=flops, hardware_flops=FLOPS_PER_STEP * STEPS)
    assert kinds(notices) == ["drop"]
    assert notices[0][1].causes[0].name == "masking"


def test_more_padding_is_a_loss_though_mfu_holds() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50, padding_share=0.10)
    notices = feed(detector, [0.45] * 20, start=50, padding_share=0.40)
    assert kinds(notices) == ["drop"]
    alert = notices[0][1]
    assert alert.loss == pytest.approx(1 - 0.6 / 0.9)
    assert [(c.name, c.before, c.after, c.share_of_loss) for c in alert.causes] == [
        ("padding", pytest.approx(0.10), pytest.approx(0.40), pytest.approx(1.0))
    ]
    assert "40.5% -> 27.0% of the peak, while MFU itself stays (45.0% -> 45.0%)" in alert.message


def test_another_precision_is_a_change() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50)
    [(_, alert)] = feed(detector, [0.30] * 50, start=50, precision="fp32")
    assert alert.kind == "change"
    assert "precision (bf16 -> fp32)" in alert.message


def test_another_peak_is_a_change_and_told_in_short_figures() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50)
    [(_, alert)] = feed(detector, [0.45] * 10, start=50, peak_flops_per_s=2 * PEAK)
    assert alert.kind == "change"
    assert "peak of the device (100 T -> 200 T)" in alert.message


def test_a_change_closes_an_open_incident_and_says_so() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50 + [0.36] * 20)
    [(_, alert)] = feed(detector, [0.36] * 10, start=70, flops=2 * FLOPS_PER_STEP)
    assert f"The alert of step {56 * STEPS} is closed" in alert.message
    assert not detector.active


@pytest.mark.parametrize("later", [{"mfu": None}, {"padding_share": 0.1}])
def test_an_incident_does_not_end_unsaid_where_other_figures_are_known(later: dict[str, Any]) -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50 + [0.36] * 20)
    assert detector.active
    notices = [
        alert for index in range(70, 80) for alert in detector.update(_with(window_reading(index, 0.36), **later))
    ]
    assert [alert.kind for alert in notices] == ["change"]
    assert "other values are known" in notices[0].message
    assert f"The alert of step {56 * STEPS} is closed" in notices[0].message
    assert not detector.active


def test_other_figures_without_an_incident_are_no_news() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50)
    assert feed(detector, [0.45] * 50, start=50, padding_share=0.1) == []


def test_a_schedule_that_changes_all_the_time_is_told_once_a_cooldown() -> None:
    detector, notices = AlertDetector(AlertConfig(warmup=0, cooldown=50)), []
    for index in range(120):
        notices += feed(detector, [0.45], start=index, flops=FLOPS_PER_STEP * (10 + index // 8) // 10)
    assert set(kinds(notices)) == {"change"}
    assert len(notices) <= 3


def test_without_a_peak_the_model_flops_per_second_are_followed() -> None:
    detector = AlertDetector(QUIET)
    notices = []
    for index in range(60):
        mfu = 0.45 if index < 50 else 0.36
        reading = window_reading(index, mfu)
        blind = UtilizationReading(window=reading.window, precision="bf16", reason="no peak")
        notices += [(index, alert) for alert in detector.update(blind)]
    assert kinds(notices) == ["drop"]
    assert notices[0][1].mfu is None
    assert notices[0][1].loss == pytest.approx(0.20)
    assert notices[0][1].message.startswith("Model FLOP/s fell by 20%: 45 T -> 36 T")


# Recompiling.


def test_a_recompilation_storm_is_a_loss_though_the_settled_steps_are_fast() -> None:
    """From window 50 on five of ten steps recompile, 2 s each; those left in the window are as fast as ever."""
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50)
    storm = {"steps": 5, "excluded_steps": 5, "recompiles": 5, "excluded_s": {"compile": 10.0}}
    [(_, alert)] = feed(detector, [0.45] * 10, start=50, **storm)
    assert alert.kind == "drop"
    assert [cause.name for cause in alert.causes] == ["recompilation"]
    # 10 steps took 10/45 s; now 5 of them take 5/45 s and 5 take 10 s.
    assert alert.loss == pytest.approx(1 - (10 / 45) / (5 / 45 + 10))


def test_a_storm_in_which_every_step_recompiles_is_told_too() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50)
    window = StepWindow(
        first_step=1, last_step=9, steps=0, elapsed_s=0.0, wall_s=30.0,
        excluded_steps=10, recompiles=12, excluded_s={"compile": 30.0},
    )  # fmt: skip
    alerts = [alert for _ in range(10) for alert in detector.update(UtilizationReading(window=window))]
    assert [alert.kind for alert in alerts] == ["drop"]
    assert alerts[0].causes[0].name == "recompilation"


def test_counted_steps_left_out_of_a_window_are_no_loss() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50)
    counted = {"excluded_steps": 1, "excluded_s": {"counted": 60.0}}
    assert feed(detector, [0.45] * 50, start=50, **counted) == []


# State.


def test_the_state_is_plain_and_goes_on_where_it_was() -> None:
    levels = [*noisy(0.45, 60), *noisy(0.36, 3, seed=1)]
    detector = AlertDetector(QUIET)
    feed(detector, levels)
    state = json.loads(json.dumps(detector.state_dict()))
    resumed = AlertDetector(QUIET)
    resumed.load_state_dict(state)
    later = noisy(0.36, 10, seed=2)
    assert kinds(feed(resumed, later, start=63)) == kinds(feed(detector, later, start=63)) == ["drop"]


def test_an_open_incident_survives_a_resume_and_recovers() -> None:
    detector = AlertDetector(QUIET)
    feed(detector, [0.45] * 50 + [0.36] * 10)
    resumed = AlertDetector(QUIET)
    resumed.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    assert resumed.active
    assert kinds(feed(resumed, [0.45] * 40, start=60)) == ["recovery"]


def test_the_windows_after_a_resume_are_warm_up() -> None:
    config = AlertConfig(warmup=15)
    detector = AlertDetector(config)
    feed(detector, [0.45] * 60)
    resumed = AlertDetector(config)
    resumed.load_state_dict(detector.state_dict())
    assert feed(resumed, [0.20] * 15 + [0.45] * 50, start=60) == []


def test_a_state_of_another_version_is_left_alone() -> None:
    detector = AlertDetector(QUIET)
    detector.load_state_dict({"version": 99, "history": "?"})
    assert kinds(feed(detector, [0.45] * 50 + [0.36] * 10)) == ["drop"]


def test_an_alert_survives_json() -> None:
    cause = CauseShare(name="padding", before=0.1, after=0.4, unit="fraction", share_of_loss=1.0)
    alert = Alert(kind="drop", step=9, mfu=0.3, baseline=0.4, message="m", causes=(cause,), loss=0.25, incident=1)
    assert Alert.from_dict(json.loads(json.dumps(alert.to_dict())) | {"later": 1}) == alert


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True), st.floats(0.001, 1.5)), max_size=80), st.randoms())
def test_no_series_of_readings_makes_it_raise(levels: list[float | None], rng: random.Random) -> None:
    detector = AlertDetector(AlertConfig(warmup=1, min_baseline=5, baseline_windows=10, long_windows=10, floor=0.2))
    for index, mfu in enumerate(levels):
        window = StepWindow(
            first_step=index,
            last_step=index,
            steps=rng.choice([0, 1, 10]),
            elapsed_s=rng.choice([0.0, 1.0, float("nan"), 1e-300]),
            wall_s=1.0,
            model_flops=rng.choice([None, 0, 10**12, 3 * 10**12]),
            hardware_flops=rng.choice([None, 0, 10**12]),
            padding_share=rng.choice([None, 0.0, 0.5, 1.0]),
            excluded_steps=rng.choice([0, 3]),
            recompiles=rng.choice([0, 2]),
            excluded_s=rng.choice([{}, {"compile": 1.0}]),
        )
        detector.update(UtilizationReading(window=window, mfu=mfu))
    json.dumps(detector.state_dict())


# Levels.


def test_the_level_is_the_median_and_its_noise_the_scaled_deviation() -> None:
    level = robust_level([0.40, 0.41, 0.39, 0.42, 0.38, 0.01])
    assert level.median == pytest.approx(0.395)
    # Deviations 0.005, 0.015, 0.005, 0.025, 0.015, 0.385: their median is 0.015.
    assert level.noise == pytest.approx(1.4826 * 0.015 / 0.395)


def test_noise_that_comes_in_runs_makes_medians_of_neighbours_less_sure() -> None:
    # Runs of 8 windows at 1% above and below. Of the medians of 4 neighbours, one at every second window, three of four
    # lie within a run, 1% off; independent windows' would scatter by 1.2533 / sqrt(4) of the noise.
    runs = ([1.01] * 8 + [0.99] * 8) * 3
    level = robust_level(runs, 4)
    assert level.noise == pytest.approx(1.4826 * 0.01)
    assert level.correlation == pytest.approx(2 / 1.2533)
    assert level.error(16) == pytest.approx(2 / 1.2533 * 1.2533 * 1.4826 * 0.01 / 4)
    assert robust_level(runs).correlation == 1.0  # not asked for
    assert robust_level(runs[:19], 4).correlation == 1.0  # fewer than five blocks
    assert robust_level([1.01, 0.99] * 24, 4).correlation == 1.0  # the opposite: neighbours make up for each other
    assert robust_level([1.0] * 48, 4).correlation == 1.0


def test_correlated_noise_moves_the_boundaries_away() -> None:
    # 5.5 standard errors of the median of 6 windows; for a decline seven of the median of 50, with the factor twice.
    config = AlertConfig(drop=0.10, sustain=6, long_windows=50)
    plain, correlated = Level(1.0, 0.03), Level(1.0, 0.03, 2.0)
    error = 1.2533 * 0.03
    assert drop_boundary(plain, config) == pytest.approx(1 - 5.5 * error / 6**0.5)  # 8.4%, more than 10% less 3.8%
    assert drop_boundary(correlated, config) == pytest.approx(1 - 5.5 * 2 * error / 6**0.5)
    assert sag_boundary(1.0, plain, config) == pytest.approx(1 - 0.07)
    assert sag_boundary(1.0, correlated, config) == pytest.approx(1 - 7 * 2 * 2 * error / 50**0.5)


def test_the_floor_is_told_of_a_level_that_is_no_mfu() -> None:
    figures = figures_of(window_reading(50, 0.45))
    assert figures is not None
    words = floor_message(0.3, dataclasses.replace(figures, mfu=None))
    assert words.startswith("MFU unknown is below the floor of 30.0% (steps ")


@pytest.mark.parametrize("last", [2e12, 1e12])
def test_a_window_like_the_oldest_one_is_compared_with_them_all(last: float) -> None:
    now = figures_of(window_reading(0, 0.45, flops=10**12))
    assert now is not None
    grown = [dataclasses.replace(now, model_flops=f, hardware_flops=f) for f in (1e12, *[2e12] * 9, last)]
    assert is_other_kind(dataclasses.replace(now, model_flops=1e12, hardware_flops=1e12), grown, 0.05) is (last == 2e12)


def test_steadiness_leaves_three_dips_out_and_counts_the_rest_by_time() -> None:
    """Windows at a quarter of the level cost three windows' time each; two in a row are one dip."""
    dips = [0.4] * 4 + [0.1]
    assert steadiness(dips * 3, 0.3) == 1.0
    assert steadiness(dips * 5, 0.3) == pytest.approx(25 / (25 + 2 * 3))
    assert steadiness([*dips * 3, *[0.4] * 4, 0.1, 0.1], 0.3) == pytest.approx(21 / (21 + 3))


# Configuration.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drop": 10}, r"drop=10 was given; a fraction between 0 and 1 is expected \(10% is 0.10\)"),
        ({"drop": 0.0}, "a fraction between 0 and 1"),
        ({"floor": "0.3"}, "floor='0.3' was given; a fraction"),
        ({"change": True}, "change=True was given"),
        ({"sustain": 1}, r"sustain=1 was given; a whole number of windows, at least 2, .*AlertConfig\(sustain=6\)"),
        ({"cooldown": -1}, "at least 0"),
        ({"long_windows": 20.0}, "a whole number of windows"),
        ({"min_baseline": 200}, "min_baseline=200 is more than baseline_windows=100"),
    ],
)
def test_a_wrong_option_says_what_is_allowed(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AlertConfig(**options)


def test_a_baseline_may_need_all_of_its_windows() -> None:
    assert AlertConfig(min_baseline=100).min_baseline == AlertConfig().baseline_windows == 100
    with pytest.raises(ConfigurationError):
        AlertConfig(min_baseline=101)


# Acceptance, in small; `make bench-alerts` measures it on a thousand series (docs/alerts.md).


def healthy(rng: random.Random, windows: int) -> list[float]:
    """Noise up to 2.5%, lone spikes, and a dip of one or two windows every 30 to 120."""
    level, sigma, period, length = (
        rng.uniform(0.1, 0.6),
        rng.uniform(0.005, 0.025),
        rng.randint(30, 120),
        rng.randint(1, 2),
    )
    levels = [level * (1 + rng.gauss(0.0, sigma)) for _ in range(windows)]
    spikes = [mfu * (1 - rng.uniform(0.2, 0.7)) if rng.random() < 0.01 else mfu for mfu in levels]
    return [mfu * 0.6 if index % period < length else mfu for index, mfu in enumerate(spikes)]


def test_healthy_series_lead_to_no_alert() -> None:
    rng = random.Random(11)
    assert sum(len(feed(AlertDetector(), healthy(rng, 1000))) for _ in range(10)) == 0


def test_a_drop_of_exactly_a_tenth_is_told_within_two_windows_more_than_asked() -> None:
    rng, found = random.Random(12), 0
    for _ in range(30):
        levels = healthy(rng, 130)
        notices = feed(AlertDetector(), [*levels[:100], *(0.9 * mfu for mfu in levels[100:])])
        found += any(alert.kind == "drop" and 100 <= index <= 107 for index, alert in notices)
    assert found >= 29
