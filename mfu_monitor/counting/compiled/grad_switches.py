"""Which modules of a compiled region may run with another grad mode than its surroundings.

A compiled graph keeps no grad mode. Where something in it asks for gradients the backward graph shows whether it got
them; where nothing does, a frozen part of the model and a frozen teacher under ``no_grad`` compile to the same graph.
So the Python that was compiled is read: the names that its code uses, from function to function, for one that turns
gradients on or off, and for the modules that such a function may call. It reads too much rather than too little.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

__all__ = ["GradSwitches"]

_SWITCHES = frozenset({"no_grad", "inference_mode", "set_grad_enabled", "enable_grad"})
_SWITCH_TYPES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)


@dataclass(frozen=True, eq=False, slots=True)
class _Code:
    """Code that may run, and what its names may mean."""

    code: CodeType
    names: Mapping[str, Any]
    """Globals."""
    objects: tuple[Any, ...] = ()
    """What it holds under no name of its globals: its closure, the locals of a frame that runs."""
    owners: frozenset[type] = frozenset()
    """Classes whose methods it may call by their names."""

    def used_names(self) -> frozenset[str]:
        """All names in the code, those of functions that it defines too."""
        names: set[str] = set()
        pending = [self.code]
        while pending:
            code = pending.pop()
            names.update(code.co_names, code.co_freevars)
            pending.extend(c for c in code.co_consts if isinstance(c, CodeType))
        return frozenset(names)

    def held(self) -> Iterator[Any]:
        """All objects that it can name."""
        yield from self.objects
        for name in self.used_names():
            if name in self.names:
                yield self.names[name]


class GradSwitches:
    """Reads the code of compiled regions, each once.

    Args:
        model: the module whose names records use; None without.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._known: dict[CodeType, frozenset[str]] = {}

    def modules_in_doubt(self, frame: FrameType) -> frozenset[str]:
        """Names of the modules that may run in another grad mode; ``""`` stands for what belongs to none.

        Args:
            frame: of the function that runs the compiled graph.
        """
        code = frame.f_code
        if code not in self._known:
            values = [frame.f_locals.get(name) for name in code.co_varnames]
            is_method = bool(values) and isinstance(values[0], nn.Module) and hasattr(type(values[0]), code.co_name)
            owners = frozenset({type(values[0])}) if is_method else frozenset()
            self._known[code] = self._read(_Code(code, frame.f_globals, tuple(values[is_method:]), owners), values)
        return self._known[code]

    def _read(self, root: _Code, values: list[Any]) -> frozenset[str]:
        modules = dict(self._model.named_modules()) if self._model is not None else {}
        roots = [o for o in (*values, *root.held()) if isinstance(o, nn.Module)]
        types = {type(m) for m in (*modules.values(), *(m for o in roots for m in o.modules()))}
        forwards = [c for kind in types for c in _codes_of(_method(kind, "forward"), frozenset({kind}))]
        switching = [item for item in _reach([root, *forwards], lambda item: ()) if _switches(item)]
        doubtful: set[str] = set()

        def modules_called(item: _Code) -> list[_Code]:
            names, held = item.used_names(), {id(o) for o in item.held()}
            called = [fqn for fqn, m in modules.items() if fqn.rpartition(".")[2] in names or id(m) in held]
            within = [fqn for fqn in modules for c in called if fqn == c or fqn.startswith(f"{c}." if c else "")]
            doubtful.update(within, (fqn for fqn, m in modules.items() if type(m) in item.owners))
            doubtful.update([] if item.owners else [""])
            kinds = {type(modules[fqn]) for fqn in within}
            return [c for kind in kinds for c in _codes_of(_method(kind, "forward"), frozenset({kind}))]

        _reach(switching, modules_called)
        return frozenset(doubtful)


def _reach(start: Iterable[_Code], more: Callable[[_Code], Iterable[_Code]]) -> list[_Code]:
    """All code that the given code may call by the names that it uses, itself included."""
    reached = list(start)
    seen = {item.code for item in reached}
    for item in reached:  # grows as it goes
        found = [c for o in item.held() for c in _codes_of(o)]
        found += [c for k in item.owners for n in item.used_names() for c in _codes_of(_method(k, n), item.owners)]
        for code in (*found, *more(item)):
            if code.code not in seen:
                seen.add(code.code)
                reached.append(code)
    return reached


def _switches(item: _Code) -> bool:
    return _holds_switch(item.objects) or not _SWITCHES.isdisjoint(item.used_names())


def _method(kind: type, name: str) -> Any:
    """A method as its class defines it; None for those of torch's own classes."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return None if _is_torchs(base) else base.__dict__[name]
    return None


def _codes_of(thing: Any, owners: frozenset[type] = frozenset()) -> list[_Code]:
    if isinstance(thing, functools.partial | staticmethod | classmethod | MethodType | property):
        inner = getattr(thing, "__func__", None) or getattr(thing, "func", None) or getattr(thing, "fget", None)
        return _codes_of(inner, owners)
    if isinstance(thing, type):
        is_function = issubclass(thing, torch.autograd.Function) and not _is_torchs(thing)
        return _codes_of(_method(thing, "forward")) if is_function else []
    if not isinstance(thing, FunctionType):
        return []
    cells = tuple(cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell))
    # What a decorator of torch's wraps has its name, and is reached through the wrapper's closure.
    if _is_torchs(thing) and not _holds_switch(cells):
        return []
    return [_Code(thing.__code__, thing.__globals__, cells, owners)]


def _holds_switch(objects: Iterable[Any]) -> bool:
    return any(isinstance(getattr(o, "__self__", o), _SWITCH_TYPES) for o in objects)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_torchs(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] == "torch"
