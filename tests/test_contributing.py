"""CONTRIBUTING.md names files that exist, and a way of a FLOP that can be walked."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


WHERE = rows("Where do I change X")
WAY = re.findall(r"^\d+\. `([\w.]+)`", section("The way of a FLOP"), flags=re.MULTILINE)


@pytest.mark.parametrize(("what", "where"), WHERE, ids=[what for what, _ in WHERE])
def test_the_file_to_open_exists(what: str, where: str) -> None:
    paths = re.findall(r"`([^`]+)`", where)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_there_are_twenty_answers() -> None:
    assert len(WHERE) == 20


def test_a_flop_passes_at_most_eight_modules_from_the_dispatcher_to_the_event() -> None:
    assert 2 <= len(WAY) <= 8
    assert WAY[0] == "mfu_monitor.counting.dispatch"
    modules = [importlib.import_module(name) for name in WAY]
    assert hasattr(modules[0], "CountingMode")
    assert hasattr(modules[-1], "Event")


def test_every_module_of_the_way_touches_another_one_of_it() -> None:
    sources = {name: (ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8") for name in WAY}
    for name in WAY:
        others = [other for other in WAY if other != name]
        assert any(f"from {o} import" in sources[name] or f"from {name} import" in sources[o] for o in others), name


def test_every_term_is_explained_once() -> None:
    terms = [term for term, _ in rows("Glossary")]
    assert 25 <= len(terms) <= 40
    assert len(set(terms)) == len(terms)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_pages_name_no_file_that_a_clone_lacks(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:docs|tests|examples|configs|callbacks|mfu_monitor)/[\w./-]+)`", text)
    named += [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [path for path in named if not (ROOT / path).exists()] == []
