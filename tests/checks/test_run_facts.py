"""What a run's facts say of its model, and what a check makes of them."""

from __future__ import annotations

import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.checks.run_facts import RunFacts
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading


def model() -> nn.Module:
    # 100 x 8 looked up, 8 x 8 + 8 multiplied; nothing is tied.
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8))


def test_the_sizes_of_a_model_are_facts_of_the_run() -> None:
    facts = RunFacts(model(), torch.device("cpu")).evidence(
        StepWindow(first_step=0, last_step=0, steps=1, elapsed_s=1.0, wall_s=1.0), None
    )
    assert facts["parameters"] == 800 + 72
    assert facts["embedding_parameters"] == 800
    assert facts["stored_parameters"] == 872
    assert facts["parameter_bytes"] == 4 * 872
    assert facts["gradient_bytes"] == 4 * 872


def test_a_users_formula_with_the_embedding_in_n_is_named_in_a_live_run() -> None:
    tokens, n = 1000, 72
    window = StepWindow(
        first_step=0, last_step=9, steps=10, elapsed_s=1.0, wall_s=1.0, tokens=10 * tokens,
        model_flops=10 * 6 * n * tokens, model_flops_by_precision={"fp32": 10 * 6 * n * tokens},
    )  # fmt: skip
    users = 6 * (n + 800) * tokens  # 6 N D with the embedding table in N
    facts = RunFacts(model(), torch.device("cpu"), flops_per_batch=users).evidence(window, None)
    peak = 10 * 6 * n * tokens / 0.4
    reading = UtilizationReading(window=window, mfu=0.4, precision="fp32", peak_flops_per_s=peak)
    assert "wrong_N" in [d.code for d in mm.check(reading, **facts)]
