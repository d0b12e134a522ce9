"""What an audit takes from a log: rates of the world, times, claims. Open units and scopes are settled by evidence."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from mfu_monitor.cli.audit.audit_run import LogSeries
from mfu_monitor.logs import Column, Log

__all__ = ["Known", "series_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known beside the log, to settle what its names leave open."""

    gpus: int = 1
    peak_flops_per_s: float | None = None
    parameters: float | None = None
    tokens_per_step: float | None = None
    sequence_length: float | None = None
    per_gpu: bool | None = None


def series_of(log: Log, known: Known) -> LogSeries:
    """The columns that an audit needs; what was assumed and what disagrees is among the notes.

    Args:
        log: read by ``read_log``.
        known: facts from the command line.
    """
    notes = list(log.notes)
    mfu, hfu = log.column("mfu"), log.column("hfu")
    tokens_per_step = known.tokens_per_step or log.constant("tokens_per_step") or _batch_tokens(log, known)
    step_s = _step_s(log, tokens_per_step, notes)
    rates = _rates(log, known, mfu, step_s, tokens_per_step, notes)
    flops = _device_flops(log, known, notes)
    main = mfu or log.column("tokens_per_s") or flops or step_s
    timed = log.column("time")
    notes += [f"column {c.name!r}: {c.note}" for c in (mfu, hfu, flops) if c is not None and c.note]
    series = LogSeries(
        source=log.source,
        steps=_steps(log, main),
        tokens_per_s=rates,
        step_s=step_s.values if step_s else (),
        mfu=mfu.values if mfu else (),
        hfu=hfu.values if hfu else (),
        device_flops_per_s=flops.values if flops else (),
        convention=next((c.convention for c in (mfu, flops) if c and c.convention), ""),
        elapsed_s=_elapsed_s(log, step_s),
        timestamps_s=timed.values if timed and timed.unit == "s" else (),
        tokens_per_step=tokens_per_step,
        readings=log.readings,
        understood=tuple(_understood(c) for c in log.columns if c.values),
    )
    notes += _disagreements(log, step_s, series)
    return dataclasses.replace(series, notes=tuple(notes))


def _understood(column: Column) -> tuple[str, str, str, str]:
    """One row for the user: name, meaning, unit, scope."""
    scope = column.scope + ("" if column.is_scope_stated or not column.scope else " (assumed)")
    unit = column.unit + ("" if column.is_unit_stated or not column.unit else " (assumed)")
    return (
        column.name,
        column.quantity,
        unit,
        " ".join(filter(None, (scope, column.convention and f"by {column.convention}"))),
    )


def _batch_tokens(log: Log, known: Known) -> float | None:
    samples, length = log.constant("batch_samples"), known.sequence_length or log.constant("sequence_length")
    return samples * length if samples and length else None


def _scaled(column: Column, factor: float, **changes: object) -> Column:
    values = tuple(value * factor for value in column.values)
    return dataclasses.replace(column, values=values, **changes)  # type: ignore[arg-type]


# The time of a step.


def _step_s(log: Log, tokens_per_step: float | None, notes: list[str]) -> Column | None:
    column = log.column("step_s")
    if column is None:
        rate = log.column("steps_per_s")
        return rate and dataclasses.replace(rate, quantity="step_s", values=tuple(1 / v for v in rate.values), unit="s")
    if column.is_unit_stated:
        return column
    expected = _expected_step_s(log, tokens_per_step)
    if expected is None:
        notes.append(f"column {column.name!r}: {column.note} (--unit '{column.name}=...' says which)")
        return column
    factor = min((1e-3, 1.0, 1e3), key=lambda f: abs(math.log(column.median * f / expected)))
    fixed = _scaled(column, factor, is_unit_stated=True, note="")
    notes.append(
        f"column {column.name!r} has no unit: {fixed.median:.4g} s per step fits the log's other columns, which give "
        f"{expected:.4g} s"
    )
    return fixed


def _expected_step_s(log: Log, tokens_per_step: float | None) -> float | None:
    """Seconds of a step by other columns: steps/s, tokens of a step over tokens/s, the clock."""
    rate = log.column("steps_per_s")
    if rate:
        return 1 / rate.median
    tokens = log.column("tokens_per_s", scope="world")
    if tokens_per_step and tokens and tokens.is_scope_stated:
        return tokens_per_step / tokens.median
    return _clock_step_s(log)


def _clock_step_s(log: Log) -> float | None:
    """The median distance of two rows over the steps between them; None without a clock that runs."""
    clock, steps = log.column("time"), log.column("step")
    if clock is None or steps is None:
        return None
    by_line = dict(zip(steps.lines, steps.values, strict=True))
    points = [(by_line[line], t) for line, t in zip(clock.lines, clock.values, strict=True) if line in by_line]
    gaps = [(t2 - t1) / (s2 - s1) for (s1, t1), (s2, t2) in itertools.pairwise(points) if s2 > s1 and t2 > t1]
    return statistics.median(gaps) if len(gaps) >= 2 else None


