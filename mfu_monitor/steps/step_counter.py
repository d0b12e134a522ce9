"""The counting stage of the monitor: which steps are counted, what they ran, and what the others are taken to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from mfu_monitor.counting.fingerprints import BatchPrint, StepPrints, batch_print
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import MFUMonitorWarning, Stages, guarded, must_pass, warn
from mfu_monitor.steps.batch import (
    BatchCounts,
    batch_counts,
    batch_signature,
    call_tokens_function,
    has_tensors,
    resolve_tokens_function,
    tensors_of,
)
from mfu_monitor.steps.micro_batches import unseen_micro_batches
from mfu_monitor.steps.padding import PaddingCounter
from mfu_monitor.steps.repeats import ALONE, RepeatedWork
from mfu_monitor.steps.schedule import CONFIRMING_COUNTS, CountSchedule
from mfu_monitor.steps.totals import SignatureEntry, StepLedger
from mfu_monitor.steps.trainable import TrainableParameters

__all__ = ["StepCounter", "StepOutcome", "WindowHeld"]

_NO_EXCEPTION = (None, None, None)
_MOST_SEARCHES = 8
"""Counts spent in a row on a way of running that was seen but not counted; a rarer one is left to the random draws."""
BATCHES_DISAGREE = (
    "Two counted steps disagree on which ranks read the same batch, so the world's tokens a step are not known. "
    "Give all ranks of a tensor-parallel group the same batches and other ranks batches of their own."
)
_UNREADABLE = "unreadable"
"""Signature of every batch once one could not be read."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step ended."""

    excluded: str | None
    """Why its time is left out: ``"compile"``, ``"counted"``; None if it is in the window."""
    record: StepRecord | None
    """What it ran, if it was counted."""
    is_recompile: bool


@dataclass(frozen=True, slots=True)
class WindowHeld:
    """What the steps of a closed window held."""

    fields: Mapping[str, Any]
    """Of ``StepWindow``, those that are not time."""
    record: StepRecord | None
    """Of the signature that most of its model FLOPs belong to: what explains this window."""
    run_model_flops: int | None
    """Of all the run's steps up to here, counted ones too."""
    sums: Callable[[], dict[str, int | None] | None] | None = None
    """Gives the tokens that are not padding, once the device has added them up."""
    steps: int | None = None
    """Whose FLOPs and tokens these are; None where they are not known."""


