"""What people see: few scalars, numbers as people write them, the device by its name, one way out on a CPU."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import mfu_monitor as mm
from mfu_monitor import metric_names
from mfu_monitor.errors import PeakUnknownWarning
from mfu_monitor.metric_names import brief, written
from mfu_monitor.sinks import read_jsonl


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1977.4, "1,977"), (3.16e6, "3.16 M"), (0.0244, "0.0244"), (999.7, "1,000"), (1e14, "100 T"), (0.0, "0"),
        (999_900.0, "1 M"), (-2.5e9, "-2.5 G"), (12.0, "12"), (1e20, "1e+20"), (989.4e12, "989 T"),
    ],
)  # fmt: skip
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert written(value) == text


def train(folder: Path, **options: Any) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 8))
    monitor = mm.Monitor(
        model, tensorboard=folder / "tb", jsonl=folder / "a.jsonl", log_every_n_steps=4, total_steps=16, **options
    )
    for _ in range(16):
        with monitor.step(torch.ones(4, 8)):
            with monitor.phase("forward"):
                loss = model(torch.ones(4, 8)).sum()
            with monitor.phase("backward"):
                loss.backward()
            with monitor.phase("optimizer"):
                model.zero_grad()
    monitor.close()
    events = EventAccumulator(str(folder / "tb")).Reload()
    return {"scalars": events.Tags()["scalars"], "events": events}


def test_tensorboard_has_at_most_fifteen_scalars_by_default_and_all_with_full_detail(tmp_path: Path) -> None:
    few = train(tmp_path / "brief", peak=1e12)["scalars"]
    assert len(few) <= 15
    assert {"utilization/mfu", "utilization/hfu", "step_time/total_s", "remaining/wall_clock_s"} <= set(few)
    everything = set(train(tmp_path / "full", peak=1e12, detail="full")["scalars"])
    assert set(few) < everything
    assert "throughput/device/model_flops_per_s" in everything
    written_down = read_jsonl(tmp_path / "brief" / "a.jsonl").reading_events[-1].metrics
    assert set(few) < set(written_down)


def test_the_brief_names_are_ours_and_names_of_others_stay() -> None:
    assert len(metric_names.BRIEF) == 15
    assert set(metric_names.BRIEF) <= set(metric_names.MEANINGS)
    assert brief({"train/device/mfu": 0.4, "utilization/mfu": 0.4, "waterfall/host": 0.1}).keys() == {
        "train/device/mfu",
        "utilization/mfu",
    }


def test_a_cpu_is_told_one_way_out_and_the_card_says_the_same_device(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        events = train(tmp_path)["events"]
    [warning] = [w for w in caught if issubclass(w.category, PeakUnknownWarning)]
    text = str(warning.message)
    assert text.endswith("Measure it: peak='measure'.")
    assert "Nearest" not in text
    assert "derive" not in text
    assert warning.filename == __file__
    [device] = re.findall(r"for device '(.*?)'", text)
    [card] = events.Tensors("mfu_monitor/card/start/text_summary")
    assert f"- device: {device}\n" in card.tensor_proto.string_val[0].decode()
