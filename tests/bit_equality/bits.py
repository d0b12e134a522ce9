"""Train the same model with and without us, and compare every bit that training leaves behind."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

import mfu_monitor as mm

__all__ = ["WATCHERS", "differences", "left_behind"]

Make = Callable[[], tuple[nn.Module, Any]]
"""Makes a model and its input; called after the seed is set, so that both are the same each time."""
Step = Callable[[nn.Module, Any], Any]
"""One training step up to its gradients; returns what the model said."""


def with_flop_counter(model: nn.Module) -> Callable[[], Any]:
    return lambda: mm.FlopCounter(model)


def with_monitor(model: nn.Module) -> Callable[[], Any]:
    monitor = mm.Monitor(model, count="every_step", log_every_n_steps=1, peak=1e12, alerts=False)
    return lambda: monitor.step(None)


WATCHERS: dict[str, Callable[[nn.Module], Callable[[], Any]]] = {
    "FlopCounter": with_flop_counter,
    "Monitor": with_monitor,
}
"""How a step is counted: from the model to a context manager for each step."""


def left_behind(make: Make, step: Step, watcher: str | None, *, steps: int = 2) -> dict[str, Any]:
    """Outputs, gradients, weights, buffers, optimizer state and random state after ``steps`` steps."""
    torch.manual_seed(11)
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if any(True for _ in model.parameters()) else None
    watch = WATCHERS[watcher](model) if watcher is not None else contextlib.nullcontext
    seen: dict[str, Any] = {}
    for number in range(steps):
        with watch():
            seen[f"output {number}"] = _tensors(step(model, batch))
            seen[f"gradients {number}"] = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    seen["weights"] = list(model.parameters())
    seen["buffers"] = list(model.buffers())
    seen["optimizer state"] = _tensors(optimizer.state_dict()) if optimizer is not None else []
    seen["random state"] = [torch.get_rng_state()]
    return seen


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value.to_tuple() if hasattr(value, "to_tuple") else value
    return [leaf.detach().clone() for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def differences(plain: dict[str, Any], watched: dict[str, Any]) -> Iterator[str]:
    """What is not the same to the bit, by name."""
    for name, expected in plain.items():
        pairs = list(zip(expected, watched[name], strict=True))
        wrong = [index for index, (a, b) in enumerate(pairs) if not _same_bits(a, b)]
        if wrong:
            yield f"{name}: {len(wrong)} of {len(pairs)} tensors, the first is number {wrong[0]}"


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().contiguous() for t in (a, b))
    # Bytes rather than values: a NaN equals itself, and -0.0 is not 0.0.
    return a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def compare(make: Make, step: Step, watcher: str, *, steps: int = 2) -> None:
    """Fail where counting changed a bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, watched = (left_behind(make, step, w, steps=steps) for w in (None, watcher))
    assert list(differences(plain, watched)) == []
