"""Faults injected into real Lightning runs; ``make bench-alerts`` runs all of them and prints the matrix."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mfu_monitor.utilization import UtilizationReading

pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    """The benchmark's scenarios, from their file: tests are no package."""
    path = Path(__file__).parents[1] / "benchmarks" / "injected_faults.py"
    spec = importlib.util.spec_from_file_location("injected_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data workers and dataclasses look it up
    spec.loader.exec_module(module)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SlowDataset", "SlowOptimizer", "SlowCallback", "LongerSequences"])
def test_an_injected_fault_is_named(faults: ModuleType, name: str, tmp_path: Path) -> None:
    outcome = faults.inject(getattr(faults, name), tmp_path, attempts=3)
    assert outcome.is_right, [alert.message for alert in outcome.alerts]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_longer_validation_costs_goodput_though_it_is_no_drop(faults: ModuleType, tmp_path: Path) -> None:
    outcome = faults.inject(faults.LongerValidation, tmp_path, attempts=3)
    assert outcome.is_right, [alert.message for alert in outcome.alerts]
    before = [r for r in outcome.readings if r.last_step < outcome.fault.first_step]
    after = [r for r in outcome.readings if r.first_step > outcome.fault.first_step]
    assert share_in_steps(after) < 0.9 * share_in_steps(before)


def share_in_steps(readings: list[UtilizationReading]) -> float:
    return sum(r.elapsed_s for r in readings) / sum(r.window.wall_s for r in readings)
