"""``mfu-monitor peaks``: what it prints, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mfu_monitor.cli import build_app
from mfu_monitor.cli.peaks_command import markdown_page
from mfu_monitor.hardware.table import load_table

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["peaks", *arguments])


def test_an_h100_shows_its_row_source_and_ridge_points_and_that_sparse_is_not_used() -> None:
    result = run("NVIDIA H100 80GB HBM3")
    assert result.exit_code == 0
    rows = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in result.stdout.splitlines()
        if line.startswith("│")
    }
    assert rows["bf16"] == ["989.4", "295", "1978.8"]
    assert rows["fp8"][:2] == ["1978.9", "591"]
    assert rows["fp4"] == ["-", "-", "-"]
    for words in ("h100-sxm5", "3.35 TB/s", "NVIDIA H100 datasheet + GH100 whitepaper", "sparse value is not used"):
        assert words in result.stdout


def test_json_carries_the_same_figures() -> None:
    content = json.loads(run("NVIDIA H100 80GB HBM3", "--json").stdout)
    assert content["key"] == "h100-sxm5"
    assert content["dense_flops_per_s"]["bf16"] == pytest.approx(989.4e12)
    assert content["bytes_per_s"] == pytest.approx(3.35e12)
    assert content["ridge_point_flops_per_byte"]["fp8"] == pytest.approx(590.7, abs=0.1)
    assert "fp4" in content["missing"]


def test_an_unknown_name_exits_with_2_names_the_nearest_and_says_what_to_do() -> None:
    result = run("RTX 4090 X")
    assert result.exit_code == 2
    assert result.stdout == ""
    for words in (
        "'RTX 4090 X'",
        "nearest names: NVIDIA GeForce RTX 4090",
        "mfu-monitor bench",
        "peak='measure'",
        "--devices",
    ):
        assert words in result.stderr


def test_a_products_name_is_answered_as_every_command_answers_it() -> None:
    assert json.loads(run("H100 SXM", "--json").stdout)["key"] == "h100-sxm5"
    assert json.loads(run("--gpu", "H100 SXM", "--json").stdout)["key"] == "h100-sxm5"
    parts = json.loads(run("A100", "--json").stdout)["candidates"]
    assert [p["key"] for p in parts] == ["a100-sxm4-40gb", "a100-sxm4-80gb", "a100-pcie-40gb", "a100-pcie-80gb"]


def test_a_ridge_point_below_ten_keeps_its_digits() -> None:
    # An H20 does 1 TFLOP/s in fp64 and 4 TB/s.
    (line,) = [line for line in run("h20").stdout.splitlines() if "fp64" in line and line.startswith("│")]
    assert [cell.strip() for cell in line.split("│")[2:4]] == ["1", "0.25"]


def test_the_real_command_writes_its_error_to_stderr_with_exit_code_2() -> None:
    command = [sys.executable, "-c", "from mfu_monitor.cli import main; main()", "peaks", "CocoNut 9000"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "no dense peak is known for 'CocoNut 9000'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_shared_name_shows_all_its_parts_and_the_sm_count_picks_one() -> None:
    both = run("AMD Instinct MI250X / MI250")
    assert both.exit_code == 0
    assert "mi250-gcd" in both.stdout
    assert "mi250x-gcd" in both.stdout
    one = json.loads(run("AMD Instinct MI250X / MI250", "--sm-count", "110", "--json").stdout)
    assert one["key"] == "mi250x-gcd"
    ambiguous = json.loads(run("NVIDIA H100", "--json").stdout)
    assert {row["key"] for row in ambiguous["candidates"]} == {"h100-pcie", "h100-sxm5-hbm2e"}


@pytest.mark.parametrize("count", ["0", "-5", "many"])
def test_an_sm_count_that_cannot_be_is_refused(count: str) -> None:
    result = run("NVIDIA A100-SXM4-80GB", "--sm-count", count)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--sm-count" in result.stderr


def test_a_key_is_a_name_too() -> None:
    assert json.loads(run("mi300x", "--json").stdout)["key"] == "mi300x"


def test_without_a_name_the_whole_table_is_shown() -> None:
    text = run().stdout
    assert "H100 SXM5 80GB" in text
    assert "Ascend 910B4" in text
    content = json.loads(run("--json").stdout)
    assert [row["key"] for row in content] == [row.key for row in load_table()]


def test_a_device_file_adds_a_device() -> None:
    file = str(ROOT / "configs" / "custom_device.yaml")
    content = json.loads(run("X1 96GB", "--devices", file, "--json").stdout)
    assert content["dense_flops_per_s"]["bf16"] == 480e12


def test_a_missing_device_file_is_an_error_of_the_user() -> None:
    result = run("X1", "--devices", "no_such.yaml")
    assert result.exit_code == 2
    assert "cannot read the device file 'no_such.yaml'" in result.stderr


def test_a_device_that_is_not_here_is_an_error_of_the_user() -> None:
    result = run("xpu:5")
    assert result.exit_code == 2
    assert "cannot be asked for its name here" in result.stderr


def test_a_cpu_is_shown_as_a_range_or_refused() -> None:
    result = run("cpu")
    if result.exit_code == 0:
        assert "low confidence" in result.stdout
        assert "GFLOP/s" in result.stdout
    else:
        assert "bench" in result.stderr


def test_the_page_in_docs_is_the_table() -> None:
    page = (ROOT / "docs" / "peaks.md").read_text(encoding="utf-8")
    assert page == markdown_page(), "run: mfu-monitor peaks --markdown > docs/peaks.md"
    assert all(f"`{row.key}`" in page for row in load_table())
