"""Numbers as logs write them: ``81,909``, ``1.234,5``, ``250.27ms``, ``-100.0%``, ``nan``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

__all__ = ["has_decimal_comma", "read_numeral"]

_DIGITS = r"\d+(?:[.,'_\u00a0\u202f\u2009 ]\d+)*"
_NUMERAL = re.compile(
    rf"^\s*(?P<sign>[-+\u2212]?)\s*(?P<digits>{_DIGITS}[.,]?|[.,]\d+)(?P<exp>[eE][-+]?\d+)?(?P<rest>.*)$", re.S
)
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "infinity": math.inf, "+inf": math.inf}
_NOTHING = {"", "-", "--", "n/a", "na", "none", "null", "?", "—"}


def read_numeral(text: str, *, decimal_comma: bool = False) -> tuple[float, str] | None:
    """The number at the start of a text and what follows it; None where there is no number.

    Args:
        text: a cell. Empty cells and ``n/a`` are ``nan``: no value, and nothing wrong with it.
        decimal_comma: whether this column writes ``0,41`` for 0.41.

    Example:
        >>> read_numeral("81,909 tok/s")
        (81909.0, 'tok/s')
    """
    lower = text.strip().lower()
    if lower.rstrip("%") in _NOTHING:
        return math.nan, ""
    word = re.match(r"[-+]?(nan|inf(inity)?)\b", lower)
    if word:
        return _WORDS.get(word[0], math.nan), lower[word.end() :].strip()
    match = _NUMERAL.match(text)
    digits = _plain_digits(match["digits"], decimal_comma) if match else None
    if match is None or digits is None:
        return None
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    return float(f"{sign}{digits}{match['exp'] or ''}"), match["rest"].strip()


def _plain_digits(digits: str, decimal_comma: bool) -> str | None:
    """Without separators of thousands, with a point; None where they are not groups of thousands."""
    point = "," if decimal_comma else "."
    whole, _, part = digits.partition(point)
    groups = re.split(r"[.,'_\u00a0\u202f\u2009 ]", whole)
    separators = set(re.findall(r"[.,'\u00a0\u202f\u2009 ]", whole))
    if not part.isdigit() and part:
        return None
    if len(groups) > 1 and (len(separators) > 1 or (separators and not _are_groups(groups))):
        return None
    return f"{''.join(groups) or '0'}.{part or '0'}"


def _are_groups(groups: list[str]) -> bool:
    return 1 <= len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:])


def has_decimal_comma(texts: Iterable[str]) -> bool:
    """Whether a column writes commas for points: one cell that can be nothing else is enough."""
    for text in texts:
        match = _NUMERAL.match(text)
        digits = match["digits"] if match else ""
        if digits.count(",") == 1 and (
            len(digits.partition(",")[2]) != 3 or digits.startswith("0,") or "." in digits.partition(",")[0]
        ):
            return "." not in digits.partition(",")[2]
    return False
