"""Failure inside a training run: the first one turns a stage off, with one warning; training never notices."""

from __future__ import annotations

import functools
import logging
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from mfu_monitor.errors import ImpossibleReadingError, MFUMonitorWarning, StageDisabledWarning

__all__ = ["Stages", "guarded", "warn"]

_log = logging.getLogger("mfu_monitor")

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def warn(message: str, category: type[MFUMonitorWarning]) -> None:
    """Give a warning that cannot become an exception in the training loop, whatever the filters say."""
    try:
        warnings.warn(message, category, stacklevel=2)
    except MFUMonitorWarning:
        _log.warning("%s: %s", category.__name__, message)


class Stages:
    """Which stages still run.

    Example:
        >>> stages = Stages()
        >>> stages.fail("counting", error)
        >>> "counting" in stages.off
        True
    """

    def __init__(self) -> None:
        self.off: set[str] = set()

    def fail(self, stage: str, error: BaseException) -> None:
        """Turn a stage off, with a warning the first time."""
        if stage in self.off:
            return
        self.off.add(stage)
        trace = "".join(traceback.format_exception(error))
        warn(
            f"mfu_monitor turned its stage {stage!r} off after {type(error).__name__}: {error}. Training goes on; what "
            f"this stage gives is missing from here on. {_next_action(stage)}\n{trace}",
            StageDisabledWarning,
        )


def _next_action(stage: str) -> str:
    actions = {
        "tokens": "Check the function given as tokens=, or give one for this kind of batch.",
        "ranks": "Every rank needs a monitor that sees the same number of steps, and torch needs gloo.",
        "peak": "Give the peak by hand: peak=<FLOP/s>.",
    }
    return actions.get(stage, "Please report this with the traceback below.")


def guarded(
    stage: str,
) -> Callable[
    [Callable[Concatenate[Any, _Arguments], _Answer]], Callable[Concatenate[Any, _Arguments], _Answer | None]
]:
    """Make a method of an object with ``_stages`` answer None once its stage has failed, and never raise.

    Exceptions raised on purpose (``ImpossibleReadingError``) and those that end a program pass through.
    """

    def decorate(
        method: Callable[Concatenate[Any, _Arguments], _Answer],
    ) -> Callable[Concatenate[Any, _Arguments], _Answer | None]:
        @functools.wraps(method)
        def run(self: Any, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer | None:
            if stage in self._stages.off:
                return None
            try:
                return method(self, *args, **kwargs)
            except ImpossibleReadingError:
                raise
            except Exception as error:  # noqa: BLE001  # nothing of ours may reach the training loop
                self._stages.fail(stage, error)
                return None

        return cast(Any, run)  # type: ignore[no-any-return]

    return decorate
