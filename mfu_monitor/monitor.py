"""The monitor of a training run: the one place that wires the stages, and the API for any loop."""

from __future__ import annotations

import contextlib
import logging
import platform
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
from torch import nn

from mfu_monitor._scopes import PauseScope, PhaseScope, StepScope
from mfu_monitor.alerts.alerting import alert_sinks
from mfu_monitor.config import DEFAULT_LOG_EVERY_N_STEPS, MonitorConfig
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError, ImpossibleReadingError
from mfu_monitor.guard import Stages, guarded
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.readings import Told, WindowReader
from mfu_monitor.sinks.base import Event, Sink
from mfu_monitor.sinks.jsonl import JsonlSink
from mfu_monitor.steps.step_counter import StepCounter, StepOutcome
from mfu_monitor.timing.clock import Clock, clock_for
from mfu_monitor.timing.compiles import compiled_frames, latest_recompile
from mfu_monitor.timing.pipeline import RunSoFar, WindowPipeline, world_size
from mfu_monitor.timing.probes import TrainingProbes
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

__all__ = ["Monitor"]

_log = logging.getLogger("mfu_monitor")

STATE_VERSION = 1
_MOST_RECOMPILES_TOLD = 5
"""In the log, a run; each window's count is in its reading."""
_DRAIN_S = 5.0
"""Longest wait for the device and the other ranks once training has ended; during training there is none."""


