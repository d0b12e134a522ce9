"""Exceptions and warnings, and what a failure does inside a training run: it turns a stage off, once.

Every message says what was seen, what was expected, the likely cause and the next action. Nothing of ours is raised
into a training loop: the first failure of a stage turns that stage off, with one warning, and training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

__all__ = [
    "ConfigurationError",
    "Guarded",
    "ImpossibleReadingError",
    "ImpossibleReadingWarning",
    "MFUMonitorError",
    "MFUMonitorWarning",
    "PeakUnknownWarning",
    "StageDisabledWarning",
    "Stages",
    "UncountedWorkWarning",
    "guarded",
    "guarded_hook",
    "text_of",
    "trace_of",
    "users_stacklevel",
    "warn",
]

_log = logging.getLogger("mfu_monitor")

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")
_Method = TypeVar("_Method", bound=Callable[..., None])


class MFUMonitorError(Exception):
    """Base of every exception that this library raises on purpose."""


class ConfigurationError(MFUMonitorError, ValueError):
    """An argument of a constructor or a command is wrong; says what was given, what is allowed, and an example."""


class ImpossibleReadingError(MFUMonitorError, RuntimeError):
    """A reading that physics forbids, raised only when the user asked for ``on_impossible="raise"``."""


class MFUMonitorWarning(UserWarning):
    """Base of every warning that this library gives."""


class PeakUnknownWarning(MFUMonitorWarning):
    """No dense peak is known for the device at the precision in use, so no MFU is reported."""


class UncountedWorkWarning(MFUMonitorWarning):
    """Something ran whose FLOPs could not be seen; the values are lower bounds."""


class ImpossibleReadingWarning(MFUMonitorWarning):
    """A reading cannot be right, or is hard to believe; says what was seen, what fits the evidence, and the fix."""


class StageDisabledWarning(MFUMonitorWarning):
    """A stage of ours failed inside a training run and was turned off; training goes on."""


def text_of(error: BaseException) -> str:
    """What an exception says, also of one whose own text fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # the text of a failure must not be a second one
        return f"(the text of this {type(error).__name__} cannot be read)"


def trace_of(error: BaseException) -> str:
    """The traceback as text; empty where it cannot be made."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  # an exception of another program may refuse to be printed
        return ""


def users_stacklevel() -> int:
    """``stacklevel`` of a warning that the caller gives, so that it points at the user's line and not at ours.

    Example:
        >>> warnings.warn("...", MFUMonitorWarning, stacklevel=users_stacklevel())
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "mfu_monitor":
        frame, level = frame.f_back, level + 1
    return level


def warn(message: str, category: type[MFUMonitorWarning]) -> None:
    """Give a warning that cannot become an exception in the training loop, whatever filters and hooks are set."""
    try:
        warnings.warn(message, category, stacklevel=users_stacklevel())
    except Exception:  # noqa: BLE001  # warnings as errors, or a hook that fails
        with contextlib.suppress(Exception):
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
        warn(
            f"mfu_monitor turned its stage {stage!r} off after {type(error).__name__}: {text_of(error)}. Training goes "
            f"on; what this stage gives is missing from here on. {_next_action(stage)}\n{trace_of(error)}",
            StageDisabledWarning,
        )

    def run(self, stage: str, call: Callable[_Arguments, _Answer], /, *args: _Arguments.args,
            **kwargs: _Arguments.kwargs) -> _Answer | None:  # fmt: skip
        """Call a function of a stage; None once the stage has failed. Never raises, but on purpose."""
        return None if stage in self.off else self.always(stage, call, *args, **kwargs)

    def always(self, stage: str, call: Callable[_Arguments, _Answer], /, *args: _Arguments.args,
               **kwargs: _Arguments.kwargs) -> _Answer | None:  # fmt: skip
        """The same for clean-up, which a stage that is off must not keep from running."""
        try:
            return call(*args, **kwargs)
        except ImpossibleReadingError:
            raise
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach the training loop
            self.fail(stage, error)
            return None


def _next_action(stage: str) -> str:
    actions = {
        "tokens": "Check the function given as tokens=, or give one for this kind of batch.",
        "ranks": "Every rank needs a monitor that sees the same number of steps, and torch needs gloo.",
        "peak": "Give the peak by hand: peak=<FLOP/s>.",
    }
    return actions.get(stage, "Please report this with the traceback below.")


def guarded(
    stage: str, *, always: bool = False
) -> Callable[
    [Callable[Concatenate[Any, _Arguments], _Answer]], Callable[Concatenate[Any, _Arguments], _Answer | None]
]:
    """Make a method of an object with ``_stages`` answer None once its stage has failed, and never raise.

    Exceptions raised on purpose (``ImpossibleReadingError``) and those that end a program pass through.

    Args:
        stage: what is turned off by a failure.
        always: run it also when the stage is off: for clean-up, and for what others depend on.
    """

    def decorate(
        method: Callable[Concatenate[Any, _Arguments], _Answer],
    ) -> Callable[Concatenate[Any, _Arguments], _Answer | None]:
        @functools.wraps(method)
        def run(self: Any, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer | None:
            if not always and stage in self._stages.off:
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


class Guarded:
    """An adapter that can be turned off. Sub-classes say in ``_release`` what must be undone."""

    _is_off = False

    def _release(self) -> None:
        """Leave no hook, mode or patch behind; called after a failure, so it must bear any state."""

    def _turn_off(self, hook: str, failure: BaseException) -> None:
        self._is_off = True
        warn(
            f"{type(self).__name__} failed in {hook} and is turned off for the rest of the run; training goes on "
            "without MFU. Please report the traceback below; to be rid of this warning, leave the callback out.\n"
            f"{trace_of(failure)}",
            StageDisabledWarning,
        )
        try:
            self._release()
        except Exception as error:  # noqa: BLE001  # already off and said so; training must not see it
            warn(
                f"{type(self).__name__} could not clean up: {type(error).__name__}: {text_of(error)}",
                StageDisabledWarning,
            )


def guarded_hook(method: _Method) -> _Method:
    """Make a hook safe: it does nothing once its adapter is off, and an exception turns the adapter off.

    ``ImpossibleReadingError`` passes: the user asked for it with ``on_impossible="raise"``. So do Ctrl-C and exit.
    """

    @functools.wraps(method)
    def safe(self: Guarded, *args: Any, **kwargs: Any) -> None:
        if self._is_off:
            return
        try:
            method(self, *args, **kwargs)
        except ImpossibleReadingError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it was, the training run must not die of it
            self._turn_off(method.__name__, error)

    return cast(_Method, safe)
