"""The monitor as a whole: fake clock and counters for figures, the real ones where training must not notice."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.errors import ConfigurationError, PeakUnknownWarning, StageDisabledWarning

approx: Any = pytest.approx

PEAK = 1000.0
"""FLOP/s, so that the fake record of 600 model and 700 hardware FLOPs in a second gives 0.6 and 0.7."""
pytestmark = pytest.mark.filterwarnings("ignore:.*less than a megaflop.*")


Bench = Any
"""The fixture ``bench`` of conftest.py: a monitor on fake parts, and a loop for it."""


class TestReadings:
    """From steps to figures."""

    def test_mfu_and_hfu_are_the_records_flops_over_the_windows_seconds_and_the_peak(self, bench: Bench) -> None:
        monitor = bench.monitor()
        bench.run(monitor, 1)
        bench.run(monitor, 9, seconds=2.0)
        reading = monitor.reading
        assert reading is not None
        assert reading.window.steps == 9  # the first was counted
        assert reading.mfu == approx(9 * 600 / (18.0 * PEAK))
        assert reading.hfu == approx(9 * 700 / (18.0 * PEAK))
        assert reading.tokens_per_s == approx(16 / 2.0)
        assert (reading.precision, reading.exactness, reading.first_step, reading.last_step) == (
            "fp32",
            "presumed",
            0,
            9,
        )

    def test_goodput_is_over_all_wall_time_and_all_steps(self, bench: Bench) -> None:
        monitor = bench.monitor()
        bench.run(monitor, 5)
        with monitor.paused("validation"):
            bench.clock.advance(30.0)
        bench.run(monitor, 5)
        assert monitor.reading is not None
        assert monitor.reading.goodput_mfu == approx(10 * 600 / (40.0 * PEAK))
        assert monitor.reading.mfu == approx(0.6)

    def test_a_reading_comes_at_the_end_of_each_window_and_of_training(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=4)
        bench.run(monitor, 10)
        monitor.close()
        readings = bench.sink.of_kind("reading")
        assert [event.step for event in readings] == [3, 7, 9]
        assert [event.payload["window"]["steps"] for event in readings] == [3, 4, 2]

    def test_the_step_numbers_of_the_loop_are_used(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=2)
        for step in (100, 101):
            with monitor.step(None, step=step):
                bench.clock.advance(1.0)
        assert bench.sink.of_kind("reading")[0].step == 101

    def test_events_tell_the_run_then_the_record_then_the_reading(self, bench: Bench) -> None:
        bench.run(bench.monitor(log_every_n_steps=2), 2)
        told = [event for event in bench.sink.events if event.kind != "outlook"]
        assert [event.kind for event in told] == ["run", "record", "reading"]
        run, record, reading = told
        assert run.payload["peak"]["flops_per_s_by_precision"]["fp32"] == PEAK
        assert run.payload["torch_version"] == torch.__version__
        assert mm.StepRecord.from_dict(dict(record.payload)).model_flops == 600
        assert reading.metrics["utilization/mfu"] == approx(0.6)
        assert mm.UtilizationReading.from_dict(reading.payload).mfu == approx(0.6)
        json.dumps([dict(event.payload) for event in bench.sink.events])

    def test_other_metric_names_are_used_if_asked(self, bench: Bench) -> None:
        bench.run(bench.monitor(log_every_n_steps=2, names="throughput_monitor"), 2)
        assert bench.sink.of_kind("reading")[0].metrics["train/device/mfu"] == approx(0.6)

    def test_a_sink_added_later_gets_the_later_readings(self, bench: Bench, sink: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=2)
        bench.run(monitor, 2)
        late = type(sink)()
        monitor.add_sink(late)
        bench.run(monitor, 2)
        assert [event.step for event in late.of_kind("reading")] == [3]

    def test_readings_and_records_go_to_a_jsonl_file(self, bench: Bench, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        monitor = bench.monitor(log_every_n_steps=2, jsonl=path)
        bench.run(monitor, 4)
        monitor.close()
        kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
        assert [kind for kind in kinds if kind != "outlook"] == ["run", "record", "reading", "reading"]

    def test_records_are_kept_by_signature(self, bench: Bench) -> None:
        monitor = bench.monitor()
        bench.run(monitor, 2)
        bench.run(monitor, 2, batch=torch.zeros(4, 8, dtype=torch.long))
        assert [record.model_flops for record in monitor.records.values()] == [600, 600]


class TestTime:
    """What is in a window, and what is not (the cases from the field)."""

    def test_validation_between_steps_is_out(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=11)
        bench.run(monitor, 6)  # the first is counted, so ten of a second remain
        with monitor.paused("validation"):
            bench.clock.advance(5.0)
        bench.run(monitor, 5)
        assert monitor.reading is not None
        assert monitor.reading.elapsed_s == approx(10.0)

    def test_the_wait_for_data_is_in(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=11)
        bench.run(monitor, 1)
        for _ in range(10):
            bench.clock.advance(0.5)
            bench.run(monitor, 1)
        assert monitor.reading is not None
        assert monitor.reading.elapsed_s == approx(15.0)
        assert monitor.reading.window.data_wait_s == approx(5.0)

    def test_the_first_step_that_compiles_is_not_averaged(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=6)
        with monitor.step(torch.zeros(2, 8)):
            bench.compiles += 1
            bench.clock.advance(25.1)
        bench.run(monitor, 5, seconds=4.65, batch=torch.zeros(2, 8))
        assert monitor.reading is not None
        window = monitor.reading.window
        assert window.elapsed_s / window.steps == approx(4.65)
        assert window.excluded_s["compile"] == approx(25.1)
        assert window.recompiles == 0

    def test_a_recompile_later_is_left_out_and_said(self, bench: Bench, caplog: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=6)
        with monitor.step(torch.zeros(2, 8)):
            bench.compiles += 1
        bench.run(monitor, 3, batch=torch.zeros(2, 8))
        with monitor.step(torch.zeros(2, 8)):
            bench.compiles += 1
            bench.clock.advance(20.0)
        bench.run(monitor, 1, batch=torch.zeros(2, 8))
        assert monitor.reading is not None
        assert (monitor.reading.window.recompiles, monitor.reading.elapsed_s) == (1, approx(3.0))
        assert [r.message for r in caplog.records if "recompiled and is in no window" in r.message]

    def test_a_count_taken_while_compiling_is_taken_again(self, bench: Bench) -> None:
        bench.counters.records = [bench.counters.records[0]] * 3
        monitor = bench.monitor()
        with monitor.step(torch.zeros(2, 8)):
            bench.compiles += 1
        bench.run(monitor, 3, batch=torch.zeros(2, 8))
        assert bench.counters.log == ["enter", "exit"] * 2

    def test_micro_batches_are_summed(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=9)
        batch = torch.zeros(1, 1024, dtype=torch.long)
        bench.run(monitor, 1, batch=batch)
        bench.run(monitor, 8, seconds=0.25, batch=batch)  # 8 micro-batches of 1024 tokens in 2 s
        assert monitor.reading is not None
        assert monitor.reading.tokens_per_s == approx(4096.0)

    def test_phases_and_pauses_inside_a_step_are_told_apart(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=2)
        bench.run(monitor, 1)
        with monitor.step(torch.zeros(2, 8, dtype=torch.long)):
            with monitor.phase("forward"):
                bench.clock.advance(1.0)
                with monitor.paused("sampling"):
                    bench.clock.advance(7.0)
            monitor.mark_phase("backward")
            bench.clock.advance(2.0)
            with monitor.phase("optimizer"):
                bench.clock.advance(0.5)
            bench.clock.advance(0.25)  # backward again
        assert monitor.reading is not None
        window = monitor.reading.window
        assert (window.forward_s, window.backward_s, window.optimizer_s) == (approx(1.0), approx(2.25), approx(0.5))
        assert window.excluded_s["sampling"] == approx(7.0)

    def test_a_clock_that_goes_backwards_gives_a_reason(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=3)
        bench.run(monitor, 2)
        bench.run(monitor, 1, seconds=-5.0)
        assert monitor.reading is not None
        assert monitor.reading.mfu is None
        assert "clock went backwards" in str(monitor.reading.reason)

    def test_every_step_counted_leaves_windows_with_time(self, bench: Bench) -> None:
        monitor = bench.monitor(count="every_step", log_every_n_steps=4)
        bench.run(monitor, 4)
        assert bench.counters.log.count("enter") == 4
        assert monitor.reading is not None
        assert (monitor.reading.window.steps, monitor.reading.elapsed_s) == (3, approx(3.0))


class TestTokens:
    """Tokens, samples and padding of windows and of the run."""

    def test_totals_follow_each_batch(self, bench: Bench) -> None:
        monitor = bench.monitor()
        seen = []
        for size in (1, 2, 1):
            bench.run(monitor, 1, batch=torch.zeros(size, 3))
            seen.append(monitor.totals["samples"])
        assert seen == [1, 3, 4]

    @pytest.fixture
    def padded(self) -> dict[str, torch.Tensor]:
        mask = torch.ones(2, 8, dtype=torch.long)
        mask[1, 4:] = 0
        labels = torch.where(mask.bool(), 1, -100)
        labels[0, :6] = -100
        return {"input_ids": torch.zeros(2, 8, dtype=torch.long), "attention_mask": mask, "labels": labels}

    def test_padding_is_summed_on_every_step_if_asked(self, bench: Bench, padded: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=4, count_padding=True)
        bench.run(monitor, 4, batch=padded)
        assert monitor.reading is not None
        window = monitor.reading.window
        assert (window.tokens, window.tokens_not_padding, window.tokens_in_loss) == (3 * 16, 3 * 12, 3 * 6)
        assert window.padding_share == approx(4 / 16)

    def test_by_default_the_share_of_padding_comes_from_counted_steps(self, bench: Bench, padded: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=4)
        bench.run(monitor, 4, batch=padded)
        assert monitor.reading is not None
        assert monitor.reading.window.padding_share == approx(4 / 16)
        assert monitor.reading.window.tokens_not_padding is None

    def test_a_users_function_decides(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=3, tokens=lambda batch: batch["n"])
        for n in (5, 6, 7):
            bench.run(monitor, 1, batch={"n": n, "x": torch.zeros(2, 3)})
        assert monitor.reading is not None
        assert (monitor.reading.window.tokens, monitor.reading.window.samples) == (6 + 7, 4)
        assert monitor.totals["tokens"] == 5 + 6 + 7

    @pytest.mark.parametrize("answer", [lambda batch: 1 / 0, lambda batch: "many", lambda batch: -3])
    def test_a_users_function_that_fails_costs_one_warning_and_the_tokens(self, bench: Bench, answer: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=3, tokens=answer)
        with pytest.warns(StageDisabledWarning, match=r"stage 'tokens'.*Check the function") as warned:
            bench.run(monitor, 6)
        assert len(disabled(warned)) == 1
        assert monitor.reading is not None
        assert (monitor.reading.tokens_per_s, monitor.reading.samples_per_s) == (None, approx(2.0))
        assert monitor.reading.mfu == approx(0.6)


class TestWhichStepsAreCounted:
    """The first of each signature; what makes a signature."""

    def _counts(self, bench: Bench) -> int:
        return int(bench.counters.log.count("enter"))

    def test_the_first_step_only_of_equal_ones(self, bench: Bench) -> None:
        bench.run(bench.monitor(), 20)
        assert self._counts(bench) == 1

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: model.eval(),
            lambda model: model[0].requires_grad_(False),
        ],
    )
    def test_another_mode_or_other_trained_parameters_are_counted_anew(
        self, bench: Bench, change: Callable[[nn.Sequential], Any]
    ) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        monitor = bench.monitor(model)
        bench.run(monitor, 3)
        change(model)
        bench.run(monitor, 3)
        assert self._counts(bench) == 2

    def test_what_the_loop_says_is_part_of_the_signature(self, bench: Bench) -> None:
        monitor = bench.monitor()
        for stepping in (False, True, False, True):
            with monitor.step(torch.zeros(2, 2), signature_extra=(stepping,)):
                pass
        assert self._counts(bench) == 2

    def test_the_ninth_signature_is_estimated_and_said_to_be(self, bench: Bench, record: Any) -> None:
        flops = [600, 700, 500, 900, 650, 400, 950, 800]  # no law of the length
        bench.counters.records = [record(f) for f in flops]
        monitor = bench.monitor(log_every_n_steps=1)
        for length in range(1, 10):
            bench.run(monitor, 1, batch=torch.zeros(1, length, dtype=torch.long))
        assert self._counts(bench) == 8
        assert monitor.reading is not None
        assert monitor.reading.exactness == "sampled"
        # Eight counts over 1 + 2 + ... + 8 tokens; this step has nine.
        assert monitor.reading.window.model_flops == round(9 * sum(flops) / 36)

    def test_counts_that_differ_are_averaged_and_said_to_be_sampled(self, bench: Bench, record: Any) -> None:
        bench.counters.records = [record(600), record(1000)]
        monitor = bench.monitor(count="every_step", log_every_n_steps=2)
        bench.run(monitor, 2)
        assert monitor.reading is not None
        assert monitor.reading.exactness == "sampled"
        assert monitor.reading.window.model_flops == 800
        assert monitor.reading.window.flops_spread == approx(400 / 800)

    def test_a_lower_bound_is_said(self, bench: Bench, record: Any) -> None:
        bench.counters.records = [record(600, incomplete=True)]
        monitor = bench.monitor(log_every_n_steps=2)
        bench.run(monitor, 2)
        assert monitor.reading is not None
        assert monitor.reading.exactness == "lower_bound"


class TestPeak:
    """With and without one."""

    def test_no_peak_costs_one_warning_and_mfu_only(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=2, peak="auto")  # a CPU has none
        with pytest.warns(PeakUnknownWarning, match="measure") as warned:
            bench.run(monitor, 6)
        assert len(warned) == 1
        metrics = bench.sink.of_kind("reading")[-1].metrics
        assert "utilization/mfu" not in metrics
        assert metrics["throughput/device/model_flops_per_s"] == approx(600.0)
        assert monitor.reading is not None
        assert "peak=" in str(monitor.reading.reason)

    def test_a_peak_without_the_active_precision_says_so(self, bench: Bench) -> None:
        peak = mm.DevicePeak(device_name="x", flops_per_s_by_precision={"bf16": 1.0}, source="user")
        monitor = bench.monitor(log_every_n_steps=2, peak=peak)
        bench.run(monitor, 2)
        assert monitor.reading is not None
        assert monitor.reading.mfu is None
        assert "fp32" in str(monitor.reading.reason)

    def test_measuring_happens_once_and_leaves_the_random_numbers_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def measure(spec: Any, device: Any, precision: Any) -> mm.DevicePeak:
            asked.append((spec, str(device), precision))
            torch.rand(100)
            return mm.DevicePeak(device_name="cpu", flops_per_s_by_precision={precision: PEAK}, source="measured")

        monkeypatch.setattr("mfu_monitor.hardware.resolve.resolve_peak", measure)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        bench.run(bench.monitor(log_every_n_steps=2, peak="measure"), 6)
        assert torch.equal(torch.get_rng_state(), before)
        assert asked == [("measure", "cpu", "fp32")]

    def test_the_time_of_measuring_is_in_no_window(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def measure(spec: Any, device: Any, precision: Any) -> mm.DevicePeak:
            bench.clock.advance(60.0)
            return mm.DevicePeak(device_name="cpu", flops_per_s_by_precision={precision: PEAK}, source="measured")

        monkeypatch.setattr("mfu_monitor.hardware.resolve.resolve_peak", measure)
        monitor = bench.monitor(log_every_n_steps=3, peak="measure")
        bench.run(monitor, 3)
        assert monitor.reading is not None
        assert monitor.reading.window.excluded_s == {"counted": approx(1.0), "peak": approx(60.0)}
        assert monitor.reading.mfu == approx(0.6)

    def test_a_new_active_precision_is_measured_too(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, record: Any
    ) -> None:
        monkeypatch.setattr(
            "mfu_monitor.hardware.resolve.resolve_peak",
            lambda spec, device, precision: mm.DevicePeak(
                device_name="cpu", flops_per_s_by_precision={precision: PEAK}, source="measured"
            ),
        )
        bench.counters.records = [record(600), record(600, precision="bf16")]
        monitor = bench.monitor(log_every_n_steps=2, peak="measure")
        bench.run(monitor, 2)
        bench.run(monitor, 2, batch=torch.zeros(3, 8, dtype=torch.long))
        assert monitor.peak is not None
        assert set(monitor.peak.flops_per_s_by_precision) == {"fp32", "bf16"}
        assert monitor.reading is not None
        assert (monitor.reading.precision, monitor.reading.mfu) == ("bf16", approx(0.6))


class TestResume:
    """Totals go on; the time between is in no window."""

    def test_totals_and_step_numbers_go_on(self, bench: Bench) -> None:
        first = bench.monitor(log_every_n_steps=5)
        bench.run(first, 5)
        state = json.loads(json.dumps(first.state_dict()))  # plain types only
        bench.clock.advance(3600.0)
        second = bench.monitor(log_every_n_steps=5)
        second.load_state_dict(state)
        bench.run(second, 5)
        assert second.totals["steps"] == 10
        assert second.totals["tokens"] == 10 * 16
        assert second.totals["model_flops"] == 10 * 600
        assert second.totals["wall_s"] == approx(10.0)
        assert second.reading is not None
        assert second.reading.window.wall_s == approx(5.0)
        assert second.reading.last_step == 9
        assert second.reading.goodput_mfu == approx(0.6)

    @pytest.mark.parametrize("state", [{}, {"totals": None}, {"totals": {"wall_s": "x"}}])
    def test_a_state_that_cannot_be_read_costs_one_warning(self, bench: Bench, state: dict[str, Any]) -> None:
        monitor = bench.monitor(log_every_n_steps=2)
        with pytest.warns(StageDisabledWarning, match="stage 'state'"):
            monitor.load_state_dict(state)
        bench.run(monitor, 2)
        assert monitor.reading is not None


class TestWrongArguments:
    """Constructors raise, with what is allowed."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"log_every": 5}, "unknown option 'log_every'; did you mean 'log_every_n_steps'"),
            ({"peak": -5}, "peak=-5"),
            ({"config": {"peak": 1}}, "expected a MonitorConfig"),
        ],
    )
    def test_options(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigurationError, match=words.replace("(", r"\(")):
            mm.Monitor(**options)

    def test_a_model_that_is_none(self) -> None:
        with pytest.raises(ConfigurationError, match=r"expected a torch\.nn\.Module or None"):
            mm.Monitor("model")  # type: ignore[arg-type]

    def test_keywords_go_over_the_config(self) -> None:
        config = mm.MonitorConfig(log_every_n_steps=5, count="every_step")
        monitor = mm.Monitor(config=config, log_every_n_steps=7)
        assert (monitor.config.log_every_n_steps, monitor.config.count) == (7, "every_step")


