"""What the monitor makes of a reading: withheld where impossible, judged, alerted on, explained."""

from __future__ import annotations

import json
import socket
import threading
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch

import mfu_monitor as mm
from mfu_monitor.errors import (
    ConfigurationError,
    ImpossibleReadingError,
    ImpossibleReadingWarning,
    StageDisabledWarning,
)
from mfu_monitor.sinks.run_identity import short_alert

approx: Any = pytest.approx
pytestmark = pytest.mark.filterwarnings("ignore:.*less than a megaflop.*")
STEP_FLOPS = 600  # of the bench's counted step, in steps of 1 s


class TestImpossible:
    """A reading that physics forbids."""

    def test_it_is_withheld_named_once_and_sets_the_alert_metric(self, bench: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 2.0)  # 200%
        with pytest.warns(ImpossibleReadingWarning, match="200") as warned:
            bench.run(monitor, 6)
        assert len([w for w in warned if "[mfu_over_peak]" in str(w.message)]) == 1
        readings = bench.sink.of_kind("reading")
        assert len(readings) == 3
        for event in readings:
            assert not any(name.startswith("utilization/") and name != "utilization/attainable_mfu"
                           for name in event.metrics)  # fmt: skip
            assert event.metrics["alerts/active"] == 1.0
            assert event.metrics["throughput/device/model_flops_per_s"] == approx(STEP_FLOPS)
        (diagnosis,) = bench.sink.of_kind("diagnosis")
        assert diagnosis.payload["reading"]["mfu"] == approx(2.0)
        assert "mfu_over_peak" in diagnosis.text
        assert monitor.reading.mfu is None
        assert "mfu_over_peak" in monitor.reading.reason
        assert not monitor.should_stop

    def test_a_plausible_reading_is_shown_and_nothing_is_said(self, bench: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 0.4)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ImpossibleReadingWarning)
            bench.run(monitor, 6)
        assert bench.sink.of_kind("diagnosis") == []
        assert bench.sink.of_kind("reading")[-1].metrics["utilization/mfu"] == approx(0.4)
        assert bench.sink.of_kind("reading")[-1].metrics["alerts/active"] == 0.0

    def test_it_is_raised_where_asked(self, bench: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 2.0, on_impossible="raise")
        with pytest.warns(ImpossibleReadingWarning), pytest.raises(ImpossibleReadingError, match="mfu_over_peak"):
            bench.run(monitor, 6)
        monitor.close()  # and closing does not raise it again

    def test_it_asks_to_stop_where_asked(self, bench: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 2.0, on_impossible="stop")
        with pytest.warns(ImpossibleReadingWarning):
            bench.run(monitor, 6)
        assert monitor.should_stop


class TestMeasuredProduct:
    """A best product that `mfu-monitor bench` measured on this device."""

    @pytest.mark.parametrize(("peak", "expected"), [(STEP_FLOPS / 0.4, 0.5), (STEP_FLOPS / 2.0, None)])
    def test_the_reading_is_given_against_it_too_unless_it_is_withheld(
        self, bench: Any, monkeypatch: pytest.MonkeyPatch, peak: float, expected: float | None
    ) -> None:
        best = mm.DevicePeak(device_name="cpu", flops_per_s_by_precision={"fp32": STEP_FLOPS / 0.5}, source="measured")
        monkeypatch.setattr("mfu_monitor.checks.run_facts.cached_peak", lambda *args: best)
        monitor = bench.monitor(log_every_n_steps=2, peak=peak)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bench.run(monitor, 4)
        assert bench.sink.of_kind("reading")[-1].metrics.get("utilization/of_measured_peak") == expected


