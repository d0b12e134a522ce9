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


HOLDS = {
    "what an operator costs": "@formula(",
    "which query-key pairs a mask attends": "def attended_pairs",
    "bytes that an operator moves": "def bytes_accessed",
    "operators that count nothing": "def is_ignored",
    "which phase, module or precision a call belongs to": "precision",
    "the fields of a count": "class StepRecord",
    "how compiled code is counted": "",
    "which steps are counted": "class ",
    "how steps of sizes that were never counted get their FLOPs": "class SizeLaw",
    "how tokens and samples of a batch are found": "class BatchCounts",
    "what a window's time leaves out": "excluded",
    "what ranks send each other": "rank",
    "which work and batches ranks share": "def find_shares",
    "the arithmetic of MFU and HFU": "def read_utilization",
    "the name of a metric": '"utilization/mfu"',
    "a device's peak": "h100-sxm5,",
    "how a device is recognised": "def find_row",
    "when a reading is withheld": "HARD_LIMIT = ",
    "a cause that a diagnosis names": "CAUSES = (",
    "when an alert fires": "class AlertDetector",
    "an option of the monitor": "class MonitorConfig",
    "what Lightning's callback does": "class MFUMonitor",
    "how a flag is spelled, in every command": "--gpu",
    "what a column of a log means": "KINDS = (",
    "what an audit concludes": "def verdict",
    "which matmuls `bench` times": "_ACCELERATOR_SHAPES",
}
"""What the first file of a row must hold for the row to be true."""


def test_there_are_twenty_answers_or_more_and_each_has_what_proves_it() -> None:
    assert len(WHERE) >= 20
    assert [what for what, _ in WHERE] == list(HOLDS)


@pytest.mark.parametrize(("what", "where"), WHERE, ids=[what for what, _ in WHERE])
def test_the_file_holds_what_is_to_be_changed(what: str, where: str) -> None:
    path = ROOT / re.findall(r"`([^`]+)`", where)[0]
    texts = [p.read_text(encoding="utf-8") for p in ([path] if path.is_file() else path.glob("*.py"))]
    assert any(HOLDS[what] in text for text in texts)


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
