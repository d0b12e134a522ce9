"""From events to the loggers of a trainer: every logger gets the scalars, TensorBoard the text and the layout too."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

from mfu_monitor.errors import ConfigurationError, StageDisabledWarning, warn
from mfu_monitor.sinks import ConsoleSink, Event, JsonlSink, Sink, TensorBoardSink

__all__ = ["AtLoggingStep", "LoggerSink", "LoggingSteps", "sinks_for_loggers", "writable_jsonl"]

_REMEMBERED_STEPS = 10_000
"""More than a window, and more than one that is read late; a bound, so that a long run does not grow."""


class LoggingSteps:
    """From a training batch to the step on the loggers' axis, also for a batch that ended a while ago.

    Example:
        >>> steps = LoggingSteps()
        >>> steps.note(batch := 7, 3)  # the eighth batch belongs to the fourth optimizer step
        >>> steps(7)
        3
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def note(self, batch: int, step: int) -> None:
        """Remember where a batch belongs."""
        self._steps[batch] = step
        if len(self._steps) > _REMEMBERED_STEPS:
            del self._steps[next(iter(self._steps))]

    def __call__(self, batch: int) -> int:
        """The step of a batch; the batch itself where it was never noted."""
        return self._steps.get(batch, batch)


class AtLoggingStep:
    """Hands events on with the step of the trainer's own axis.

    Args:
        sink: where they go.
        at_step: from the training batch of an event to the step on that axis.
    """

    stays_on_thread = True  # the writer is the trainer's

    def __init__(self, sink: Sink, at_step: Callable[[int], int]) -> None:
        self._sink, self._at_step = sink, at_step
        self.shows_figures = bool(getattr(sink, "shows_figures", False))

    def emit(self, event: Event) -> None:
        """Hand one event on."""
        self._sink.emit(dataclasses.replace(event, step=self._at_step(event.step)))

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()


class LoggerSink:
    """Hands the metrics of an event to one logger of Lightning or Fabric.

    Args:
        logger: anything with ``log_metrics(metrics, step)``.
        at_step: from the training batch of an event to the step on the logger's axis.
        also: TensorBoard's sink for what is not a scalar; it says which scalars are shown.
    """

    stays_on_thread = True  # the logger is the trainer's, who logs at the same time

    def __init__(self, logger: Any, at_step: Callable[[int], int], also: TensorBoardSink | None = None) -> None:
        self._logger = logger
        self._at_step = at_step
        self._also = also
        self.shows_figures = bool(getattr(also, "shows_figures", False))

    def emit(self, event: Event) -> None:
        """Log the event at the logger's own step."""
        step = self._at_step(event.step)
        if event.metrics:
            shown = event.metrics if self._also is None else self._also.shown(event.metrics)
            self._logger.log_metrics(dict(shown), step)
        if self._also is not None:
            self._also.emit(dataclasses.replace(event, step=step))

    def close(self) -> None:
        """Write out what is buffered; the logger itself belongs to the trainer."""
        self._logger.save()
        if self._also is not None:
            self._also.close()


def sinks_for_loggers(
    loggers: Iterable[Any], *, at_step: Callable[[int], int], layout: bool, detail: str
) -> list[Sink]:
    """One sink for each logger, so that one that fails leaves the others alone; a console line without any logger."""
    sinks: list[Sink] = [LoggerSink(logger, at_step, _tensorboard(logger, layout, detail)) for logger in loggers]
    return sinks or [ConsoleSink()]


def writable_jsonl(path: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """The path, or None with a warning where it cannot be written by now: the run and the other sinks go on.

    The callback's constructor has refused what was wrong then; a disk can be unmounted or made read-only later.
    """
    if path is None:
        return None
    try:
        JsonlSink(os.fspath(path))
    except ConfigurationError as error:
        warn(f"{error} No file is written in this run; readings go to the loggers.", StageDisabledWarning)
        return None
    return path


def _tensorboard(logger: Any, layout: bool, detail: str) -> TensorBoardSink | None:
    # By name: `lightning`, `pytorch_lightning` and Fabric each have a class of their own, and none need be installed.
    if not any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__):
        return None
    return TensorBoardSink(logger.experiment, scalars=False, layout=layout, detail=detail)
