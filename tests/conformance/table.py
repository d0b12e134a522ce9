"""The table: the rows of every ``cases_*.py`` beside this file, by file."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from .case import Case

__all__ = ["all_cases", "cases_by_title"]


def cases_by_title() -> dict[str, tuple[Case, ...]]:
    """Rows by what their file's docstring calls them: ``{"Dense matrix products": (...), ...}``."""
    names = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name.startswith("cases_"))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return {_title(module.__doc__ or module.__name__): module.CASES for module in modules}


def all_cases() -> tuple[Case, ...]:
    """Every row."""
    return tuple(case for cases in cases_by_title().values() for case in cases)


def _title(docstring: str) -> str:
    first = docstring.strip().splitlines()[0].removeprefix("Rows of ").rstrip(".")
    return first if "_" in first.split()[0] else first[0].upper() + first[1:]
