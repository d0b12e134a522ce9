"""Prices every operator that ran: its phase, its module, its formula."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mfu_monitor.counting.autograd_links import ForwardLink, SequenceLinks
from mfu_monitor.counting.compiled.graph import TextGraph
from mfu_monitor.counting.compiled.runs import CompiledCounter, RunSite, reads_gradients
from mfu_monitor.counting.compiled.watch import CompiledGraphWatch, guards_notice_modes, unavailable_reason
from mfu_monitor.counting.coverage import ParameterCoverage
from mfu_monitor.counting.custom_functions import DroppedGradients, FunctionRepeats
from mfu_monitor.counting.eager_attention import MathAttention, Product, split_by_attended
from mfu_monitor.counting.fingerprints import Marks, StepPrints
from mfu_monitor.counting.frames import CallSite, is_called_from, read_call_site
from mfu_monitor.counting.gradient_flow import GradientFlow
from mfu_monitor.counting.hidden_work import HiddenWork
from mfu_monitor.counting.ledger import Entry, Ledger
from mfu_monitor.counting.module_names import ModuleNames
from mfu_monitor.counting.opaque_modules import BackwardPasses, OpaqueModules, gradients_wanted
from mfu_monitor.counting.phase import GradModeMemory, backward_is_running, phase_of
from mfu_monitor.counting.step_record import Phase, StepRecord
from mfu_monitor.errors import UncountedWorkWarning, must_pass, text_of, warn
from mfu_monitor.formulas.cost import OpCost, OperatorCall, UncountableCallError
from mfu_monitor.formulas.nested import is_strided_nested
from mfu_monitor.formulas.registry import (
    Formula,
    FormulaError,
    bind_call,
    find_formula,
    find_module_formula,
    is_ignored,
    operator_name,
)
from mfu_monitor.formulas.traffic import bytes_accessed
from mfu_monitor.hardware.precision import matmul_precision
from mfu_monitor.internals.autograd_state import running_node
from mfu_monitor.internals.tensors import is_fake, tensors_in

__all__ = ["StepObserver"]

MATH_PRODUCTS = frozenset({"aten::bmm", "aten::mm", "aten::baddbmm"})
"""What the math path of attention is made of."""
_PLAIN = (torch.Tensor, nn.Parameter)
"""Types that are no fake tensors."""
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
OBSERVER_DEPTH = 3
"""Frames of ours between the dispatcher and the walk up the stack."""


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
        self._links = SequenceLinks()
        self._math_attention = MathAttention(self.ledger.note)
        self._coverage = ParameterCoverage(model)
        self._grad_mode = GradModeMemory()
        self._functions = FunctionRepeats()
        self._dropped = DroppedGradients()
        self._gradients = GradientFlow()
        self._hidden = HiddenWork(model)
        self._compiled = CompiledCounter(self.ledger, self._coverage.module_of)
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

    def missed_operators(self, why: str) -> None:
        """Some operators of the step were not shown: the record is a lower bound."""
        self.ledger.incomplete = True
        self.ledger.note(why)

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """One operator ran."""
        if self.fault is not None or self._is_interrupted:
            return
        if self.compiled_graphs.is_inside_known_graph:
            self._compiled.saw_kernel(func, args, kwargs, output)
        else:
            self._saw(func, args, kwargs, output)

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

    def _saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = operator_name(func)
        operands, outputs = tensors_in(args, kwargs), tensors_in(output)
        if _is_rehearsal(operands, outputs):
            return
        self._grad_mode.settle(outputs)
        in_backward = backward_is_running()
        node = running_node() if in_backward else None
        if in_backward:
            self._note_backward(node)
        self._hidden.saw(func, operands, outputs, node)
        self._dropped.saw(operands, outputs, node)
        self._functions.enter(node)
        if _is_view(func):
            return
        site = read_call_site(OBSERVER_DEPTH, in_backward=in_backward)
        self._note_site(site)
        repeats = self._functions.saw(name, site, operands, outputs)
        is_void = self._gradients.is_with_zero_tangent(name, operands, outputs)
        updates = self._gradients.updates(site, operands, outputs, in_backward=in_backward)
        if site.in_hook:
            repeats = self._gradients.repeats_module(site, operands)
        phase = phase_of(site, in_backward=in_backward, repeats_forward=repeats, updates=updates)
        forward = self._links.of_current_node() if in_backward else None
        link = self._link(name, site, forward, phase)
        entry = Entry(
            op=name,
            phase=phase,
            module_fqn=link.module_fqn,
            precision=None,
            shapes=tuple(_shape(t) for t in operands),
            cost=OpCost(0),
            bytes_accessed=bytes_accessed(func, args, kwargs, output),
            without_grad=not in_backward and not self._grad_mode.is_grad_on(site),
        )
        if (site.function_forwards or site.in_custom_backward) and not link.is_opaque:
            self._hidden.saw_room(name, site, outputs, node)
        found = find_formula(name)
        if phase is not Phase.OPTIMIZER and not entry.without_grad:
            self._coverage.saw(name, operands, outputs, is_product=found is not None)
        if found is None or link.is_opaque:
            self._saw_quiet(entry, args, operands, outputs, is_known=link.is_opaque or is_ignored(name))
        elif self._price(entry, found, bind_call(func, args, kwargs, output), operands):
            if self._marks is not None and phase in (Phase.FORWARD, Phase.BACKWARD):
                entry.mark = self._marks.mark(operands)
            again = self._functions.does_equal_work(
                site, entry.cost.flops, operands, outputs, has_equal_operand=repeats
            )
            if site.in_custom_backward and not site.in_hook:
                entry.phase = phase_of(site, in_backward=in_backward, repeats_forward=again, updates=updates)
                self._dropped.add(entry, node, outputs)
            elif is_void and phase in (Phase.FORWARD, Phase.BACKWARD):
                entry.phase = Phase.OTHER
            self._saw_product(entry, link, forward, operands, outputs)
            if not in_backward:
                self._grad_mode.await_outcome(site, entry, outputs)
        else:
            self._saw_quiet(entry, args, operands, outputs, is_known=False)

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
        if (unhooked := self.opaque.unhooked(site.modules)) is not None:
            self._note_unhooked(unhooked)

    def _price(self, entry: Entry, found: Formula, call: OperatorCall, operands: list[torch.Tensor]) -> bool:
        """Put the formula's answer into the entry; False where the formula says that this call cannot be counted."""
        try:
            entry.cost = found(call)
        except UncountableCallError as reason:
            self.ledger.note(f"{entry.op} ran and is not counted: {reason}")
            return False
        if entry.cost.note is not None:
            self.ledger.note(entry.cost.note)
        entry.precision = entry.cost.precision or _precision(entry.op, operands)
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
        in_backward = backward_is_running() or is_backward
        self.ledger.saw_backward |= in_backward
        site = read_call_site(COMPILED_DEPTH, in_backward=in_backward)
        forward = self._links.of_current_node() if in_backward else None
        phase = phase_of(site, in_backward=in_backward, repeats_forward=False)
        link = self._link("inductor::graph", site, forward, phase)
        if phase is not Phase.OPTIMIZER:
            self._coverage.touch(x for x in inputs if isinstance(x, torch.Tensor))
        self._dropped.saw((x for x in inputs if isinstance(x, torch.Tensor)), ())
        if site.in_compiled_autograd:
            self._hidden.saw_compiled_backward(inputs)
        if link.is_opaque:
            return
        without_grad = not in_backward and not self._grad_mode.is_grad_on(site)
        if without_grad and reads_gradients(inputs):
            phase = Phase.OPTIMIZER  # compiled as a whole: no frame of the optimizer is on the stack
        root_gradients = self._compiled.root_gradients(site) if not is_backward else 0
        run_site = RunSite(phase, link.module_fqn, without_grad, in_backward, root_gradients)
        self._compiled.saw_run(graph, inputs, is_backward=is_backward, site=run_site)

    def _saw_compiled_end(self) -> None:
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

    def _note_backward(self, node: Any) -> None:
        self.ledger.saw_backward = True
        if node is not None:
            self._coverage.saw_gradient(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor):
                self._gradients.saw_accumulation(variable)

    def _link(self, name: str, site: CallSite, forward: ForwardLink | None, phase: Phase) -> ForwardLink:
        """Which module the call belongs to, remembered under the node that it makes."""
        outside = site.outside_checkpoint()
        link = ForwardLink(
            op=name,
            module_fqn=self._module_of(site, forward, phase),
            outer_module_fqn=None if outside is None else self._names.name_of(outside),
            is_opaque=self.opaque.covers(site.modules) or (forward is not None and forward.is_opaque),
        )
        return self._links.add(link)

    def _module_of(self, site: CallSite, forward: ForwardLink | None, phase: Phase) -> str:
        if site.modules:
            return self._names.name_of(site.modules)
        if forward is None:
            return ""
        if phase is Phase.RECOMPUTE and forward.outer_module_fqn is not None:
            return forward.outer_module_fqn
        return forward.module_fqn

    def _saw_quiet(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        operands: list[torch.Tensor],
        outputs: list[torch.Tensor],
        *,
        is_known: bool,
    ) -> None:
        if not is_known and any(_may_be_multiplied(t) for t in (*operands, *outputs)):
            self.ledger.add_unsupported(entry.op, entry.module_fqn, entry.phase, entry.shapes)
        self._math_attention.saw_other(entry.op, operands, outputs, args)
        self.ledger.add_quiet(
            entry.op, entry.phase, entry.module_fqn, entry.shapes, entry.bytes_accessed, without_grad=entry.without_grad
        )

    def _saw_product(
        self,
        entry: Entry,
        link: ForwardLink,
        forward: ForwardLink | None,
        operands: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        self.ledger.add_product(entry)
        if entry.op not in MATH_PRODUCTS:
            self._math_attention.saw_other(entry.op, operands, outputs)
        elif entry.phase is Phase.BACKWARD:
            if forward is not None and forward.attended is not None:
                link.attended = forward.attended
                entry.cost = split_by_attended(entry.cost, forward.attended)
        else:
            self._math_attention.saw_product(Product(entry, link), operands, outputs[0] if outputs else None)

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
        in_backward = backward_is_running()
        site = read_call_site(OBSERVER_DEPTH, in_backward=in_backward)
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
            cost=OpCost(0),
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


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of an operand; a strided nested tensor has none and goes by (sequences, values)."""
    if is_strided_nested(tensor):
        return (int(tensor.size(0)), tensor.numel())
    return tuple(tensor.shape)


def _first_shape(output: Any) -> Any:
    return next((t.shape for t in tensors_in(output)), None)


def _is_rehearsal(operands: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """DTensor runs an operator on fake tensors of the global shape once, to learn how its result is laid out."""
    are_fake = any(type(t) not in _PLAIN and is_fake(t) for t in (*operands[:1], *outputs[:1]))
    return are_fake and is_called_from("_sharding_prop.py", depth=OBSERVER_DEPTH)


def _is_view(func: Any) -> bool:
    return bool(getattr(func, "is_view", False))


def _precision(name: str, operands: list[torch.Tensor]) -> str | None:
    for tensor in operands:
        return matmul_precision(tensor.dtype, tensor.device.type, is_convolution="conv" in name)
    return None


def _may_be_multiplied(tensor: torch.Tensor) -> bool:
    """Floating, or a matrix of 8-bit integers as quantised products take; other integers are indices and counts."""
    is_quantised = tensor.dtype in (torch.int8, torch.uint8) and tensor.dim() >= 2
    return is_quantised or tensor.is_floating_point() or tensor.is_complex()
