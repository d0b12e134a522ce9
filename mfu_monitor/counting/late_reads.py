"""Numbers that lie on a device, read once they have arrived: nothing waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["read_late"]


def read_late(
    value: torch.Tensor, *, event_factory: Callable[[], Any] | None = None
) -> tuple[Callable[[], bool], torch.Tensor]:
    """Whether the value has arrived, and the tensor on the host that holds it then.

    On an accelerator it is copied without blocking, as work of the current stream; an event says that it has arrived.

    Args:
        value: any tensor; on the CPU it is there at once.
        event_factory: makes the event; for tests.
    """
    if value.device.type == "cpu" and event_factory is None:
        return (lambda: True), value
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type != "cpu")
    host.copy_(value, non_blocking=True)
    event = event_factory() if event_factory else torch.get_device_module(value.device).Event()
    event.record()
    return event.query, host
