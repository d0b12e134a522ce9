"""The counter's self-check: it passes on this torch, notices what moved, and leaves nothing behind."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.counting import autograd_links, frames, observer, phase, self_check
from mfu_monitor.errors import UncountedWorkWarning

LINEAR_FLOPS = 2 * 3 * 5 * 7
"""Forward of a Linear(5, 7) on 3 rows; a training step on data needs it twice: the input asks for no gradient."""


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(self_check, "_found", {})
    return


def count_linear() -> mm.StepRecord:
    model = nn.Linear(5, 7)
    with mm.FlopCounter(model) as counter:
        model(torch.ones(3, 5)).sum().backward()
    return counter.record


def test_every_capability_is_proved_on_this_torch() -> None:
    assert self_check.failed_capabilities() == ()
    record = count_linear()
    assert record.model_flops == 2 * LINEAR_FLOPS
    assert not record.is_lower_bound


@pytest.mark.parametrize("capability", self_check.CAPABILITIES, ids=lambda c: c.name)
def test_each_capability_runs_products_that_an_independent_sum_expects(capability: self_check.Capability) -> None:
    model, recompute, other = capability.expected
    assert model > 0
    assert (model + other) % 128 == 0
    assert self_check._count(capability.run) == (model, recompute, other)


def break_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames.StackReader, "read", lambda *_, **__: frames.CallSite())


def break_graph_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "running_pass", lambda: -1)


def break_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "phase_of", lambda *_, **__: phase.Phase.RECOMPUTE)


def break_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise AttributeError("module 'torch._C._autograd' has no attribute '_get_sequence_nr'")

    monkeypatch.setattr(autograd_links.SequenceLinks, "add", missing)


def break_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase.GradModeMemory, "is_grad_on", lambda *_: True)


@pytest.mark.parametrize("broken", [break_frames, break_graph_task, break_phase, break_links, break_grad_mode])
def test_what_is_missing_or_lies_is_named_once_and_no_record_is_exact(broken: Any, monkeypatch: Any) -> None:
    broken(monkeypatch)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        records = [count_linear(), count_linear()]
    mine = [w for w in given if issubclass(w.category, UncountedWorkWarning)]
    assert len(mine) == 1
    assert f"does not count rightly with torch {torch.__version__}" in str(mine[0].message)
    assert all(record.is_lower_bound for record in records)
    assert any("self-check fails on this torch" in note for note in records[0].notes)


def test_a_wrong_count_says_what_was_seen_and_expected(monkeypatch: Any) -> None:
    break_graph_task(monkeypatch)
    with pytest.warns(UncountedWorkWarning):
        failed = self_check.failed_capabilities()
    # Two products rerun by the checkpoint count as model where nobody sees that backward runs: 8 for 6.
    assert "reentrant checkpointing: model 1024 FLOPs instead of 768, recompute 0 FLOPs instead of 256" in failed


def test_it_changes_nothing_in_the_process() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    torch.manual_seed(0)
    random.seed(0)
    before = torch.get_rng_state(), random.getstate(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    counters = {k: dict(v) for k, v in torch._dynamo.utils.counters.items()}
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert self_check.failed_capabilities() == ()
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert {k: dict(v) for k, v in torch._dynamo.utils.counters.items()} == counters
    assert _get_current_dispatch_mode_stack() == []


def test_losses_gradients_weights_and_random_state_are_equal_with_and_without_it() -> None:
    def train(*, is_checked: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        kept = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 6)).pow(2).sum()
            if is_checked:
                self_check._found.clear()
                assert self_check.failed_capabilities() == ()
            loss.backward()
            optimizer.step()
            kept += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return [*kept, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    bare, checked = train(is_checked=False), train(is_checked=True)
    assert len(bare) == len(checked) == 3 * (1 + 4) + 4 + 1
    assert all(torch.equal(a, b) for a, b in zip(bare, checked, strict=True))


def test_users_dispatch_modes_see_nothing_of_it_and_stay() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    class Mode(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Mode.calls += 1
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        assert self_check.failed_capabilities() == ()
        assert _get_current_dispatch_mode_stack() == [mode]
    assert Mode.calls == 0


def test_a_torch_newer_than_any_tested_gets_one_line(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    with caplog.at_level("INFO", "mfu_monitor"):
        count_linear()
        count_linear()
    assert [r.message for r in caplog.records] == [
        "torch 2.99.0+cpu is newer than 2.15, the newest that mfu_monitor was tested with; its self-check decides what "
        "is called exact"
    ]


def test_the_newest_tested_torch_is_the_newest_row_of_the_table() -> None:
    kept = json.loads((Path(__file__).parents[2] / "docs" / "versions.json").read_text())
    rows = [tuple(map(int, result["torch"].split("+")[0].split(".")[:2])) for result in kept.values()]
    assert max(rows) == self_check.NEWEST_TESTED
