"""What a training run will take: FLOPs, device-hours, days, money, devices or the MFU that a deadline needs. Pure.

Training costs 6 FLOPs per parameter and token (2 forward, 4 backward) plus attention's own products:
Kaplan et al. 2020, "Scaling laws for neural language models", https://arxiv.org/abs/2001.08361, section 2.1, and
Chowdhery et al. 2022, "PaLM", https://arxiv.org/abs/2204.02311, appendix B. Recomputation is not part of it: MFU counts
model FLOPs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import TRAINING_FLOPS_PER_PARAMETER

__all__ = [
    "Plan",
    "RemainingWork",
    "format_duration",
    "plan_training",
    "remaining_work",
    "training_flops",
]

_SECONDS_PER_HOUR = 3600.0
_SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One training run; what was not asked for and cannot be said is None."""

    flops: float
    peak_flops_per_s: float
    """Dense, of one device."""
    mfu: float
    device_hours: float
    devices: int | None = None
    devices_exact: float | None = None
    """Before rounding up to whole devices; differs from ``devices`` for a deadline only."""
    wall_clock_s: float | None = None
    cost: float | None = None

    @property
    def wall_clock_days(self) -> float | None:
        """The same in days."""
        return None if self.wall_clock_s is None else self.wall_clock_s / _SECONDS_PER_DAY

    @property
    def is_possible(self) -> bool:
        """False where the deadline needs more than the peak."""
        return self.mfu <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """What is left of a running job at its present pace."""

    steps: int
    wall_clock_s: float
    device_hours: float
    cost: float | None = None

    def text(self) -> str:
        """One line for a card or a console: ``"1,200 steps left: 2.5 h, 640 device-hours"``."""
        money = "" if self.cost is None else f", cost {self.cost:,.0f}"
        left = f"{format_duration(self.wall_clock_s)}, {self.device_hours:,.4g} device-hours"
        return f"{self.steps:,} steps left: {left}{money}"

    def metrics(self) -> dict[str, float]:
        """For a logger: ``remaining/wall_clock_s`` and ``remaining/device_hours``."""
        return {"remaining/wall_clock_s": self.wall_clock_s, "remaining/device_hours": self.device_hours}


def training_flops(active_parameters: float, tokens: float, attention_flops_per_token: float = 0.0) -> float:
    """Model FLOPs of a training run: ``tokens * (6 N + attention)``.

    Args:
        active_parameters: N, the parameters that work on each token: all of a dense model, shared plus routed experts
            of a mixture.
        tokens: tokens seen in training.
        attention_flops_per_token: by ``AttentionShape``; small where the sequence is short against the width.

    Example:
        >>> training_flops(70e9, 15e12)
        6.3e+24
    """
    _positive(active_parameters=active_parameters, tokens=tokens)
    return tokens * (TRAINING_FLOPS_PER_PARAMETER * active_parameters + attention_flops_per_token)


def plan_training(
    flops: float,
    peak_flops_per_s: float,
    *,
    mfu: float | None = None,
    devices: int | None = None,
    deadline_s: float | None = None,
    price_per_device_hour: float | None = None,
) -> Plan:
    """Two of MFU, devices and deadline give the third; MFU alone gives device-hours and cost.

    Args:
        flops: model FLOPs of the whole run.
        peak_flops_per_s: dense peak of one device at the training precision.
        mfu: fraction of that peak that the run reaches.
        devices: how many work on it.
        deadline_s: seconds until it must be done.
        price_per_device_hour: in any currency.

    Raises:
        ConfigurationError: a value not above zero, MFU above 1, all three of MFU, devices and deadline, or too few.

    Example:
        >>> round(plan_training(6.3e24, 989.4e12, mfu=0.40, devices=8192).wall_clock_days, 1)
        22.5
    """
    _positive(
        flops=flops, peak_flops_per_s=peak_flops_per_s, mfu=mfu, devices=devices, deadline_s=deadline_s,
        price_per_device_hour=price_per_device_hour,
    )  # fmt: skip
    _check_what_is_asked(mfu, devices, deadline_s)
    exact = None if devices is None else float(devices)
    if mfu is None:
        mfu = flops / (peak_flops_per_s * (devices or 1) * (deadline_s or math.inf))
    elif deadline_s is not None:
        exact = flops / (peak_flops_per_s * mfu * deadline_s)
        devices = math.ceil(exact)
    device_s = flops / (peak_flops_per_s * mfu)
    hours = device_s / _SECONDS_PER_HOUR
    return Plan(
        flops=flops,
        peak_flops_per_s=peak_flops_per_s,
        mfu=mfu,
        device_hours=hours,
        devices=devices,
        devices_exact=exact,
        wall_clock_s=None if devices is None else device_s / devices,
        cost=None if price_per_device_hour is None else hours * price_per_device_hour,
    )


def remaining_work(
    *,
    total_steps: int,
    steps_done: int,
    seconds_per_step: float,
    devices: int = 1,
    price_per_device_hour: float | None = None,
) -> RemainingWork | None:
    """What is left of a running job if every step takes what the present ones take.

    Args:
        total_steps: training batches of the whole run.
        steps_done: of them, done.
        seconds_per_step: wall time per step, validation and checkpoints included (``window.wall_s / window.steps``),
            so that the estimate is when the job ends and not when it could.
        devices: in the world.
        price_per_device_hour: in any currency.

    Returns:
        The remaining work; None where the total or the pace is not known (not positive, not finite).
    """
    if total_steps <= 0 or not math.isfinite(seconds_per_step) or seconds_per_step <= 0 or devices <= 0:
        return None
    steps = max(0, total_steps - steps_done)
    hours = steps * seconds_per_step * devices / _SECONDS_PER_HOUR
    return RemainingWork(
        steps=steps,
        wall_clock_s=steps * seconds_per_step,
        device_hours=hours,
        cost=None if price_per_device_hour is None else hours * price_per_device_hour,
    )


def format_duration(seconds: float) -> str:
    """Seconds in the unit people would use: ``"42 s"``, ``"12.5 min"``, ``"3.1 h"``, ``"22.5 days"``."""
    for unit, length in (("days", 2 * _SECONDS_PER_DAY), ("h", 2 * _SECONDS_PER_HOUR), ("min", 120.0)):
        if seconds >= length:
            divisor = {"days": _SECONDS_PER_DAY, "h": _SECONDS_PER_HOUR, "min": 60.0}[unit]
            return f"{seconds / divisor:.1f} {unit}"
    return f"{seconds:.3g} s"


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigurationError(f"{name} is {value}; expected a finite number above zero")


def _check_what_is_asked(mfu: float | None, devices: int | None, deadline_s: float | None) -> None:
    if mfu is not None and mfu > 1:
        raise ConfigurationError(f"mfu is {mfu}; expected a fraction of the peak, above 0 and at most 1, such as 0.40")
    if mfu is not None and devices is not None and deadline_s is not None:
        raise ConfigurationError(
            "mfu, devices and a deadline were all given; two of them give the third: leave one out "
            "(without the deadline the answer is the wall-clock time)"
        )
    if mfu is None and (devices is None or deadline_s is None):
        raise ConfigurationError(
            "neither an MFU nor both devices and a deadline were given; give mfu (such as 0.40), or devices and a "
            "deadline to get the MFU they need"
        )
