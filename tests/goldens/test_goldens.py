"""The answers of the program are those that were written down; moving code must not move them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .golden import GOLDENS, RUN
from .questions import QUESTIONS
from .write import as_text

HERE = Path(__file__).parent
EXACT = [name for name in GOLDENS if name not in ("commands.json", "public_names.json")]


@pytest.mark.parametrize("name", EXACT)
def test_the_answer_is_the_one_that_was_written_down(name: str) -> None:
    is_wording = name.endswith(".txt")
    hint = "wording" if is_wording else "behaviour"
    assert as_text(name, GOLDENS[name]()) == (HERE / name).read_text(encoding="utf-8"), (
        f"{name} changed ({hint}). If that is meant: python tests/goldens/write.py {name}, and read the diff."
    )


@pytest.mark.parametrize("name", ["commands.json", "public_names.json"])
def test_what_others_rely_on_is_still_there_and_may_only_grow(name: str) -> None:
    written = json.loads((HERE / name).read_text(encoding="utf-8"))
    now = json.loads(as_text(name, GOLDENS[name]()))
    assert list(_missing(written, now, name)) == []


def _missing(written: Any, now: Any, where: str) -> Any:
    if isinstance(written, dict) and isinstance(now, dict):
        for key, value in written.items():
            if key not in now:
                yield f"{where}: {key} is gone"
            else:
                yield from _missing(value, now[key], f"{where}: {key}")
    elif isinstance(written, list) and isinstance(now, list):
        yield from (f"{where}: {item} is gone" for item in written if item not in now)
    elif written != now:
        yield f"{where}: was {written}, is {now}"


def test_there_are_fifty_questions_and_a_golden_for_each_file() -> None:
    assert len(QUESTIONS) == 50
    assert {path.name for path in HERE.iterdir() if path.suffix in (".json", ".txt")} == set(GOLDENS)
    assert RUN.exists()


def test_a_lost_name_is_found_and_a_new_one_is_not() -> None:
    assert list(_missing({"a": ["x", "y"]}, {"a": ["y"], "b": 1}, "n")) == ["n: a: x is gone"]
    assert list(_missing({"a": ["x"]}, {"a": ["x", "y"], "b": 1}, "n")) == []
