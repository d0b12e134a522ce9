"""What dynamo has compiled, read off its own counters and never changed; nothing here imports it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch

from mfu_monitor.internals.facts import fact

__all__ = [
    "compiled_call_grad_mode",
    "compiled_frame",
    "compiled_frames",
    "indexing_by_tensors",
    "latest_recompile",
    "skipped_by_dynamo",
    "without_dynamo",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_NOTHING: Mapping[str, Any] = {}
_COMPILES = "compiles are not seen: their time stays in the windows, and recompilations are not reported"


@fact("torch._dynamo.utils.counters", lost=_COMPILES, decides=False)
def _read_counters() -> Mapping[str, Mapping[str, int]] | None:
    utils = sys.modules.get("torch._dynamo.utils")
    return None if utils is None else utils.counters


def compiled_frames() -> int:
    """A number that changes when dynamo traces a frame or makes a graph; 0 while nobody has imported dynamo.

    Lazily compiled backward graphs are made in the step of their forward, so the forward's change covers them.
    """
    counters = _read_counters()
    if counters is None:
        return 0
    if not counters:
        return 0
    # `get` twice: counters is a defaultdict, and asking it by key would add the key.
    frames: int = counters.get("frames", _NOTHING).get("total", 0)
    graphs: int = counters.get("stats", _NOTHING).get("unique_graphs", 0)
    return frames + graphs


_GRAPH_NAMES = "__compiled_fn"
"""How the names begin by which dynamo's code calls its graphs; without such a frame more is in doubt, never less."""


def compiled_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from here upwards that runs code of dynamo's, with the globals and names of the user's code;
    None where no frame is known as such."""
    while frame is not None and not any(name.startswith(_GRAPH_NAMES) for name in frame.f_code.co_names):
        frame = frame.f_back
    return frame


def compiled_call_grad_mode(frame: FrameType | None) -> bool | None:
    """Whether gradients were on where a compiled graph was called that needs none and so runs with them off.

    AOT's wrapper keeps that in a local variable. None where AOT runs the graph and no frame has it; without AOT a graph
    has the grad mode that its own code sets.
    """
    end, is_aots = compiled_frame(frame), False
    while frame is not None and frame is not end:
        mode = frame.f_locals.get("grad_enabled") if "grad_enabled" in frame.f_code.co_varnames else None
        if isinstance(mode, bool):
            return mode
        is_aots |= "_functorch" in frame.f_code.co_filename
        frame = frame.f_back
    return None if is_aots else torch.is_grad_enabled()


@fact("torch._dynamo.utils.get_compilation_metrics", lost="recompilations have no reason", decides=False)
def latest_recompile() -> str | None:
    """What dynamo recompiled last, and why: ``"forward (model.py): tensor 'x' size mismatch ..."``; None if unknown."""
    utils = sys.modules.get("torch._dynamo.utils")
    metrics: list[Any] = [] if utils is None else utils.get_compilation_metrics()
    latest = next((m for m in reversed(metrics) if getattr(m, "recompile_reason", None)), None)
    if latest is None:
        return None
    return f"{latest.co_name} ({os.path.basename(str(latest.co_filename))}): {latest.recompile_reason}"


@fact("torch._disable_dynamo", lost="dynamo may trace what counts, and warns of it", decides=False)
def _read_disable(function: Any) -> Any:
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]


@fact(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy", lost="counting takes longer", otherwise=False, decides=False
)
def _skip(code: CodeType) -> bool:
    frames: Any = torch._C._dynamo.eval_frame  # part of torch's own library: nothing is imported
    leave = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(leave, leave))
    return True


def skipped_by_dynamo(function: Any) -> bool:
    """Have dynamo pass over a function and all that it calls, at no cost a call; False where it cannot be told."""
    return _skip(function.__code__)


def without_dynamo(function: _F) -> _F:
    """``function``, never traced; the public ``torch.compiler.disable`` would import dynamo. Without it: as it is."""
    return cast(_F, _read_disable(function) or function)


@fact("torch._dynamo._trace_wrapped_higher_order_op", lost="masks of flex_attention that index tensors are not read")
def _index_mode() -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def indexing_by_tensors() -> AbstractContextManager[Any]:
    """What flex_attention itself enters so that ``buffer[q_idx]`` works under vmap; without it such a mask raises."""
    return _index_mode() or contextlib.nullcontext()
