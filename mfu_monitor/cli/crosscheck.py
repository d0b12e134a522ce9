"""The count beside other ways to get one, with the reason for every difference over one percent."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mfu_monitor.cli.models import LoadedModel
from mfu_monitor.counting.step_record import FlopTotals, Phase, StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import (
    TRAINING_FLOPS_PER_PARAMETER,
    chinchilla_training_flops,
    logical_numel,
    non_embedding_parameters,
    palm_flops_per_token,
)

__all__ = ["Comparison", "compare"]

NOTEWORTHY = 0.01
"""Differences below this share of our count are left without a reason."""

FVCORE_PRODUCTS = frozenset(
    {"addmm", "baddbmm", "bmm", "matmul", "mm", "linear", "mv", "dot", "einsum", "conv", "convolution"}
)
"""fvcore's names for what is a product; the others that it counts (norms, pooling, interpolation) count 0 here."""
FVCORE_BATCHED = ("bmm", "matmul", "einsum", "baddbmm")
OUR_BATCHED = ("aten::bmm", "aten::baddbmm")
LARGEST_TRACED_FOR_REAL = 200_000_000
"""Parameters up to which a model that cannot be traced on the meta device is traced with memory: 0.8 GB in fp32."""
_SDPA = "aten::scaled_dot_product_attention"
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
WHOLES = frozenset(
    {
        *(f"aten::{kind}{suffix}" for kind in _RECURRENT for suffix in ("", "_cell")),
        "aten::_native_multi_head_attention",
        "aten::_transformer_encoder_layer_fwd",
        *(f"aten::{name}" for name in ("bilinear", "tensordot", "inner", "cdist", "chain_matmul", "linalg_multi_dot")),
    }
)
"""Operators that a tracer sees whole, and a dispatcher by the products that they become."""


@dataclass(frozen=True, slots=True)
class _Traced:
    """What fvcore says, times two."""

    by_operator: dict[str, int]
    by_module: dict[str, int]
    """Without descendants, by the model's own names."""
    missing: dict[str, set[str]]
    """Operators that it has no formula for, by the module that calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Another value beside ours."""

    name: str
    flops: int | None
    """None where that way gives no value; ``reasons`` says why."""
    ours: int
    reasons: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """``flops / ours - 1``."""
        return None if self.flops is None or not self.ours else self.flops / self.ours - 1


def compare(model: LoadedModel, record: StepRecord) -> list[Comparison]:
    """fvcore (forward), 6ND and PaLM (training) beside a counted training step.

    Args:
        model: what was counted.
        record: its step, backward included.
    """
    rows = [_fvcore(model, record), _six_n_d(model, record)]
    palm = _palm(model, record)
    return rows if palm is None else [*rows, palm]


# --- fvcore -----------------------------------------------------------------------------------------------------------


