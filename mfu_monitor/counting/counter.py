"""The public counter: a context manager around any part of a training step."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from mfu_monitor.counting.dispatch import CountingMode
from mfu_monitor.counting.observer import StepObserver
from mfu_monitor.counting.records import StepRecord

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

    Example:
        >>> with mm.FlopCounter(model) as counter:
        ...     loss = model(x).sum(); loss.backward(); optimizer.step()
        >>> counter.record.model_flops
    """

    def __init__(self, model: nn.Module | None = None, *, count_no_grad_as_model: bool = False) -> None:
        self._model = model
        self._count_no_grad_as_model = count_no_grad_as_model
        self._observer: StepObserver | None = None
        self._mode: CountingMode | None = None
        self._record: StepRecord | None = None

    @property
    def record(self) -> StepRecord:
        """What ran inside the block; inside it, what ran so far. An empty record before the block."""
        if self._record is not None:
            return self._record
        return self._observer.record() if self._observer is not None else StepRecord()

    def __enter__(self) -> FlopCounter:
        self._record = None
        self._observer = StepObserver(self._model, count_no_grad_as_model=self._count_no_grad_as_model)
        self._mode = CountingMode(self._observer)
        self._observer.opaque.attach()
        self._observer.compiled_graphs.attach()
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode, observer = self._mode, self._observer
        if mode is None or observer is None:
            return
        self._mode = self._observer = None
        mode.__exit__(exc_type, exc, trace)  # type: ignore[no-untyped-call]
        observer.compiled_graphs.detach()
        observer.opaque.detach()
        self._record = observer.record()
