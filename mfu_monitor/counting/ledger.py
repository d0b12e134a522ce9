"""What was seen so far, kept small: one entry for each distinct (operator, phase, module, precision, shapes)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord, UncoveredParameter, UnsupportedOp
from mfu_monitor.formulas.cost import OpCost

__all__ = ["NO_FLOPS", "Entry", "Ledger"]

NO_FLOPS = OpCost(0)
Shapes = tuple[tuple[int, ...], ...]
Key = tuple[str, Phase, str, str | None, Shapes]
"""Operator, phase, module, precision, shapes."""


@dataclass(slots=True)
class Entry:
    """One operator call whose price may still change: a product is recognised as attention only at its softmax."""

    op: str
    phase: Phase
    module_fqn: str
    precision: str | None
    shapes: Shapes
    cost: OpCost
    bytes_accessed: int
    without_grad: bool = False
    """Ran with gradients off outside of backward: a teacher in training, the model itself in inference."""
    is_mode_unsure: bool = False
    """Whether gradients were on where the user called it cannot be seen."""
    calls: int = 1
    mark: int | None = None
    """Number of the fingerprint of what it took; None without one."""


MODE_UNSURE = (
    "a custom function or compiled graph ran products in {modules}, and whether gradients were off there (a teacher "
    "under no_grad) or nothing asked for them (a frozen part of the model) cannot be seen, so they are in other_flops. "
    "If all work without gradient is the model's own, count_no_grad_as_model=True makes this exact"
)


@dataclass(slots=True)
class Ledger:
    """Collects entries during a step and closes them into a record."""

    entries: list[Entry] = field(default_factory=list)
    """Products, in the order they ran."""
    quiet: dict[tuple[str, Phase, str, Shapes, bool], Entry] = field(default_factory=dict)
    """Operators without products: only their bytes matter, so they are added up at once."""
    unsupported: dict[tuple[str, str, Phase, Shapes], int] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    saw_backward: bool = False
    incomplete: bool = False
    is_first_of_pipeline: bool = False

    def add_product(self, entry: Entry) -> Entry:
        """Keep one call of an operator that has a formula."""
        self.entries.append(entry)
        return entry

    def add_quiet(
        self, op: str, phase: Phase, module_fqn: str, shapes: Shapes, bytes_accessed: int, *, without_grad: bool
    ) -> None:
        """Keep the bytes of an operator that counts no FLOPs."""
        key = (op, phase, module_fqn, shapes, without_grad)
        entry = self.quiet.get(key)
        if entry is None:
            self.quiet[key] = Entry(op, phase, module_fqn, None, shapes, NO_FLOPS, bytes_accessed, without_grad)
        else:
            entry.calls += 1
            entry.bytes_accessed += bytes_accessed

    def add_unsupported(self, op: str, module_fqn: str, phase: Phase, shapes: Shapes) -> None:
        """Keep an operator on floating tensors that has no formula."""
        key = (op, module_fqn, phase, shapes)
        self.unsupported[key] = self.unsupported.get(key, 0) + 1

    def note(self, text: str) -> None:
        """Say once what a reader of the record should know."""
        self.notes.setdefault(text)

    def close(self, *, count_no_grad_as_model: bool, uncovered: tuple[UncoveredParameter, ...] = ()) -> StepRecord:
        """The record of all that was kept.

        Args:
            count_no_grad_as_model: in a training step, forwards without gradient are model work too.
            uncovered: parameters that no operator touched.
        """
        if self.saw_backward and not count_no_grad_as_model:
            self._settle_unsure_modes()
        merged: dict[Key, tuple[list[int], dict[str, int]]] = {}
        for entry in (*self.entries, *self.quiet.values()):
            phase = self._final_phase(entry, count_no_grad_as_model=count_no_grad_as_model)
            shapes = tuple([tuple(shape) for shape in entry.shapes])
            key = (entry.op, phase, entry.module_fqn, entry.precision, shapes)
            sums = merged.get(key)
            if sums is None:
                sums = merged[key] = ([0], {"bytes_accessed": 0})
            sums[0][0] += entry.calls
            _add(sums[1], entry.cost, phase, entry.bytes_accessed)
        return StepRecord(
            ops=tuple(_op_record(key, calls, FlopTotals(**sums)) for key, ((calls,), sums) in merged.items()),
            unsupported_ops=tuple(
                UnsupportedOp(op=op, module_fqn=fqn, phase=phase, calls=calls, shapes=shapes)
                for (op, fqn, phase, shapes), calls in self.unsupported.items()
            ),
            uncovered_parameters=uncovered,
            notes=tuple(self.notes),
            is_training=self.saw_backward,
            incomplete=self.incomplete,
            is_provisional=self.is_first_of_pipeline,
        )

    def _settle_unsure_modes(self) -> None:
        unsure = [entry for entry in self.entries if entry.is_mode_unsure and entry.phase is Phase.FORWARD]
        for entry in unsure:
            entry.without_grad = True
        if unsure:
            names = sorted({entry.module_fqn or "the root module" for entry in unsure})
            self.incomplete = True
            self.note(MODE_UNSURE.format(modules=", ".join(names[:3]) + (" ..." if len(names) > 3 else "")))

    def model_marks(self, *, count_no_grad_as_model: bool) -> dict[Key, list[int | None]]:
        """Numbers of the fingerprints of all model work, by entry of the record."""
        found: dict[Key, list[int | None]] = {}
        for entry in self.entries:
            phase = self._final_phase(entry, count_no_grad_as_model=count_no_grad_as_model)
            if phase in (Phase.FORWARD, Phase.BACKWARD) and entry.cost.flops:
                key = (entry.op, phase, entry.module_fqn, entry.precision, entry.shapes)
                found.setdefault(key, []).extend([entry.mark] * entry.calls)
        return found

    def _final_phase(self, entry: Entry, *, count_no_grad_as_model: bool) -> Phase:
        is_side_work = entry.phase is Phase.FORWARD and entry.without_grad and self.saw_backward
        return Phase.OTHER if is_side_work and not count_no_grad_as_model else entry.phase


def _op_record(key: Key, calls: int, totals: FlopTotals) -> OpRecord:
    op, phase, module_fqn, precision, shapes = key
    return OpRecord(
        op=op, phase=phase, module_fqn=module_fqn, precision=precision, shapes=shapes, calls=calls, totals=totals
    )


def _add(sums: dict[str, int], cost: OpCost, phase: Phase, bytes_accessed: int) -> None:
    """Add where the FLOPs of one entry go, by the phase it ran in, to sums by the names of ``FlopTotals``.

    Masked-out products that a dense kernel runs all the same are hardware work of no model: ``other``.
    """
    sums["bytes_accessed"] += bytes_accessed
    if cost is NO_FLOPS:
        return
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        parts = {
            "model_flops": cost.flops,
            "palm_model_flops": cost.flops if cost.palm_flops is None else cost.palm_flops,
            "kernel_recompute_flops": cost.kernel_recompute_flops,
            "other_flops": cost.masked_flops,
        }
    else:
        parts = {_EXECUTED[phase]: cost.flops + cost.masked_flops + cost.kernel_recompute_flops}
    for name, flops in parts.items():
        sums[name] = sums.get(name, 0) + flops


_EXECUTED = {
    Phase.RECOMPUTE: "recompute_flops",
    Phase.OPTIMIZER: "optimizer_flops",
    Phase.OTHER: "other_flops",
}
"""Where all that ran goes, beside forward and backward."""
