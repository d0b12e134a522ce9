"""``mfu-monitor bench``: measures, prints, saves; refuses what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mfu_monitor.cli import build_app


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MFU_MONITOR_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["bench", *arguments])


def test_a_short_bench_on_the_cpu_prints_and_saves_what_it_measured(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    result = run("--device", "cpu", "--precision", "fp32", "--seconds", "0.2", "--output", str(output))
    assert result.exit_code == 0, result.stderr
    content = json.loads(output.read_text(encoding="utf-8"))
    rates = [product["flops_per_s"] for product in content["precisions"]["fp32"]["products"]]
    assert content["precisions"]["fp32"]["flops_per_s"] == max(rates)
    assert content["bytes_per_s"] > 0
    assert "streaming bandwidth" in result.stdout
    assert f"saved to {output}" in result.stdout


@pytest.mark.parametrize(("name", "words"), [("folder", "is a folder"), ("file/bench.json", "cannot be written")])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    measured: list[str] = []
    monkeypatch.setattr("mfu_monitor.cli.bench_command.run_bench", lambda *args, **options: measured.append("run"))
    result = run("--device", "cpu", "--output", str(tmp_path / name))
    assert result.exit_code == 2
    assert words in result.stderr
    assert measured == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "toaster"], "cannot measure on 'toaster'"),
        (["--device", "cuda:99"], "cannot measure on 'cuda:99': it is not here"),
        (["--device", "meta"], "cannot measure on 'meta': it computes nothing"),
        (["--device", "cpu", "--precision", "fp33"], "unknown precision 'fp33'"),
        (["--device", "cpu", "--seconds", "0"], "seconds=0.0"),
        (["--device", "cpu", "--seconds", "nan"], "seconds=nan"),
        (["--device", "cpu", "--seconds", "inf"], "seconds=inf"),
    ],
)
def test_wrong_arguments_go_to_stderr_with_exit_code_2(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
