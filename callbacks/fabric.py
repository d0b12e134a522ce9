"""The callback of Lightning Fabric, where the loop is the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mfu_monitor.config import MonitorConfig
from mfu_monitor.errors import ConfigurationError, Guarded, guarded_hook
from mfu_monitor.monitor import Monitor
from mfu_monitor.sinks import Sink
from mfu_monitor.utilization import UtilizationReading

from ._loggers import sinks_for_loggers, writable_jsonl

__all__ = ["FabricMFUMonitor"]


class FabricMFUMonitor(Guarded):
    """Live MFU, HFU and tokens/s of a Fabric loop, in every logger of Fabric.

    Given to ``Fabric(callbacks=...)`` it takes the model, the device and the loggers from ``fabric.setup``. The loop
    then says where its steps are: either with :meth:`step`, or with the hooks of the same names as Lightning's, through
    ``fabric.call("on_train_batch_start", batch, batch_idx)`` and so on. A loop that calls no hook is not measured.

    Args:
        tensorboard_layout: write a CUSTOM SCALARS layout (MFU and HFU on one chart); False keeps one of your own.
        **config: the options of ``MonitorConfig``: ``log_every_n_steps``, ``peak``, ``tokens``, ``jsonl``, ...

    Raises:
        ConfigurationError: an option that is unknown or not allowed; the message says what is.

    Example:
        >>> monitor = FabricMFUMonitor(log_every_n_steps=10)
        >>> fabric = Fabric(callbacks=[monitor], loggers=[TensorBoardLogger("runs")])
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> for batch in fabric.setup_dataloaders(loader):
        ...     with monitor.step(batch):
        ...         fabric.backward(model(batch).sum())
        ...         optimizer.step()
        >>> monitor.close()
    """

    def __init__(self, *, tensorboard_layout: bool = True, **config: Any) -> None:
        self.config = MonitorConfig.from_mapping(config)
        self.tensorboard_layout = tensorboard_layout
        self.monitor: Monitor | None = None

    @property
    def reading(self) -> UtilizationReading | None:
        """The latest reading, or None before the first window ended."""
        return self.monitor.reading if self.monitor is not None else None

    @property
    def should_stop(self) -> bool:
        """True once the loop is to stop: after an impossible reading or an alert, where the options ask for that."""
        return self.monitor is not None and self.monitor.should_stop

    @guarded_hook
    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Called by ``fabric.setup``: the first model that is set up is the one that is measured."""
        if self.monitor is not None:
            return
        config = self.config.with_options(
            {
                "device": self.config.device or fabric.device,
                "jsonl": writable_jsonl(self.config.jsonl) if fabric.is_global_zero else None,
            }
        )
        model = getattr(module, "module", module)  # Fabric's wrapper would put its own name before every module's
        self.monitor = Monitor(model, config=config, sinks=self._sinks(fabric))

    def _sinks(self, fabric: Any) -> list[Sink]:
        if not fabric.is_global_zero:
            return []
        layout, detail = self.tensorboard_layout, self.config.detail
        return sinks_for_loggers(fabric.loggers, at_step=lambda step: step, layout=layout, detail=detail)

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """One training batch of the loop. An exception of the step passes, and the step is forgotten.

        Raises:
            ConfigurationError: there is no model yet, because ``fabric.setup`` was not called with this callback.
        """
        if self.monitor is None and not self._is_off:
            raise ConfigurationError(
                "FabricMFUMonitor.step() was called before a model was set up. Give the monitor to "
                "Fabric(callbacks=[monitor]) and call fabric.setup(model, optimizer) before the loop."
            )
        self.on_train_batch_start(batch)
        try:
            yield
        except BaseException as exception:
            self.on_exception(exception)
            raise
        self.on_train_batch_end()

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """What happens inside is in no window: ``with monitor.paused("checkpoint"): fabric.save(...)``."""
        self._call(lambda monitor: monitor.pause(reason))
        try:
            yield
        finally:
            self._call(lambda monitor: monitor.resume(reason))

    def on_train_batch_start(self, batch: Any, batch_idx: int | None = None) -> None:
        """A step begins."""
        self._call(lambda monitor: monitor.begin_step(batch))

    def on_train_batch_end(self, outputs: Any = None, batch: Any = None, batch_idx: int | None = None) -> None:
        """A step ends."""
        self._call(lambda monitor: monitor.end_step())

    def on_before_backward(self, loss: Any = None) -> None:
        """The backward begins."""
        self._call(lambda monitor: monitor.mark_phase("backward"))

    def on_after_backward(self) -> None:
        """The backward is over."""
        self._call(lambda monitor: monitor.mark_phase("other"))

    def on_before_optimizer_step(self, optimizer: Any = None) -> None:
        """The optimizer's own work begins."""
        self._call(lambda monitor: monitor.mark_phase("optimizer"))

    def on_before_zero_grad(self, optimizer: Any = None) -> None:
        """The optimizer's work is over."""
        self._call(lambda monitor: monitor.mark_phase("other"))

    def on_validation_start(self) -> None:
        """Validation is in no window."""
        self._call(lambda monitor: monitor.pause("validation"))

    def on_validation_end(self) -> None:
        """Training goes on."""
        self._call(lambda monitor: monitor.resume("validation"))

    def on_train_epoch_end(self) -> None:
        """A window ends with the epoch."""
        self._call(lambda monitor: monitor.end_window())

    def on_train_end(self) -> None:
        """The last window is reported, the last card written."""
        self.close()

    def on_exception(self, exception: BaseException | None = None) -> None:
        """Forget the step that was running; no hook, mode or meter is left."""
        kind = BaseException if exception is None else type(exception)
        self._call(lambda monitor: monitor.abort_step(kind, exception))

    def close(self) -> None:
        """Report the last window and close the files. May be called twice."""
        self._call(lambda monitor: monitor.close())

    @guarded_hook
    def _call(self, action: Callable[[Monitor], None]) -> None:
        if self.monitor is not None:
            action(self.monitor)

    def _release(self) -> None:
        if self.monitor is not None:
            self.monitor.abort_step()

    def state_dict(self) -> dict[str, Any]:
        """Totals as plain types, to put into the dictionary that ``fabric.save`` saves."""
        return self.monitor.state_dict() if self.monitor is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the totals of a checkpoint; call it after ``fabric.setup``."""
        if state_dict:
            self._call(lambda monitor: monitor.load_state_dict(state_dict))