# Tokens a second.


def _rates(
    log: Log, known: Known, mfu: Column | None, step_s: Column | None, tokens_per_step: float | None, notes: list[str]
) -> tuple[float, ...]:
    """Tokens/s of all GPUs."""
    device, world = log.column("tokens_per_s", scope="device"), log.column("tokens_per_s", scope="world")
    chosen = next((c for c in (world, device) if c is not None and c.is_scope_stated), world or device)
    if chosen is None:
        return _rates_of_totals(log, known, notes)
    if "item" in chosen.name.lower():
        notes.append(
            f"column {chosen.name!r}: its items are taken as tokens; where they are samples, --ignore-column it"
        )
    if not chosen.is_scope_stated and known.gpus > 1:
        chosen = _settled(chosen, known, mfu, log, step_s, tokens_per_step, notes)
    factor = known.gpus if chosen.scope == "device" else 1
    return tuple(value * factor for value in chosen.values)


def _rates_of_totals(log: Log, known: Known, notes: list[str]) -> tuple[float, ...]:
    """Samples/s times their length, or tokens so far over the time they took."""
    samples, length = log.column("samples_per_s"), known.sequence_length or log.constant("sequence_length")
    tokens, elapsed, clock = log.column("tokens"), log.constant("elapsed_s"), log.column("time")
    if tokens is not None and elapsed:
        notes.append(f"tokens/s from {tokens.name!r} over {elapsed:,.6g} s of the whole run")
        return (tokens.values[-1] / elapsed,)
    if tokens is not None and clock is not None and len(tokens.values) > 1 and clock.values[-1] > clock.values[0]:
        notes.append(f"tokens/s from {tokens.name!r} and {clock.name!r}, first to last row")
        return ((tokens.values[-1] - tokens.values[0]) / (clock.values[-1] - clock.values[0]),)
    if samples is not None and length:
        samples = _scaled(samples, length)
        if not samples.is_scope_stated and known.gpus > 1:
            samples = _settled(samples, known, log.column("mfu"), log, None, None, notes)
        factor = known.gpus if samples.scope == "device" else 1
        return tuple(value * factor for value in samples.values)
    return ()


def _settled(
    column: Column, known: Known, mfu: Column | None, log: Log, step_s: Column | None, tokens_per_step: float | None,
    notes: list[str],
) -> Column:  # fmt: skip
    """Of one GPU or of all: whichever fits what else is known; where nothing decides, both readings are given."""
    expected = _expected_world_rate(known, mfu, log, step_s, tokens_per_step)
    readings: dict[str, float] = {"world": column.median, "device": column.median * known.gpus}
    scope = min(readings, key=lambda name: abs(math.log(readings[name] / expected[0]))) if expected else ""
    if expected is not None and 1 / _FITS < readings[scope] / expected[0] < _FITS:
        notes.append(
            f"{_no_scope(column, known)}: taken as of "
            f"{'one' if scope == 'device' else 'all'}, {readings[scope]:,.6g} tokens/s in total, which fits "
            f"{expected[1]}"
        )
        return dataclasses.replace(column, scope=scope, is_scope_stated=True)
    other = "device" if column.scope == "world" else "world"
    taken = f"{'all' if column.scope == 'world' else 'one'}{_as_written_by(column)}"
    times = readings[other] / readings[column.scope]
    notes.append(
        f"{_no_scope(column, known)}: taken as of {taken}; the other reading gives {readings[other]:,.6g} tokens/s in "
        f"total and {times:.4g} times the MFU (--per-gpu or --all-gpus says which)"
    )
    return column


_FITS = 1.35
"""FLOPs of a token are 6 to 9 a parameter in most models: closer than this nothing can be said by parameters."""


def _no_scope(column: Column, known: Known) -> str:
    return f"column {column.name!r} does not say whether it is of one GPU or of all {known.gpus}"


def _as_written_by(column: Column) -> str:
    return f", as {column.scope_from} writes it" if column.scope_from else ""


def _expected_world_rate(
    known: Known, mfu: Column | None, log: Log, step_s: Column | None, tokens_per_step: float | None
) -> tuple[float, str] | None:
    if tokens_per_step and step_s and step_s.is_unit_stated:
        return tokens_per_step / step_s.median, "the tokens and the time of a step"
    flops = log.column("flops_per_s")
    if known.parameters and flops and flops.is_scope_stated:
        total = flops.median * (known.gpus if flops.scope == "device" else 1)
        return total / (6.6 * known.parameters), f"{flops.name!r} and the parameters"
    if known.parameters and mfu and known.peak_flops_per_s and mfu.median <= 1:
        total = mfu.median * known.peak_flops_per_s * known.gpus
        return total / (6.6 * known.parameters), "the MFU in the log, the peak and the parameters"
    return None


