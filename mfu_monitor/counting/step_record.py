"""What one step ran: frozen records, in FLOPs and bytes. One multiply-add is 2 FLOPs.

A record holds plain numbers, strings and tuples only, so it can be written as JSON and read back, and every later stage
can be replayed from it without a model or a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from mfu_monitor.counting.plain_types import PlainTypes
from mfu_monitor.hardware.precision import active_precision

__all__ = ["FlopTotals", "OpRecord", "Phase", "StepRecord", "UncoveredParameter", "UnsupportedOp"]


class Phase(StrEnum):
    """The part of a step in which an operator ran."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """A forward run again in backward: activation checkpointing of any kind, the compiler's own included."""
    OPTIMIZER = "optimizer"
    OTHER = "other"
    """Forwards without gradient inside a training step: a teacher, a target network."""

    __hash__ = str.__hash__
    """Equal to its text, so that it is found by it; an enum's own hash is Python code, asked at every operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopTotals:
    """FLOPs by what they were for, and the ideal bytes they moved; totals of any group of operators.

    ``hardware_flops = model + recompute + kernel_recompute + optimizer + other``, always.
    """

    model_flops: int = 0
    """What the mathematics of forward and backward needs; masked attention by its attended pairs only."""
    recompute_flops: int = 0
    """Forward products run again in backward by activation checkpointing or by the compiler."""
    kernel_recompute_flops: int = 0
    """What a kernel redoes inside itself: the fifth product of flash attention's backward."""
    optimizer_flops: int = 0
    """Products inside the optimizer step (Muon, Shampoo)."""
    other_flops: int = 0
    """Forwards without gradient in a training step, and masked-out products that a dense kernel ran all the same."""
    palm_model_flops: int = 0
    """``model_flops`` by the PaLM convention: every attention call counted as its full square."""
    bytes_accessed: int = 0
    """Each operand read once and each result written once."""
    repeated_flops: int = 0
    """The part of ``other_flops`` that is model work which other ranks did as well, and report."""

    @property
    def hardware_flops(self) -> int:
        """Everything that was executed."""
        return (
            self.model_flops
            + self.recompute_flops
            + self.kernel_recompute_flops
            + self.optimizer_flops
            + self.other_flops
        )

    def __add__(self, other: FlopTotals) -> FlopTotals:
        return FlopTotals(**{name: getattr(self, name) + getattr(other, name) for name in _TOTAL_FIELDS})

    def __mul__(self, factor: int) -> FlopTotals:
        return FlopTotals(**{name: getattr(self, name) * factor for name in _TOTAL_FIELDS})

    def as_dict(self) -> dict[str, int]:
        """The fields and ``hardware_flops`` as plain integers."""
        return {**{name: getattr(self, name) for name in _TOTAL_FIELDS}, "hardware_flops": self.hardware_flops}


_TOTAL_FIELDS = tuple(f.name for f in dataclasses.fields(FlopTotals))


