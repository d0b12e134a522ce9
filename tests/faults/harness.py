"""Faults at every function and every line of ours that a training run reaches, and what must hold after each.

An ``error`` is a failure of ours (an exception whose own text fails): it reaches nobody. An ``interrupt`` is Ctrl-C
and a ``signal`` a time limit: they reach the user unchanged. After each of them training has the same weights and
random state to the bit, nothing of ours is left, and no label says more than is true.
"""

from __future__ import annotations

import ast
import functools
import gc
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

import mfu_monitor as mm
import mfu_monitor.callbacks as adapters

from .loops import LOOPS, STEP_FLOPS, TOKENS, WINDOW, Opaque, Ran, run

KINDS = ("error", "interrupt", "signal")
ROOTS = (str(Path(mm.__file__).parent), str(Path(str(adapters.__file__)).parent))
_CALL = CompiledFxGraph.__call__

Place = tuple[str, str, int, int]
"""File, function, its first line, and the line; 0 for the entry of the function."""

SHELLS = frozenset(
    {
        "guarded.<locals>.decorate.<locals>.run",
        "guarded_hook.<locals>.safe",
        "Stages.always",
        "Stages.run",
        "Monitor.step",
        "Monitor.phase",
        "Monitor.paused",
        "Monitor.micro_batch",
        "Monitor.current_phase",
        "Monitor.state_dict",
        "MFUMonitor.state_dict",
        "MFUMonitor.load_state_dict",
        "_Scope.__enter__",
        "_Scope.__exit__",
        "_StepScope.__enter__",
        "_StepScope.__exit__",
        "CountingMode.__torch_dispatch__",
        "CompiledGraphWatch._around_run",
        "OpaqueModules._around_call",
        "BackwardPasses.watch.<locals>.reached",
        "_function_for.<locals>.wrapper",
        "_original_of.<locals>.inherited",
        "_Method.__call__",
        "wrap_method.<locals>.inside",
        "MFUMonitor._during",
        "MFUMonitor._while_saving",
        "MFUCallback._during",
        "MFUCallback._while_saving",
        "MFUCallback._with_utilization",
        "MFUCallback._measured",
        "MFUCallback._paused",
        "MFUCallback._undone_on_error",
    }
)
"""Functions that guards are made of. Of their lines those outside of a ``try`` hold nothing that can fail, so that an
error there is none of ours; an interruption can strike there as anywhere."""


@functools.cache
def _guarded_lines(file: str) -> frozenset[int]:
    """Lines of a file in a ``try`` whose handler does not end in raising the same again."""
    tries = (
        node
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.Try) and node.handlers and not isinstance(node.handlers[-1].body[-1], ast.Raise)
    )
    return frozenset(
        line
        for node in tries
        for part in node.body
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)
    )


def _can_fail(place: Place) -> bool:
    file, function, _, line = place
    return function.partition(".<locals>.<genexpr>")[0] not in SHELLS or line in _guarded_lines(file)


class FaultError(Exception):
    """A failure of ours whose own text fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Interrupt(BaseException):
    """What Ctrl-C is."""


class TimeLimitError(TimeoutError):
    """What a time limit is: an Exception of the user's, and an OSError at that."""


def _strike(_number: int, _frame: FrameType | None) -> None:
    raise TimeLimitError


@dataclass(frozen=True)
class Point:
    """Where, when and what."""

    loop: str
    kind: str
    place: Place
    nth: int

    def __str__(self) -> str:
        file, function, _, line = self.place
        where = file.rpartition("mfu_monitor/")[2] or file
        return f"{self.loop}: {self.kind} at {where}:{line or 'entry of'} {function}, time {self.nth}"


def _is_ours(name: str) -> bool:
    return name.startswith(ROOTS)


class Listing:
    """Notes every function and line of ours that runs, and how often."""

    def __init__(self) -> None:
        self.seen: Counter[Place] = Counter()

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        # What is left of a generator is closed, as an entry again, wherever it is dropped.
        if not _is_ours(code.co_filename) or (event == "call" and code.co_name == "<genexpr>"):
            return self._trace if _is_ours(code.co_filename) else None
        line = 0 if event == "call" else frame.f_lineno
        if event in ("call", "line"):
            self.seen[code.co_filename, code.co_qualname, code.co_firstlineno, line] += 1
        return self._trace


class Injection:
    """Raises at one point of a run."""

    def __init__(self, point: Point) -> None:
        self._file, self._function, self._first, self._line = point.place
        self._kind, self._nth = point.kind, point.nth
        self._seen = 0
        self.fault: BaseException | None = None

    @property
    def is_due(self) -> bool:
        """True until it has struck."""
        return self.fault is None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGUSR1, _strike)
        sys.settrace(self._trace)

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_firstlineno != self._first or code.co_filename != self._file or code.co_qualname != self._function:
            return None
        if (
            event == ("line" if self._line else "call")
            and self.is_due
            and (not self._line or frame.f_lineno == self._line)
        ):
            self._seen += 1
            if self._seen == self._nth:
                self._raise()
        return self._trace

    def _raise(self) -> None:
        if self._kind == "signal":
            try:
                signal.raise_signal(signal.SIGUSR1)
            except TimeLimitError as fault:
                self.fault = fault
                raise
        self.fault = FaultError() if self._kind == "error" else Interrupt()
        raise self.fault


