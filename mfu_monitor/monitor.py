"""The monitor of a training run: the one place that wires the stages, and the API for any loop."""

from __future__ import annotations

import logging
import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from mfu_monitor.config import DEFAULT_LOG_EVERY_N_STEPS, MonitorConfig, resolve_alerts, resolve_callable
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import (
    ConfigurationError,
    ImpossibleReadingError,
    MFUMonitorWarning,
    Stages,
    guarded,
    must_pass,
    warn,
)
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.internals.dynamo import compiled_frames, latest_recompile
from mfu_monitor.readings import WindowReader, WindowReport
from mfu_monitor.sinks.base import Event, Sink
from mfu_monitor.sinks.behind import BehindSink
from mfu_monitor.sinks.console import ConsoleSink
from mfu_monitor.sinks.jsonl import JsonlSink, path_of_rank
from mfu_monitor.sinks.notify import alert_sinks
from mfu_monitor.sinks.tensorboard import TensorBoardSink
from mfu_monitor.steps.step_counter import StepCounter, StepOutcome, WindowHeld
from mfu_monitor.timing.clock import Clock
from mfu_monitor.timing.pipeline import WindowPipeline, rank, world_size
from mfu_monitor.timing.step_window import ClosedWindow, StepWindow
from mfu_monitor.utilization import RunSummary, UtilizationReading

__all__ = ["Monitor"]

_log = logging.getLogger("mfu_monitor")

STATE_VERSION = 1
OTHER_THREADS = (
    "A step began on one thread while another thread was in a step of the same Monitor: a monitor measures one step at "
    "a time, so the second one is in no window. Give each thread a Monitor of its own."
)
_MOST_RECOMPILES_REPORTED = 5
"""In the log, a run; each window's count is in its reading."""
_DRAIN_S = 5.0
"""Longest wait for the device and the other ranks once training has ended; during training there is none."""
_DRAIN_POLL_S = 0.005
_SLOW_EVENT_S = 0.1
_SLOW_SINK_S = 1.0
"""Of slow events in all, before a sink is called from another thread."""
_TORN = "the window was interrupted while a step was added: its time and its FLOPs are not of the same steps"
_STOP_POLL_S = 0.0005
_STOP_WAIT_S = 300.0
"""For the ranks' agreement to stop, as long as for a collective: one rank may save a checkpoint meanwhile."""


@dataclass(slots=True)
class _Scope:
    """A ``with`` block that calls one function when it begins and one when it ends; a failure of theirs ends there."""

    _stages: Stages
    _begin: Callable[[], Any]
    _end: Callable[..., None]

    def __enter__(self) -> Any:
        return self._stages.always("monitor", self._begin)

    def __exit__(self, *exc_info: Any) -> None:
        self._stages.always("monitor", self._end, *exc_info)


@dataclass(slots=True)
class _StepScope:
    """``with monitor.step(batch):``"""

    _monitor: Monitor
    _batch: Any
    _step: int | None
    _extra: Hashable

    def __enter__(self) -> Monitor:
        batch, self._batch = self._batch, None  # the loop decides how long a batch lives
        try:
            self._monitor.begin_step(batch, step=self._step, signature_extra=self._extra)
            return self._monitor
        except BaseException:  # Ctrl-C strikes anywhere, and then no `with` block ends this step
            self._monitor.abort_step()
            raise

    def __exit__(self, exc_type: Any, exc: Any, trace: Any) -> None:
        try:
            if exc_type is None:
                self._monitor.end_step()
            else:
                self._monitor.abort_step(exc_type, exc, trace)
        except BaseException:
            self._monitor.abort_step()
            raise


@dataclass(slots=True)
class _GroupScope:
    """``with monitor.step():`` around the micro-batches of one optimizer step."""

    _monitor: Monitor

    def __enter__(self) -> Monitor:
        self._monitor._is_in_group = True
        return self._monitor

    def __exit__(self, exc_type: Any, exc: Any, trace: Any) -> None:
        self._monitor._is_in_group = False
        if exc_type is not None:
            self._monitor.abort_step(exc_type, exc, trace)
        else:
            self._monitor.end_step(optimizer_step=True)


_NO_BATCH = object()


