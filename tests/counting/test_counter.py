"""FlopCounter in eager mode: cases from the field, every expected figure written as arithmetic on shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError


def count(model: nn.Module | None, run) -> StepRecord:
    with FlopCounter(model) as counter:
        run()
    record = counter.record
    t = record.totals
    assert record.hardware_flops == (
        t.model_flops + t.recompute_flops + t.kernel_recompute_flops + t.optimizer_flops + t.other_flops
    )
    assert record.by_module()[""] == record.totals
    assert sum(p.hardware_flops for p in record.by_phase().values()) == record.hardware_flops
    assert not record.notes, record.notes
    return record


# --- attention -----------------------------------------------------------------------------------------------------

QK = 2 * 1 * 12 * 64 * 64 * 64  # one product: B H S S D, multiply-add = 2


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("is_causal", [False, True])
def test_model_flops_of_attention_do_not_depend_on_the_backend(backend, is_causal):
    q, k, v = (torch.randn(1, 12, 64, 64, requires_grad=True) for _ in range(3))
    with sdpa_kernel(backend):
        record = count(None, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward())
    pairs = 64 * 65 // 2 if is_causal else 64 * 64
    product = 2 * 12 * pairs * 64
    assert record.by_phase()["forward"].model_flops == 2 * product
    assert record.model_flops == 6 * product
    assert record.palm_model_flops == 6 * QK
    if backend == SDPBackend.FLASH_ATTENTION:
        assert record.hardware_flops == 7 * product
        assert record.kernel_recompute_flops == product
    else:
        assert record.hardware_flops == 6 * QK
        assert record.other_flops == 6 * (QK - product)


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_notes_that_a_mask_on_meta_has_no_contents(need_weights):
    layer, x = nn.MultiheadAttention(8, 2, device="meta"), torch.randn(6, 3, 8, device="meta")
    for mask, noted in ((None, False), (torch.ones(6, 6, dtype=torch.bool, device="meta"), True)):
        with FlopCounter(layer) as counter:
            layer(x, x, x, attn_mask=mask, need_weights=need_weights)[0].sum().backward()
        assert any("mask could not be read" in note for note in counter.record.notes) == noted


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_masked_multi_head_attention_counts_the_same_whether_its_weights_are_asked_for(need_weights, dropout):
    layer = nn.MultiheadAttention(8, 2, dropout=dropout)
    x = torch.randn(6, 3, 8, requires_grad=True)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    record = count(layer, lambda: layer(x, x, x, attn_mask=hidden, need_weights=need_weights)[0].sum().backward())
    projections, pairs = 4 * (2 * 18 * 8 * 8), 3 * 2 * (6 * 7 // 2)
    assert record.model_flops == 3 * (projections + 2 * (2 * pairs * 4))
    assert record.palm_model_flops == 3 * (projections + 2 * (2 * 3 * 2 * 6 * 6 * 4))


def test_c1_dense_attention_has_the_published_figures():
    q, k, v = (torch.randn(1, 12, 64, 64, requires_grad=True) for _ in range(3))
    record = count(None, lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    assert record.by_phase()["forward"].model_flops == 12_582_912
    assert record.model_flops == 37_748_736
    assert record.hardware_flops == 44_040_192


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_query_heads_decide_under_grouped_query_attention(backend):
    q = torch.randn(1, 8, 256, 64)
    k, v = torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64)
    with sdpa_kernel(backend):
        record = count(None, lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert record.model_flops == 2 * 2 * 8 * 256 * 256 * 64


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_tensor_mask_counts_by_content_for_the_model_and_dense_for_the_hardware(backend):
    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    mask = torch.ones(32, 32, dtype=torch.bool).tril().triu(-3)  # window of 4
    pairs = 4 * 32 - 4 * 3 // 2
    with sdpa_kernel(backend):
        record = count(None, lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward())
    assert record.model_flops == 6 * (2 * 2 * 4 * pairs * 16)
    assert record.other_flops == 6 * (2 * 2 * 4 * (32 * 32 - pairs) * 16)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_causal_attention_in_inference_counts_its_triangle(device):
    q = torch.randn(2, 3, 10, 8, device=device)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            record = count(None, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
        assert record.model_flops == 2 * 2 * (2 * 3 * 55 * 8)


def test_causal_attention_on_meta_in_training_counts_its_triangle():
    q, k, v = (torch.randn(2, 3, 10, 8, device="meta", requires_grad=True) for _ in range(3))
    record = count(None, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())
    assert record.model_flops == 6 * (2 * 2 * 3 * 55 * 8)


# --- gradients wanted ----------------------------------------------------------------------------------------------


def test_c13_lora_counts_only_the_gradients_that_are_wanted():
    frozen = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
    a, b = nn.Linear(1024, 8, bias=False), nn.Linear(8, 1024, bias=False)
    x = torch.randn(128, 1024, requires_grad=True)
    record = count(None, lambda: (frozen(x) + b(a(x))).sum().backward())
    base, low = 2 * 128 * 1024 * 1024, 2 * 128 * 1024 * 8
    assert record.model_flops == 2 * base + 3 * 2 * low == 549_453_824


def test_c14_input_gradient_of_a_leaf_batch_is_not_counted():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    x = torch.randn(64, 512)
    f = 2 * 64 * 512 * 512
    assert count(model, lambda: model(x).sum().backward()).model_flops == 5 * f == 167_772_160
    model[0].requires_grad_(False)
    assert count(model, lambda: model(x).sum().backward()).model_flops == 3 * f == 100_663_296


# --- checkpointing -------------------------------------------------------------------------------------------------

F_BLOCK = 2 * 32 * 256 * 1024


def save_products(ctx, op, *args, **kwargs):
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("kwargs", "rerun"),
    [
        (None, 0),
        ({"use_reentrant": False}, 1),  # stops early: the last product is not needed
        ({"use_reentrant": True}, 2),
        ({"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(save_products)}, 0),
    ],
)
@pytest.mark.parametrize("as_function", [False, True])
def test_c15_checkpointing_changes_hardware_and_never_model_flops(kwargs, rerun, as_function):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

        def run(self, x):
            return F.linear(
                F.gelu(F.linear(x, self.block[0].weight, self.block[0].bias)), self.block[2].weight, self.block[2].bias
            )

        def forward(self, x):
            target = self.run if as_function else self.block
            return target(x) if kwargs is None else checkpoint(target, x, **kwargs)

    model = Outer()
    x = torch.randn(32, 256, requires_grad=True)
    record = count(model, lambda: model(x).sum().backward())
    f = F_BLOCK
    assert record.model_flops == 6 * f
    assert record.recompute_flops == rerun * f
    assert record.hardware_flops == (6 + rerun) * f
    modules = record.by_module()
    if as_function:
        assert set(modules) == {""}
    else:
        assert modules["block.0"].model_flops == modules["block.2"].model_flops == 3 * f
        assert modules["block"].recompute_flops == rerun * f


def test_nested_and_sequential_checkpointing_are_recompute():
    layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    x = torch.randn(8, 16, requires_grad=True)
    f = 2 * 8 * 16 * 16
    record = count(layers, lambda: checkpoint_sequential(layers, 2, x, use_reentrant=True).sum().backward())
    assert record.model_flops == 4 * 3 * f
    # The last segment is not checkpointed; the first reruns its two products.
    assert record.recompute_flops == 2 * f

    def inner(y):
        return checkpoint(layers[1], layers[0](y), use_reentrant=True)

    record = count(layers, lambda: checkpoint(inner, x, use_reentrant=True).sum().backward())
    assert record.model_flops == 2 * 3 * f
    # Outer rerun: layer 0 and, inside its own checkpoint, layer 1; then the inner rerun of layer 1.
    assert record.recompute_flops == 3 * f


def test_recompute_in_a_custom_function_is_recompute():
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w1, w2):
            ctx.save_for_backward(x, w1, w2)
            return torch.relu(x @ w1) @ w2

        @staticmethod
        def backward(ctx, g):
            x, w1, w2 = ctx.saved_tensors
            h = torch.relu(x @ w1)
            gh = g @ w2.t()
            gh = gh * (h > 0)
            return gh @ w1.t(), x.t() @ gh, h.t() @ g

    class WithGrad(Recompute):
        @staticmethod
        def backward(ctx, g):
            x, w1, w2 = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            with torch.enable_grad():
                y = torch.relu(x @ w1) @ w2
            return torch.autograd.grad(y, (x, w1, w2), g)

    for function, rerun in ((Recompute, 1), (WithGrad, 2)):
        x = torch.randn(4, 8, requires_grad=True)
        w1, w2 = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        record = count(None, lambda: function.apply(x, w1, w2).sum().backward())  # noqa: B023
        f = 2 * 4 * 8 * 8
        assert record.model_flops == 6 * f
        assert record.recompute_flops == rerun * f


def test_recompute_with_weights_that_were_cast_is_recompute():
    """Under autocast a function multiplies by copies, which are no parameters."""

    class CastRecompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w1, w2):
            x, w1, w2 = x.bfloat16(), w1.bfloat16(), w2.bfloat16()
            ctx.save_for_backward(x, w1, w2)
            return torch.relu(x @ w1) @ w2

        @staticmethod
        def backward(ctx, g):
            x, w1, w2 = ctx.saved_tensors
            h = torch.relu(x @ w1)
            gh = (g @ w2.t()) * (h > 0)
            return (gh @ w1.t()).float(), (x.t() @ gh).float(), (h.t() @ g).float()

    x = torch.randn(4, 8, requires_grad=True)
    w1, w2 = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    record = count(None, lambda: CastRecompute.apply(x, w1, w2).sum().backward())
    assert record.model_flops == 6 * (2 * 4 * 8 * 8)
    assert record.recompute_flops == 2 * 4 * 8 * 8


def test_the_gradient_through_a_tied_weight_is_no_recompute():
    """(x W) W^T: backward multiplies its gradient by W as forward multiplied x."""

    class Tied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            h = x @ w
            ctx.save_for_backward(x, w, h)
            return h @ w.t()

        @staticmethod
        def backward(ctx, g):
            x, w, h = ctx.saved_tensors
            gh = g @ w
            return gh @ w.t(), x.t() @ gh + g.t() @ h

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    record = count(None, lambda: Tied.apply(x, w).sum().backward())
    assert record.model_flops == record.hardware_flops == 6 * (2 * 4 * 8 * 8)


# --- C18-C20, phases -----------------------------------------------------------------------------------------------


def test_c18_a_gradient_penalty_works_and_is_not_recompute():
    layer = nn.Linear(5, 7)
    x = torch.randn(3, 5, requires_grad=True)

    def step():
        y = layer(x).pow(2).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (g.pow(2).sum()).backward()

    record = count(layer, step)
    f = 2 * 3 * 5 * 7
    # forward 1; grad wrt x 1; its backward: gradient of g@W wrt g and wrt W (2), then through y: wrt x and wrt W (2).
    assert record.model_flops == 6 * f
    assert record.recompute_flops == 0


def test_c18_two_checkpointed_calls_of_one_layer_sum_to_the_total():
    layer = nn.Linear(16, 16)
    x = torch.randn(4, 16, requires_grad=True)

    def step():
        y = checkpoint(layer, x, use_reentrant=False)
        checkpoint(layer, y, use_reentrant=False).sum().backward()

    record = count(nn.ModuleDict({"layer": layer}), step)
    assert record.hardware_flops == 12_288 == 2 * 3 * (2 * 4 * 16 * 16)
    assert record.by_module()["layer"].hardware_flops == 12_288


def test_c19_inference_mode_counts():
    layer = nn.Linear(100, 100)
    x = torch.randn(1, 100)
    with torch.inference_mode():
        assert count(layer, lambda: layer(x)).model_flops == 20_000


def test_c20_500_steps_count_500_times_one_step_and_leave_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    keys = list(model.state_dict())
    x = torch.randn(4, 8)
    one = count(model, lambda: model(x).sum().backward())
    many = count(model, lambda: [model(x).sum().backward() for _ in range(500)])
    assert many.model_flops == 500 * one.model_flops
    assert one.model_flops == 2 * (2 * 4 * 8 * 8) + 3 * (2 * 4 * 8 * 4)
    assert all(m.model_flops <= many.model_flops for m in many.by_module().values())
    assert list(model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_forwards_without_gradient_in_a_training_step_are_other():
    teacher, student = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def step():
        with torch.no_grad():
            target = teacher(x)
        F.mse_loss(student(x), target).backward()

    model = nn.ModuleDict({"teacher": teacher, "student": student})
    record = count(model, step)
    f = 2 * 4 * 8 * 8
    assert (record.model_flops, record.other_flops) == (2 * f, f)
    assert record.by_module()["teacher"].other_flops == f
    with FlopCounter(model, count_no_grad_as_model=True) as counter:
        step()
    assert (counter.record.model_flops, counter.record.other_flops) == (3 * f, 0)


def test_products_of_the_optimizer_are_optimizer_and_its_closure_is_not():
    class Muonish(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.dim() == 2:
                        p -= 0.01 * (p.grad @ p.grad.t()) @ p.grad
            return loss

    layer = nn.Linear(8, 8, bias=False)
    optimizer = Muonish(layer.parameters())
    x = torch.randn(4, 8)
    f, o = 2 * 4 * 8 * 8, 2 * (2 * 8 * 8 * 8)

    def closure():
        optimizer.zero_grad()
        with torch.no_grad():
            layer(x)  # a teacher inside the closure
        loss = layer(x).sum()
        loss.backward()
        return loss

    for step in (lambda: optimizer.step(closure), lambda: (closure(), optimizer.step())):
        record = count(layer, step)
        assert (record.model_flops, record.other_flops, record.optimizer_flops) == (2 * f, f, o)


def test_an_exception_passes_through_and_leaves_no_mode():
    layer = nn.Linear(4, 4)
    counter = FlopCounter(layer)

    def interrupted_step():
        with counter:
            layer(torch.randn(2, 4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_step()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert counter.record.model_flops == 2 * 2 * 4 * 4


def test_counting_draws_no_random_numbers_and_changes_no_bit():
    def run(counted):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        x = torch.randn(4, 8)
        if counted:
            with FlopCounter(model):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        return [p.grad for p in model.parameters()], torch.get_rng_state()

    (plain, plain_state), (seen, seen_state) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert torch.equal(plain_state, seen_state)


# --- what could not be seen ------------------------------------------------------------------------------------------


class HiddenProduct(torch.autograd.Function):
    """Computes outside of torch: the dispatcher sees nothing of it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.from_numpy(x.detach().numpy() @ w.detach().numpy())

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return torch.from_numpy(g.numpy() @ w.detach().numpy().T), torch.from_numpy(x.detach().numpy().T @ g.numpy())


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return HiddenProduct.apply(x, self.weight)


