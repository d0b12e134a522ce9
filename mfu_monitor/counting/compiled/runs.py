"""Counts compiled graphs as they run:
phase from the call's surroundings, modules from the parameters a product reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mfu_monitor.counting.compiled.agreement import GRADIENT_LOST, KEEPS_LITTLE, KernelCheck, has_tangents, keeps_little
from mfu_monitor.counting.compiled.attention import Score
from mfu_monitor.counting.compiled.grad_switches import GradSwitches
from mfu_monitor.counting.compiled.gradients import gradient_paths
from mfu_monitor.counting.compiled.graph import TextGraph
from mfu_monitor.counting.compiled.modules import modules_of
from mfu_monitor.counting.compiled.products import CompiledProduct, CompiledRun, count_graph
from mfu_monitor.counting.frames import CallSite
from mfu_monitor.counting.ledger import Entry, Ledger
from mfu_monitor.counting.step_record import Phase
from mfu_monitor.errors import UncountedWorkWarning, warn
from mfu_monitor.internals.autograd_state import running_pass
from mfu_monitor.internals.dispatcher import without_dispatch_modes
from mfu_monitor.internals.dynamo import compiled_frame

__all__ = ["CompiledCounter", "RunSite", "reads_gradients"]

SHARED_WEIGHT = (
    "a compiled graph uses a weight more often than its gradient has parts: some of its work ran without gradient, and "
    "which is not known, so that all of it is in other_flops"
)
BACKWARD_UNSURE = (
    "CompiledFxGraph.fx_kwargs and the names of a compiled graph's inputs do not agree whether it is a backward graph"
)
_CONTRADICTED: set[str] = set()
FUSED = "inductor::fused"
"""The operator name under which the bytes of fused regions are kept."""


@dataclass(frozen=True, slots=True)
class RunSite:
    """Where a compiled graph runs."""

    phase: Phase
    module_fqn: str
    without_grad: bool
    in_backward: bool
    root_gradients: int = 0
    """How many of the graph's first inputs are the gradients that compiled autograd's backward starts from."""
    is_mode_unsure: bool = False
    """Whether ``without_grad`` is a guess."""


@dataclass(slots=True)
class _ForwardRun:
    graph: TextGraph
    modules: dict[int, str]
    """Module by input position, for inputs that are parameters."""
    scores: dict[str, Score]
    nodes: dict[str, str]
    """Module by tensor, around products without a weight."""
    wants_gradient: list[bool]
    """By input position."""
    products: list[tuple[CompiledProduct, Entry]]
    without_grad: bool
    in_doubt: frozenset[str] | None
    """Modules whose grad mode in the graph is not known; None for all."""


class CompiledCounter:
    """Prices runs of compiled graphs into a ledger.

    Args:
        ledger: where entries go.
        module_of_parameter: name of the module that owns a tensor, None for tensors that are not parameters.
        model: whose modules those are; None without.
    """

    def __init__(
        self, ledger: Ledger, module_of_parameter: Callable[[torch.Tensor], str | None], model: nn.Module | None = None
    ) -> None:
        self._switches = GradSwitches(model)
        self._ledger = ledger
        self._module_of_parameter = module_of_parameter
        self._forward_runs: list[_ForwardRun] = []
        self._last_compiled_backward: int | None = None
        self._checks: list[KernelCheck | None] = []
        """Of the graphs that run now, the innermost last; None for one whose text is not held against its run."""

    def root_gradients(self, site: CallSite) -> int:
        """How many of the next graph's first inputs are root gradients; 0 where that is not known.

        Compiled autograd hands its first graph the root gradients first. Where its backward breaks into several graphs
        the later ones do not say what is a gradient.
        """
        task = running_pass()
        if not site.in_compiled_autograd or task == self._last_compiled_backward:
            return 0
        self._last_compiled_backward = task
        return site.differentiated

    def saw_start(self) -> None:
        """A compiled graph is about to run, which ``saw_run`` may say more of."""
        self._checks.append(None)

    def saw_run(self, graph: TextGraph, inputs: Sequence[Any], *, is_backward: bool, site: RunSite) -> None:
        """A compiled graph is about to run."""
        if keeps_little():
            self._ledger.incomplete = True
            self._ledger.note(KEEPS_LITTLE)
        if has_tangents(graph) != is_backward:
            self.contradict(BACKWARD_UNSURE)
        forward = self._take_forward_of(graph) if is_backward else None
        if forward is not None and forward.without_grad:
            self.contradict(GRADIENT_LOST)
        with without_dispatch_modes():
            known = forward.scores if forward is not None else {}
            run = count_graph(
                graph, inputs, is_backward=is_backward, known_scores=known, root_gradients=site.root_gradients
            )
        owners = self._owners(inputs)
        forward_owners, forward_nodes = (forward.modules, forward.nodes) if forward is not None else ({}, {})
        modules, nodes = modules_of(graph, run.products, owners, forward_owners, forward_nodes, is_backward=is_backward)
        entries = [_entry(p, modules.get(p.name, site.module_fqn), site, is_backward) for p in run.products]
        for entry in entries:
            self._ledger.add_product(entry)
        self._add_rest(run, site, is_backward=is_backward)
        if forward is not None:
            self._mark_without_gradient(forward, graph, run)
        if not is_backward:
            wants = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs]
            products = list(zip(run.products, entries, strict=True))
            in_doubt = frozenset() if site.without_grad else self._modules_in_doubt()
            if not any(wants):
                for entry in entries:
                    entry.is_mode_unsure |= _is_in_doubt(entry, in_doubt)
            self._forward_runs.append(
                _ForwardRun(graph, owners, run.scores, nodes, wants, products, site.without_grad, in_doubt)
            )
        self._checks[-1:] = [KernelCheck(+run.library_flops, graph.is_all_library and not run.notes)]

    def saw_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An operator ran inside the graph that runs."""
        if self._checks and (check := self._checks[-1]) is not None:
            check.saw(func, args, kwargs, output)

    def saw_end(self) -> None:
        """The graph that started last has run."""
        check = self._checks.pop() if self._checks else None
        if check is not None and (contradiction := check.contradiction()) is not None:
            self.contradict(contradiction)

    def contradict(self, what: str) -> None:
        """Something moved in this torch: the count is a lower bound, and a warning says so once a process."""
        self._ledger.incomplete = True
        self._ledger.note(what)
        if what not in _CONTRADICTED:
            _CONTRADICTED.add(what)
            warn(
                f"with torch {torch.__version__} {what}. The count is a lower bound. Likely cause: this torch keeps "
                "compiled graphs in another way. Use a version that docs/versions.md lists, or report this line.",
                UncountedWorkWarning,
            )

    def _mark_without_gradient(self, forward: _ForwardRun, backward: TextGraph, run: CompiledRun) -> None:
        """Forward products that no gradient flows back to are another's work, as under ``no_grad`` in eager."""
        names = {p.name for p in run.products} | {p.name for p, _ in forward.products}
        paths = gradient_paths(forward.graph, backward, forward.wants_gradient, names)
        if paths.shared:
            self._ledger.incomplete = True
            self._ledger.note(SHARED_WEIGHT)
        for product, entry in forward.products:
            is_shared = not paths.shared.isdisjoint(product.input_positions)
            if entry.phase is Phase.FORWARD and (product.name in paths.without or is_shared):
                entry.without_grad = True
            entry.is_mode_unsure = product.name in paths.unasked and _is_in_doubt(entry, forward.in_doubt)

    def _add_rest(self, run: CompiledRun, site: RunSite, *, is_backward: bool) -> None:
        phase = Phase.BACKWARD if is_backward else site.phase
        if run.fused_bytes:
            self._ledger.add_quiet(FUSED, phase, site.module_fqn, (), run.fused_bytes, without_grad=site.without_grad)
        for name, shapes in run.unsupported:
            self._ledger.add_unsupported(name, site.module_fqn, phase, shapes)
        for note in run.notes:
            self._ledger.incomplete = True  # what a compiled graph does not say is never guessed and called exact
            self._ledger.note(note)

    def has_switches(self) -> bool:
        """Whether the compiled code that runs now may turn gradients on or off somewhere."""
        return self._modules_in_doubt() != frozenset()

    def _modules_in_doubt(self) -> frozenset[str] | None:
        frame = compiled_frame(sys._getframe())
        return None if frame is None else self._switches.modules_in_doubt(frame)

    def _owners(self, inputs: Sequence[Any]) -> dict[int, str]:
        named = ((i, self._module_of_parameter(x)) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor))
        return {i: name for i, name in named if name is not None}

    def _take_forward_of(self, backward: TextGraph) -> _ForwardRun | None:
        """The latest forward run whose inputs match this backward graph's outputs; the two share names."""
        for position in range(len(self._forward_runs) - 1, -1, -1):
            graph = self._forward_runs[position].graph
            if len(graph.placeholders) == len(backward.outputs) and _agree(graph, backward):
                return self._forward_runs.pop(position)
        return None


