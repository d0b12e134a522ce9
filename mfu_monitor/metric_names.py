"""Every metric by its public name, once, with its unit and what it means; sinks and readers of logs use these.

The last word of a name is its unit: ``_s`` seconds, ``_per_s`` a second. Names without one are fractions 0..1, or FLOPs
under ``flops_per_step/``.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ALERTS_ACTIVE",
    "BRIEF",
    "FLOPS_PER_STEP",
    "HFU",
    "IS_EXACT",
    "MEANINGS",
    "MFU",
    "OF_MEASURED_PEAK",
    "OF_READING",
    "RANK_SPREAD",
    "STEP_TIME",
    "THROUGHPUT_MONITOR",
    "THROUGHPUT_MONITOR_WORLD",
    "TOTAL_S",
    "brief",
    "written",
]

MFU = "utilization/mfu"
HFU = "utilization/hfu"
IS_EXACT = "utilization/is_exact"
OF_MEASURED_PEAK = "utilization/of_measured_peak"
TOTAL_S = "step_time/total_s"
RANK_SPREAD = "step_time/rank_spread"
ALERTS_ACTIVE = "alerts/active"

OF_READING: Mapping[str, str] = {
    "mfu": MFU,
    "hfu": HFU,
    "mfu_weighted": "utilization/mfu_weighted",
    "attainable_mfu": "utilization/attainable_mfu",
    "goodput_mfu": "utilization/goodput_mfu",
    "tokens_per_s": "throughput/tokens_per_s",
    "device_tokens_per_s": "throughput/device/tokens_per_s",
    "samples_per_s": "throughput/samples_per_s",
    "device_samples_per_s": "throughput/device/samples_per_s",
    "device_model_flops_per_s": "throughput/device/model_flops_per_s",
    "device_hardware_flops_per_s": "throughput/device/hardware_flops_per_s",
}
"""By field of ``UtilizationReading``."""

STEP_TIME: Mapping[str, str] = {
    "elapsed_s": TOTAL_S,
    "data_wait_s": "step_time/data_wait_s",
    "forward_s": "step_time/forward_s",
    "backward_s": "step_time/backward_s",
    "optimizer_s": "step_time/optimizer_s",
    "h2d_copy_s": "step_time/h2d_copy_s",
    "between_s": "step_time/between_s",
    "other_s": "step_time/other_s",
}
"""By field of ``StepWindow``; each the mean per training batch of the window."""

FLOPS_PER_STEP: Mapping[str, str] = {
    "model_flops": "flops_per_step/model",
    "hardware_flops": "flops_per_step/hardware",
    "recompute_flops": "flops_per_step/recompute",
}
"""By field of ``StepWindow``; each the mean per training batch of the window, on this rank."""

THROUGHPUT_MONITOR: Mapping[str, str] = {
    "mfu": "train/device/mfu",
    "device_model_flops_per_s": "train/device/flops_per_sec",
    "device_tokens_per_s": "train/device/items_per_sec",
    "device_samples_per_s": "train/device/samples_per_sec",
    "device_batches_per_s": "train/device/batches_per_sec",
}
"""Lightning's ThroughputMonitor's, for ``names="throughput_monitor"``: of one device."""

THROUGHPUT_MONITOR_WORLD: Mapping[str, str] = {
    "model_flops_per_s": "train/flops_per_sec",
    "tokens_per_s": "train/items_per_sec",
    "samples_per_s": "train/samples_per_sec",
    "batches_per_s": "train/batches_per_sec",
}
"""The same of all ranks; only where there is more than one."""

MEANINGS: Mapping[str, tuple[str, str]] = {
    MFU: ("fraction", "model FLOPs over time and the dense peak of all ranks' devices"),
    HFU: ("fraction", "executed FLOPs over time and the dense peak of all ranks' devices"),
    "utilization/mfu_weighted": ("fraction", "MFU with each precision at its own peak, where two are in use"),
    "utilization/attainable_mfu": ("fraction", "the MFU that the roofline allows for this step"),
    IS_EXACT: ("0 or 1", "1 where the label of the counts is exact; the reading has the label"),
    OF_MEASURED_PEAK: ("fraction", "model FLOP/s over the best product measured on this device"),
    "utilization/goodput_mfu": ("fraction", "MFU over all wall time of the run, validation and the rest included"),
    "throughput/tokens_per_s": ("1/s", "tokens of all ranks, padding included"),
    "throughput/device/tokens_per_s": ("1/s", "tokens of this rank, padding included"),
    "throughput/samples_per_s": ("1/s", "samples of all ranks"),
    "throughput/device/samples_per_s": ("1/s", "samples of this rank"),
    "throughput/device/model_flops_per_s": ("FLOP/s", "model FLOPs of this rank"),
    "throughput/device/hardware_flops_per_s": ("FLOP/s", "executed FLOPs of this rank"),
    TOTAL_S: ("s", "a training batch, the wait for it included"),
    "step_time/data_wait_s": ("s", "waiting for the batch"),
    "step_time/forward_s": ("s", "the forward pass"),
    "step_time/backward_s": ("s", "the backward pass"),
    "step_time/optimizer_s": ("s", "the optimizer's step"),
    "step_time/h2d_copy_s": ("s", "moving the batch to the device; part of the others"),
    "step_time/between_s": ("s", "callbacks and logging between steps; part of other_s"),
    "step_time/other_s": ("s", "the rest of total_s"),
    RANK_SPREAD: ("fraction", "(slowest - fastest) / mean of the ranks' busy seconds"),
    "flops_per_step/model": ("FLOPs", "what forward and backward need"),
    "flops_per_step/hardware": ("FLOPs", "all that was executed"),
    "flops_per_step/recompute": ("FLOPs", "forwards that checkpointing ran again"),
    ALERTS_ACTIVE: ("0 or 1", "1 during an incident, and while a reading is impossible"),
    "waterfall/": ("fraction", "the share of the peak that a cause takes; with mfu they add up to 1"),
    "remaining/wall_clock_s": ("s", "until the last step, at the present pace"),
    "remaining/device_hours": ("h", "the same on all devices"),
}
"""(unit, meaning) by name; a name that ends in "/" stands for all that begin so."""

BRIEF = frozenset(
    {
        MFU,
        HFU,
        IS_EXACT,
        "utilization/goodput_mfu",
        "throughput/tokens_per_s",
        "throughput/samples_per_s",
        TOTAL_S,
        "step_time/data_wait_s",
        "step_time/forward_s",
        "step_time/backward_s",
        "step_time/optimizer_s",
        "flops_per_step/model",
        "flops_per_step/hardware",
        ALERTS_ACTIVE,
        "remaining/wall_clock_s",
    }
)
"""What TensorBoard shows by default; the rest with ``detail="full"``."""


def brief(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those of ours that only ``detail="full"`` shows; names of others' stay.

    Example:
        >>> brief({"utilization/mfu": 0.4, "waterfall/host": 0.1})
        {'utilization/mfu': 0.4}
    """
    return {
        name: value
        for name, value in metrics.items()
        if name in BRIEF or not (name in MEANINGS or f"{name.split('/')[0]}/" in MEANINGS)
    }


def written(value: float) -> str:
    """A number as people write it: at least three digits, thousands apart, large ones by their letter.

    Example:
        >>> written(1977.4), written(3.16e6), written(0.0244)
        ('1,977', '3.16 M', '0.0244')
    """
    for scale, letter in _LETTERS:
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g} {letter}" if abs(value) < 999.5 * scale else f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


_LETTERS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
