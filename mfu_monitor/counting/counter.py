"""The public counter: a context manager around any part of a training step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from torch import nn

from mfu_monitor.counting.compiled.watch import eager_where_guards_notice_us
from mfu_monitor.counting.dispatch import CountingMode
from mfu_monitor.counting.observer import StepObserver
from mfu_monitor.counting.self_check import failed_capabilities
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError

__all__ = ["FlopCounter"]


class FlopCounter:
    """Counts the FLOPs of everything that runs inside the ``with`` block, exact to the FLOP; one multiply-add is 2.

    Nothing is installed in the model, no random number is drawn and compiled code stays as it is. The work inside runs
    slower (every operator passes through Python), so time it elsewhere.

    Args:
        model: gives modules their names and says which parameters were covered. Optional: without it modules go by
            their class names.
        count_no_grad_as_model: count forwards without gradient in a training step (a teacher, a frozen tower under
            ``no_grad``) as model work; by default they are ``other_flops``.

    Raises:
        ConfigurationError: the model is not a module; or the same counter is entered again inside its own block.

    Example:
        >>> with mm.FlopCounter(model) as counter:
        ...     loss = model(x).sum(); loss.backward(); optimizer.step()
        >>> counter.record.model_flops
    """

    def __init__(self, model: nn.Module | None = None, *, count_no_grad_as_model: bool = False) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"model={model!r} ({type(model).__name__}) is not allowed: expected a torch.nn.Module or "
                "None; example: with mm.FlopCounter(model) as counter: ..."
            )
        self._model = model
        self._count_no_grad_as_model = count_no_grad_as_model
        self._observer: StepObserver | None = None
        self._installed = ExitStack()
        self._record: StepRecord | None = None

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
        self._record = None
        observer = StepObserver(self._model, count_no_grad_as_model=self._count_no_grad_as_model)
        with ExitStack() as installed:
            installed.enter_context(eager_where_guards_notice_us())
            installed.enter_context(observer.compiled_graphs)
            installed.enter_context(observer.opaque)
            installed.enter_context(observer.opaque_backward)
            installed.enter_context(CountingMode(observer))
            self._installed, self._observer = installed.pop_all(), observer
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        observer, self._observer = self._observer, None
        if observer is None:
            return
        self._installed.close()
        self._record = _as_far_as_proved(observer.record())


def _as_far_as_proved(record: StepRecord) -> StepRecord:
    """The record; not exact where the counter gets steps of known FLOPs wrong on this torch."""
    failed = failed_capabilities()
    if not failed:
        return record
    notes = tuple(f"the counter's self-check fails on this torch: {text}" for text in failed)
    return replace(record, incomplete=True, notes=(*record.notes, *notes))
