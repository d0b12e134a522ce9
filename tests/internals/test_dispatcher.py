"""An operator is decomposed only where torch itself would run the composition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import mfu_monitor as mm
from mfu_monitor.internals import dispatcher
from mfu_monitor.internals.dispatcher import is_composite, runs_composite

DENSE = torch.ones(2, 2)
TENSORS = {
    "CPU": lambda: DENSE,
    "SparseCPU": lambda: DENSE.to_sparse(),
    "SparseCsrCPU": lambda: DENSE.to_sparse_csr(),
    "NestedTensorCPU": lambda: torch.nested.as_nested_tensor([DENSE, DENSE]),
}


def composite_operators() -> Iterator[torch._ops.OpOverload]:
    """Every operator of the dispatcher that is registered as a composition of others."""
    for name in torch._C._dispatch_get_all_op_names():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue
        namespace, _, rest = name.partition("::")
        bare, _, overload = rest.partition(".")
        try:
            yield getattr(getattr(getattr(torch.ops, namespace), bare), overload or "default")
        except (AttributeError, RuntimeError):
            continue  # known to TorchScript alone


@pytest.mark.parametrize("key", TENSORS)
def test_the_rule_is_the_dispatchers_for_every_composite_operator(key: str) -> None:
    tensor = TENSORS[key]()
    wrong, asked = [], 0
    for func in composite_operators():
        chosen = torch._ops.resolve_key(func, getattr(torch._C.DispatchKey, key))
        asked += 1
        if runs_composite(func, [tensor]) != (chosen == torch._C.DispatchKey.CompositeImplicitAutograd):
            wrong.append((func.name(), str(chosen)))
    assert wrong == []
    assert asked > 500


def test_a_call_with_several_kinds_of_tensors_goes_by_the_one_the_dispatcher_takes() -> None:
    assert dispatcher.backend_key([DENSE, DENSE.to_sparse()]) == "SparseCPU"


def test_what_is_no_operator_of_the_dispatcher_is_no_composite() -> None:
    assert not is_composite(torch.ops.higher_order.flex_attention)


def test_nothing_is_decomposed_where_torch_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_dispatch_keyset_full_after")
    assert not runs_composite(torch.ops.aten.matmul.default, [DENSE])


def test_without_the_dispatchers_word_a_composition_is_reported_as_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_dispatch_keyset_full_after")
    left, right = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    with torch.inference_mode(), mm.FlopCounter() as counter:
        torch.ops.aten.einsum("bij,bjk->bik", [left, right])
    assert counter.record.is_lower_bound


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "mish": functional.mish,
    "gelu": functional.gelu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_counted_step_gives_the_gradients_of_an_uncounted_one_to_the_bit(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 32).to(dtype), torch.randn(16, 32, dtype=dtype)

    def gradient() -> torch.Tensor:
        layer.zero_grad()
        ACTIVATIONS[name](layer(x)).pow(2).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    plain = gradient()
    with mm.FlopCounter(layer) as counter:
        counted = gradient()
    assert torch.equal(plain, counted)
    assert counter.record.model_flops == 2 * (2 * 16 * 32 * 32)  # forward and the weight's gradient
    assert not counter.record.is_lower_bound


def test_bytes_of_an_activations_gradient_are_those_of_the_devices_kernel() -> None:
    x = torch.randn(64, requires_grad=True)
    y = functional.silu(x)
    with mm.FlopCounter() as counter:
        y.backward(torch.ones(64))
    assert counter.record.by_op()["aten::silu_backward"].bytes_accessed == 3 * 64 * 4  # two read, one written


def test_a_shuffle_with_a_kernel_of_its_own_is_a_copy_that_is_known() -> None:
    x = torch.randn(2, 8, 4, 8)
    with torch.inference_mode(), mm.FlopCounter() as counter:
        torch.native_channel_shuffle(x, 4)
    assert not counter.record.is_lower_bound
    assert "aten::native_channel_shuffle" in counter.record.by_op()
