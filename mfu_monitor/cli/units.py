"""Quantities as people write them: ``70B`` parameters, ``15T`` tokens, ``989T`` FLOP/s, ``3k`` tokens per second."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import TypeVar

import typer

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.logs.columns import SECONDS
from mfu_monitor.logs.numerals import read_numeral

__all__ = [
    "SUFFIXES",
    "count_parser",
    "format_quantity",
    "fraction_parser",
    "parse_fraction",
    "parse_quantity",
    "parse_seconds",
    "quantity_parser",
    "seconds_parser",
]

_T = TypeVar("_T")

SUFFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
"""SI prefixes (BIPM, "The International System of Units", 9th edition, table 7), and B for billion as in "7B model"."""

_NUMBER = re.compile(r"(?P<digits>(?:\d[\d_]*)?\.?\d+|\d[\d_]*\.?)(?P<exponent>[eE][+-]?\d+)?\s*(?P<suffix>[a-zA-Z]?)")
_LARGEST = 1e30
"""No quantity of a run is larger; products of a few such numbers stay finite."""
_LARGEST_COUNT = 10**18
"""No tensor has more elements (torch counts them in 64 bits), and products of three counts stay finite as floats."""
_GROUPED_BY_COMMAS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
# Lower case is read as well ("7b", "15t"), but not "e", which belongs to exponents: 1e3.
_FACTORS = {**SUFFIXES, **{suffix.lower(): factor for suffix, factor in SUFFIXES.items() if suffix != "E"}, "K": 1e3}


def parse_quantity(text: str, *, name: str) -> float:
    """A positive number with an optional suffix k, M, G, B, T, P or E.

    Args:
        text: such as ``"70B"``, ``"15T"``, ``"3k"``, ``"1.5e15"``, ``"16,777,216"``.
        name: the option it came from, for the message: ``"--tokens"``.

    Raises:
        ConfigurationError: not a number, an unknown suffix, not finite, or not above zero.

    Example:
        >>> parse_quantity("70B", name="--params")
        70000000000.0
    """
    match = _NUMBER.fullmatch(_without_group_commas(str(text).strip()))
    factor = _FACTORS.get(match["suffix"], None if match["suffix"] else 1.0) if match else None
    if match is None or factor is None:
        raise ConfigurationError(_message(name, text))
    # Multiplied as decimals, so that "0.29k" is 290 and not 289.99999999999994.
    value = float(Decimal(f"{match['digits'].replace('_', '')}{match['exponent'] or ''}") * Decimal(factor))
    if not math.isfinite(value) or value <= 0:
        raise ConfigurationError(_message(name, text))
    return value


def parse_fraction(text: str, *, name: str, most: float = 1.0) -> float:
    """A fraction above 0, also as a percentage: ``"0.4"`` and ``"40%"`` are 0.4.

    Args:
        text: as written.
        name: the option it came from, for the message.
        most: the largest that may be written without a percent sign: a bare 40 could mean 40% or a typing error.
            Above 1 a percentage of any size is read: trackers show MFUs that cannot be.

    Raises:
        ConfigurationError: not a number, or outside that range.
    """
    numeral = read_numeral(str(text))
    value, unit = numeral if numeral is not None else (math.nan, "")
    value = value / 100 if unit == "%" else value
    is_too_large = value > most and (most <= 1 or unit != "%")
    if unit not in ("", "%") or not (0 < value < math.inf) or is_too_large:
        limit, example = (" and at most 1", "0.40 or 40%") if most <= 1 else ("", "0.462 or 46.2%")
        raise ConfigurationError(f"{name} is {text!r}; expected a fraction above 0{limit}, such as {example}")
    return value


def parse_seconds(text: str, *, name: str) -> float:
    """A time above zero: ``"1.25"``, ``"1.25s"``, ``"250ms"``.

    Raises:
        ConfigurationError: not a time.
    """
    numeral = read_numeral(str(text))
    factor = SECONDS.get(numeral[1] or "s") if numeral else None
    if numeral is None or factor is None or not (math.isfinite(numeral[0]) and numeral[0] > 0):
        raise ConfigurationError(
            f"{name} is {text!r}; expected a time above zero in seconds, such as 1.25, 1.25s or 250ms"
        )
    return numeral[0] * factor


def quantity_parser(name: str) -> Callable[[str], float]:
    """A ``parser=`` for ``typer.Option`` and ``typer.Argument`` that reads quantities; ``name`` as in the message.

    Example:
        >>> tokens: Annotated[float, typer.Option("--tokens", parser=quantity_parser("--tokens"), metavar="N")]
    """

    def quantity(text: str) -> float:
        value = parse_quantity(text, name=name)
        if value > _LARGEST:
            raise ConfigurationError(f"{name} is {text!r}; expected a number up to {_LARGEST:.0e}")
        return value

    return _parser(quantity)


def count_parser(name: str) -> Callable[[str], int]:
    """The same for whole numbers: devices, layers, elements."""

    def count(text: str) -> int:
        value = parse_quantity(text, name=name)
        if not value.is_integer() or value > _LARGEST_COUNT:
            raise ConfigurationError(
                f"{name} is {text!r}; expected a whole number up to {_LARGEST_COUNT:.0e}, such as 8192 or 8k"
            )
        return int(value)

    return _parser(count)


def fraction_parser(name: str, *, most: float = 1.0) -> Callable[[str], float]:
    """The same for fractions: ``0.40`` or ``40%``."""
    return _parser(lambda text: parse_fraction(text, name=name, most=most))


def seconds_parser(name: str) -> Callable[[str], float]:
    """The same for times: ``1.25`` or ``250ms``."""
    return _parser(lambda text: parse_seconds(text, name=name))


def _parser(read: Callable[[str], _T]) -> Callable[[str], _T]:
    def parse(text: str) -> _T:
        try:
            return read(str(text))
        except ConfigurationError as error:
            # click replaces the words of a ValueError by its own; a BadParameter keeps them.
            raise typer.BadParameter(str(error)) from None

    return parse


def format_quantity(value: float, *, digits: int = 3) -> str:
    """A number with the suffix people write: 989.4e12 -> ``"989T"``; ``parse_quantity`` reads it back."""
    rounded = float(f"{value:.{digits}g}")  # first, so that 999,999 becomes 1M and not 1000k
    for suffix in ("E", "P", "T", "B", "M", "k"):
        if abs(rounded) >= SUFFIXES[suffix]:
            return f"{rounded / SUFFIXES[suffix]:.{digits}g}{suffix}"
    return f"{rounded:.{digits}g}"


def _without_group_commas(text: str) -> str:
    return text.replace(",", "") if _GROUPED_BY_COMMAS.fullmatch(text) else text


def _message(name: str, text: str) -> str:
    return (
        f"{name} is {text!r}; expected a number above zero with an optional suffix "
        f"{', '.join(SUFFIXES)}, such as 70B, 15T, 3k, 989T or 1.5e15"
    )
