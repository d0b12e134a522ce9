"""Counting changes no bit of any model of the conformance tables, in any precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.0")

from ..conformance.models import TEXT_MODELS, ModelCase
from ..conformance.models_vision import VISION_MODELS
from .bits import WATCHERS, compare

CASES = [case for case in (*TEXT_MODELS, *VISION_MODELS) if case.device == "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(case: ModelCase, dtype: torch.dtype, *, checkpointed: bool = False) -> tuple[nn.Module, Any]:
    model, inputs = case.build(case.S, "sdpa")
    if checkpointed:
        if case.checkpoint is not None:
            case.checkpoint(model, False)
        else:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return model.to(dtype).train(), {name: cast(value) for name, value in inputs.items()}


def train(model: nn.Module, inputs: Any) -> Any:
    output = model(**inputs)
    (output if isinstance(output, torch.Tensor) else output.loss).float().backward()
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_counting_changes_no_bit_of_a_model(case: ModelCase, dtype: torch.dtype) -> None:
    compare(lambda: make(case, dtype), train, "FlopCounter", steps=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_monitor_changes_no_bit_of_a_checkpointed_model(case: ModelCase) -> None:
    compare(lambda: make(case, torch.float32, checkpointed=True), train, "Monitor", steps=2)


def test_both_ways_of_counting_are_compared() -> None:
    assert set(WATCHERS) == {"FlopCounter", "Monitor"}
