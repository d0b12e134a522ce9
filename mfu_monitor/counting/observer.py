"""Prices every operator that ran: its phase, its module, its formula."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mfu_monitor.counting.autograd_links import ForwardLink, SequenceLinks
from mfu_monitor.counting.calls import Call, Operator
from mfu_monitor.counting.compiled.graph import TextGraph
from mfu_monitor.counting.compiled.runs import CompiledCounter, RunSite, reads_gradients
from mfu_monitor.counting.compiled.watch import CompiledGraphWatch, guards_notice_modes, unavailable_reason
from mfu_monitor.counting.coverage import ParameterCoverage
from mfu_monitor.counting.custom_functions import DroppedGradients, FunctionRepeats
from mfu_monitor.counting.eager_attention import MathAttention, Product, split_by_attended
from mfu_monitor.counting.fingerprints import Marks, StepPrints
from mfu_monitor.counting.frames import CallSite, StackReader, is_called_from
from mfu_monitor.counting.gradient_flow import GradientFlow
from mfu_monitor.counting.hidden_work import HiddenWork
from mfu_monitor.counting.ledger import NO_FLOPS, Entry, Ledger
from mfu_monitor.counting.module_names import ModuleNames
from mfu_monitor.counting.opaque_modules import BackwardPasses, OpaqueModules, gradients_wanted
from mfu_monitor.counting.phase import GradModeMemory, phase_of
from mfu_monitor.counting.step_record import Phase, StepRecord
from mfu_monitor.errors import UncountedWorkWarning, must_pass, text_of, warn
from mfu_monitor.formulas.cost import UncountableCallError
from mfu_monitor.formulas.registry import (
    Formula,
    FormulaError,
    bind_call,
    find_module_formula,
)
from mfu_monitor.hardware.precision import matmul_precision
from mfu_monitor.internals.autograd_state import running_node, running_pass, variable_of
from mfu_monitor.internals.facts import unguarded
from mfu_monitor.internals.tensors import is_fake, tensors_in

__all__ = ["StepObserver"]

MATH_PRODUCTS = frozenset({"aten::bmm", "aten::mm", "aten::baddbmm"})
"""What the math path of attention is made of."""
_PLAIN = frozenset({torch.Tensor, nn.Parameter, type(None)})
"""Types that are no fake tensors."""
_PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})
COMPILED_DEPTH = 5
COUNTED_IN_EAGER = (
    "with torch before 2.10 a counted step of a compiled model runs in eager so that its compiled code stays as it is; "
    "the compiler's own recomputation is not in hardware_flops"
)
MODEL_IN_OPTIMIZER = (
    "a module ran inside Optimizer.step outside of the closure given to it, and is counted as optimizer work; where "
    "that is the model's own forward and backward, pass it as optimizer.step(closure)"
)
UNANNOUNCED = (
    "compiled code ran that CompiledFxGraph.__call__ did not announce; only its calls to library kernels are counted"
)
_FAILED_FORMULAS: list[Any] = []
COMPILED_GRAPH = "inductor::graph"
OBSERVER_DEPTH = 3
"""Frames of ours between whoever calls and the walk up the stack."""
DISPATCH_DEPTH = 4
"""The same below the dispatcher."""


@dataclass(slots=True)
class _Place:
    """Modules whose ``forward`` is on the stack, the innermost first."""

    modules: list[nn.Module]
    """Kept, so that their numbers are given to no others."""
    fqn: str
    is_opaque: bool
    ran: bool = False
    """In forward."""


_NOWHERE = _Place([], "", is_opaque=False)


class StepObserver:
    """Turns the operators of one step into a record.

    Args:
        model: names modules, finds opaque ones, and says which parameters were covered; optional.
        count_no_grad_as_model: in a training step, forwards without gradient are model work.
        fingerprints: also take those of what products ran on.
    """

    def __init__(
        self, model: nn.Module | None = None, *, count_no_grad_as_model: bool = False, fingerprints: bool = False
    ) -> None:
        self.ledger = Ledger()
        self._marks = Marks() if fingerprints else None
        self.opaque = OpaqueModules(model, self._saw_opaque_module, self.failed)
        self.opaque_backward = BackwardPasses(self.failed)
        self._count_no_grad_as_model = count_no_grad_as_model
        self._names = ModuleNames(model)
        self._places: dict[tuple[int, ...], _Place] = {}
        self._links = SequenceLinks()
        self._math_attention = MathAttention(self.ledger.note)
        self._coverage = ParameterCoverage(model)
        self._storages = self._coverage.storages
        self._grad_mode = GradModeMemory()
        self._stack = StackReader()
        self._functions = FunctionRepeats(self._storages, self._stack)
        self._dropped = DroppedGradients(self._storages)
        self._gradients = GradientFlow(self._storages)
        self._hidden = HiddenWork(model, self._storages)
        self._running_node = unguarded(running_node)
        self._running_pass = unguarded(running_pass)
        self._compiled = CompiledCounter(self.ledger, self._coverage.module_of, model)
        self.compiled_graphs = CompiledGraphWatch(
            self._saw_compiled_run, self._saw_compiled_end, self._saw_unreadable_graph, self.failed
        )
        self._is_interrupted = False
        self.fault: Exception | None = None
        """What failed of ours: the phases and owners of all that ran after it may be wrong, so nothing is known."""

    def record(self) -> StepRecord:
        """Everything seen so far; no operator at all after a fault of ours or an interruption within our work."""
        if self.fault is not None or self._is_interrupted:
            return StepRecord(notes=tuple(self.ledger.notes), is_training=self.ledger.saw_backward, incomplete=True)
        self._dropped.settle()
        for note in self._hidden.notes():
            self.ledger.incomplete = True
            self.ledger.note(note)
        return self.ledger.close(
            count_no_grad_as_model=self._count_no_grad_as_model, uncovered=self._coverage.uncovered()
        )

    def prints(self) -> StepPrints | None:
        """Fingerprints of the model work seen, for other ranks to compare; None where none were taken."""
        if self._marks is None or self.fault is not None:
            return None
        calls = self.ledger.model_marks(count_no_grad_as_model=self._count_no_grad_as_model)
        try:
            return StepPrints(calls, self._marks.settle())
        except Exception as error:  # no memory for a few sums: what others repeat stays unknown
            if must_pass(error):
                raise
            return None

    def release(self) -> None:
        """The step has ended: hold nothing of its stack."""
        self._stack.release()

    def missed_operators(self, why: str) -> None:
        """Some operators of the step were not shown: the record is a lower bound."""
        self.ledger.incomplete = True
        self.ledger.note(why)

    def saw(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """One operator ran."""
        if self.fault is not None or self._is_interrupted:
            return
        if self.compiled_graphs.is_inside_known_graph:
            self._compiled.saw_kernel(operator.func, args, kwargs, output)
            return
        if operator.is_view and args and self._saw_plain_view(args[0]):
            return
        call = Call(operator, args, kwargs, output, self._storages)
        if not _is_rehearsal(call):
            self._saw(call)

    def failed(self, fault: BaseException) -> None:
        """A failure of ours makes the record unknown, and a formula's leaves its work out; neither reaches the user.

        Raises:
            Exception: the fault itself, where it is the user's (``must_pass``).
        """
        if must_pass(fault):
            self._is_interrupted = True
            raise fault
        assert isinstance(fault, Exception)
        if isinstance(fault, FormulaError):
            self._note_formula(fault)
            return
        trace = _text_of_trace(fault)
        fault.add_note(trace)
        self.fault = fault.with_traceback(None)  # its frames hold activations
        self.ledger.note(f"counting failed, so nothing is known of this step:\n{trace}")

    def _saw_plain_view(self, tensor: Any) -> bool:
        """A view ran; True where nothing follows of it: of storage that is known, with nothing under way.

        It shares that storage, so that all that is known of it holds for the view too.
        """
        known = self._storages.known(tensor) if type(tensor) in _PLAIN_TENSORS else None
        if known is None or not known.is_known or self._hidden.has_rooms:
            return False
        if self._grad_mode.awaits_outcome or self._dropped.follows_any:
            return False
        if self._running_pass() != -1:
            self._note_backward()
        else:
            self._hidden.saw_use(tensor)
        return True

    def _saw(self, call: Call) -> None:
        operator = call.operator
        if self._grad_mode.awaits_outcome:
            self._grad_mode.settle(call.outputs)
        in_backward = self._running_pass() != -1
        if in_backward:
            call.node = self._note_backward()
        self._hidden.saw(call)
        self._dropped.saw(call.taken, call.given, call.node)
        if operator.is_view:
            return
        site = self._stack.read(DISPATCH_DEPTH, in_backward=in_backward)
        place = self._place_of(site.modules, in_backward=in_backward) if site.modules else _NOWHERE
        if site.in_compiled_call or site.in_generated_code or site.model_in_optimizer or site.in_rehearsal:
            self._note_site(site)
        repeats = self._functions.saw(call, site)
        is_void = self._gradients.is_with_zero_tangent(call)
        updates = self._gradients.updates(call, site, in_backward=in_backward)
        if site.in_hook:
            repeats = self._gradients.repeats_module(call, site)
        phase = phase_of(site, in_backward=in_backward, repeats_forward=repeats, updates=updates)
        forward = self._links.of_node(call.node) if in_backward else None
        is_opaque = place.is_opaque or (forward is not None and forward.is_opaque)
        module_fqn = place.fqn if site.modules else _fqn_of(forward, phase)
        without_grad = not in_backward and not self._grad_mode.is_grad_on(site)
        if (site.function_forwards or site.in_custom_backward) and not is_opaque:
            self._hidden.saw_room(call, site)
        if phase is not Phase.OPTIMIZER and not without_grad:
            self._coverage.saw(call)
        if operator.formula is None or is_opaque:
            if self._links.wants_link():
                self._links.add(self._link(operator.name, site, module_fqn, is_opaque=is_opaque))
            self._saw_quiet(call, phase, module_fqn, without_grad=without_grad, is_opaque=is_opaque)
            return
        link = self._links.add(self._link(operator.name, site, module_fqn, is_opaque=is_opaque))
        entry = Entry(
            op=operator.name,
            phase=phase,
            module_fqn=module_fqn,
            precision=None,
            shapes=tuple(map(tuple, call.shapes())),
            cost=NO_FLOPS,
            bytes_accessed=call.moved_bytes(),
            without_grad=without_grad,
        )
        if not self._price(entry, operator.formula, call):
            self._saw_quiet(call, phase, module_fqn, without_grad=without_grad, is_opaque=False, is_counted=False)
            return
        if self._marks is not None and phase in (Phase.FORWARD, Phase.BACKWARD):
            entry.mark = self._marks.mark(call.operands)
        again = self._functions.does_equal_work(call, site, entry.cost.flops, has_equal_operand=repeats)
        if site.in_custom_backward and not site.in_hook:
            entry.phase = phase_of(site, in_backward=in_backward, repeats_forward=again, updates=updates)
            self._dropped.add(entry, call)
        elif is_void and phase in (Phase.FORWARD, Phase.BACKWARD):
            entry.phase = Phase.OTHER
        self._saw_product(entry, link, forward, call)
        if not in_backward:
            self._note_grad_mode(site, entry, call.outputs)

    def _note_grad_mode(self, site: CallSite, entry: Entry, outputs: Sequence[torch.Tensor]) -> None:
        self._grad_mode.await_outcome(site, entry, outputs)
        if site.in_compiled_call and site.function_forwards:
            # A graph of AOT's that runs operator by operator: it has the grad mode of its call throughout.
            entry.is_mode_unsure |= self._compiled.has_switches()

    def _place_of(self, modules: list[nn.Module], *, in_backward: bool) -> _Place:
        """Where the modules on the stack lie in the model; worked out once for each stack."""
        key = tuple(map(id, modules))
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(modules, self._names.name_of(modules), self.opaque.covers(modules))
            if (unhooked := self.opaque.unhooked(modules)) is not None:
                self._note_unhooked(unhooked)
        if not (in_backward or place.ran):
            place.ran = True
            self._gradients.saw_modules(modules)
        return place

    def _note_site(self, site: CallSite) -> None:
        """Say what the call's surroundings mean for the record's limits."""
        if site.in_compiled_call and guards_notice_modes():
            self.ledger.incomplete = True
            self.ledger.note(COUNTED_IN_EAGER)
        elif site.in_compiled_call and self.compiled_graphs.is_blind:
            self._saw_unreadable_graph(unavailable_reason() or "nothing shows which graph runs")
        elif site.in_generated_code:
            self._compiled.contradict(UNANNOUNCED)
        if site.model_in_optimizer:
            self.ledger.incomplete = True
            self.ledger.note(MODEL_IN_OPTIMIZER)
        if site.in_rehearsal:
            self.ledger.is_first_of_pipeline = True

    def _price(self, entry: Entry, found: Formula, call: Call) -> bool:
        """Put the formula's answer into the entry; False where the formula says that this call cannot be counted."""
        try:
            entry.cost = found(bind_call(call.operator.func, call.args, call.kwargs, call.output))
        except UncountableCallError as reason:
            self.ledger.note(f"{entry.op} ran and is not counted: {reason}")
            return False
        if entry.cost.note is not None:
            self.ledger.note(entry.cost.note)
        entry.precision = entry.cost.precision or _precision(entry.op, call.operands)
        return True

    def _saw_compiled_run(self, graph: TextGraph, inputs: Sequence[Any], is_backward: bool | None) -> None:
        self._compiled.saw_start()
        try:
            self._count_compiled_run(graph, inputs, is_backward=bool(is_backward))
        except Exception as fault:  # the text of a graph may hold anything; training must go on
            if must_pass(fault):
                raise
            self.ledger.incomplete = True
            self.ledger.note(f"a compiled graph could not be counted:\n{traceback.format_exc(limit=4)}")

    def _count_compiled_run(self, graph: TextGraph, inputs: Sequence[Any], *, is_backward: bool) -> None:
        in_backward = self._running_pass() != -1 or is_backward
        self.ledger.saw_backward |= in_backward
        site = self._stack.read(COMPILED_DEPTH, in_backward=in_backward)
        forward = self._links.of_node(running_node()) if in_backward else None
        phase = phase_of(site, in_backward=in_backward, repeats_forward=False)
        place = self._place_of(site.modules, in_backward=True) if site.modules else _NOWHERE
        module_fqn = place.fqn if site.modules else _fqn_of(forward, phase)
        is_opaque = place.is_opaque or (forward is not None and forward.is_opaque)
        self._links.add(self._link(COMPILED_GRAPH, site, module_fqn, is_opaque=is_opaque))
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if phase is not Phase.OPTIMIZER:
            self._coverage.touch(tensors)
        self._dropped.saw(self._storages.of_all(tensors), ())
        if site.in_compiled_autograd:
            self._hidden.saw_compiled_backward(inputs)
        if is_opaque:
            return
        without_grad = not in_backward and not self._grad_mode.is_grad_on(site)
        if not in_backward and not torch.is_grad_enabled() and reads_gradients(inputs):
            phase = Phase.OPTIMIZER  # compiled as a whole: no frame of the optimizer is on the stack
        root_gradients = self._compiled.root_gradients(site) if not is_backward else 0
        run_site = RunSite(
            phase,
            module_fqn,
            without_grad,
            in_backward,
            root_gradients,
            is_mode_unsure=without_grad and self._grad_mode.is_unsure,
        )
        self._compiled.saw_run(graph, inputs, is_backward=is_backward, site=run_site)

    def _saw_compiled_end(self) -> None:
        if self.fault is not None or self._is_interrupted:
            return  # nothing is known of the step, so that nothing is held against its text
        try:
            self._compiled.saw_end()
        except Exception as fault:  # training must go on
            if must_pass(fault):
                raise
            self.missed_operators(f"a compiled graph could not be checked:\n{traceback.format_exc(limit=4)}")

    def _saw_unreadable_graph(self, reason: str) -> None:
        self.ledger.incomplete = True
        self.ledger.note(
            f"a compiled graph could not be read ({reason}); only its calls to library kernels are counted, and the "
            "compiler's own recomputation cannot be distinguished from gradients"
        )

    def _note_formula(self, error: FormulaError) -> None:
        """A formula of the user's gave no number: its work is left out, and a warning names it once a process."""
        self.ledger.incomplete = True
        self.ledger.note(text_of(error))
        if error.what not in _FAILED_FORMULAS:
            _FAILED_FORMULAS.append(error.what)
            warn(f"{text_of(error)} Its work is left out, so the count is a lower bound.", UncountedWorkWarning)

    def _note_unhooked(self, module: nn.Module) -> None:
        self.ledger.incomplete = True
        self.ledger.note(
            f"{type(module).__name__} has a formula for its hidden work, but it is not part of the counted model, "
            "so the formula was not asked. Give the counter the model that holds it: FlopCounter(model)"
        )

    def _note_backward(self) -> Any:
        """An operator ran in backward; gives the engine's node."""
        self.ledger.saw_backward = True
        node = self._running_node()
        if (variable := variable_of(node)) is not None:
            self._coverage.saw_gradient(variable)
            self._gradients.saw_accumulation(variable)
            self._hidden.saw_accumulation(variable)
        self._functions.enter(node)
        return node

    def _link(self, op: str, site: CallSite, module_fqn: str, *, is_opaque: bool) -> ForwardLink:
        """Which module the call belongs to, to be remembered under the node that it makes."""
        outside = site.outside_checkpoint()
        outer_fqn = None if outside is None else self._names.name_of(outside)
        return ForwardLink(op=op, module_fqn=module_fqn, outer_module_fqn=outer_fqn, is_opaque=is_opaque)

    def _saw_quiet(
        self,
        call: Call,
        phase: Phase,
        module_fqn: str,
        *,
        without_grad: bool,
        is_opaque: bool,
        is_counted: bool = True,
    ) -> None:
        """An operator without FLOPs ran, or one whose FLOPs are not known (``is_counted`` is False)."""
        operator, shapes = call.operator, call.shapes()
        is_known = is_opaque or (is_counted and operator.is_ignored)
        if not is_known and any(_may_be_multiplied(t) for t in (*call.operands, *call.outputs)):
            self.ledger.add_unsupported(operator.name, module_fqn, phase, shapes)
        if operator.is_followed:
            self._math_attention.saw_other(call)
        moved = call.moved_bytes()
        self.ledger.add_quiet(operator.name, phase, module_fqn, shapes, moved, without_grad=without_grad)

    def _saw_product(self, entry: Entry, link: ForwardLink, forward: ForwardLink | None, call: Call) -> None:
        self.ledger.add_product(entry)
        if entry.op not in MATH_PRODUCTS:
            if call.operator.is_followed:
                self._math_attention.saw_other(call)
        elif entry.phase is Phase.BACKWARD:
            if forward is not None and forward.attended is not None:
                link.attended = forward.attended
                entry.cost = split_by_attended(entry.cost, forward.attended)
        else:
            self._math_attention.saw_product(Product(entry, link), call)

    def _saw_opaque_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._hidden.cover(tensors_in(output))
        try:
            self._price_opaque_forward(module, args, kwargs, output)
        except FormulaError as error:
            self._note_formula(error)
        except Exception as fault:  # a user's formula may raise anything
            if must_pass(fault):
                raise
            self.ledger.incomplete = True
            self.ledger.note(
                f"the formula of {type(module).__name__} failed; its work is left out:\n{traceback.format_exc(limit=4)}"
            )

    def _price_opaque_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        in_backward = self._running_pass() != -1
        site = self._stack.read(OBSERVER_DEPTH, in_backward=in_backward)
        inputs = tensors_in(args, kwargs)
        around = [m for m in site.modules if m is not module]
        if self.opaque.covers(around):
            return  # part of a module that is counted as a whole
        module_formula = find_module_formula(module)
        assert module_formula is not None
        entry = Entry(
            op=f"module::{type(module).__name__}",
            phase=phase_of(site, in_backward=in_backward, repeats_forward=False),
            module_fqn=self._names.name_of([module, *around]),
            precision=_precision("", [t for t in (*inputs, *tensors_in(output)) if t.is_floating_point()]),
            shapes=tuple(tuple(t.shape) for t in inputs),
            cost=NO_FLOPS,
            bytes_accessed=sum(t.nbytes for t in (*inputs, *module.parameters(), *tensors_in(output))),
            without_grad=not in_backward and not self._grad_mode.is_grad_on(site),
        )
        self._coverage.cover(module)
        try:
            entry.cost = module_formula(module, *[x.shape for x in inputs], out_shape=_first_shape(output))
        except UncountableCallError as reason:
            self.ledger.note(f"{entry.module_fqn} ran and is not counted: {reason}")
            self.ledger.add_unsupported(entry.op, entry.module_fqn, entry.phase, entry.shapes)
            return
        self.ledger.add_product(entry)
        products = gradients_wanted(module, inputs, input_factor=module_formula.input_gradient_factor)
        self.opaque_backward.watch(tensors_in(output), partial(self._price_opaque_backward, entry, products))

    def _price_opaque_backward(self, forward: Entry, gradients: int) -> None:
        self.ledger.saw_backward = True
        for _ in range(gradients):
            self.ledger.add_product(replace(forward, phase=Phase.BACKWARD, without_grad=False))


