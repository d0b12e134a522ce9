"""How many device names get the right peak: Lightning's ``get_available_flops`` beside our lookup.

Right is the row's dense figure within 1% at the precision people train in on that part (bf16, else fp16, else fp32), or
no answer where no figure is published. Each name is given to both as the driver would report it, with the row's SM
count and memory for ours. Our own table is the reference, so our column only shows that every name finds its row and
no other; the figures themselves are checked by arithmetic in ``tests/hardware``. Only devices that are ``cuda`` to
torch are compared: Lightning recognises TPUs by an environment variable instead of a name. Nothing is asserted.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.table import PeakRow, load_table

TOLERANCE = 0.01
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OUTCOMES = ("right", "none", "wrong", "exception")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOutcome:
    """What both said for one name, in FLOP/s; the text of an exception where there was one."""

    name: str
    precision: str
    expected: float | None
    ours: float | str | None
    lightnings: float | str | None


def cases() -> Iterator[tuple[str, PeakRow]]:
    """Every name of a CUDA or ROCm device with the row it belongs to; a name that rows share, once for each."""
    for row in load_table():
        if row.vendor in ("NVIDIA", "AMD"):
            yield from ((name, row) for name in row.device_names)


def compare() -> list[NameOutcome]:
    """Ask both for every name."""
    return [_outcome(name, row) for name, row in cases()]


def _outcome(name: str, row: PeakRow) -> NameOutcome:
    rates = row.flops_per_s_by_precision()
    precision = next((p for p in DTYPES if p in rates), "bf16")
    return NameOutcome(
        name=name,
        precision=precision,
        expected=rates.get(precision),
        ours=_ours(name, row, precision),
        lightnings=_lightnings(name, row, DTYPES[precision]),
    )


def _ours(name: str, row: PeakRow, precision: str) -> float | None:
    device = DeviceProperties(
        name=name,
        sm_count=row.sm_count,
        compute_capability=row.compute_capability,
        gcn_arch=row.gfx,
        memory_bytes=int(row.memory_gb * 2**30) if row.memory_gb else None,
        clock_khz=int(row.boost_clock_mhz * 1000) if row.boost_clock_mhz else None,
    )
    peak = device_peak(device, warn=False)
    return peak.flops_per_s(precision) if peak is not None else None


def _lightnings(name: str, row: PeakRow, dtype: torch.dtype) -> float | str | None:
    from lightning.fabric.utilities.throughput import get_available_flops

    is_ampere = row.compute_capability is not None and row.compute_capability >= (8, 0)
    silent = (warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()))
    with (
        silent[0],
        silent[1],
        mock.patch("torch.cuda.get_device_name", return_value=name),
        mock.patch("lightning.fabric.accelerators.cuda._is_ampere_or_later", return_value=is_ampere),
    ):
        warnings.simplefilter("ignore")
        try:
            return get_available_flops(torch.device("cuda"), dtype)
        except Exception as error:  # noqa: BLE001  (a lookup that raises is an outcome)
            return f"{type(error).__name__}: {error}"


def judge(answer: float | str | None, expected: float | None) -> str:
    """``"right"``, ``"none"`` (an honest gap), ``"wrong"`` or ``"exception"``."""
    if isinstance(answer, str):
        return "exception"
    if answer is None:
        return "right" if expected is None else "none"
    return "right" if expected is not None and abs(answer / expected - 1) <= TOLERANCE else "wrong"


def main() -> None:
    """Print the counts, and every name that Lightning answers wrongly."""
    outcomes = compare()
    counts = {
        "mfu-monitor": Counter(judge(outcome.ours, outcome.expected) for outcome in outcomes),
        "Lightning": Counter(judge(outcome.lightnings, outcome.expected) for outcome in outcomes),
    }
    print(f"Peaks of {len(outcomes)} device names, dense, at the training precision of the part")
    print(f"{'':14}" + "".join(f"{outcome:>11}" for outcome in OUTCOMES))
    for tool, count in counts.items():
        print(f"{tool:14}" + "".join(f"{count[outcome]:>11}" for outcome in OUTCOMES))
    print("\nWrong answers of Lightning's get_available_flops (TFLOP/s):")
    for outcome in outcomes:
        if judge(outcome.lightnings, outcome.expected) == "wrong" and isinstance(outcome.lightnings, (int, float)):
            right = f"{outcome.expected / 1e12:g}" if outcome.expected is not None else "none published"
            print(f"  {outcome.name} {outcome.precision}: {outcome.lightnings / 1e12:g}, right is {right}")


if __name__ == "__main__":
    main()
