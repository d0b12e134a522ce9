"""Nothing of ours is raised into a training loop: the first failure turns the adapter off, with one warning."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from mfu_monitor.errors import ImpossibleReadingError, StageDisabledWarning
from mfu_monitor.guard import warn

__all__ = ["Guarded", "guarded"]


class Guarded:
    """An adapter that can be turned off. Sub-classes say in ``_release`` what must be undone."""

    _is_off = False

    def _release(self) -> None:
        """Leave no hook, mode or patch behind; called after a failure, so it must bear any state."""

    def _turn_off(self, stage: str) -> None:
        self._is_off = True
        warn(
            f"{type(self).__name__} failed in {stage} and is turned off for the rest of the run; training goes on "
            "without MFU. Please report the traceback below; to be rid of this warning, leave the callback out.\n"
            f"{traceback.format_exc()}",
            StageDisabledWarning,
        )
        try:
            self._release()
        except Exception as error:  # noqa: BLE001  # already off and said so; training must not see it
            warn(f"{type(self).__name__} could not clean up: {error!r}", StageDisabledWarning)


Method = TypeVar("Method", bound=Callable[..., None])


def guarded(method: Method) -> Method:
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
        except Exception:  # noqa: BLE001  # whatever it was, the training run must not die of it
            self._turn_off(method.__name__)

    return cast(Method, safe)
