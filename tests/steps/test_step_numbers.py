"""The numbers by which ranks compare steps stay those of the steps, also where one rank does not finish one."""

from __future__ import annotations

from typing import Any

import torch

from mfu_monitor.errors import Stages
from mfu_monitor.steps.step_counter import StepCounter


class Counter:
    def __init__(self, record: Any) -> None:
        self.record, self.prints = record, object()

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


def test_a_step_that_is_not_finished_keeps_its_number_and_sends_no_fingerprints(record: Any, monkeypatch: Any) -> None:
    counter = StepCounter(
        None, Stages(), count="every_step", counter_factory=lambda model: Counter(record()), compile_counter=lambda: 0
    )
    offered: list[int] = []
    monkeypatch.setattr(counter._repeats, "add", lambda step, prints, batch, has_batch: offered.append(step))

    def step(*, is_finished: bool) -> None:
        counter.begin(torch.zeros(2, 8, dtype=torch.long), None)
        if is_finished:
            counter.end(True)
        else:
            counter.abort((ValueError, ValueError(), None))

    for is_finished in (True, False, True):
        step(is_finished=is_finished)
        counter.abort()  # nothing is open: no step
    assert offered == [0, 2]
