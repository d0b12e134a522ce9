"""The table of what watching costs shows what was measured; no test here measures time."""

from __future__ import annotations

from dataclasses import asdict

from .benchmarks.overhead import ROOT, Row, cells, page

ROW = Row("GPT", "eager", "plain loop", "a tool", 0.0125, 1.25, 0.0025, 0.031, 0.25)
MISSING = Row("GPT", "eager", "plain loop", "another tool")


def test_a_row_shows_milliseconds_ratios_and_what_is_beyond_the_bare_step() -> None:
    assert cells(ROW) == ("a tool", "12.500", "1.25", "2500", "+3.1%", "250")


def test_the_page_says_how_it_was_measured_and_what_is_not_installed() -> None:
    result = {
        "date": "2026-01-02", "machine": "a processor", "torch": "2.13.0", "run_steps": 300, "load": 0.5, "cores": 2,
        "self_check_s": 0.017, "rows": [asdict(ROW), asdict(MISSING)],
    }  # fmt: skip
    text = page(result)
    assert "at a load average of 0.5 on 2 cores" in " ".join(text.split())
    assert "## GPT, eager, plain loop" in text
    assert "| a tool | 12.500 | 1.25 | 2500 | +3.1% | 250 |" in text
    assert "| another tool | not installed |  |  |  |  |" in text


def test_the_readme_names_the_command() -> None:
    assert "`make bench`" in (ROOT / "README.md").read_text(encoding="utf-8")
