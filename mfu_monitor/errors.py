"""Exceptions and warnings, and what a failure does inside a training run: it turns a stage off, once.

Every message says what was seen, what was expected, the likely cause and the next action. Nothing of ours is raised
into a training loop: the first failure of a stage turns that stage off, with one warning, and training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
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
    "ignored",
    "must_pass",
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


def must_pass(error: BaseException) -> bool:
    """True for what no guard of ours may keep from the user: a stop that was asked for, and an interruption.

    Ctrl-C and a time limit (``signal.alarm`` with a handler that raises any exception) strike wherever Python is at
    that moment, in our code as well: they are no failures of ours. The interpreter gives the handler the frame that it
    interrupted; no other function is called like that.
    """
    if isinstance(error, ImpossibleReadingError) or not isinstance(error, Exception):
        return True
    trace = error.__traceback__
    while trace is not None:
        if _is_signal_handler(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


class ignored(contextlib.AbstractContextManager[None]):  # noqa: N801  # reads as contextlib.suppress does
    """``contextlib.suppress``, but for what must reach the user: a time limit is often a ``TimeoutError``."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, self._kinds) and not must_pass(error)


def _is_signal_handler(frame: FrameType) -> bool:
    """By how it was called, ``handler(number, interrupted frame)``, or by its name in ``signal``'s table."""
    code, interrupted = frame.f_code, frame.f_back
    if interrupted is None:
        return False
    given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += rest if isinstance(rest, tuple) else ()
    if len(given) >= 2 and isinstance(given[-2], int) and given[-1] is interrupted:
        return True
    return any(getattr(handler, "__code__", None) is code for handler in map(signal.getsignal, signal.valid_signals()))


def text_of(error: BaseException) -> str:
    """What an exception says, also of one whose own text fails."""
    try:
        return str(error)
    except Exception as failure:  # the text of a failure must not be a second one
        if must_pass(failure):
            raise
        return f"(the text of this {type(error).__name__} cannot be read)"


def trace_of(error: BaseException) -> str:
    """The traceback as text; empty where it cannot be made."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception as failure:  # an exception of another program may refuse to be printed
        if must_pass(failure):
            raise
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
    except Exception as failure:  # warnings as errors, or a hook that fails
        if must_pass(failure):
            raise
        with ignored(Exception):
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
        self._told: dict[tuple[type, str], tuple[str, int] | None] = {}

    def fail(self, stage: str, error: BaseException) -> None:
        """Turn a stage off, with a warning for each fault: one that turns several stages off is told once."""
        if stage in self.off:
            return
        self.off.add(stage)
        fault, place = (type(error), text_of(error)), _place_of(error)
        if fault in self._told and (place is None or self._told[fault] in (None, place)):
            _log.info("mfu_monitor turned its stage %r off for the same reason as the one before", stage)
            return
        self._told[fault] = place
        warn(
            f"mfu_monitor turned its stage {stage!r} off after {type(error).__name__}: {text_of(error)}. Training goes "
            f"on; what this stage gives is missing from here on. {_next_action(stage)}\n{trace_of(error)}",
            StageDisabledWarning,
        )

    def run(self, stage: str, call: Callable[_Arguments, _Answer], /, *args: _Arguments.args,
            **kwargs: _Arguments.kwargs) -> _Answer | None:  # fmt: skip
        """Call a function of a stage; None once the stage has failed. Never raises, but on purpose."""
        if stage in self.off:
            return None
        try:  # as ``always``, without one more call: this is on every step's path
            return call(*args, **kwargs)
        except Exception as error:  # nothing of ours may reach the training loop
            if must_pass(error):
                raise
            self.fail(stage, error)
            return None

    def always(self, stage: str, call: Callable[_Arguments, _Answer], /, *args: _Arguments.args,
               **kwargs: _Arguments.kwargs) -> _Answer | None:  # fmt: skip
        """The same for clean-up, which a stage that is off must not keep from running."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # nothing of ours may reach the training loop
            if must_pass(error):
                raise
            self.fail(stage, error)
            return None


def _place_of(error: BaseException) -> tuple[str, int] | None:
    """Where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


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

    What must reach the user (``must_pass``) and what ends a program pass through.

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
            except Exception as error:  # nothing of ours may reach the training loop
                if must_pass(error):
                    raise
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
        left = ""
        try:
            self._release()
        except Exception as error:  # already off; training must not see it
            if must_pass(error):
                raise
            left = f"\nIt could not clean up: {type(error).__name__}: {text_of(error)}"
        warn(
            f"{type(self).__name__} failed in {hook} and is turned off for the rest of the run; training goes on "
            "without MFU. Please report the traceback below; to be rid of this warning, leave the callback out.\n"
            f"{trace_of(failure)}{left}",
            StageDisabledWarning,
        )


def guarded_hook(method: _Method) -> _Method:
    """Make a hook safe: it does nothing once its adapter is off, and an exception turns the adapter off.

    What must reach the user (``must_pass``) passes; so do Ctrl-C and exit.
    """

    @functools.wraps(method)
    def safe(self: Guarded, *args: Any, **kwargs: Any) -> None:
        if self._is_off:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # whatever it was, the training run must not die of it
            if must_pass(error):
                raise
            self._turn_off(method.__name__, error)

    return cast(_Method, safe)