class TestUsersFigure:
    """The user's own FLOPs of a batch."""

    def test_it_is_compared_with_our_count(self, bench: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 0.4, flops_per_batch=STEP_FLOPS / 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bench.run(monitor, 4)
        (event,) = bench.sink.of_kind("diagnosis")
        assert "macs_as_flops" in [d["code"] for d in event.payload["diagnoses"]]
        assert monitor.reading.mfu == approx(0.4)  # ours is shown

    def test_it_is_used_where_asked(self, bench: Any) -> None:
        monitor = bench.monitor(
            log_every_n_steps=2, peak=STEP_FLOPS / 0.4, flops_per_batch=STEP_FLOPS * 0.9, use_flops_per_batch=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bench.run(monitor, 4)
        assert monitor.reading.mfu == approx(0.36)
        assert monitor.reading.hfu == approx(0.4 * 700 / 600)


class TestAlerts:
    """When MFU drops."""

    OPTIONS = {"drop": 0.1, "sustain": 2, "warmup": 1, "min_baseline": 5, "baseline_windows": 10, "cooldown": 0}  # noqa: RUF012

    def run_with_a_drop(self, bench: Any, **options: Any) -> mm.Monitor:
        monitor = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 0.4, alerts=self.OPTIONS, **options)
        bench.run(monitor, 40)
        for _ in range(20):
            with monitor.step(None):
                bench.clock.advance(1.5)
        return monitor

    def test_a_drop_is_told_once_and_sets_the_alert_metric(self, bench: Any, caplog: Any) -> None:
        self.run_with_a_drop(bench)
        (alert,) = bench.sink.of_kind("alert")
        assert alert.payload["kind"] == "drop"
        assert bench.sink.of_kind("reading")[-1].metrics["alerts/active"] == 1.0
        assert any("MFU" in record.message for record in caplog.records if record.levelname == "WARNING")

    def test_a_storm_in_which_every_step_compiles_is_told_though_it_has_no_reading(self, bench: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 0.4, alerts=self.OPTIONS)
        bench.run(monitor, 40)
        readings = len(bench.sink.of_kind("reading"))
        for _ in range(20):
            with monitor.step(torch.zeros(2, 8, dtype=torch.long)):
                bench.compiles += 1
                bench.clock.advance(3.0)
        assert len(bench.sink.of_kind("reading")) == readings
        alerts = [event.payload for event in bench.sink.of_kind("alert")]
        assert [alert["kind"] for alert in alerts] == ["drop"]
        assert alerts[0]["causes"][0]["name"] == "recompilation"

    def test_it_calls_the_users_function_and_asks_to_stop(self, bench: Any) -> None:
        told: list[Any] = []
        monitor = self.run_with_a_drop(bench, on_alert=told.append, stop_on_alert=True)
        assert [event.payload["kind"] for event in told] == ["drop"]
        assert monitor.should_stop

    def test_no_alerts_where_they_are_off(self, bench: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 0.4, alerts=False)
        bench.run(monitor, 40)
        for _ in range(20):
            with monitor.step(None):
                bench.clock.advance(1.5)
        assert bench.sink.of_kind("alert") == []

    def test_the_detectors_state_survives_a_restart(self, bench: Any) -> None:
        monitor = self.run_with_a_drop(bench)
        again = bench.monitor(log_every_n_steps=2, peak=STEP_FLOPS / 0.4, alerts=self.OPTIONS)
        again.load_state_dict(monitor.state_dict())
        assert {**again.state_dict()["alerts"], "ignore": 0} == {**monitor.state_dict()["alerts"], "ignore": 0}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"alerts": {"dropp": 0.1}}, "did you mean 'drop'"),
            ({"alerts": {"drop": 2}}, "fraction between 0 and 1"),
            ({"alerts": 3}, "True, False"),
            ({"on_alert": "nowhere:tell"}, "import"),
            ({"on_alert": 7}, "import path"),
            ({"flops_per_batch": -1}, "above 0"),
            ({"total_steps": 0}, "1 or more"),
        ],
    )
    def test_wrong_options_raise_and_say_what_is_allowed(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigurationError, match=words):
            mm.MonitorConfig(**options)

    def test_a_wrong_webhook_is_refused_without_showing_it(self) -> None:
        with pytest.raises(ConfigurationError, match="http") as error:
            mm.MonitorConfig(webhook="hooks.example/secret")
        assert "secret" not in str(error.value)
        assert "secret" not in repr(mm.MonitorConfig(webhook="https://hooks.example/secret"))

    def test_the_alert_of_a_run_arrives_at_a_chat_server_by_the_end_of_training(self, bench: Any) -> None:
        posted: list[dict[str, Any]] = []

        class Chat(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Silence."""

        with HTTPServer(("127.0.0.1", 0), Chat) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            thread.start()
            self.run_with_a_drop(bench, webhook=f"http://127.0.0.1:{server.server_port}/B000").close()
            server.shutdown()
            thread.join()
        (alert,) = bench.sink.of_kind("alert")
        assert posted == [{"text": short_alert(alert.payload).replace(">", "&gt;")}]

    def test_a_chat_server_that_is_down_is_reported_once_and_training_goes_on(self, bench: Any, caplog: Any) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{unused.getsockname()[1]}/B000"
        monitor = self.run_with_a_drop(bench, webhook=address)
        bench.run(monitor, 40)  # the recovery cannot be posted either
        monitor.close()
        assert [event.payload["kind"] for event in bench.sink.of_kind("alert")] == ["drop", "recovery"]
        assert bench.sink.of_kind("reading")[-1].metrics["utilization/mfu"] == pytest.approx(0.4)
        (failure,) = [record.getMessage() for record in caplog.records if "webhook" in record.getMessage()]
        assert "Connection refused" in failure
        assert "B000" not in caplog.text

    def test_an_address_without_a_host_is_refused_before_training(self) -> None:
        with pytest.raises(ConfigurationError, match="with a host") as error:
            mm.MonitorConfig(webhook="https:///B000verysecret")
        assert "B000verysecret" not in str(error.value)

    def test_a_wrong_address_in_the_environment_costs_the_webhook_only(
        self, bench: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MFU_MONITOR_WEBHOOK_URL", "hooks.example/secret")
        told: list[Any] = []
        with pytest.warns(StageDisabledWarning, match="MFU_MONITOR_WEBHOOK_URL") as warned:
            self.run_with_a_drop(bench, on_alert=told.append)
        assert "secret" not in str(warned[0].message)
        assert [event.payload["kind"] for event in told] == ["drop"]


class TestOutlook:
    """Where the rest of the peak went."""

    def test_the_waterfall_is_logged_and_its_steps_add_up(self, bench: Any) -> None:
        peak = mm.DevicePeak(
            device_name="test", flops_per_s_by_precision={"fp32": STEP_FLOPS / 0.4}, bytes_per_s=1e12, source="user"
        )
        monitor = bench.monitor(log_every_n_steps=2, peak=peak, total_steps=100)
        bench.run(monitor, 6)
        metrics = bench.sink.of_kind("reading")[0].metrics
        lost = {name: value for name, value in metrics.items() if name.startswith("waterfall/")}
        assert lost.pop("waterfall/mfu", 0.4) == approx(0.4)
        assert 1.0 - sum(lost.values()) == approx(0.4, abs=1e-9)
        assert metrics["utilization/attainable_mfu"] <= 1.0
        last = bench.sink.of_kind("reading")[-1].metrics
        assert last["remaining/wall_clock_s"] == approx(94.0)

    def test_the_card_says_what_is_left_at_the_present_pace(self, bench: Any) -> None:
        peak = mm.DevicePeak(
            device_name="test", flops_per_s_by_precision={"fp32": STEP_FLOPS / 0.4}, bytes_per_s=1e12, source="user"
        )
        # 3600 steps of 1 s: after six of them 3594 s are left on one device, at 3600 an hour.
        monitor = bench.monitor(log_every_n_steps=2, peak=peak, total_steps=3600, price_per_device_hour=3600.0)
        bench.run(monitor, 6)
        monitor.close()
        last = bench.sink.of_kind("outlook")[-1]
        assert "**At the present pace**: 3,594 steps left: " in last.text
        assert "0.9983 device-hours, cost 3,594" in last.text

    def test_pictures_and_advice_are_shown_after_the_first_window_and_at_the_end(self, bench: Any) -> None:
        peak = mm.DevicePeak(
            device_name="test", flops_per_s_by_precision={"fp32": STEP_FLOPS / 0.4}, bytes_per_s=1e12, source="user"
        )
        monitor = bench.monitor(log_every_n_steps=2, peak=peak)
        bench.run(monitor, 6)
        monitor.close()
        first, last = bench.sink.of_kind("outlook")
        assert (first.step, last.step) == (2, 5) or (first.step, last.step) == (1, 5)
        assert first.figures == {}  # drawing takes a second: never while training runs
        assert "plots/waterfall" in last.figures
        assert "%" in first.text

    def test_nothing_is_drawn_where_no_sink_shows_it(self, bench: Any) -> None:
        peak = mm.DevicePeak(
            device_name="test", flops_per_s_by_precision={"fp32": STEP_FLOPS / 0.4}, bytes_per_s=1e12, source="user"
        )
        bench.sink.shows_figures = False
        monitor = bench.monitor(log_every_n_steps=2, peak=peak)
        bench.run(monitor, 6)
        monitor.close()
        assert [event.figures for event in bench.sink.of_kind("outlook")] == [{}, {}]


class TestMeasuredPeak:
    """A peak that was measured while the machine was busy."""

    @staticmethod
    def measured(flops_per_s: float) -> mm.DevicePeak:
        return mm.DevicePeak(device_name="cpu", flops_per_s_by_precision={"fp32": flops_per_s}, source="measured")

    def test_it_is_measured_again_when_a_reading_exceeds_it(self, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        better = self.measured(STEP_FLOPS / 0.5)
        monkeypatch.setattr("mfu_monitor.hardware.measure.remeasure_peak", lambda *args: better)
        monitor = bench.monitor(log_every_n_steps=2, peak=self.measured(STEP_FLOPS / 2.0))
        bench.run(monitor, 6)
        assert bench.sink.of_kind("diagnosis") == []
        assert [e.metrics["utilization/mfu"] for e in bench.sink.of_kind("reading")] == approx([0.5, 0.5, 0.5])

    def test_the_share_of_the_measured_peak_follows_the_new_measurement(
        self, bench: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stale figure called a healthy reading suspicious, by a product measured on a busy machine."""
        measured = [self.measured(STEP_FLOPS / 2.0)]

        def better(*args: Any) -> mm.DevicePeak:
            measured.append(self.measured(STEP_FLOPS / 0.5))
            return measured[-1]

        monkeypatch.setattr("mfu_monitor.hardware.measure.remeasure_peak", better)
        monkeypatch.setattr("mfu_monitor.checks.run_facts.cached_peak", lambda *args: measured[-1])
        monitor = bench.monitor(log_every_n_steps=2, peak=measured[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error", ImpossibleReadingWarning)
            bench.run(monitor, 6)
        assert monitor.reading.mfu == approx(0.5)
        assert bench.sink.of_kind("diagnosis") == []

    def test_a_reading_above_it_is_withheld_where_that_does_not_help(
        self, bench: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []

        def no_better(*args: Any) -> mm.DevicePeak:
            asked.append(args)
            return self.measured(STEP_FLOPS / 2.0)

        monkeypatch.setattr("mfu_monitor.hardware.measure.remeasure_peak", no_better)
        monitor = bench.monitor(log_every_n_steps=2, peak=self.measured(STEP_FLOPS / 2.0))
        with pytest.warns(ImpossibleReadingWarning):
            bench.run(monitor, 20)
        assert len(asked) == 3
        assert monitor.reading.mfu is None
