"""The options of a monitor: frozen, keyword-only, checked when made."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mfu_monitor.alerts.thresholds import AlertConfig
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.steps.batch import import_function, resolve_tokens_function

__all__ = ["DEFAULT_LOG_EVERY_N_STEPS", "MonitorConfig", "resolve_alerts", "resolve_callable"]

DEFAULT_LOG_EVERY_N_STEPS = 50
"""Steps of a window in a loop of one's own: the default of Lightning's ``Trainer(log_every_n_steps=...)``, so that a
plain loop and a trainer report alike."""

_CHOICES = {
    "convention": ("exact", "palm"),
    "count": ("auto", "every_step"),
    "detail": ("brief", "full"),
    "names": ("mfu_monitor", "throughput_monitor"),
    "on_impossible": ("warn", "raise", "stop"),
}


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Options of ``Monitor`` and of the callbacks. Every value but a callable can be held by YAML, TOML or JSON.

    Raises:
        ConfigurationError: a value that is not allowed; the message names the key, what was given and what is allowed.

    Example:
        >>> MonitorConfig(log_every_n_steps=10, peak=989.4e12, tokens="my_project.data:count_tokens")
    """

    log_every_n_steps: int | None = None
    """Training batches of a window. None: the trainer's own setting, or 50 in a loop of one's own."""
    peak: Any = "auto"
    """Dense peak: ``"auto"`` (table), ``"measure"``, ``"derive"``, FLOP/s as a number, or a dict by precision."""
    tokens: str | Callable[[Any], Any] | None = None
    """Tokens of a batch: a function or its import path ``"pkg.mod:function"``. None: read from the shapes."""
    count_padding: bool = False
    """Also sum the attention mask and the labels of every step. Costs tensor work on each step; never waits for it."""
    convention: str = "exact"
    """``"exact"``: attended query-key pairs only; ``"palm"``: attention as its full square."""
    count: str = "auto"
    """``"auto"``: the first step of each signature, then random ones within ``max_overhead``; ``"every_step"``: all of
    them, and windows then contain the cost of counting."""
    max_overhead: float = 0.002
    """Share of the run's time that counting may cost after the first count."""
    count_no_grad_as_model: bool = False
    """Count forwards without gradient in a training step (a teacher, a target network) as model FLOPs."""
    names: str = "mfu_monitor"
    """Metric names: our own, or ``"throughput_monitor"`` for dashboards made for Lightning's ThroughputMonitor."""
    jsonl: str | os.PathLike[str] | None = None
    """File that readings and records are appended to, one JSON object a line."""
    tensorboard: str | os.PathLike[str] | None = None
    """Folder that TensorBoard reads: scalars, cards and pictures go there. Needs ``pip install tensorboard``."""
    detail: str = "brief"
    """Scalars in TensorBoard: ``"brief"`` for at most 15, ``"full"`` for all; files and other loggers have all."""
    console: bool | None = None
    """Print one line per window. None: only in a loop of one's own that has no sink, no file and no TensorBoard."""
    run_name: str | None = None
    """The run's name on its alerts. None: the trainer's, the variable MFU_MONITOR_RUN_NAME, or the script's name."""
    device: str | torch.device | None = None
    """The device whose peak and clock count. None: that of the model's parameters."""
    on_impossible: str = "warn"
    """What to do with a reading that physics forbids: ``"warn"``, ``"raise"`` or ``"stop"`` training."""
    flops_per_batch: float | None = None
    """The user's own FLOPs of a batch on one rank, held against our count; None: ``model.flops_per_batch``, if any."""
    use_flops_per_batch: bool = False
    """Report MFU by the user's value instead of our count."""
    promised_precision: str | None = None
    """What the configuration promises (``"bf16-mixed"``); products that ran in another precision are diagnosed."""
    alerts: Any = True
    """Alerts when MFU drops: True, False, or thresholds as an ``AlertConfig`` or a dict of its fields."""
    webhook: str | None = field(default=None, repr=False)
    """Address that alerts are posted to; None: the environment variable MFU_MONITOR_WEBHOOK_URL, if set."""
    on_alert: str | Callable[[Any], Any] | None = None
    """Called with each alert's event: a function or its import path ``"pkg.mod:function"``."""
    stop_on_alert: bool = False
    """Ask the trainer to stop at the first alert."""
    micro_batches_per_step: int = 1
    """Training batches of one optimizer step: ``step_time/*`` and ``flops_per_step/*`` are those of all of them."""
    total_steps: int | None = None
    """Training batches of the whole run, for the time that is left. None: the trainer's own, if it knows."""
    price_per_device_hour: float | None = None
    """In any currency, for the cost that is left."""

    def __post_init__(self) -> None:
        _check_positive_int("log_every_n_steps", self.log_every_n_steps)
        _check_positive_int("total_steps", self.total_steps)
        _check_positive_int("micro_batches_per_step", self.micro_batches_per_step)
        for key in ("flops_per_batch", "price_per_device_hour"):
            _check_positive_number(key, getattr(self, key))
        _check_name("promised_precision", self.promised_precision, "a precision's name", "'bf16-mixed'")
        _check_name("run_name", self.run_name, "a name", "'gpt-7b'")
        resolve_alerts(self.alerts)
        resolve_callable("on_alert", self.on_alert)
        _check_webhook(self.webhook)
        if self.webhook is not None:
            object.__setattr__(self, "webhook", _HiddenText(self.webhook))
        _check_overhead(self.max_overhead)
        for key, allowed in _CHOICES.items():
            _check_choice(key, getattr(self, key), allowed)
        for key in ("count_padding", "count_no_grad_as_model", "use_flops_per_batch", "stop_on_alert"):
            _check_bool(key, getattr(self, key))
        resolve_tokens_function(self.tokens)
        _check_jsonl(self.jsonl)
        _check_tensorboard(self.tensorboard)
        if self.console is not None:
            _check_bool("console", self.console)
        _check_device(self.device)
        _check_peak(self.peak)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> MonitorConfig:
        """Make a configuration from plain values, as YAML or JSON gives them.

        Raises:
            ConfigurationError: an unknown key, with the nearest known one, or a value that is not allowed.
        """
        return cls().with_options(values)

    def with_options(self, values: Mapping[str, Any]) -> MonitorConfig:
        """The same configuration with these options changed, checked again.

        Raises:
            ConfigurationError: an unknown key, with the nearest known one, or a value that is not allowed.
        """
        known = [f.name for f in dataclasses.fields(self)]
        for key in values:
            if key not in known:
                raise ConfigurationError(_unknown_key(str(key), known))
        return dataclasses.replace(self, **values)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], *, table: str = "mfu_monitor") -> MonitorConfig:
        """Read a configuration from the ``[mfu_monitor]`` table of a TOML file, or from its top level without one.

        Raises:
            ConfigurationError: the file cannot be read, is not TOML, or holds a wrong key or value.
        """
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigurationError(f"cannot read the configuration file {os.fspath(path)!r}: {error}") from error
        return cls.from_mapping(content.get(table, content))


