"""Which operator costs what: formulas by operator name, and the operators that are ignored by name.

An operator is counted by the first that is found of: the user's formula, our formula, the list in ``ignored.py``. What
is in none of them is decomposed by the counter, or reported as unsupported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, TypeVar

import torch

from mfu_monitor.errors import ConfigurationError, MFUMonitorError, must_pass, text_of
from mfu_monitor.formulas.cost import OpCost, OperatorCall, UncountableCallError
from mfu_monitor.formulas.ignored import is_ignored
from mfu_monitor.internals.dispatcher import qualified_name, schema_of
from mfu_monitor.internals.tensors import map_tensors

__all__ = [
    "Formula",
    "FormulaError",
    "ModuleFormula",
    "bind_call",
    "find_formula",
    "find_module_formula",
    "formula",
    "formulas_version",
    "is_ignored",
    "operator_name",
    "register_flop_formula",
    "register_module_formula",
    "registered_names",
    "unregister_flop_formula",
    "unregister_module_formula",
]

Formula = Callable[[OperatorCall], OpCost]
_F = TypeVar("_F", bound=Callable[..., Any])

_own_formulas: dict[str, Formula] = {}
_user_formulas: dict[str, Formula] = {}
_version = 0


class FormulaError(MFUMonitorError, ValueError):
    """A registered formula raised, or answered with something that is not a number of FLOPs."""

    def __init__(self, text: str, function: Callable[..., Any], gave: object) -> None:
        super().__init__(text)
        self.what = (function, type(gave).__name__)
        """The user's function and the kind of answer it gave: reported once."""


# --- operators: names and arguments -----------------------------------------------------------------------------------


def operator_name(func: Any) -> str:
    """Qualified name without overload: ``"aten::mm"``, ``"higher_order::flex_attention"`` for what has no schema."""
    schema = schema_of(func)
    if schema is not None:
        return str(schema.name)
    return f"higher_order::{func.name() if callable(getattr(func, 'name', None)) else func.__name__}"


def bind_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> OperatorCall:
    """One dispatched call with its arguments by their schema names and defaults filled in.

    Args:
        func: an ``OpOverload``, or a higher-order operator; the latter has no schema, so its arguments get the names of
            its ``__call__``, and those that have no name there their position as a string (``"0"``).
        args: positional arguments as dispatched; tensors of any kind, fake and meta ones included.
        kwargs: keyword arguments as dispatched.
        output: what the call returned.

    Example:
        >>> bind_call(torch.ops.aten.addmm.default, (bias, x, w), {}, y)["beta"]
        1
    """
    names, defaults = _parameters(func)
    given = {names[i] if i < len(names) else str(i): value for i, value in enumerate(args)}
    given.update(kwargs)
    # in the operator's own order, which formulas of users rely on
    arguments = {name: given.get(name, defaults.get(name)) for name in names if name in given or name in defaults}
    arguments.update(given)
    return OperatorCall(operator_name(func), arguments, output)


