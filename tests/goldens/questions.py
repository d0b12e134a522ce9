"""Fifty readings with what is claimed of them: the questions that `mm.check` is asked."""

from __future__ import annotations

from typing import Any

import mfu_monitor as mm
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

from .record import step_record

__all__ = ["QUESTIONS", "answer"]

PEAK = 989.4e12
BATCH = 4e14
"""Model FLOPs of one batch; at one second a batch 40.4% of a dense H100 in bf16."""

QUESTIONS: dict[str, dict[str, Any]] = {
    # (fields of the reading), w_ for the window's, e_ for evidence; `record` hands over the counted step.
    "a healthy reading": {},
    "a healthy reading with its record": {"record": True},
    "a slow run": {"mfu": 0.004},
    "a slow run, waiting for data": {"mfu": 0.1, "w_data_wait_s": 8.0},
    "no MFU and its reason": {"mfu": None, "reason": "no dense peak is known for this device"},
    "no MFU, device unknown": {"mfu": None, "device_name": "", "peak_flops_per_s": None},
    "just under the attainable": {"mfu": 0.93},
    "98 percent": {"mfu": 0.98},
    "102 percent": {"mfu": 1.02},
    "104 percent": {"mfu": 1.04},
    "106 percent": {"mfu": 1.06},
    "127 percent": {"mfu": 1.2735},
    "200 percent": {"mfu": 2.0},
    "12 times the peak": {"mfu": 12.0},
    "infinite": {"mfu": float("inf")},
    "not a number": {"mfu": float("nan")},
    "negative": {"mfu": -0.1},
    "HFU below MFU": {"mfu": 0.5, "hfu": 0.4},
    "HFU over the peak, MFU under it": {"mfu": 0.9, "hfu": 1.2},
    "HFU above MFU": {"mfu": 0.5, "hfu": 0.6},
    "goodput above MFU": {"mfu": 0.4, "goodput_mfu": 0.7},
    "goodput below MFU": {"mfu": 0.4, "goodput_mfu": 0.3},
    "weighted over the peak": {"mfu": 0.7, "mfu_weighted": 1.3},
    "sparse peak of the user": {"mfu": 0.2021, "peak_flops_per_s": 1978.9e12},
    "sparse peak, little used": {"mfu": 0.05, "peak_flops_per_s": 1978.9e12},
    "fp32 peak for bf16 work": {"mfu": 5.97, "peak_flops_per_s": 67e12},
    "PCIe peak for SXM": {"mfu": 0.53, "peak_flops_per_s": 756.5e12},
    "A100 peak on an H100": {"mfu": 1.28, "peak_flops_per_s": 312e12},
    "MACs reported as FLOPs": {"record": True, "e_flops_per_batch": BATCH / 2},
    "forward only": {"record": True, "e_flops_per_batch": BATCH / 3},
    "counted twice": {"record": True, "e_flops_per_batch": 2 * BATCH},
    "the user's own figure agrees": {"record": True, "e_flops_per_batch": BATCH},
    "the user's own figure is used": {
        "record": True,
        "e_flops_per_batch": 2 * BATCH,
        "e_flops_per_batch_is_used": True,
    },
    "recomputation in MFU": {"record": True, "e_flops_per_batch": 3.4 / 3 * BATCH},
    "another tool agrees": {"e_reported_mfu": 0.404},
    "another tool says double": {"e_reported_mfu": 0.808},
    "another tool says eight times": {"e_reported_mfu": 8 * 0.4043, "w_world_size": 8},
    "accumulation of four": {"record": True, "e_flops_per_batch": 4 * BATCH, "e_accumulate_grad_batches": 4},
    "sum of all ranks": {"record": True, "e_flops_per_batch": 8 * BATCH, "w_world_size": 8},
    "bf16 promised, fp32 ran": {"precision": "fp32", "peak_flops_per_s": 67e12, "e_promised_precision": "bf16-mixed"},
    "bf16 promised, bf16 ran": {"e_promised_precision": "bf16-mixed"},
    "6 N D with embeddings": {"e_claimed_parameters": 8e9, "e_parameters": 8e9, "e_embedding_parameters": 2e9},
    "more tokens claimed than seen": {"e_claimed_tokens": 163840},
    "the clock went backwards": {"e_timestamps_s": (1.0, 2.0, 1.5, 3.0)},
    "a clock that did not move": {"w_elapsed_s": 0.0, "mfu": None},
    "device time far above host time": {"mfu": 40.4, "e_device_elapsed_s": 1000.0},
    "warm-up in the window": {"mfu": 0.1, "e_step_times_s": (30.0, *[1.0] * 9)},
    "even steps": {"e_step_times_s": (1.0,) * 10},
    "growing with the steps": {"e_mfu_history": tuple((10 * i, 0.1 * i) for i in range(1, 9)), "mfu": 0.9},
    "peak from a measurement, exceeded": {"mfu": 1.15, "peak_source": "measured", "e_achievable_flops_per_s": PEAK},
}


def answer(question: dict[str, Any]) -> tuple[mm.Diagnosis, ...]:
    """What `mm.check` says to one question."""
    window = {"first_step": 90, "last_step": 99, "steps": 10, "elapsed_s": 10.0, "wall_s": 10.0}
    window |= {"model_flops": round(10 * BATCH), "tokens": 10 * 8192}
    fields: dict[str, Any] = {"mfu": BATCH / PEAK, "device_name": "NVIDIA H100 80GB HBM3", "precision": "bf16"}
    fields |= {"peak_flops_per_s": PEAK, "peak_source": "user"}
    evidence: dict[str, Any] = {}
    for name, value in question.items():
        kind, _, short = name.partition("_")
        target = {"w": window, "e": evidence}.get(kind, fields)
        target[short if kind in ("w", "e") else name] = value
    record = step_record(round(BATCH / 450e9)) if fields.pop("record", False) else None
    return mm.check(UtilizationReading(window=StepWindow(**window), **fields), record, **evidence)
