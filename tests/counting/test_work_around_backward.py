"""Work that is no part of the model though autograd or an optimizer runs it: Hessian products, hooks, updates by hand.

A Linear(32, 32) without bias costs f = 2 * 16 * 32*32 on 16 rows. Two of them with a Tanh between cost 2 f forward and
3 f backward on data: no gradient of the first input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm

F = 2 * 16 * 32 * 32
TRAINING = 5 * F
SQUARE = 2 * 32 * 32 * 32


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))


def count(step: Callable[[], Any], model: nn.Module | None = None) -> mm.StepRecord:
    with mm.FlopCounter(model) as counter:
        step()
    assert not counter.record.is_lower_bound, counter.record.notes
    return counter.record


def parts(record: mm.StepRecord) -> tuple[int, int, int, int]:
    return record.model_flops, record.recompute_flops, record.optimizer_flops, record.other_flops


class Curvature(torch.optim.Optimizer):
    """Takes the product of the Hessian with ones, from the graph of a backward that made one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def products(self) -> None:
        params = self.param_groups[0]["params"]
        with torch.enable_grad():
            torch.autograd.grad([p.grad for p in params], params, grad_outputs=[torch.ones_like(p) for p in params])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.products()


class Plain(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()


def backward_with_graph(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).pow(2).sum().backward(create_graph=True)


CURVATURE = 8 * F
"""Two gradients of each of the three products of backward but one, and the three gradients of the forward's two."""


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_hessian_products_in_a_step_are_optimizer_work() -> None:
    model, x = network(), torch.ones(16, 32)
    optimizer = Curvature(model.parameters())

    def step() -> None:
        backward_with_graph(model, x)
        optimizer.step()

    assert parts(count(step, model)) == (TRAINING, 0, 3 * 2 * F - F + 3 * F, 0)
    assert 3 * 2 * F - F + 3 * F == CURVATURE


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_closure_is_model_work_and_the_products_after_it_are_not() -> None:
    model, x = network(), torch.ones(16, 32)
    optimizer = Curvature(model.parameters())
    record = count(lambda: optimizer.step(lambda: backward_with_graph(model, x)), model)
    assert parts(record) == (TRAINING, 0, CURVATURE, 0)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("place", ["pre", "post"])
def test_hessian_products_in_a_step_hook_are_optimizer_work(place: str) -> None:
    model, x = network(), torch.ones(16, 32)
    optimizer = Plain(model.parameters())
    helper = Curvature(model.parameters())
    getattr(optimizer, f"register_step_{place}_hook")(lambda *_: helper.products())

    def step() -> None:
        backward_with_graph(model, x)
        optimizer.step()

    assert parts(count(step, model)) == (TRAINING, 0, CURVATURE, 0)


def test_the_closures_of_lbfgs_are_model_work() -> None:
    model, x = network(), torch.ones(16, 32)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    # |g|^2 and the like of flat vectors are its own products.
    assert count(lambda: optimizer.step(closure), model).model_flops == TRAINING


def test_a_model_run_by_a_step_without_closure_is_a_bound() -> None:
    model, x = network(), torch.ones(16, 32)

    class Stored(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            model(x).sum().backward()

    optimizer = Stored(model.parameters(), {"lr": 0.1})
    with mm.FlopCounter(model) as counter:
        optimizer.step()
    assert counter.record.is_lower_bound
    assert any("optimizer.step(closure)" in note for note in counter.record.notes)


# --- hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_covariances_in_backward_hooks_are_other_work() -> None:
    model, x = network(), torch.ones(16, 32)

    def covariance(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        grad_output[0].t() @ grad_output[0]

    for layer in (model[0], model[2]):
        layer.register_full_backward_hook(covariance)
    assert parts(count(lambda: model(x).sum().backward(), model)) == (TRAINING, 0, 0, 2 * (2 * 32 * 16 * 32))


def test_covariances_of_inputs_in_backward_hooks_are_other_work() -> None:
    model, x = network(), torch.ones(16, 32)
    covariances: list[torch.Tensor] = []

    def attach(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        inputs = args[0].detach()
        output.register_hook(lambda grad: covariances.append(inputs.t() @ inputs))

    model[2].register_forward_hook(attach)
    assert parts(count(lambda: model(x).sum().backward(), model)) == (TRAINING, 0, 0, 2 * 32 * 16 * 32)


def update(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(1e-3 * (parameter.grad @ parameter.grad.t() @ parameter.grad))
    parameter.grad = None


def test_an_update_in_a_post_accumulate_hook_is_other_work() -> None:
    model, x = network(), torch.ones(16, 32)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    assert parts(count(lambda: model(x).sum().backward(), model)) == (TRAINING, 0, 0, 2 * 2 * SQUARE)


def test_an_update_by_hand_is_other_work_with_gradients_on() -> None:
    model, x = network(), torch.ones(16, 32)

    def step() -> None:
        model(x).sum().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data.sub_(1e-3 * (p.grad @ p.grad.t() @ p.grad))

    assert parts(count(step, model)) == (TRAINING, 0, 0, 2 * 2 * SQUARE)


def test_an_update_by_hand_follows_a_momentum_and_leaves_the_next_forward_alone() -> None:
    model, x = network(), torch.ones(16, 32)
    momenta = [torch.zeros(32, 32) for _ in model.parameters()]

    def step() -> None:
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            for p, momentum in zip(model.parameters(), momenta, strict=True):
                momentum.mul_(0.9).add_(p.grad)
                p.data.sub_(1e-3 * (momentum @ momentum.t()))

    assert parts(count(step, model)) == (2 * TRAINING, 0, 0, 2 * 2 * SQUARE)


def test_gradients_of_a_function_that_are_multiplied_by_hand_are_other_work() -> None:
    x, weight = torch.ones(16, 32), torch.ones(32, 32, requires_grad=True)

    def step() -> None:
        (gradient,) = torch.autograd.grad((x @ weight).pow(2).sum(), weight)
        weight.data.sub_(gradient @ gradient.t())

    assert parts(count(step)) == (2 * F, 0, 0, SQUARE)


def test_a_forward_on_a_gradient_that_is_differentiated_is_model_work() -> None:
    """Adversarial training: the step on the input is made from its gradient."""
    model, x = network(), torch.ones(16, 32, requires_grad=True)

    def step() -> None:
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        model(x.detach() + slope.sign()).sum().backward()

    assert parts(count(step, model)) == ((2 + 2) * F + TRAINING, 0, 0, 0)


def test_compression_of_saved_tensors_is_other_work() -> None:
    model, x, p = network(), torch.ones(16, 32), torch.ones(32, 8)
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.shape != (16, 32):
            return tensor
        packed.append(1)
        return (tensor @ p,)

    def unpack(saved: Any) -> torch.Tensor:
        return saved[0] @ p.t() if isinstance(saved, tuple) else saved

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(x).sum()
        loss.backward()

    record = count(step, model)
    assert parts(record) == (TRAINING, 0, 0, len(packed) * 2 * (2 * 16 * 32 * 8))


def test_a_module_that_an_unpack_hook_runs_again_is_recomputation() -> None:
    """Checkpointing by hand: the first layer's output is not kept, but computed from its input again."""
    first, second, x = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False), torch.ones(16, 32)
    weights = {id(second.weight), id(first.weight)}

    def pack(tensor: torch.Tensor) -> Any:
        return None if tensor.shape == (16, 32) and id(tensor) not in weights else tensor

    def unpack(saved: Any) -> torch.Tensor:
        if saved is not None:
            return saved
        with torch.no_grad():
            return first(x)

    def step() -> None:
        hidden = first(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = second(hidden).sum()
        loss.backward()

    assert parts(count(step, nn.ModuleList([first, second]))) == (TRAINING, F, 0, 0)


def test_a_module_applied_to_a_gradient_is_no_recomputation() -> None:
    model, net, x = network(), nn.Linear(32, 32, bias=False), torch.ones(16, 32)

    def step() -> None:
        output = model(x)
        output.register_hook(lambda grad: net(grad))
        output.sum().backward()

    assert parts(count(step, model)) == (TRAINING, 0, 0, F)


def test_a_backward_started_by_a_hook_is_other_work() -> None:
    model, x = network(), torch.ones(16, 32)
    weight = torch.ones(32, 32, requires_grad=True)

    def curvature(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            torch.autograd.grad((grad.detach() @ weight).sum(), weight)

    def step() -> None:
        output = model(x)
        output.register_hook(curvature)
        output.sum().backward()

    assert parts(count(step, model)) == (TRAINING, 0, 0, 2 * F)


def test_an_optimizer_stepped_by_a_hook_is_optimizer_work() -> None:
    model, x = network(), torch.ones(16, 32)
    optimizers = {p: torch.optim.Muon([p]) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    # Five Newton-Schulz steps of X X^T, its square, and their product with X, for both.
    assert parts(count(lambda: model(x).sum().backward(), model)) == (TRAINING, 0, 2 * 5 * 3 * SQUARE, 0)
