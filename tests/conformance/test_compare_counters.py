"""The comparison with other counters: what it calls right, and that its page is of this table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mfu_monitor.counting.compiled.watch import guards_notice_modes

from .table import all_cases

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
CASES = all_cases()


@pytest.fixture(scope="module")
def compare_counters() -> Any:
    path = ROOT / "tests" / "benchmarks" / "compare_counters.py"
    spec = importlib.util.spec_from_file_location("compare_counters", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_counters"] = module  # dataclasses look their module up there
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.parametrize(
    ("answer", "expected", "verdict", "kind"),
    [
        ({"flops": 210}, (210, 210), "right", "right"),
        ({"flops": 280}, (210, 280), "right", "right"),  # what the hardware ran
        ({"flops": 105}, (210, 210), "×0.5", "wrong"),
        ({"flops": 213}, (210, 210), "×1.014", "near"),
        ({"flops": 0}, (210, 210), "silent", "silent"),
        ({"flops": 0}, (0, 0), "right", "right"),
        ({"flops": 1280}, (0, 0), "1,280, not 0", "wrong"),
        ({"flops": 0, "reported": ("aten::lstm",)}, (210, 210), "named", "named"),
        ({"flops": 0, "reported": ("aten::add",)}, (210, 210), "silent", "silent"),  # named, but costs nothing
        ({"flops": 420, "reported": ("aten::lstm",)}, (210, 210), "×2", "wrong"),
        ({"error": "RuntimeError: no"}, (210, 210), "raises", "raises"),
        ({"flops": 210}, (), "–", "–"),
    ],
)
def test_verdicts(
    compare_counters: ModuleType, answer: dict[str, Any], expected: tuple[int, ...], verdict: str, kind: str
) -> None:
    said = compare_counters.judge(compare_counters.Answer(**answer), expected)
    assert said == verdict
    assert compare_counters.kind(said) == kind


def test_what_no_shape_tells_must_be_named(compare_counters: ModuleType) -> None:
    answers = [compare_counters.Answer(flops=0, reported=names) for names in ((), ("lib::op",))]
    assert [compare_counters.judge(answer, (0, 0), ("lib::op",)) for answer in answers] == ["silent", "right"]


@pytest.mark.skipif(guards_notice_modes(), reason="the page is made with the pinned torch, which has more operators")
def test_the_page_is_of_this_table_and_we_are_right_everywhere(compare_counters: ModuleType) -> None:
    rows = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
    assert sorted(rows) == sorted(case.id for case in CASES), "make compare writes docs/conformance.md anew"
    for case in CASES:
        assert f"| {compare_counters.arithmetic(case)} | right |" in rows[case.id]
