"""The summary of a run: medians, hours, incidents and what they cost, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mfu_monitor.alerts import Alert, AlertConfig, CauseShare
from mfu_monitor.cli.report.run_summary import replay_alerts, summarize_run
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading


def reading(index: int, mfu: float | None, *, elapsed_s: float = 36.0, **changes: Any) -> UtilizationReading:
    """A window of ten steps on 100 devices: 36 s are one device hour."""
    fields: dict[str, Any] = {
        "first_step": 10 * index + 1,
        "last_step": 10 * index + 10,
        "steps": 10,
        "elapsed_s": elapsed_s,
        "wall_s": elapsed_s,
        "model_flops": 10**13,
        "world_size": 100,
    }
    window = StepWindow(**fields | changes)
    return UtilizationReading(window=window, mfu=mfu, hfu=None if mfu is None else mfu * 1.2, device_name="A100")


def drop(
    first_step: int, *, mfu: float = 0.3, baseline: float = 0.4, loss: float | None = None, **causes: float
) -> Alert:
    shares = tuple(
        CauseShare(name=name, before=None, after=None, unit="", share_of_loss=share) for name, share in causes.items()
    )
    return Alert(
        kind="drop",
        step=first_step + 59,
        first_step=first_step,
        mfu=mfu,
        baseline=baseline,
        loss=1 - mfu / baseline if loss is None else loss,
        message="fell",
        causes=shares,
    )


def notice(kind: str, first_step: int) -> Alert:
    return Alert(kind=kind, step=first_step + 59, first_step=first_step, mfu=0.4, baseline=0.4, message=kind)


def test_levels_are_medians_and_extremes_with_their_steps() -> None:
    summary = summarize_run("a", [reading(0, 0.40), reading(1, 0.50), reading(2, 0.10), reading(3, 0.42)])
    assert summary.median_mfu == pytest.approx(0.41)
    assert summary.median_hfu == pytest.approx(0.41 * 1.2)
    assert (summary.best and summary.best.step, summary.worst and summary.worst.step) == (20, 30)
    assert (summary.first_step, summary.last_step, summary.windows) == (1, 40, 4)


def test_hours_are_wall_time_times_ranks() -> None:
    readings = [
        reading(0, 0.4, wall_s=72.0, excluded_s={"validation": 30.0, "checkpoint": 6.0}, data_wait_s=9.0),
        reading(1, 0.4, wall_s=36.0, excluded_s={}, data_wait_s=27.0),
    ]
    summary = summarize_run("a", readings)
    assert (summary.wall_s, summary.gpu_hours) == (108.0, 3.0)
    assert summary.outside_gpu_hours == pytest.approx({"validation": 30 / 36, "checkpoint": 6 / 36})
    assert summary.data_wait_gpu_hours == pytest.approx(1.0)


def test_goodput_counts_the_time_outside_of_windows() -> None:
    """0.4 for 36 s of 72 s, 0.2 for 36 s of 36 s: (14.4 + 7.2) / 108."""
    assert summarize_run("a", [reading(0, 0.4, wall_s=72.0), reading(1, 0.2)]).goodput_mfu == pytest.approx(0.2)


def test_tokens_are_the_worlds_where_known() -> None:
    summary = summarize_run("a", [reading(0, 0.4, tokens=5, world_tokens=500), reading(1, 0.4, tokens=7)])
    assert summary.tokens == 507


def test_an_incident_costs_what_is_missing_against_its_baseline() -> None:
    """Five windows of one device hour at 0.3 instead of 0.4: 1.25 hours, shared out by cause."""
    readings = [reading(i, 0.3 if 5 <= i < 10 else 0.4) for i in range(20)]
    alerts = [drop(51, data_loading=0.8, optimizer=0.2), notice("recovery", 101)]
    summary = summarize_run("a", readings, alerts)
    [incident] = summary.incidents
    assert (incident.last_step, incident.recovered, incident.wall_s) == (100, True, 180.0)
    assert incident.lost_gpu_hours == pytest.approx(1.25)
    assert summary.lost_gpu_hours_by_cause == pytest.approx({"data_loading": 1.0, "optimizer": 0.25})
    assert not summary.replayed


def test_an_open_incident_lasts_to_the_end_of_the_log() -> None:
    summary = summarize_run("a", [reading(i, 0.3 if i >= 5 else 0.4) for i in range(20)], [drop(51)])
    [incident] = summary.incidents
    assert (incident.last_step, incident.recovered) == (200, False)
    assert incident.lost_gpu_hours == pytest.approx(15 * 0.25)
    assert summary.lost_gpu_hours_by_cause == pytest.approx({"unknown": 3.75})


def test_a_change_ends_an_incident_without_a_recovery() -> None:
    alerts = [drop(51), notice("change", 101)]
    summary = summarize_run("a", [reading(i, 0.3 if i >= 5 else 0.4) for i in range(20)], alerts)
    assert (summary.incidents[0].last_step, summary.incidents[0].recovered) == (100, False)
    assert [change.kind for change in summary.changes] == ["change"]


def test_a_further_drop_costs_on_top_and_nothing_twice() -> None:
    """0.4, then 0.3 for five windows, then 0.15: of 0.4 a quarter is missing ten times, and 0.15 / 0.4 five times."""
    levels = [0.4] * 5 + [0.3] * 5 + [0.15] * 5
    alerts = [drop(51), drop(101, mfu=0.15, baseline=0.3)]
    first, second = summarize_run("a", [reading(i, mfu) for i, mfu in enumerate(levels)], alerts).incidents
    assert first.lost_gpu_hours == pytest.approx(10 * 0.25)
    assert second.lost_gpu_hours == pytest.approx(5 * 0.375)


def test_a_resumed_run_counts_the_steps_it_repeats_once_an_incident() -> None:
    """It falls at window 5, dies at 10 and resumes from window 7: windows 7-9 again at 0.3, and well from 10 on."""
    before = [reading(i, 0.3 if i >= 5 else 0.4) for i in range(10)]
    after = [reading(i, 0.3 if i < 10 else 0.4) for i in range(7, 20)]
    alerts = [drop(51), notice("recovery", 101)]
    summary = summarize_run("a", before + after, alerts, readings_before=[10, 10 + 13])
    [incident] = summary.incidents
    assert incident.recovered
    assert incident.wall_s == 36.0 * (5 + 3)
    assert incident.lost_gpu_hours == pytest.approx(0.25 * (5 + 3))


def test_an_incident_after_a_restart_leaves_the_like_steps_before_it_alone() -> None:
    """Steps 51-150 twice: at 0.4 with nothing wrong, then at 0.3 from the first on."""
    readings = [reading(i, 0.4) for i in range(15)] + [reading(i, 0.3) for i in range(5, 15)]
    summary = summarize_run("a", readings, [drop(51)], readings_before=[15 + 6])
    assert summary.incidents[0].wall_s == 36.0 * 10
    assert summary.incidents[0].lost_gpu_hours == pytest.approx(10 * 0.25)


def test_a_loss_that_mfu_does_not_show_costs_its_own_share() -> None:
    """Padding: MFU holds at 0.4, a third of the useful tokens is gone."""
    summary = summarize_run("a", [reading(i, 0.4) for i in range(20)], [drop(101, mfu=0.4, loss=1 / 3, padding=1.0)])
    assert summary.lost_gpu_hours_by_cause == pytest.approx({"padding": 10 / 3})


def test_without_logged_alerts_the_detection_is_replayed() -> None:
    readings = [reading(i, 0.45 if i < 60 else 0.36) for i in range(100)]
    summary = summarize_run("a", readings)
    assert [incident.alert.kind for incident in summary.incidents] == ["drop"]
    assert summary.replayed
    assert replay_alerts(readings, AlertConfig(drop=0.5)) == ()


def test_a_run_without_readings_has_unknown_figures_and_no_zeros() -> None:
    summary = summarize_run("a", [])
    assert (summary.median_mfu, summary.goodput_mfu, summary.best, summary.tokens) == (None, None, None, None)


def test_a_run_without_a_peak_keeps_its_hours() -> None:
    summary = summarize_run("a", [reading(i, None) for i in range(5)])
    assert (summary.median_mfu, summary.goodput_mfu, summary.gpu_hours) == (None, None, 5.0)


def test_the_summary_is_plain_types() -> None:
    readings = [reading(i, 0.45 if i < 60 else 0.36) for i in range(100)]
    plain = json.loads(json.dumps(summarize_run("a", readings).to_dict()))
    assert plain["incidents"][0]["alert"]["kind"] == "drop"
