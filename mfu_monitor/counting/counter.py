"""The public counter: a context manager around any part of a training step."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from mfu_monitor.counting.compiled.watch import EagerStance
from mfu_monitor.counting.dispatch import CountingMode, drop_strays
from mfu_monitor.counting.fingerprints import StepPrints
from mfu_monitor.counting.observer import StepObserver
from mfu_monitor.counting.self_check import failed_capabilities
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError, must_pass, trace_of
from mfu_monitor.internals.constructors import ConstructorsBelow

__all__ = ["FlopCounter"]

_CONSTRUCTORS = ConstructorsBelow(CountingMode)
_STANCE = EagerStance()

MODE_TAKEN_OFF = (
    "the counter's dispatch mode was not where it was put: a mode that was entered before the step was left within it, "
    "or the step ended on another thread than it began on; what ran since is not counted"
)


class FlopCounter:
    """Counts the FLOPs of everything that runs inside the ``with`` block, exact to the FLOP; one multiply-add is 2.

    Nothing is installed in the model, no random number is drawn and compiled code stays as it is. The work inside runs
    slower (every operator passes through Python), so time it elsewhere.

    Args:
        model: gives modules their names and says which parameters were covered. Optional: without it modules go by
            their class names.
        count_no_grad_as_model: count forwards without gradient in a training step (a teacher, a frozen tower under
            ``no_grad``) as model work; by default they are ``other_flops``.
        fingerprints: also sample what products ran on, for monitors of several ranks to compare.

    Note:
        With several ranks this is what this rank ran; whether others did some of it as well is not known
        (``record.repeats_known`` is False). The ranks' monitors find out.

    Raises:
        ConfigurationError: the model is not a module; or the same counter is entered again inside its own block.

    Example:
        >>> with mm.FlopCounter(model) as counter:
        ...     loss = model(x).sum(); loss.backward(); optimizer.step()
        >>> counter.record.model_flops
    """

    def __init__(
        self, model: nn.Module | None = None, *, count_no_grad_as_model: bool = False, fingerprints: bool = False
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"model={model!r} ({type(model).__name__}) is not allowed: expected a torch.nn.Module or "
                "None; example: with mm.FlopCounter(model) as counter: ..."
            )
        self._model = model
        self._count_no_grad_as_model = count_no_grad_as_model
        self._fingerprints = fingerprints
        self._observer: StepObserver | None = None
        self._installed = _Installed()
        self._dropped: weakref.finalize[..., Any] | None = None
        self._record: StepRecord | None = None
        self.prints: StepPrints | None = None
        """Fingerprints of the model work in the block, where they were asked for; read once they have arrived."""
        self.fault: Exception | None = None
        """What failed of ours within the block; the record is then empty and incomplete: nothing is known."""

    @property
    def record(self) -> StepRecord:
        """What ran inside the block; inside it, what ran so far. An empty record before the block."""
        if self._record is not None:
            return self._record
        return self._observer.record() if self._observer is not None else StepRecord()

    def __enter__(self) -> FlopCounter:
        if self._observer is not None:
            raise ConfigurationError(
                "this FlopCounter is counting already, and was entered again inside its own block. Make another for "
                "the inner block: with mm.FlopCounter(model) as inner: ... (what runs there counts in both)"
            )
        self._record = self.fault = None
        try:
            self._begin()
        except BaseException as error:  # noqa: BLE001  # training goes on, uncounted, unless it is the user's
            self._leave()
            self._observer = None
            self._failed(error)
        return self

    def _begin(self) -> None:
        observer = StepObserver(
            self._model, count_no_grad_as_model=self._count_no_grad_as_model, fingerprints=self._fingerprints
        )
        self._installed = _Installed(observer)
        # A step that is never ended, a generator that is dropped: what was installed goes with the counter.
        self._dropped = weakref.finalize(self, self._installed.leave)
        self._observer = observer
        self._installed.enter()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave()
            observer, self._observer = self._observer, None
            if observer is not None:
                self.fault = observer.fault
                self._record = _as_far_as_proved(_alone(observer.record()))
                self.prints = observer.prints()
        except BaseException as error:  # noqa: BLE001  # an exception of the block's own must not be lost over it
            self._observer = None
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """A failure of ours: nothing is known of the block. What is the user's is raised on."""
        if must_pass(error):
            raise error
        assert isinstance(error, Exception)
        trace = trace_of(error)
        error.add_note(trace)
        self.fault = error.with_traceback(None)  # its frames hold activations
        note = f"counting failed, so nothing is known of this block:\n{trace}"
        self._record, self.prints = StepRecord(notes=(note,), incomplete=True), None

    def _leave(self) -> None:
        try:
            self._installed.leave()
        except BaseException:  # Ctrl-C may strike within: what it kept from running runs now
            self._installed.leave()
            raise
        if self._dropped is not None:
            self._dropped.detach()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made inside the block perhaps, counts nothing yet."""
        return {**self.__dict__, "_observer": None, "_installed": _Installed(), "_dropped": None, "prints": None}


class _Installed:
    """What a counted step puts into torch, and takes out again whatever happened in between."""

    def __init__(self, observer: StepObserver | None = None) -> None:
        self._observer = observer
        self._mode = None if observer is None else CountingMode(observer)

    def enter(self) -> None:
        observer, mode = self._observer, self._mode
        if observer is None or mode is None:
            return
        _active.add(self)
        drop_strays()
        _STANCE.attach(self)
        observer.compiled_graphs.attach()
        observer.opaque.attach()
        _CONSTRUCTORS.attach(self)
        mode.__enter__()

    def leave(self) -> None:
        """Each part is left by identity and may be left again, so that this may be called at any moment."""
        if (observer := self._observer) is None:
            return
        with ExitStack() as stack:  # one that fails does not keep the others from being left
            stack.callback(_STANCE.detach, self)
            stack.callback(observer.compiled_graphs.detach)
            stack.callback(observer.opaque.detach)
            stack.callback(observer.opaque_backward.detach)
            stack.callback(_CONSTRUCTORS.detach, self)
            stack.callback(observer.release)
            stack.callback(self._leave_mode, observer)
        _active.discard(self)

    def _leave_mode(self, observer: StepObserver) -> None:
        if self._mode is not None and not self._mode.leave():
            observer.missed_operators(MODE_TAKEN_OFF)


_active: weakref.WeakSet[_Installed] = weakref.WeakSet()
"""What is installed now."""


def _leave_in_child() -> None:
    """A process that is forked inside a counted step (workers of a DataLoader) is not that step."""
    for installed in list(_active):
        installed.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


def _alone(record: StepRecord) -> StepRecord:
    """The record; of one rank among several nobody knows yet what the others repeat."""
    is_world = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return replace(record, repeats_known=False) if is_world else record


def _as_far_as_proved(record: StepRecord) -> StepRecord:
    """The record; not exact where the counter gets steps of known FLOPs wrong on this torch."""
    failed = failed_capabilities()
    if not failed:
        return record
    notes = tuple(f"the counter's self-check fails on this torch: {text}" for text in failed)
    return replace(record, incomplete=True, notes=(*record.notes, *notes))