class Monitor:
    """Measures MFU, HFU and throughput of a training loop while it runs. Changes nothing in it.

    Wrong options raise here; once training runs nothing of the monitor does: a stage that fails is turned off with one
    ``StageDisabledWarning``.

    Args:
        model: gives modules their names and tells which parameters need gradients. Optional.
        config: the options as one object.
        sinks: where readings go; each has ``emit(event)`` and ``close()``.
        clock: instead of the clock of the model's device; for tests.
        host_clock: instead of the host's clock; for tests.
        counter_factory: makes the counter of a step from the model; ``FlopCounter`` by default.
        compile_counter: a number that changes when something is compiled; dynamo's own by default.
        config_keywords: options by name, over those of ``config``: see ``MonitorConfig``.

    Raises:
        ConfigurationError: an option is not known or its value is not allowed.

    Example:
        >>> monitor = mm.Monitor(model, log_every_n_steps=10)
        >>> for batch in loader:
        ...     with monitor.step(batch):
        ...         train(batch)
        >>> monitor.close()
        >>> monitor.reading.mfu
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        config: MonitorConfig | None = None,
        sinks: Iterable[Sink] = (),
        clock: Clock | None = None,
        host_clock: Clock | None = None,
        counter_factory: Callable[[nn.Module | None], Any] | None = None,
        compile_counter: Callable[[], int] = compiled_frames,
        **config_keywords: Any,
    ) -> None:
        self.config = _configuration(config, config_keywords)
        self._model = _checked_model(model)
        self._sinks = [*sinks, *_sinks_of(self.config)]
        self.should_stop = False
        """True once training is to stop: after an impossible reading or an alert, where the options ask for that."""
        self._stages = Stages()
        self._clock, self._host_clock = clock, host_clock
        self._counting = StepCounter(
            model,
            self.config,
            self._stages,
            counter_factory=counter_factory,
            compile_counter=compile_counter,
        )
        self._steps_per_window = self.config.log_every_n_steps or DEFAULT_LOG_EVERY_N_STEPS
        self._windows = WindowPipeline(self._stages)
        self._reader = WindowReader(self.config, self._stages, self.paused)
        self._probes: TrainingProbes | None = None
        self._is_started = False
        self._is_in_step = False
        self._is_closing = False
        self._is_stop_refused = False
        self._recompiles_told = 0
        self._step = 0
        self._next_step = 0
        self._batches = 0
        self._base_wall_s = 0.0
        self._base_elapsed_s = 0.0
        self._is_announced = False
        self._reading: UtilizationReading | None = None

    # What is known.

    @property
    def reading(self) -> UtilizationReading | None:
        """The latest reading; None before the first window."""
        return self._reading

    @property
    def records(self) -> dict[Hashable, StepRecord]:
        """What the counted steps ran: the latest record of each signature."""
        return self._counting.records

    @property
    def peak(self) -> DevicePeak | None:
        """The peak of this rank's device; None before the first counted step, and where it is not known."""
        return self._reader.peak

    @property
    def totals(self) -> dict[str, Any]:
        """Sums of the whole run, earlier parts of a resumed one included: all training batches, counted ones too.

        ``steps``, ``optimizer_steps``, ``tokens``, ``samples``, FLOPs by part, ``elapsed_s`` (of the windows) and
        ``wall_s``. None where one of the batches was not known.
        """
        return {
            **self._counting.ledger.totals,
            "elapsed_s": self._base_elapsed_s + self._windows.elapsed_s,
            "wall_s": self._wall_s,
        }

    @property
    def _wall_s(self) -> float:
        return self._base_wall_s + self._windows.wall_s

    def add_sink(self, sink: Sink) -> None:
        """Send events to one more sink from now on."""
        self._sinks.append(sink)

    # Steps.

    def step(self, batch: Any, *, step: int | None = None, signature_extra: Hashable = ()) -> StepScope:
        """One training batch, as a ``with`` block; arguments as ``begin_step``. An exception aborts the step."""
        return StepScope(self, batch, step, signature_extra)

    def begin_step(self, batch: Any, *, step: int | None = None, signature_extra: Hashable = ()) -> None:
        """A training batch begins.

        Args:
            batch: what the loader gave; its shapes are read, on some steps its masks.
            step: the number that readings are logged at; by default the batches are numbered.
            signature_extra: anything hashable that decides what the step runs and is not seen in the batch (whether the
                optimizer steps, a phase of a schedule).
        """
        if self._is_in_step:
            self.abort_step()
        if not self._is_started:
            self._start()
        elif self._probes is None:
            self._start_probes()
        self._resume_probes()  # a step's begin ends every pause
        self._is_in_step = True
        self._step = self._next_step if step is None else step
        self._windows.begin_step(self._step)
        self._begin_count(batch, signature_extra)

    def end_step(self, *, optimizer_step: bool | None = None) -> None:
        """The training batch ends.

        Args:
            optimizer_step: whether the optimizer stepped in it; None if not known.
        """
        if not self._is_in_step:
            return
        self._is_in_step = False
        excluded, is_recompile = self._end_count(optimizer_step)
        self._windows.end_step(excluded, is_recompile)
        if is_recompile:
            self._tell_recompile()
        if excluded is not None:
            self._discard_probes()
        self._next_step = self._step + 1
        self._batches += 1
        if self._batches >= self._steps_per_window:
            self.end_window()
        elif self._windows.has_pending:
            self._publish_all(self._windows.advance(self._reader.peak_rate_of))

    def abort_step(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """The training batch was not finished: nothing of it counts, and nothing of ours stays behind."""
        if not self._is_in_step:
            return
        self._is_in_step = False
        self._abort_count((exc_type, exc, trace))
        self._windows.abort_step()
        if exc_type is not None:
            self._stop_probes()

    @guarded("accounting")
    def _begin_count(self, batch: Any, signature_extra: Hashable) -> None:
        self._counting.begin(batch, signature_extra)

    def _end_count(self, optimizer_step: bool | None) -> tuple[str | None, bool]:
        outcome = self._count_outcome(optimizer_step)
        if outcome is None:
            self._abort_count((None, None, None))  # the stage is off; a counter that is still entered must be left
            return None, False
        if outcome.record is not None:
            self._publish_record(outcome.record)
        return outcome.excluded, outcome.is_recompile

    @guarded("recompiles")
    def _tell_recompile(self) -> None:
        self._recompiles_told += 1
        if self._recompiles_told <= _MOST_RECOMPILES_TOLD:
            _log.warning(
                "Step %d compiled anew and is in no window: %s. If this goes on, keep shapes and flags the same from "
                "step to step, or compile with dynamic=True.",
                self._step,
                latest_recompile() or "the compiler gives no reason",
            )

    @guarded("accounting")
    def _count_outcome(self, optimizer_step: bool | None) -> StepOutcome:
        return self._counting.end(optimizer_step)

    def _abort_count(self, exc_info: Any) -> None:
        try:
            self._counting.abort(exc_info)
        except Exception as error:  # noqa: BLE001  # the exception on its way must not be replaced by ours
            self._stages.fail("counting", error)

    # Time.

    def phase(self, name: str) -> PhaseScope:
        """A part of the step as a ``with`` block: ``"forward"``, ``"backward"``, ``"optimizer"``, or your own name."""
        return PhaseScope(self, name)

    def mark_phase(self, name: str) -> None:
        """From here on time belongs to this phase, until another is marked or the step ends.

        Args:
            name: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"h2d_copy"``, ``"other"``; between steps also
                ``"data_wait"`` and ``"between"`` (callbacks, logging); or a name of yours.
        """
        self._windows.mark_phase(name)
        if self._is_in_step:
            self._counting.note_phase(name)

    @property
    def current_phase(self) -> str:
        """The phase that time belongs to at present."""
        return self._windows.phase

    def paused(self, reason: str) -> PauseScope:
        """What happens in the ``with`` block is in no window: ``with monitor.paused("validation"): ...``."""
        return PauseScope(self, reason)

    def pause(self, reason: str) -> None:
        """Leave the time from here on out of the windows: ``"validation"``, ``"checkpoint"``, or a reason of yours."""
        self._windows.pause(reason)
        self._pause_probes()

    def resume(self, reason: str) -> None:
        """End a pause; the next step's begin does so as well."""
        self._windows.resume(reason)
        if not self._windows.is_paused:
            self._resume_probes()

    # Windows.

    def end_window(self) -> None:
        """Close the window here, with the steps it has: at the end of an epoch or of training."""
        if self._batches:
            self._batches = 0
            self._close_window()
        self._publish_all(self._windows.advance(self._reader.peak_rate_of))
        self._stop_with_the_other_ranks()
        if not self._is_in_step:
            self._windows.end_reporting()

    def _close_window(self) -> None:
        work = self._counting.take_window()
        probes = self._take_probes() or {}
        self._windows.close(
            lambda: None if (fields := work()) is None else {**probes, **fields},
            lambda: self._run_so_far() or RunSoFar(None, 0.0),
        )

    @guarded("accounting")
    def _run_so_far(self) -> RunSoFar:
        return RunSoFar(self._counting.ledger.totals["model_flops"], self._wall_s)

    def close(self) -> None:
        """Training has ended: report the last window and close the sinks. May be called again; steps may follow."""
        self.abort_step()
        self._is_closing = True
        self.end_window()
        self._publish_all(self._windows.stop(self._reader.peak_rate_of, timeout_s=_DRAIN_S))
        self._is_closing = False
        for event in self._reader.outlook(self._step) if self._sinks else ():
            self._emit(event)
        self._stop_probes()
        for sink in list(self._sinks):
            self._with_sink(sink, sink.close)

    # Readings: the pipeline from a window to the sinks.

    def _publish_all(self, complete: Iterable[tuple[StepWindow, RunSoFar]]) -> None:
        for window, so_far in complete:
            self._publish(window, so_far)

    @guarded("reading")
    def _publish(self, window: StepWindow, so_far: RunSoFar) -> None:
        told = self._reader.on(window, so_far) if window.steps else self._reader.on_empty(window, so_far)
        if window.steps:
            self._reading = told.reading
        self._announce(window.last_step)
        for event in told.events:
            self._emit(event)
        if self._sinks and told.reading.mfu is not None:
            for event in self._reader.first_outlook(window.last_step):
                self._emit(event)
        self._act_on(told)

    def _act_on(self, told: Told) -> None:
        """What the options ask for after an impossible reading or an alert."""
        if told.is_impossible and self.config.on_impossible != "warn":
            self._request_stop()
            if self.config.on_impossible == "raise" and not self._is_closing:
                raise ImpossibleReadingError(told.reading.reason or "a reading is impossible")
        if self.config.stop_on_alert and told.has_bad_news:
            self._request_stop()

    def _request_stop(self) -> None:
        """Stop now in a world of one. Ranks that stopped each on its own would wait for each other without end."""
        if world_size() == 1:
            self.should_stop = True
        elif not self._windows.ask_for_stop() and not self._is_stop_refused:
            self._is_stop_refused = True
            _log.warning("Training should stop and goes on: the ranks cannot agree on when, as they share no figures.")

    def _stop_with_the_other_ranks(self) -> None:
        if self._is_closing or world_size() == 1:
            return
        if self.config.stop_on_alert or self.config.on_impossible == "stop":
            self._publish_all(self._windows.wait_for_stop(self._reader.peak_rate_of))
        self.should_stop = self.should_stop or self._windows.is_stop_due

    @guarded("reading")
    def _publish_record(self, record: StepRecord) -> None:
        self._reader.take_record(record)
        self._announce(self._step)
        self._emit(Event(kind="record", step=self._step, payload=record.to_dict()))

    def _announce(self, step: int) -> None:
        """Say once what is measured, as soon as the peak can be known."""
        if self._is_announced:
            return
        self._is_announced = True
        self._emit(Event(kind="run", step=step, payload=self._run_description()))

    def _run_description(self) -> dict[str, Any]:
        return {
            "device": str(self._device()),
            "peak": None if self.peak is None else _plain(asdict(self.peak)),
            "clock": self._windows.clock_name,
            "world_size": world_size(),
            "log_every_n_steps": self._steps_per_window,
            "convention": self.config.convention,
            "torch_version": torch.__version__,
            "python_version": platform.python_version(),
            "mfu_monitor_version": _own_version(),
        }

    def _emit(self, event: Event) -> None:
        # A sink draws the pictures only now, and like making them that is no time of the training's.
        with self.paused(event.kind) if event.figures else contextlib.nullcontext():
            for sink in list(self._sinks):
                self._with_sink(sink, lambda sink=sink: sink.emit(event))  # type: ignore[misc]

    def _with_sink(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # a full disk must not end training
            self._stages.fail(f"sink {type(sink).__name__}", error)
            self._sinks = [other for other in self._sinks if other is not sink]

    # Start, probes, state.

    def _start(self) -> None:
        device = self._device()
        self._is_started = True
        self._reader.start(self._model, device)
        self._counting.share_budget(world_size())
        self._windows.start(lambda: self._clock or clock_for(device), self._host_clock)
        self._start_probes()

    def _device(self) -> torch.device:
        if self.config.device is not None:
            return torch.device(self.config.device)
        parameter = None if self._model is None else next(self._model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @guarded("probes")
    def _start_probes(self) -> None:
        self._probes = TrainingProbes(device=self._device())
        self._probes.start()
        weakref.finalize(self, self._probes.stop)  # a monitor that is dropped without close() leaves nothing behind

    @guarded("probes")
    def _take_probes(self) -> dict[str, Any]:
        return {} if self._probes is None else self._probes.take()

    @guarded("probes")
    def _discard_probes(self) -> None:
        if self._probes is not None:
            self._probes.discard()

    @guarded("probes")
    def _pause_probes(self) -> None:
        if self._probes is not None:
            self._probes.pause()

    @guarded("probes")
    def _resume_probes(self) -> None:
        if self._probes is not None:
            self._probes.resume()

    @guarded("probes")
    def _stop_probes(self) -> None:
        probes, self._probes = self._probes, None
        if probes is not None:
            probes.stop()

    def state_dict(self) -> dict[str, Any]:
        """The run's sums, in plain types, to go on from after a restart."""
        return {
            "version": STATE_VERSION,
            "next_step": self._next_step,
            "totals": self.totals,
            "alerts": self._reader.alerting.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. The time between the two runs is in no window and in no total."""
        self._load(dict(state))

    @guarded("state")
    def _load(self, state: dict[str, Any]) -> None:
        totals, next_step = dict(state["totals"]), int(state["next_step"])
        self._base_wall_s, self._base_elapsed_s = float(totals["wall_s"]), float(totals["elapsed_s"])
        self._counting.ledger.load_totals(totals)
        self._next_step = next_step
        self._reader.alerting.load_state_dict(state.get("alerts", {}))


def _configuration(config: MonitorConfig | None, keywords: Mapping[str, Any]) -> MonitorConfig:
    if config is not None and not isinstance(config, MonitorConfig):
        raise ConfigurationError(
            f"config={config!r} is not allowed: expected a MonitorConfig; options can be given by name as well; "
            f"example: Monitor(model, log_every_n_steps=10)"
        )
    return MonitorConfig.from_mapping(keywords) if config is None else config.with_options(keywords)


def _checked_model(model: Any) -> nn.Module | None:
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"model={model!r} ({type(model).__name__}) is not allowed: expected a torch.nn.Module or None; "
            f"example: Monitor(model, log_every_n_steps=10)"
        )
    return model


def _sinks_of(config: MonitorConfig) -> list[Sink]:
    sinks: list[Sink] = [] if config.jsonl is None else [JsonlSink(config.jsonl)]  # type: ignore[arg-type]
    return [*sinks, *alert_sinks(config)] if _is_rank_zero() else sinks


def _is_rank_zero() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _own_version() -> str:
    import mfu_monitor

    return mfu_monitor.__version__


def _plain(value: Any) -> Any:
    """Tuples and mappings as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