class _TensorsOnly(nn.Module):
    """Takes tensors and returns one, which is what a tracer can trace."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.inner = model.module
        self._names = list(model.keywords)
        self._positional = len(model.arguments)

    def forward(self, *tensors: Any) -> Any:
        named = dict(zip(self._names, tensors[self._positional :], strict=True))
        output = self.inner(*tensors[: self._positional], **named)
        values = output.values() if isinstance(output, dict) else output
        return output if isinstance(output, torch.Tensor) else next(v for v in values if isinstance(v, torch.Tensor))


def _fvcore(model: LoadedModel, record: StepRecord) -> Comparison:
    forward = record.by_phase().get("forward", FlopTotals())
    name = "fvcore x 2, forward"
    try:
        traced = _trace(model)
    except ConfigurationError:
        raise
    except Exception as error:  # noqa: BLE001  (the tracer may fail in any way)
        reason = f"fvcore cannot trace this model: {type(error).__name__}: {str(error).splitlines()[0]}"
        return Comparison(name=name, flops=None, ours=forward.model_flops, reasons=(reason,))
    extra = {op: count for op, count in traced.by_operator.items() if op not in FVCORE_PRODUCTS}
    parts = [
        (f"fvcore counts {op}, which is not a matmul, attention or convolution", count) for op, count in extra.items()
    ]
    parts += _missing_in_fvcore(record, traced)
    parts += _wholes_missing_in_fvcore(record, traced)
    return _explained(name, sum(traced.by_operator.values()), forward.model_flops, parts)


def _trace(model: LoadedModel) -> _Traced:
    """fvcore's FLOPs, and the operators that it has no formula for."""
    try:
        from fvcore.nn import FlopCountAnalysis
    except ImportError:
        raise ConfigurationError("--crosscheck compares with fvcore: pip install 'mfu-monitor[crosscheck]'.") from None

    def analyse(module: nn.Module, inputs: tuple[Any, ...]) -> _Traced:
        with _quiet(), torch.no_grad():
            return _read(FlopCountAnalysis(module.eval(), inputs), module)

    module, inputs = _TensorsOnly(model), (*model.arguments, *model.keywords.values())
    try:
        return analyse(module, inputs)
    except Exception:
        # the tracer cannot follow convolutions on the meta device
        if sum(p.numel() for p in module.parameters()) > LARGEST_TRACED_FOR_REAL:
            raise
        real = copy.deepcopy(module).to_empty(device="cpu")
        for tensor in (*real.parameters(), *real.buffers()):
            tensor.data.zero_()  # what memory happened to hold would be a wrong index somewhere
        return analyse(real, tuple(torch.zeros_like(x, device="cpu") for x in inputs))


def _read(analysis: Any, module: nn.Module) -> _Traced:
    own_flops: dict[str, int] = {}
    own_missing: dict[str, set[str]] = {}
    for name, part in module.named_modules():
        children = [f"{name}.{child}".lstrip(".") for child, _ in part.named_children()]
        flops = analysis.by_module()[name] - sum(analysis.by_module()[child] for child in children)
        missing = analysis.unsupported_ops(name)
        for child in children:
            missing = missing - analysis.unsupported_ops(child)
        inner = name.removeprefix("inner").removeprefix(".")
        own_flops[inner] = own_flops.get(inner, 0) + 2 * int(flops)
        own_missing[inner] = own_missing.get(inner, set()) | set(missing)
    return _Traced({op: 2 * int(count) for op, count in analysis.by_operator().items()}, own_flops, own_missing)


def _wholes_missing_in_fvcore(record: StepRecord, traced: _Traced) -> Iterator[tuple[str, int]]:
    """What fvcore lacks in the modules that call an operator which we saw by its parts."""
    forward = StepRecord(ops=tuple(op for op in record.ops if op.phase is Phase.FORWARD))
    names = forward.by_op()
    ours = forward.by_module(inclusive=False)
    for module, missing in traced.missing.items():
        wholes = [op for op in sorted(missing & WHOLES) if op not in names]
        if wholes and not missing & {*names, _SDPA}.difference(_without_products(forward)):
            lacking = traced.by_module[module] - ours.get(module, FlopTotals()).model_flops
            yield f"fvcore has no formula for {', '.join(wholes)}", min(0, lacking)


def _without_products(record: StepRecord) -> set[str]:
    return {name for name, totals in record.by_op().items() if not totals.model_flops}


def _missing_in_fvcore(record: StepRecord, traced: _Traced) -> Iterator[tuple[str, int]]:
    """What we count forward of the operators that fvcore saw and has no formula for."""
    missing = {op for ops in traced.missing.values() for op in ops}
    batched = sum(traced.by_operator.get(op, 0) for op in FVCORE_BATCHED)
    forward = {name: totals for name, totals in _forward_by_op(record).items() if totals.model_flops}
    for name in sorted(missing - {_SDPA}):
        if name in forward:
            yield f"fvcore has no formula for {name}", -forward[name].model_flops
    attention = sum(totals.model_flops for name, totals in forward.items() if "scaled_dot_product" in name)
    products = sum(forward[name].model_flops for name in OUR_BATCHED if name in forward)
    if _SDPA in missing:
        # run by the math path, attention is batched products with us, which fvcore does not see
        yield f"fvcore has no formula for {_SDPA}", -attention - max(0, products - batched)
    else:
        yield "fvcore counts masked query-key pairs", sum(t.palm_model_flops - t.model_flops for t in forward.values())


