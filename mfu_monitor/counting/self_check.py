"""The counter proves itself on this torch: tiny steps on the CPU whose FLOPs are known by arithmetic.

What the counter reads of torch (frames, autograd nodes, graph tasks) moves between releases. Here a step of each kind
is counted and held against its shapes, once a process. Tensors are made of ones: no random number is drawn, no hook
is put on what is the user's, nothing is compiled, and no accelerator is touched.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting.dispatch import CountingMode
from mfu_monitor.counting.observer import StepObserver
from mfu_monitor.errors import UncountedWorkWarning, must_pass, warn
from mfu_monitor.internals.autograd_state import is_custom_node
from mfu_monitor.internals.dispatcher import qualified_name, runs_composite, without_dispatch_modes
from mfu_monitor.internals.facts import missing_facts
from mfu_monitor.internals.stack import misread_frames
from mfu_monitor.internals.tensors import is_fake, storage_id
from mfu_monitor.internals.traces import function_of_users, version_of

__all__ = ["Capability", "failed_capabilities"]

_log = logging.getLogger("mfu_monitor")

N = 4
PRODUCT = 2 * N**3
"""FLOPs of one product of two N x N matrices; a multiply-add is 2."""

NEWEST_TESTED = (2, 15)
"""See docs/versions.md."""

Parts = tuple[int, int, int]
"""Model, recompute and other FLOPs."""

_found: dict[tuple[str, int], tuple[str, ...]] = {}
"""What failed, by torch version and how many facts are missing: asked once a process, and when one more is missed."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One kind of step: its name, how it runs, and the FLOPs that its shapes give."""

    name: str
    run: Callable[[], Any]
    expected: Parts


def failed_capabilities() -> tuple[str, ...]:
    """Kinds of steps that the counter gets wrong with this torch, each with what was seen and expected; none is well.

    The first call takes some tens of milliseconds and gives one ``UncountedWorkWarning`` where something failed.
    """
    version = torch.__version__
    if (version, len(missing_facts())) not in _found:
        _note_newer_torch()
        wrong = [*(text for c in CAPABILITIES if (text := _failure(c)) is not None), *_misreadings()]
        # Asked after the steps, which are what misses them; one that is missed later is named then.
        missing = missing_facts()
        failed = (*wrong, *(f"{known.name} is missing, so that {known.lost}" for known in missing))
        _found[version, len(missing)] = failed
        if failed:
            warn(
                f"the counter does not count rightly with torch {version}: {'; '.join(failed)}. No count of this "
                "process is called exact. Likely cause: this torch keeps something elsewhere that the counter reads. "
                "Use a torch version that docs/versions.md lists, or report this line.",
                UncountedWorkWarning,
            )
    return _found[version, len(missing_facts())]


def _note_newer_torch() -> None:
    numbers = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if numbers > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        _log.warning(
            "torch %s is newer than %s, the newest that mfu_monitor was tested with; its self-check decides what is "
            "called exact",
            torch.__version__,
            newest,
        )


def _failure(capability: Capability) -> str | None:
    try:
        seen = _count(capability.run)
    except Exception as error:  # whatever moved in this torch must not reach the training loop
        if must_pass(error):
            raise
        return f"{capability.name}: {traceback.format_exception_only(error)[-1].strip()}"
    if seen == capability.expected:
        return None
    names = ("model", "recompute", "other")
    wrong = [
        f"{n} {s} FLOPs instead of {e}" for n, s, e in zip(names, seen, capability.expected, strict=True) if s != e
    ]
    return f"{capability.name}: {', '.join(wrong)}"


def _count(run: Callable[[], Any]) -> Parts:
    observer = StepObserver()
    with _apart(), CountingMode(observer):
        run()
    record = observer.record()
    return record.model_flops, record.recompute_flops, record.other_flops


