"""The rows of a report's table, the same on a console and on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mfu_monitor.cli.report.run_summary import RunSummary

__all__ = ["format_hours", "summary_rows"]


def summary_rows(summaries: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """One row per metric, one cell per run; rows that no run knows are left out."""
    rows = [(title, [show(summary) for summary in summaries]) for title, show in _ROWS]
    only_ours = not any(summary.format for summary in summaries)
    return [
        (title, cells)
        for title, cells in rows
        if any(cell != _UNKNOWN for cell in cells) and not (only_ours and title == "Written by")
    ]


_UNKNOWN = "unknown"


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1%}"


def _amount(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _gpu_hours(summary: RunSummary) -> str:
    if summary.format and not summary.wall_s:  # another tool's log without a time
        return _UNKNOWN
    return f"{format_hours(summary.gpu_hours)} on {summary.world_size} device{'s' if summary.world_size > 1 else ''}"


def format_hours(hours: float | None) -> str:
    """Short runs in seconds: 0.00 hours would say nothing."""
    if hours is None:
        return _UNKNOWN
    return f"{hours:,.2f} h" if hours >= 0.1 else f"{hours * 3600:,.1f} s"


_ROWS: tuple[tuple[str, Callable[[RunSummary], str]], ...] = (
    ("Median MFU", lambda s: _percent(s.median_mfu)),
    ("MFU as claimed", lambda s: _percent(s.claimed_mfu)),
    ("Written by", lambda s: s.format or "mfu-monitor"),
    ("Median HFU", lambda s: _percent(s.median_hfu)),
    ("Best window", lambda s: _UNKNOWN if s.best is None else f"{s.best.mfu:.1%} at step {s.best.step}"),
    ("Worst window", lambda s: _UNKNOWN if s.worst is None else f"{s.worst.mfu:.1%} at step {s.worst.step}"),
    ("Goodput MFU (all wall time)", lambda s: _percent(s.goodput_mfu)),
    ("Median tokens/s", lambda s: _amount(s.median_tokens_per_s)),
    ("Tokens", lambda s: _amount(s.tokens)),
    ("Steps", lambda s: f"{s.first_step}-{s.last_step}, {s.windows} windows" if s.windows else _UNKNOWN),
    ("Wall time", lambda s: format_hours(s.wall_s / 3600 if s.wall_s or not s.format else None)),
    ("GPU-hours", lambda s: _gpu_hours(s)),
    ("Waiting for data", lambda s: format_hours(s.data_wait_gpu_hours)),
    ("Outside of windows", lambda s: _named_hours(s.outside_gpu_hours) or "none"),
    ("Incidents", lambda s: str(len(s.incidents)) + (" (found by replaying the readings)" if s.replayed else "")),
    ("Lost in incidents, by cause", lambda s: _named_hours(s.lost_gpu_hours_by_cause) or "none"),
    ("Changes of the step", lambda s: str(len(s.changes))),
    ("Device", lambda s: s.device_name or _UNKNOWN),
    ("Precision", lambda s: s.precision or _UNKNOWN),
    ("Counts", lambda s: ", ".join(s.exactness) or _UNKNOWN),
)


def _named_hours(hours: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {format_hours(value)}" for name, value in hours.items() if value > 0)
