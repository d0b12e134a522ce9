"""The report as one self-contained HTML page: tables as text, plots as SVG inside it, nothing fetched."""

from __future__ import annotations

import html
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from mfu_monitor.alerts.messages import describe_cause
from mfu_monitor.cli.report.read_runs import RunLog
from mfu_monitor.cli.report.rows import format_hours, summary_rows
from mfu_monitor.cli.report.run_summary import IncidentSummary, RunSummary
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.sinks.console import printable

__all__ = ["write_page"]

_MOST_POINTS = 1200
"""Points of a line, about one a pixel; more windows are drawn as medians of neighbours, with their range."""

_PARTS = {
    "data_wait_s": ("waiting for data", "#d62728"),
    "forward_s": ("forward", "#1f77b4"),
    "backward_s": ("backward", "#17426b"),
    "optimizer_s": ("optimizer", "#2ca02c"),
    "other_s": ("other", "#9e9e9e"),
}


def write_page(path: Path, logs: Sequence[RunLog], summaries: Sequence[RunSummary]) -> None:
    """Write the page.

    Raises:
        ConfigurationError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    sections = [_run_section(log, summary) for log, summary in zip(logs, summaries, strict=True)]
    page = _PAGE.substitute(
        title=_html("MFU report: " + ", ".join(summary.name for summary in summaries)),
        comparison=_table(
            ["", *(s.name for s in summaries)], [[title, *cells] for title, cells in summary_rows(summaries)]
        ),
        sections="\n".join(sections),
    )
    path.write_text(page, encoding="utf-8")


def _html(value: object) -> str:
    """Text of a page, whatever a log put into it: no tag, no attribute's end, no control character."""
    return html.escape(printable(str(value)), quote=True)


def _run_section(log: RunLog, summary: RunSummary) -> str:
    parts = [f"<h2>{_html(summary.name)}</h2>", f'<p class="source">{_html(log.source)}</p>']
    parts.append(_figure(log, summary))
    if summary.incidents:
        parts.append("<h3>Incidents</h3>")
        parts += [_incident(number, incident) for number, incident in enumerate(summary.incidents, start=1)]
    for change in summary.changes:
        parts.append(
            f'<div class="change"><b>Change at step {_html(change.step)}</b><p>{_html(change.message)}</p></div>'
        )
    return "\n".join(parts)


def _incident(number: int, incident: IncidentSummary) -> str:
    alert = incident.alert
    first = alert.first_step if alert.first_step is not None else alert.step
    end = "recovered" if incident.recovered else "not recovered"
    lost = format_hours(incident.lost_gpu_hours)
    head = f"{number} {alert.kind}, steps {first}-{incident.last_step}, {end}, {lost} of devices lost"
    rows = [
        [
            c.name.replace("_", " "),
            describe_cause(c),
            "" if c.share_of_loss is None else f"{c.share_of_loss:.0%}",
        ]
        for c in alert.causes
    ]
    causes = _table(["Cause", "Before and after", "Share of the loss"], rows) if rows else ""
    return f'<div class="incident"><b>{_html(head)}</b><p>{_html(alert.message)}</p>{causes}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_html(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


# The plots.


