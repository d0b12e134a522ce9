"""The callback of the Hugging Face Trainer.

A ``TrainerCallback`` learns when an optimizer step begins and ends, but neither the batch nor, for an accumulated
step, where each batch begins. The trainer's ``training_step(model, inputs)`` has both, so it is wrapped on this one
trainer object while it trains. A hook on the model would show the batch too, but would cost each step and make
``torch.compile`` compile again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from mfu_monitor.config import DEFAULT_LOG_EVERY_N_STEPS, MonitorConfig
from mfu_monitor.errors import Guarded, MFUMonitorError, guarded_hook
from mfu_monitor.monitor import Monitor
from mfu_monitor.sinks import ConsoleSink, Sink, TensorBoardSink
from mfu_monitor.utilization import UtilizationReading

from ._loggers import AtLoggingStep, LoggingSteps, writable_jsonl
from ._patch import wrap_method

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "MFUCallback needs 'transformers', which cannot be imported. Run: pip install 'mfu-monitor[transformers]'. "
        "For a loop of your own, use mfu_monitor.Monitor."
    ) from error

__all__ = ["MFUCallback"]

_STATE_KEY = "mfu_monitor"
"""In ``trainer_state.json``, beside the states of the trainer's callbacks."""


class MFUCallback(Guarded, TrainerCallback):
    """Live MFU, HFU and tokens/s of a Hugging Face ``Trainer``, wherever the trainer reports.

    The trainer's own log line gets ``mfu``, ``hfu`` and ``tokens_per_s``, and with it every integration named in
    ``report_to`` and ``state.log_history``. All other metrics, text and pictures go to TensorBoard, under the same tags
    as Lightning's, and to ``jsonl``. A window is a whole number of optimizer steps, and step times and FLOPs a step are
    those of an optimizer step.

    Args:
        log_every_n_steps: optimizer steps of a window; None takes ``logging_steps`` of the training arguments.
        tensorboard_layout: write a CUSTOM SCALARS layout (MFU and HFU on one chart); False keeps one of your own.
        **config: the other options of ``MonitorConfig``: ``peak``, ``tokens``, ``jsonl``, ...

    Raises:
        ConfigurationError: an option that is unknown or not allowed; the message says what is.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[MFUCallback()])
    """

    def __init__(self, *, log_every_n_steps: int | None = None, tensorboard_layout: bool = True, **config: Any) -> None:
        super().__init__()
        self.config = MonitorConfig.from_mapping({**config, "log_every_n_steps": log_every_n_steps})
        self.tensorboard_layout = tensorboard_layout
        self.monitor: Monitor | None = None
        self._restore: list[Callable[[], None]] = []
        self._is_measuring = False
        self._is_in_step = False
        self._is_state_due = False
        self._window = 1
        self._logging_steps = LoggingSteps()
        self._batch = 0

    @property
    def _measuring(self) -> Monitor | None:
        """The monitor between start and end of training; it stays in ``monitor`` afterwards, for its reading."""
        return self.monitor if self._is_measuring else None

    @property
    def reading(self) -> UtilizationReading | None:
        """The latest reading, or None before the first window ended."""
        return self.monitor.reading if self.monitor is not None else None

    @guarded_hook
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to measure."""
        self._release()
        trainer = _find_trainer(self)
        batches = max(1, args.gradient_accumulation_steps)
        self._window = self.config.log_every_n_steps or _window_of(state, args)
        self._logging_steps = LoggingSteps()
        config = self.config.with_options(
            {
                "log_every_n_steps": self._window * batches,
                "micro_batches_per_step": batches,
                "total_steps": self.config.total_steps or (state.max_steps * batches if state.max_steps > 0 else None),
                "device": self.config.device or args.device,
                "jsonl": writable_jsonl(self.config.jsonl) if args.process_index == 0 else None,
                "run_name": self.config.run_name or args.run_name or os.path.basename(args.output_dir or "") or None,
                "promised_precision": self.config.promised_precision or _promised_precision(args),
            }
        )
        self.monitor = Monitor(kwargs.get("model"), config=config, sinks=self._sinks(trainer, args))
        self._is_measuring = self._is_state_due = True
        self._batch = 0
        try:
            self._wrap(trainer)
        except BaseException:  # Ctrl-C: until all is wrapped nothing else would undo it
            self._release()
            raise

    def _sinks(self, trainer: Any, args: Any) -> list[Sink]:
        if args.process_index != 0:
            return []
        writers = [writer for c in trainer.callback_handler.callbacks if (writer := getattr(c, "tb_writer", None))]
        layout, detail = self.tensorboard_layout, self.config.detail
        boards = [TensorBoardSink(writer, layout=layout, detail=detail) for writer in writers]
        return [AtLoggingStep(board, self._logging_steps) for board in boards] or [ConsoleSink()]

    def _wrap(self, trainer: Any) -> None:
        around: dict[str, Callable[..., AbstractContextManager[None]]] = {
            "log": self._with_utilization,
            "_prepare_inputs": functools.partial(self._during, "h2d_copy", "forward"),
            "training_step": functools.partial(self._measured, trainer),
            "_save_checkpoint": functools.partial(self._while_saving, trainer),
            "evaluate": functools.partial(self._paused, "validation"),
            # No event reports an exception; these hold all that can raise one (the first since transformers 5).
            "_run_epoch": self._undone_on_error,
            "get_batch_samples": self._undone_on_error,
        }
        for name, make in around.items():
            if hasattr(trainer, name):
                self._restore.append(wrap_method(trainer, name, make))
        # What the trainer does between epochs lies in none of these; the events of other callbacks may raise there.
        self._restore.append(wrap_method(trainer.callback_handler, "call_event", self._undone_on_error))
        backward = functools.partial(self._during, "backward", "other")
        self._restore.append(wrap_method(trainer.accelerator, "backward", backward))

    @contextlib.contextmanager
    def _during(self, phase: str, then: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Time of a step belongs to ``phase`` inside, and to ``then`` afterwards."""
        self._mark_phase(phase)
        try:
            yield
        finally:
            self._mark_phase(then)

    @guarded_hook
    def _mark_phase(self, name: str) -> None:
        if (monitor := self._measuring) is not None and self._is_in_step:
            monitor.mark_phase(name)

    @contextlib.contextmanager
    def _with_utilization(self, logs: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._add_utilization(logs)
        yield

    @guarded_hook
    def _add_utilization(self, logs: Any) -> None:
        """Three numbers more on the line that the trainer logs anyway, where it logs the loss of training."""
        reading = self.reading
        if reading is None or self._measuring is None or not isinstance(logs, dict) or "loss" not in logs:
            return
        for name in ("mfu", "hfu", "tokens_per_s"):
            if (value := getattr(reading, name)) is not None:
                logs.setdefault(name, float(f"{value:.4g}"))

    @contextlib.contextmanager
    def _measured(self, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._begin(inputs, trainer)
        with self._undone_on_error():
            yield

    @contextlib.contextmanager
    def _undone_on_error(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._undo()
            raise

    @contextlib.contextmanager
    def _paused(self, reason: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._pause(reason)
        try:
            yield
        finally:
            self._resume(reason)

    @contextlib.contextmanager
    def _while_saving(self, trainer: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._keep_state(trainer)
        with self._paused("checkpoint"):
            yield

    @guarded_hook
    def _keep_state(self, trainer: Any) -> None:
        """Put totals and levels where the trainer saves its own state.

        Not as an ``ExportableState``: to restore one, the trainer makes a new callback from options that were saved.
        """
        if (monitor := self._measuring) is not None:
            trainer.state.stateful_callbacks[_STATE_KEY] = monitor.state_dict()

    def _take_state(self, trainer: Any, monitor: Monitor) -> None:
        """Go on from a checkpoint; the trainer reads it after ``on_train_begin``, so this waits for the first batch."""
        self._is_state_due = False
        if saved := (trainer.state.stateful_callbacks or {}).get(_STATE_KEY):
            monitor.load_state_dict(saved)
            self._batch = int(saved.get("next_step", 0))

    @guarded_hook
    def _begin(self, inputs: Any, trainer: Any) -> None:
        if (monitor := self._measuring) is not None:
            if self._is_state_due:
                self._take_state(trainer, monitor)
            steps_optimizer = bool(trainer.accelerator.sync_gradients)
            self._logging_steps.note(self._batch, trainer.state.global_step + 1)
            monitor.begin_step(inputs, step=self._batch, signature_extra=(steps_optimizer,))
            self._is_in_step = True
            monitor.mark_phase("forward")

    @guarded_hook
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer's own work begins."""
        self._mark_phase("optimizer")

    @guarded_hook
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer's work is over."""
        self._mark_phase("other")

    @guarded_hook
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch ended whose gradients are accumulated."""
        self._end(control, optimizer_step=False)

    @guarded_hook
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch ended that stepped the optimizer."""
        self._end(control, optimizer_step=True)
        if (monitor := self._measuring) is not None and state.global_step % self._window == 0:
            monitor.end_window()  # an epoch's last step may have had fewer batches

    def _end(self, control: Any, *, optimizer_step: bool) -> None:
        if (monitor := self._measuring) is not None and self._is_in_step:
            self._is_in_step = False
            self._batch += 1
            monitor.end_step(optimizer_step=optimizer_step)
            control.should_training_stop = control.should_training_stop or monitor.should_stop

    @guarded_hook
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A window ends with the epoch."""
        if (monitor := self._measuring) is not None:
            monitor.end_window()

    @guarded_hook
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last window is reported, the last card written."""
        self._release()

    @guarded_hook
    def _pause(self, reason: str) -> None:
        if (monitor := self._measuring) is not None:
            monitor.pause(reason)

    @guarded_hook
    def _resume(self, reason: str) -> None:
        if (monitor := self._measuring) is not None:
            monitor.resume(reason)

    @guarded_hook
    def _undo(self) -> None:
        self._release()

    def _release(self) -> None:
        """May be called again; Ctrl-C within keeps nothing from being undone, as no event follows it."""
        try:
            self._let_go()
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        while self._restore:
            self._restore[-1]()
            self._restore.pop()
        if (monitor := self._measuring) is not None:
            monitor.abort_step()
            monitor.close()
            self._is_measuring = self._is_in_step = False


def _window_of(state: Any, args: Any) -> int:
    """Optimizer steps between two log lines; the arguments may give a share of the run, the state has the number."""
    steps = next((n for n in (getattr(state, "logging_steps", 0), args.logging_steps) if n and n >= 1), None)
    return DEFAULT_LOG_EVERY_N_STEPS if steps is None else int(steps)


def _promised_precision(args: Any) -> str | None:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else None


def _find_trainer(callback: MFUCallback) -> Any:
    """The trainer that is calling this callback: the documented arguments of a callback leave it out."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and callback in candidate.callback_handler.callbacks:
            return candidate
    raise MFUMonitorError(
        "MFUCallback was called by something that is not a transformers.Trainer, so it cannot see the batches. Use "
        "mfu_monitor.Monitor in your own loop: with monitor.step(batch): ..."
    )
