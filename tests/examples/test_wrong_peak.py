"""A peak 20 times too low: training goes to its end, no impossible MFU is logged, TensorBoard shows the diagnosis."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils import flop_counter  # noqa: F401  (imported early: its import is slow under the test's timers)

from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.sinks import read_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_peak_too_low_withholds_mfu_and_explains_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    # A twentieth of 2 GFLOP/s: even the slowest machine that runs the tests trains faster than that.
    slow = DevicePeak(device_name="cpu", flops_per_s_by_precision={"fp32": 2e9}, source="measured")
    monkeypatch.setattr("mfu_monitor.hardware.measure.measure_peak", lambda *args, **kwargs: slow)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runpy.run_path(str(EXAMPLES / "wrong_peak.py"))["main"](["--max-steps=20", f"--log-dir={tmp_path}"])
    assert [w for w in told if "mfu_over_peak" in str(w.message)]
    shown = capsys.readouterr().out
    assert "Trained 20 steps; 4 windows, 0 of them with an MFU." in shown
    assert "mfu_over_peak" in shown
    folder = tmp_path / "version_0"
    read = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    tags = read.Tags()
    assert not [tag for tag in tags["scalars"] if tag in ("utilization/mfu", "utilization/hfu")]
    assert [s.value for s in read.Scalars("alerts/active")] == [1.0] * 4
    (text,) = read.Tensors("mfu_monitor/diagnosis/text_summary")
    assert "mfu_over_peak" in text.tensor_proto.string_val[0].decode()
    assert all(reading.mfu is None for reading in read_jsonl(folder / "mfu.jsonl").readings)