def left(ran: Ran) -> list[str]:
    """What is still installed; it is taken out, so that the next run begins clean."""
    found = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    while _get_current_dispatch_mode_stack():
        _pop_mode()
    if CompiledFxGraph.__call__ is not _CALL:
        found.append("CompiledFxGraph.__call__")
        CompiledFxGraph.__call__ = _CALL
    if "__call__" in vars(Opaque):
        found.append("Opaque.__call__")
        del Opaque.__call__
    for callback in [c for c in gc.callbacks if "GcPauseMeter" in repr(c)]:
        found.append("gc.callbacks")
        gc.callbacks.remove(callback)
    if not torch.is_grad_enabled():
        found.append("grad mode off")
        torch.set_grad_enabled(True)
    return found + ran.wrapped


def wrong_labels(ran: Ran) -> list[str]:
    """Readings that say more than is true. The truth: each step runs five products, and holds 24 tokens."""
    wrong = []
    for reading in ran.readings:
        window, label = reading["window"], reading["exactness"]
        flops, steps = window["model_flops"], window["steps"]
        truth = steps * STEP_FLOPS
        is_wrong = flops is not None and (
            (label in ("exact", "presumed", "sampled") and flops != truth)
            or (label == "lower_bound" and flops > truth)
            or (label == "upper_bound" and flops < truth)
        )
        if is_wrong or (window["tokens"] not in (None, steps * TOKENS)) or steps > WINDOW:
            wrong.append(f"{label}: {flops} FLOPs where {truth} ran, {window['tokens']} tokens in {steps} steps")
    return wrong


class Harness:
    """Runs the loops with faults and says what did not hold.

    Args:
        folder: for what the runs write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bare: dict[str, Ran] = {}
        self._places: dict[str, Counter[Place]] = {}

    def places(self, loop: str) -> Counter[Place]:
        """Every function and line that the loop runs, in a process that has run it before."""
        if loop not in self._places:
            self._bare[loop] = run(LOOPS[loop], self._folder, None)
            gc.freeze()  # a trainer that collects garbage need not look through all of torch each time
            assert self._bare[loop].raised is None, self._bare[loop].raised
            for _ in range(2):
                listing = Listing()
                ran = run(LOOPS[loop], self._folder, listing)
            assert not self._faults(ran, self._bare[loop], None, "error"), self._faults(
                ran, self._bare[loop], None, "error"
            )
            self._places[loop] = listing.seen
        return self._places[loop]

    def points(self, loop: str, kind: str, *, beyond: str | None = None) -> list[Point]:
        """One point for each function and line: at the first time that it runs, or another one.

        Args:
            loop: the run.
            kind: of the faults.
            beyond: leave out what this other loop runs as well.
        """
        chance = random.Random(0)
        known = self.places(beyond) if beyond is not None else {}
        return [
            Point(loop, kind, place, chance.choice((1, 1, times, chance.randint(1, times))))
            for place, times in sorted(self.places(loop).items())
            if place not in known and (kind != "error" or _can_fail(place))
        ]

    def strike(self, point: Point) -> list[str] | None:
        """What did not hold after the fault; None where the run did not come to the point."""
        self.places(point.loop)
        injection = Injection(point)
        ran = run(LOOPS[point.loop], self._folder, injection)
        faults = self._faults(ran, self._bare[point.loop], injection.fault, point.kind)
        return None if injection.is_due and not faults else faults

    def _faults(self, ran: Ran, bare: Ran, fault: BaseException | None, kind: str) -> list[str]:
        faults = [f"left behind: {name}" for name in left(ran)] + wrong_labels(ran)
        if kind == "error" or fault is None:
            if ran.raised is not None:
                return [*faults, f"raised into training: {type(ran.raised).__name__}"]
            if not all(torch.equal(a, b) for a, b in zip(ran.weights, bare.weights, strict=True)):
                faults.append("weights differ")
            if (
                not torch.equal(ran.random_states[0], bare.random_states[0])
                or ran.random_states[1:] != bare.random_states[1:]
            ):
                faults.append("random state differs")
            if len(ran.warned) > (kind == "error" and fault is not None):
                faults.append(f"{len(ran.warned)} warnings: {[text[:80] for text in ran.warned]}")
        elif ran.raised is not fault:
            faults.append(f"kept from the user, who saw {ran.raised!r}")
        return faults
