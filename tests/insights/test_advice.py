"""Advice says at most three things, largest gain first, with the gain that the waterfall's figures give."""

from __future__ import annotations

import pytest

from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.advice import Advice, advise
from mfu_monitor.insights.waterfall import waterfall
from mfu_monitor.timing.step_window import StepWindow

# Ridge 100 FLOP/byte in bf16, 10 in fp32; 1e9 bytes take 1 ms.
PEAK = DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 100e12, "fp32": 10e12}, bytes_per_s=1e12)
MS_OF_BF16 = 100 * 10**9
MS_OF_BYTES = 10**9


def op(
    name: str = "aten::mm",
    phase: Phase = Phase.FORWARD,
    precision: str | None = "bf16",
    module: str = "",
    **totals: int,
) -> OpRecord:
    return OpRecord(op=name, phase=phase, precision=precision, module_fqn=module, totals=FlopTotals(**totals))


BASE = op(model_flops=20 * MS_OF_BF16, bytes_accessed=MS_OF_BYTES)  # 20 ms at peak


def advice_for(
    *ops: OpRecord, step_ms: float, free_memory_bytes: int | None = None, **waits: float
) -> dict[str, Advice]:
    record = StepRecord(ops=(BASE, *ops))
    window = StepWindow(first_step=1, last_step=1, steps=1, elapsed_s=step_ms / 1e3, wall_s=step_ms / 1e3, **waits)  # type: ignore[arg-type]
    lines = advise(record, PEAK, waterfall(record, PEAK, window), free_memory_bytes=free_memory_bytes)
    return {line.code: line for line in lines}


def test_checkpointing_is_named_with_its_share_its_gain_and_the_free_memory() -> None:
    rerun = op(phase=Phase.RECOMPUTE, recompute_flops=5 * MS_OF_BF16)
    line = advice_for(rerun, step_ms=25, free_memory_bytes=11 * 2**30)["recompute"]
    assert line.gain == pytest.approx(5 / 20)  # 25 ms -> 20 ms
    assert line.mfu_after == pytest.approx(1.0)
    assert line.is_lower_bound
    assert line.text.startswith("activation checkpointing costs 20.0% of the step (20.0% of its FLOPs)")
    assert "memory now free: 11.0 GiB" in line.text
    assert line.text.endswith("at least 25.0% more throughput, MFU 80.0% -> 100.0%")


def test_short_attention_is_named_with_its_intensity_and_the_ridge() -> None:
    # 41 FLOP/byte: 0.41 of the time at peak, so 5.9 ms of 10 ms are lost below the ridge
    attention = op(
        "aten::_flash_attention_forward", module="layers.0.attn", model_flops=41 * 10 * MS_OF_BYTES,
        bytes_accessed=10 * MS_OF_BYTES,
    )  # fmt: skip
    line = advice_for(attention, step_ms=30)["products_below_ridge"]
    assert line.text.startswith("sequence too short: attention products at 41 FLOP/byte, ridge 100")
    assert "layers.0.attn" in line.text
    assert line.gain == pytest.approx(5.9 / (30 - 5.9))
    assert not line.is_lower_bound


def test_small_matrix_products_are_about_the_batch_and_not_about_the_sequence() -> None:
    line = advice_for(op(model_flops=10 * MS_OF_BYTES, bytes_accessed=5 * MS_OF_BYTES), step_ms=25)
    assert line["products_below_ridge"].text.startswith("batch too small: matrix products at 2 FLOP/byte, ridge 100")


def test_products_in_fp32_are_named_with_their_share_of_flops_and_of_time() -> None:
    # 1 ms of bf16 work in fp32 takes 10 ms: 1 of 21 of the FLOPs, 10 of 30 of the time
    slow = op(module="head", precision="fp32", model_flops=MS_OF_BF16)
    line = advice_for(slow, step_ms=36)["other_precision"]
    assert line.text.startswith("fp32 products are 5% of FLOPs and 33% of ideal time; run them in bf16")
    assert "head" in line.text
    assert line.gain == pytest.approx(9 / (36 - 9))


@pytest.mark.parametrize(
    ("field", "code", "words"),
    [
        ("data_wait_s", "data_wait", "waits 20.0% of the step for data"),
        ("h2d_copy_s", "host_to_device", "pin memory"),
        ("between_s", "between_steps", "callbacks and logging"),
    ],
)
def test_a_measured_wait_is_named_with_what_it_would_give_back(field: str, code: str, words: str) -> None:
    line = advice_for(step_ms=25, **{field: 5e-3})[code]  # type: ignore[arg-type]
    assert words in line.text
    assert line.gain == pytest.approx(5 / 20)


def test_fusion_is_advised_for_operators_without_products() -> None:
    add = op("aten::add", precision=None, bytes_accessed=MS_OF_BYTES)
    gelu = op("aten::gelu", precision=None, bytes_accessed=4 * MS_OF_BYTES)
    line = advice_for(add, gelu, step_ms=30)["memory_bound_operators"]
    assert "move 5 GB a step" in line.text
    assert "gelu and add" in line.text
    assert line.gain == pytest.approx(5 / 25)


def test_a_heavy_optimizer_is_named_and_a_teacher_is_not_called_one() -> None:
    adam = op("aten::_foreach_add_", Phase.OPTIMIZER, None, bytes_accessed=5 * MS_OF_BYTES)
    assert "fused=True" in advice_for(adam, step_ms=30)["optimizer_and_other"].text
    teacher = op(phase=Phase.OTHER, other_flops=5 * MS_OF_BF16, bytes_accessed=6 * MS_OF_BYTES)
    assert "optimizer_and_other" not in advice_for(adam, teacher, step_ms=40)


def test_the_remainder_is_told_as_a_multiple_of_the_ideal_time() -> None:
    line = advice_for(step_ms=50)["remainder"]
    assert "2.5x the ideal time" in line.text
    assert line.gain == pytest.approx(30 / 20)


def test_at_most_three_lines_largest_gain_first() -> None:
    lines = list(
        advice_for(
            op(phase=Phase.RECOMPUTE, recompute_flops=2 * MS_OF_BF16),
            op("aten::add", precision=None, bytes_accessed=3 * MS_OF_BYTES),
            step_ms=60,
            data_wait_s=10e-3,
            between_s=1e-3,
        ).values()
    )
    assert [line.code for line in lines] == ["remainder", "data_wait", "memory_bound_operators"]
    assert [line.gain for line in lines] == sorted((line.gain for line in lines), reverse=True)


def test_nothing_is_said_about_an_ideal_step_or_less_than_one_percent() -> None:
    assert advice_for(step_ms=20) == {}
    assert advice_for(op("aten::add", precision=None, bytes_accessed=MS_OF_BYTES // 10), step_ms=20.1) == {}


def test_a_model_slower_than_the_clock_never_promises_more_than_the_peak() -> None:
    line = advice_for(op("aten::add", precision=None, bytes_accessed=90 * MS_OF_BYTES), step_ms=40)
    assert line["memory_bound_operators"].mfu_after == pytest.approx(1.0)


def test_without_a_waterfall_there_is_no_advice() -> None:
    record = StepRecord(ops=(BASE,))
    window = StepWindow(first_step=1, last_step=1, steps=1, elapsed_s=1.0, wall_s=1.0)
    assert advise(record, None, waterfall(record, None, window)) == ()