class StepCounter:
    """Counts some steps and replays their counts for the others. A replayed step costs a look-up.

    Args:
        model: whose parameters and modules; None without names and signatures of parameters.
        stages: where failures are kept.
        count, max_overhead, tokens, count_padding, count_no_grad_as_model: as in ``MonitorConfig``.
        counter_factory: makes a context manager with ``record``; ``FlopCounter`` by default.
        compile_counter: a number that changes when something is compiled.
    """

    def __init__(
        self,
        model: nn.Module | None,
        stages: Stages,
        *,
        count: str = "auto",
        max_overhead: float = 0.002,
        tokens: str | Callable[[Any], Any] | None = None,
        count_padding: bool = False,
        count_no_grad_as_model: bool = False,
        counter_factory: Callable[[nn.Module | None], Any] | None,
        compile_counter: Callable[[], int],
    ) -> None:
        self.ledger = StepLedger()
        self._repeats = RepeatedWork()
        self._model = model
        self._stages = stages
        self._every_step = count == "every_step"
        self._make_counter = counter_factory or partial(_flop_counter, count_no_grad_as_model, self._repeats)
        self._compile_counter = compile_counter
        # One seed for all ranks and runs: a run made again counts the same steps.
        self._schedule = CountSchedule(max_overhead=max_overhead, every_step=self._every_step, seed=0)
        self._tokens_function = resolve_tokens_function(tokens)
        self._trainable = TrainableParameters(model)
        self._padding = PaddingCounter() if count_padding else None
        self._read_padding: Callable[[], Any] = lambda: None
        self._padding_tokens: int | None = None
        self._padding_sums: Any = None
        self._counter: Any = None
        self._has_compiled = False
        self._has_counted = False
        self._signature: Hashable = _UNREADABLE
        self._phases: list[str] = []
        self._entry = SignatureEntry()
        self._counts = BatchCounts()
        self._compiles_before = 0
        self._began_s = 0.0
        self._steps = 0
        self._is_open = False
        self._batch_print: tuple[BatchPrint | None, bool] = (None, False)
        self._has_told_of_batches = False

    def start(self, *, world_size: int, rank: int) -> None:
        """Training begins: the budget is shared by all ranks, each of which counts at moments of its own."""
        self._schedule.share_with(world_size)
        if world_size > 1:
            self._repeats.join(rank=rank)

    @guarded("repeats")
    def section(self) -> list[int]:
        """Fingerprints of counted steps that the other ranks have not had; empty where there are none."""
        return self._repeats.section()

    @guarded("repeats")
    def learn(self, sections: Sequence[Sequence[int]]) -> None:
        """What all ranks sent of their counted steps."""
        if self._repeats.take(sections):
            for entry in self.ledger.entries.values():
                entry.share(self._repeats.applied)
        if self._repeats.batch_disagrees and not self._has_told_of_batches:
            self._has_told_of_batches = True
            warn(BATCHES_DISAGREE, MFUMonitorWarning)

    @property
    def records(self) -> dict[Hashable, StepRecord]:
        """The latest count of each signature."""
        return {signature: e.record for signature, e in self.ledger.entries.items() if e.record is not None}

    def unseen_micro_batches(self, record: StepRecord) -> int:
        """How many batches like the one it was given the step just counted ran; 1 where the user counts tokens."""
        return 1 if self._tokens_function is not None else unseen_micro_batches(record, self._counts)

    def begin(self, batch: Any, extra: Any) -> None:
        """A step begins: find what is known of its kind, and enter the counter if it is to be counted."""
        self._signature, self._phases, self._is_open = _UNREADABLE, [], True
        self._entry = self._find_entry(batch, extra) or self.ledger.entry(_UNREADABLE, BatchCounts(), is_blind=True)
        self._counts = self._entry.counts if self._tokens_function is None else self._own_counts(batch)
        if self._padding is not None:
            self._padding_sums = self._measure(self._padding, batch)
        self._compiles_before = self._compile_counter()
        self._began_s = now_s = time.perf_counter()
        if self._wants_count(now_s):
            self._enter(batch)

    @guarded("signature")
    def _find_entry(self, batch: Any, extra: Any) -> SignatureEntry:
        model = self._model
        is_training = None if model is None else model.training
        signature = (batch_signature(batch), extra, is_training, self._trainable.pattern())
        self._signature = signature
        entry = self.ledger.entries.get(signature)
        if entry is not None:
            return entry
        counts = batch_counts(batch, read_contents=False)
        counts = replace(counts, tokens=None) if self._tokens_function else counts
        return self.ledger.entry(signature, counts, is_blind=not has_tensors(batch))

    def _own_counts(self, batch: Any) -> BatchCounts:
        # Once the user's function has failed tokens are unknown: our own idea of them may be another one.
        return self._call_tokens_function(batch) or BatchCounts(samples=self._entry.counts.samples)

    @guarded("tokens")
    def _call_tokens_function(self, batch: Any) -> BatchCounts:
        assert self._tokens_function is not None
        return call_tokens_function(self._tokens_function, batch)

    @guarded("padding")
    def _measure(self, padding: PaddingCounter, batch: Any) -> Any:
        return padding.measure(batch)

    @guarded("counting")
    def _wants_count(self, now_s: float) -> bool:
        entry = self._entry
        laws = self.ledger.laws(entry)
        by_law = min([law.equal_counts(entry.sizes) for law in laws], default=0)
        if not entry.recent and laws:
            return self._schedule.wants_count(
                is_known=by_law > 0,
                is_provisional=False,
                now_s=now_s,
                equal_counts=by_law,
                has_law=not any(law.is_ended for law in laws),
            )
        is_searching = entry.searches < _MOST_SEARCHES
        wants: bool = self._schedule.wants_count(
            is_known=entry.is_known or (bool(entry.recent) and not is_searching),
            is_provisional=entry.is_unsettled,
            now_s=now_s,
            equal_counts=max(entry.latest_equal_counts, by_law) if is_searching else CONFIRMING_COUNTS,
        )
        entry.searches += wants and bool(entry.recent)
        return wants

    @guarded("counting")
    def _enter(self, batch: Any) -> None:
        if self._padding is None:
            self._measure_padding_share(batch)
        self._batch_print = self._print_batch(batch) or (None, False)
        self._counter = self._make_counter(self._model)  # kept first: Ctrl-C may strike while it is entered
        self._counter.__enter__()

    @guarded("repeats")
    def _print_batch(self, batch: Any) -> tuple[BatchPrint | None, bool]:
        if self._repeats.rank is None:
            return None, False
        return batch_print(tensors_of(batch)), batch is not None

    @guarded("padding")
    def _measure_padding_share(self, batch: Any) -> None:
        once = PaddingCounter()
        once.add(once.measure(batch))
        self._read_padding, self._padding_tokens = once.take(), self._counts.tokens

    def note_phase(self, name: str) -> None:
        """A phase was marked in the step. Steps with other phases (no backward, two optimizers) ran something else."""
        self._phases.append(name)

    @guarded("signature")
    def _entry_as_ran(self, optimizer_step: bool | None) -> SignatureEntry:
        # Parameters too are asked again: a hook after ours, or the step itself, may have frozen some.
        return self.ledger.as_ran(
            self._entry, self._signature, (*self._phases, self._trainable.pattern(), optimizer_step)
        )

    def end(self, optimizer_step: bool | None) -> StepOutcome:
        """The step ends: leave the counter, and add the step to the window or leave it out."""
        self._entry = self._entry_as_ran(optimizer_step) or self._entry
        was_counted, is_new = self._counter is not None, not self._entry.recent
        has_compiled = self._compile_counter() != self._compiles_before
        record = self._leave(_NO_EXCEPTION) if was_counted else None
        if record is not None:
            self._keep(record, has_compiled or record.is_provisional)
            record = self._entry.record or record
        excluded = self._excluded(was_counted, has_compiled)
        self._note_time(was_counted, is_new, has_compiled)
        self._account(excluded is not None, optimizer_step)
        is_recompile = has_compiled and self._has_compiled
        self._has_compiled |= has_compiled
        self._has_counted |= was_counted
        self._steps += 1
        self._is_open = False
        return StepOutcome(excluded, record, is_recompile)

    def _excluded(self, was_counted: bool, has_compiled: bool) -> str | None:
        if has_compiled:
            return "compile"
        # With every step counted a window would be empty: it then holds the cost of counting, but for the first step.
        return "counted" if was_counted and not (self._every_step and self._has_counted) else None

    def _leave(self, exc_info: Any, *, is_whole: bool = True) -> StepRecord | None:
        # Not guarded by the stage: the counter must be left even if counting was turned off meanwhile. It is forgotten
        # once it is left: Ctrl-C may strike before, and the step's abort leaves it then.
        record: StepRecord | None = None
        try:
            self._counter.__exit__(*exc_info)
            if (fault := getattr(self._counter, "fault", None)) is not None:
                raise fault
            record = self._counter.record
            self._offer(getattr(self._counter, "prints", None) if is_whole else None)
        except Exception as error:  # nothing of ours may reach the training loop
            if must_pass(error):
                raise
            self._stages.fail("counting", error)
            self._stages.always("counting", self._counter.__exit__, *exc_info)  # what it installed must not stay
        self._counter = None
        return record

    @guarded("repeats")
    def _offer(self, prints: StepPrints | None) -> None:
        if prints is not None:
            batch, has_batch = self._batch_print
            self._repeats.add(self._steps, prints, batch, has_batch=has_batch)

    @guarded("repeats")
    def _part_of(self, record: StepRecord) -> StepRecord:
        return self._repeats.applied(record)

    @guarded("counting")
    def _keep(self, record: StepRecord, is_provisional: bool) -> None:
        if self._tokens_function is not None:
            self._entry.counts = self._counts
        part = self._part_of(record) or replace(record, repeats_known=False)
        self._entry.add_record(part, is_provisional=is_provisional, whole=record, is_drawn=self._schedule.was_drawn)
        self._trainable.refresh()

    @guarded("counting")
    def _note_time(self, was_counted: bool, is_new: bool, has_compiled: bool) -> None:
        seconds = time.perf_counter() - self._began_s
        if was_counted:
            self._schedule.add_counted(seconds, is_new=is_new, has_compiled=has_compiled)
        elif not has_compiled:
            self._schedule.add_uncounted(seconds)

    @guarded("accounting")
    def _account(self, is_excluded: bool, optimizer_step: bool | None) -> None:
        self.ledger.add_step(self._entry, self._counts, is_excluded=is_excluded, optimizer_step=optimizer_step)
        if self._padding is not None and not is_excluded and self._padding_sums is not None:
            self._padding.add(self._padding_sums)

    @property
    def is_counting(self) -> bool:
        """True while a counter is entered."""
        return self._counter is not None

    def abort(self, exc_info: Any = _NO_EXCEPTION) -> None:
        """The step is not finished: nothing of it counts, and nothing of ours stays behind."""
        # Another rank may finish it: the numbers by which ranks compare steps stay those of the steps.
        self._steps += self._is_open
        self._is_open = False
        if self._counter is not None:
            self._leave(exc_info, is_whole=False)

    def take_window(self) -> WindowHeld:
        """Close the window: what its steps held. Sums that are still on the device come with ``finished``."""
        sums, steps = self._take_padding(), self.ledger.window_steps
        fields = self._take_fields()
        known = None if fields is None else steps
        return WindowHeld(fields or {}, self.ledger.window_record, self._model_flops(), sums, known)

    @guarded("padding")
    def _take_padding(self) -> Callable[[], dict[str, int | None] | None] | None:
        return None if self._padding is None else self._padding.take()

    @guarded("accounting")
    def _model_flops(self) -> int | None:
        return self.ledger.totals["model_flops"]

    def finished(self, held: WindowHeld) -> dict[str, Any] | None:
        """The window's fields that are not time; None while a part of them is on its way from the device."""
        is_read, sums = self._read_sums(held) or (True, None)
        return self._with_padding({**held.fields, **(sums or {})}) or dict(held.fields) if is_read else None

    @guarded("padding")
    def _read_sums(self, held: WindowHeld) -> tuple[bool, dict[str, int | None] | None]:
        sums = None if held.sums is None else held.sums()
        return held.sums is None or sums is not None, sums

    @guarded("accounting")
    def _take_fields(self) -> dict[str, Any]:
        fields = self.ledger.take_window()
        return {**fields, **self._unique(fields)}

    def _unique(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of the tokens and samples that other ranks read as well."""
        repeats, names = self._repeats, ("tokens", "samples")
        if repeats.rank is None:
            return {}
        if repeats.batch_disagrees:
            return {f"unique_{name}": None for name in names} | {"batches_known": False}
        share = repeats.batch or ALONE
        values = {name: 0 if not share.ranks else fields.get(name) for name in names}
        unique = {f"unique_{name}": None if value is None else share.of(value) for name, value in values.items()}
        return unique | {"batches_known": repeats.batch is not None, "duplicate_ranks": repeats.duplicates}

    @guarded("padding")
    def _with_padding(self, fields: dict[str, Any]) -> dict[str, Any]:
        tokens, not_padding = fields.get("tokens"), fields.get("tokens_not_padding")
        if not_padding is None:
            sums = self._read_padding() or {}
            tokens, not_padding = self._padding_tokens, sums.get("tokens_not_padding")
        share = 1 - not_padding / tokens if tokens and not_padding is not None else None
        return {**fields, "padding_share": share}


def _flop_counter(count_no_grad_as_model: bool, repeats: RepeatedWork, model: nn.Module | None) -> Any:
    # Imported on the first counted step: a monitor that is only made should cost nothing.
    from mfu_monitor.counting.counter import FlopCounter

    wants_prints = repeats.rank is not None
    return FlopCounter(model, count_no_grad_as_model=count_no_grad_as_model, fingerprints=wants_prints)
