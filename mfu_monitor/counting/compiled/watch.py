"""Watches which compiled graphs run in a counted step.

``CompiledFxGraph`` is what inductor hands out for every compiled graph, fresh or from the on-disk cache; it keeps the
graph as text. For the length of a counted step its ``__call__`` shows which graph runs. Nothing of the compiled
model changes: no guard, no graph, no cache key. Where a torch has no such text the caller is informed, and what it
counts is a lower bound.

Before torch 2.10 the compiler's guards notice any dispatch mode (pytorch/pytorch#164992), so each counted step of
compiled code would compile once more. There the counted step runs in eager instead, which leaves compiled code as it
is; the compiler's own recomputation is then not seen, and the record says so.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mfu_monitor.counting.compiled.agreement import is_all_library
from mfu_monitor.counting.compiled.graph import GraphParseError, TextGraph, parse_graph
from mfu_monitor.counting.compiled.inline import inline_subgraphs
from mfu_monitor.internals.inductor import (
    compiled_graph_class,
    dtypes_by_abbreviation,
    fused_origins,
    generated_code,
    graph_text,
    is_backward_graph,
)
from mfu_monitor.internals.patches import Wrap

__all__ = ["CompiledGraphWatch", "EagerStance", "guards_notice_modes", "unavailable_reason"]

OnRun = Callable[[TextGraph, Sequence[Any], bool | None], None]
OnUnknown = Callable[[str], None]
OnFault = Callable[[BaseException], None]

_parsed: dict[tuple[str, Any], TextGraph] = {}
"""By text and generated code: a graph is parsed once however often it is counted."""


def unavailable_reason() -> str | None:
    """Why compiled graphs cannot be read with this torch; None where they can."""
    graph_class = compiled_graph_class()
    if graph_class is None:
        return "this torch has no CompiledFxGraph where inductor kept it"
    if not dtypes_by_abbreviation():
        return "this torch has no names of dtypes to read its compiled graphs with"
    return None


def guards_notice_modes(torch_version: str = torch.__version__) -> bool:
    """True for a torch whose compiled code is recompiled under any dispatch mode: before 2.10."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return (major, minor) < (2, 10)


class EagerStance:
    """Eager execution while anybody counts, on a torch whose compiled code must not meet a mode; nothing elsewhere.

    One for all users: each restores what it found, so that two which do not end in the order of their starts would
    leave the first one's stance behind.
    """

    def __init__(self) -> None:
        self._users: set[int] = set()
        self._stance: Any = None

    def attach(self, user: object) -> None:
        """Run in eager from now on."""
        if not guards_notice_modes() or "torch._dynamo" not in sys.modules:
            return
        self._users.add(id(user))
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")  # holds from the moment it is made

    def detach(self, user: object) -> None:
        """What was set before holds again once the last user leaves; may be called again, at any moment."""
        self._users.discard(id(user))
        if self._stance is not None and not self._users:
            self._stance.__exit__(None, None, None)
            self._stance = None


class CompiledGraphWatch:
    """Reports every run of a compiled graph while attached.

    Args:
        on_run: called before a graph runs with its parsed text, its inputs, and whether it is a backward graph, None
            where the compiler does not say.
        on_end: called after it ran.
        on_unknown: called with the reason before a graph runs that could not be read.
        on_fault: told what failed of ours meanwhile.
    """

    def __init__(self, on_run: OnRun, on_end: Callable[[], None], on_unknown: OnUnknown, on_fault: OnFault) -> None:
        self._on_fault = on_fault
        self._on_run = on_run
        self._on_end = on_end
        self._on_unknown = on_unknown
        self._local = threading.local()
        self._saw_any = False
        graph_class = compiled_graph_class()
        self._wrap = None if graph_class is None else Wrap(graph_class, "__call__", self._around_run)

    @property
    def is_blind(self) -> bool:
        """True where this torch gives no way to see which graph runs: nobody is told of any."""
        return self._wrap is None

    @property
    def is_inside_known_graph(self) -> bool:
        """True on a thread that runs a graph which ``on_run`` was given: its operators are already counted."""
        return self._saw_any and bool(getattr(self._local, "depth", 0))

    def _around_run(self, call: Callable[..., Any], compiled: Any, inputs: Sequence[Any]) -> Any:
        known = self._tell(compiled, inputs)
        self._saw_any = True
        self._local.depth = getattr(self._local, "depth", 0) + known
        try:
            return call(compiled, inputs)
        finally:
            self._local.depth -= known
            if known:
                self._on_end()

    def attach(self) -> None:
        """Start to watch; does nothing where no compiler is there."""
        if self._wrap is not None:
            self._wrap.attach()

    def detach(self) -> None:
        """Leave the compiler's own method as it was; may be called again."""
        if self._wrap is not None:
            self._wrap.detach()

    def _tell(self, compiled: Any, inputs: Sequence[Any]) -> bool:
        try:
            try:
                graph = _read(compiled)
            except GraphParseError as error:
                self._on_unknown(str(error))
                return False
            self._on_run(graph, inputs, is_backward_graph(compiled))
        except BaseException as fault:  # noqa: BLE001  (the user's step goes on)
            self._on_fault(fault)
            return False
        return True


def _read(compiled: Any) -> TextGraph:
    reason = unavailable_reason()
    text = None if reason is not None else graph_text(compiled)
    if not text:
        raise GraphParseError(reason or "CompiledFxGraph.inductor_post_grad_graph_str, its text, is empty or missing")
    source = generated_code(compiled)
    key = (text, source)
    if key not in _parsed:
        origins = fused_origins(source)
        parsed = inline_subgraphs(parse_graph(text))
        _parsed[key] = replace(parsed, origins=origins, is_all_library=is_all_library(origins, source))
    return _parsed[key]
