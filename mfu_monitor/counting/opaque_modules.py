"""Modules that a formula counts as a whole, because the dispatcher cannot see the work inside.

For the length of the counted step the call of their classes is wrapped, which prices each call of these instances.
Nothing is put into the modules: a hook would be copied and saved with them by a step that copies its model. Each
backward pass that runs through the output of a call is priced by rule: one forward for the input's gradient, one for
the weights', where each is wanted. A prehook on the output's autograd node reports the pass; unlike a hook on a tensor
it puts nothing into the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mfu_monitor.formulas.registry import find_module_formula
from mfu_monitor.internals.autograd_state import running_pass
from mfu_monitor.internals.patches import Wrap

__all__ = ["BackwardPasses", "OpaqueModules", "gradients_wanted"]

OnCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


class OpaqueModules:
    """The modules of a model that have a formula of their own, watched for one step.

    Args:
        model: where to look; None: nothing is opaque.
        on_call: called at every forward of such a module: the module, its arguments and its output.
        on_fault: told what ``on_call`` raised.
    """

    def __init__(self, model: nn.Module | None, on_call: OnCall, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._modules = [m for m in model.modules() if find_module_formula(m) is not None] if model is not None else []
        self._ids = {id(m) for m in self._modules}
        self._on_call = on_call
        self._wraps = [Wrap(kind, "__call__", self._around_call) for kind in dict.fromkeys(map(type, self._modules))]

    def attach(self) -> None:
        """Watch the modules."""
        for wrap in self._wraps:
            wrap.attach()

    def detach(self) -> None:
        """Leave every class as it was; may be called again."""
        for wrap in self._wraps:
            wrap.detach()

    def unhooked(self, stack: Iterable[nn.Module]) -> nn.Module | None:
        """A module that has a formula, but is not part of the model: its hidden work is not counted."""
        return next((m for m in stack if find_module_formula(m) is not None and id(m) not in self._ids), None)

    def covers(self, stack: Iterable[nn.Module]) -> bool:
        """True when one of these modules is opaque: what runs inside is already counted."""
        return bool(self._ids) and any(id(m) in self._ids for m in stack)

    def _around_call(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = call(module, *args, **kwargs)
        if id(module) in self._ids:
            try:
                self._on_call(module, args, kwargs, output)
            except BaseException as fault:  # noqa: BLE001  (the user's step goes on)
                self._on_fault(fault)
        return output


class BackwardPasses:
    """Tells of each backward pass that runs through some outputs.

    Args:
        on_fault: told what the one who is told raised.
    """

    def __init__(self, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._handles: list[RemovableHandle] = []

    def watch(self, outputs: Iterable[torch.Tensor], on_pass: Callable[[], None]) -> None:
        """Call ``on_pass`` once for every backward pass that reaches one of these tensors."""
        passes: set[int] = set()

        def reached(_gradients: Any) -> None:
            task = running_pass()
            if task not in passes:
                passes.add(task)
                try:
                    on_pass()
                except BaseException as fault:  # noqa: BLE001  (the user's backward goes on)
                    self._on_fault(fault)

        for node in {t.grad_fn for t in outputs if t.grad_fn is not None}:
            self._handles.append(node.register_prehook(reached))

    def detach(self) -> None:
        """Watch no more; may be called again."""
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()


def gradients_wanted(module: nn.Module, inputs: Iterable[Any], *, input_factor: int = 1) -> int:
    """How many forwards the backward of an opaque module costs: one for each gradient that is wanted.

    Args:
        module: one whose parameters may be frozen.
        inputs: the arguments of its forward.
        input_factor: what the gradient of the inputs costs, in forwards.
    """
    wants_input = any(isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad for x in inputs)
    wants_weight = any(p.requires_grad for p in module.parameters())
    return input_factor * int(wants_input) + int(wants_weight)
