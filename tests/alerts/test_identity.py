"""Every alert says which run it is of, what it cost, why and what to do; a chat gets it in 400 characters."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.alerts import AlertConfig, AlertDetector
from mfu_monitor.sinks import Event, read_jsonl
from mfu_monitor.sinks.run_identity import identity_of_this_process, short_alert
from mfu_monitor.sinks.webhook import WebhookSink
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading


class SteppedClock:
    """Each mark is a second after the last one, and ten times as many from a step on."""

    name = "fake"

    def __init__(self) -> None:
        self.now_s, self.step_s = 0.0, 1.0

    def mark(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


def alert_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Event, Path]:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    model, clock, got = nn.Linear(8, 8), SteppedClock(), []
    monitor = mm.Monitor(
        model, log_every_n_steps=2, peak=1e12, jsonl=tmp_path / "a.jsonl", clock=clock, host_clock=clock,
        on_alert=got.append, alerts=AlertConfig(warmup=2, min_baseline=10, baseline_windows=20), **options,
    )  # fmt: skip
    for step in range(70):
        clock.step_s = 1.0 if step < 50 else 10.0
        with monitor.step(x := torch.ones(4, 8)):
            model(x).sum().backward()
    monitor.close()
    [event] = [event for event in got if event.payload["kind"] == "drop"]
    return event, tmp_path / "a.jsonl"


def test_an_alert_says_who_is_ill_in_the_log_and_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mfu_monitor"):
        event, path = alert_event(tmp_path, monkeypatch, run_name="gpt-7b")
    host = identity_of_this_process().host
    assert event.payload["run"] == {"name": "gpt-7b", "host": host, "job_id": "4711", "rank": 0}
    assert event.payload["first_step"] < event.payload["step"]
    assert event.payload["before"] == pytest.approx(10 * event.payload["after"], rel=0.2)
    assert event.payload["level"] == "mfu"
    assert event.payload["lost_s"] > 0
    assert event.payload["causes"]
    assert event.payload["next_action"]
    logged = [record.getMessage() for record in caplog.records if "fell by" in record.getMessage()]
    assert logged == [event.text]
    assert event.text.endswith(f" s. Run: gpt-7b on {host}, job 4711, rank 0.")
    [written] = [e for e in read_jsonl(path).events if e.kind == "alert" and e.payload["kind"] == "drop"]
    assert written.payload == json.loads(json.dumps(event.payload))


def test_the_name_comes_from_the_variable_or_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/train_gpt.py"])
    assert identity_of_this_process().name == "train_gpt"
    monkeypatch.setenv("MFU_MONITOR_RUN_NAME", "sweep-3")
    assert identity_of_this_process().name == "sweep-3"
    assert identity_of_this_process("given").name == "given"
    assert str(identity_of_this_process("x")).startswith("x on ")


def test_a_chat_gets_every_kind_in_400_characters() -> None:
    def reading(index: int, mfu: float, wait: float) -> UtilizationReading:
        elapsed_s = 1e13 / (mfu * 1e14)
        window = StepWindow(
            first_step=index * 10 + 1, last_step=index * 10 + 10, steps=10, elapsed_s=elapsed_s, wall_s=elapsed_s,
            model_flops=10**13, data_wait_s=wait * elapsed_s, forward_s=0.3 * elapsed_s, backward_s=0.3 * elapsed_s,
        )  # fmt: skip
        return UtilizationReading(window=window, mfu=mfu, precision="bf16", peak_flops_per_s=1e14)

    detector, alerts = AlertDetector(AlertConfig(warmup=0, floor=0.2)), []
    for index in range(140):
        low = 50 <= index < 80
        alerts += detector.update(reading(index, 0.15 if low else 0.45, 0.7 if low else 0.02))
    assert [alert.kind for alert in alerts] == ["drop", "recovery"]
    run = {"name": "n" * 300, "host": "h" * 300, "job_id": "j" * 300, "rank": 12345}
    texts = [short_alert({**alert.to_dict(), "run": run}) for alert in alerts]
    assert all(len(text) <= 400 for text in texts)
    run = {"name": "gpt-7b", "host": "node17", "job_id": "4711", "rank": 0}
    drop, recovery = (short_alert({**alert.to_dict(), "run": run}).split("\n") for alert in alerts)
    assert drop == [
        "*gpt-7b: drop* (node17, job 4711, rank 0)",
        # Six windows of 1e13 / (0.15 * 1e14) s; two thirds of them lost.
        "MFU fell by 67%: 45.0% -> 15.0% (steps 501-560). 2.67 s lost.",
        f"Cause: waiting for data {alerts[0].causes[0].share_of_loss:.0%}, {drop[2].split(', ', 1)[1]}",
        "Next: raise num_workers or prefetch_factor, keep workers alive (persistent_workers=True), look at the storage",
    ]
    assert recovery[0] == "*gpt-7b: recovery* (node17, job 4711, rank 0)"
    # Thirty windows in all.
    assert recovery[1].endswith("13.3 s lost.")


def test_the_webhook_posts_the_short_form() -> None:
    from mfu_monitor.sinks.webhook import _body

    payload = {"kind": "drop", "message": "MFU fell by 20%. Cause: x. Next: y.", "run": {"name": "a", "host": "h"}}
    assert json.loads(_body(Event(kind="alert", step=1, text="long", payload=payload), "")) == {
        "text": "*a: drop* (h, rank 0)\nMFU fell by 20%."
    }
    assert WebhookSink("http://localhost:1/x").kinds == ("alert",)