def test_a_parameter_that_no_operator_touched_makes_a_lower_bound():
    model = nn.ModuleDict({"seen": nn.Linear(8, 8, bias=False), "hidden": Hidden()})
    x = torch.randn(4, 8)
    with FlopCounter(model) as counter:
        model["hidden"](model["seen"](x)).sum().backward()
    (parameter,) = counter.record.uncovered_parameters
    assert (parameter.name, parameter.numel, parameter.share_of_parameters) == ("hidden.weight", 64, 0.5)
    assert counter.record.is_lower_bound
    with FlopCounter(model) as counter:
        model["seen"](x).sum().backward()
    assert not counter.record.uncovered_parameters


class HiddenKernel(torch.autograd.Function):
    """Makes room for what a kernel would write past the dispatcher."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, g):
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


class Cast(Hidden):
    def forward(self, x):
        return HiddenKernel.apply(x, self.weight.bfloat16())


def test_what_is_done_to_a_parameter_alone_does_not_hide_that_its_kernel_is_hidden():
    model, average = Cast(), torch.zeros(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    def step():
        model(torch.randn(4, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            average.lerp_(model.weight, 0.1)
            model.weight.norm()

    for _ in range(2):  # the second accumulates into a gradient
        with FlopCounter(model) as counter:
            step()
        assert [p.name for p in counter.record.uncovered_parameters] == ["weight"]


class EveryUse(nn.Module):
    """Parameters that no product takes, or only after others were applied to them."""

    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(5, 8), nn.EmbeddingBag(5, 8)
        self.norms = nn.Sequential(nn.LayerNorm(8), nn.BatchNorm1d(3), nn.GroupNorm(1, 3), nn.RMSNorm(8), nn.PReLU())
        self.positions, self.log_decay = nn.Parameter(torch.randn(1, 3, 8)), nn.Parameter(torch.randn(8))
        self.temperature, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(7, 8))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, ids):
        x = self.table(ids) + self.positions * self.log_decay.exp()
        x = self.normed(self.norms(x)) * self.temperature.exp()
        offsets = torch.arange(3)[:, None] - torch.arange(3) + 3
        return x.sum() + self.bag(ids).sum() + (self.bias[offsets].mean((0, 1)) * x).sum()


def test_parameters_that_meet_data_outside_of_products_are_covered():
    model = EveryUse()
    record = count(model, lambda: model(torch.randint(0, 5, (2, 3))).backward())
    assert all(p.grad is not None for p in model.parameters())
    assert record.uncovered_parameters == ()


def hand_written_attention(q, k, v):
    scores = q @ k.transpose(-2, -1)
    mask = torch.ones(q.shape[-2:-1] + k.shape[-2:-1], device=q.device).tril()
    scores = scores + torch.where(mask > 0, 0.0, float("-inf"))
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hand_written_attention_is_its_dense_products(device):
    q, k, v = (torch.randn(2, 3, 10, 8, device=device, requires_grad=True) for _ in range(3))
    record = count(None, lambda: hand_written_attention(q, k, v).sum().backward())
    assert record.model_flops == record.hardware_flops == 6 * (2 * 2 * 3 * 10 * 10 * 8)


def test_a_freed_mask_leaves_no_trace_on_tensors_that_take_its_place():
    """Attention on the math path between plain products, over and over: addresses are reused all the time."""
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(2, 3, 10, 8, requires_grad=True)

    def step():
        y = x
        for _ in range(20):
            y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
            y = layer(y)
        y.sum().backward()

    with sdpa_kernel(SDPBackend.MATH):
        record = count(layer, step)
    attention, linear = 6 * (2 * 2 * 3 * 55 * 8), 3 * (2 * 60 * 8 * 8)
    assert record.model_flops == 20 * (attention + linear)


def test_a_lazy_module_is_counted_from_the_step_that_gives_it_its_shape():
    model = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 3))
    with FlopCounter(model) as counter:
        model(torch.ones(5, 4)).sum().backward()
    # 5 rows: forward 2*5*4*6 and 2*5*6*3; gradients of both weights and of the hidden layer, the input wants none.
    assert counter.record.model_flops == 2 * (2 * 5 * 4 * 6) + 3 * (2 * 5 * 6 * 3)
    assert counter.record.by_module()["0"].model_flops == 2 * (2 * 5 * 4 * 6)
    assert not counter.record.is_lower_bound


def test_a_counter_inside_its_own_block_is_refused_and_leaves_nothing_behind():
    model = nn.Linear(4, 3)
    counter = FlopCounter(model)
    with counter:
        model(torch.ones(2, 4))
        with pytest.raises(ConfigurationError, match="entered again inside its own block"):
            counter.__enter__()
    assert counter.record.model_flops == 2 * 2 * 4 * 3
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    with counter, FlopCounter(model) as inner:  # one after the other, and another one inside, are fine
        model(torch.ones(2, 4))
    assert counter.record.model_flops == inner.record.model_flops == 2 * 2 * 4 * 3
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_model_that_is_no_module_is_refused_with_what_was_given():
    with pytest.raises(ConfigurationError, match=r"model=3 \(int\) is not allowed"):
        FlopCounter(3)
