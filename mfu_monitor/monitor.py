"""The monitor of a training run: the one place that wires the stages, and the API for any loop."""

from __future__ import annotations

import platform
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from mfu_monitor._peak_source import PeakSource
from mfu_monitor._scopes import PauseScope, PhaseScope, StepScope
from mfu_monitor._stages import Stages, guarded, warn
from mfu_monitor._step_counter import StepCounter, StepOutcome
from mfu_monitor.config import DEFAULT_LOG_EVERY_N_STEPS, MonitorConfig
from mfu_monitor.counting.records import StepRecord
from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning
from mfu_monitor.hardware.peaks import DevicePeak
from mfu_monitor.sinks.base import Event, Sink
from mfu_monitor.timing.clock import Clock, clock_for
from mfu_monitor.timing.compiles import compiled_frames
from mfu_monitor.timing.probes import TrainingProbes
from mfu_monitor.timing.ranks import RankExchange, pack_window, unknown_row, world_fields
from mfu_monitor.timing.records import StepWindow
from mfu_monitor.timing.window import WindowBuilder
from mfu_monitor.utilization import UtilizationReading, active_precision, metrics_of, read_utilization

__all__ = ["Monitor"]

STATE_VERSION = 1
_DRAIN_S = 5.0
"""Longest wait for the device and the other ranks once training has ended; during training there is none."""
_DRAIN_POLL_S = 0.005
_MOST_WINDOWS_IN_FLIGHT = 16
"""Windows that may wait for other ranks; with more of them a rank has gone, or has fewer steps than this one."""


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
        self._windows: WindowBuilder | None = None
        self._probes: TrainingProbes | None = None
        self._peaks: PeakSource | None = None
        self._ranks: RankExchange | None = None
        self._is_started = False
        self._is_in_step = False
        self._step = 0
        self._next_step = 0
        self._batches = 0
        self._base_wall_s = 0.0
        self._base_elapsed_s = 0.0
        self._elapsed_s = 0.0
        self._due = 0  # windows closed whose row was not sent to the other ranks
        self._goodput: deque[tuple[int | None, float]] = deque()
        self._in_flight: deque[tuple[StepWindow, tuple[int | None, float]]] = deque()
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
        return None if self._peaks is None else self._peaks.known

    @property
    def totals(self) -> dict[str, Any]:
        """Sums of the whole run, earlier parts of a resumed one included: all training batches, counted ones too.

        ``steps``, ``optimizer_steps``, ``tokens``, ``samples``, FLOPs by part, ``elapsed_s`` (of the windows) and
        ``wall_s``. None where one of the batches was not known.
        """
        return {
            **self._counting.ledger.totals,
            "elapsed_s": self._base_elapsed_s + self._elapsed_s,
            "wall_s": self._wall_s,
        }

    @property
    def _wall_s(self) -> float:
        return self._base_wall_s + (0.0 if self._windows is None else self._windows.wall_s)

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
        self._is_in_step = True
        self._step = self._next_step if step is None else step
        self._begin_time()
        self._begin_count(batch, signature_extra)

    def end_step(self, *, optimizer_step: bool | None = None) -> None:
        """The training batch ends.

        Args:
            optimizer_step: whether the optimizer stepped in it; None if not known.
        """
        if not self._is_in_step:
            return
        self._is_in_step = False
        excluded = self._end_count(optimizer_step)
        self._end_time(excluded)
        self._next_step = self._step + 1
        self._batches += 1
        if self._batches >= self._steps_per_window:
            self.end_window()
        elif self._due or self._in_flight:
            self._publish_resolved()

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
        self._abort_time()
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

    @guarded("accounting")
    def _count_outcome(self, optimizer_step: bool | None) -> StepOutcome:
        return self._counting.end(optimizer_step)

    def _abort_count(self, exc_info: Any) -> None:
        try:
            self._counting.abort(exc_info)
        except Exception as error:  # noqa: BLE001  # the exception on its way must not be replaced by ours
            self._stages.fail("counting", error)

    # Time.

    @guarded("timing")
    def _begin_time(self) -> None:
        assert self._windows is not None
        self._windows.begin_step(self._step)

    @guarded("timing")
    def _end_time(self, outcome: tuple[str | None, bool]) -> None:
        assert self._windows is not None
        excluded, is_recompile = outcome
        self._windows.end_step(excluded=excluded, is_recompile=is_recompile)
        if excluded is not None:
            self._discard_probes()

    @guarded("timing")
    def _abort_time(self) -> None:
        assert self._windows is not None
        self._windows.abort_step()

    def phase(self, name: str) -> PhaseScope:
        """A part of the step as a ``with`` block: ``"forward"``, ``"backward"``, ``"optimizer"``, or your own name."""
        return PhaseScope(self, name)

    @guarded("timing")
    def mark_phase(self, name: str) -> None:
        """From here on time belongs to this phase, until another is marked or the step ends.

        Args:
            name: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"h2d_copy"``, ``"other"``; between steps also
                ``"data_wait"`` and ``"between"`` (callbacks, logging); or a name of yours.
        """
        if self._windows is not None:
            self._windows.mark_phase(name)

    @property
    def current_phase(self) -> str:
        """The phase that time belongs to at present."""
        return "other" if self._windows is None else self._windows.phase

    def paused(self, reason: str) -> PauseScope:
        """What happens in the ``with`` block is in no window: ``with monitor.paused("validation"): ...``."""
        return PauseScope(self, reason)

    @guarded("timing")
    def pause(self, reason: str) -> None:
        """Leave the time from here on out of the windows: ``"validation"``, ``"checkpoint"``, or a reason of yours."""
        if self._windows is not None:
            self._windows.pause(reason)

    @guarded("timing")
    def resume(self, reason: str) -> None:
        """End a pause; the next step's begin does so as well."""
        if self._windows is not None:
            self._windows.resume(reason)
            self._discard_probes()

    # Windows.

    def end_window(self) -> None:
        """Close the window here, with the steps it has: at the end of an epoch or of training."""
        if self._batches:
            self._batches = 0
            self._close_window()
        self._publish_resolved()
        self._note_reporting_time()

    def close(self) -> None:
        """Training has ended: report the last window and close the sinks. May be called again; steps may follow."""
        self.abort_step()
        self.end_window()
        self._stop_time()
        self._drain(_DRAIN_S)
        self._stop_probes()
        for sink in list(self._sinks):
            self._with_sink(sink, sink.close)

    def _close_window(self) -> None:
        work = self._counting.take_window()
        probes = self._take_probes() or {}
        self._due += 1
        self._close_time(lambda: None if (fields := work()) is None else {**probes, **fields})
        self._goodput.append(self._goodput_so_far() or (None, 0.0))

    @guarded("accounting")
    def _goodput_so_far(self) -> tuple[int | None, float]:
        return self._counting.ledger.totals["model_flops"], self._wall_s

    @guarded("timing")
    def _close_time(self, work: Callable[[], Mapping[str, Any] | None]) -> None:
        assert self._windows is not None
        self._windows.close_window(work)

    @guarded("timing")
    def _stop_time(self) -> None:
        if self._windows is not None:
            self._windows.stop()

    @guarded("timing")
    def _note_reporting_time(self) -> None:
        if self._windows is not None and not self._is_in_step:
            self._windows.end_reporting()

    @guarded("timing")
    def _resolved(self) -> list[StepWindow]:
        return [] if self._windows is None else self._windows.resolved()

    def _publish_resolved(self) -> None:
        for window in self._resolved() or ():
            self._due -= 1
            self._gather(window, self._goodput.popleft())
        if "timing" in self._stages.off:
            self._give_up_windows()
        self._publish_gathered()

    def _give_up_windows(self) -> None:
        # The other ranks still wait for one row a window from this one.
        for _ in range(self._due):
            self._send(unknown_row())
        self._due = 0
        self._goodput.clear()

    def _gather(self, window: StepWindow, goodput: tuple[int | None, float]) -> None:
        """Ask the other ranks for their part of the window; in a world of one there is nothing to ask."""
        self._elapsed_s += window.elapsed_s
        if self._ranks is None:
            self._publish(_alone(window), goodput)
            return
        peak = self._peak_of(window)
        precision = active_precision(window)
        rate = peak.flops_per_s(precision) if peak is not None and precision is not None else None
        self._in_flight.append((window, goodput))
        self._send(pack_window(window, rate))

    @guarded("ranks")
    def _send(self, row: list[int]) -> None:
        if self._ranks is not None:
            self._ranks.send(row)

    @guarded("ranks")
    def _received(self) -> list[list[list[int]]]:
        if len(self._in_flight) > _MOST_WINDOWS_IN_FLIGHT:
            raise TimeoutError(f"{len(self._in_flight)} windows wait for another rank's figures")
        return [] if self._ranks is None else self._ranks.received()

    def _publish_gathered(self) -> None:
        if self._ranks is None:
            return
        for rows in self._received() or ():
            if self._in_flight:  # else it was a row of a window that this rank gave up
                window, goodput = self._in_flight.popleft()
                self._publish(self._with_world(window, rows) or window, goodput)
        if "ranks" in self._stages.off:
            self._ranks = None
            self._publish_alone()

    @guarded("ranks")
    def _with_world(self, window: StepWindow, rows: list[list[int]]) -> StepWindow:
        assert self._ranks is not None
        return replace(window, **world_fields(rows, rank=self._ranks.rank))

    def _publish_alone(self) -> None:
        while self._in_flight:
            window, goodput = self._in_flight.popleft()
            self._publish(_alone(window), goodput)

    def _drain(self, timeout_s: float) -> None:
        """Wait for what is on its way, not longer than this. Training has ended, so nothing is held up."""
        deadline_s = time.perf_counter() + timeout_s
        self._publish_resolved()
        while (self._due or self._in_flight) and time.perf_counter() < deadline_s:
            time.sleep(_DRAIN_POLL_S)
            self._publish_resolved()
        self._publish_alone()
        if self._due:
            message = (
                f"{self._due} windows are lost: the device had not finished them {timeout_s:g} s after training ended"
            )
            warn(message, MFUMonitorWarning)

    # Readings: the pipeline from a window to the sinks.

    @guarded("reading")
    def _publish(self, window: StepWindow, goodput: tuple[int | None, float]) -> None:
        if not window.steps:
            return  # every step of it was left out: there is nothing to read
        reading = self._read(window, goodput)
        self._reading = reading
        self._announce(window.last_step)
        metrics = metrics_of(reading, names=self.config.names)
        self._emit(Event(kind="reading", step=reading.last_step, metrics=metrics, payload=reading.to_dict()))

    def _read(self, window: StepWindow, goodput: tuple[int | None, float]) -> UtilizationReading:
        peak = self._peak_of(window)
        reading = read_utilization(window, peak, convention=self.config.convention)
        flops, wall_s = goodput
        rate = reading.peak_flops_per_s
        goodput_mfu = flops / (wall_s * rate) if flops is not None and wall_s > 0 and rate is not None else None
        return replace(reading, goodput_mfu=goodput_mfu)

    @guarded("reading")
    def _publish_record(self, record: StepRecord) -> None:
        precisions = {name: totals.model_flops for name, totals in record.by_dtype().items()}
        self._find_peak(max(precisions, key=precisions.__getitem__) if any(precisions.values()) else None)
        self._announce(self._step)
        self._emit(Event(kind="record", step=self._step, payload=record.to_dict()))

    def _peak_of(self, window: StepWindow) -> DevicePeak | None:
        precision = active_precision(window)
        return self.peak if precision is None else self._find_peak(precision)

    @guarded("peak")
    def _find_peak(self, precision: str | None) -> DevicePeak | None:
        assert self._peaks is not None
        return None if precision is None else self._peaks.for_precision(precision)

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
            "clock": None if self._windows is None else self._windows.clock.name,
            "world_size": _world_size(),
            "log_every_n_steps": self._steps_per_window,
            "convention": self.config.convention,
            "torch_version": torch.__version__,
            "python_version": platform.python_version(),
            "mfu_monitor_version": _own_version(),
        }

    def _emit(self, event: Event) -> None:
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
        self._peaks = PeakSource(self.config.peak, device)
        self._start_time(device)
        self._counting.share_budget(_world_size())
        self._ranks = self._join_ranks()
        self._start_probes(device)

    @guarded("timing")
    def _start_time(self, device: torch.device) -> None:
        self._windows = WindowBuilder(clock=self._clock or clock_for(device), host_clock=self._host_clock)

    def _device(self) -> torch.device:
        if self.config.device is not None:
            return torch.device(self.config.device)
        parameter = None if self._model is None else next(self._model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @guarded("ranks")
    def _join_ranks(self) -> RankExchange | None:
        return RankExchange.join()

    @guarded("probes")
    def _start_probes(self, device: torch.device) -> None:
        self._probes = TrainingProbes(device=device)
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
    def _stop_probes(self) -> None:
        if self._probes is not None:
            self._probes.stop()

    def state_dict(self) -> dict[str, Any]:
        """The run's sums, in plain types, to go on from after a restart."""
        return {"version": STATE_VERSION, "next_step": self._next_step, "totals": self.totals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. The time between the two runs is in no window and in no total."""
        self._load(dict(state))

    @guarded("state")
    def _load(self, state: dict[str, Any]) -> None:
        totals = dict(state["totals"])
        self._counting.ledger.load_totals(totals)
        self._base_wall_s, self._base_elapsed_s = float(totals["wall_s"]), float(totals["elapsed_s"])
        self._next_step = int(state["next_step"])


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
    if config.jsonl is None:
        return []
    from mfu_monitor.sinks.jsonl import JsonlSink

    return [JsonlSink(config.jsonl)]  # type: ignore[arg-type]


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _alone(window: StepWindow) -> StepWindow:
    """The window without other ranks: the world's sums are its own in a world of one, and unknown in a larger one."""
    size = _world_size()
    if size > 1:
        return replace(window, world_size=size)
    return replace(
        window,
        world_model_flops=window.model_flops,
        world_hardware_flops=window.hardware_flops,
        world_tokens=window.tokens,
        world_samples=window.samples,
    )


def _own_version() -> str:
    import mfu_monitor

    return mfu_monitor.__version__


def _plain(value: Any) -> Any:
    """Tuples and mappings as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