def _refuse(key: str, given: object, allowed: str, example: str) -> ConfigurationError:
    kind = type(given).__name__
    return ConfigurationError(f"{key}={given!r} ({kind}) is not allowed: expected {allowed}; example: {key}={example}")


def _unknown_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown option {key!r}{hint} Known options: {', '.join(known)}"


def _check_positive_int(key: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _refuse(key, value, "a whole number of steps, 1 or more, or None", "10")


def _check_positive_number(key: str, value: Any) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)  # numpy's numbers too
    if value is not None and not (is_number and 0 < value <= sys.float_info.max):
        raise _refuse(key, value, "a number above 0, or None", "1.5e15" if key == "flops_per_batch" else "2.5")


def _check_name(key: str, value: Any, what: str, example: str) -> None:
    if value is not None and not isinstance(value, str):
        raise _refuse(key, value, f"{what}, or None", example)


class _HiddenText(str):
    """A text that no listing of the options shows (``vars``, ``dataclasses.asdict``): who knows it can post there."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<hidden>"


def _check_webhook(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.startswith(("http://", "https://"))):
        # The address itself is a secret: who knows it can post.
        raise ConfigurationError(
            f"webhook=<{type(value).__name__}> is not allowed: expected an address that begins with http:// or "
            "https://, or None for the environment variable MFU_MONITOR_WEBHOOK_URL"
        )
    if value is not None:
        from mfu_monitor.sinks.webhook import checked_url  # here: few runs need an http client

        checked_url(value)


def resolve_alerts(value: Any) -> AlertConfig | None:
    """The thresholds that ``alerts=`` stands for; None where there are to be no alerts.

    Raises:
        ConfigurationError: neither a bool nor thresholds, or a threshold that is not allowed.
    """
    if value is None or value is False:
        return None
    if isinstance(value, AlertConfig):
        return value
    if value is True:
        return AlertConfig()
    if not isinstance(value, Mapping):
        raise _refuse("alerts", value, "True, False, an AlertConfig or a dict of its fields", "{'drop': 0.15}")
    known = [f.name for f in dataclasses.fields(AlertConfig)]
    for key in value:
        if key not in known:
            raise ConfigurationError(f"alerts: {_unknown_key(str(key), known)}")
    return AlertConfig(**value)


def resolve_callable(key: str, value: Any) -> Callable[..., Any] | None:
    """A function, or the one at an import path ``"pkg.mod:function"``.

    Raises:
        ConfigurationError: neither, or nothing can be imported there.
    """
    if value is None or callable(value):
        return value  # type: ignore[no-any-return]
    example = "'my_project.alerts:report'"
    if not isinstance(value, str):
        raise _refuse(key, value, "a function, its import path 'pkg.mod:function', or None", example)
    try:
        return import_function(value)
    except ImportError as error:
        allowed = f"a function or the import path 'pkg.mod:function' of one ({error})"
        raise _refuse(key, value, allowed, example) from error


def _check_overhead(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise _refuse("max_overhead", value, "a share of the run's time from 0 to 1", "0.002")


def _check_choice(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _refuse(key, value, " or ".join(repr(choice) for choice in allowed), repr(allowed[0]))


def _check_bool(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(key, value, "True or False", "True")


def _check_jsonl(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise _refuse("jsonl", value, "the path of a file", "'runs/mfu.jsonl'")
    path = Path(value)
    if path.is_dir():
        raise _refuse("jsonl", value, "the path of a file, not of a folder that exists", "'runs/mfu.jsonl'")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise _refuse("jsonl", value, f"a path that can be written ({str(folder)!r} cannot)", "'runs/mfu.jsonl'")


def _check_tensorboard(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise _refuse("tensorboard", value, "the path of a folder", "'runs/a'")
    if Path(value).exists() and not Path(value).is_dir():
        raise _refuse("tensorboard", value, "the path of a folder, not of a file that exists", "'runs/a'")


def _check_device(value: Any) -> None:
    if value is None or isinstance(value, torch.device):
        return
    try:
        torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise _refuse("device", value, "a torch device, its name, or None", "'cuda:0'") from error


def _check_peak(value: Any) -> None:
    # Imported here: the table of devices is not needed to import the package.
    from mfu_monitor.hardware.resolve import validate_peak_spec

    try:
        validate_peak_spec(value)
    except ConfigurationError as error:
        # The inner message speaks of the value; the key has to be in it, too.
        raise ConfigurationError(f"peak={value!r} is not allowed: {error}") from error
