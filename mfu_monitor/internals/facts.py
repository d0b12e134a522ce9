"""The list of what is read of torch that is not public: each fact with what is lost where a torch has it no more.

A fact is a function that reads one private name when it is asked, never at import. Where the name is gone it gives its
``otherwise`` and is remembered as missing; the self-check names it then, and no count is called exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from mfu_monitor.errors import MFUMonitorWarning, warn

__all__ = ["FACTS", "Fact", "fact", "missing_facts", "note_missing", "unguarded"]

_F = TypeVar("_F", bound=Callable[..., Any])
_GONE = (AttributeError, ImportError, TypeError)
"""What Python raises where a name is gone, or takes other arguments than it did."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One private name."""

    name: str
    since: str
    """The oldest torch that it was tested with."""
    lost: str
    """What follows where it is missing or not true."""
    decides: bool
    """Whether FLOPs rest on it; else a warning of its own names it."""


FACTS: dict[str, Fact] = {}
"""All facts that are read, by name."""

_missing: dict[str, Fact] = {}


def fact(
    name: str, *, lost: str, otherwise: Any = None, since: str = "2.9", decides: bool = True
) -> Callable[[_F], _F]:
    """Make a function the reader of one private name.

    Args:
        name: dotted, as torch spells it: ``"torch._C._current_graph_task_id"``.
        lost: what follows where it is missing.
        otherwise: what the function gives then.
        since: the oldest torch, or trainer, that it was tested with.
        decides: whether FLOPs rest on it.
    """
    known = FACTS.setdefault(name, Fact(name, since, lost, decides))

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def ask(*args: Any) -> Any:
            try:
                return function(*args)
            except _GONE:
                _miss(known)
                return otherwise

        vars(ask)["unguarded"] = lambda: ask if known.name in _missing else function
        return cast(_F, ask)

    return decorate


def unguarded(reader: _F, *example: Any) -> _F:
    """What a fact is read with, for one step that asks at every operator; where the name is missing, the fact itself.

    Args:
        reader: of the fact.
        example: what to ask it with once, to see whether the name is there. One that goes later raises.
    """
    reader(*example)
    found: _F = vars(reader)["unguarded"]() if "unguarded" in vars(reader) else reader
    return found


def note_missing(name: str) -> None:
    """What a fact gave cannot be true: it counts as missing from now on."""
    _miss(FACTS[name])


def _miss(known: Fact) -> None:
    if known.name in _missing:
        return
    _missing[known.name] = known
    if not known.decides:
        warn(f"{known.name} is missing: {known.lost}. Use versions that docs/versions.md lists.", MFUMonitorWarning)


def missing_facts() -> tuple[Fact, ...]:
    """The facts that counts rest on and this torch did not give when they were asked, in the order of asking."""
    return tuple(known for known in _missing.values() if known.decides)
