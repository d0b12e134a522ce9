"""The callback of a Lightning Trainer: hooks in, calls of ``Monitor`` out; no arithmetic here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from mfu_monitor.alerts import AlertConfig
from mfu_monitor.config import DEFAULT_LOG_EVERY_N_STEPS, MonitorConfig
from mfu_monitor.errors import Guarded, guarded_hook, must_pass
from mfu_monitor.internals.trainers import has_fetch_hooks, logging_step, steps_optimizer
from mfu_monitor.monitor import Monitor
from mfu_monitor.utilization import UtilizationReading

from ._loggers import LoggingSteps, sinks_for_loggers, writable_jsonl
from ._monitored import PROGRESS_METRICS, MonitoredMetrics
from ._patch import wrap_method

if TYPE_CHECKING:
    from mfu_monitor.sinks import Sink

__all__ = ["MFUMonitor"]


def _callback_bases() -> tuple[type, ...]:
    """``Callback`` of each Lightning that is installed: ``lightning`` and ``pytorch_lightning`` have one of their own.

    Trainers check by ``isinstance`` (a single callback outside a list, LightningCLI's ``class_path``), so ours must be
    one of theirs whichever of the two the script imports.
    """
    bases: list[type] = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            bases.append(importlib.import_module(package).Callback)
        except ImportError:
            continue
    if not bases:
        raise ImportError(
            "MFUMonitor needs Lightning, and neither 'lightning' nor 'pytorch_lightning' can be imported. "
            "Run: pip install 'mfu-monitor[lightning]'. For a loop of your own, use mfu_monitor.Monitor."
        )
    return tuple(dict.fromkeys(bases))


_WAITING: weakref.WeakSet[MFUMonitor] = weakref.WeakSet()
"""Monitors whose run has not ended: those may meet in one trainer."""

_Callback: Any = type("_Callback", _callback_bases(), {})


_CONFIG_FIELDS = frozenset(field.name for field in dataclasses.fields(MonitorConfig))


class MFUMonitor(Guarded, _Callback):  # type: ignore[misc]  # the base depends on what is installed
    """Live MFU, HFU and tokens/s of a Lightning run, in every logger of the trainer and in the progress bar.

    Nothing has to be given. ``mfu``, ``hfu`` and ``tokens_per_s`` are in ``trainer.callback_metrics``, so that
    ``EarlyStopping`` and ``ModelCheckpoint`` can monitor them. Training results do not change by a bit.

    Args:
        log_every_n_steps: training batches of a window; None takes the trainer's.
        peak: dense peak of one device: ``"auto"`` (table), ``"measure"`` (a short benchmark, kept on disk),
            ``"derive"``, FLOP/s as a number, or a dict by precision.
        tokens: tokens of a batch: a function or its import path ``"pkg.mod:function"``; None reads the shapes.
        count_padding: also count tokens that are not padding and tokens in the loss; costs tensor work on each step.
        convention: ``"exact"`` counts attended query-key pairs, ``"palm"`` the full square of attention.
        count: ``"auto"`` counts some steps and replays the count on like ones; ``"every_step"`` counts all.
        max_overhead: share of the run's time that counting may cost after the first count.
        count_no_grad_as_model: count forwards without gradient (a teacher) as model FLOPs.
        names: metric names, ``"mfu_monitor"`` or those of Lightning's ThroughputMonitor: ``"throughput_monitor"``.
        detail: ``"brief"`` shows at most 15 scalars in TensorBoard, ``"full"`` all.
        tensorboard: folder of a TensorBoard of our own, beside the trainer's loggers; None for none.
        console: print one line per window; None leaves it to the trainer's loggers.
        run_name: the run's name on its alerts; None takes the first logger's name and version.
        jsonl: file that readings and counted steps are appended to, as JSON lines.
        device: the device whose peak counts; None takes the trainer's.
        on_impossible: what to do with a reading that physics forbids: ``"warn"``, ``"raise"`` or ``"stop"``.
        flops_per_batch: your own FLOPs of a batch on one rank, held against our count; None takes
            ``pl_module.flops_per_batch`` if there is one.
        use_flops_per_batch: report MFU by your own FLOPs instead of our count.
        promised_precision: what the configuration promises; None takes the trainer's precision.
        alerts: alerts when MFU drops: True, False, or a dict of the thresholds of ``AlertConfig``.
        webhook: address that alerts are posted to; None takes the environment's ``MFU_MONITOR_WEBHOOK_URL``.
        on_alert: called with each alert: a function or its import path.
        stop_on_alert: stop training at the first alert.
        micro_batches_per_step: batches of one optimizer step, where times and FLOPs a step are to be of all of them.
        total_steps: training batches of the whole run, for the time that is left; None takes the trainer's.
        price_per_device_hour: in any currency, for the cost that is left.
        tensorboard_layout: write a CUSTOM SCALARS layout (MFU and HFU on one chart); False keeps one of your own.

    Raises:
        ConfigurationError: an argument that is not allowed; the message says what is.

    Example:
        >>> trainer = L.Trainer(callbacks=[MFUMonitor()])
        >>> trainer = L.Trainer(callbacks=[MFUMonitor(peak="measure", jsonl="runs/mfu.jsonl")])
    """

    def __init__(
        self,
        *,
        log_every_n_steps: int | None = None,
        peak: str | float | dict[str, float] = "auto",
        tokens: str | Callable[[Any], Any] | None = None,
        count_padding: bool = False,
        convention: str = "exact",
        count: str = "auto",
        max_overhead: float = 0.002,
        count_no_grad_as_model: bool = False,
        names: str = "mfu_monitor",
        detail: str = "brief",
        tensorboard: str | None = None,
        console: bool | None = None,
        run_name: str | None = None,
        jsonl: str | None = None,
        device: str | None = None,
        on_impossible: str = "warn",
        flops_per_batch: float | None = None,
        use_flops_per_batch: bool = False,
        promised_precision: str | None = None,
        alerts: bool | dict[str, Any] | AlertConfig = True,
        webhook: str | None = None,
        on_alert: str | Callable[[Any], Any] | None = None,
        stop_on_alert: bool = False,
        micro_batches_per_step: int = 1,
        total_steps: int | None = None,
        price_per_device_hour: float | None = None,
        tensorboard_layout: bool = True,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _CONFIG_FIELDS}
        super().__init__()
        self.config = MonitorConfig(**given)
        self.tensorboard_layout = tensorboard_layout
        self.monitor: Monitor | None = None
        self._state: dict[str, Any] = {}
        self._is_state_of_past_run = False
        self._is_measuring = False
        self._logging_steps = LoggingSteps()
        self._optimizer_steps = 0
        self._published: UtilizationReading | None = None
        self._monitored: MonitoredMetrics | None = None
        self._pauses: list[str] = []
        self._unwrap: list[Callable[[], None]] = []
        self._sees_fetches = False
        taken = {other._number for other in _WAITING}
        self._number: int = next(number for number in itertools.count(1) if number not in taken)
        _WAITING.add(self)

    @property
    def state_key(self) -> str:
        """Under which a checkpoint keeps the state: another one for each monitor of a trainer, as Lightning asks."""
        name = type(self).__qualname__
        return name if self._number == 1 else f"{name}#{self._number}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also one that is sent to a spawned process, has the options and totals; it measures nothing yet."""
        self._keep_state()
        idle = {"monitor": None, "_is_measuring": False, "_published": None, "_logging_steps": LoggingSteps()}
        return {**self.__dict__, **idle, "_monitored": None, "_pauses": [], "_unwrap": []}

    @property
    def reading(self) -> UtilizationReading | None:
        """The latest reading, or None before the first window ended."""
        return self.monitor.reading if self.monitor is not None else None

    # Training

    @guarded_hook
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to measure, after the sanity check."""
        self._published = None
        self._monitored = MonitoredMetrics(trainer)
        self._monitored.offer(trainer, None)
        self._logging_steps = LoggingSteps()
        self.monitor = Monitor(pl_module, config=self._config_for(trainer), sinks=self._sinks(trainer))
        self._is_measuring = True
        if self._is_state_of_past_run and trainer.fit_loop.total_batch_idx < 0:
            self._state = {}  # the same callback in a new trainer: another run, with another model perhaps
        if self._state:
            self.monitor.load_state_dict(self._state)
        self._wrap(trainer)

    @guarded_hook
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        if (monitor := self._measuring) is None:
            return
        self._resume_all()
        step = trainer.fit_loop.total_batch_idx
        self._logging_steps.note(step, logging_step(trainer))
        self._optimizer_steps = trainer.global_step
        monitor.begin_step(batch, step=step, signature_extra=(steps_optimizer(trainer),))
        monitor.mark_phase("forward")

    @guarded_hook
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step ends."""
        if (monitor := self._measuring) is None:
            return
        monitor.end_step(optimizer_step=trainer.global_step > self._optimizer_steps)
        if self._sees_fetches:
            monitor.mark_phase("between")
        self._publish(trainer, pl_module, on_step=True)

    @guarded_hook
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """A window ends with the epoch; a step that was begun and skipped is forgotten."""
        if (monitor := self._measuring) is None:
            return
        monitor.abort_step()
        monitor.end_window()
        self._publish(trainer, pl_module, on_step=False)

    @guarded_hook
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last window is reported, the last card written."""
        self._release()

    @guarded_hook
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave nothing behind when training dies or is interrupted."""
        self._release()

    @guarded_hook
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind, however training ended."""
        self._release()

    # Phases of a step

    @guarded_hook
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The forward is over."""
        self._mark_phase("other")

    @guarded_hook
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The backward begins."""
        self._mark_phase("backward")

    @guarded_hook
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The backward is over."""
        self._mark_phase("other")

    @guarded_hook
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The optimizer's own work begins; it lasts until the batch ends."""
        self._mark_phase("optimizer")

    # What is not training

    @guarded_hook
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validation is in no window."""
        self._resume_all()
        self._pause("validation")

    @guarded_hook
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Training goes on."""
        self._resume("validation")

    @guarded_hook
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint that did not come through ``trainer.save_checkpoint``: saving, until the next step begins."""
        if not self._pauses:
            self._pause("checkpoint")

    # State

    def state_dict(self) -> dict[str, Any]:
        """Totals and counters as plain types, for the checkpoint."""
        try:
            self._keep_state()
            return dict(self._state)
        except Exception as error:  # a checkpoint must not fail for our totals
            if must_pass(error):
                raise
            self._turn_off("state_dict", error)
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint; it is used when training starts."""
        self._take_state(state_dict)

    @guarded_hook
    def _take_state(self, state_dict: Any) -> None:
        self._state = dict(state_dict) if isinstance(state_dict, Mapping) else {}
        self._is_state_of_past_run = False

    @guarded_hook
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take the state also where another monitor waits for its run and changed the number of this one."""
        states = checkpoint.get("callbacks") or {}
        name = type(self).__qualname__
        saved = [key for key in states if isinstance(key, str) and key.partition("#")[0] == name]
        if len(saved) == 1 and self.state_key not in states:
            self.load_state_dict(states[saved[0]])

    @guarded_hook
    def _keep_state(self) -> None:
        if (monitor := self._measuring) is not None:
            self._state = monitor.state_dict()

    # What the hooks above are made of

    def _config_for(self, trainer: Any) -> MonitorConfig:
        config = self.config
        return config.with_options(
            {
                "log_every_n_steps": config.log_every_n_steps or trainer.log_every_n_steps or DEFAULT_LOG_EVERY_N_STEPS,
                "device": config.device or trainer.strategy.root_device,
                "jsonl": writable_jsonl(config.jsonl) if trainer.is_global_zero else None,
                "tensorboard": config.tensorboard if trainer.is_global_zero else None,
                "console": config.console and trainer.is_global_zero,
                "run_name": config.run_name or _run_name(trainer),
                "promised_precision": config.promised_precision or _promised_precision(trainer),
                "total_steps": config.total_steps or _total_batches(trainer),
            }
        )

    def _sinks(self, trainer: Any) -> list[Sink]:
        if not trainer.is_global_zero:
            return []
        layout, detail = self.tensorboard_layout, self.config.detail
        return sinks_for_loggers(trainer.loggers, at_step=self._logging_steps, layout=layout, detail=detail)

    @property
    def _measuring(self) -> Monitor | None:
        """The monitor between start and end of training; it stays in ``monitor`` afterwards, for its reading."""
        return self.monitor if self._is_measuring else None

    @guarded_hook
    def _mark_phase(self, name: str) -> None:
        if (monitor := self._measuring) is not None:
            monitor.mark_phase(name)

    def _pause(self, reason: str) -> None:
        if (monitor := self._measuring) is not None:
            self._pauses.append(reason)
            monitor.pause(reason)

    def _resume(self, reason: str) -> None:
        if reason in self._pauses:
            self._pauses.remove(reason)
            if (monitor := self._measuring) is not None:
                monitor.resume(reason)

    def _resume_all(self) -> None:
        for reason in reversed(self._pauses.copy()):
            self._resume(reason)

    def _wrap(self, trainer: Any) -> None:
        """Wrap, until training ends, the few methods of this trainer whose begin or end no hook reports."""
        loop = trainer.fit_loop.epoch_loop
        self._sees_fetches = has_fetch_hooks(loop)
        wraps: list[tuple[Any, str, Callable[..., AbstractContextManager[None]]]] = [
            (trainer, "save_checkpoint", self._while_saving),
            (trainer.strategy, "batch_to_device", functools.partial(self._during, "h2d_copy", "between")),
        ]
        if self._sees_fetches:
            wraps.append((loop, "_on_before_fetch", functools.partial(self._during, "data_wait", None)))
            wraps.append((loop, "_on_after_fetch", functools.partial(self._during, "between", None)))
        for owner, name, around in wraps:
            self._unwrap.append(wrap_method(owner, name, around))

    @contextlib.contextmanager
    def _during(self, phase: str, then: str | None, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Time belongs to ``phase`` from here on, and to ``then`` afterwards."""
        self._mark_phase(phase)
        try:
            yield
        finally:
            if then is not None:
                self._mark_phase(then)

    @contextlib.contextmanager
    def _while_saving(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._saving_begins()
        try:
            yield
        finally:
            self._saving_ends()

    @guarded_hook
    def _saving_begins(self) -> None:
        self._pause("checkpoint")

    @guarded_hook
    def _saving_ends(self) -> None:
        self._resume("checkpoint")

    def _publish(self, trainer: Any, pl_module: Any, *, on_step: bool) -> None:
        """Put a new reading where the progress bar and monitoring callbacks look."""
        if self.monitor is not None and self.monitor.should_stop:
            trainer.should_stop = True
        reading = self.reading
        is_new = reading is not None and reading is not self._published
        if is_new:
            self._published = reading
            self._show(trainer, pl_module, reading, on_step=on_step)
        if self._monitored is not None:
            self._monitored.offer(trainer, reading if is_new else None)

    def _show(self, trainer: Any, pl_module: Any, reading: UtilizationReading | None, *, on_step: bool) -> None:
        for name in PROGRESS_METRICS:
            if (value := getattr(reading, name)) is None:
                trainer.callback_metrics.pop(name, None)
                continue
            # A tensor on the CPU: of a plain float Lightning makes one on the device, and showing it would wait.
            tensor = torch.tensor(float(value))
            if on_step:
                pl_module.log(name, tensor, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)
            else:
                # At the end of an epoch Lightning would ask to average over the ranks, and each has the world's value.
                trainer.callback_metrics[name] = tensor
                trainer.progress_bar_metrics[name] = float(value)

    def _release(self) -> None:
        """May be called again; Ctrl-C within keeps nothing from being undone."""
        try:
            self._let_go()
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        _WAITING.discard(self)
        while self._unwrap:
            self._unwrap[-1]()
            self._unwrap.pop()
        if (monitor := self._measuring) is None:
            return
        self._resume_all()
        monitor.abort_step()
        monitor.close()
        self._is_measuring = False
        self._state, self._is_state_of_past_run = monitor.state_dict(), True


def _run_name(trainer: Any) -> str | None:
    """The first logger's: ``lightning_logs/version_3``."""
    logger = trainer.logger
    parts = [getattr(logger, "name", None), getattr(logger, "version", None)]
    return "/".join(f"version_{p}" if isinstance(p, int) else str(p) for p in parts if p not in (None, "")) or None


def _promised_precision(trainer: Any) -> str | None:
    """What the trainer was given; ``32-true`` is its default and promises nothing, as plugins may override it."""
    return None if trainer.precision == "32-true" else str(trainer.precision)


def _total_batches(trainer: Any) -> int | None:
    """Training batches of the run by its limits, whichever ends it first; None where none is set."""
    limits = []
    if trainer.max_steps is not None and trainer.max_steps > 0:
        limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and math.isfinite(trainer.num_training_batches):
        limits.append(trainer.max_epochs * trainer.num_training_batches)
    return int(min(limits, default=0)) or None
