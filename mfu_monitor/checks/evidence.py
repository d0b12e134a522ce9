"""What is known beside a reading, and both together with the device's row: what every check and cause looks at."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.lookup import find_row
from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.table import PeakRow
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

_Answer = TypeVar("_Answer")

__all__ = ["Case", "Evidence", "finite"]


def finite(value: float | None) -> float | None:
    """The number, or None for None, NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What somebody claimed, and what else is known: everything is optional, None is unknown.

    *Claims* are values under question (the user's own FLOPs, another tool's MFU). *Witnesses* are facts that a cause
    must agree with before it is named.

    Example:
        >>> mm.check(reading, record, evidence=Evidence(flops_per_batch=model.flops_per_batch))

    Raises:
        ConfigurationError: a value is negative.
    """

    # Claims.
    flops_per_batch: float | None = None
    """FLOPs of one training batch on one rank, as the user's own formula gives them (Lightning's contract)."""
    flops_per_batch_is_used: bool = False
    """True where the window's model FLOPs are the user's and not our count (honoured, because asked to)."""
    reported_mfu: float | None = None
    """MFU of the same window by another tool, as a fraction."""
    claimed_parameters: float | None = None
    """The N that the user's formula (6 N D) used."""
    claimed_tokens: float | None = None
    """Tokens of this rank's window, as another tool or the user counted them."""
    promised_precision: str | None = None
    """What the configuration promises: ``"bf16-mixed"``, ``"16-true"``, ``"bf16"``."""

    # Witnesses on the model and the loop.
    parameters: float | None = None
    """All parameters by their logical shapes, each once."""
    embedding_parameters: float | None = None
    """Those of look-ups only: they take part in no product."""
    inactive_expert_parameters: float | None = None
    """Those of experts that one token does not pass through."""
    stored_parameters: float | None = None
    """Sum of ``numel`` of the tensors as they lie on this rank: a shard's part, packed 4-bit weights as bytes."""
    parameter_bytes: float | None = None
    """Bytes of the weights that one batch must read on this rank."""
    gradient_bytes: float | None = None
    """Bytes of the gradients that one batch must write on this rank."""
    accumulate_grad_batches: int | None = None
    input_elements: float | None = None
    """Elements of this rank's inputs in the window (pixels x channels, for images)."""

    # Witnesses on time.
    step_times_s: tuple[float, ...] = ()
    """Seconds of each step of the window, in order."""
    timestamps_s: tuple[float, ...] = ()
    """Times of readings or steps, in the order in which they were written."""
    mfu_history: tuple[tuple[int, float], ...] = ()
    """(last step, MFU) of earlier readings, oldest first."""
    device_elapsed_s: float | None = None
    """Seconds of the window by the device's own clock, where the window's are the host's."""

    # Witnesses on the device.
    device_name: str | None = None
    """What the driver says the device is, where the reading's name came from elsewhere."""
    sm_count: int | None = None
    """Multiprocessors (compute units) that the driver reports."""
    achievable_flops_per_s: float | None = None
    """The best matrix product measured on this device at the active precision."""
    max_clock_ratio: float | None = None
    """Maximum clock over the clock of the datasheet's value; looked up where it is None."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not value >= 0:
                raise ConfigurationError(
                    f"Evidence({f.name}={value!r}): a value of at least 0 was expected, or None where it is unknown, "
                    f"for example Evidence({f.name}=None)."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A reading, its evidence, and the values that several checks need. Each property is None where it is unknown."""

    reading: UtilizationReading
    record: StepRecord | None = None
    peak: DevicePeak | None = None
    evidence: Evidence = field(default_factory=Evidence)
    row: PeakRow | None = None
    """The device's row in the table of peaks."""

    @classmethod
    def of(
        cls,
        reading: UtilizationReading,
        record: StepRecord | None,
        peak: DevicePeak | None,
        evidence: Evidence,
    ) -> Case:
        """Look the device up and put everything together."""
        name = evidence.device_name or reading.device_name or (peak.device_name if peak else "")
        return cls(reading=reading, record=record, peak=peak, evidence=evidence, row=_table_row(name))

    @property
    def window(self) -> StepWindow:
        return self.reading.window

    @property
    def device_name(self) -> str:
        named_peak = self.peak.device_name if self.peak else ""
        return self.evidence.device_name or self.reading.device_name or named_peak or "this device"

    @property
    def mfu(self) -> float | None:
        return finite(self.reading.mfu)

    @property
    def hfu(self) -> float | None:
        return finite(self.reading.hfu)

    @property
    def bounded_mfu(self) -> float | None:
        """The one that physics bounds: weighted by precision where several ran, by the exact convention."""
        weighted = finite(self.reading.mfu_weighted)
        return self.exact_mfu if weighted is None else weighted

    @property
    def exact_mfu(self) -> float | None:
        """The reading by the exact convention, whichever it is given in."""
        model, palm = self.window.model_flops, self.window.palm_model_flops
        if self.mfu is None or self.reading.convention != "palm" or not (model and palm):
            return self.mfu
        computed = self.computed_mfu
        # A reading labelled palm whose value is the exact one already is left as it is.
        if computed is not None and math.isclose(self.mfu, computed, rel_tol=0.005):
            return self.mfu
        return self.mfu * model / palm

    @property
    def precision(self) -> str | None:
        if self.reading.precision is not None or self.record is None:
            return self.reading.precision
        return self.record.active_precision

    @property
    def peak_flops_per_s(self) -> float | None:
        """The peak that the reading used for one device."""
        if self.reading.peak_flops_per_s is not None:
            return finite(self.reading.peak_flops_per_s)
        peaks = self.peak.flops_per_s_by_precision if self.peak else self.reading.peak_flops_per_s_by_precision
        return finite(peaks.get(self.precision or ""))

    @property
    def world_size(self) -> int:
        return max(self.window.world_size, 1)

    @property
    def world_peak_flops_per_s(self) -> float | None:
        """The peak that the reading used for all devices together."""
        given = self.reading.world_peak_flops_per_s or self.window.world_peak_flops_per_s
        return finite(given) or _times(self.peak_flops_per_s, self.world_size)

    @property
    def is_homogeneous(self) -> bool:
        """True unless the world's peak says that the ranks' devices differ."""
        peak, world = self.peak_flops_per_s, self.world_peak_flops_per_s
        devices = world / peak if peak and world else 1.0
        return any(math.isclose(devices, n, rel_tol=0.01) for n in (1, self.world_size))

    @property
    def world_model_flops(self) -> float | None:
        """Of all ranks; where they were not gathered, this rank's times their number."""
        return self.window.world_model_flops or _times(self.window.model_flops, self.world_size)

    @property
    def computed_mfu(self) -> float | None:
        """MFU from the window's own fields, with one device's peak times the world size."""
        peak = _times(self.peak_flops_per_s, self.world_size)
        flops, elapsed = self.world_model_flops, self.window.rate_s
        return flops / (elapsed * peak) if flops and peak and elapsed > 0 else None

    @property
    def window_flops_per_batch(self) -> float | None:
        flops, steps = self.window.model_flops, self.window.steps
        return flops / steps if flops and steps > 0 else None

    @property
    def counted_flops_per_batch(self) -> float | None:
        """Our own count: the window's mean, or the record's where the window holds the user's value or none."""
        window = None if self.evidence.flops_per_batch_is_used else self.window_flops_per_batch
        record = float(self.record.model_flops) if self.record is not None and self.record.model_flops else None
        return window or record

    @property
    def counts(self) -> tuple[StepRecord | StepWindow, ...]:
        """Where our own count of model, hardware and PaLM FLOPs lies, the better place first."""
        record = () if self.record is None else (self.record,)
        return record if self.evidence.flops_per_batch_is_used else (self.window, *record)

    @property
    def accumulate(self) -> int:
        """Training batches that one optimizer step gathers; 1 where it is unknown."""
        if self.evidence.accumulate_grad_batches:
            return self.evidence.accumulate_grad_batches
        steps, optimizer_steps = self.window.steps, self.window.optimizer_steps
        return round(steps / optimizer_steps) if optimizer_steps and steps else 1

    @property
    def max_clock_ratio(self) -> float | None:
        from_peak = self.peak.max_clock_ratio if self.peak else None
        from_row = self.row.max_clock_ratio if self.row else None
        return self.evidence.max_clock_ratio or from_peak or from_row

    @property
    def clock_ratio(self) -> float | None:
        """The clock that was read in the window over the datasheet's; the highest there is where none was read."""
        read = self.window.sm_clock_mhz
        nominal = self.row.tensor_clock_mhz or self.row.boost_clock_mhz if self.row else None
        return read / nominal if read and nominal else self.max_clock_ratio

    @property
    def peak_source(self) -> str:
        return self.reading.peak_source or (self.peak.source if self.peak else "")

    @property
    def peak_was_looked_up(self) -> bool:
        """False for a measured or derived peak: its value is this device's own, and nobody took it from a datasheet."""
        return not self.peak_source.startswith(("measured", "derived"))

    @property
    def table_peak_flops_per_s(self) -> float | None:
        """The table's dense peak of this device at the active precision; of a slice, the slice's."""
        precision = self.precision or ""
        if self.peak is not None and self.peak.source.startswith("table"):
            return self.peak.flops_per_s_by_precision.get(precision)
        whole = self.row.flops_per_s_by_precision().get(precision) if self.row else None
        return _times(whole, self.share_of_part) if self.share_of_part is not None else None

    @property
    def share_of_part(self) -> float | None:
        """This device's multiprocessors over the whole part's; None for a slice of unknown size."""
        whole, present = self.row.sm_count if self.row else None, self.evidence.sm_count
        if whole and present:
            return present / whole
        return None if " MIG" in self.device_name else 1.0

    def metrics(self) -> Mapping[str, object]:
        """Numerator, denominator and the like, for a message about the reading itself."""
        known = {
            "mfu": self.mfu,
            "hfu": self.hfu,
            "device_model_flops_per_s": self.reading.device_model_flops_per_s or self._device_model_flops_per_s(),
            "peak_flops_per_s": self.peak_flops_per_s,
            "peak_source": self.peak_source or None,
            "precision": self.precision,
            "elapsed_s": self.window.elapsed_s,
            "steps": self.window.steps,
            "world_size": self.world_size,
        }
        return {name: value for name, value in known.items() if value is not None}

    def _device_model_flops_per_s(self) -> float | None:
        flops, elapsed = self.window.model_flops, self.window.elapsed_s
        return flops / elapsed if flops and elapsed > 0 else _times(self.mfu, self.peak_flops_per_s or 0) or None


def or_none(call: Callable[[], _Answer]) -> _Answer | None:
    """The answer; None where a figure is beyond the range of floats, so that the check has nothing to say of it."""
    try:
        return call()
    except ArithmeticError:
        return None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


@functools.lru_cache(maxsize=256)
def _table_row(device_name: str) -> PeakRow | None:
    """The row of a device by its driver's name; a slice (MIG) has its parent's row. Never warns."""
    parent = device_name.split(" MIG")[0].strip()
    return find_row(DeviceProperties(name=parent)).row if parent else None
