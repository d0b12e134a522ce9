"""Records to plain types for JSON and back, by their annotations: a wrong type is an error that names the field."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from reprlib import repr as short
from typing import Any, Self

from mfu_monitor.errors import ConfigurationError

__all__ = ["PlainTypes"]


class PlainTypes:
    """``to_dict`` and ``from_dict`` for a dataclass.

    Example:
        >>> StepWindow.from_dict(json.loads(json.dumps(window.to_dict()))) == window
        True
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON; ``from_dict`` reads them back."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``; unknown keys of a later version are ignored.

        Raises:
            ConfigurationError: a field is missing or of another type; it is named.
        """
        record: Self = _record(cls, values, cls.__name__)
        return record


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN_ALREADY:
        return value
    if (names := _names_of_fields(kind)) is not None:  # type: ignore[arg-type]  # a metaclass confuses mypy
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_PLAIN_ALREADY = frozenset({str, int, float, bool, types.NoneType})


@functools.cache
def _names_of_fields(kind: type) -> tuple[str, ...] | None:
    """Those that a constructor takes; None where it is no dataclass."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.init) if dataclasses.is_dataclass(kind) else None


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Type of every field that a constructor takes, and whether it must be given."""
    hints = typing.get_type_hints(cls)
    no = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is no and f.default_factory is no) for f in dataclasses.fields(cls) if f.init
    }


def _record(cls: Any, values: Any, where: str) -> Any:
    if not isinstance(values, Mapping):
        raise _wrong(where, f"the fields of {cls.__name__}", values)
    found = {}
    for name, (kind, is_required) in _fields(cls).items():
        if name in values:
            found[name] = _typed(kind, values[name], f"{where}.{name}")
        elif is_required:
            raise ConfigurationError(f"{where}.{name} is missing; expected {_name(kind)}")
    return cls(**found)


def _typed(kind: Any, value: Any, where: str) -> Any:
    if kind in (Any, object):
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin in (tuple, list):
        return _sequence(kind, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(where, _name(kind), value)
        return {key: _typed(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    return _scalar(kind, value, where)


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not types.NoneType]
    exact = [kind for kind in others if isinstance(kind, type) and type(value) is kind]
    for kind in (exact or others)[:-1]:
        try:
            return _typed(kind, value, where)
        except ConfigurationError:
            continue
    return _typed((exact or others)[-1], value, where)


def _sequence(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong(where, _name(kind), value)
    arguments = typing.get_args(kind)
    is_fixed = typing.get_origin(kind) is tuple and arguments[-1:] != (...,)
    if is_fixed and len(arguments) != len(value):
        raise _wrong(where, _name(kind), value)
    kinds = arguments if is_fixed else (arguments[0],) * len(value)
    items = (_typed(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, value, strict=True)))
    return typing.get_origin(kind)(items)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and (is_number or value is None):
        return math.nan if value is None else value  # JSON has no NaN
    if kind is int and is_number and value == value // 1:
        return int(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise _wrong(where, " or ".join(repr(item.value) for item in kind), value) from None
    if kind in (int, float) or not isinstance(value, kind):
        raise _wrong(where, _name(kind), value)
    return value


def _name(kind: Any) -> str:
    return str(kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else kind).replace("typing.", "")


def _wrong(where: str, expected: str, value: Any) -> ConfigurationError:
    return ConfigurationError(f"{where} is {short(value)}; expected {expected}")
