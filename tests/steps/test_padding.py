"""Sums over masks and labels: right, and never waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfu_monitor.steps.padding import PaddingCounter


def batch() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 4:] = 0
    labels = torch.where(mask.bool(), 1, -100)
    labels[0, :6] = -100
    return {"input_ids": torch.zeros(2, 8, dtype=torch.long), "attention_mask": mask, "labels": labels}


def test_sums_of_a_window_are_added_up() -> None:
    padding = PaddingCounter()
    for _ in range(3):
        padding.add(padding.measure(batch()))
    assert padding.take()() == {"tokens_not_padding": 36, "tokens_in_loss": 18}
    assert padding.take()() == {"tokens_not_padding": None, "tokens_in_loss": None}


def test_one_batch_without_a_mask_makes_the_sum_unknown() -> None:
    padding = PaddingCounter()
    padding.add(padding.measure(batch()))
    padding.add(padding.measure({"input_ids": torch.zeros(2, 8, dtype=torch.long)}))
    assert padding.take()() == {"tokens_not_padding": None, "tokens_in_loss": None}


def test_sums_that_lie_on_a_device_are_read_when_their_event_is_ready(fake_device: Any) -> None:
    padding = PaddingCounter(event_factory=fake_device.event)
    padding.add((torch.tensor(12), torch.tensor(6)))  # what measure() gives for a batch on an accelerator
    padding.add((torch.tensor(12), torch.tensor(6)))
    fake_device.advance(1.0)
    read = padding.take()
    assert read() is None
    fake_device.catch_up()
    assert read() == {"tokens_not_padding": 24, "tokens_in_loss": 12}
    assert fake_device.waits == []


def test_labels_that_need_no_gradient_stay_that_way() -> None:
    mask = torch.ones(2, 8, requires_grad=True)
    counted, _ = PaddingCounter().measure({"input_ids": torch.zeros(2, 8, dtype=torch.long), "attention_mask": mask})
    assert counted == 16


@pytest.mark.parametrize("value", [None, 5, "text"])
def test_a_batch_that_is_no_text_has_no_sums(value: Any) -> None:
    assert PaddingCounter().measure(value) == (None, None)