def _sum_totals(parts: Iterable[FlopTotals]) -> FlopTotals:
    sums = dict.fromkeys(_TOTAL_FIELDS, 0)
    for part in parts:
        for name in _TOTAL_FIELDS:
            sums[name] += getattr(part, name)
    return FlopTotals(**sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """All calls of one operator with the same shapes, phase, module and precision; numbers are totals over ``calls``"""

    op: str
    """Qualified name without overload: ``"aten::mm"``."""
    phase: Phase
    module_fqn: str = ""
    """The module that made it, by its name in the root; a backward product belongs to the module of its forward."""
    precision: str | None = None
    """``"fp64" "fp32" "tf32" "fp16" "bf16" "fp8" "fp4" "int8"``; None where nothing floating was computed."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensor operands, in order (local shards under tensor parallelism)."""
    calls: int = 1
    totals: FlopTotals = field(default_factory=FlopTotals)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedOp:
    """An operator on floating tensors that ran and has no formula."""

    op: str
    module_fqn: str = ""
    phase: Phase = Phase.FORWARD
    calls: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UncoveredParameter:
    """A parameter that got a gradient in the step while no operator we saw touched it."""

    name: str
    numel: int
    share_of_parameters: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(PlainTypes):
    """What one counted step ran on this rank.

    Example:
        >>> with mm.FlopCounter(model) as counter:
        ...     model(x).sum().backward()
        >>> counter.record.model_flops, counter.record.by_phase()["backward"].model_flops
    """

    ops: tuple[OpRecord, ...] = ()
    unsupported_ops: tuple[UnsupportedOp, ...] = ()
    uncovered_parameters: tuple[UncoveredParameter, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader should know: assumptions made, sources that could not be seen."""
    is_training: bool = False
    """True when a backward pass ran in the region."""
    incomplete: bool = False
    """True when something is known to be missing beside ``unsupported_ops`` (a compiled graph that was not seen)."""
    is_provisional: bool = False
    """True where something ran that later steps leave out: a pipeline learned the shapes between its stages."""
    repeats_known: bool = True
    """False where other ranks may have done some of this work as well, and nobody has compared theirs with it."""
    _sums: dict[str, dict[str, FlopTotals]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Sums that were asked for: a record of a large model has thousands of operators, and each window asks again."""

    @property
    def totals(self) -> FlopTotals:
        """Sum over all operators."""
        if "total" not in self._sums:
            self._sums["total"] = {"": _sum_totals(op.totals for op in self.ops)}
        return self._sums["total"][""]

    @property
    def model_flops(self) -> int:
        """What the mathematics of this step's forward and backward needs."""
        return self.totals.model_flops

    @property
    def hardware_flops(self) -> int:
        """Everything executed."""
        return self.totals.hardware_flops

    @property
    def recompute_flops(self) -> int:
        """Forward products run again in backward."""
        return self.totals.recompute_flops

    @property
    def kernel_recompute_flops(self) -> int:
        """What kernels redo inside themselves."""
        return self.totals.kernel_recompute_flops

    @property
    def optimizer_flops(self) -> int:
        """Products inside the optimizer step."""
        return self.totals.optimizer_flops

    @property
    def other_flops(self) -> int:
        """Forwards without gradient in a training step, and masked-out products."""
        return self.totals.other_flops

    @property
    def repeated_flops(self) -> int:
        """The part of ``other_flops`` that is model work which other ranks report."""
        return self.totals.repeated_flops

    @property
    def palm_model_flops(self) -> int:
        """``model_flops`` with every attention call counted as its full square."""
        return self.totals.palm_model_flops

    @property
    def bytes_accessed(self) -> int:
        """Ideal bytes: each operand read once, each result written once."""
        return self.totals.bytes_accessed

    @property
    def active_precision(self) -> str | None:
        """The precision that carries the most model FLOPs, of hardware FLOPs where nothing is model; None without."""
        totals = self.by_dtype()
        model = active_precision({name: t.model_flops for name, t in totals.items()})
        return model or active_precision({name: t.hardware_flops for name, t in totals.items()})

    @property
    def is_lower_bound(self) -> bool:
        """True when something ran that could not be counted."""
        return bool(self.unsupported_ops or self.uncovered_parameters or self.incomplete)

    def by_phase(self) -> dict[str, FlopTotals]:
        """Totals by phase: ``"forward"``, ``"backward"``, ``"recompute"``, ``"optimizer"``, ``"other"``."""
        if "phase" not in self._sums:
            self._sums["phase"] = self._group(lambda op: op.phase.value)
        return dict(self._sums["phase"])

    def by_op(self) -> dict[str, FlopTotals]:
        """Totals by operator: ``"aten::mm"``."""
        return self._group(lambda op: op.op)

    def by_dtype(self) -> dict[str, FlopTotals]:
        """Totals by precision of the products: ``"bf16"``; operators without products are left out."""
        return self._group(lambda op: op.precision if op.totals.hardware_flops else None)

    def by_module(self, *, inclusive: bool = True) -> dict[str, FlopTotals]:
        """Totals by module name; ``""`` is the root.

        Args:
            inclusive: a module contains its descendants, so ``""`` is the total (default); else only what ran in the
                module itself, and the values add up to the total.
        """
        own = self._group(lambda op: op.module_fqn)
        if not inclusive:
            return own
        parts: dict[str, list[FlopTotals]] = {"": []}
        for name, totals in own.items():
            for ancestor in _self_and_ancestors(name):
                parts.setdefault(ancestor, []).append(totals)
        return {name: _sum_totals(parts[name]) for name in sorted(parts)}

    def _group(self, key: Callable[[OpRecord], str | None]) -> dict[str, FlopTotals]:
        parts: dict[str, list[FlopTotals]] = {}
        for op in self.ops:
            if (name := key(op)) is not None:
                parts.setdefault(name, []).append(op.totals)
        return {name: _sum_totals(group) for name, group in parts.items()}


def _self_and_ancestors(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
