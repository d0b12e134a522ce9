"""The code objects by which frames on the Python stack are known: modules, the engine, optimizers, checkpoints.

Read once, when first asked. A name that is gone gives the empty set, which no frame is in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.utils import checkpoint

from mfu_monitor.internals.autograd_state import custom_node_class
from mfu_monitor.internals.facts import fact

__all__ = ["KnownCodes", "is_compiled_wrapper", "known_codes", "misread_frames", "pipeline_rehearsal"]

Codes = frozenset[CodeType]
_NONE: Codes = frozenset()
_NO_CHILDREN: Mapping[str, Any] = {}
_PIPELINE_REHEARSAL = ("_forward_metadata_inference", "_backward_metadata_inference")


@dataclass(frozen=True, slots=True)
class KnownCodes:
    """What a frame's code is compared with."""

    module_call: Codes
    outer_module_call: Codes
    """Of them the one that calls the other, with the same module."""
    engine: Codes
    custom_backward: Codes
    optimizer_step: Codes
    checkpoint_entry: Codes
    checkpoint_file: str
    compiled_autograd_file: str
    compiled_call: str
    """A closure of ``torch._dynamo.eval_frame``, which is not imported for its sake."""


@cache
def known_codes() -> KnownCodes:
    """All of them, for this torch."""
    module_call = _module_call()
    return KnownCodes(
        module_call=module_call,
        outer_module_call=frozenset(code for code in module_call if code.co_name == "_wrapped_call_impl"),
        engine=_engine(),
        custom_backward=_custom_backward(),
        optimizer_step=_optimizer_step(),
        checkpoint_entry=_checkpoint_entry(),
        checkpoint_file=checkpoint.__file__,
        compiled_autograd_file=str(Path(torch.__file__).parent / "_dynamo" / "compiled_autograd.py"),
        compiled_call="compile_wrapper",
    )


@fact("torch.nn.Module._call_impl", lost="modules are not named, nor known where they run again", otherwise=_NONE)
def _module_call() -> Codes:
    module: Any = torch.nn.Module
    return frozenset({module._call_impl.__code__, module._wrapped_call_impl.__code__})


@fact("torch.autograd.graph._engine_run_backward", lost="create_graph of a backward is not known", otherwise=_NONE)
def _engine() -> Codes:
    return frozenset({torch.autograd.graph._engine_run_backward.__code__})


@fact("torch.autograd.function.BackwardCFunction.apply", lost="custom backwards are not known", otherwise=_NONE)
def _custom_backward() -> Codes:
    node: Any = custom_node_class()
    boxed = getattr(node, "apply_boxed", None)  # since torch 2.14
    return frozenset(f.__code__ for f in (node.apply, boxed) if f is not None)


@fact("torch.optim.Optimizer.profile_hook_step", lost="work of optimizers is not told from others'", otherwise=_NONE)
def _optimizer_step() -> Codes:
    inner: Any = torch.optim.Optimizer.profile_hook_step
    found = [c for c in inner.__code__.co_consts if isinstance(c, CodeType) and c.co_name == "wrapper"]
    if not found:
        raise AttributeError("profile_hook_step.<locals>.wrapper")
    return frozenset(found)


@fact("torch.utils.checkpoint.checkpoint", lost="checkpointed regions are not known", otherwise=_NONE)
def _checkpoint_entry() -> Codes:
    function: Any = checkpoint.checkpoint
    return frozenset({function.__code__})


@fact(
    "torch.distributed.pipelining.stage.PipelineStage._forward_metadata_inference",
    lost="what a pipeline runs to learn shapes is taken for work of its first step",
    otherwise=_NONE,
)
def pipeline_rehearsal() -> Codes:
    """What a pipeline's stage runs once before its first step; asked only with a stage's frame on the stack."""
    stage: Any = sys.modules["torch.distributed.pipelining.stage"].PipelineStage
    names = ("_shape_inference",) if hasattr(stage, "_shape_inference") else _PIPELINE_REHEARSAL
    return frozenset(getattr(stage, name).__code__ for name in names)


def misread_frames() -> tuple[str, ...]:
    """What frames are read by that this torch spells otherwise: each with what is lost; none is well.

    Frames that only run in the user's own modules and optimizers are not tried: their hooks would see it. What they
    hold is read off the code that torch has.
    """
    known = known_codes()
    module: Any = torch.nn.Module.__call__
    step: Any = misread_frames  # any function: it is not called
    optimizer: Any = torch.optim.Optimizer.profile_hook_step(step)
    asked = {
        "torch.nn.Module.__call__: modules are not named": (known.module_call, module, ("self",)),
        "torch.optim.Optimizer.step: work of optimizers is not told from others'": (
            known.optimizer_step,
            optimizer,
            ("args", "kwargs"),
        ),
    }
    return tuple(
        lost
        for lost, (codes, function, names) in asked.items()
        if function.__code__ not in codes or not set(names) <= set(function.__code__.co_varnames)
    )


def is_compiled_wrapper(module: Any) -> bool:
    """True for what holds a graph that a compiler made or interprets: no module of the user's.

    ``_orig_mod`` of ``torch.compile``'s wrapper, since torch 2.0; without it a wrapped graph is named as a module.
    """
    children = vars(module).get("_modules") or _NO_CHILDREN  # asking the module itself raises within, if it has none
    return isinstance(children.get("_orig_mod", module), torch.fx.GraphModule)