class _BrokenError(RuntimeError):
    pass


def _broken(*_: Any, **__: Any) -> Any:
    raise _BrokenError("on purpose")


def disabled(warned: Any) -> list[str]:
    """The messages of stages turned off."""
    return [str(w.message) for w in warned if issubclass(w.category, StageDisabledWarning)]


class TestFailure:
    """A stage that fails is turned off with one warning; the loop never notices."""

    @pytest.mark.parametrize(
        ("target", "stage"),
        [
            ("mfu_monitor.steps.step_counter.batch_signature", "signature"),
            ("mfu_monitor.steps.step_counter.batch_counts", "signature"),
            ("mfu_monitor.steps.schedule.CountSchedule.wants_count", "counting"),
            ("mfu_monitor.steps.schedule.CountSchedule.add_uncounted", "counting"),
            ("mfu_monitor.steps.totals.StepLedger.add_step", "accounting"),
            ("mfu_monitor.steps.totals.StepLedger.take_window", "accounting"),
            ("mfu_monitor.timing.window.WindowBuilder.begin_step", "timing"),
            ("mfu_monitor.timing.window.WindowBuilder.end_step", "timing"),
            ("mfu_monitor.timing.window.WindowBuilder.resolved", "timing"),
            ("mfu_monitor.timing.window.WindowBuilder.close_window", "timing"),
            ("mfu_monitor.timing.probes.TrainingProbes.take", "probes"),
            ("mfu_monitor.timing.probes.TrainingProbes.start", "probes"),
            ("mfu_monitor.readings.read_utilization", "reading"),
            ("mfu_monitor.readings.metrics_of", "reading"),
            ("mfu_monitor.timing.pipeline.clock_for", "timing"),
            ("mfu_monitor.timing.pipeline.call_the_roll", "ranks"),
            ("mfu_monitor.hardware.resolve.resolve_peak", "peak"),
        ],
    )
    def test_any_stage(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, target: str, stage: str) -> None:
        monkeypatch.setattr(target, _broken)
        monitor = bench.monitor(log_every_n_steps=3, clock=None if target.endswith("clock_for") else bench.clock)
        with pytest.warns(StageDisabledWarning) as warned:
            bench.run_to_the_end(monitor, 8)
        (message,) = disabled(warned)
        assert f"stage {stage!r} off after _BrokenError: on purpose" in message
        assert "Traceback" in message
        assert "Training goes on" in message

    def test_a_counter_that_cannot_be_entered_or_left(self, bench: Bench) -> None:
        for method in ("__enter__", "__exit__"):
            counter = type(
                "Counter", (), {"__enter__": lambda self: self, "__exit__": lambda *_: None, method: _broken}
            )
            monitor = bench.monitor(log_every_n_steps=2)
            monitor._counting._make_counter = lambda model, counter=counter: counter()  # type: ignore[misc]
            with pytest.warns(StageDisabledWarning, match="stage 'counting'"):
                bench.run(monitor, 4)
            assert monitor.reading is not None
            assert monitor.reading.mfu is None
            assert "was counted" in str(monitor.reading.reason)
            assert monitor.reading.tokens_per_s == approx(16.0)

    def test_a_sink_that_fails_is_dropped_and_the_others_go_on(self, bench: Bench) -> None:
        broken = type("BrokenSink", (), {"emit": _broken, "close": _broken})()
        monitor = bench.monitor(log_every_n_steps=2)
        monitor.add_sink(broken)
        with pytest.warns(StageDisabledWarning, match="sink BrokenSink") as warned:
            bench.run_to_the_end(monitor, 6)
        assert len(disabled(warned)) == 1
        assert len(bench.sink.of_kind("reading")) == 3

    def test_warnings_turned_into_errors_do_not_reach_the_loop(self, bench: Bench) -> None:
        monitor = bench.monitor(log_every_n_steps=2, tokens=_broken, peak="auto")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bench.run(monitor, 6)
        assert monitor.totals["steps"] == 6

    def test_an_exception_of_the_loop_passes_unchanged_and_the_step_does_not_count(self, bench: Bench) -> None:
        monitor = bench.monitor()
        error = KeyError("mine")
        with pytest.raises(KeyError) as raised, monitor.step(torch.zeros(2, 2)):
            raise error
        assert raised.value is error
        assert bench.counters.log == ["enter", "exit with exception"]
        assert monitor.totals["steps"] == 0

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_what_ends_a_program_passes_too(self, bench: Bench, error: type[BaseException]) -> None:
        monitor = bench.monitor()
        with pytest.raises(error), monitor.step(torch.zeros(2, 2)):
            raise error
        assert bench.counters.log == ["enter", "exit with exception"]

    def test_a_step_whose_end_never_came_is_aborted(self, bench: Bench) -> None:
        monitor = bench.monitor()
        monitor.begin_step(torch.zeros(2, 2))
        monitor.begin_step(torch.zeros(2, 2))
        monitor.end_step()
        assert bench.counters.log == ["enter", "exit", "enter", "exit"]
        assert monitor.totals["steps"] == 1

    def test_calls_in_any_order_do_no_harm(self, bench: Bench) -> None:
        monitor = bench.monitor()
        for call in (monitor.end_step, monitor.abort_step, monitor.end_window, monitor.close, monitor.close):
            call()
        monitor.pause("x")
        monitor.resume("y")
        monitor.mark_phase("forward")
        bench.run(monitor, 2)
        monitor.close()
        assert monitor.reading is not None


@pytest.fixture(autouse=True)
def _no_lightning_is_imported() -> Iterator[None]:
    had = "lightning" in sys.modules
    yield
    assert ("lightning" in sys.modules) == had
