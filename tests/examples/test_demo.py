"""The examples run as a user runs them, and TensorBoard shows what they wrote."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from tensorboard import program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mfu_monitor.counting.compiled.watch import guards_notice_modes
from mfu_monitor.hardware.matmul_rate import ProductRate
from mfu_monitor.sinks import read_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--layers=1", "--heads=2", "--width=32", "--sequence-length=16", "--batch-size=2", "--log-every-n-steps=4"]


@pytest.fixture(autouse=True)
def _away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured peaks and log folders of these runs go into the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _measured_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured peak that no CPU reaches: on a busy machine a real one is too low, and MFU is then withheld."""
    rate = ProductRate(shape=(1024, 1024, 1024), flops_per_s=1e14, calls=1)
    monkeypatch.setattr("mfu_monitor.hardware.measure.best_product_rate", lambda *args, **kwargs: rate)


def run_demo(folder: Path, *arguments: str) -> Path:
    """Train the byte-level GPT for twelve steps; returns the folder of the run."""
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "lightning_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    module.main([*SMALL, "--max-steps=12", "--peak=1e12", f"--log-dir={folder}", *arguments])
    return folder / "version_0"


def get(url: str, route: str, **query: str) -> Any:
    """One answer of TensorBoard's HTTP API."""
    with urllib.request.urlopen(f"{url}data/plugin/{route}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
        return json.load(answer)


def test_the_demo_shows_mfu_in_the_progress_bar_and_ends_with_a_summary_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(tmp_path / "logs")
    shown = capsys.readouterr()
    assert re.search(r"mfu=\d", shown.out + shown.err)
    assert re.search(r"hfu=\d", shown.out + shown.err)
    assert "What the hardware did" in shown.out
    assert f"    tensorboard --logdir {tmp_path / 'logs'}\n" in shown.out


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_mfu_in_the_event_files_follows_from_the_jsonl_file(tmp_path: Path, checkpointing: str) -> None:
    folder = run_demo(tmp_path / "logs", "--checkpointing", checkpointing)
    read, kept = EventAccumulator(str(folder)).Reload(), read_jsonl(folder / "mfu.jsonl")
    mfu, hfu = ({s.step: s.value for s in read.Scalars(f"utilization/{name}")} for name in ("mfu", "hfu"))
    assert list(mfu) == [r.last_step for r in kept.readings] == [3, 7, 11]
    for reading in kept.readings:
        expected = kept.records[0].model_flops * reading.window.steps / (reading.elapsed_s * 1e12)
        assert mfu[reading.last_step] == pytest.approx(expected, rel=1e-6)
        assert 0 < mfu[reading.last_step] <= hfu[reading.last_step]


def test_hfu_rises_above_mfu_by_the_recomputed_share_under_full_checkpointing(tmp_path: Path) -> None:
    folder = run_demo(tmp_path / "logs", "--checkpointing=full")
    window = read_jsonl(folder / "mfu.jsonl").readings[-1].window
    B, S, C = 2, 16, 32
    # Per step: the first three Linears of the one block and its causal attention are run again.
    rerun = 2 * B * S * (3 * C * C + C * C + 4 * C * C) + 2 * 2 * B * C * (S * (S + 1) // 2)
    assert window.recompute_flops == window.steps * rerun


def test_tensorboard_serves_the_series_the_layout_and_the_cards(tmp_path: Path) -> None:
    run_demo(tmp_path / "logs")
    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(tmp_path / "logs"), "--port", "0", "--load_fast", "false"])
    url = server.launch()
    series = get(url, "scalars/scalars", run="version_0", tag="utilization/mfu")
    assert [step for _, step, _ in series] == [3, 7, 11]
    charts = get(url, "custom_scalars/layout")["category"][0]["chart"]
    assert ["utilization/mfu$", "utilization/hfu$"] in [chart["multiline"]["tag"] for chart in charts]
    both = get(url, "custom_scalars/scalars", run="version_0", tag="utilization/mfu$")
    assert list(both["tag_to_events"]) == ["utilization/mfu"]
    card = get(url, "text/text", run="version_0", tag="mfu_monitor/card/end/text_summary")
    assert "<table>" in card[0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "recomputes"), [("1.0", False), ("0.0", True)])
def test_the_compiled_demo_reports_both_and_the_compilers_recomputation(
    tmp_path: Path, budget: str, recomputes: bool
) -> None:
    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=1.0):  # puts back what the demo sets
        folder = run_demo(tmp_path / "logs", "--compile", "--memory-budget", budget)
    run = read_jsonl(folder / "mfu.jsonl")
    last, record = run.readings[-1], run.records[-1]
    assert last.mfu is not None
    assert last.hfu is not None
    assert 0 < last.mfu < last.hfu  # flash attention's fifth product at least
    # Before torch 2.10 counted steps run in eager, where the compiler's recomputation is not seen.
    assert (record.recompute_flops > 0) is (recomputes and not guards_notice_modes())
    assert record.model_flops == run.records[0].model_flops


@pytest.mark.slow
@pytest.mark.usefixtures("_measured_peak")
def test_the_script_with_two_new_lines_logs_mfu(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "add_to_existing.py"), run_name="__main__")
    (folder,) = (tmp_path / "lightning_logs").iterdir()
    values = [s.value for s in EventAccumulator(str(folder)).Reload().Scalars("utilization/mfu")]
    assert len(values) == 4
    assert all(value > 0 for value in values)


def test_the_two_new_lines_are_marked_and_are_all_that_knows_of_us() -> None:
    lines = (EXAMPLES / "add_to_existing.py").read_text().split('"""', 2)[2].splitlines()
    ours = [line for line in lines if "mfu" in line.lower()]
    assert len(ours) == 2
    assert all("# NEW" in line for line in ours)


@pytest.mark.slow
@pytest.mark.usefixtures("_measured_peak")
def test_the_plain_loop_prints_a_line_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "plain_loop.py"), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mfu-monitor steps")]
    assert len(lines) == 4
    assert all("MFU" in line for line in lines)
