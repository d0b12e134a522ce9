"""The YAML files to copy are accepted by LightningCLI as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from mfu_monitor.callbacks import MFUMonitor
from mfu_monitor.config import resolve_alerts

CONFIGS = Path(__file__).parents[2] / "configs"


def parse(path: Path, folder: Path, *arguments: str) -> MFUMonitor:
    """The callback that LightningCLI makes of a file."""
    options = [f"--config={path}", "--trainer.accelerator=cpu", *arguments]
    cli = LightningCLI(BoringModel, args=options, run=False, save_config_callback=None)
    trainer: Any = cli.trainer
    (monitor,) = (c for c in trainer.callbacks if isinstance(c, MFUMonitor))
    return monitor


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])


def test_the_plain_run_is_accepted_as_it_is(tmp_path: Path) -> None:
    monitor = parse(CONFIGS / "plain.yaml", tmp_path)
    assert monitor.config.peak == "auto"
    assert monitor.config.jsonl == "runs/mfu.jsonl"


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("989.4e12", 989.4e12),
        ("measure", "measure"),
        ("{bf16: 989.4e12, fp8: 1978.9e12}", {"bf16": 989.4e12, "fp8": 1978.9e12}),
    ],
)
def test_a_peak_may_be_a_word_a_number_or_one_by_precision(tmp_path: Path, yaml: str, expected: object) -> None:
    path = tmp_path / "config.yaml"
    path.write_text((CONFIGS / "plain.yaml").read_text().replace("peak: auto", f"peak: {yaml}"))
    assert parse(path, tmp_path).config.peak == expected


def test_a_tokens_function_is_given_by_its_import_path(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text((CONFIGS / "plain.yaml").read_text().replace("peak: auto", "tokens: operator:length_hint"))
    assert parse(path, tmp_path).config.tokens == "operator:length_hint"


def test_the_run_with_alerts_is_accepted_as_it_is(tmp_path: Path) -> None:
    monitor = parse(CONFIGS / "alerts.yaml", tmp_path)
    thresholds = resolve_alerts(monitor.config.alerts)
    assert thresholds is not None
    assert (thresholds.drop, thresholds.sustain, thresholds.floor, thresholds.cooldown) == (0.10, 6, None, 20)