# FLOP/s of a device.


def _device_flops(log: Log, known: Known, notes: list[str]) -> Column | None:
    column = log.column("flops_per_s", scope="device") or log.column("flops_per_s")
    if column is not None:
        if not column.is_scope_stated and known.gpus > 1:
            of_all = column.median / known.gpus / 1e12
            notes.append(
                f"{_no_scope(column, known)}: taken as of one{_as_written_by(column)}; of all it would be {of_all:.4g} "
                "TFLOP/s per GPU (--all-gpus)"
            )
        return _scaled(column, 1 / known.gpus) if column.scope == "world" else column
    total, elapsed = log.constant("total_flops"), log.constant("elapsed_s")
    if total and elapsed:
        source = log.column("total_flops")
        assert source is not None
        return dataclasses.replace(source, values=(total / elapsed / known.gpus,), lines=source.lines[-1:])
    return None


def _steps(log: Log, main: Column | None) -> tuple[float, ...]:
    """The steps of the main column's rows; counted from 0 where the log has none."""
    if main is None:
        return ()
    if log.where == "step":
        return tuple(float(line) for line in main.lines)
    column = log.column("step")
    by_line = dict(zip(column.lines, column.values, strict=True)) if column else {}
    if all(line in by_line for line in main.lines):
        return tuple(by_line[line] for line in main.lines)
    return tuple(float(i) for i in range(len(main.lines)))


def _elapsed_s(log: Log, step_s: Column | None) -> float | None:
    """Wall time of the run by our own windows, the trainer, the clock, or the time of a step times the steps."""
    if log.readings:
        return sum(reading.window.wall_s for reading in log.readings)
    clock = log.column("time")
    if (elapsed := log.constant("elapsed_s")) is not None:
        return elapsed
    if clock is not None and len(clock.values) > 1 and clock.values[-1] > clock.values[0]:
        return sum(max(0.0, b - a) for a, b in itertools.pairwise(clock.values))
    if step_s is None:
        return None
    steps = _steps(log, step_s)
    gaps = [b - a for a, b in itertools.pairwise(steps) if b > a]
    usual = statistics.median(gaps) if gaps else 1.0
    between = [usual, *(b - a if b > a else usual for a, b in itertools.pairwise(steps))]
    return sum(n * s for n, s in zip(between, step_s.values, strict=True))


# What does not fit.

_FAR = 1.25
"""Clocks hold logging, validation and checkpoints as well: less than this apart is not worth a word."""


def _disagreements(log: Log, step_s: Column | None, series: LogSeries) -> list[str]:
    found = [_restarts(log), *_twice(log)]
    clock, timed = _clock_step_s(log), log.column("time")
    falls = sum(b < a for a, b in itertools.pairwise(timed.values)) if timed and timed.unit == "date" else 0
    if falls:
        found.append(f"the dates go back {falls} times: a clock was set, or logs were joined; that time is left out")
    if step_s is not None and step_s.is_unit_stated and clock is not None:
        found.append(_apart("the clock", clock, f"column {step_s.name!r}", step_s.median, _seconds, at_least=True))
    rate = log.column("tokens_per_s", scope="world")
    if series.tokens_per_step and step_s is not None and rate is not None and rate.is_scope_stated:
        implied = series.tokens_per_step / step_s.median
        found.append(_apart(f"column {rate.name!r}", rate.median, "tokens of a step over its time", implied, _tokens))
    return [note for note in found if note]


def _restarts(log: Log) -> str:
    steps = log.column("step")
    falls = sum(b < a for a, b in itertools.pairwise(steps.values)) if steps else 0
    return f"the steps go back {falls} times: the run was resumed, and repeated steps count twice" if falls else ""


def _twice(log: Log) -> list[str]:
    """Two columns of one meaning that differ: which is used."""
    notes = []
    for quantity in ("mfu", "tokens_per_s", "step_s", "flops_per_s"):
        for scope in {column.scope for column in log.columns if column.quantity == quantity}:
            used = log.column(quantity, scope=scope)
            same = [c for c in log.columns if (c.quantity, c.scope) == (quantity, scope) and c.values]
            notes += [
                f"columns {used.name!r} and {other.name!r} both hold {quantity}; the first is used"
                for other in same
                if used is not None and abs(other.median / used.median - 1) > 0.05
            ]
    return notes


def _seconds(value: float) -> str:
    return f"{value:.4g} s per step"


def _tokens(value: float) -> str:
    return f"{value:,.6g} tokens/s"


def _apart(
    one: str, value: float, other: str, expected: float, say: Callable[[float], str], *, at_least: bool = False
) -> str:
    ratio = value / expected
    if 1 / _FAR < ratio < _FAR:
        return ""
    why = "; steps that are not logged, validation or checkpoints lie between" if at_least and ratio > 1 else ""
    return f"{one} gives {say(value)}, {other} {say(expected)}: {ratio:.3g} times{why}"
