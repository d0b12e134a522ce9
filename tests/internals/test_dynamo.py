"""Compiles are seen by dynamo's counters, and nothing else looks like one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from mfu_monitor.internals.dynamo import compiled_frames, latest_recompile


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def test_a_compile_and_a_recompile_change_the_number_and_warm_steps_do_not() -> None:
    model = torch.compile(nn.Linear(4, 4), backend="aot_eager", dynamic=False)
    seen = [compiled_frames()]
    for rows in (2, 2, 3, 3):
        model(torch.randn(rows, 4)).sum().backward()
        seen.append(compiled_frames())
    changed = [after != before for before, after in itertools.pairwise(seen)]
    assert changed == [True, False, True, False]


def test_eager_steps_do_not_change_the_number() -> None:
    before = compiled_frames()
    nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()
    assert compiled_frames() == before


def test_the_latest_recompile_is_named_with_its_reason() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(doubled, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    assert latest_recompile() is None
    compiled(torch.ones(3))
    told = latest_recompile()
    assert told is not None
    assert told.startswith("doubled (test_dynamo.py): ")
    assert "size mismatch" in told
    torch._dynamo.reset()
