"""One training step on the meta device: shapes only, no memory, no kernels.

Two things stand between a model and a step without values. Models ask tensors what they hold ("is any token padding?"),
and attention falls back to its unfused form. Both are answered here, and only while the step runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError

__all__ = ["count_step"]

aten = torch.ops.aten
ANSWERS = {"aten::all": True, "aten::any": False}


def count_step(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], *, training: bool) -> StepRecord:
    """Run the model once on the meta device, backward included, and give the record.

    Args:
        model: on the meta device.
        arguments: positional inputs of its forward, on the meta device.
        keywords: keyword inputs.
        training: forward and backward from every floating output; else forward alone, without gradients.

    Raises:
        ConfigurationError: the model asks for values that shapes do not give, or cannot run on these inputs.
    """
    model.train(training)
    counter = FlopCounter(model)
    with ExitStack() as stack:
        if not training:
            stack.enter_context(torch.no_grad())
        stack.enter_context(_AnswerReads())
        attention = stack.enter_context(_FusedAttention())
        stack.enter_context(counter)
        _run(model, arguments, keywords, training=training)
    record = counter.record
    return dataclasses.replace(record, notes=(*record.notes, *attention.notes()))


def _run(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], *, training: bool) -> None:
    try:
        outputs = [t for t in _tensors(model(*arguments, **keywords)) if t.requires_grad]
        if training and outputs:
            torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} did not run on the meta device: {type(error).__name__}: {error}\n"
            "Either the inputs do not fit (see --shape, --sequence-length), or its path depends on values, which the "
            "meta device does not hold. Then count a real step: `with mfu_monitor.FlopCounter(model) as counter: ...`."
        ) from error
    finally:
        model.zero_grad(set_to_none=True)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


class _AnswerReads(TorchDispatchMode):
    """Answers the questions that models put to whole tensors, as for sequences of full length without padding.

    ``all()`` is true (no padding, one document a sequence) and ``any()`` false (no overflow, no padding). Any other
    value is refused: what follows from it would be a guess.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self._answer(args[0])
        output = func(*args, **(kwargs or {}))
        if func._schema.name in ANSWERS:
            self._answers[output] = ANSWERS[func._schema.name]
        return output

    def _answer(self, tensor: torch.Tensor) -> bool:
        if (answer := self._answers.get(tensor)) is not None:
            return bool(answer)
        raise ConfigurationError(
            f"the model reads a {tensor.dtype} value of a tensor while it runs, and decides by it; shapes do not hold "
            "it. Count a real step instead: `with mfu_monitor.FlopCounter(model) as counter: ...`."
        )


class _FusedAttention(TorchFunctionMode):
    """Gives attention on the meta device the fused operator that a device would run, so that its bytes are right."""

    def __init__(self) -> None:
        super().__init__()
        self._masks_without_values = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = _AttentionCall(*args, **kwargs)
        if isinstance(call.attn_mask, torch.Tensor) and call.attn_mask.is_meta:
            self._masks_without_values += 1
        return call.fused() if call.fits_fused() else func(*args, **kwargs)

    def notes(self) -> tuple[str, ...]:
        """What could not be known about masks."""
        if not self._masks_without_values:
            return ()
        return (
            f"{self._masks_without_values} attention calls got their mask (window, padding, bias) as a tensor, which "
            "has no values on the meta device: they are counted full-square, an upper bound.",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _AttentionCall:
    """Arguments of ``scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def fits_fused(self) -> bool:
        """True for what flash attention takes: no mask, one width."""
        is_plain = self.query.is_meta and self.query.dim() == 4 and self.attn_mask is None
        return is_plain and self.query.shape[-1] == self.value.shape[-1]

    def fused(self) -> torch.Tensor:
        """The same call as one operator; its backward is one operator too."""
        output: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
            self.query, self.key, self.value, 0.0, self.is_causal, scale=self.scale
        )[0]
        return output