def _forward_by_op(record: StepRecord) -> dict[str, FlopTotals]:
    return StepRecord(ops=tuple(op for op in record.ops if op.phase is Phase.FORWARD)).by_op()


@contextmanager
def _quiet() -> Iterator[None]:
    """fvcore and the tracer report on the root logger what we report ourselves."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


# --- 6ND and PaLM -----------------------------------------------------------------------------------------------------


def _six_n_d(model: LoadedModel, record: StepRecord) -> Comparison:
    flops = chinchilla_training_flops(non_embedding_parameters(model.module), model.tokens)
    return _explained(f"6ND, {model.unit}s", flops, record.model_flops, _uses_of_weights(model, record))


def _uses_of_weights(model: LoadedModel, record: StepRecord) -> list[tuple[str, int]]:
    """What each kind of module adds to 6ND, and takes from it: 6ND uses every weight once a token."""
    sums: dict[str, list[int]] = {}
    own = record.by_module(inclusive=False)
    for name, module in model.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        weights = sum(logical_numel(p) for p in module.parameters(recurse=False))
        counted = own.pop(name, FlopTotals()).model_flops
        entry = sums.setdefault(type(module).__name__, [0, 0])
        entry[0] += TRAINING_FLOPS_PER_PARAMETER * weights * model.tokens
        entry[1] += counted
    return [(_use_of(kind, *pair, unit=model.unit), pair[0] - pair[1]) for kind, pair in sums.items()]


_LEFT_OUT = "multiplies activations with each other, which 6ND leaves out"


def _use_of(kind: str, assumed: int, counted: int, *, unit: str) -> str:
    if not assumed:
        return f"{kind} {_LEFT_OUT}"
    if not counted:
        return f"the parameters of {kind} take part in no product"
    return f"{kind} uses a weight {counted / assumed:.2f} times a {unit}, not once"


def _palm(model: LoadedModel, record: StepRecord) -> Comparison | None:
    config = model.config
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not (model.sequence_length and isinstance(layers, int) and isinstance(heads, int) and hidden):
        return None
    n = non_embedding_parameters(model.module)
    width = getattr(config, "head_dim", None) or hidden // heads
    per_token = palm_flops_per_token(
        n, layers=layers, heads=heads, head_width=width, sequence_length=model.sequence_length
    )
    flops = model.tokens * per_token
    attention = flops - chinchilla_training_flops(n, model.tokens)
    masked = record.palm_model_flops - record.model_flops
    uses = [part for part in _uses_of_weights(model, record) if _LEFT_OUT not in part[0]]
    parts = [("PaLM's form counts masked query-key pairs", masked), *uses]
    own, modules = record.by_module(inclusive=False), dict(model.module.named_modules())
    weightless = (name for name in own if name in modules and not list(modules[name].parameters(recurse=False)))
    full_square = sum(own[name].palm_model_flops for name in weightless)
    parts.append(("attention's products are not 12 L H Q T here", attention - full_square))
    return _explained("PaLM 6N + 12 L H Q T, tokens", flops, record.model_flops, parts)


# --- reasons ----------------------------------------------------------------------------------------------------------


def _explained(name: str, flops: int, ours: int, parts: Iterable[tuple[str, int]]) -> Comparison:
    """Names every part of the difference that is over one percent of ours, and what is left without a name."""
    difference, parts = flops - ours, list(parts)
    if not ours or abs(difference) <= NOTEWORTHY * ours:
        return Comparison(name=name, flops=flops, ours=ours)
    small = sum(amount for _, amount in parts if not _is_noteworthy(amount, ours))
    left = difference - sum(amount for _, amount in parts)
    parts += [("many small differences together", small), ("no reason found for the rest", left)]
    reasons = [f"{text} ({amount / ours:+.1%})" for text, amount in parts if _is_noteworthy(amount, ours)]
    return Comparison(name=name, flops=flops, ours=ours, reasons=tuple(reasons))


def _is_noteworthy(amount: int, ours: int) -> bool:
    return abs(amount) > NOTEWORTHY * ours
