"""The text card: what a step ran, against which peak, and what was left uncounted. Pure: records in, markdown out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mfu_monitor.counting.step_record import FlopTotals, StepRecord
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.sinks.base import Event
from mfu_monitor.utilization import UtilizationReading

__all__ = ["CardMaker", "text_card"]

_CONVENTIONS = {
    "exact": "exact: a multiply-add is 2 FLOPs, masked attention counts its attended pairs; model FLOPs hold no rerun",
    "palm": "palm: a multiply-add is 2 FLOPs, attention counts its full square; model FLOPs hold no rerun",
}


class CardMaker:
    """Follows the events of a run and makes its two cards: one when the first step was counted, one at the end.

    Example:
        >>> maker = CardMaker()
        >>> for event in run.events:
        ...     card = maker.take(event)  # an Event of kind "card" after the first record, else None
        >>> final = maker.final()
    """

    def __init__(self) -> None:
        self._peak: DevicePeak | None = None
        self._record: StepRecord | None = None
        self._reading: UtilizationReading | None = None
        self._device_name = ""
        self._step = 0

    def take(self, event: Event) -> Event | None:
        """Note what the event says; the first card, if this is the first record."""
        self._step = max(self._step, event.step)
        if event.kind == "run":
            self._peak = _peak_from(event.payload.get("peak"))
            self._device_name = str(event.payload.get("device_name") or "")
        elif event.kind == "reading":
            self._reading = UtilizationReading.from_dict(event.payload)
        elif event.kind == "record":
            is_first = self._record is None
            self._record = StepRecord.from_dict(dict(event.payload.get("record", event.payload)))
            return self._card("start") if is_first else None
        return None

    def final(self) -> Event | None:
        """The card of the whole run; None where no step was counted."""
        return self._card("end")

    def _card(self, title: str) -> Event | None:
        if self._record is None:
            return None
        text = text_card(self._record, reading=self._reading, peak=self._peak, device_name=self._device_name)
        return Event(kind="card", step=self._step, text=text, title=f"card/{title}")


def _peak_from(values: Mapping[str, Any] | None) -> DevicePeak | None:
    if values is None:
        return None
    names = {f.name for f in dataclasses.fields(DevicePeak)}
    return DevicePeak(**{name: value for name, value in values.items() if name in names})


def text_card(
    record: StepRecord,
    *,
    reading: UtilizationReading | None = None,
    peak: DevicePeak | None = None,
    device_name: str = "",
    top_modules: int = 10,
) -> str:
    """Markdown for people: everything one needs to judge the values of a run.

    Args:
        record: what one counted step ran on this rank.
        reading: the latest reading, for its values, convention and precision; None at the start of training.
        device_name: the device, where its peak is not known.
        peak: the device's peak; None where it is unknown, which the card then says.
        top_modules: how many modules to list, by their own hardware FLOPs.

    Returns:
        Headings, a list and tables in the markdown that TensorBoard shows.
    """
    sections = [
        *_figures(reading),
        *_device(record, reading, peak, device_name),
        *_by_precision(record),
        *_by_phase(record),
        *_by_module(record, top_modules),
        *_coverage(record),
    ]
    return "\n".join(sections)


def _figures(reading: UtilizationReading | None) -> list[str]:
    if reading is None:
        return []
    rows = [
        ("MFU", _number(reading.mfu)),
        ("HFU", _number(reading.hfu)),
        ("tokens/s", _number(reading.tokens_per_s)),
        ("steps of the window", f"{reading.first_step}-{reading.last_step}"),
        ("exactness", reading.exactness.replace("_", " ")),
    ]
    if reading.achievable_fraction is not None:
        rows.insert(2, ("of the best product measured on this device", _number(reading.achievable_fraction)))
    lines = [f"- {name}: **{value}**" for name, value in rows]
    reason = [f"- no MFU: {reading.reason}"] if reading.mfu is None and reading.reason else []
    return ["### Last window", "", *lines, *reason, ""]


def _device(
    record: StepRecord, reading: UtilizationReading | None, peak: DevicePeak | None, device_name: str
) -> list[str]:
    convention = reading.convention if reading else "exact"
    precision = reading.precision if reading else record.active_precision
    name = (peak.device_name if peak else reading.device_name if reading else "") or device_name or "unknown"
    return [
        "### Device and peak",
        "",
        f"- device: {name}",
        f"- precision: {precision or 'unknown'}, the one that carries the most model FLOPs",
        f"- peak: {_peak(peak, precision)}",
        f"- convention: {_CONVENTIONS.get(convention, convention)}",
        "",
    ]


def _peak(peak: DevicePeak | None, precision: str | None) -> str:
    if peak is None:
        return 'unknown, so no MFU; give one in FLOP/s with peak=..., or measure it with peak="measure"'
    density = "dense" if peak.is_dense else "SPARSE, which no dense product can reach"
    flops_per_s = peak.flops_per_s_by_precision.get(precision) if precision else None
    if flops_per_s is None:
        return f"none at {precision or 'this precision'} (source: {peak.source or 'unknown'}, {density})"
    return f"{_rate(flops_per_s)} {density} at {precision}, source: {peak.source or 'unknown'}"


def _rate(flops_per_s: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if flops_per_s >= 1e12 else (1e9, "GFLOP/s")
    return f"{flops_per_s / scale:,.4g} {unit}"


def _by_precision(record: StepRecord) -> list[str]:
    return _section("FLOPs per step by precision", "precision", record.by_dtype().items(), record.totals)


def _by_phase(record: StepRecord) -> list[str]:
    named = [(name, part) for name, part in record.by_phase().items() if part.hardware_flops]
    return _section("FLOPs per step by phase", "phase", [*named, ("all", record.totals)], record.totals)


def _by_module(record: StepRecord, top_modules: int) -> list[str]:
    own = [(name or "(outside any module)", part) for name, part in record.by_module(inclusive=False).items()]
    own = [(name, part) for name, part in own if part.hardware_flops]
    own.sort(key=lambda item: item[1].hardware_flops, reverse=True)
    title = f"Top modules ({min(top_modules, len(own))} of {len(own)})"
    return _section(title, "module", own[:top_modules], record.totals)


def _section(title: str, key: str, rows: Iterable[tuple[str, FlopTotals]], total: FlopTotals) -> list[str]:
    table = [
        [name, f"{part.model_flops:,}", f"{part.hardware_flops:,}", _share(part.hardware_flops, total.hardware_flops)]
        for name, part in rows
    ]
    head = [key, "model FLOPs", "hardware FLOPs", "share of hardware"]
    return [f"### {title}", "", *_table(head, table), ""]


def _coverage(record: StepRecord) -> list[str]:
    ops = [
        f"- `{op.op}` in {op.module_fqn or '(outside any module)'}, {op.phase.value}, {op.calls} calls"
        for op in record.unsupported_ops
    ]
    parameters = [
        f"- parameter `{p.name}` ({p.numel:,} numbers, {p.share_of_parameters:.3g} of all) got a gradient, and no "
        "operator that touched it was seen"
        for p in record.uncovered_parameters
    ]
    notes = [f"- {note}" for note in record.notes]
    verdict = (
        "The counts are **lower bounds**: the work below ran and could not be counted."
        if record.is_lower_bound
        else "Nothing was left uncounted: every operator on floating tensors was counted, or counts 0 by convention."
    )
    return ["### Coverage", "", verdict, "", *ops, *parameters, *notes]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    divider = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, divider, *rows)]


def _share(part: int, total: int) -> str:
    return f"{part / total:.3f}" if total else "unknown"


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4f}" if value < 10 else f"{value:,.0f}"