@contextmanager
def _apart() -> Iterator[None]:
    """Whatever the user has entered, none of it holds here, and nobody sees what runs here."""
    with (
        without_dispatch_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _misreadings() -> tuple[str, ...]:
    """What is read of torch beside the steps and is not true; none is well."""
    try:
        with _apart():
            return tuple(lost for lost, holds in _readings() if not holds)
    except Exception as error:  # whatever moved in this torch must not reach the training loop
        if must_pass(error):
            raise
        return (f"a reading: {traceback.format_exception_only(error)[-1].strip()}",)


def _readings() -> Iterator[tuple[str, bool]]:
    """What follows where a reading is not true, and whether it is."""
    yield from ((lost, False) for lost in misread_frames())
    matrix = _ones(grad=False)
    view = matrix.t()
    aten = torch.ops.aten
    yield "an operator's own kernel is not run", not runs_composite(aten.silu_backward.default, [matrix, matrix])
    yield "composite operators are not counted", runs_composite(aten.matmul.default, [matrix, matrix])
    yield "formulas are registered for other operators", qualified_name(aten.mm) == "aten::mm"
    yield "views are not known", storage_id(view) == storage_id(matrix) != storage_id(_ones(grad=False))
    yield "masks are not read", not is_fake(matrix)
    yield "writes in place are not seen", version_of(matrix) == 0 and version_of(matrix.add_(1)) == 1
    function: Any = _WithContext
    custom = function.apply(_ones(grad=True), _ones(grad=False)).grad_fn
    yield "custom functions are not named", function_of_users(custom) == "_WithContext" and is_custom_node(custom)
    yield "torch's own nodes are taken for custom functions", not is_custom_node((_ones(grad=True) * 2).grad_fn)
    observer = StepObserver()
    with CountingMode(observer), without_dispatch_modes():
        _ = matrix @ matrix
    yield "what reads a mask is counted", observer.record().hardware_flops == 0


def _ones(*shape: int, grad: bool) -> torch.Tensor:
    return torch.ones(shape or (N, N), dtype=torch.float32, device="cpu", requires_grad=grad)


def _train() -> None:
    (_ones(grad=True) @ _ones(grad=True)).sum().backward()


def _train_frozen_weight() -> None:
    (_ones(grad=True) @ _ones(grad=False)).sum().backward()


def _train_with_teacher() -> None:
    x = _ones(grad=False)
    with torch.no_grad():
        target = x @ _ones(grad=False)
    (x @ _ones(grad=True) - target).sum().backward()


class _WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight.t(), None


class _WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    backward = _WithContext.backward


def _train_function(function: Any) -> Callable[[], None]:
    def run() -> None:
        x = _ones(grad=True) * 1
        function.apply(x, _ones(grad=False)).sum().backward()

    return run


def _train_checkpointed(use_reentrant: bool) -> Callable[[], None]:
    def run() -> None:
        first, second = _ones(grad=True), _ones(grad=True)
        block = lambda x: (x @ first) @ second  # noqa: E731
        out: Any = checkpoint(block, _ones(grad=True), use_reentrant=use_reentrant, preserve_rng_state=False)
        out.sum().backward()

    return run


def _train_twice_differentiated() -> None:
    weight = _ones(grad=True)
    (gradient,) = torch.autograd.grad((_ones(grad=False) @ weight).pow(2).sum(), weight, create_graph=True)
    gradient.pow(2).sum().backward()


def _train_attention() -> None:
    q, k, v = (_ones(1, 1, N, N, grad=True) for _ in range(3))
    scaled_dot_product_attention(q, k, v).sum().backward()


def _train_causal_attention_of_products() -> None:
    q, k, v = (_ones(1, 1, N, N, grad=True) for _ in range(3))
    mask = torch.full((N, N), float("-inf"), device="cpu", dtype=torch.float32).triu(1)
    torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask)[0].sum().backward()


class _Recomputed(torch.autograd.Function):
    """Builds its graph again in backward, as a hand-written checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = x @ weight
        return torch.autograd.grad(y, (x, weight), grad)


def _train_with_a_hook() -> None:
    x, weight = _ones(grad=True), _ones(grad=False)
    x.register_hook(lambda grad: grad @ weight)
    (x @ weight).sum().backward()


CAPABILITIES = (
    Capability("training", _train, (3 * PRODUCT, 0, 0)),
    Capability("a frozen weight", _train_frozen_weight, (2 * PRODUCT, 0, 0)),
    Capability("a teacher under no_grad", _train_with_teacher, (2 * PRODUCT, 0, PRODUCT)),
    Capability("a custom function", _train_function(_WithContext), (2 * PRODUCT, 0, 0)),
    Capability("a custom function with setup_context", _train_function(_WithSetup), (2 * PRODUCT, 0, 0)),
    # The last product of a block is not rerun: its inputs are all that was missing.
    Capability("non-reentrant checkpointing", _train_checkpointed(False), (6 * PRODUCT, PRODUCT, 0)),
    Capability("reentrant checkpointing", _train_checkpointed(True), (6 * PRODUCT, 2 * PRODUCT, 0)),
    # Forward, its weight gradient, and of that one the gradients of the incoming gradient and again of the weight.
    Capability("double backward", _train_twice_differentiated, (4 * PRODUCT, 0, 0)),
    # Q K^T and P V; each has two gradients. What a kernel redoes inside itself is another part.
    Capability("attention", _train_attention, (6 * PRODUCT, 0, 0)),
    # Of N x N pairs N (N + 1) / 2 attend; the products run dense.
    Capability(
        "masked attention of products",
        _train_causal_attention_of_products,
        (6 * PRODUCT * (N + 1) // (2 * N), 0, 6 * PRODUCT * (N - 1) // (2 * N)),
    ),
    Capability("a custom function that recomputes", _train_function(_Recomputed), (3 * PRODUCT, PRODUCT, 0)),
    Capability("a hook on a gradient", _train_with_a_hook, (2 * PRODUCT, 0, PRODUCT)),
)
