"""The waterfall adds up to the measured MFU, and an injected cause moves its own step by its own amount."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord, UnsupportedOp
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import step_roofline
from mfu_monitor.insights.waterfall import STEP_LABELS, Waterfall, waterfall
from mfu_monitor.monitor import Monitor
from mfu_monitor.timing.step_window import StepWindow

# Ridge 100 FLOP/byte in bf16, 10 in fp32; 1e9 bytes take 1 ms.
PEAK = DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 100e12, "fp32": 10e12}, bytes_per_s=1e12)
MS_OF_BF16 = 100 * 10**9  # FLOPs in one millisecond
MS_OF_BYTES = 10**9


def op(phase: Phase = Phase.FORWARD, precision: str | None = "bf16", **totals: int) -> OpRecord:
    name = "aten::mm" if precision else "aten::add"
    return OpRecord(op=name, phase=phase, precision=precision, totals=FlopTotals(**totals))


BASE = op(model_flops=4 * MS_OF_BF16, bytes_accessed=MS_OF_BYTES)  # 4 ms at peak, above the ridge


def window(milliseconds: float, steps: int = 1, **values: float) -> StepWindow:
    seconds = milliseconds * steps / 1e3
    return StepWindow(first_step=1, last_step=steps, steps=steps, elapsed_s=seconds, wall_s=seconds, **values)  # type: ignore[arg-type]


def milliseconds(result: Waterfall) -> dict[str, float]:
    return {step.name: round(step.seconds * 1e3, 9) for step in result.steps if abs(step.seconds) > 1e-12}


def test_an_ideal_step_has_nothing_to_explain() -> None:
    result = waterfall(StepRecord(ops=(BASE,)), PEAK, window(4))
    assert milliseconds(result) == {}
    assert result.mfu == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("injected", "name", "cost_ms"),
    [
        # 1 ms of FLOPs on 3 ms of bytes: 2 ms below the ridge (its own 1 ms is model work at peak)
        (op(model_flops=MS_OF_BF16, bytes_accessed=3 * MS_OF_BYTES), "products_below_ridge", 2.0),
        (op(precision=None, bytes_accessed=5 * MS_OF_BYTES), "memory_bound_operators", 5.0),
        # 1 ms of FLOPs in bf16 takes 10 ms in fp32
        (op(precision="fp32", model_flops=MS_OF_BF16), "other_precision", 9.0),
        (op(Phase.RECOMPUTE, recompute_flops=2 * MS_OF_BF16, bytes_accessed=MS_OF_BYTES), "recompute", 2.0),
        (op(Phase.RECOMPUTE, None, bytes_accessed=7 * MS_OF_BYTES), "recompute", 7.0),
        (op(Phase.BACKWARD, kernel_recompute_flops=3 * MS_OF_BF16), "kernel_recompute", 3.0),
        (op(Phase.OPTIMIZER, None, bytes_accessed=6 * MS_OF_BYTES), "optimizer_and_other", 6.0),
        (op(Phase.OPTIMIZER, optimizer_flops=2 * MS_OF_BF16), "optimizer_and_other", 2.0),
        (op(Phase.OTHER, other_flops=8 * MS_OF_BF16), "optimizer_and_other", 8.0),
        (op(other_flops=5 * MS_OF_BF16), "optimizer_and_other", 5.0),  # masked-out products of a dense kernel
    ],
)
def test_an_injected_cause_grows_its_own_step_and_no_other(injected: OpRecord, name: str, cost_ms: float) -> None:
    before = waterfall(StepRecord(ops=(BASE,)), PEAK, window(50))
    after = waterfall(StepRecord(ops=(BASE, injected)), PEAK, window(50 + cost_ms))
    changed = {**milliseconds(after)}
    own_ms = injected.totals.model_flops / MS_OF_BF16  # what is model work moves from the remainder to the MFU
    assert changed.pop("remainder") == pytest.approx(milliseconds(before)["remainder"] - own_ms)
    assert changed == {name: pytest.approx(cost_ms)}
    step = after.step(name)
    assert step is not None
    assert step.origin == "modelled"


@pytest.mark.parametrize(
    ("field", "name"),
    [("data_wait_s", "data_wait"), ("h2d_copy_s", "host_to_device"), ("between_s", "between_steps")],
)
def test_an_injected_wait_grows_its_own_step_by_exactly_that_time(field: str, name: str) -> None:
    # ten steps of 10 ms, then 3 ms more a step in one place
    result = waterfall(StepRecord(ops=(BASE,)), PEAK, window(13, steps=10, **{field: 0.030}))
    assert milliseconds(result) == {name: pytest.approx(3.0), "remainder": pytest.approx(6.0)}
    step = result.step(name)
    assert step is not None
    assert step.origin == "measured"
    assert step.share == pytest.approx(3 / 13)


def test_copies_inside_the_data_wait_are_counted_once() -> None:
    result = waterfall(StepRecord(ops=(BASE,)), PEAK, window(10, data_wait_s=3e-3, h2d_copy_s=1e-3))
    assert milliseconds(result) == {"data_wait": 2.0, "host_to_device": 1.0, "remainder": pytest.approx(3.0)}


@pytest.mark.parametrize("wait_s", [math.nan, math.inf, -0.001])
def test_a_wait_that_no_clock_can_have_read_is_left_out_and_said(wait_s: float) -> None:
    result = waterfall(StepRecord(ops=(BASE,)), PEAK, window(10, data_wait_s=wait_s))
    assert milliseconds(result) == {"remainder": pytest.approx(6.0)}
    assert any(f"data wait was given as {wait_s} s" in note for note in result.notes)


def test_a_peak_that_gives_no_finite_mfu_is_named_and_nothing_is_drawn() -> None:
    peak = DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 5e-324}, bytes_per_s=1e12)
    result = waterfall(StepRecord(ops=(BASE,)), peak, window(10))
    assert (result.mfu, result.steps) == (None, ())
    assert "correct the peak" in (result.reason or "")


def test_steps_come_in_the_order_of_the_chart() -> None:
    full = window(10, data_wait_s=1e-3, h2d_copy_s=1e-3, between_s=1e-3)
    result = waterfall(StepRecord(ops=(BASE,)), PEAK, full)
    assert [step.name for step in result.steps] == list(STEP_LABELS)
    assert all(step.label and step.origin in ("modelled", "measured") for step in result.steps)


_FLOPS = st.integers(0, 10**13)
_OPS = st.builds(
    OpRecord,
    op=st.just("aten::mm"),
    phase=st.sampled_from(Phase),
    precision=st.sampled_from(["bf16", "fp32", "fp64", None]),
    totals=st.builds(
        FlopTotals,
        model_flops=_FLOPS,
        recompute_flops=_FLOPS,
        kernel_recompute_flops=_FLOPS,
        optimizer_flops=_FLOPS,
        other_flops=_FLOPS,
        bytes_accessed=st.integers(0, 10**11),
    ),
)


@given(
    ops=st.lists(_OPS, max_size=6),
    elapsed_s=st.floats(1e-6, 1e3),
    steps=st.integers(1, 100),
    data_wait_s=st.none() | st.floats(0, 10) | st.sampled_from([math.nan, math.inf, -0.5]),
    model_flops=st.none() | st.integers(1, 10**14),
    bandwidth=st.none() | st.floats(1e9, 1e13),
)
def test_the_steps_add_up_to_the_measured_mfu_on_every_record(
    ops: list[OpRecord],
    elapsed_s: float,
    steps: int,
    data_wait_s: float | None,
    model_flops: int | None,
    bandwidth: float | None,
) -> None:
    record = StepRecord(ops=(BASE, *ops))
    timed = StepWindow(
        first_step=0, last_step=steps, steps=steps, elapsed_s=elapsed_s, wall_s=elapsed_s, data_wait_s=data_wait_s,
        model_flops=model_flops,
    )  # fmt: skip
    result = waterfall(record, dataclasses.replace(PEAK, bytes_per_s=bandwidth), timed)
    if result.mfu is None:
        assert result.reason is not None
        return
    assert result.step_time_s is not None
    total = result.mfu + sum(step.share for step in result.steps)
    scale = max(1.0, *(abs(step.share) for step in result.steps), result.mfu)
    assert abs(total - 1) <= 1e-9 * scale
    for step in result.steps:
        assert step.seconds >= 0 or step.note or abs(step.share) <= 1e-9  # never negative in silence
    assert sum(v for k, v in result.metrics().items()) == pytest.approx(total)


def as_counted(op: OpRecord, precision: str) -> OpRecord:
    """As the counter makes them: of a known precision, model FLOPs in forward and backward only."""
    is_model_work = op.phase in (Phase.FORWARD, Phase.BACKWARD)
    totals = op.totals if is_model_work else dataclasses.replace(op.totals, model_flops=0)
    return dataclasses.replace(op, precision=precision, totals=totals)


_KNOWN_OPS = st.builds(as_counted, _OPS, st.sampled_from(["bf16", "fp32"]))


@given(ops=st.lists(_KNOWN_OPS, max_size=6), slower=st.floats(1.0, 50.0))
def test_a_run_at_the_roofline_leaves_no_remainder_and_its_mfu_is_the_attainable_one(
    ops: list[OpRecord], slower: float
) -> None:
    """The two ways to the same time: operator by operator, and cause by cause."""
    record = StepRecord(ops=(BASE, *ops))
    roofline = step_roofline(record, PEAK)
    assert roofline.ideal_time_s is not None
    assert roofline.attainable_mfu is not None
    ideal = waterfall(record, PEAK, window(roofline.ideal_time_s * 1e3))
    (remainder,) = [step for step in ideal.steps if step.name == "remainder"]
    assert remainder.share == pytest.approx(0.0, abs=1e-9)
    assert ideal.mfu == pytest.approx(roofline.attainable_mfu, rel=1e-9)
    measured = waterfall(record, PEAK, window(roofline.ideal_time_s * 1e3 * slower))
    assert measured.mfu is not None
    assert measured.mfu <= roofline.attainable_mfu * (1 + 1e-9)
    if roofline.precision == "bf16":  # of two precisions the slower as the active one allows more than its peak
        assert roofline.attainable_mfu <= 1 + 1e-9


def test_the_bottom_is_the_mfu_of_the_window_where_its_steps_differ_from_the_counted_one() -> None:
    # two steps in 20 ms that hold three times the counted step's FLOPs together
    timed = window(10, steps=2, model_flops=12 * MS_OF_BF16)
    result = waterfall(StepRecord(ops=(BASE, op(precision=None, bytes_accessed=MS_OF_BYTES))), PEAK, timed)
    assert result.mfu == pytest.approx(12e-3 / 20e-3)
    assert milliseconds(result)["memory_bound_operators"] == pytest.approx(1.5)
    assert any("hold 1.5 times the counted step's FLOPs" in note for note in result.notes)


def test_an_ideal_slower_than_the_measured_step_is_said_and_not_hidden() -> None:
    record = StepRecord(ops=(BASE, op(precision=None, bytes_accessed=6 * MS_OF_BYTES)))
    remainder = waterfall(record, PEAK, window(8)).step("remainder")
    assert remainder is not None
    assert remainder.share == pytest.approx(-2 / 8)
    assert "1.25 times the measured time" in remainder.note
    assert "caches" in remainder.note


def test_a_faster_precision_is_a_gain_that_says_so() -> None:
    record = StepRecord(ops=(op(precision="fp32", model_flops=10 * MS_OF_BF16), op(model_flops=5 * MS_OF_BF16)))
    step = waterfall(record, PEAK, window(200)).step("other_precision")
    assert step is not None
    assert step.seconds == pytest.approx(5e-3 - 50e-3)
    assert "gain" in step.note


def test_without_bandwidth_memory_steps_are_left_out_and_named() -> None:
    peak = DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 100e12})
    result = waterfall(StepRecord(ops=(BASE,)), peak, window(10))
    assert result.step("products_below_ridge") is None
    assert result.step("memory_bound_operators") is None
    assert result.mfu == pytest.approx(0.4)
    assert any("bandwidth is unknown" in note for note in result.notes)


def test_products_of_an_unknown_peak_and_uncounted_work_are_named_in_the_notes() -> None:
    record = StepRecord(
        ops=(BASE, op(precision="fp64", model_flops=1)), unsupported_ops=(UnsupportedOp(op="mylib::kernel"),)
    )
    notes = " ".join(waterfall(record, PEAK, window(10)).notes)
    assert "no peak is known for fp64" in notes
    assert "could not be counted" in notes


@pytest.mark.parametrize(
    ("record", "peak", "timed", "words"),
    [
        (StepRecord(ops=(BASE,)), None, window(1), "peak of this device is unknown"),
        (StepRecord(), PEAK, window(1), "no model FLOPs were counted"),
        (StepRecord(ops=(BASE,)), PEAK, window(0), "no time was measured"),
        (StepRecord(ops=(BASE,)), PEAK, dataclasses.replace(window(1), invalid_reason="clock went back"), "clock"),
        (StepRecord(ops=(BASE,)), PEAK, dataclasses.replace(window(1), steps=0), "0 steps"),
        (StepRecord(ops=(op(precision="fp8", model_flops=1),)), PEAK, window(1), "fp8"),
    ],
)
def test_without_an_mfu_there_is_a_reason_and_no_metric(
    record: StepRecord, peak: DevicePeak | None, timed: StepWindow, words: str
) -> None:
    result = waterfall(record, peak, timed)
    assert result.steps == ()
    assert result.mfu is None
    assert result.metrics() == {}
    assert words in (result.reason or "")


def test_the_table_for_a_card_holds_every_step_its_origin_and_the_notes() -> None:
    record = StepRecord(ops=(BASE, op(precision=None, bytes_accessed=6 * MS_OF_BYTES)))
    lines = waterfall(record, PEAK, window(8)).markdown().splitlines()
    assert "| memory-bound operators | -75.0 | modelled |" in lines  # 6 of 8 ms
    assert "| measured remainder | +25.0 | measured |" in lines
    assert "| **MFU** | **50.0** | measured |" in lines
    assert lines[-1].startswith("- measured remainder: ideal time and measured waits are 1.25 times")
    assert waterfall(record, None, window(8)).markdown().startswith("No waterfall: the peak of this device is unknown")


# So much bandwidth that only products take time: what is left is arithmetic on their shapes.
COMPUTE_ONLY = dataclasses.replace(PEAK, bytes_per_s=1e30)


def test_counted_checkpointing_costs_exactly_the_products_that_are_rerun() -> None:
    tokens, width, hidden = 32, 256, 1024
    f = 2 * tokens * width * hidden  # one product of either Linear; the last of a block is not rerun
    block = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).bfloat16()
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounter(block) as plain:
        block(x).sum().backward()
    with FlopCounter(block) as rerun:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    before, after = (waterfall(counter.record, COMPUTE_ONLY, window(1)) for counter in (plain, rerun))
    assert before.mfu == after.mfu == pytest.approx(6 * f / (1e-3 * 100e12))
    grown = after.step("recompute"), before.step("recompute")
    assert grown[0] is not None
    assert grown[1] is not None
    assert grown[0].seconds - grown[1].seconds == pytest.approx(f / 100e12, rel=1e-6)


def test_a_counted_fp32_layer_costs_exactly_its_slower_peak() -> None:
    class HalfAndFull(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = nn.Linear(64, 256).bfloat16(), nn.Linear(256, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.wide(self.narrow(x).float())
            return y

    model = HalfAndFull()
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounter(model) as counter:
        model(x).sum().backward()
    step = waterfall(counter.record, COMPUTE_ONLY, window(1)).step("other_precision")
    in_fp32 = 3 * 2 * 8 * 256 * 16  # forward, input gradient, weight gradient
    assert step is not None
    assert step.seconds == pytest.approx(in_fp32 / 10e12 - in_fp32 / 100e12, rel=1e-6)


class TestInjectedOnAFakeClock:
    """Through the monitor, in steps of 1 s of which every second is known: the right step grows by just that."""

    PEAK = DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 1000.0, "fp32": 100.0}, bytes_per_s=1e30)

    def steps(self, bench: Any, ops: tuple[OpRecord, ...], wait_s: float = 0.0) -> dict[str, float]:
        bench.counters.records = [StepRecord(ops=ops, is_training=True)]
        monitor = bench.monitor(log_every_n_steps=5, peak=self.PEAK)
        for _ in range(11):
            bench.clock.advance(wait_s)
            bench.run(monitor, 1)
        monitor.close()
        (record,) = monitor.records.values()
        return milliseconds(waterfall(record, monitor.peak, monitor.reading.window))

    def test_nothing_injected(self, bench: Any) -> None:
        assert self.steps(bench, (op(model_flops=600),)) == {"remainder": pytest.approx(400.0)}

    def test_a_data_wait(self, bench: Any) -> None:
        found = self.steps(bench, (op(model_flops=600),), wait_s=0.25)
        assert found == {"data_wait": 250.0, "remainder": pytest.approx(400.0)}

    def test_recomputation(self, bench: Any) -> None:
        found = self.steps(bench, (op(model_flops=600), op(Phase.RECOMPUTE, recompute_flops=200)))
        assert found == {"recompute": 200.0, "remainder": pytest.approx(200.0)}

    def test_a_layer_in_fp32(self, bench: Any) -> None:
        found = self.steps(bench, (op(model_flops=570), op(precision="fp32", model_flops=30)))
        assert found == {"other_precision": pytest.approx(30 / 100 * 1e3 - 30.0), "remainder": pytest.approx(130.0)}


def run_for_real(model: nn.Module, x: torch.Tensor, forward: Callable[[], torch.Tensor]) -> Waterfall:
    """Twenty steps on this machine's CPU and clock; bytes cost nothing, so that what is left is arithmetic."""
    monitor = Monitor(model, peak={"bf16": 100e12, "fp32": 10e12, "bytes_per_s": 1e30}, log_every_n_steps=10)
    for _ in range(25):
        with monitor.step(x):
            forward().sum().backward()
    monitor.close()
    (record,) = monitor.records.values()
    assert monitor.reading is not None
    return waterfall(record, monitor.peak, monitor.reading.window)