def _figure(log: RunLog, summary: RunSummary) -> str:
    """MFU and HFU over the steps with the incidents shaded, the step's time below, hours lost at the side."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "--html draws plots with matplotlib, which is not installed. Run: pip install 'mfu-monitor[plots]'; "
            "or leave --html out."
        ) from error
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1.1), height_ratios=(1.2, 1))
    utilization = figure.add_subplot(grid[0, 0])
    _draw_utilization(utilization, log, summary)
    _draw_step_time(figure.add_subplot(grid[1, 0], sharex=utilization), log)
    _draw_hours(figure.add_subplot(grid[:, 1]), summary)
    picture = io.StringIO()
    with rc_context({"svg.hashsalt": summary.name}):  # with no date, the same log gives the same page
        figure.savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    return f'<div class="plot">{svg[svg.index("<svg") :]}</div>'


def _draw_utilization(axes: Any, log: RunLog, summary: RunSummary) -> None:
    for name, color in (("hfu", "#ff9f40"), ("mfu", "#1f77b4")):
        points = [(r.last_step, 100 * v) for r in log.readings if (v := getattr(r, name)) is not None]
        if points:
            steps, middle, low, high = _thinned(points)
            axes.plot(steps, middle, color=color, label=name.upper(), linewidth=1.2)
            if len(points) > _MOST_POINTS:
                axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    for number, incident in enumerate(summary.incidents, start=1):
        first = incident.alert.first_step if incident.alert.first_step is not None else incident.alert.step
        axes.axvspan(first, incident.last_step, color="#d62728", alpha=0.12, linewidth=0)
        cause = printable(next((c.name.replace("_", " ") for c in incident.alert.causes), "cause unknown"))
        place = (first, 0.93 - 0.07 * ((number - 1) % 3))  # above the lines; neighbours at three heights
        label = axes.annotate(f"{number} {cause}", place, xycoords=("data", "axes fraction"), fontsize=8, clip_on=True)
        label.set_parse_math(False)
        label.set_in_layout(False)
    for change in summary.changes:
        axes.axvline(change.first_step or change.step, color="#6a3d9a", linestyle="--", linewidth=1)
    axes.set_ylabel("utilization (% of the dense peak)")
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", fontsize=8)


def _draw_step_time(axes: Any, log: RunLog) -> None:
    readings = [r for r in log.readings if r.window.steps]
    known = [name for name in _PARTS if any(getattr(r.window, name) is not None for r in readings)]
    steps: Sequence[float] = []
    layers = []
    for name in known or ["elapsed_s"]:
        points = [(r.last_step, 1e3 * (getattr(r.window, name) or 0.0) / r.window.steps) for r in readings]
        steps, middle, _, _ = _thinned(points)
        layers.append(middle)
    labels = [_PARTS[name][0] for name in known] or ["step"]
    colors = [_PARTS[name][1] for name in known] or ["#1f77b4"]
    if steps:
        axes.stackplot(steps, *layers, labels=labels, colors=colors, linewidth=0)
        axes.legend(loc="upper left", fontsize=8, ncols=len(labels), columnspacing=1.0, handlelength=1.2)
        highest = max(map(sum, zip(*layers, strict=True)))
        axes.set_ylim(0, 1.25 * highest or 1)  # room for the legend
    axes.set_xlabel("step")
    axes.set_ylabel("time of a step (ms)")
    axes.grid(alpha=0.3)


def _draw_hours(axes: Any, summary: RunSummary) -> None:
    """GPU-hours lost in incidents by cause, and spent outside of windows by reason."""
    bars = [(printable(n.replace("_", " ")), v, "#d62728") for n, v in summary.lost_gpu_hours_by_cause.items() if v > 0]
    bars += [(printable(f"outside: {n}"), v, "#9e9e9e") for n, v in summary.outside_gpu_hours.items() if v > 0]
    if not bars:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing lost in incidents", ha="center", va="center", fontsize=9)
        return
    unit, scale = ("hours", 1.0) if max(v for _, v, _ in bars) >= 0.1 else ("seconds", 3600.0)
    bars = bars[:8][::-1]
    positions = range(len(bars))
    axes.barh(positions, [v * scale for _, v, _ in bars], color=[color for _, _, color in bars], height=0.5)
    for position, (name, value, _) in zip(positions, bars, strict=True):
        label = axes.text(0, position + 0.32, f"{name}: {value * scale:,.3g}", fontsize=8, parse_math=False)
        label.set_in_layout(False)
    axes.set_yticks([])
    axes.set_ylim(len(bars) - max(len(bars), 4) - 0.6, len(bars) - 0.2)  # few bars stay narrow, at the top
    axes.set_xlabel(f"device {unit}")
    axes.set_title("where the time went", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _thinned(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps with the median, least and greatest value of so many neighbours that at most ``_MOST_POINTS`` remain."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    values = [[value for _, value in group] for group in groups]
    steps = [float(group[-1][0]) for group in groups]
    return steps, list(map(statistics.median, values)), list(map(min, values)), list(map(max, values))


_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; font-size: 1.25rem; }
table { border-collapse: collapse; margin: 0.5rem 0; } th, td { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; }
thead th { border-bottom: 2px solid #888; } tbody tr:nth-child(odd) { background: #f6f6f6; }
td:first-child { color: #555; } .source { color: #777; font-size: 0.85rem; overflow-wrap: anywhere; }
.incident, .change { border-left: 4px solid #d62728; padding: 0.3rem 1rem; margin: 0.8rem 0; background: #fdf3f3; }
.change { border-color: #6a3d9a; background: #f6f2fa; } .plot svg { width: 100%; height: auto; }
</style>
</head>
<body>
<h1>$title</h1>
$comparison
$sections
</body>
</html>
""")
