"""Names, argument binding, and what users may register."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import mfu_monitor.formulas  # noqa: F401  (registers every formula)
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.formulas.registry import (
    FormulaError,
    bind_call,
    find_formula,
    find_module_formula,
    formula,
    operator_name,
    register_flop_formula,
    register_module_formula,
    unregister_flop_formula,
    unregister_module_formula,
)

aten = torch.ops.aten


@torch.library.custom_op("mfu_registry_test::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (a @ b) * scale


A, B = torch.zeros(8, 8), torch.zeros(8, 8)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in ("mfu_registry_test::product", "mfu_registry_test::later", "aten::mm"):
        unregister_flop_formula(name)
    for target in (Opaque, "some.where.Opaque", f"{__name__}.Opaque"):
        unregister_module_formula(target)


def cost(func: Any, *args: Any, output: Any = None, **kwargs: Any) -> OpCost:
    found = find_formula(operator_name(func))
    assert found is not None
    return found(bind_call(func, args, kwargs, output))


# --- binding ----------------------------------------------------------------------------------------------------------


def test_arguments_are_bound_by_schema_name_with_defaults() -> None:
    call = bind_call(aten.addmm.default, (A, A, B), {"alpha": 2}, A)
    assert (call.name, call["mat2"] is B, call["beta"], call["alpha"]) == ("aten::addmm", True, 1, 2)
    assert call.get("no_such_argument", "default") == "default"


def test_out_variants_share_the_name_and_give_their_result() -> None:
    out = torch.zeros(8, 8)
    call = bind_call(aten.mm.out, (A, B), {"out": out}, out)
    assert call.name == "aten::mm"
    assert call.result is out


def test_an_operator_that_returns_nothing_has_its_out_argument_as_result() -> None:
    out = torch.zeros(8, 8)
    assert OperatorCall("x::y", {"out": out}, ()).result is out


def test_higher_order_operators_are_bound_by_their_parameters() -> None:
    flex = torch.ops.higher_order.flex_attention
    call = bind_call(flex, (1, 2, 3), {"scale": 0.5}, None)
    assert (call.name, call["query"], call["value"], call["scale"]) == ("higher_order::flex_attention", 1, 3, 0.5)


def test_symbolic_sizes_stay_symbolic() -> None:
    shapes = ShapeEnv()
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=shapes)
    x: Any = mode.from_tensor(torch.zeros(5, 8), symbolic_context=context, source=ConstantSource("x"))
    with mode:
        w = torch.zeros(8, 16)
        result = x @ w
    guards = len(shapes.guards)
    flops: Any = cost(aten.mm.default, x, w, output=result).flops
    assert isinstance(flops, torch.SymInt)
    assert str(flops.node.expr) == f"256*{x.shape[0].node.expr}"  # 2 * 8 * 16 a row
    assert len(shapes.guards) == guards  # asking for the count specialises nothing


# --- own formulas -----------------------------------------------------------------------------------------------------


def test_an_operator_has_one_own_formula() -> None:
    with pytest.raises(ConfigurationError, match=r"aten::mm already has a formula.*matmul.*counted once"):
        formula("aten::mm")(lambda call: OpCost(0))


def test_in_place_forms_use_the_formula_of_their_operator() -> None:
    assert find_formula("aten::addmm_") is find_formula("aten::addmm") is not None
    assert find_formula("aten::no_such_op_") is None


# --- the user's -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", [product, torch.ops.mfu_registry_test.product, torch.ops.mfu_registry_test.product.default]
)
def test_every_way_to_name_an_operator_registers_the_same(op: Any) -> None:
    @register_flop_formula(op)
    def product_flops(a: torch.Size, b: torch.Size) -> int:
        return 2 * a[0] * a[1] * b[1]

    assert cost(torch.ops.mfu_registry_test.product.default, A, B).flops == 1_024


def test_an_operator_may_be_named_before_it_exists() -> None:
    register_flop_formula("mfu_registry_test::later")(lambda a: 7)
    assert find_formula("mfu_registry_test::later") is not None


def test_formulas_see_shapes_scalars_and_the_result_s_shape() -> None:
    seen: dict[str, Any] = {}

    @register_flop_formula(product)
    def product_flops(a: Any, b: Any, scale: float, *, out_shape: Any) -> int:
        seen.update(a=a, b=b, scale=scale, out=out_shape)
        return 1

    assert cost(torch.ops.mfu_registry_test.product.default, A, B, 0.5, output=A).flops == 1
    assert seen == {"a": A.shape, "b": B.shape, "scale": 0.5, "out": A.shape}


def test_formulas_in_torch_s_own_style_work() -> None:
    @register_flop_formula(product)
    def product_flops(a_shape: Any, b_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> Any:
        return 2 * a_shape[0] * a_shape[1] * b_shape[1]

    assert cost(torch.ops.mfu_registry_test.product.default, A, B, output=A).flops == 1_024


def test_get_raw_passes_the_tensors() -> None:
    @register_flop_formula(product, get_raw=True)
    def product_flops(a: torch.Tensor, b: torch.Tensor) -> int:
        return a.numel() * b.element_size()

    assert cost(torch.ops.mfu_registry_test.product.default, A, B).flops == 64 * 4


def test_a_formula_may_answer_with_a_full_cost() -> None:
    answer = OpCost(10, kernel_recompute_flops=3, precision="fp8")
    register_flop_formula(product)(lambda a, b: answer)
    assert cost(torch.ops.mfu_registry_test.product.default, A, B) is answer


def test_the_user_s_formula_wins_over_ours_and_can_be_taken_back() -> None:
    register_flop_formula(aten.mm)(lambda a, b: 5)
    assert cost(aten.mm.default, A, B).flops == 5
    unregister_flop_formula(aten.mm)
    assert cost(aten.mm.default, A, B).flops == 1_024


def test_a_second_formula_is_refused_unless_it_is_meant() -> None:
    register_flop_formula(product)(lambda a, b: 1)
    with pytest.raises(ConfigurationError, match=r"already has a formula.*pass overwrite=True"):
        register_flop_formula(product)
    register_flop_formula(product, overwrite=True)(lambda a, b: 2)
    assert cost(torch.ops.mfu_registry_test.product.default, A, B).flops == 2


@pytest.mark.parametrize("op", ["product", torch.matmul, 3, None, nn.Linear])
def test_what_names_no_operator_is_refused_with_the_way_to_name_one(op: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected torch\.ops\..*\"mylib::attn\""):
        register_flop_formula(op)


@pytest.mark.parametrize("answer", [None, -1, 1.5, float("nan"), float("inf"), "12", True, [3]])
def test_an_answer_that_is_no_flop_count_is_an_error_that_shows_it(answer: Any) -> None:
    register_flop_formula(product)(lambda a, b: answer)
    with pytest.raises(FormulaError, match=r"returned .*expected FLOPs as a whole number"):
        cost(torch.ops.mfu_registry_test.product.default, A, B)


@pytest.mark.parametrize("answer", [0, 12, 12.0])
def test_whole_numbers_are_accepted(answer: Any) -> None:
    register_flop_formula(product)(lambda a, b: answer)
    assert cost(torch.ops.mfu_registry_test.product.default, A, B).flops == answer


def test_a_formula_that_raises_is_named() -> None:
    @register_flop_formula(product)
    def broken(a: Any, b: Any) -> Any:
        return a.no_such_attribute

    with pytest.raises(FormulaError, match=r"broken, raised AttributeError.*replaced by its shape"):
        cost(torch.ops.mfu_registry_test.product.default, A, B)


# --- modules ----------------------------------------------------------------------------------------------------------


class Opaque(nn.Module):
    out_features = 16


class OpaqueChild(Opaque):
    pass


@pytest.mark.parametrize("target", [Opaque, f"{__name__}.Opaque"])
def test_a_module_is_found_by_class_or_dotted_name_and_so_are_its_subclasses(target: Any) -> None:
    @register_module_formula(target)
    def opaque_flops(module: Any, x: torch.Size) -> Any:
        return 2 * x.numel() * module.out_features

    for module in (Opaque(), OpaqueChild()):
        found = find_module_formula(module)
        assert found is not None
        assert found(module, torch.Size([3, 8]), out_shape=torch.Size([3, 16])).flops == 2 * 3 * 8 * 16
    assert find_module_formula(nn.Linear(2, 2)) is None


def test_a_class_is_found_under_the_name_that_re_exports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    package = types.ModuleType("some.where")
    package.Opaque = Opaque  # type: ignore[attr-defined]
    register_module_formula("some.where.Opaque")(lambda module, x: 1)
    assert find_module_formula(nn.Identity()) is None
    monkeypatch.setitem(sys.modules, "some.where", package)
    assert find_module_formula(Opaque()) is not None


def test_registering_later_is_seen_by_classes_looked_up_before() -> None:
    assert find_module_formula(Opaque()) is None
    register_module_formula(Opaque)(lambda module, x: 1)
    assert find_module_formula(Opaque()) is not None


@pytest.mark.parametrize("target", ["Opaque", Opaque(), 3])
def test_what_names_no_class_is_refused(target: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a class, or its dotted name"):
        register_module_formula(target)


def test_a_second_module_formula_is_refused_unless_it_is_meant() -> None:
    register_module_formula(Opaque)(lambda module, x: 1)
    with pytest.raises(ConfigurationError, match="pass overwrite=True"):
        register_module_formula(Opaque)
    register_module_formula(Opaque, overwrite=True)(lambda module, x: 2)


def test_a_module_formula_that_returns_rubbish_is_an_error() -> None:
    register_module_formula(Opaque)(lambda module, x: None)
    found = find_module_formula(Opaque())
    assert found is not None
    with pytest.raises(FormulaError, match="returned None"):
        found(Opaque(), torch.Size([1]))