def _text_of_trace(fault: Exception) -> str:
    try:
        return "".join(traceback.format_exception(fault, limit=4))
    except Exception as failure:  # an exception whose own text cannot be made
        if must_pass(failure):
            raise
        return type(fault).__name__


def _fqn_of(forward: ForwardLink | None, phase: Phase) -> str:
    """The module of a gradient: that of its forward."""
    if forward is None:
        return ""
    if phase is Phase.RECOMPUTE and forward.outer_module_fqn is not None:
        return forward.outer_module_fqn
    return forward.module_fqn


def _first_shape(output: Any) -> Any:
    return next((t.shape for t in tensors_in(output)), None)


def _is_rehearsal(call: Call) -> bool:
    """DTensor runs an operator on fake tensors of the global shape once, to learn how its result is laid out."""
    taken, given = call.operands[0] if call.operands else None, call.outputs[0] if call.outputs else None
    if type(taken) in _PLAIN and type(given) in _PLAIN:
        return False
    are_fake = any(type(t) not in _PLAIN and is_fake(t) for t in (taken, given))
    return are_fake and is_called_from("_sharding_prop.py", depth=OBSERVER_DEPTH)


def _precision(name: str, operands: list[torch.Tensor]) -> str | None:
    for tensor in operands:
        return matmul_precision(tensor.dtype, tensor.device.type, is_convolution="conv" in name)
    return None


def _may_be_multiplied(tensor: torch.Tensor) -> bool:
    """Floating, or a matrix of 8-bit integers as quantised products take; other integers are indices and counts."""
    is_quantised = tensor.dtype in (torch.int8, torch.uint8) and tensor.dim() >= 2
    return is_quantised or tensor.is_floating_point() or tensor.is_complex()