@functools.cache
def _parameters(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    schema = schema_of(func)
    if schema is not None:
        arguments = schema.arguments
        return tuple(a.name for a in arguments), {a.name: a.default_value for a in arguments if a.has_default_value()}
    return _signature_parameters(func)


def _signature_parameters(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return (), {}
    names = tuple(p.name for p in parameters if p.kind in positional)
    return names, {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


# --- own formulas -----------------------------------------------------------------------------------------------------


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Register one of the library's own formulas for qualified operator names such as ``"aten::mm"``.

    Raises:
        ConfigurationError: a name has a formula already.
    """

    def decorate(function: Formula) -> Formula:
        for name in names:
            if name in _own_formulas:
                raise ConfigurationError(
                    f"{name} already has a formula, {_describe(_own_formulas[name])}; an operator is counted once."
                )
            _own_formulas[name] = function
        _note_change()
        return function

    return decorate


def formulas_version() -> int:
    """A number that changes when a formula comes or goes: what was found before it may be found otherwise now."""
    return _version


def _note_change() -> None:
    global _version
    _version += 1


def find_formula(name: str) -> Formula | None:
    """The formula of a qualified operator name, the user's before ours; None if there is none.

    An in-place operator (``aten::addmm_``) has the formula of the operator that it is the in-place form of.
    """
    found = _user_formulas.get(name) or _own_formulas.get(name)
    if found is None and name.endswith("_") and not name.endswith("__"):
        return find_formula(name[:-1])
    return found


def registered_names() -> frozenset[str]:
    """Every operator name that has a formula, the user's included."""
    return frozenset(_own_formulas) | frozenset(_user_formulas)


# --- the user's formulas for operators --------------------------------------------------------------------------------


def register_flop_formula(op: Any, *, get_raw: bool = False, overwrite: bool = False) -> Callable[[_F], _F]:
    """Say what an operator costs that the library does not know; used as a decorator.

    The function is called with the operator's arguments, every tensor replaced by its shape (``torch.Size``) and
    everything else as it is; arguments that it does not take are left out, and ``out_shape=`` is passed if it takes it.
    It returns FLOPs as an int (one multiply-add is 2), or an ``OpCost``. The backward operator has a formula of its
    own. A formula given here wins over the library's.

    Args:
        op: ``torch.ops.mylib.attn``, one of its overloads, what ``torch.library.custom_op`` returned, or the qualified
            name ``"mylib::attn"`` for an operator that is not imported yet. All overloads share one formula.
        get_raw: pass the tensors themselves, not their shapes.
        overwrite: replace a formula registered before; without it that is an error.

    Raises:
        ConfigurationError: ``op`` is nothing that names an operator, or has a user formula already.

    Example:
        >>> @mm.register_flop_formula(torch.ops.mylib.attn)
        ... def attn_flops(q, k, v, is_causal=False, *, out_shape):
        ...     B, H, S, D = q
        ...     return 4 * B * H * S * S * D
    """
    name = _qualified_name(op)
    if name in _user_formulas and not overwrite:
        raise ConfigurationError(
            f"{name} already has a formula, {_describe(_user_formulas[name])}; "
            "pass overwrite=True to replace it, or register it once at import."
        )

    def decorate(function: _F) -> _F:
        _user_formulas[name] = _UserFormula(name, function, get_raw)
        _note_change()
        return function

    return decorate


def unregister_flop_formula(op: Any) -> None:
    """Forget the user's formula of an operator; the library's own, if any, is used again."""
    _user_formulas.pop(_qualified_name(op), None)
    _note_change()


@dataclass(frozen=True, slots=True)
class _UserFormula:
    name: str
    function: Callable[..., Any]
    get_raw: bool

    def __call__(self, call: OperatorCall) -> OpCost:
        shown = dict(call.arguments) if self.get_raw else _shapes_for_tensors(dict(call.arguments))
        out_shape = _shapes_for_tensors(call.output)
        args, kwargs = _accepted(self.function, shown, out_shape)
        return _checked_cost(self.name, self.function, args, kwargs)


def _qualified_name(op: Any) -> str:
    if isinstance(op, str):
        if "::" in op:
            return op.split(".")[0]
    elif (name := qualified_name(op)) is not None:
        return name
    raise ConfigurationError(
        f"a FLOP formula cannot be registered for {op!r}: expected torch.ops.<namespace>.<name>, one of its overloads, "
        'what torch.library.custom_op returned, or a qualified name such as "mylib::attn". '
        "A plain Python function is not an operator: give its module a formula with register_module_formula."
    )


def _shapes_for_tensors(values: Any) -> Any:
    return map_tensors(lambda tensor: tensor.shape, values)


def _accepted(
    function: Callable[..., Any], arguments: Mapping[str, Any], out_shape: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``function`` takes: by position as the operator has them, keyword-only ones by name."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {p.kind for p in parameters}
    keyword_only = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    takes_out_shape = inspect.Parameter.VAR_KEYWORD in kinds or any(p.name == "out_shape" for p in parameters)
    by_position = [value for name, value in arguments.items() if name not in keyword_only]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        places = sum(p.kind in _POSITIONAL and p.name != "out_shape" for p in parameters)
        by_position = by_position[:places]
    keywords = {name: value for name, value in arguments.items() if name in keyword_only}
    return tuple(by_position), {**keywords, "out_shape": out_shape} if takes_out_shape else keywords


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _checked_cost(
    target: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> OpCost:
    try:
        answer = function(*args, **kwargs)
    except UncountableCallError:
        raise  # the formula's own way to say that this call cannot be counted
    except Exception as error:
        if must_pass(error):
            raise
        raise FormulaError(
            f"the formula of {target}, {_describe(function)}, raised {type(error).__name__}: {text_of(error)}. "
            "It is called with the operator's arguments, every tensor replaced by its shape.",
            function,
            error,
        ) from error
    return _as_cost(target, function, answer)


def _as_cost(target: str, function: Callable[..., Any], answer: Any) -> OpCost:
    if isinstance(answer, OpCost) and all(_is_flops(n) for n in (answer.flops, answer.masked_flops)):
        return answer
    if isinstance(answer, torch.SymInt):
        return OpCost(answer)  # type: ignore[arg-type]  # symbolic sizes stay symbolic
    if _is_flops(answer):
        return OpCost(int(answer))
    raise FormulaError(
        f"the formula of {target}, {_describe(function)}, returned {short(answer)}; "
        "expected FLOPs as a whole number of at least 0 (one multiply-add is 2), or an OpCost. "
        "A formula without a return statement gives None.",
        function,
        answer,
    )


def _is_flops(answer: Any) -> bool:
    """A whole number, numpy's included; a tensor is not one, for reading it waits for the device."""
    if isinstance(answer, torch.SymInt):
        return True
    is_number = isinstance(answer, (int, float)) or hasattr(answer, "__index__")
    if not is_number or isinstance(answer, (bool, torch.Tensor)):
        return False
    return bool(0 <= answer < float("inf") and answer == answer // 1)


def _describe(function: Any) -> str:
    inner = getattr(function, "function", function)
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', repr(inner))}"


# --- modules whose work the dispatcher cannot see ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModuleFormula:
    """Forward FLOPs of a module class, callable as ``formula(module, *input_shapes, out_shape=...)``.

    In backward the counter adds ``input_gradient_factor`` times the forward if a floating input needs a gradient, and
    the forward once more if one of the module's parameters does.
    """

    target: str
    function: Callable[..., Any]
    input_gradient_factor: int = 1
    """1 for a product of input and weight; 2 for attention, whose backward is four products for the forward's two."""

    def __call__(self, module: torch.nn.Module, *input_shapes: Any, out_shape: Any = None) -> OpCost:
        names = {str(position): shape for position, shape in enumerate(input_shapes)}
        args, kwargs = _accepted(self.function, {"module": module, **names}, out_shape)
        return _checked_cost(self.target, self.function, args, kwargs)


_own_module_formulas: dict[type | str, ModuleFormula] = {}
_user_module_formulas: dict[type | str, ModuleFormula] = {}


def register_module_formula(
    target: type | str, *, input_gradient_factor: int = 1, overwrite: bool = False
) -> Callable[[_F], _F]:
    """Say what the forward of a module costs whose work the dispatcher cannot see; used as a decorator.

    The function is called as ``f(module, *input_shapes, out_shape=...)`` with the shapes of the tensors among the
    positional inputs and returns forward FLOPs (int or ``OpCost``); ``out_shape`` is passed if it takes it. Backward
    follows: once the forward for the inputs' gradient and once for the parameters', each if it is needed. What the
    dispatcher sees inside the module's forward is not counted beside it.

    Args:
        target: the class, or its dotted name, which is not imported: ``"pkg.mod.OpaqueLinear"``, by the module that
            defines it or by one that re-exports it. Subclasses are found too.
        input_gradient_factor: what the gradient of the inputs costs, in forwards; 2 for attention.
        overwrite: replace a formula registered before; without it that is an error.

    Raises:
        ConfigurationError: ``target`` is neither class nor dotted name, or has a user formula already.

    Example:
        >>> @mm.register_module_formula("pkg.mod.OpaqueLinear")
        ... def opaque_linear_flops(module, x):
        ...     return 2 * x.numel() * module.out_features
    """
    if not isinstance(target, type) and not (isinstance(target, str) and "." in target):
        raise ConfigurationError(
            f"a module formula cannot be registered for {target!r}: expected a class, or its dotted name such as "
            '"pkg.mod.OpaqueLinear" (an instance will not do).'
        )
    if target in _user_module_formulas and not overwrite:
        raise ConfigurationError(
            f"{_class_name(target)} already has a module formula, {_describe(_user_module_formulas[target])}; "
            "pass overwrite=True to replace it."
        )
    return _module_decorator(_user_module_formulas, target, input_gradient_factor)


def own_module_formula(*targets: str, input_gradient_factor: int = 1) -> Callable[[_F], _F]:
    """Register one of the library's own module formulas by dotted names."""

    def decorate(function: _F) -> _F:
        for target in targets:
            _module_decorator(_own_module_formulas, target, input_gradient_factor)(function)
        return function

    return decorate


def unregister_module_formula(target: type | str) -> None:
    """Forget the user's formula of a module class."""
    _user_module_formulas.pop(target, None)
    _find_by_class.cache_clear()


def find_module_formula(module: torch.nn.Module) -> ModuleFormula | None:
    """The formula of a module's class or of the nearest of its bases that has one, else None. Imports nothing."""
    return _find_by_class(type(module))  # type: ignore[arg-type]  # a metaclass's __hash__ confuses mypy


def _module_decorator(
    formulas: dict[type | str, ModuleFormula], target: type | str, input_gradient_factor: int
) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        formulas[target] = ModuleFormula(_class_name(target), function, input_gradient_factor)
        _find_by_class.cache_clear()
        return function

    return decorate


@functools.lru_cache(maxsize=4096)
def _find_by_class(cls: type) -> ModuleFormula | None:
    for formulas in (_user_module_formulas, _own_module_formulas):
        for base in cls.__mro__[:-1]:
            for target, found in formulas.items():
                if target is base or (isinstance(target, str) and _is_named(base, target)):
                    return found
    return None


def _is_named(cls: type, dotted_name: str) -> bool:
    """True for the name of the defining module, or of a loaded module that re-exports the class."""
    if _class_name(cls) == dotted_name:
        return True
    module_name, _, attribute = dotted_name.rpartition(".")
    module = sys.modules.get(module_name)
    return module is not None and vars(module).get(attribute) is cls


def _class_name(target: type | str) -> str:
    return target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"
