"""What stays the same through a run: the user's claims, the model's bytes, the device as its driver names it."""

from __future__ import annotations

import dataclasses
import numbers
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mfu_monitor.formulas.analytic import embedding_parameters, logical_numel
from mfu_monitor.hardware.measure import cached_peak
from mfu_monitor.hardware.properties import read_properties
from mfu_monitor.timing.step_window import StepWindow

__all__ = ["RunFacts", "by_users_figure"]


class RunFacts:
    """Collected once, at the start: nothing here is asked again on the way.

    Args:
        model: whose parameters are weighed; None without.
        device: that the run computes on.
        promised_precision, flops_per_batch, use_flops_per_batch: the user's claims, as in ``MonitorConfig``.
    """

    def __init__(
        self,
        model: nn.Module | None,
        device: torch.device,
        *,
        promised_precision: str | None = None,
        flops_per_batch: float | None = None,
        use_flops_per_batch: bool = False,
    ) -> None:
        self._claimed = flops_per_batch
        self._uses_claim = use_flops_per_batch
        self._device = device
        self._model = model
        self._measured: dict[str, float | None] = {}
        self._fixed = {**_sizes_of(model), **_device_facts(device)}
        if promised_precision is not None:
            self._fixed["promised_precision"] = promised_precision

    @property
    def flops_per_batch(self) -> float | None:
        """The user's own value: an option, or ``model.flops_per_batch`` as Lightning's ThroughputMonitor wants it."""
        value = self._claimed or getattr(self._model, "flops_per_batch", None)
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or not value <= sys.float_info.max:
            return None  # numpy's numbers are Real too; what is above a float's range, or NaN, is not usable
        return float(value) if float(value) > 0 else None

    @property
    def uses_own_figure(self) -> bool:
        """True where MFU is to be reported by the user's value."""
        return self._uses_claim and self.flops_per_batch is not None

    def achievable_flops_per_s(self, precision: str | None) -> float | None:
        """The best product measured on this device by an earlier run or ``mfu-monitor bench``; None without one."""
        if precision is None:
            return None
        if precision not in self._measured:
            known = cached_peak(self._device, precision)
            self._measured[precision] = None if known is None else known.flops_per_s(precision)
        return self._measured[precision]

    def forget_measurements(self) -> None:
        """Something was measured again: ask again."""
        self._measured.clear()

    def evidence(self, window: StepWindow, precision: str | None) -> dict[str, Any]:
        """Fields of ``checks.Evidence`` for one window."""
        facts = dict(self._fixed)
        if self.flops_per_batch is not None:
            facts |= {"flops_per_batch": self.flops_per_batch, "flops_per_batch_is_used": self.uses_own_figure}
        if window.optimizer_steps:
            facts["accumulate_grad_batches"] = max(1, round(window.steps / window.optimizer_steps))
        if (achievable := self.achievable_flops_per_s(precision)) is not None:
            facts["achievable_flops_per_s"] = achievable
        return facts


def by_users_figure(window: StepWindow, flops_per_batch: float) -> StepWindow:
    """The window with the user's model FLOPs in place of ours; what the hardware ran stays as counted."""
    flops = round(flops_per_batch * window.steps)
    ratio = flops / window.model_flops if window.model_flops else None
    shares = window.model_flops_by_precision
    return dataclasses.replace(
        window,
        model_flops=flops,
        world_model_flops=round(flops_per_batch * (window.world_steps or window.steps)) * window.world_size,
        palm_model_flops=None,
        world_palm_model_flops=None,
        model_flops_by_precision={} if ratio is None else {p: round(f * ratio) for p, f in shares.items()},
    )


def _sizes_of(model: nn.Module | None) -> dict[str, Any]:
    parameters = [] if model is None else list(model.parameters())
    if (
        model is None or not parameters or any(map(is_lazy, parameters))
    ):  # a lazy module has no sizes before its first forward
        return {}
    return {
        "parameters": float(sum(map(logical_numel, parameters))),
        "embedding_parameters": float(embedding_parameters(model)),
        "stored_parameters": float(sum(map(_stored_numel, parameters))),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
    }


def _stored_numel(parameter: torch.Tensor) -> int:
    """Elements on this rank: of a DTensor its own shard's, of packed 4-bit weights the bytes."""
    local = getattr(parameter, "to_local", None)
    return int((local() if local is not None else parameter).numel())


def _device_facts(device: torch.device) -> dict[str, Any]:
    properties = read_properties(device) if device.type != "cpu" else None
    if properties is None:
        return {}
    return {"device_name": properties.name, **({"sm_count": properties.sm_count} if properties.sm_count else {})}
