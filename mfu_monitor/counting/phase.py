"""Which part of the step an operator call belongs to, decided from the autograd state and the call's surroundings."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch

from mfu_monitor.counting.frames import CallSite
from mfu_monitor.counting.ledger import Entry
from mfu_monitor.counting.step_record import Phase
from mfu_monitor.internals.autograd_state import is_custom_node, next_sequence_nr, running_node
from mfu_monitor.internals.custom_forwards import context_of
from mfu_monitor.internals.dynamo import compiled_call_grad_mode
from mfu_monitor.internals.tensors import tensors_in

__all__ = ["GradModeMemory", "phase_of"]


def phase_of(site: CallSite, *, in_backward: bool, repeats_forward: bool, updates: bool = False) -> Phase:
    """The phase of one operator call.

    Args:
        site: the call's surroundings.
        in_backward: whether a backward pass is running on this thread.
        repeats_forward: whether the same operator ran on the same parameter in the same place in forward.
        updates: whether it takes a gradient outside of any graph: an update written by hand.

    In backward the autograd engine calls gradient products straight from C++. Python between the engine and the product
    means that somebody's code runs there: a checkpoint, a module, an optimizer, a custom function, a hook. What a hook
    computes is not part of the model, also where it replaces the gradient.
    """
    if site.in_rehearsal:
        return Phase.OTHER
    if site.in_optimizer_step:
        return Phase.OPTIMIZER
    if updates:
        return Phase.OTHER
    if not in_backward:
        return Phase.FORWARD
    if site.in_hook:
        return Phase.RECOMPUTE if repeats_forward else Phase.OTHER
    if site.recompute is not None or site.modules:
        return Phase.RECOMPUTE
    if site.in_custom_backward and _custom_backward_recomputes(site, repeats_forward=repeats_forward):
        return Phase.RECOMPUTE
    return Phase.BACKWARD


def _custom_backward_recomputes(site: CallSite, *, repeats_forward: bool) -> bool:
    # Grad mode is off in a custom backward unless create_graph asked for it, or the author turned it on to rebuild the
    # graph of a forward.
    if torch.is_grad_enabled() and site.create_graph is False:
        return True
    return repeats_forward and is_custom_node(running_node())


@dataclass(slots=True)
class _OpenForward:
    """A forward of the ``setup_context`` style that has run products; each call of a function has its own number."""

    number: int
    entries: list[Entry] = field(default_factory=list)
    results: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


def _asks_for_gradients(forward: FrameType) -> bool:
    return any(t.requires_grad for t in tensors_in(tuple(forward.f_locals.values())))


class GradModeMemory:
    """Whether gradients were on where the user called a ``torch.autograd.Function``.

    Inside ``Function.forward`` grad mode is off by construction, so it says nothing about the user's ``no_grad``.
    """

    def __init__(self) -> None:
        self._last_outside = True
        self._open: _OpenForward | None = None
        self.is_unsure = False
        """Whether the last answer was a guess: a compiled graph hides the grad mode that it was called in."""

    @property
    def awaits_outcome(self) -> bool:
        """Some forward without context ran products, and what becomes of its results is not known yet."""
        return self._open is not None

    def settle(self, outputs: Sequence[torch.Tensor]) -> None:
        """An operator ran: the first one after a forward without context says what became of its results."""
        call = self._open
        if call is None:
            return
        if call.number == next_sequence_nr():
            call.results.extend(weakref.ref(t) for t in outputs)
            return
        self._open = None
        results = [t for ref in call.results if (t := ref()) is not None]
        if results:
            for entry in call.entries:
                entry.without_grad = not any(t.requires_grad for t in results)

    def await_outcome(self, site: CallSite, entry: Entry, outputs: Sequence[torch.Tensor]) -> None:
        """A product ran in a forward without context, whose inputs ask for gradients: its results will say."""
        if not site.function_forwards:
            entry.is_mode_unsure = self.is_unsure
            return
        outermost = site.function_forwards[-1]
        context = context_of(outermost)
        if context is not None:
            entry.is_mode_unsure = not (context.next_functions or any(context.needs_input_grad))
            return
        if not _asks_for_gradients(outermost):
            entry.is_mode_unsure = True
            return
        if self._open is None:
            self._open = _OpenForward(next_sequence_nr())
            self._open.results.extend(weakref.ref(t) for t in outputs)
        self._open.entries.append(entry)

    def _was_on_at_compiled_call(self) -> bool:
        mode = compiled_call_grad_mode(sys._getframe())
        self.is_unsure = mode is None
        return bool(mode)

    def is_grad_on(self, site: CallSite) -> bool:
        """Grad mode at the outermost custom function on the stack, or now where there is none."""
        self.is_unsure = False
        if not site.function_forwards:
            self._last_outside = torch.is_grad_enabled() or (site.in_compiled_call and self._was_on_at_compiled_call())
            return self._last_outside
        outermost = context_of(site.function_forwards[-1])
        if outermost is None:
            return self._last_outside
        if outermost.next_functions:
            return True
        # Edges are recorded only with gradients on. Inputs that ask for gradients and no edges: they are off.
        return self._last_outside and not any(outermost.needs_input_grad)