def _is_in_doubt(entry: Entry, in_doubt: frozenset[str] | None) -> bool:
    return in_doubt is None or entry.module_fqn in in_doubt


def _agree(forward: TextGraph, backward: TextGraph) -> bool:
    for name, spec in backward.placeholders.items():
        known = forward.spec_of(name)
        if known is not None and spec is not None and not isinstance(spec, str) and known.shape != spec.shape:
            return False
    return True


def reads_gradients(inputs: Sequence[Any]) -> bool:
    """Whether a parameter and its gradient are both among a graph's inputs: an optimizer's step, and no forward."""
    parameters = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad]
    gradients = {id(p.grad) for p in parameters if p.grad is not None}
    return any(id(x) in gradients for x in inputs)


def _entry(product: CompiledProduct, module_fqn: str, site: RunSite, is_backward: bool) -> Entry:
    phase = site.phase
    if is_backward or site.root_gradients:
        phase = Phase.RECOMPUTE if product.is_recomputed else Phase.BACKWARD
    return Entry(
        op=product.op,
        phase=phase,
        module_fqn=module_fqn,
        precision=product.precision,
        shapes=product.shapes,
        cost=product.cost,
        bytes_accessed=product.bytes_accessed,
        without_grad=site.without_grad,
        is_mode_unsure=site.is_mode_unsure,
    )
