"""The pattern of parameters that need gradients."""

from __future__ import annotations

import torch
from torch import nn

from mfu_monitor.steps.trainable import TrainableParameters


def test_freezing_shows_at_once_and_unfreezing_restores_the_number() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainable = TrainableParameters(model)
    before = trainable.pattern()
    model[0].requires_grad_(False)
    frozen = trainable.pattern()
    model[0].requires_grad_(True)
    assert frozen != before
    assert trainable.pattern() == before


def test_different_patterns_have_different_numbers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainable = TrainableParameters(model)
    numbers = set()
    for i, j in ((True, True), (True, False), (False, True), (False, False)):
        model[0].requires_grad_(i)
        model[1].requires_grad_(j)
        numbers.add(trainable.pattern())
    assert len(numbers) == 4


class _Many(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.items = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(n))


def test_freezing_a_block_of_a_large_model_shows_at_once() -> None:
    model = _Many(1000)
    trainable = TrainableParameters(model)
    before = trainable.pattern()
    for parameter in list(model.parameters())[500:520]:
        parameter.requires_grad_(False)
    assert trainable.pattern() != before


def test_freezing_one_parameter_of_a_large_model_shows_within_a_stride() -> None:
    model = _Many(1000)
    trainable = TrainableParameters(model)
    before = trainable.pattern()
    next(iter(model.parameters())).requires_grad_(False)
    assert any(trainable.pattern() != before for _ in range(16))  # 1000 parameters, 64 a step


def test_added_parameters_are_seen_after_a_refresh() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    trainable = TrainableParameters(model)
    before = trainable.pattern()
    model.append(nn.Linear(2, 2))
    trainable.refresh()
    assert trainable.pattern() != before


def test_no_model_has_one_pattern() -> None:
    trainable = TrainableParameters(None)
    assert trainable.pattern() == trainable.pattern()
