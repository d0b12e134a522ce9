"""Records: what they add up to, and that they survive JSON."""

from __future__ import annotations

import json

from mfu_monitor.counting.ledger import Ledger
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord, UncoveredParameter, UnsupportedOp

RECORD = StepRecord(
    ops=(
        OpRecord(op="aten::mm", phase=Phase.FORWARD, module_fqn="a.b", precision="bf16", shapes=((2, 3), (3, 4)),
                 totals=FlopTotals(model_flops=48, palm_model_flops=48, bytes_accessed=52)),
        OpRecord(op="aten::mm", phase=Phase.RECOMPUTE, module_fqn="a", precision="fp32",
                 totals=FlopTotals(recompute_flops=10, bytes_accessed=4)),
        OpRecord(op="aten::relu", phase=Phase.FORWARD, totals=FlopTotals(bytes_accessed=7)),
    ),
    unsupported_ops=(UnsupportedOp(op="my::op", module_fqn="c", shapes=((1,),)),),
    uncovered_parameters=(UncoveredParameter(name="c.weight", numel=8, share_of_parameters=0.5),),
    notes=("a note",),
    is_training=True,
)  # fmt: skip


def test_hardware_is_model_and_all_that_was_run_beside_it() -> None:
    totals = FlopTotals(model_flops=1, recompute_flops=2, kernel_recompute_flops=4, optimizer_flops=8, other_flops=16)
    assert totals.hardware_flops == 31
    assert (totals + totals).hardware_flops == (totals * 2).hardware_flops == 62
    assert totals.as_dict()["hardware_flops"] == 31


def test_groups_add_up_to_the_total() -> None:
    assert RECORD.model_flops == 48
    assert RECORD.hardware_flops == 58
    assert RECORD.bytes_accessed == 63
    for groups in (RECORD.by_phase(), RECORD.by_op(), RECORD.by_module(inclusive=False)):
        assert sum(group.hardware_flops for group in groups.values()) == 58
        assert sum(group.bytes_accessed for group in groups.values()) == 63
    assert RECORD.by_dtype() == {"bf16": RECORD.ops[0].totals, "fp32": RECORD.ops[1].totals}


def test_a_module_contains_its_descendants() -> None:
    modules = RECORD.by_module()
    assert modules[""] == RECORD.totals
    assert modules["a"].hardware_flops == 58
    assert modules["a.b"].hardware_flops == 48
    assert RECORD.by_module(inclusive=False)["a"].hardware_flops == 10


def test_asking_twice_gives_the_same_and_changing_an_answer_changes_nothing() -> None:
    RECORD.by_phase().clear()
    assert RECORD.by_phase()["forward"].model_flops == 48


def test_an_operator_without_a_formula_is_listed_once_with_its_calls() -> None:
    ledger = Ledger()
    for shapes in (((3, 5),), ((3, 5),), ((7, 5),), ((3, 5),)):
        ledger.add_unsupported("my::op", "block", Phase.FORWARD, shapes)
    record = ledger.close(count_no_grad_as_model=False)
    assert [(op.op, op.module_fqn, op.shapes, op.calls) for op in record.unsupported_ops] == [
        ("my::op", "block", ((3, 5),), 3),
        ("my::op", "block", ((7, 5),), 1),
    ]
    assert record.is_lower_bound


def test_a_record_survives_json() -> None:
    again = StepRecord.from_dict(json.loads(json.dumps(RECORD.to_dict())))
    assert again == RECORD
    assert again.is_lower_bound
