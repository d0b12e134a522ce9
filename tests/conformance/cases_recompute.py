"""Rows of recomputation: what runs again in backward is hardware work and never model work.

A product of the block costs f = 2 T I O on T rows; training costs three f, and what is run again comes on top.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from .case import Case, Workload
from .cases_training import Run, data, linears

EVERYWHERE = ("cpu", "meta")


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(**kwargs: Any) -> Workload:
    """Linear(256,1024)-GELU-Linear(1024,256) as one checkpointed block on 32 tokens inside a network."""
    return (
        Run(lambda p, x: checkpoint(p["block"], x, **kwargs), block=linears(256, 1024, 256)),
        (data(32, 256, requires_grad=True),),
    )


def checkpointed_function() -> Workload:
    """The same block as a function on parameters, which no module's forward surrounds."""

    def block(first: torch.Tensor, second: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ first) @ second

    return (
        lambda *operands: checkpoint(block, *operands, use_reentrant=True),
        (
            data(256, 1024, requires_grad=True),
            data(1024, 256, requires_grad=True),
            data(32, 256, requires_grad=True),
        ),
    )


def nested_checkpoints(parts: nn.ModuleDict, x: torch.Tensor) -> Any:
    def outer(y: torch.Tensor) -> Any:
        return checkpoint(parts["second"], parts["first"](y), use_reentrant=True)

    return checkpoint(outer, x, use_reentrant=True)


class Recomputing(torch.autograd.Function):
    """relu(x w1) w2 that keeps only its inputs, and runs the first product again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w1, w2)
        return torch.relu(x @ w1) @ w2

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> Any:
        x, w1, w2 = ctx.saved_tensors
        h = torch.relu(x @ w1)
        grad_h = (grad_y @ w2.t()) * (h > 0)
        return grad_h @ w1.t(), x.t() @ grad_h, h.t() @ grad_y


CASES: tuple[Case, ...] = (
    Case(
        id="block",
        description="Linear(256,1024)-GELU-Linear(1024,256), 32 tokens, not checkpointed",
        build=lambda: (linears(256, 1024, 256), (data(32, 256, requires_grad=True),)),
        phase="training",
        forward_flops="2 * (2 * 32 * 256*1024)",
        model_flops="6 * (2 * 32 * 256*1024)",
        devices=EVERYWHERE,
        covers=("C15",),
    ),
    Case(
        id="block-non-reentrant",
        description="stops once the last product's input is there: one product is run again",
        build=lambda: checkpointed(use_reentrant=False),
        phase="training",
        forward_flops="2 * (2 * 32 * 256*1024)",
        model_flops="6 * (2 * 32 * 256*1024)",
        hardware_flops="7 * (2 * 32 * 256*1024)",
        recompute_flops="2 * 32 * 256*1024",
        devices=EVERYWHERE,
        covers=("C15",),
    ),
    Case(
        id="block-reentrant",
        description="runs the whole block again",
        build=lambda: checkpointed(use_reentrant=True),
        phase="training",
        forward_flops="2 * (2 * 32 * 256*1024)",
        model_flops="6 * (2 * 32 * 256*1024)",
        hardware_flops="8 * (2 * 32 * 256*1024)",
        recompute_flops="2 * (2 * 32 * 256*1024)",
        covers=("C15",),
    ),
    Case(
        id="block-selective",
        description="keeps the products: only the GELU is run again",
        build=lambda: checkpointed(
            use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_products)
        ),
        phase="training",
        forward_flops="2 * (2 * 32 * 256*1024)",
        model_flops="6 * (2 * 32 * 256*1024)",
        covers=("C15",),
    ),
    Case(
        id="block-function-reentrant",
        description="a function over tensors, checkpointed",
        build=checkpointed_function,
        phase="training",
        forward_flops="2 * (2 * 32 * 256*1024)",
        model_flops="6 * (2 * 32 * 256*1024)",
        hardware_flops="8 * (2 * 32 * 256*1024)",
        recompute_flops="2 * (2 * 32 * 256*1024)",
        covers=("C15",),
    ),
    Case(
        id="checkpoint-sequential",
        description="four Linear(16,16) in two segments: the last is not checkpointed, the first runs two again",
        build=lambda: (
            Run(
                lambda p, x: checkpoint_sequential(p["layers"], 2, x, use_reentrant=True),
                layers=nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))),
            ),
            (data(8, 16, requires_grad=True),),
        ),
        phase="training",
        model_flops="4 * 3 * (2 * 8 * 16*16)",
        hardware_flops="(4 * 3 + 2) * (2 * 8 * 16*16)",
        recompute_flops="2 * (2 * 8 * 16*16)",
        covers=("C15",),
    ),
    Case(
        id="checkpoint-nested",
        description="the outer one runs both layers again, then the inner one its own",
        build=lambda: (
            Run(nested_checkpoints, first=nn.Linear(16, 16), second=nn.Linear(16, 16)),
            (data(8, 16, requires_grad=True),),
        ),
        phase="training",
        model_flops="2 * 3 * (2 * 8 * 16*16)",
        hardware_flops="(2 * 3 + 3) * (2 * 8 * 16*16)",
        recompute_flops="3 * (2 * 8 * 16*16)",
        covers=("C15",),
    ),
    Case(
        id="checkpoint-twice",
        description="one Linear(16,16) checkpointed twice, 4 tokens; a lone product is not run again",
        build=lambda: (
            Run(
                lambda p, x: checkpoint(
                    p["layer"], checkpoint(p["layer"], x, use_reentrant=False), use_reentrant=False
                ),
                layer=nn.Linear(16, 16),
            ),
            (data(4, 16, requires_grad=True),),
        ),
        phase="training",
        forward_flops="2 * (2 * 4 * 16*16)",
        model_flops="2 * 3 * (2 * 4 * 16*16)",
        devices=EVERYWHERE,
        covers=("C18",),
    ),
    Case(
        id="recompute-in-a-function",
        description="a custom autograd.Function runs its first product again",
        build=lambda: (
            Recomputing.apply,
            tuple(data(*shape, requires_grad=True) for shape in ((4, 8), (8, 8), (8, 8))),
        ),
        phase="training",
        forward_flops="2 * (2 * 4 * 8*8)",
        model_flops="6 * (2 * 4 * 8*8)",
        hardware_flops="7 * (2 * 4 * 8*8)",
        recompute_flops="2 * 4 * 8*8",
        devices=EVERYWHERE,
    ),
)
