"""The page of versions says what runs gave, and nothing that was not run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from .benchmarks.versions import PAGE, ROOT, ROWS, counts, load, page

RESULT = {
    "date": "2026-01-02", "tests": ["tests"], "torch": "2.13.0", "lightning": "2.6.6", "transformers": "5.24.0",
    "python": "3.11.7", "passed": 7, "failed": ["a::b"], "skipped": {"needs a GPU": 2}, "labels": {"eager": "exact"},
}  # fmt: skip


def test_the_page_is_what_the_command_makes_of_the_kept_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(load())


def test_a_row_that_was_not_run_says_so_and_one_that_was_shows_its_counts_and_labels() -> None:
    text = page({"torch-2.13.0": RESULT})
    assert text.count("not run |") == len(ROWS) - 1
    assert "| 2.13.0 | 2.6.6 | 5.24.0 | 3.11.7 | `tests` | 7 | 1 | 2 | 2026-01-02 |" in text
    assert "| torch-2.13.0 | exact |" in text
    assert "- failed: `a::b`" in text
    assert "- 2 skipped: needs a GPU" in text


def test_tests_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="m" name="ok"/><testcase classname="m" name="bad"><failure/></testcase>'
        '<testcase classname="m" name="broken"><error/></testcase>'
        '<testcase classname="m" name="left"><skipped message="why"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert counts(report) == {"passed": 1, "failed": ["m::bad", "m::broken"], "skipped": {"why": 1}}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(("name", "row"), [("torch", "torch-2.9.1"), ("lightning", "lightning-oldest")])
def test_the_oldest_version_that_may_be_installed_has_a_row(name: str, row: str) -> None:
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["lightning"]]
    (oldest,) = {entry.removeprefix(f"{name}>=") for entry in wanted if entry.startswith(f"{name}>=")}
    assert getattr(ROWS[row], name).startswith(oldest)


def test_every_python_of_the_classifiers_has_a_row() -> None:
    classified = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: Python :: 3." in c}
    assert classified <= {row.python for row in ROWS.values()}


def test_the_makefile_and_the_rows_name_the_same_versions() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"OLDEST_TORCH := {ROWS['torch-2.9.1'].torch}" in makefile
    assert f"NEWEST_TORCH := {ROWS['torch-2.14.1'].torch}" in makefile
    assert f"torch=={ROWS['torch-2.13.0'].torch}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