class Monitor:
    """Measures MFU, HFU and throughput of a training loop while it runs. Changes nothing in it.

    Wrong options raise here; once training runs nothing of the monitor does: a stage that fails is turned off with one
    ``StageDisabledWarning``.

    Args:
        model: gives modules their names and says which parameters need gradients. Optional.
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
        >>> monitor = mm.Monitor(model, tensorboard="runs/a", log_every_n_steps=10)
        >>> for batch in loader:
        ...     with monitor.step(batch):
        ...         train(batch)
        >>> monitor.close()
        >>> print(monitor.summary)
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
        self._sinks = _sinks_of(self.config, _checked_sinks(sinks))
        self.should_stop = False
        """True once training is to stop: after an impossible reading or an alert, where the options ask for that."""
        self._stages = Stages()
        self._run_id = uuid.uuid4().hex[:12]  # of the system's randomness: no generator of training's is touched
        self._slow_s: dict[int, float] = {}
        self._closed_sinks: list[Sink] = []
        self._clock, self._host_clock = clock, host_clock
        self._counting = StepCounter(
            model,
            self._stages,
            count=self.config.count,
            max_overhead=self.config.max_overhead,
            tokens=self.config.tokens,
            count_padding=self.config.count_padding,
            count_no_grad_as_model=self.config.count_no_grad_as_model,
            counter_factory=counter_factory,
            compile_counter=compile_counter,
        )
        self._steps_per_window = self.config.log_every_n_steps or DEFAULT_LOG_EVERY_N_STEPS
        self._windows = WindowPipeline(self._stages)
        self._reader = WindowReader(self.config, self._stages, self._windows)
        self._timed: deque[tuple[StepWindow, WindowHeld, float]] = deque()
        self._is_started = False
        self._is_in_step = False
        self._is_in_group = False
        self._has_missed_micro_batches = False
        self._thread = 0
        self._passed_over: set[int] = set()
        self._has_told_of_threads = False
        self._is_closing = False
        self._is_closed = False
        self._is_stop_refused = False
        self._has_shown_outlook = False
        self._recompiles_reported = 0
        self._step = 0
        self._next_step = 0
        self._batches = 0
        self._is_announced = False
        self._reading: UtilizationReading | None = None

    # What is known.

    @property
    def reading(self) -> UtilizationReading | None:
        """The latest reading; None before the first window."""
        return self._reading

    @property
    def summary(self) -> RunSummary:
        """The run so far, over all its windows: MFU in total and in the median window. ``print`` it at the end."""
        return self._reader.tally.summary()

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
            "elapsed_s": self._windows.elapsed_s,
            "wall_s": self._windows.wall_s,
        }

    @guarded("sinks", always=True)
    def add_sink(self, sink: Sink) -> None:
        """Send events to one more sink from now on; what is not a sink is refused with a warning."""
        self._sinks.extend(_checked_sinks([sink]))

    # Steps.

    def step(
        self, batch: Any = _NO_BATCH, *, step: int | None = None, signature_extra: Hashable = ()
    ) -> _StepScope | _GroupScope:
        """One training batch, as a ``with`` block; arguments as ``begin_step``. An exception aborts the step.

        With accumulation give a list of all micro-batches of the step, or nothing, and each one to ``micro_batch``.
        """
        return _GroupScope(self) if batch is _NO_BATCH else _StepScope(self, batch, step, signature_extra)

    def micro_batch(self, batch: Any) -> _Scope:
        """One of several micro-batches inside ``with monitor.step():``; counted and timed as a training batch.

        What follows the last one (the optimizer's work) belongs to it.

        Example:
            >>> with monitor.step():
            ...     for batch in batches:
            ...         with monitor.micro_batch(batch):
            ...             loss(batch).backward()
            ...     optimizer.step()
        """
        return _Scope(self._stages, partial(self._begin_micro_batch, batch), self._end_micro_batch)

    @guarded("monitor")
    def _begin_micro_batch(self, batch: Any) -> None:
        if self._is_in_group:
            self.end_step(optimizer_step=False)
            self.begin_step(batch)
        elif not self._is_in_step:
            self.begin_step(batch)

    @guarded("monitor", always=True)
    def _end_micro_batch(self, *exc_info: Any) -> None:
        if exc_info[0] is not None:
            self.abort_step(*exc_info)

    @guarded("monitor")
    def begin_step(self, batch: Any, *, step: int | None = None, signature_extra: Hashable = ()) -> None:
        """A training batch begins.

        Args:
            batch: what the loader gave; its shapes are read, on some steps its masks.
            step: the number that readings are logged at; by default the batches are numbered.
            signature_extra: anything hashable that decides what the step runs and is not seen in the batch (whether the
                optimizer steps, a phase of a schedule).
        """
        thread = threading.get_ident()
        if self._is_in_step and self._is_anothers_step(thread):
            return
        if self._is_in_step:
            self.abort_step()
        self._is_in_step, self._is_closed, self._thread = True, False, thread
        try:
            if not self._is_started:
                self._start()
            self._step = self._next_step if step is None else step
            self._windows.begin_step(self._step)
            self._stages.run("accounting", self._counting.begin, batch, signature_extra)
        except BaseException:  # Ctrl-C strikes anywhere, and then no `with` block ends this step
            self.abort_step()
            raise

    def _is_anothers_step(self, thread: int) -> bool:
        """One step at a time: while a thread is in one, those of other threads are not measured."""
        if thread == self._thread or all(other.ident != self._thread for other in threading.enumerate()):
            return False
        if not self._has_told_of_threads:
            self._has_told_of_threads = True
            warn(OTHER_THREADS, MFUMonitorWarning)
        self._passed_over.add(thread)
        return True

    @guarded("monitor", always=True)
    def end_step(self, *, optimizer_step: bool | None = None) -> None:
        """The training batch ends.

        Args:
            optimizer_step: whether the optimizer stepped in it; None if not known.
        """
        if not self._is_in_step or self._is_passed_over():
            return
        try:
            excluded, is_recompile = self._end_count(optimizer_step)
        except BaseException:
            self.abort_step()
            raise
        self._is_in_step = False
        self._stages.run("timing", self._windows.builder.end_step, excluded=excluded, is_recompile=is_recompile)
        if is_recompile:
            self._report_recompile()
        if excluded is not None:
            self._windows.discard_probes()
        self._next_step = self._step + 1
        self._batches += not self._is_in_group  # a group of micro-batches is one step of the window
        if self._batches >= self._steps_per_window:
            self.end_window()
        elif self._timed or self._windows.has_pending:
            self._advance()

    @guarded("monitor", always=True)
    def abort_step(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """The training batch was not finished: nothing of it counts, and nothing of ours stays behind."""
        if not (self._is_in_step or self._counting.is_counting) or self._is_passed_over():
            return
        try:
            self._abort((exc_type, exc, trace))
        except BaseException:  # Ctrl-C within: what it kept from running runs now
            self._abort((None, None, None))
            raise

    def _abort(self, exc_info: Any) -> None:
        self._abort_count(exc_info)
        self._stages.run("timing", self._windows.builder.abort_step)
        self._is_in_step = False
        if exc_info[0] is not None:
            self._stages.always("probes", self._windows.stop_probes)

    def _is_passed_over(self) -> bool:
        """True where this thread ends a step that was not begun here, as another thread is in one."""
        thread = threading.get_ident()
        if thread == self._thread or thread not in self._passed_over:
            return False
        self._passed_over.discard(thread)
        return True

    def _end_count(self, optimizer_step: bool | None) -> tuple[str | None, bool]:
        outcome: StepOutcome | None = self._stages.run("accounting", self._counting.end, optimizer_step)
        if outcome is None:
            self._abort_count((None, None, None))  # the stage is off; a counter that is still entered must be left
            return None, False
        if outcome.record is not None:
            self._publish_record(outcome.record)
        return outcome.excluded, outcome.is_recompile

    @guarded("recompiles")
    def _report_recompile(self) -> None:
        self._recompiles_reported += 1
        if self._recompiles_reported <= _MOST_RECOMPILES_REPORTED:
            _log.warning(
                "Step %d recompiled and is in no window: %s. If this goes on, keep shapes and flags the same from "
                "step to step, or compile with dynamic=True.",
                self._step,
                latest_recompile() or "the compiler gives no reason",
            )

    def _abort_count(self, exc_info: Any) -> None:
        self._stages.always("counting", self._counting.abort, exc_info)

    # Time.

    def phase(self, name: str) -> _Scope:
        """A part of the step as a ``with`` block: ``"forward"``, ``"backward"``, ``"optimizer"``, or your own name."""
        before: list[str] = []

        def begin() -> None:
            before.append(self.current_phase)
            self.mark_phase(name)

        def end(*_: Any) -> None:
            self.mark_phase(before.pop() if before else "other")

        return _Scope(self._stages, begin, end)

    @guarded("timing")
    def mark_phase(self, name: str) -> None:
        """From here on time belongs to this phase, until another is marked or the step ends.

        Args:
            name: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"h2d_copy"``, ``"other"``; between steps also
                ``"data_wait"`` and ``"between"`` (callbacks, logging); or a name of yours.
        """
        self._windows.builder.mark_phase(name)
        if self._is_in_step:
            self._counting.note_phase(name)

    @property
    def current_phase(self) -> str:
        """The phase that time belongs to at present."""
        return self._stages.run("timing", lambda: self._windows.builder.phase) or "other"

    def paused(self, reason: str) -> _Scope:
        """What happens in the ``with`` block is in no window: ``with monitor.paused("validation"): ...``."""
        return _Scope(self._stages, partial(self.pause, reason), lambda *_: self.resume(reason))

    @guarded("monitor", always=True)
    def pause(self, reason: str) -> None:
        """Leave the time from here on out of the windows: ``"validation"``, ``"checkpoint"``, or a reason of yours."""
        self._windows.pause(reason)

    @guarded("monitor", always=True)
    def resume(self, reason: str) -> None:
        """End a pause; the next step's begin does so as well."""
        self._windows.resume(reason)

    # Windows.

    @guarded("monitor", always=True)
    def end_window(self) -> None:
        """Close the window here, with the steps it has: at the end of an epoch or of training."""
        if self._batches:
            self._batches = 0
            self._windows.close(self._counting.take_window())
        self._advance()
        self._stop_with_the_other_ranks()
        if not self._is_in_step:
            self._stages.run("timing", self._windows.builder.end_reporting)

    def _advance(self) -> None:
        """Bring closed windows on, as far as device and ranks have answered, and report those that are complete."""
        self._timed.extend(self._windows.timed())
        while self._timed:
            window, held, run_wall_s = self._timed[0]
            fields = self._counting.finished(held)
            if fields is None:
                break
            self._timed.popleft()
            whole = _whole(window, fields, held.steps)
            closed = ClosedWindow(whole, held.record, held.run_model_flops, run_wall_s)
            self._gather(closed)
        gathered = self._windows.gathered()
        for sections in self._windows.take_sections():
            self._counting.learn(sections)
        for closed in gathered:
            self._publish(closed)

    def _gather(self, closed: ClosedWindow) -> None:
        peak = self._reader.peak_rate_of(closed.window) if self._windows.has_other_ranks else None
        section = self._counting.section() if self._windows.takes_section else None
        self._windows.gather(closed, peak, section or ())

    @guarded("monitor", always=True)
    def close(self) -> None:
        """Training has ended: report the last window and close the sinks. May be called again; steps may follow."""
        try:
            if self._is_closed:
                return
            self._is_closing = True
            self._stages.always("monitor", self.abort_step)
            self._stages.always("monitor", self._report_the_rest)
            self._let_go()
        except BaseException:  # Ctrl-C within: what it kept from running runs now
            self._let_go()
            raise

    def _let_go(self) -> None:
        """Leave nothing behind; may be called again after an attempt that was cut short."""
        self._is_closing = False
        self._stages.always("monitor", self.abort_step)
        for _ in range(2):  # once more where stopping failed
            self._stages.always("probes", self._windows.stop_probes)
        for sink in list(self._sinks):
            if sink not in self._closed_sinks:
                self._with_sink(sink, sink.close)
                self._closed_sinks.append(sink)
        self._closed_sinks = []
        self._is_closed = True

    def _report_the_rest(self) -> None:
        self.end_window()
        self._stages.run("timing", self._windows.builder.stop)
        deadline_s = time.perf_counter() + _DRAIN_S
        self._advance()
        while (self._timed or self._windows.has_pending) and time.perf_counter() < deadline_s:
            time.sleep(_DRAIN_POLL_S)
            self._advance()
        self._windows.give_up(_DRAIN_S)
        self._advance()
        self._windows.leave()
        self._show_outlook(self._step, draw=any(getattr(sink, "shows_figures", False) for sink in self._sinks))
        if self._is_started and not self.summary.windows:
            _log.warning(
                "No MFU: no window was measured, as every step was counted or compiling. Run more steps, or make the "
                "windows of %d steps shorter with log_every_n_steps=.",
                self._steps_per_window,
            )

    # Readings: the pipeline from a window to the sinks.

    @guarded("reading")
    def _publish(self, closed: ClosedWindow) -> None:
        report = self._reader.on(closed)
        if closed.window.steps:
            self._reading = report.reading
        self._announce(closed.window.last_step)
        for event in report.events:
            self._emit(event)
        if report.reading.mfu is not None and not self._has_shown_outlook:
            self._has_shown_outlook = True
            self._show_outlook(closed.window.last_step, draw=False)
        self._act_on(report)

    def _show_outlook(self, step: int, *, draw: bool) -> None:
        event = self._reader.outlook(step, draw=draw) if self._sinks else None
        if event is not None:
            self._emit(event)

    def _act_on(self, report: WindowReport) -> None:
        """What the options ask for after an impossible reading or an alert."""
        if report.is_impossible and self.config.on_impossible != "warn":
            self._request_stop()
            if self.config.on_impossible == "raise" and not self._is_closing:
                raise ImpossibleReadingError(report.reading.reason or "a reading is impossible")
        if self.config.stop_on_alert and report.is_loss:
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
            self._wait_for_stop()
        self.should_stop = self.should_stop or self._windows.is_stop_due

    def _wait_for_stop(self) -> None:
        deadline_s = time.perf_counter() + _STOP_WAIT_S
        while self._windows.is_stop_behind:
            if time.perf_counter() > deadline_s:
                self._windows.give_up_ranks(_STOP_WAIT_S)
            time.sleep(_STOP_POLL_S)
            self._advance()

    @guarded("reading")
    def _publish_record(self, record: StepRecord) -> None:
        self._notice_micro_batches(record)
        self._reader.take_record(record)
        self._announce(self._step)
        self._emit(Event(kind="record", step=self._step, payload=record.to_dict()))

    def _notice_micro_batches(self, record: StepRecord) -> None:
        if self._has_missed_micro_batches or (runs := self._counting.unseen_micro_batches(record)) < 2:
            return
        self._has_missed_micro_batches = True
        _log.warning(
            "Every product ran %d times in step %d, and the batch given to the step holds the input of one of these "
            "runs: FLOPs are those of all, tokens and samples those of one micro-batch. Give monitor.step(batches) a "
            "list of all of them, or each to monitor.micro_batch(batch), or tokens= a function.",
            runs,
            self._step,
        )

    def _announce(self, step: int) -> None:
        """Say once what is measured, as soon as the peak can be known."""
        if self._is_announced:
            return
        self._is_announced = True
        self._emit(Event(kind="run", step=step, payload=self._run_description()))

    def _run_description(self) -> dict[str, Any]:
        return {
            "device": str(self._device()),
            "device_name": self._reader.device_name,
            "peak": None if self.peak is None else _plain(asdict(self.peak)),
            "clock": self._windows.builder.clock.name,
            "world_size": world_size(),
            "log_every_n_steps": self._steps_per_window,
            "convention": self.config.convention,
            "torch_version": torch.__version__,
            "python_version": platform.python_version(),
            "mfu_monitor_version": _own_version(),
        }

    def _emit(self, event: Event) -> None:
        event = replace(event, run_id=self._run_id, rank=_rank())
        for sink in list(self._sinks):
            began_s = time.perf_counter()
            self._with_sink(sink, lambda sink=sink: sink.emit(event))  # type: ignore[misc]
            if (took_s := time.perf_counter() - began_s) > _SLOW_EVENT_S:
                self._note_slow(sink, took_s)

    def _note_slow(self, sink: Sink, took_s: float) -> None:
        """A sink that has cost too much is called from a thread of its own; a slow first import alone is not that."""
        self._slow_s[id(sink)] = slow_s = self._slow_s.get(id(sink), 0.0) + took_s
        if slow_s < _SLOW_SINK_S or getattr(sink, "stays_on_thread", False) or sink not in self._sinks:
            return
        warn(
            f"The sink {type(sink).__name__} took {slow_s:.3g} s for a few events. From here on a thread calls it, so "
            "that training does not wait; at most 100 events wait. A sink that must stay on its thread says so: "
            "stays_on_thread = True.",
            MFUMonitorWarning,
        )
        self._sinks = [BehindSink(other) if other is sink else other for other in self._sinks]

    def _with_sink(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a full disk must not end training
            if must_pass(error):
                raise
            self._stages.fail(f"sink {type(sink).__name__}", error)
            self._sinks = [other for other in self._sinks if other is not sink]

    # Start, probes, state.

    def _start(self) -> None:
        device = self._device()
        self._is_started = True
        self._reader.start(self._model, device)
        self._windows.start(device, clock=self._clock, host_clock=self._host_clock)
        self._counting.start(world_size=world_size(), rank=rank())

    def _device(self) -> torch.device:
        if self.config.device is not None:
            return torch.device(self.config.device)
        parameter = None if self._model is None else next(self._model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def state_dict(self) -> dict[str, Any]:
        """The run's sums, in plain types, to go on from after a restart."""
        return self._state() or {}

    @guarded("state")
    def _state(self) -> dict[str, Any]:
        detector = self._reader.detector
        return {
            "version": STATE_VERSION,
            "next_step": self._next_step,
            "totals": self.totals,
            "alerts": {} if detector is None else detector.state_dict(),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (``copy.deepcopy``, ``torch.save`` of a model that holds its monitor) is idle: no model, no sinks."""
        outputs = {"jsonl": None, "tensorboard": None, "console": False, "webhook": None, "on_alert": None}
        tokens = self.config.tokens if isinstance(self.config.tokens, str) else None
        return _idle_copy, (replace(self.config, tokens=tokens, **outputs),)  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. The time between the two runs is in no window and in no total."""
        self._stages.run("state", self._load, state)

    def _load(self, state: Mapping[str, Any]) -> None:
        totals, next_step = dict(state["totals"]), int(state["next_step"])
        self._windows.earlier_wall_s, self._windows.elapsed_s = float(totals["wall_s"]), float(totals["elapsed_s"])
        self._counting.ledger.load_totals(totals)
        self._next_step = next_step
        if self._reader.detector is not None and state.get("alerts"):
            self._reader.detector.load_state_dict(state["alerts"])


def _whole(window: StepWindow, fields: Mapping[str, Any], steps: int | None) -> StepWindow:
    """The window with what its steps held; without it where Ctrl-C struck between the two and they are not the same."""
    if steps is None or steps == window.steps:
        return replace(window, **fields)
    return replace(window, invalid_reason=window.invalid_reason or _TORN)


def _idle_copy(config: MonitorConfig) -> Monitor:
    return Monitor(config=config)


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


def _checked_sinks(sinks: Any) -> list[Sink]:
    given: list[Any] = list(sinks) if isinstance(sinks, Iterable) and not isinstance(sinks, str) else [sinks]
    for sink in given:
        if not (callable(getattr(sink, "emit", None)) and callable(getattr(sink, "close", None))):
            raise ConfigurationError(
                f"{sink!r} ({type(sink).__name__}) is not a sink: expected an object with emit(event) and close(). For "
                "a file or a folder give its path by name: jsonl='runs/mfu.jsonl', tensorboard='runs/a'; for a line a "
                "window console=True; example: Monitor(model, tensorboard='runs/a', console=True)"
            )
    return given


def _sinks_of(config: MonitorConfig, given: list[Sink]) -> list[Sink]:
    """The sinks that were given, and those that the options name; readings are written by one rank."""
    sinks = list(given)
    if not _is_rank_zero():
        return [*sinks, JsonlSink(path_of_rank(config.jsonl, _rank()))] if config.jsonl is not None else sinks
    if config.jsonl is not None:
        sinks.append(JsonlSink(config.jsonl))  # type: ignore[arg-type]
    if config.tensorboard is not None:
        sinks.append(TensorBoardSink(config.tensorboard, detail=config.detail))
    if config.console or (config.console is None and not sinks):
        sinks.append(ConsoleSink())
    if resolve_alerts(config.alerts) is not None:
        sinks += alert_sinks(resolve_callable("on_alert", config.on_alert), config.webhook)
    return sinks


def _is_rank_zero() -> bool:
    return _rank() == 0


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _own_version() -> str:
    import mfu_monitor

    return mfu_monitor.__version__


def _plain(value: Any) -> Any:
    """Tuples and mappings as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
