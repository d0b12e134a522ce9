"""One training step on the meta device: shapes only, no memory, no kernels.

Three things stand between a model and a step without values. Models ask tensors what they hold ("is any token
padding?"), attention falls back to its unfused form, and masks (a sliding window, chunks) hold no values. All three are
answered here, and only while the step runs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.registry import operator_name
from mfu_monitor.internals.dispatcher import as_dispatch_mode
from mfu_monitor.internals.tensors import tensors_in

__all__ = ["count_step"]

aten = torch.ops.aten
ANSWERS = {"aten::all": True, "aten::any": False}
LARGEST_MASK_ELEMENTS = 2**30
"""Masks are made with values up to this size (a byte each): sequences of 32,768 tokens."""


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
    try:
        with _masks_with_values() as added:
            record, attention = _counted(model, arguments, keywords, training=training)
    except ConfigurationError:  # a model that mixes its masks with other tensors needs them on one device
        with _masks_with_values("eager") as added:
            record, attention = _counted(model, arguments, keywords, training=training)
    return dataclasses.replace(record, notes=(*record.notes, *attention.notes(), *dict.fromkeys(added)))


def _counted(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], *, training: bool
) -> tuple[StepRecord, _FusedAttention]:
    counter = FlopCounter(model)
    with ExitStack() as stack:
        if not training:
            stack.enter_context(torch.no_grad())
        stack.enter_context(as_dispatch_mode(_AnswerReads)())
        attention = stack.enter_context(_FusedAttention())
        stack.enter_context(counter)
        _run(model, arguments, keywords, training=training)
    return counter.record, attention


@contextmanager
def _masks_with_values(*kinds: str) -> Iterator[list[str]]:
    """Transformers' attention masks on the CPU, where they hold what they hide: they follow from shapes alone.

    Args:
        kinds: of attention to replace masks for; "sdpa" and "eager" where none are given.

    Yields:
        Notes on masks that hide pairs and whose values nothing reads.
    """
    module = sys.modules.get("transformers.masking_utils")
    masks: Any = getattr(module, "ALL_MASK_ATTENTION_FUNCTIONS", {})
    notes: list[str] = []
    wrappers: dict[str, Callable[[Any], Any]] = {"sdpa": _on_cpu, "eager": lambda make: _noted(make, notes)}
    wanted = {kind: wrappers[kind] for kind in kinds or wrappers if kind in masks}
    originals = {kind: masks[kind] for kind in wanted}
    try:
        for kind, wrap in wanted.items():
            masks[kind] = wrap(originals[kind])
        yield notes
    finally:
        for kind, original in originals.items():
            del masks[kind]  # the override of this instance alone
            if masks.get(kind) is not original:
                masks[kind] = original


def _on_cpu(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        rows, columns = kwargs.get("q_length"), kwargs.get("kv_length")
        is_small = isinstance(rows, int) and isinstance(columns, int) and rows * columns <= LARGEST_MASK_ELEMENTS
        if not is_small or kwargs.get("attention_mask") is not None:
            return make_mask(*args, **kwargs)
        try:
            return make_mask(*args, **{**kwargs, "device": torch.device("cpu")})
        except (RuntimeError, TypeError, ValueError):  # made of tensors that hold no values, such as positions
            return make_mask(*args, **kwargs)

    return made


def _noted(make_mask: Callable[..., Any], notes: list[str]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        mask = make_mask(*args, **kwargs)
        if mask is not None:
            notes.append(
                "attention is written out (eager) and adds its mask to the scores, which hold no values on the meta "
                "device: it is counted full-square, an upper bound."
            )
        return mask

    return made


def _run(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], *, training: bool) -> None:
    try:
        outputs = [t for t in tensors_in(model(*arguments, **keywords)) if t.requires_grad]
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


class _AnswerReads:
    """Answers the questions that models put to whole tensors, as for sequences of full length without padding.

    ``all()`` is true (no padding, one document a sequence) and ``any()`` false (no overflow, no padding). Any other
    value is refused: what follows from it would be a guess.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self._answer(args[0])
        output = func(*args, **(kwargs or {}))
        if (answer := ANSWERS.get(operator_name(func))) is not None:
            self._answers[output] = answer
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

    @property
    def has_values(self) -> bool:
        """True for a mask whose contents say which pairs it hides."""
        return isinstance(self.attn_mask, torch.Tensor) and not self.attn_mask.is_meta

    def fits_fused(self) -> bool:
        """True for what flash attention takes: one width, no mask or one with values."""
        is_plain = self.query.is_meta and self.query.dim() == 4 and (self.attn_mask is None or self.has_values)
        return is_plain and self.query.shape[-1] == self.value.shape[-1]

    def fused(self) -> torch.Tensor:
        """The same call as one operator; its backward is one operator too."""
        output: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
            self.query, self.key, self.value, 0.0, self.is_causal, attn_mask=self.attn_mask, scale=self.scale
        )[0]
        return output