def growth_s(before: Waterfall, after: Waterfall, name: str) -> float:
    steps = before.step(name), after.step(name)
    assert steps[0] is not None
    assert steps[1] is not None
    return steps[1].seconds - steps[0].seconds


@pytest.mark.filterwarnings("ignore::mfu_monitor.errors.MFUMonitorWarning")
def test_recomputation_injected_into_a_real_run_grows_its_step_by_the_products_rerun() -> None:
    tokens, width, hidden = 64, 128, 512
    block = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
    x = torch.randn(tokens, width, requires_grad=True)
    before = run_for_real(block, x, lambda: block(x))
    after = run_for_real(block, x, lambda: checkpoint(block, x, use_reentrant=False))
    assert growth_s(before, after, "recompute") == pytest.approx(2 * tokens * width * hidden / 10e12, rel=0.1)
    assert abs(growth_s(before, after, "other_precision")) < 1e-15


@pytest.mark.filterwarnings("ignore::mfu_monitor.errors.MFUMonitorWarning")
def test_an_fp32_layer_injected_into_a_real_run_grows_its_step_by_its_slower_peak() -> None:
    def run(head_dtype: torch.dtype) -> Waterfall:
        body, head = nn.Linear(64, 512).bfloat16(), nn.Linear(512, 16).to(head_dtype)
        x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
        return run_for_real(nn.Sequential(body, head), x, lambda: head(body(x).to(head_dtype)))

    in_fp32 = 3 * 2 * 8 * 512 * 16  # forward, input gradient, weight gradient
    expected_s = in_fp32 / 10e12 - in_fp32 / 100e12
    assert growth_s(run(torch.bfloat16), run(torch.float32), "other_precision") == pytest.approx(expected_s, rel=0.1)


def test_a_data_wait_injected_into_a_real_run_is_found_within_a_tenth() -> None:
    def run(wait_s: float) -> tuple[float, float]:
        """Seconds of data wait in a step by the waterfall, and by a stopwatch around the injected wait."""
        model, x = nn.Linear(256, 256), torch.ones(64, 256)
        monitor = Monitor(model, peak={"fp32": 1e12}, log_every_n_steps=20)
        waits: dict[int, float] = {}
        for i in range(50):
            begin = time.perf_counter()
            time.sleep(wait_s)
            waits[i] = time.perf_counter() - begin
            with monitor.step(x):
                model(x).sum().backward()
        monitor.close()
        (record,) = monitor.records.values()
        assert monitor.reading is not None
        window = monitor.reading.window
        step = waterfall(record, monitor.peak, window).step("data_wait")
        assert step is not None
        injected = [waits[i] for i in range(window.first_step, window.last_step + 1)]
        return step.seconds, sum(injected) / len(injected)

    without, with_wait = run(0.0), run(0.02)
    assert with_wait[0] - without[0] == pytest.approx(with_wait[1] - without[1], rel=0.1)
